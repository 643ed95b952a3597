// A CUDA driver without a GPU, for tests of what holds a real device's streams: streams are threads that work in wall-clock
// time, device memory is host memory, and the one kernel it knows is `prism_hold` (what shim/gpu/src/hold.ptx says, in C).
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int CUresult;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, NOT_FOUND = 500 };

typedef struct event {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  uint64_t recorded, reached;
  int references;
} event;

typedef struct op {
  enum { HOLD, WORK, COPY, RECORD, WAIT, END } kind;
  volatile uint32_t *slot;
  uint32_t number;
  uint64_t ns;
  void *to;
  const void *from;
  size_t bytes;
  event *event;
  uint64_t position;
  struct op *next;
} op;

typedef struct stream {
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  op *first, *last;
  uint64_t enqueued, done;
  int capturing;
} stream;

static stream *default_stream;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static __thread void *current_context;
static int the_context;
static uint64_t holds, blocks_of_last_hold;

static void nap(uint64_t ns) {
  struct timespec time = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
  nanosleep(&time, NULL);
}

static void drop(event *e) {
  pthread_mutex_lock(&e->lock);
  int left = --e->references;
  pthread_mutex_unlock(&e->lock);
  if (left == 0) free(e);
}

static void run(op *o) {
  switch (o->kind) {
  case HOLD:
    __atomic_store_n(&o->slot[0], o->number, __ATOMIC_RELEASE);
    while ((int32_t)(__atomic_load_n(&o->slot[1], __ATOMIC_ACQUIRE) - o->number) < 0) sched_yield();
    break;
  case WORK: nap(o->ns); break;
  case COPY: memcpy(o->to, o->from, o->bytes); break;
  case RECORD:
    pthread_mutex_lock(&o->event->lock);
    if (o->event->reached < o->position) o->event->reached = o->position;
    pthread_cond_broadcast(&o->event->changed);
    pthread_mutex_unlock(&o->event->lock);
    drop(o->event);
    break;
  case WAIT:
    pthread_mutex_lock(&o->event->lock);
    while (o->event->reached < o->position) pthread_cond_wait(&o->event->changed, &o->event->lock);
    pthread_mutex_unlock(&o->event->lock);
    drop(o->event);
    break;
  case END: break;
  }
}

static void *work(void *argument) {
  stream *s = argument;
  current_context = &the_context;
  for (;;) {
    pthread_mutex_lock(&s->lock);
    while (!s->first) pthread_cond_wait(&s->changed, &s->lock);
    op *o = s->first;
    s->first = o->next;
    if (!s->first) s->last = NULL;
    pthread_mutex_unlock(&s->lock);
    run(o);
    free(o);
    pthread_mutex_lock(&s->lock);
    s->done++;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
  }
  return NULL;
}

static stream *new_stream(void) {
  stream *s = calloc(1, sizeof *s);
  pthread_mutex_init(&s->lock, NULL);
  pthread_cond_init(&s->changed, NULL);
  pthread_create(&s->thread, NULL, work, s);
  return s;
}

static void make_default(void) { default_stream = new_stream(); }

static stream *stream_of(void *handle) {
  pthread_once(&once, make_default);
  return handle ? handle : default_stream;
}

static void enqueue(void *handle, op value) {
  stream *s = stream_of(handle);
  op *o = malloc(sizeof *o);
  *o = value;
  o->next = NULL;
  pthread_mutex_lock(&s->lock);
  if (s->last) s->last->next = o;
  else s->first = o;
  s->last = o;
  s->enqueued++;
  pthread_cond_broadcast(&s->changed);
  pthread_mutex_unlock(&s->lock);
}

CUresult cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }
CUresult cuGetErrorName(CUresult code, const char **name) {
  *name = code == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT" : "CUDA_ERROR_OF_THE_TEST";
  return SUCCESS;
}
CUresult cuCtxGetCurrent(void **context) { *context = current_context; return SUCCESS; }
CUresult cuCtxSetCurrent(void *context) { current_context = context; return SUCCESS; }
CUresult cuCtxGetDevice(int *device) { *device = 0; return current_context ? SUCCESS : INVALID_CONTEXT; }
CUresult cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) {
  (void)flags;
  *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return *memory ? SUCCESS : OUT_OF_MEMORY;
}
CUresult cuMemHostGetDevicePointer_v2(uint64_t *device, void *host, unsigned flags) {
  (void)flags;
  *device = (uint64_t)host;
  return SUCCESS;
}
CUresult cuModuleLoadData(void **module, const void *image) {
  if (!strstr(image, ".visible .entry prism_hold(.param .u64 slot, .param .u32 number)")) return INVALID_VALUE;
  *module = &the_context;
  return SUCCESS;
}
CUresult cuModuleGetFunction(void **function, void *module, const char *name) {
  (void)module;
  *function = &the_context;
  return strcmp(name, "prism_hold") ? NOT_FOUND : SUCCESS;
}
CUresult cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                        unsigned shared, void *handle, void **arguments, void **extra) {
  (void)function, (void)threads, (void)ty, (void)tz, (void)shared, (void)extra;
  if (!current_context) return INVALID_CONTEXT;
  op o = {.kind = HOLD, .slot = (uint32_t *)*(uint64_t *)arguments[0], .number = *(uint32_t *)arguments[1]};
  __atomic_add_fetch(&holds, 1, __ATOMIC_RELAXED);
  __atomic_store_n(&blocks_of_last_hold, (uint64_t)x * y * z, __ATOMIC_RELAXED);
  enqueue(handle, o);
  return SUCCESS;
}
CUresult cuEventCreate(void **handle, unsigned flags) {
  (void)flags;
  event *e = calloc(1, sizeof *e);
  pthread_mutex_init(&e->lock, NULL);
  pthread_cond_init(&e->changed, NULL);
  e->references = 1;
  *handle = e;
  return SUCCESS;
}
CUresult cuEventRecord(void *handle, void *on) {
  event *e = handle;
  pthread_mutex_lock(&e->lock);
  op o = {.kind = RECORD, .event = e, .position = ++e->recorded};
  e->references++;
  pthread_mutex_unlock(&e->lock);
  enqueue(on, o);
  return SUCCESS;
}
CUresult cuStreamWaitEvent(void *on, void *handle, unsigned flags) {
  (void)flags;
  event *e = handle;
  pthread_mutex_lock(&e->lock);
  op o = {.kind = WAIT, .event = e, .position = e->recorded};
  e->references++;
  pthread_mutex_unlock(&e->lock);
  enqueue(on, o);
  return SUCCESS;
}
CUresult cuEventDestroy_v2(void *handle) { drop(handle); return SUCCESS; }
CUresult cuStreamCreate(void **handle, unsigned flags) { (void)flags; *handle = new_stream(); return SUCCESS; }
CUresult cuStreamSynchronize(void *handle) {
  stream *s = stream_of(handle);
  pthread_mutex_lock(&s->lock);
  uint64_t target = s->enqueued;
  while (s->done < target) pthread_cond_wait(&s->changed, &s->lock);
  pthread_mutex_unlock(&s->lock);
  return SUCCESS;
}
CUresult cuStreamIsCapturing(void *handle, int *status) { *status = stream_of(handle)->capturing; return SUCCESS; }
CUresult cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void *on) {
  op o = {.kind = COPY, .to = (void *)to, .from = (const void *)from, .bytes = bytes};
  enqueue(on, o);
  return SUCCESS;
}
CUresult cuMemAlloc_v2(uint64_t *address, size_t bytes) { *address = (uint64_t)calloc(1, bytes); return *address ? SUCCESS : OUT_OF_MEMORY; }
CUresult cuMemFree_v2(uint64_t address) { free((void *)address); return SUCCESS; }

// For the tests' programs: make the calling thread one of the device, let a stream work for a time, pretend to capture.
void fake_begin(void) { current_context = &the_context; }
void fake_work(void *on, uint64_t ns) { op o = {.kind = WORK, .ns = ns}; enqueue(on, o); }
void fake_capture(void *on, int is_on) { stream_of(on)->capturing = is_on; }
uint64_t fake_holds(void) { return __atomic_load_n(&holds, __ATOMIC_RELAXED); }
uint64_t fake_blocks(void) { return __atomic_load_n(&blocks_of_last_hold, __ATOMIC_RELAXED); }
