/* A call that returns when it is done, over and over, for test_shim_nccl.py. */
#include "../shim/nccl/tests/c/nccl_api.h"

#include <stdlib.h>
#include <time.h>

static double us(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * 1e6 + now.tv_nsec / 1e3;
}

static int ascending(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

/* First quartile, median and ninth decile of the wall time of a call, and CPU time of this process for one, us. */
int bench_synchronous(ncclComm_t comm, long calls, double figures[4]) {
    double *times = malloc(calls * sizeof *times), cpu = us(CLOCK_PROCESS_CPUTIME_ID);
    float value = 1;
    if (!times) return ncclSystemError;
    for (long i = 0; i < calls; i++) {
        double start = us(CLOCK_MONOTONIC);
        int result = ncclAllReduce(&value, &value, 1, ncclFloat32, ncclMax, comm, NULL);
        times[i] = us(CLOCK_MONOTONIC) - start;
        if (result) return result;
    }
    figures[3] = (us(CLOCK_PROCESS_CPUTIME_ID) - cpu) / calls;
    qsort(times, calls, sizeof *times, ascending);
    figures[0] = times[calls / 4];
    figures[1] = times[calls / 2];
    figures[2] = times[calls * 9 / 10];
    free(times);
    return ncclSuccess;
}
