/* A C program of the emulated device: `driver SCENARIO`. Exits 0 if everything was as it should be. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef void *stream_t, *event_t;
typedef struct { unsigned x, y, z; } dim3;
typedef struct { int type, device; void *device_pointer, *host_pointer; long reserved[8]; } attributes_t;
typedef struct { int type, handle_types; int location_type, location_id; void *meta; unsigned char flags[8]; } prop_t;
typedef struct { int location_type, location_id, flags; } access_t;

extern int cudaGetDeviceCount(int *), cudaGetDevice(int *), cudaSetDevice(int), cudaDeviceSynchronize(void);
extern int cudaGetLastError(void), cudaPeekAtLastError(void);
extern const char *cudaGetErrorString(int), *cudaGetErrorName(int);
extern int cudaMalloc(void **, size_t), cudaFree(void *), cudaMemGetInfo(size_t *, size_t *);
extern int cudaHostAlloc(void **, size_t, unsigned), cudaFreeHost(void *);
extern int cudaMemcpy(void *, const void *, size_t, int), cudaMemcpyAsync(void *, const void *, size_t, int, stream_t);
extern int cudaMemset(void *, int, size_t), cudaMemsetAsync(void *, int, size_t, stream_t);
extern int cudaMemcpy2DAsync(void *, size_t, const void *, size_t, size_t, size_t, int, stream_t);
extern int cudaPointerGetAttributes(attributes_t *, const void *);
extern int cudaStreamCreate(stream_t *), cudaStreamCreateWithFlags(stream_t *, unsigned), cudaStreamDestroy(stream_t);
extern int cudaStreamSynchronize(stream_t), cudaStreamQuery(stream_t), cudaStreamWaitEvent(stream_t, event_t, unsigned);
extern int cudaEventCreate(event_t *), cudaEventCreateWithFlags(event_t *, unsigned), cudaEventDestroy(event_t);
extern int cudaEventRecord(event_t, stream_t), cudaEventQuery(event_t), cudaEventSynchronize(event_t);
extern int cudaEventElapsedTime(float *, event_t, event_t);
extern int cudaLaunchHostFunc(stream_t, void (*)(void *), void *);
extern int cudaStreamBeginCapture(stream_t, int), cudaStreamIsCapturing(stream_t, int *);
extern int cudaStreamEndCapture(stream_t, void **), cudaStreamBeginCaptureToGraph(stream_t, void *, void *, void *, size_t, int);
extern int cudaStreamGetCaptureInfo(stream_t, int *, unsigned long long *, void **, void ***, void **, size_t *);
extern int cudaGraphInstantiateWithFlags(void **, void *, unsigned long long), cudaGraphLaunch(void *, stream_t);
extern int cudaGraphDestroy(void *), cudaGraphExecDestroy(void *), cudaGraphGetNodes(void *, void **, size_t *);
extern int cudaGraphExecUpdate(void *, void *, void *), cudaGraphNodeGetType(void *, int *);
extern int cudaGraphNodeGetDependencies(void *, void **, void *, size_t *);
extern int cudaUserObjectCreate(void **, void *, void (*)(void *), unsigned, unsigned);
extern int cudaGraphRetainUserObject(void *, void *, unsigned, unsigned);
extern void **__cudaRegisterFatBinary(void *);
extern void __cudaRegisterFatBinaryEnd(void **);
extern void __cudaRegisterFunction(void **, const char *, char *, const char *, int, void *, void *, void *, void *, int *);
extern void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int);
extern unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, stream_t);
extern int __cudaPopCallConfiguration(dim3 *, dim3 *, size_t *, stream_t *);
extern int __cudaGetKernel(void **, const void *), __cudaLaunchKernel(void *, dim3, dim3, void **, size_t, stream_t);
extern int cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, stream_t);
extern int cudaGetSymbolAddress(void **, const void *);
extern int cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, int);
extern int cudaGetDriverEntryPointByVersion(const char *, void **, unsigned, unsigned long long, int *);
extern int cuInit(unsigned), cuDeviceGetCount(int *), cuDevicePrimaryCtxGetState(int, unsigned *, int *);
extern int cuMemAddressReserve(uint64_t *, size_t, size_t, uint64_t, unsigned long long), cuMemAddressFree(uint64_t, size_t);
extern int cuMemCreate(uint64_t *, size_t, const prop_t *, unsigned long long), cuMemRelease(uint64_t);
extern int cuMemMap(uint64_t, size_t, size_t, uint64_t, unsigned long long), cuMemUnmap(uint64_t, size_t);
extern int cuMemSetAccess(uint64_t, size_t, const access_t *, size_t);
extern int prism_marker(unsigned, stream_t), prism_memory_stats(uint64_t, uint64_t);
extern int prism_note_group(const char *, const unsigned *, unsigned), prism_clear_group(void);
extern const char *prism_current_group(void), *prism_cuda_functions(void);
extern int prism_unsupported_call(const char *);

#define CHECK(condition) do { if (!(condition)) { \
    fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); exit(1); } } while (0)
#define OK(call) do { int code_ = (call); if (code_) { \
    fprintf(stderr, "%s:%d: %s = %d (%s)\n", __FILE__, __LINE__, #call, code_, cudaGetErrorName(code_)); exit(1); } } while (0)

enum { H2D = 1, D2H = 2, D2D = 3, MIB = 1 << 20 };

static int64_t ns(clockid_t id) {
    struct timespec t;
    CHECK(clock_gettime(id, &t) == 0);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int64_t real_ns(void) {
    struct timespec t;
    CHECK(syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &t) == 0);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static char image[16], stub_a, stub_b, shadow[8];

static void register_kernels(void) {
    void **handle = __cudaRegisterFatBinary(image);
    __cudaRegisterFunction(handle, &stub_a, 0, "_Z7kernel_aPf", -1, 0, 0, 0, 0, 0);
    __cudaRegisterFunction(handle, &stub_b, 0, "_Z7kernel_bPf", -1, 0, 0, 0, 0, 0);
    __cudaRegisterVar(handle, shadow, 0, "shadow", 0, sizeof shadow, 0, 0);
    __cudaRegisterFatBinaryEnd(handle);
}

static void launch_a(stream_t stream) {
    dim3 grid, block;
    size_t shared;
    stream_t popped;
    void *kernel;
    CHECK(__cudaPushCallConfiguration((dim3){3, 2, 1}, (dim3){64, 2, 1}, 256, stream) == 0);
    OK(__cudaPopCallConfiguration(&grid, &block, &shared, &popped));
    OK(__cudaGetKernel(&kernel, &stub_a));
    OK(__cudaLaunchKernel(kernel, grid, block, 0, shared, popped));
}

/* Without a session there is no device, and the clocks are real. */
static void inert(void) {
    int count = -1, active;
    unsigned flags;
    CHECK(cudaGetDeviceCount(&count) == 100 && count == 0);
    CHECK(cudaGetLastError() == 100 && cudaGetLastError() == 0);
    CHECK(cuInit(0) == 100 && cuDeviceGetCount(&count) == 100);
    CHECK(cuDevicePrimaryCtxGetState(0, &flags, &active) == 100);
    void *pointer;
    CHECK(cudaMalloc(&pointer, 100) == 100);
    int64_t before = real_ns(), shown = ns(CLOCK_MONOTONIC);
    CHECK(shown >= before && shown - before < 1000000000);
    usleep(2000);
    CHECK(real_ns() - before >= 2000000);
    CHECK(prism_marker(1, 0) == -1);
}

/* Connection failures are errors, not "no device". */
static void no_engine(void) {
    int count = -1;
    CHECK(cudaGetDeviceCount(&count) == 999 && count == 0);
    CHECK(cuInit(0) == 999);
}

static void records(void) {
    register_kernels();
    int count, device;
    OK(cudaGetDeviceCount(&count));
    CHECK(count == 8);
    OK(cudaSetDevice(0));
    OK(cudaGetDevice(&device));
    CHECK(device == 0);
    stream_t stream;
    OK(cudaStreamCreateWithFlags(&stream, 1));
    launch_a(stream);
    OK(cudaLaunchKernel(&stub_b, (dim3){1, 1, 1}, (dim3){1024, 1, 1}, 0, 0, 0));
    CHECK(cudaLaunchKernel(&stub_b, (dim3){1, 1, 1}, (dim3){1025, 1, 1}, 0, 0, 0) == 9);
    CHECK(cudaLaunchKernel(&count, (dim3){1, 1, 1}, (dim3){1, 1, 1}, 0, 0, 0) == 98);
    CHECK(cudaPeekAtLastError() == 98 && cudaGetLastError() == 98 && cudaGetLastError() == 0);
    event_t event, plain;
    OK(cudaEventCreate(&event));
    OK(cudaEventCreateWithFlags(&plain, 2));
    OK(cudaEventQuery(event));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, event, event) == 400);
    OK(cudaEventRecord(event, stream));
    CHECK(cudaEventQuery(event) == 600);
    CHECK(cudaStreamQuery(stream) == 600);
    CHECK(cudaEventElapsedTime(&ms, event, event) == 600);
    OK(cudaStreamWaitEvent(0, event, 0));
    OK(cudaStreamSynchronize(stream));
    OK(cudaEventQuery(event));
    event_t later;
    OK(cudaEventCreate(&later));
    launch_a(stream);
    OK(cudaEventRecord(later, stream));
    OK(cudaEventSynchronize(later));
    OK(cudaEventElapsedTime(&ms, event, later));
    CHECK(ms > 0.0499f && ms < 0.2f);
    OK(cudaEventRecord(plain, stream));
    CHECK(cudaEventElapsedTime(&ms, event, plain) == 400);
    OK(cudaEventDestroy(event));
    CHECK(cudaEventRecord(event, stream) == 400);
    CHECK(cudaEventRecord((event_t)0x1234, stream) == 400);
    OK(cudaDeviceSynchronize());
    OK(cudaStreamDestroy(stream));
    CHECK(cudaStreamSynchronize(stream) == 400);
    const unsigned ranks[] = {0, 4};
    CHECK(prism_current_group() == 0);
    CHECK(prism_note_group("dp_0", ranks, 2) == 0);
    CHECK(strcmp(prism_current_group(), "dp_0") == 0);
    CHECK(prism_clear_group() == 0 && prism_current_group() == 0);
    CHECK(prism_marker(2, 0) == 0 && prism_marker(77, 0) == -1);
    CHECK(prism_memory_stats(11, 22) == 0);
    char *address;
    int64_t value = 42, back = 0;
    OK(cudaMemcpyToSymbol(shadow, &value, 8, 0, H2D));
    OK(cudaGetSymbolAddress((void **)&address, shadow));
    OK(cudaMemcpy(&back, address, 8, D2H));
    CHECK(back == 42 && cudaMemcpyToSymbol(shadow, &value, 8, 1, H2D) == 1);
    int (*init)(unsigned) = 0, status;
    OK(cudaGetDriverEntryPointByVersion("cuInit", (void **)&init, 13000, 0, &status));
    CHECK(status == 0 && init == cuInit);
    OK(cudaGetDriverEntryPointByVersion("cuNoSuchThing", (void **)&init, 13000, 0, &status));
    CHECK(status == 1 && init == 0);
    CHECK(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuInit") == (void *)cuInit);
}

static void memory(void) {
    size_t free0, free1, total;
    OK(cudaMemGetInfo(&free0, &total));
    CHECK(total == 1024u * MIB && free0 == 896u * MIB);
    char *a, *b, *c;
    OK(cudaMalloc((void **)&a, 3 * MIB));
    CHECK(a == (char *)0x200000000000);
    OK(cudaMemGetInfo(&free1, &total));
    CHECK(free0 - free1 == 4 * MIB);
    CHECK(cudaMalloc((void **)&b, 893u * MIB) == 2);
    OK(cudaMalloc((void **)&b, 892u * MIB));
    OK(cudaMemGetInfo(&free1, &total));
    CHECK(free1 == 0 && cudaMalloc((void **)&c, 1) == 2);
    OK(cudaFree(b));
    CHECK(cudaFree(b) == 1 && cudaFree(a + 1) == 1);
    cudaGetLastError();

    /* Bytes move, fresh memory is zero, whatever a range of pages was used for before. */
    size_t size = 2 * MIB + 12345;
    char *host = malloc(size), *back = malloc(size);
    for (size_t i = 0; i < size; i++) host[i] = (char)(i * 7 + 1);
    OK(cudaMemcpy(a, host, size, H2D));
    OK(cudaMalloc((void **)&b, 8 * MIB));
    OK(cudaMemset(b, 0x5A, 8 * MIB));
    OK(cudaMemcpy(b + 77, a, 3 * MIB, D2D));
    OK(cudaMemcpy(back, b + 77, size, D2H));
    CHECK(memcmp(back, host, size) == 0);
    /* The rest of `a` was never written: zero in the copy, and the bytes around the copy are untouched. */
    OK(cudaMemcpy(back, b + 77 + size, 3 * MIB - size, D2H));
    for (size_t i = 0; i < 3 * MIB - size; i++) CHECK(back[i] == 0);
    OK(cudaMemcpy(back, b, 77, D2H));
    OK(cudaMemcpy(back + 77, b + 77 + 3 * MIB, 77, D2H));
    for (size_t i = 0; i < 154; i++) CHECK(back[i] == 0x5A);
    OK(cudaMemset(b + 100, 0, 4 * MIB));
    OK(cudaMemcpy(back, b + 90, 20, D2H));
    CHECK(back[0] == host[13] && back[9] == host[22] && back[10] == 0 && back[19] == 0);
    OK(cudaMemcpy(back, b + 100 + 4 * MIB - 1, 2, D2H));
    CHECK(back[0] == 0 && back[1] == 0x5A);
    CHECK(cudaMemcpy(a, host, 4 * MIB, H2D) == 1 && cudaMemcpy(a, host, 8, 9) == 21);
    CHECK(cudaMemset(host, 0, 8) == 1);
    OK(cudaFree(b));
    OK(cudaMalloc((void **)&b, 8 * MIB));
    OK(cudaMemcpy(back, b, size, D2H));
    for (size_t i = 0; i < size; i++) CHECK(back[i] == 0);

    /* Rows. */
    OK(cudaMemcpy2DAsync(b, 64, host, 100, 10, 3, H2D, 0));
    OK(cudaMemcpy(back, b, 192, D2H));
    for (int row = 0; row < 3; row++) {
        CHECK(memcmp(back + row * 64, host + row * 100, 10) == 0 && back[row * 64 + 10] == 0);
    }
    CHECK(cudaMemcpy2DAsync(b, 64, host, 100, 65, 3, H2D, 0) == 12);

    /* Pinned memory and what pointers are. */
    attributes_t is;
    void *pinned;
    OK(cudaHostAlloc(&pinned, 4096, 0));
    OK(cudaPointerGetAttributes(&is, (char *)pinned + 5));
    CHECK(is.type == 1 && is.device == 0 && is.host_pointer == (char *)pinned + 5);
    OK(cudaPointerGetAttributes(&is, b + 5));
    CHECK(is.type == 2 && is.device == 0 && is.device_pointer == b + 5 && is.host_pointer == 0);
    OK(cudaPointerGetAttributes(&is, host));
    CHECK(is.type == 0);
    OK(cudaMemcpyAsync(pinned, b, 64, D2H, 0));
    OK(cudaFreeHost(pinned));
    CHECK(cudaFreeHost(pinned) == 1);
    OK(cudaPointerGetAttributes(&is, pinned));
    CHECK(is.type == 0);
    OK(cudaSetDevice(3));
    OK(cudaMalloc((void **)&c, 5 * MIB));
    OK(cudaPointerGetAttributes(&is, c));
    CHECK(is.device == 3 && c == (char *)0x200000000000 + 3 * (1LL << 39));
    CHECK(cudaSetDevice(8) == 101);
}

static void virtual_memory(void) {
    uint64_t base, one, two;
    size_t free0, free1, total;
    prop_t prop = {1, 0, 1, 0, 0, {0}};
    access_t access = {1, 0, 3};
    OK(cudaMemGetInfo(&free0, &total));
    OK(cuMemAddressReserve(&base, 40 * MIB, 0, 0, 0));
    OK(cuMemCreate(&one, 2 * MIB, &prop, 0));
    OK(cuMemCreate(&two, 4 * MIB, &prop, 0));
    CHECK(cuMemCreate(&two, 900u * MIB, &prop, 0) == 2 && cuMemCreate(&two, 100, &prop, 0) == 1);
    OK(cudaMemGetInfo(&free1, &total));
    CHECK(free0 - free1 == 6 * MIB);
    OK(cuMemMap(base, 2 * MIB, 0, one, 0));
    CHECK(cuMemMap(base, 2 * MIB, 0, one, 0) == 801);
    OK(cuMemMap(base + 2 * MIB, 4 * MIB, 0, two, 0));
    OK(cuMemSetAccess(base, 6 * MIB, &access, 1));
    char text[6] = "hello", back[6];
    /* Across the border of two mappings. */
    OK(cudaMemcpy((char *)base + 2 * MIB - 3, text, 6, H2D));
    OK(cudaMemcpy(back, (char *)base + 2 * MIB - 3, 6, D2H));
    CHECK(memcmp(text, back, 6) == 0);
    CHECK(cudaMemcpy((char *)base + 6 * MIB - 3, text, 6, H2D) == 1);
    CHECK(cuMemAddressFree(base, 40 * MIB) == 1);
    OK(cuMemUnmap(base, 2 * MIB));
    OK(cuMemRelease(one));
    OK(cuMemRelease(two));
    CHECK(cuMemRelease(two) == 1);
    OK(cudaMemGetInfo(&free1, &total));
    CHECK(free0 - free1 == 4 * MIB);
    OK(cuMemUnmap(base + 2 * MIB, 4 * MIB));
    OK(cudaMemGetInfo(&free1, &total));
    CHECK(free0 == free1);
    OK(cuMemAddressFree(base, 40 * MIB));
}

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t cond = PTHREAD_COND_INITIALIZER;

static struct timespec at(int64_t time) {
    return (struct timespec){time / 1000000000, time % 1000000000};
}

/* A thread that never launched anything: its waits are real and its clock is never behind what it waited for. */
static void *background(void *event) {
    int64_t real = real_ns(), shown = ns(CLOCK_MONOTONIC);
    struct timespec until = at(ns(CLOCK_REALTIME) + 30000000);
    CHECK(pthread_mutex_lock(&mutex) == 0);
    CHECK(pthread_cond_timedwait(&cond, &mutex, &until) == ETIMEDOUT);
    CHECK(pthread_mutex_unlock(&mutex) == 0);
    CHECK(real_ns() - real >= 29000000);
    CHECK(ns(CLOCK_MONOTONIC) - shown >= 30000000);
    usleep(5000);
    CHECK(real_ns() - real >= 34000000 && ns(CLOCK_MONOTONIC) - shown >= 35000000);
    for (int i = 0; i < 1000; i++) cudaEventQuery(event);
    return 0;
}

static void clocks(void) {
    register_kernels();
    int count;
    int64_t real = real_ns();
    OK(cudaGetDeviceCount(&count));
    /* No jump, and then only calls count. */
    int64_t start = ns(CLOCK_MONOTONIC);
    CHECK(start - real < 10000000000LL && start >= real);
    CHECK(ns(CLOCK_MONOTONIC) == start);
    int64_t wall = ns(CLOCK_REALTIME), raw = ns(CLOCK_MONOTONIC_RAW), boot = ns(CLOCK_BOOTTIME);
    OK(cudaSetDevice(0));
    for (int i = 0; i < 10; i++) launch_a(0);
    CHECK(ns(CLOCK_REALTIME) - wall == 10 * 4000);
    CHECK(ns(CLOCK_MONOTONIC_RAW) - raw == 10 * 4000 && ns(CLOCK_BOOTTIME) - boot == 10 * 4000);
    /* Ten kernels of 50 us behind the first launch. */
    OK(cudaStreamSynchronize(0));
    int64_t synced = ns(CLOCK_MONOTONIC);
    CHECK(synced - start == 4000 + 10 * 50000);
    /* Sleeps and timed waits of this thread pass at once. */
    real = real_ns();
    struct timespec hour = {3600, 0}, until;
    CHECK(nanosleep(&hour, 0) == 0 && sleep(3600) == 0 && usleep(500000) == 0);
    until = at(ns(CLOCK_MONOTONIC) + 1000000000);
    CHECK(clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, 0) == 0);
    int64_t slept = ns(CLOCK_MONOTONIC) - synced;
    CHECK(slept >= 7201500000000LL && slept < 7201500001000LL);
    CHECK(real_ns() - real < 5000000000LL);
    struct timeval day;
    CHECK(gettimeofday(&day, 0) == 0 && day.tv_sec - wall / 1000000000 >= 7201 && time(0) == day.tv_sec);
    sem_t semaphore;
    CHECK(sem_init(&semaphore, 0, 0) == 0);
    int64_t before = ns(CLOCK_REALTIME);
    until = at(before + 20000000);
    CHECK(sem_timedwait(&semaphore, &until) == -1 && errno == ETIMEDOUT);
    CHECK(ns(CLOCK_REALTIME) - before == 20000000);
    CHECK(pthread_mutex_lock(&mutex) == 0);
    until = at(ns(CLOCK_MONOTONIC) + 20000000);
    CHECK(pthread_cond_clockwait(&cond, &mutex, CLOCK_MONOTONIC, &until) == ETIMEDOUT);
    CHECK(pthread_mutex_unlock(&mutex) == 0);
    /* Waits for descriptors. */
    int ends[2];
    CHECK(pipe(ends) == 0);
    before = ns(CLOCK_MONOTONIC);
    struct pollfd watched = {ends[0], POLLIN, 0};
    struct timeval limit = {0, 20000};
    fd_set set;
    FD_ZERO(&set);
    FD_SET(ends[0], &set);
    CHECK(poll(&watched, 1, 20) == 0 && ns(CLOCK_MONOTONIC) - before == 20000000);
    CHECK(select(ends[0] + 1, &set, 0, 0, &limit) == 0 && ns(CLOCK_MONOTONIC) - before == 40000000);
    CHECK(poll(&watched, 1, 0) == 0 && write(ends[1], "x", 1) == 1 && poll(&watched, 1, 5000) == 1);
    CHECK(ns(CLOCK_MONOTONIC) - before == 40000000);
    /* CPU time stays real. */
    CHECK(ns(CLOCK_PROCESS_CPUTIME_ID) < 3600 * 1000000000LL);
    /* Another thread does not move this one's clock. */
    event_t event;
    OK(cudaEventCreateWithFlags(&event, 2));
    launch_a(0);
    OK(cudaEventRecord(event, 0));
    before = ns(CLOCK_MONOTONIC);
    pthread_t thread;
    CHECK(pthread_create(&thread, 0, background, event) == 0 && pthread_join(thread, 0) == 0);
    CHECK(ns(CLOCK_MONOTONIC) == before);
    /* A loop that waits for a time ends, though nothing else happens. */
    while (ns(CLOCK_MONOTONIC) < before + 1000) {}
    printf("%lld\n", (long long)(ns(CLOCK_MONOTONIC) - start));
}

/* A watchdog: looks every 100 ms, for as long as it is not told to stop. */
static int looks, stop;
static int64_t looked_at[64];

static void *watchdog(void *unused) {
    (void)unused;
    CHECK(pthread_mutex_lock(&mutex) == 0);
    while (!stop) {
        struct timespec until = at(ns(CLOCK_REALTIME) + 100000000);
        int rc = pthread_cond_timedwait(&cond, &mutex, &until);
        CHECK(rc == 0 || rc == ETIMEDOUT);
        if (rc == ETIMEDOUT) looked_at[looks++] = ns(CLOCK_MONOTONIC);
    }
    CHECK(pthread_mutex_unlock(&mutex) == 0);
    return 0;
}

/* A thread that sleeps is woken in the same way. */
static void *sleeper(void *wakeups) {
    for (int i = 0; i < 3; i++) {
        usleep(150000);
        ++*(int *)wakeups;
    }
    return 0;
}

static void handover(void) {
    register_kernels();
    int count, wakeups = 0;
    OK(cudaGetDeviceCount(&count));
    int64_t start = ns(CLOCK_MONOTONIC), real = real_ns();
    pthread_t thread, other;
    CHECK(pthread_create(&thread, 0, watchdog, 0) == 0);
    CHECK(pthread_create(&other, 0, sleeper, &wakeups) == 0);
    /* Both threads must have begun to wait before time goes on. */
    syscall(SYS_nanosleep, &(struct timespec){0, 200000000}, 0);
    for (int i = 0; i < 50; i++) {
        usleep(20000);
        launch_a(0);
        printf("%d %d\n", looks, wakeups);
    }
    CHECK(looks >= 8 && looks <= 10 && wakeups == 3);
    CHECK(real_ns() - real < 5000000000LL);
    for (int i = 0; i < looks; i++) CHECK(looked_at[i] - start >= (i + 1) * 100000000LL);
    CHECK(pthread_mutex_lock(&mutex) == 0);
    stop = 1;
    CHECK(pthread_cond_signal(&cond) == 0 && pthread_mutex_unlock(&mutex) == 0);
    CHECK(pthread_join(thread, 0) == 0 && pthread_join(other, 0) == 0);
}

static void count_up(void *number) { ++*(int *)number; }

static void streams(void) {
    register_kernels();
    stream_t blocking, independent;
    OK(cudaStreamCreate(&blocking));
    OK(cudaStreamCreateWithFlags(&independent, 1));
    launch_a(blocking);
    launch_a(0);
    launch_a(independent);
    launch_a(blocking);
    launch_a(0);
    int number = 0, capturing = 7;
    OK(cudaLaunchHostFunc(independent, count_up, &number));
    CHECK(number == 1);
    OK(cudaStreamIsCapturing(blocking, &capturing));
    CHECK(capturing == 0);
    OK(cudaStreamDestroy(blocking));
    launch_a(0);
}

/* Two streams, a copy, a fill and a host function: nothing happens before the launch, all of it at every launch. */
static void graphs(void) {
    register_kernels();
    stream_t origin, side, other;
    event_t fork, join, outside;
    OK(cudaStreamCreateWithFlags(&origin, 1));
    OK(cudaStreamCreateWithFlags(&side, 1));
    OK(cudaStreamCreateWithFlags(&other, 1));
    OK(cudaEventCreate(&fork));
    OK(cudaEventCreate(&join));
    OK(cudaEventCreate(&outside));
    OK(cudaEventRecord(outside, other));
    char *memory, host[4] = "abc";
    OK(cudaMalloc((void **)&memory, 64));
    int number = 0, status = 7;
    OK(cudaStreamBeginCapture(origin, 2));
    CHECK(cudaStreamBeginCapture(origin, 2) == 401);
    launch_a(origin);
    OK(cudaEventRecord(fork, origin));
    OK(cudaStreamWaitEvent(side, fork, 0));
    OK(cudaMemcpyAsync(memory, host, 4, H2D, side));
    OK(cudaMemsetAsync(memory + 8, 9, 4, origin));
    OK(cudaEventRecord(join, side));
    CHECK(cudaEventQuery(join) == 907 && cudaEventSynchronize(join) == 907);
    OK(cudaStreamIsCapturing(side, &status));
    CHECK(status == 1);
    OK(cudaStreamWaitEvent(origin, join, 0));
    unsigned long long id = 0;
    void **before, *nodes[8], *node_before[8];
    size_t count = 0;
    OK(cudaStreamGetCaptureInfo(origin, &status, &id, 0, &before, 0, &count));
    CHECK(status == 1 && id == 1 && count == 2);
    OK(cudaLaunchHostFunc(origin, count_up, &number));
    OK(prism_marker(2, origin));
    launch_a(other);
    void *graph, *executable, *second, *object;
    CHECK(cudaStreamEndCapture(side, &graph) == 903);
    OK(cudaStreamEndCapture(origin, &graph));
    CHECK(cudaStreamEndCapture(origin, &second) == 401 && second == 0);
    CHECK(number == 0 && memory[0] == 0 && memory[8] == 0);
    OK(cudaGraphGetNodes(graph, 0, &count));
    CHECK(count == 4);
    OK(cudaGraphGetNodes(graph, nodes, &count));
    static const int types[] = {0, 1, 2, 3};
    for (int i = 0; i < 4; i++) {
        int type;
        OK(cudaGraphNodeGetType(nodes[i], &type));
        CHECK(type == types[i]);
    }
    count = 8;
    OK(cudaGraphNodeGetDependencies(nodes[3], node_before, 0, &count));
    CHECK(count == 2 && node_before[0] == nodes[1] && node_before[1] == nodes[2]);
    OK(cudaGraphInstantiateWithFlags(&executable, graph, 0));
    int freed = 0;
    OK(cudaUserObjectCreate(&object, &freed, count_up, 1, 0));
    OK(cudaGraphRetainUserObject(graph, object, 1, 1));
    OK(cudaGraphDestroy(graph));
    CHECK(freed == 1 && cudaGraphDestroy(graph) == 1);
    OK(cudaGraphLaunch(executable, other));
    CHECK(number == 1 && memory[0] == 'a' && memory[8] == 9);
    strcpy(host, "xyz");
    OK(cudaGraphLaunch(executable, other));
    CHECK(number == 2 && memory[0] == 'x');
    /* A graph of another shape is no update; one of the same shape is. */
    OK(cudaStreamBeginCapture(origin, 2));
    launch_a(origin);
    OK(cudaStreamEndCapture(origin, &second));
    CHECK(cudaGraphExecUpdate(executable, second, 0) == 910);
    OK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphLaunch(executable, other) == 1);
    /* Mistakes. */
    CHECK(cudaStreamBeginCapture(0, 0) == 900);
    OK(cudaStreamBeginCapture(origin, 0));
    CHECK(cudaStreamSynchronize(origin) == 900 && cudaStreamEndCapture(origin, &second) == 901);
    OK(cudaStreamBeginCapture(origin, 0));
    CHECK(cudaStreamWaitEvent(origin, outside, 0) == 905 && cudaStreamEndCapture(origin, &second) == 901);
    OK(cudaStreamBeginCapture(origin, 0));
    OK(cudaEventRecord(fork, origin));
    OK(cudaStreamWaitEvent(side, fork, 0));
    launch_a(side);
    CHECK(cudaStreamEndCapture(origin, &second) == 904);
    OK(cudaStreamIsCapturing(side, &status));
    CHECK(status == 0);
}

static void unsupported(void) {
    int count;
    OK(cudaGetDeviceCount(&count));
    CHECK(cudaStreamBeginCaptureToGraph(0, 0, 0, 0, 0, 0) == 801 && cudaStreamBeginCaptureToGraph(0, 0, 0, 0, 0, 0) == 801);
    CHECK(prism_unsupported_call("cufftPlan1d") == -1);
}

static void forked(void) {
    int count;
    OK(cudaGetDeviceCount(&count));
    sleep(100000);
    pid_t child = fork();
    if (child == 0) {
        /* The device cannot be used, and time is real again. */
        int bad = cudaGetDeviceCount(&count) != 3 || cudaDeviceSynchronize() != 3;
        int64_t difference = ns(CLOCK_MONOTONIC) - real_ns();
        _exit(bad || difference > 1000000000 || difference < -1000000000);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    OK(cudaDeviceSynchronize());
}

/* What a watchdog goes through while the process takes itself apart. */
static event_t watched;
static int asked, alarms, answered = -1;

static void *monitor(void *unused) {
    (void)unused;
    CHECK(pthread_mutex_lock(&mutex) == 0);
    int64_t start = ns(CLOCK_MONOTONIC);
    while (!asked) {
        struct timespec until = at(ns(CLOCK_REALTIME) + 480000000000LL);
        if (pthread_cond_timedwait(&cond, &mutex, &until) == ETIMEDOUT) alarms++;
    }
    answered = cudaEventQuery(watched);
    if (ns(CLOCK_MONOTONIC) - start > 100000000000LL) alarms++;
    CHECK(pthread_mutex_unlock(&mutex) == 0);
    return 0;
}

static pthread_t monitoring;

static void at_the_end(void) {
    int count;
    CHECK(cudaGetDeviceCount(&count) == 4 && cudaDeviceSynchronize() == 4 && cudaFree((void *)0x200000000000) == 4);
    CHECK(cudaEventQuery(watched) == 4);
    syscall(SYS_nanosleep, &(struct timespec){1, 500000000}, 0);
    CHECK(pthread_mutex_lock(&mutex) == 0);
    asked = 1;
    CHECK(pthread_cond_signal(&cond) == 0 && pthread_mutex_unlock(&mutex) == 0);
    CHECK(pthread_join(monitoring, 0) == 0);
    CHECK(answered == 0 || answered == 600);
    CHECK(alarms == 0);
    puts("ended");
}

static void exiting(void) {
    register_kernels();
    int count;
    /* Registered before the session's own handler, so run after it, as a static destructor of a library would be. */
    CHECK(atexit(at_the_end) == 0);
    void *pointer;
    OK(cudaGetDeviceCount(&count));
    OK(cudaMalloc(&pointer, 100));
    OK(cudaEventCreate(&watched));
    launch_a(0);
    OK(cudaEventRecord(watched, 0));
    CHECK(pthread_create(&monitoring, 0, monitor, 0) == 0);
    syscall(SYS_nanosleep, &(struct timespec){0, 50000000}, 0);
}

/* A thread that takes longer for its work than any scheduler's slice, because the machine is busy. */
static int work_done;

static void *slow_worker(void *unused) {
    (void)unused;
    for (int i = 0; i < 2; i++) {
        usleep(100000);
        int64_t start = real_ns();
        while (real_ns() - start < 300000000) {}
        work_done++;
    }
    return 0;
}

static void slow(void) {
    register_kernels();
    int count;
    OK(cudaGetDeviceCount(&count));
    pthread_t thread;
    CHECK(pthread_create(&thread, 0, slow_worker, 0) == 0);
    syscall(SYS_nanosleep, &(struct timespec){0, 50000000}, 0);
    for (int i = 0; i < 2; i++) {
        usleep(150000);
        launch_a(0);
        CHECK(work_done == i + 1);
    }
    CHECK(pthread_join(thread, 0) == 0);
}

static void speed(void) {
    register_kernels();
    int count;
    void *kernel;
    OK(cudaGetDeviceCount(&count));
    OK(__cudaGetKernel(&kernel, &stub_a));
    /* Bursts that fit the ring, so that the engine of the test is not what is measured. */
    enum { BURST = 2000, BURSTS = 200 };
    int64_t best = INT64_MAX, sum = 0;
    for (int burst = 0; burst < BURSTS; burst++) {
        int64_t before = real_ns();
        for (int i = 0; i < BURST; i++) __cudaLaunchKernel(kernel, (dim3){1, 1, 1}, (dim3){256, 1, 1}, 0, 0, 0);
        int64_t took = real_ns() - before;
        best = took < best ? took : best;
        sum += took;
        OK(cudaDeviceSynchronize());
    }
    printf("%.1f ns per launch at best, %.1f on average\n", (double)best / BURST, (double)sum / BURST / BURSTS);
    int64_t start = real_ns();
    for (int i = 0; i < 20000; i++) OK(cudaDeviceSynchronize());
    printf("%.1f ns per synchronisation\n", (double)(real_ns() - start) / 20000);
    start = real_ns();
    static char hosts[71000];
    void **handle = __cudaRegisterFatBinary(hosts);
    for (int i = 0; i < 71000; i++) __cudaRegisterFunction(handle, hosts + i, 0, "name", -1, 0, 0, 0, 0, 0);
    printf("%.1f ms for 71,000 registrations\n", (double)(real_ns() - start) / 1e6);
}

int main(int argc, char **argv) {
    static const struct { const char *name; void (*run)(void); } SCENARIOS[] = {
        {"inert", inert}, {"no_engine", no_engine}, {"records", records}, {"memory", memory},
        {"virtual_memory", virtual_memory}, {"clocks", clocks}, {"streams", streams}, {"unsupported", unsupported},
        {"graphs", graphs},
        {"forked", forked}, {"exiting", exiting}, {"handover", handover},
        {"slow", slow}, {"speed", speed},
    };
    if (argc == 2 && strcmp(argv[1], "functions") == 0) return fputs(prism_cuda_functions(), stdout) < 0;
    for (size_t i = 0; argc == 2 && i < sizeof SCENARIOS / sizeof *SCENARIOS; i++) {
        if (strcmp(argv[1], SCENARIOS[i].name) == 0) {
            SCENARIOS[i].run();
            return 0;
        }
    }
    fprintf(stderr, "no such scenario\n");
    return 2;
}
