// Each block adds up its slice; the last block of a tile to draw a ticket adds up the slices.
#define AGENT __HIP_MEMORY_SCOPE_AGENT
KERNEL void split(const float *x, float *partial, u32 *tickets, float *y, u32 *winner, int n, int slices) {
    __shared__ u32 last;
    u32 tile = BID / slices, slice = BID % slices;
    float sum = 0;
    for (int i = 0; i < n; i++) sum += x[(BID * n + i) * 64 + TID];
    partial[BID * 64 + TID] = sum;
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
    BARRIER();
    if (TID == 0) last = __hip_atomic_fetch_add(&tickets[tile], 1, __ATOMIC_RELAXED, AGENT) == slices - 1;
    BARRIER();
    if (!last) return;
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
    float total = 0;
    for (int s = 0; s < slices; s++) total += partial[(tile * slices + s) * 64 + TID];
    y[tile * 64 + TID] = total;
    if (TID == 0) winner[tile] = slice;
}
