/* Threads with a communicator each, on the host device. */
#include "nccl_api.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define MAX_THREADS 16

static int num_calls;

static void *work(void *arg) {
    ncclComm_t comm;
    ncclUniqueId id;
    float *buffer = calloc((size_t)num_calls, sizeof *buffer);
    (void)arg;
    if (ncclGetUniqueId(&id) || ncclCommInitRank(&comm, 2, id, 0)) return "init";
    for (int call = 1; call <= num_calls; call++) {
        buffer[call - 1] = (float)call;
        if (ncclAllReduce(buffer, buffer, (size_t)call, ncclFloat32, ncclAvg, comm, NULL)) return "all-reduce";
    }
    for (int call = 1; call <= num_calls; call++) {
        if (buffer[call - 1] != (float)call) return "value";
    }
    free(buffer);
    return ncclCommDestroy(comm) ? "destroy" : NULL;
}

int main(int argc, char **argv) {
    pthread_t threads[MAX_THREADS];
    int num_threads = argc > 2 ? atoi(argv[1]) : 0, failed = 0;
    if (num_threads < 1 || num_threads > MAX_THREADS) return 2;
    num_calls = atoi(argv[2]);
    alarm(60);
    for (int i = 0; i < num_threads; i++) {
        if (pthread_create(&threads[i], NULL, work, NULL)) return 2;
    }
    for (int i = 0; i < num_threads; i++) {
        void *error = NULL;
        pthread_join(threads[i], &error);
        if (error) {
            fprintf(stderr, "%s: %s\n", (char *)error, ncclGetLastError(NULL));
            failed = 1;
        }
    }
    return failed;
}
