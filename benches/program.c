/* A training program boiled down to its device calls, for the benchmarks of a whole session: it runs as rank 0 with the
 * libraries preloaded, against a real engine. It reads commands `NAME COUNT` from standard input and answers each with
 *
 *     WALL CPU VIRTUAL
 *
 * in ns: real time and CPU time of the calling thread that the commanded calls took, and the virtual clock after them. */
#define _GNU_SOURCE
#include "../shim/nccl/tests/c/nccl_api.h"
#include "fatbin.h"
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef void *stream_t, *event_t;
typedef struct { unsigned x, y, z; } dim3;

extern int cudaSetDevice(int), cudaMalloc(void **, size_t), cudaDeviceSynchronize(void);
extern int cudaStreamCreateWithFlags(stream_t *, unsigned), cudaStreamSynchronize(stream_t);
extern int cudaEventCreateWithFlags(event_t *, unsigned), cudaEventRecord(event_t, stream_t), cudaEventQuery(event_t);
extern int cudaStreamWaitEvent(stream_t, event_t, unsigned);
extern int cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, stream_t);
extern int __cudaGetKernel(void **, const void *), __cudaLaunchKernel(void *, dim3, dim3, void **, size_t, stream_t);
extern void **__cudaRegisterFatBinary(void *);
extern void __cudaRegisterFatBinaryEnd(void **);
extern void __cudaRegisterFunction(void **, const char *, char *, const char *, int, void *, void *, void *, void *, int *);
extern int prism_marker(unsigned, stream_t);

enum { TRAINING_BEGIN = 1, ITERATION_END = 2, NON_BLOCKING = 1, NO_TIMING = 2, LAYERS = 24, KERNELS_PER_LAYER = 8 };
/* Gradients of one layer, bf16. */
#define GRADIENT_COUNT (8u << 20)

#define OK(call) do { int code_ = (call); if (code_) { \
    fprintf(stderr, "%s:%d: %s = %d\n", __FILE__, __LINE__, #call, code_); exit(1); } } while (0)

static char kernel, described; /* their addresses stand for kernels */
static void *kernel_handle, *gradients;
static stream_t compute, communication;
static event_t ready, reduced;
static ncclComm_t world;

/* The libc clocks are virtual in this process, system calls are not; CPU clocks are real. */
static int64_t real_ns(void) {
    struct timespec t;
    OK(syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &t));
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int64_t libc_ns(clockid_t id) {
    struct timespec t;
    OK(clock_gettime(id, &t));
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void launch(void) { OK(cudaLaunchKernel(&kernel, (dim3){132, 1, 1}, (dim3){256, 1, 1}, NULL, 0, compute)); }

static void launch_by_handle(void) {
    OK(__cudaLaunchKernel(kernel_handle, (dim3){132, 1, 1}, (dim3){256, 1, 1}, NULL, 0, compute));
}

/* A kernel whose parameters are known: three pointers to a block of device memory. */
static void launch_with_arguments(void) {
    char *pointers[3] = {gradients, (char *)gradients + 4096, (char *)gradients + GRADIENT_COUNT};
    int count = 1;
    void *arguments[2] = {&count, pointers};
    OK(cudaLaunchKernel(&described, (dim3){132, 1, 1}, (dim3){256, 1, 1}, arguments, 0, compute));
}

static void launch_and_sync(void) {
    launch();
    OK(cudaStreamSynchronize(compute));
}

static void launch_and_query(void) {
    launch();
    OK(cudaEventRecord(ready, compute));
    int code = cudaEventQuery(ready);
    if (code && code != 600 /* not ready */) exit(1);
}

static void all_reduce(void) {
    OK(ncclAllReduce(gradients, gradients, GRADIENT_COUNT, ncclBfloat16, ncclSum, world, communication));
}

static void send_and_receive(void) {
    OK(ncclGroupStart());
    OK(ncclSend(gradients, GRADIENT_COUNT, ncclBfloat16, 1, world, communication));
    OK(ncclRecv(gradients, GRADIENT_COUNT, ncclBfloat16, 1, world, communication));
    OK(ncclGroupEnd());
}

/* Data parallelism with a bucket per layer, as a framework issues it. */
static void iterate(void) {
    for (int layer = 0; layer < LAYERS; layer++) {
        for (int i = 0; i < KERNELS_PER_LAYER; i++) launch();
        OK(cudaEventRecord(ready, compute));
        OK(cudaStreamWaitEvent(communication, ready, 0));
        all_reduce();
    }
    OK(cudaEventRecord(reduced, communication));
    OK(cudaStreamWaitEvent(compute, reduced, 0));
    launch();
    OK(prism_marker(ITERATION_END, compute));
    OK(cudaDeviceSynchronize());
}

static void drain(void) { OK(cudaDeviceSynchronize()); }
static void begin(void) { OK(prism_marker(TRAINING_BEGIN, compute)); }

static const struct {
    const char *name;
    void (*body)(void);
} COMMANDS[] = {
    {"launch", launch}, {"launch_by_handle", launch_by_handle}, {"launch_with_arguments", launch_with_arguments}, {"launch_and_sync", launch_and_sync},
    {"launch_and_query", launch_and_query}, {"all_reduce", all_reduce}, {"send_and_receive", send_and_receive},
    {"iterate", iterate}, {"begin", begin}, {"drain", drain},
};

static void (*find(const char *name))(void) {
    for (size_t i = 0; i < sizeof COMMANDS / sizeof *COMMANDS; i++)
        if (strcmp(COMMANDS[i].name, name) == 0) return COMMANDS[i].body;
    fprintf(stderr, "unknown command %s\n", name);
    exit(2);
}

static void set_up(void) {
    void **module = __cudaRegisterFatBinary(&kernel);
    __cudaRegisterFunction(module, &kernel, "bench_kernel", "bench_kernel", -1, NULL, NULL, NULL, NULL, NULL);
    __cudaRegisterFatBinaryEnd(module);
    module = __cudaRegisterFatBinary(fatbin_of("described_kernel"));
    __cudaRegisterFunction(module, &described, "described_kernel", "described_kernel", -1, NULL, NULL, NULL, NULL, NULL);
    __cudaRegisterFatBinaryEnd(module);
    OK(cudaSetDevice(0));
    OK(__cudaGetKernel(&kernel_handle, &kernel));
    OK(cudaMalloc(&gradients, 2 * GRADIENT_COUNT));
    OK(cudaStreamCreateWithFlags(&compute, NON_BLOCKING));
    OK(cudaStreamCreateWithFlags(&communication, NON_BLOCKING));
    OK(cudaEventCreateWithFlags(&ready, NO_TIMING));
    OK(cudaEventCreateWithFlags(&reduced, NO_TIMING));
    ncclUniqueId id;
    OK(ncclGetUniqueId(&id));
    OK(ncclCommInitRank(&world, atoi(getenv("WORLD_SIZE")), id, atoi(getenv("RANK"))));
    launch(); /* tells the kernel's name */
    drain();
}

int main(void) {
    set_up();
    char name[64];
    long count;
    while (scanf("%63s %ld", name, &count) == 2) {
        void (*body)(void) = find(name);
        int64_t cpu = libc_ns(CLOCK_THREAD_CPUTIME_ID), wall = real_ns();
        for (long i = 0; i < count; i++) body();
        wall = real_ns() - wall;
        cpu = libc_ns(CLOCK_THREAD_CPUTIME_ID) - cpu;
        printf("%lld %lld %lld\n", (long long)wall, (long long)cpu, (long long)libc_ns(CLOCK_MONOTONIC));
        fflush(stdout);
    }
    OK(ncclCommDestroy(world));
    return 0;
}
