// stub.c: a library with the API of RCCL and NCCL that does nothing: what is left of a call is the wrapper's cost.
//   cc -shared -fPIC -o libnccl.so.2 stub.c, and its folder in LD_LIBRARY_PATH
#include <stddef.h>

typedef struct {
    char internal[128];
} Id;

#define NOTHING(name, ...)      \
    int name(__VA_ARGS__) {     \
        return 0;               \
    }

static int there;

int ncclGetVersion(int *version) {
    *version = 22203;
    return 0;
}
const char *ncclGetErrorString(int code) { return code ? "stub" : "no error"; }
const char *ncclGetLastError(void *comm) { return comm ? "stub" : ""; }
int ncclCommInitRankConfig(void **comm, int world, Id id, int rank, void *config) {
    *comm = &there;
    return world > 0 && config && id.internal[0] == 0 ? 0 : rank;
}
int ncclCommSplit(void *comm, int color, int key, void **part, void *config) {
    *part = color < 0 || !config ? NULL : comm;
    return key - key;
}
int ncclCommCount(void *comm, int *count) {
    *count = 1;
    return comm ? 0 : 4;
}
int ncclCommUserRank(void *comm, int *rank) {
    *rank = 0;
    return comm ? 0 : 4;
}
int ncclCommGetAsyncError(void *comm, int *error) {
    *error = 0;
    return comm ? 0 : 4;
}
NOTHING(ncclGetUniqueId, Id *id)
NOTHING(ncclCommFinalize, void *comm)
NOTHING(ncclCommDestroy, void *comm)
NOTHING(ncclCommAbort, void *comm)
NOTHING(ncclGroupStart, void)
NOTHING(ncclGroupEnd, void)
NOTHING(ncclAllReduce, const void *x, void *y, size_t n, int data, int op, void *comm, void *stream)
NOTHING(ncclReduce, const void *x, void *y, size_t n, int data, int op, int root, void *comm, void *stream)
NOTHING(ncclBroadcast, const void *x, void *y, size_t n, int data, int root, void *comm, void *stream)
NOTHING(ncclAllGather, const void *x, void *y, size_t n, int data, void *comm, void *stream)
NOTHING(ncclReduceScatter, const void *x, void *y, size_t n, int data, int op, void *comm, void *stream)
NOTHING(ncclSend, const void *x, size_t n, int data, int peer, void *comm, void *stream)
NOTHING(ncclRecv, void *y, size_t n, int data, int peer, void *comm, void *stream)
NOTHING(ncclRedOpCreatePreMulSum, int *op, void *scalar, int data, int residence, void *comm)
NOTHING(ncclRedOpDestroy, int op, void *comm)
