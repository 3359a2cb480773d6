// malloc and free of device code, with ROCm's headers and device libraries.
#include <hip/hip_runtime.h>
#include <stdio.h>

#define CHECK(call) \
    if (int code = (call)) return printf("%s gives %d, line %d\n", #call, code, __LINE__), 1

constexpr int kThreads = 256, kBlocks = 4, kLarge = 100'000;

// A small block for each thread, and a large one for each block of threads.
__global__ void allocate(int **lists) {
    int thread = blockIdx.x * blockDim.x + threadIdx.x;
    int count = threadIdx.x == 0 ? kLarge : threadIdx.x % 7 + 1;
    int *list = (int *)malloc(count * sizeof(int));
    if (list != nullptr)
        for (int i = 0; i < count; i += count / 8 + 1) list[i] = thread + i;
    lists[thread] = list;
}

// In another launch: they are still there, and apart.
__global__ void release(int **lists, int *wrong) {
    int thread = blockIdx.x * blockDim.x + threadIdx.x;
    int count = threadIdx.x == 0 ? kLarge : threadIdx.x % 7 + 1;
    int *list = lists[thread];
    bool right = list != nullptr;
    for (int i = 0; right && i < count; i += count / 8 + 1) right = list[i] == thread + i;
    if (!right) atomicAdd(wrong, 1);
    free(list);
}

int main() {
    int **lists, *wrong, count = 0;
    CHECK(hipMalloc((void **)&lists, kThreads * kBlocks * sizeof *lists));
    CHECK(hipMalloc((void **)&wrong, sizeof *wrong));
    CHECK(hipMemset(wrong, 0, sizeof *wrong));
    for (int round = 0; round < 3; round++) {
        allocate<<<kBlocks, kThreads>>>(lists);
        release<<<kBlocks, kThreads>>>(lists, wrong);
    }
    CHECK(hipMemcpy(&count, wrong, sizeof count, hipMemcpyDeviceToHost));
    return printf("%d wrong\n", count), 0;
}
