// probe.hip: kernels that try the launch path. Self-contained: the device headers have tests of their own.
#define GLOBAL extern "C" __attribute__((global, amdgpu_flat_work_group_size(64, 64))) void

typedef unsigned int u32;
typedef unsigned long u64;
typedef __attribute__((address_space(1))) float *Floats;
typedef volatile __attribute__((address_space(1))) float *VolatileFloats;

struct Tensor {
    u64 data;
    u32 shape[4];
    long strides[4];
    __attribute__((device)) Floats at(u64 i) const { return (Floats)data + i * strides[3]; }
};

struct Params {
    Tensor x, y;
    float a;
    u32 pad;
};

__attribute__((device)) inline u32 index() {
    return __builtin_amdgcn_workgroup_id_x() * 64 + __builtin_amdgcn_workitem_id_x();
}

// y[i] = a * x[i]
GLOBAL scale(const Params p) {
    const u32 i = index();
    if (i < p.y.shape[3]) *p.y.at(i) = p.a * *p.x.at(i);
}

// As scale, and reads one element too many.
GLOBAL overrun(const Params p) {
    const u32 i = index();
    if (i <= p.y.shape[3]) {
        const float x = *(VolatileFloats)p.x.at(i);  // one past the end in the last lane
        if (i < p.y.shape[3]) *p.y.at(i) = p.a * x;
    }
}

// y[i] = sizes that the launch gave: i = 0 grid in x, 1 block in x, 2 dynamic LDS word written and read back.
extern __attribute__((shared)) u32 lds[];
GLOBAL sizes(const Params p) {
    const u32 lane = __builtin_amdgcn_workitem_id_x();
    lds[lane] = lane + 7;
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
    if (lane == 0) {
        *p.y.at(0) = __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x();
        *p.y.at(1) = __builtin_amdgcn_workgroup_size_x();
        *p.y.at(2) = lds[63];
    }
}

// Breaks the contract: two arguments.
GLOBAL two_arguments(const Params p, float b) {
    if (index() == 0) *p.y.at(0) = b;
}

// Breaks the contract: a pointer.
GLOBAL pointer(float *y) {
    if (index() == 0) *y = 1;
}
