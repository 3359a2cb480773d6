// Kernels for the tests of the module API.
#define GLOBAL extern "C" __attribute__((global))

extern "C" {
__attribute__((device)) float offset[2] = {0.0f, 100.0f};
}

GLOBAL void saxpy(const float *x, float *y, float a, int n) {
    int i = __builtin_amdgcn_workgroup_id_x() * __builtin_amdgcn_workgroup_size_x() + __builtin_amdgcn_workitem_id_x();
    if (i < n) y[i] = a * x[i] + y[i] + offset[0];
}

// Reverses a block of ints in dynamic LDS.
GLOBAL void reverse(int *data) {
    extern __attribute__((shared)) int tile[];
    int t = __builtin_amdgcn_workitem_id_x(), n = __builtin_amdgcn_workgroup_size_x();
    tile[t] = data[t];
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
    data[t] = tile[n - 1 - t];
}

GLOBAL void nothing() {}

GLOBAL void poke(int *at) { *at = 42; }

GLOBAL void peek(int *to, const int *from) { *to = *from; }

// Writes 1, waits for 2 and answers 3.
GLOBAL void answer(int *at) {
    __hip_atomic_store(at, 1, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
    while (__hip_atomic_load(at, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM) != 2) {}
    __hip_atomic_store(at, 3, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}

GLOBAL void trap() { __builtin_trap(); }

GLOBAL void spin(volatile int *flag) {
    while (*flag == 0) {}
}

GLOBAL __attribute__((amdgpu_flat_work_group_size(64, 64))) void only_64(int *at) { *at = 1; }

__attribute__((device)) int table[4] = {1, 2, 3, 4};
extern "C" {
__attribute__((managed)) int count = 10;
__attribute__((managed)) int *entry = table + 2;
__attribute__((managed)) double sums[100];
}

GLOBAL void managed(int *old) {
    old[0] = count++;
    old[1] = *entry;
    sums[99] += 0.5;
}
