// A program of RCCL: ranks that are threads, devices of one thread in groups, or processes. The declarations are those of the
// published headers.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct ncclComm *ncclComm_t;
typedef void *hipStream_t;
typedef struct {
    char internal[128];
} ncclUniqueId;
enum { ncclInt32 = 2, ncclFloat32 = 7, ncclBfloat16 = 9 };
enum { ncclSum = 0, ncclMax = 2, ncclAvg = 4 };
enum { ncclInvalidArgument = 4, ncclInvalidUsage = 5, ncclRemoteError = 6 };

int ncclGetVersion(int *);
int ncclGetUniqueId(ncclUniqueId *);
int ncclCommInitRank(ncclComm_t *, int, ncclUniqueId, int);
int ncclCommInitAll(ncclComm_t *, int, const int *);
int ncclCommSplit(ncclComm_t, int, int, ncclComm_t *, void *);
int ncclCommDestroy(ncclComm_t);
int ncclCommAbort(ncclComm_t);
int ncclCommCount(ncclComm_t, int *);
int ncclCommUserRank(ncclComm_t, int *);
int ncclCommCuDevice(ncclComm_t, int *);
int ncclCommGetAsyncError(ncclComm_t, int *);
const char *ncclGetLastError(ncclComm_t);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclRedOpCreatePreMulSum(int *, void *, int, int, ncclComm_t);
int ncclRedOpDestroy(int, ncclComm_t);
int ncclAllReduce(const void *, void *, size_t, int, int, ncclComm_t, hipStream_t);
int ncclReduce(const void *, void *, size_t, int, int, int, ncclComm_t, hipStream_t);
int ncclBroadcast(const void *, void *, size_t, int, int, ncclComm_t, hipStream_t);
int ncclAllGather(const void *, void *, size_t, int, ncclComm_t, hipStream_t);
int ncclReduceScatter(const void *, void *, size_t, int, int, ncclComm_t, hipStream_t);
int ncclSend(const void *, size_t, int, int, ncclComm_t, hipStream_t);
int ncclRecv(void *, size_t, int, int, ncclComm_t, hipStream_t);
int hipSetDevice(int);
int hipMalloc(void **, size_t);
int hipFree(void *);
int hipMemcpy(void *, const void *, size_t, int);
int hipStreamCreate(hipStream_t *);
int hipStreamSynchronize(hipStream_t);

#define CHECK(call)                                                              \
    do {                                                                         \
        int code_ = (call);                                                      \
        if (code_ != 0) {                                                        \
            fprintf(stderr, "%s:%d: %s gives %d\n", __FILE__, __LINE__, #call, code_); \
            exit(1);                                                             \
        }                                                                        \
    } while (0)
#define EXPECT(condition)                                                        \
    do {                                                                         \
        if (!(condition)) {                                                      \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);      \
            exit(1);                                                             \
        }                                                                        \
    } while (0)

enum { N = 5, MOST = 8, DEFAULT = 4 };

static int world;
static const char *mode;
static ncclUniqueId id;

typedef struct {
    int rank;
    ncclComm_t comm;
    hipStream_t stream;
    float *x, *y;
} Rank;

// x[i] = 10 rank + i, on the rank's device.
static void open_rank(Rank *r, int rank) {
    r->rank = rank;
    CHECK(hipSetDevice(rank));
    CHECK(hipStreamCreate(&r->stream));
    CHECK(hipMalloc((void **)&r->x, MOST * N * sizeof(float)));
    CHECK(hipMalloc((void **)&r->y, MOST * N * sizeof(float)));
    float x[MOST * N];
    for (int i = 0; i < MOST * N; i++) x[i] = 10 * rank + i;
    CHECK(hipMemcpy(r->x, x, sizeof(x), DEFAULT));
}

static float result(const Rank *r, int i) {
    float y[MOST * N];
    CHECK(hipStreamSynchronize(r->stream));
    CHECK(hipMemcpy(y, r->y, sizeof(y), DEFAULT));
    return y[i];
}

// Sum of 10 r over all ranks.
static float tens(void) { return 5.0f * world * (world - 1); }

static void check_sums(const Rank *r) {
    for (int i = 0; i < N; i++) EXPECT(result(r, i) == tens() + world * i);
}

static void rank_calls(Rank *r) {
    int value;
    CHECK(ncclCommCount(r->comm, &value));
    EXPECT(value == world);
    CHECK(ncclCommUserRank(r->comm, &value));
    EXPECT(value == r->rank);
    CHECK(ncclCommCuDevice(r->comm, &value));
    EXPECT(value == r->rank);

    CHECK(ncclAllReduce(r->x, r->y, N, ncclFloat32, ncclSum, r->comm, r->stream));
    check_sums(r);
    CHECK(ncclReduceScatter(r->x, r->y, N, ncclFloat32, ncclAvg, r->comm, r->stream));
    EXPECT(result(r, 1) == tens() / world + N * r->rank + 1);
    CHECK(ncclAllGather(r->x, r->y, N, ncclFloat32, r->comm, r->stream));
    EXPECT(result(r, N * (world - 1) + 2) == 10 * (world - 1) + 2);
    CHECK(ncclBroadcast(r->x, r->y, N, ncclFloat32, world - 1, r->comm, r->stream));
    EXPECT(result(r, 3) == 10 * (world - 1) + 3);
    CHECK(ncclReduce(r->x, r->y, N, ncclFloat32, ncclMax, 0, r->comm, r->stream));
    EXPECT(result(r, 4) == 10 * (world - 1) + 4);

    // A ring.
    CHECK(ncclGroupStart());
    CHECK(ncclSend(r->x, N, ncclFloat32, (r->rank + 1) % world, r->comm, r->stream));
    CHECK(ncclRecv(r->y, N, ncclFloat32, (r->rank + world - 1) % world, r->comm, r->stream));
    CHECK(ncclGroupEnd());
    EXPECT(result(r, 0) == 10 * ((r->rank + world - 1) % world));

    int op;
    float half = 0.5f;
    CHECK(ncclRedOpCreatePreMulSum(&op, &half, ncclFloat32, 1, r->comm));
    CHECK(ncclAllReduce(r->x, r->y, N, ncclFloat32, op, r->comm, r->stream));
    CHECK(ncclRedOpDestroy(op, r->comm));
    EXPECT(result(r, 2) == 0.5f * (tens() + 2 * world));

    ncclComm_t part;
    CHECK(ncclCommSplit(r->comm, r->rank % 2, -r->rank, &part, NULL));
    CHECK(ncclCommCount(part, &value));
    EXPECT(value == (world + 1 - r->rank % 2) / 2);
    CHECK(ncclAllGather(r->x, r->y, 1, ncclFloat32, part, r->stream));
    int last = r->rank % 2;
    EXPECT(result(r, value - 1) == 10 * last);
    CHECK(ncclCommDestroy(part));
    CHECK(ncclCommGetAsyncError(r->comm, &value));
    EXPECT(value == 0);
    EXPECT(ncclSend(r->x, N, ncclFloat32, world, r->comm, r->stream) == ncclInvalidArgument);
    EXPECT(ncclAllGather(r->x, r->y, N, 99, r->comm, r->stream) == ncclInvalidArgument);
}

static void *rank_thread(void *argument) {
    Rank r;
    open_rank(&r, (int)(intptr_t)argument);
    CHECK(ncclCommInitRank(&r.comm, world, id, r.rank));
    if (strcmp(mode, "mismatch") == 0) {
        size_t count = 4 + r.rank;
        EXPECT(ncclAllReduce(r.x, r.y, count, ncclFloat32, ncclSum, r.comm, r.stream) == ncclInvalidUsage);
        CHECK(ncclAllReduce(r.x, r.y, N, ncclFloat32, ncclSum, r.comm, r.stream));
        check_sums(&r);
    } else if (strcmp(mode, "missing") == 0) {
        if (r.rank == world - 1) {
            sleep(1);
        } else {
            int error = 0;
            EXPECT(ncclAllReduce(r.x, r.y, N, ncclFloat32, ncclSum, r.comm, r.stream) == ncclRemoteError);
            CHECK(ncclCommGetAsyncError(r.comm, &error));
            EXPECT(error == ncclRemoteError && strstr(ncclGetLastError(r.comm), "did not call"));
        }
        CHECK(ncclCommAbort(r.comm));
        EXPECT(ncclCommAbort(r.comm) == ncclInvalidArgument);
        return NULL;
    } else if (strcmp(mode, "abort") == 0) {
        if (r.rank == 1) {
            usleep(20000);
            CHECK(ncclCommAbort(r.comm));
            return NULL;
        }
        EXPECT(ncclAllReduce(r.x, r.y, N, ncclFloat32, ncclSum, r.comm, r.stream) == ncclRemoteError);
    } else {
        rank_calls(&r);
    }
    CHECK(ncclCommDestroy(r.comm));
    CHECK(hipFree(r.x));
    CHECK(hipFree(r.y));
    return NULL;
}

static void one_thread(void) {
    Rank ranks[MOST];
    ncclComm_t comms[MOST];
    for (int r = 0; r < world; r++) open_rank(&ranks[r], r);
    CHECK(ncclCommInitAll(comms, world, NULL));
    for (int r = 0; r < world; r++) ranks[r].comm = comms[r];
    CHECK(ncclGroupStart());
    for (int r = 0; r < world; r++)
        CHECK(ncclAllReduce(ranks[r].x, ranks[r].y, N, ncclFloat32, ncclSum, ranks[r].comm, ranks[r].stream));
    CHECK(ncclGroupEnd());
    for (int r = 0; r < world; r++) check_sums(&ranks[r]);
    for (int r = 0; r < world; r++) CHECK(ncclCommDestroy(ranks[r].comm));
}

// Each process has the devices of its own: the number of the device is that of the rank.
static void processes(void) {
    int pipes[MOST][2];
    pid_t children[MOST];
    for (int r = 1; r < world; r++) {
        EXPECT(pipe(pipes[r]) == 0);
        children[r] = fork();
        EXPECT(children[r] >= 0);
        if (children[r] == 0) {
            EXPECT(read(pipes[r][0], &id, sizeof(id)) == sizeof(id));
            rank_thread((void *)(intptr_t)r);
            exit(0);
        }
    }
    CHECK(ncclGetUniqueId(&id));
    for (int r = 1; r < world; r++) EXPECT(write(pipes[r][1], &id, sizeof(id)) == sizeof(id));
    rank_thread((void *)0);
    for (int r = 1; r < world; r++) {
        int status;
        EXPECT(waitpid(children[r], &status, 0) == children[r] && status == 0);
    }
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    mode = argv[1];
    world = atoi(argv[2]);
    int version;
    if (strcmp(mode, "processes") == 0) {
        processes();
    } else if (strcmp(mode, "group") == 0) {
        one_thread();
    } else {
        CHECK(ncclGetVersion(&version));
        EXPECT(version >= 21800);
        CHECK(ncclGetUniqueId(&id));
        pthread_t threads[MOST];
        for (int r = 0; r < world; r++)
            EXPECT(pthread_create(&threads[r], NULL, rank_thread, (void *)(intptr_t)r) == 0);
        for (int r = 0; r < world; r++) pthread_join(threads[r], NULL);
    }
    printf("ok\n");
    return 0;
}
