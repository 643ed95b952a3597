/* A session owner for tests: what libprism_cuda.so offers to the NCCL library, with everything kept in arrays.
 * Include it in one file of the program (linked with -rdynamic) or of a library loaded into the global scope. */
#ifndef PRISM_TEST_SESSION_H
#define PRISM_TEST_SESSION_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))

typedef struct {
    uint16_t kind, flags;
    uint32_t stream;
    int64_t host_ns;
    uint64_t a, b, c, d;
    uint32_t e, f, g, h;
} Record;

enum { MEMCPY = 4, COLLECTIVE = 32, SEND = 33, RECV = 34, GROUP_END = 35, COMM_DESTROY = 36 };
enum { NOTE = 7, UNSUPPORTED = 6, COMM_INIT = 4, COMM_SPLIT = 5, COMM_MEMBERS = 8, COMM_MEMORY = 9, COMM_ESTIMATE = 10 };
enum { STREAM_QUERY = 12, BACKGROUND = 1 };

typedef struct {
    uint32_t kind;
    size_t length;
    unsigned char payload[512];
} Frame;

#define MAX_RECORDS (1 << 16)
#define MAX_FRAMES 256
#define ARENA_BYTES (8u << 20)

EXPORTED Record prism_test_records[MAX_RECORDS];
EXPORTED unsigned prism_test_num_records;
EXPORTED Frame prism_test_frames[MAX_FRAMES];
EXPORTED unsigned prism_test_num_frames;
EXPORTED int64_t prism_test_clock_ns;
EXPORTED int prism_test_engine_is_dead;
EXPORTED int prism_test_refuse_init;
EXPORTED int prism_test_is_capturing;
/* While set, an append waits, as it does with a full ring. */
EXPORTED volatile int prism_test_ring_is_full;
EXPORTED volatile int prism_test_num_waiting;
EXPORTED char prism_test_group_name[64];
/* "Device memory": one arena, handed out upwards. */
EXPORTED unsigned char *prism_test_arena;
static size_t arena_used;

static int test_append(const Record *record, int64_t cost_ns) {
    while (prism_test_ring_is_full) prism_test_num_waiting = 1;
    if (prism_test_engine_is_dead) return -1;
    prism_test_clock_ns += cost_ns;
    unsigned number = __atomic_fetch_add(&prism_test_num_records, 1, __ATOMIC_RELAXED);
    Record *slot = &prism_test_records[number % MAX_RECORDS];
    *slot = *record;
    slot->host_ns = prism_test_clock_ns;
    return 0;
}

static int test_append_unless(const Record *record, int64_t cost_ns, int (*is_cancelled)(const void *), const void *context) {
    while (prism_test_ring_is_full) {
        prism_test_num_waiting = 1;
        if (is_cancelled(context)) return 1;
    }
    return test_append(record, cost_ns);
}

static int test_query(const Record *record, void *reply) {
    (void)reply;
    return record->kind == STREAM_QUERY && record->flags == BACKGROUND ? 0 : -1;
}

static intptr_t test_control(uint32_t kind, const unsigned char *payload, size_t length, unsigned char *answer, size_t capacity) {
    if (prism_test_engine_is_dead) return -1;
    if (prism_test_num_frames == MAX_FRAMES) abort();
    Frame *frame = &prism_test_frames[prism_test_num_frames++];
    frame->kind = kind;
    frame->length = length;
    memcpy(frame->payload, payload, length < sizeof frame->payload ? length : sizeof frame->payload);
    if (kind == COMM_INIT && prism_test_refuse_init) {
        const char text[] = "no such communicator";
        memcpy(answer, text, sizeof text);
        return -2;
    }
    if (kind == COMM_MEMORY || kind == COMM_ESTIMATE) {
        uint64_t number = kind == COMM_MEMORY ? 308281344 : 12500;
        memcpy(answer, &number, sizeof number);
        return sizeof number;
    }
    if (kind == COMM_SPLIT) {
        int32_t color;
        memcpy(&color, payload + 8, 4);
        uint32_t sizes[2] = {color < 0 ? 0 : 4, color < 0 ? 0 : 3};
        if (capacity < sizeof sizes) return -3;
        memcpy(answer, sizes, sizeof sizes);
        return sizeof sizes;
    }
    return 0;
}

static uint32_t test_stream_id(const void *stream) { return (uint32_t)(uintptr_t)stream; }
static int test_is_capturing(const void *stream) { return stream != NULL && prism_test_is_capturing; }
static int test_current_device(void) { return 3; }

static int test_is_device_memory(const void *pointer, size_t bytes) {
    uintptr_t at = (uintptr_t)pointer, base = (uintptr_t)prism_test_arena;
    return prism_test_arena && at >= base && bytes <= ARENA_BYTES && at - base <= ARENA_BYTES - bytes;
}

static void *test_device_alloc(size_t bytes) {
    if (!prism_test_arena) prism_test_arena = calloc(1, ARENA_BYTES);
    if (bytes > ARENA_BYTES - arena_used) return NULL;
    void *pointer = prism_test_arena + arena_used;
    arena_used += bytes;
    return pointer;
}

static int test_device_free(void *pointer) { return test_is_device_memory(pointer, 1) ? 0 : -1; }

static const char *test_config(const char *key) { return strcmp(key, "host.nccl_ns") == 0 ? "1500" : NULL; }

static int test_is_real(void) { return 0; }
static int test_attach(void (*run)(void *), void *data) { (void)run, (void)data; return -1; }
static int test_copy(void *to, const void *from, size_t bytes) { (void)to, (void)from, (void)bytes; return -1; }

/* A graph of one captured call. */
EXPORTED void (*prism_test_at_launch)(void *), (*prism_test_after_launches)(void *);
EXPORTED void *prism_test_launch_data;
static int test_at_launch(uint32_t stream, void (*run)(void *), void (*done)(void *), void *data) {
    (void)stream;
    prism_test_at_launch = run, prism_test_after_launches = done, prism_test_launch_data = data;
    return 0;
}

/* The last fate of a receive buffer that was told, and for how many bytes. */
EXPORTED int prism_test_received_fate = -1;
EXPORTED size_t prism_test_received_bytes;
static void test_received(const void *to, size_t bytes, const void *from, size_t from_bytes, const char *name, int fate) {
    (void)to, (void)from, (void)from_bytes;
    if (strncmp(name, "nccl", 4) != 0) abort();
    prism_test_received_fate = fate;
    prism_test_received_bytes = bytes;
}

typedef struct {
    size_t size;
    int (*append)(const Record *, int64_t);
    int (*query)(const Record *, void *);
    intptr_t (*control)(uint32_t, const unsigned char *, size_t, unsigned char *, size_t);
    uint32_t (*stream_id)(const void *);
    int (*is_capturing)(const void *);
    int (*current_device)(void);
    int (*is_device_memory)(const void *, size_t);
    void *(*device_alloc)(size_t);
    int (*device_free)(void *);
    const char *(*config)(const char *);
    int (*is_real)(void);
    int (*attach)(void (*)(void *), void *);
    int (*copy)(void *, const void *, size_t);
    void (*received)(const void *, size_t, const void *, size_t, const char *, int);
    int (*append_unless)(const Record *, int64_t, int (*)(const void *), const void *);
    int (*at_launch)(uint32_t, void (*)(void *), void (*)(void *), void *);
} SessionTable;

static const SessionTable TABLE = {
    sizeof(SessionTable), test_append, test_query, test_control, test_stream_id, test_is_capturing, test_current_device,
    test_is_device_memory, test_device_alloc, test_device_free, test_config,
    test_is_real, test_attach, test_copy, test_received,
    test_append_unless, test_at_launch,
};

EXPORTED const SessionTable *prism_session_table_v1(void) { return &TABLE; }
EXPORTED const char *prism_current_group(void) { return prism_test_group_name[0] ? prism_test_group_name : NULL; }
EXPORTED void *prism_test_alloc(size_t bytes) { return test_device_alloc((bytes + 255) / 256 * 256); }

#endif
