/* An MPI-style program on the host device: plain pointers, the null stream, every call done when it returns. */
#include "nccl_api.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define EXPECT(call, code)                                                                     \
    do {                                                                                       \
        int got_ = (call);                                                                     \
        if (got_ != (code)) {                                                                  \
            fprintf(stderr, "%d: %s is %d: %s\n", __LINE__, #call, got_, ncclGetLastError(NULL)); \
            exit(1);                                                                           \
        }                                                                                      \
    } while (0)

int main(int argc, char **argv) {
    int nranks = atoi(argv[1]), rank = atoi(argv[2]), expected_end = argc > 3 ? atoi(argv[3]) : ncclSuccess;
    ncclUniqueId id;
    ncclComm_t comm, child;
    float values[4] = {1, -2, 0.5f, 1e6f}, sums[4];
    alarm(60);
    EXPECT(ncclGetUniqueId(&id), ncclSuccess);
    EXPECT(ncclCommInitRank(&comm, nranks, id, rank), ncclSuccess);
    EXPECT(ncclAllReduce(values, sums, 4, ncclFloat32, ncclSum, comm, NULL), ncclSuccess);
    for (int i = 0; i < 4; i++) {
        if (sums[i] != values[i] * (float)nranks) {
            fprintf(stderr, "element %d is %g\n", i, sums[i]);
            return 1;
        }
    }
    EXPECT(ncclGroupStart(), ncclSuccess);
    EXPECT(ncclSend(values, 4, ncclFloat32, (rank + 1) % nranks, comm, NULL), ncclSuccess);
    EXPECT(ncclRecv(sums, 4, ncclFloat32, (rank + nranks - 1) % nranks, comm, NULL), ncclSuccess);
    EXPECT(ncclGroupEnd(), ncclSuccess);
    EXPECT(ncclCommSplit(comm, 1, 0, &child, NULL), ncclSuccess);
    int count;
    EXPECT(ncclCommCount(child, &count), ncclSuccess);
    void *memory;
    EXPECT(ncclMemAlloc(&memory, 100), ncclSuccess);
    EXPECT(ncclAllGather(values, memory, 4, ncclFloat32, child, NULL), expected_end);
    int error = -1;
    EXPECT(ncclCommGetAsyncError(comm, &error), ncclSuccess);
    printf("count %d, async error %d\n", count, error);
    EXPECT(ncclMemFree(memory), ncclSuccess);
    EXPECT(ncclCommDestroy(child), ncclSuccess);
    EXPECT(ncclCommDestroy(comm), ncclSuccess);
    return 0;
}
