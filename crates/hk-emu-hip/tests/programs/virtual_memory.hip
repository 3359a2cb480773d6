// Virtual memory management: two mappings of one allocation, a range of two allocations, access by device, memory by descriptor. Declares
// what it needs of HIP, as embedded.hip does.
extern "C" int printf(const char *, ...);

#define __global__ __attribute__((global))

using size_t = decltype(sizeof 0);
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
typedef enum hipError_t {
    hipSuccess,
    hipErrorInvalidValue = 1,
    hipErrorOutOfMemory = 2,
    hipErrorHostMemoryAlreadyRegistered = 712
} hipError_t;
typedef struct ihipStream_t *hipStream_t;
typedef struct ihipMemGenericAllocationHandle *Handle;
struct Location {
    int type, id;
};
struct Access {
    Location location;
    int flags;
};
struct Properties {
    int type, handleType;
    Location location;
    void *win32;
    unsigned char compression, rdma;
    unsigned short usage;
};
extern "C" {
hipError_t hipMemGetAllocationGranularity(size_t *, const Properties *, int);
hipError_t hipMemAddressReserve(void **, size_t, size_t, void *, unsigned long long);
hipError_t hipMemAddressFree(void *, size_t);
hipError_t hipMemCreate(Handle *, size_t, const Properties *, unsigned long long);
hipError_t hipMemRelease(Handle);
hipError_t hipMemRetainAllocationHandle(Handle *, void *);
hipError_t hipMemMap(void *, size_t, size_t, Handle, unsigned long long);
hipError_t hipMemUnmap(void *, size_t);
hipError_t hipMemSetAccess(void *, size_t, const Access *, size_t);
hipError_t hipMemGetAccess(unsigned long long *, const Location *, void *);
hipError_t hipMemExportToShareableHandle(void *, Handle, int, unsigned long long);
hipError_t hipMemImportFromShareableHandle(Handle *, void *, int);
hipError_t hipMemGetInfo(size_t *, size_t *);
hipError_t hipMemcpy(void *, const void *, size_t, int);
hipError_t hipDeviceSynchronize();
hipError_t hipSetDevice(int);
hipError_t hipHostRegister(void *, size_t, unsigned);
hipError_t hipPointerGetAttribute(void *, int, void *);
hipError_t hipLaunchKernel(const void *, dim3, dim3, void **, size_t, hipStream_t);
hipError_t __hipPushCallConfiguration(dim3, dim3, size_t, hipStream_t);
hipError_t __hipPopCallConfiguration(dim3 *, dim3 *, size_t *, hipStream_t *);
}

#define WANT(code, call)                                                                     \
    do {                                                                                     \
        int got = (call);                                                                    \
        if (got != (code)) return printf("%s gives %d, line %d\n", #call, got, __LINE__), 1; \
    } while (0)
#define CHECK(call) WANT(0, call)

__global__ void add(int *y, int n, int value) {
    int i = __builtin_amdgcn_workgroup_id_x() * 256 + __builtin_amdgcn_workitem_id_x();
    if (i < n) y[i] += value;
}

static int host[4096], zero[4096];

int main() {
    Properties properties = {1, 1, {1, 0}, nullptr, 0, 0, 0};
    size_t page, before, after, total;
    CHECK(hipMemGetAllocationGranularity(&page, &properties, 0));
    const int n = 2 * page / sizeof(int);
    CHECK(hipMemGetInfo(&before, &total));

    // A range of two allocations, and the first one again at an address of its own.
    Handle parts[2];
    void *range, *again;
    Access mine = {{1, 0}, 3}, other = {{1, 1}, 3}, none = {{1, 1}, 0};
    for (Handle &part : parts) CHECK(hipMemCreate(&part, page, &properties, 0));
    CHECK(hipMemGetInfo(&after, &total));
    if (before - after != 2 * page) return printf("%zu bytes used\n", before - after), 1;
    CHECK(hipMemAddressReserve(&range, 2 * page, 0, nullptr, 0));
    CHECK(hipMemAddressReserve(&again, page, 1 << 21, nullptr, 0));
    if ((size_t)again % (1 << 21)) return printf("not aligned\n"), 1;
    for (int i = 0; i < 2; i++) CHECK(hipMemMap((char *)range + i * page, page, 0, parts[i], 0));
    CHECK(hipMemMap(again, page, 0, parts[0], 0));
    CHECK(hipMemSetAccess(range, 2 * page, &mine, 1));
    CHECK(hipMemSetAccess(again, page, &mine, 1));
    CHECK(hipMemcpy(range, zero, 2 * page, 1));
    int *y = (int *)range, *first = (int *)again;
    add<<<n / 256, 256, 0, nullptr>>>(y, n, 3);
    add<<<n / 512, 256, 0, nullptr>>>(first, n / 2, 4);
    CHECK(hipMemcpy(host, range, 2 * page, 2));
    for (int i = 0; i < n; i++)
        if (host[i] != (i < n / 2 ? 7 : 3)) return printf("%d: %d\n", i, host[i]), 1;

    // A copy may cross from one mapping to the next, not past the last. A pointer names its mapping, which is device memory.
    char *middle = (char *)range + page / 2;
    CHECK(hipMemcpy(host, middle, page, 2));
    if (host[n / 4 - 1] != 7 || host[n / 4] != 3) return printf("%d, %d\n", host[n / 4 - 1], host[n / 4]), 1;
    WANT(hipErrorInvalidValue, hipMemcpy(host, middle, 2 * page, 2));
    WANT(hipErrorInvalidValue, hipMemUnmap(middle, page));
    WANT(hipErrorHostMemoryAlreadyRegistered, hipHostRegister(middle, 4, 0));
    size_t size;
    void *base;
    int device, kind;
    CHECK(hipPointerGetAttribute(&base, 11, middle));
    CHECK(hipPointerGetAttribute(&size, 12, middle));
    CHECK(hipPointerGetAttribute(&device, 9, middle));
    CHECK(hipPointerGetAttribute(&kind, 2, middle));
    if (base != range || size != page || device != 0 || kind != 2)
        return printf("%p, %zu bytes, device %d, kind %d\n", base, size, device, kind), 1;
    WANT(hipErrorInvalidValue, hipPointerGetAttribute(&base, 4, middle));  // no host pointer

    // Another device has what it is given access to.
    unsigned long long flags;
    CHECK(hipMemGetAccess(&flags, &other.location, range));
    if (flags != 0) return printf("access %llu\n", flags), 1;
    CHECK(hipMemSetAccess(range, 2 * page, &other, 1));
    CHECK(hipMemGetAccess(&flags, &other.location, (char *)range + page));
    if (flags != 3) return printf("access %llu\n", flags), 1;
    CHECK(hipSetDevice(1));
    add<<<n / 256, 256, 0, nullptr>>>(y, n, 5);
    CHECK(hipDeviceSynchronize());
    CHECK(hipMemSetAccess(range, 2 * page, &none, 1));
    CHECK(hipSetDevice(0));
    CHECK(hipMemcpy(host, again, page, 2));
    for (int i = 0; i < n / 2; i++)
        if (host[i] != 12) return printf("%d: %d\n", i, host[i]), 1;

    // A handle that is released lives on in its mappings; a copy of it by descriptor is the same memory.
    int descriptor;
    Handle found, copy;
    CHECK(hipMemRelease(parts[1]));
    WANT(hipErrorInvalidValue, hipMemExportToShareableHandle(&descriptor, parts[1], 1, 0));
    CHECK(hipMemRetainAllocationHandle(&found, (char *)range + page));
    if (found != parts[1]) return printf("another handle\n"), 1;
    CHECK(hipMemExportToShareableHandle(&descriptor, found, 1, 0));
    CHECK(hipMemImportFromShareableHandle(&copy, (void *)(size_t)descriptor, 1));
    WANT(hipErrorInvalidValue, hipMemMap(again, page, 0, copy, 0));
    WANT(hipErrorInvalidValue, hipMemAddressFree(again, page));
    CHECK(hipMemUnmap(again, page));
    CHECK(hipMemMap(again, page, 0, copy, 0));
    WANT(hipErrorInvalidValue, hipMemcpy(host, again, page, 2));
    CHECK(hipMemSetAccess(again, page, &mine, 1));
    CHECK(hipMemcpy(host, again, page, 2));
    for (int i = 0; i < n / 2; i++)
        if (host[i] != 8) return printf("%d: %d\n", i, host[i]), 1;

    // Everything goes back.
    Handle no;
    void *nowhere;
    WANT(hipErrorInvalidValue, hipMemImportFromShareableHandle(&no, (void *)1, 1));
    WANT(hipErrorInvalidValue, hipMemUnmap(range, page / 2));
    WANT(hipErrorOutOfMemory, hipMemAddressReserve(&nowhere, page - 1, 0, nullptr, 0));
    CHECK(hipMemUnmap(range, 2 * page));
    WANT(hipErrorInvalidValue, hipMemcpy(host, range, page, 2));
    CHECK(hipMemAddressFree(range, 2 * page));
    CHECK(hipMemRelease(parts[0]));
    WANT(hipErrorInvalidValue, hipMemRelease(parts[0]));
    CHECK(hipMemRelease(found));
    CHECK(hipMemGetInfo(&after, &total));
    if (before - after != page)
        return printf("%zu bytes left\n", before - after), 1;  // those of `copy`, which is mapped
    printf("ok\n");
    return 0;
}
