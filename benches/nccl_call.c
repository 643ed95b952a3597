/* Loops over NCCL calls that need no synchronisation, for test_shim_nccl.py. Built as a library that also plays the
 * session owner, so that what is timed is the NCCL library alone. */
#include "../shim/nccl/tests/c/nccl_api.h"
#include "../shim/nccl/tests/c/session.h"

static ncclComm_t comm;

/* Makes the communicator; 0 or an NCCL error. */
EXPORTED int bench_setup(int nranks, int rank) {
    ncclUniqueId id;
    int result = ncclGetUniqueId(&id);
    return result ? result : ncclCommInitRank(&comm, nranks, id, rank);
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
