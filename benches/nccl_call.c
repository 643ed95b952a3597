/* Loops over NCCL calls that need no synchronisation, for test_shim_nccl.py. Built as a library that also plays the
 * session owner, so that what is timed is the NCCL library alone. */
#include "../shim/nccl/tests/c/nccl_api.h"
#include "../shim/nccl/tests/c/session.h"

#include <pthread.h>

#define MANY 8

static ncclComm_t comm;
static ncclComm_t comms[MANY][MANY];

/* Makes the communicators; 0 or an NCCL error. */
EXPORTED int bench_setup(int nranks, int rank) {
    ncclUniqueId id;
    int result = ncclGetUniqueId(&id);
    if (!result) result = ncclCommInitRank(&comm, nranks, id, rank);
    for (int i = 0; i < MANY * MANY && !result; i++) result = ncclCommInitRank(&comms[0][i], nranks, id, rank);
    return result;
}

/* One function over and over, by its number in test_shim_nccl.py. */
EXPORTED int bench_function(int which, long calls, size_t count) {
    void *a = prism_test_arena ? prism_test_arena : prism_test_alloc(ARENA_BYTES);
    cudaStream_t stream = (cudaStream_t)7;
    ncclDataType_t type = ncclBfloat16;
    int value;
    for (long i = 0; i < calls; i++) {
        int result = ncclInternalError;
        switch (which) {
        case 0: result = ncclAllGather(a, a, count, type, comm, stream); break;
        case 1: result = ncclReduceScatter(a, a, count, type, ncclSum, comm, stream); break;
        case 2: result = ncclBroadcast(a, a, count, type, 0, comm, stream); break;
        case 3: result = ncclReduce(a, a, count, type, ncclSum, 0, comm, stream); break;
        case 4: result = ncclAlltoAll(a, a, count, type, comm, stream); break;
        case 5: result = ncclSend(a, count, type, 1, comm, stream); break;
        case 6: result = ncclRecv(a, count, type, 1, comm, stream); break;
        case 7: result = ncclCommGetAsyncError(comm, &value); break;
        case 8: result = ncclCommCount(comm, &value); break;
        case 9:
            result = ncclGroupStart();
            if (!result) result = ncclGroupEnd();
            break;
        }
        if (result) return result;
    }
    return 0;
}

/* A group of 64 sends. */
EXPORTED int bench_sends(long calls, size_t count) {
    void *buffer = prism_test_arena ? prism_test_arena : prism_test_alloc(ARENA_BYTES);
    for (long i = 0; i < calls; i++) {
        int result = ncclGroupStart();
        for (int k = 0; k < 64 && !result; k++) result = ncclSend(buffer, count, ncclBfloat16, 1 + k % 7, comm, (cudaStream_t)7);
        int end = ncclGroupEnd();
        if (result || end) return result ? result : end;
    }
    return 0;
}

typedef struct {
    ncclComm_t *comms;
    long calls;
    size_t count;
    int result;
} Thread;

static void *all_reduces(void *argument) {
    Thread *thread = argument;
    for (long i = 0; i < thread->calls && !thread->result; i++)
        thread->result = ncclAllReduce(NULL, NULL, thread->count, ncclFloat32, ncclMax, thread->comms[i % MANY], NULL);
    return NULL;
}

/* Eight threads with eight communicators each. */
EXPORTED int bench_threads(long calls, size_t count) {
    pthread_t ids[MANY];
    Thread threads[MANY];
    int result = 0;
    for (int i = 0; i < MANY; i++) {
        threads[i] = (Thread){comms[i], calls, count, 0};
        if (pthread_create(&ids[i], NULL, all_reduces, &threads[i])) return ncclSystemError;
    }
    for (int i = 0; i < MANY; i++) {
        pthread_join(ids[i], NULL);
        if (threads[i].result) result = threads[i].result;
    }
    return result;
}

EXPORTED int bench_all_reduce(long calls, size_t count) {
    void *buffer = prism_test_arena ? prism_test_arena : prism_test_alloc(ARENA_BYTES);
    for (long i = 0; i < calls; i++) {
        int result = ncclAllReduce(buffer, buffer, count, ncclFloat32, ncclMax, comm, (cudaStream_t)7);
        if (result) return result;
    }
    return 0;
}

/* One group of a send and a receive, as a pipeline stage makes it. */
EXPORTED int bench_send_recv(long calls, size_t count) {
    void *buffer = prism_test_arena ? prism_test_arena : prism_test_alloc(ARENA_BYTES);
    for (long i = 0; i < calls; i++) {
        int result = ncclGroupStart();
        if (!result) result = ncclSend(buffer, count, ncclBfloat16, 1, comm, (cudaStream_t)7);
        if (!result) result = ncclRecv(buffer, count, ncclBfloat16, 2, comm, (cudaStream_t)7);
        int end = ncclGroupEnd();
        if (result || end) return result ? result : end;
    }
    return 0;
}
