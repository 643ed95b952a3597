/* Calls the library as a C program does, on an emulated device played by session.h. Prints the first failed check. */
#include "nccl_api.h"
#include "session.h"

#include <pthread.h>
#include <stdio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition);      \
            exit(1);                                                                      \
        }                                                                                 \
    } while (0)
#define EQUAL(left, right)                                                                        \
    do {                                                                                          \
        long long l_ = (long long)(left), r_ = (long long)(right);                                \
        if (l_ != r_) {                                                                           \
            fprintf(stderr, "%s:%d: %s is %lld, not %lld (%s)\n", __FILE__, __LINE__, #left, l_,  \
                    r_, ncclGetLastError(NULL));                                                  \
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)
#define LAST_ERROR_HAS(text) CHECK(strstr(ncclGetLastError(NULL), text))

static cudaStream_t STREAM = (cudaStream_t)7;

static ncclComm_t make_comm(int nranks, int rank) {
    ncclUniqueId id;
    ncclComm_t comm = NULL;
    EQUAL(ncclGetUniqueId(&id), ncclSuccess);
    EQUAL(ncclCommInitRank(&comm, nranks, id, rank), ncclSuccess);
    CHECK(comm != NULL);
    return comm;
}

static Record *last_record(unsigned back) { return &prism_test_records[prism_test_num_records - 1 - back]; }
static Frame *last_frame(void) { return &prism_test_frames[prism_test_num_frames - 1]; }

static Frame *find_frame(uint32_t kind, const char *text) {
    for (unsigned i = prism_test_num_frames; i-- > 0;) {
        Frame *frame = &prism_test_frames[i];
        if (frame->kind == kind && memmem(frame->payload, frame->length, text, strlen(text))) return frame;
    }
    return NULL;
}

static void init_and_facts(void) {
    ncclUniqueId id, ids[3];
    ncclComm_t comm = (ncclComm_t)1;
    EQUAL(ncclGetUniqueId(&id), ncclSuccess);
    CHECK(memcmp(id.internal, "PRISMIDL", 8) == 0);
    EQUAL(ncclCommInitRank(NULL, 8, id, 5), ncclInvalidArgument);
    EQUAL(ncclCommInitRank(&comm, 8, id, 8), ncclInvalidArgument);
    CHECK(comm == NULL);
    EQUAL(prism_test_num_frames, 0);

    EQUAL(ncclCommInitRank(&comm, 8, id, 5), ncclSuccess);
    EQUAL(prism_test_num_frames, 1);
    EQUAL(last_frame()->kind, COMM_INIT);
    EQUAL(last_frame()->length, 12 + 128);
    uint32_t head[3];
    memcpy(head, last_frame()->payload, sizeof head);
    EQUAL(head[0], 1);
    EQUAL(head[1], 8);
    EQUAL(head[2], 5);
    CHECK(memcmp(last_frame()->payload + 12, id.internal, 128) == 0);

    int value = -1;
    EQUAL(ncclCommCount(comm, &value), ncclSuccess);
    EQUAL(value, 8);
    EQUAL(ncclCommUserRank(comm, &value), ncclSuccess);
    EQUAL(value, 5);
    EQUAL(ncclCommCuDevice(comm, &value), ncclSuccess);
    EQUAL(value, 3);
    EQUAL(ncclCommGetAsyncError(comm, &value), ncclSuccess);
    EQUAL(value, ncclSuccess);

    memset(ids, 0, sizeof ids);
    ids[0] = id;
    ncclComm_t other = NULL;
    EQUAL(ncclCommInitRankScalable(&other, 8, 5, 9, ids, NULL), ncclInvalidArgument);
    EQUAL(ncclCommInitRankScalable(&other, 8, 5, 3, ids, NULL), ncclSuccess);
    memcpy(head, last_frame()->payload, sizeof head);
    EQUAL(head[0], 2);
    CHECK(memcmp(last_frame()->payload + 12, id.internal, 128) == 0);

    prism_test_refuse_init = 1;
    ncclComm_t none = (ncclComm_t)1;
    EQUAL(ncclCommInitRank(&none, 8, id, 5), ncclInvalidUsage);
    CHECK(none == NULL);
    LAST_ERROR_HAS("no such communicator");
    prism_test_refuse_init = 0;

    EQUAL(ncclCommFinalize(other), ncclSuccess);
    EQUAL(ncclCommFinalize(other), ncclInvalidArgument);
    EQUAL(ncclCommDestroy(other), ncclSuccess);
    EQUAL(last_record(0)->kind, COMM_DESTROY);
    EQUAL(last_record(0)->e, 2);
    EQUAL(ncclCommDestroy(other), ncclInvalidArgument);
    EQUAL(ncclCommCount(other, &value), ncclInvalidArgument);
    EQUAL(ncclCommDestroy(comm), ncclSuccess);

    int device = 0;
    EQUAL(ncclCommInitAll(&comm, 2, NULL), ncclInvalidUsage);
    LAST_ERROR_HAS("ncclCommInitAll");
    EQUAL(ncclCommInitAll(&comm, 1, &device), ncclSuccess);
    EQUAL(ncclCommCuDevice(comm, &value), ncclSuccess);
    EQUAL(value, 0);
    EQUAL(ncclCommDestroy(comm), ncclSuccess);
}

static void configs(void) {
    static const struct { size_t size; unsigned version; } SIZES[] = {
        {48, 21803}, {72, 22707}, {80, 22809}, {88, 22907}, {96, 23007}, {112, 23102}, {120, 23203}};
    ncclUniqueId id;
    ncclComm_t comm;
    ncclGetUniqueId(&id);
    for (unsigned i = 0; i < sizeof SIZES / sizeof *SIZES; i++) {
        /* Exactly as large as it says: reading past the end would hit the guard value under valgrind. */
        unsigned char *config = malloc(SIZES[i].size);
        unsigned magic = 0xcafebeef, undefined = 0x80000000u;
        for (size_t at = 16; at + 4 <= SIZES[i].size; at += 4) memcpy(config + at, &undefined, 4);
        memset(config + 32, 0, 8);
        if (SIZES[i].size > 48) memset(config + 48, 0, 8);
        memcpy(config, &SIZES[i].size, 8);
        memcpy(config + 8, &magic, 4);
        memcpy(config + 12, &SIZES[i].version, 4);
        EQUAL(ncclCommInitRankConfig(&comm, 2, id, 0, config), ncclSuccess);
        EQUAL(ncclCommDestroy(comm), ncclSuccess);

        int blocking = 0;
        memcpy(config + 16, &blocking, 4);
        EQUAL(ncclCommInitRankConfig(&comm, 2, id, 0, config), ncclInProgress);
        /* A non-blocking communicator must not be used before a poll has said that it is ready. */
        int error = -1;
        EQUAL(ncclAllReduce(NULL, NULL, 1, ncclInt8, ncclSum, comm, STREAM), ncclInvalidArgument);
        LAST_ERROR_HAS("before its previous operation");
        EQUAL(ncclCommGetAsyncError(comm, &error), ncclSuccess);
        EQUAL(error, ncclSuccess);
        EQUAL(ncclAllReduce(NULL, NULL, 1, ncclInt8, ncclSum, comm, STREAM), ncclInProgress);
        EQUAL(ncclCommGetAsyncError(comm, &error), ncclSuccess);
        EQUAL(error, ncclSuccess);
        /* It keeps its error, and is not ready afterwards. */
        EQUAL(ncclAllReduce(NULL, NULL, 1, 99, ncclSum, comm, STREAM), ncclInvalidArgument);
        EQUAL(ncclCommGetAsyncError(comm, &error), ncclSuccess);
        EQUAL(error, ncclInvalidArgument);
        EQUAL(ncclAllReduce(NULL, NULL, 1, ncclInt8, ncclSum, comm, STREAM), ncclInvalidArgument);
        EQUAL(ncclCommDestroy(comm), ncclSuccess);

        blocking = 2;
        memcpy(config + 16, &blocking, 4);
        EQUAL(ncclCommInitRankConfig(&comm, 2, id, 0, config), ncclInvalidArgument);
        LAST_ERROR_HAS("blocking");
        memset(config + 8, 0, 4);
        EQUAL(ncclCommInitRankConfig(&comm, 2, id, 0, config), ncclInvalidArgument);
        CHECK(comm == NULL);
        free(config);
    }
}

static void records(void) {
    ncclComm_t comm = make_comm(8, 5);
    void *buffer = prism_test_alloc(64);
    unsigned before = prism_test_num_records;
    int64_t clock = prism_test_clock_ns;

    EQUAL(ncclAllReduce(buffer, buffer, 4, ncclFloat32, ncclMax, comm, STREAM), ncclSuccess);
    EQUAL(prism_test_num_records, before + 1);
    Record *record = last_record(0);
    EQUAL(record->kind, COLLECTIVE);
    EQUAL(record->stream, 7);
    EQUAL(record->a, 4);
    EQUAL(record->f, 0 | ncclFloat32 << 8 | ncclMax << 16);
    EQUAL(record->g, 0);
    EQUAL(record->h, 0);
    EQUAL(record->flags, 0);
    EQUAL(prism_test_clock_ns, clock + 1500);

    EQUAL(ncclReduce(buffer, buffer, 4, ncclBfloat16, ncclSum, 6, comm, NULL), ncclSuccess);
    EQUAL(last_record(0)->f, 4 | ncclBfloat16 << 8);
    EQUAL(last_record(0)->g, 6);
    EQUAL(last_record(0)->stream, 0);
    EQUAL(ncclSend(buffer, 9, ncclUint8, 2, comm, STREAM), ncclSuccess);
    EQUAL(last_record(0)->kind, SEND);
    EQUAL(last_record(0)->a, 9);
    EQUAL(last_record(0)->f, ncclUint8 << 8);
    EQUAL(last_record(0)->g, 2);
    EQUAL(ncclRecv(buffer, 0, ncclInt64, 7, comm, STREAM), ncclSuccess);
    EQUAL(last_record(0)->kind, RECV);
    EQUAL(last_record(0)->a, 0);

    /* Refused in NCCL's order, and nothing sent. */
    before = prism_test_num_records;
    EQUAL(ncclReduce(buffer, buffer, 4, 99, -1, 8, comm, STREAM), ncclInvalidArgument);
    LAST_ERROR_HAS("root");
    EQUAL(ncclReduce(buffer, buffer, 4, 12, -1, 7, comm, STREAM), ncclInvalidArgument);
    LAST_ERROR_HAS("type");
    EQUAL(ncclReduce(buffer, buffer, 4, ncclInt8, -1, 7, comm, STREAM), ncclInvalidArgument);
    LAST_ERROR_HAS("operation");
    EQUAL(ncclReduce(buffer, buffer, 4, ncclInt8, 5, 7, comm, STREAM), ncclInvalidArgument);
    EQUAL(ncclSend(buffer, 4, ncclInt8, -1, comm, STREAM), ncclInvalidArgument);
    EQUAL(ncclSend(buffer, 4, ncclInt8, 5, comm, STREAM), ncclInvalidUsage);
    EQUAL(ncclRecv(buffer, 4, ncclInt8, 5, comm, STREAM), ncclInvalidUsage);
    /* Nothing to do: no record either. */
    EQUAL(ncclAllGather(buffer, buffer, 0, ncclInt8, comm, STREAM), ncclSuccess);
    EQUAL(prism_test_num_records, before);

    /* Captured: nothing is received until the graph is launched, and then at every launch. */
    int32_t *counts = prism_test_alloc(8);
    counts[0] = 3;
    prism_test_is_capturing = 1;
    EQUAL(ncclAllReduce(counts, counts, 2, ncclInt32, ncclSum, comm, STREAM), ncclSuccess);
    EQUAL(last_record(0)->flags, 2);
    prism_test_is_capturing = 0;
    EQUAL(counts[0], 3);
    for (int launch = 0; launch < 2; launch++) {
        counts[0] = 3 + launch;
        prism_test_at_launch(prism_test_launch_data);
        EQUAL(counts[0], 8 * (3 + launch));
    }
    prism_test_after_launches(prism_test_launch_data);

    EQUAL(pncclAllReduce(buffer, buffer, 4, ncclFloat32, ncclSum, comm, STREAM), ncclSuccess);
    EQUAL(last_record(0)->kind, COLLECTIVE);

    EQUAL(ncclCommRevoke(comm, 0), ncclSuccess);
    EQUAL(ncclAllReduce(buffer, buffer, 4, ncclFloat32, ncclSum, comm, STREAM), ncclInvalidUsage);
    EQUAL(ncclCommDestroy(comm), ncclSuccess);

    /* One rank: a copy, or nothing in place. */
    comm = make_comm(1, 0);
    float *from = prism_test_alloc(8), *to = prism_test_alloc(8);
    from[0] = 1.5f;
    before = prism_test_num_records;
    EQUAL(ncclAllReduce(from, from, 1, ncclFloat32, ncclSum, comm, STREAM), ncclSuccess);
    EQUAL(prism_test_num_records, before);
    EQUAL(ncclAllReduce(from, to, 1, ncclFloat32, ncclSum, comm, STREAM), ncclSuccess);
    EQUAL(last_record(0)->kind, MEMCPY);
    EQUAL(last_record(0)->a, 4);
    EQUAL(last_record(0)->b, 3);
    CHECK(to[0] == 1.5f);
    EQUAL(ncclCommDestroy(comm), ncclSuccess);
}

static void *end_group(void *result) {
    *(int *)result = ncclGroupEnd();
    return NULL;
}

static void groups(void) {
    ncclComm_t one = make_comm(4, 1), two = make_comm(2, 0);
    char *buffer = prism_test_alloc(64);
    unsigned before = prism_test_num_records;
    EQUAL(ncclGroupStart(), ncclSuccess);
    EQUAL(ncclGroupStart(), ncclSuccess);
    EQUAL(ncclSend(buffer, 4, ncclInt8, 2, one, STREAM), ncclSuccess);
    EQUAL(ncclGroupEnd(), ncclSuccess);
    EQUAL(ncclRecv(buffer, 4, ncclInt8, 3, one, STREAM), ncclSuccess);
    EQUAL(ncclAllReduce(buffer, buffer, 1, ncclInt8, ncclMax, two, (cudaStream_t)9), ncclSuccess);
    EQUAL(prism_test_num_records, before);
    EQUAL(ncclGroupEnd(), ncclSuccess);
    EQUAL(prism_test_num_records, before + 4);
    uint32_t ordinal = last_record(0)->h;
    CHECK(ordinal > 0);
    EQUAL(last_record(0)->kind, GROUP_END);
    EQUAL(last_record(1)->kind, COLLECTIVE);
    EQUAL(last_record(1)->stream, 9);
    EQUAL(last_record(2)->kind, RECV);
    EQUAL(last_record(3)->kind, SEND);
    for (unsigned i = 1; i < 4; i++) EQUAL(last_record(i)->h, ordinal);

    /* An empty group sends nothing; the next one has another number. */
    EQUAL(ncclGroupStart(), ncclSuccess);
    EQUAL(ncclGroupEnd(), ncclSuccess);
    EQUAL(prism_test_num_records, before + 4);
    EQUAL(ncclGroupStart(), ncclSuccess);
    EQUAL(ncclAllReduce(buffer, buffer, 1, ncclInt8, ncclMax, two, STREAM), ncclSuccess);
    EQUAL(ncclGroupEnd(), ncclSuccess);
    CHECK(last_record(0)->h != ordinal);

    /* The error of one call spoils the group, once. */
    before = prism_test_num_records;
    EQUAL(ncclGroupStart(), ncclSuccess);
    EQUAL(ncclAllReduce(buffer, buffer, 1, ncclInt8, ncclMax, two, STREAM), ncclSuccess);
    EQUAL(ncclAllReduce(buffer, buffer, 1, 77, ncclMax, two, STREAM), ncclInvalidArgument);
    EQUAL(ncclAllReduce(buffer, buffer, 1, ncclInt8, ncclMax, two, STREAM), ncclSuccess);
    EQUAL(ncclGroupEnd(), ncclInvalidArgument);
    EQUAL(ncclGroupEnd(), ncclInvalidUsage);
    EQUAL(prism_test_num_records, before);

    /* The group belongs to its thread. */
    pthread_t thread;
    int result = -1;
    EQUAL(ncclGroupStart(), ncclSuccess);
    CHECK(pthread_create(&thread, NULL, end_group, &result) == 0);
    pthread_join(thread, NULL);
    EQUAL(result, ncclInvalidUsage);
    EQUAL(ncclGroupEnd(), ncclSuccess);

    /* Messages to oneself. */
    memcpy(buffer, "abcdefgh", 8);
    before = prism_test_num_records;
    EQUAL(ncclGroupStart(), ncclSuccess);
    EQUAL(ncclSend(buffer, 4, ncclInt8, 1, one, STREAM), ncclSuccess);
    EQUAL(ncclRecv(buffer + 16, 4, ncclInt8, 1, one, STREAM), ncclSuccess);
    EQUAL(ncclGroupEnd(), ncclSuccess);
    EQUAL(prism_test_num_records, before + 3);
    CHECK(memcmp(buffer + 16, "abcd", 4) == 0);
    EQUAL(ncclGroupStart(), ncclSuccess);
    EQUAL(ncclSend(buffer, 4, ncclInt8, 1, one, STREAM), ncclSuccess);
    EQUAL(ncclRecv(buffer + 16, 4, ncclInt8, 0, two, STREAM), ncclSuccess);
    EQUAL(ncclGroupEnd(), ncclInvalidUsage);
    LAST_ERROR_HAS("send to self");
    EQUAL(prism_test_num_records, before + 3);

    /* The cost model is asked, and nothing is launched. */
    struct { size_t size; unsigned magic, version; float time; } info = {24, 0x74685283, 23007, -1};
    EQUAL(ncclGroupStart(), ncclSuccess);
    EQUAL(ncclAllReduce(buffer, buffer, 1, ncclInt8, ncclMax, two, STREAM), ncclSuccess);
    EQUAL(ncclGroupSimulateEnd(&info), ncclSuccess);
    CHECK(info.time == 12.5f);
    EQUAL(last_frame()->kind, COMM_ESTIMATE);
    EQUAL(prism_test_num_records, before + 3);
    EQUAL(ncclGroupEnd(), ncclInvalidUsage);

    /* Destroyed inside a group: at its end, after its operations. */
    EQUAL(ncclGroupStart(), ncclSuccess);
    EQUAL(ncclCommDestroy(two), ncclSuccess);
    EQUAL(ncclCommDestroy(two), ncclInvalidArgument);
    EQUAL(ncclGroupEnd(), ncclInvalidArgument);
    EQUAL(last_record(0)->kind, COMM_DESTROY);
    EQUAL(ncclCommDestroy(one), ncclSuccess);
}

static void values(void) {
    ncclComm_t comm = make_comm(3, 1);
    int32_t *ints = prism_test_alloc(64), *more = prism_test_alloc(64);
    ints[0] = 7, ints[1] = -2;
    EQUAL(ncclAllReduce(ints, more, 2, ncclInt32, ncclSum, comm, STREAM), ncclSuccess);
    EQUAL(more[0], 21);
    EQUAL(more[1], -6);
    EQUAL(ncclAllReduce(ints, ints, 2, ncclInt32, ncclProd, comm, STREAM), ncclSuccess);
    EQUAL(ints[0], 343);
    EQUAL(ints[1], -8);
    EQUAL(ncclAllReduce(ints, more, 2, ncclInt32, ncclAvg, comm, STREAM), ncclSuccess);
    EQUAL(more[1], -8);

    uint16_t *halves = prism_test_alloc(8);
    halves[0] = 0x3c00, halves[1] = 0xc000; /* 1, -2 */
    EQUAL(ncclAllReduce(halves, halves, 2, ncclFloat16, ncclSum, comm, STREAM), ncclSuccess);
    EQUAL(halves[0], 0x4200);
    EQUAL(halves[1], 0xc600);
    halves[0] = 0x3f80; /* 1 */
    EQUAL(ncclAllReduce(halves, halves, 1, ncclBfloat16, ncclSum, comm, STREAM), ncclSuccess);
    EQUAL(halves[0], 0x4040);
    uint8_t *bytes = prism_test_alloc(8);
    bytes[0] = 0x38; /* e4m3: 1 */
    EQUAL(ncclAllReduce(bytes, bytes, 1, ncclFloat8e4m3, ncclSum, comm, STREAM), ncclSuccess);
    EQUAL(bytes[0], 0x44);

    /* In place: the own slot goes to the others. */
    int32_t *slots = prism_test_alloc(64);
    slots[1] = 11;
    EQUAL(ncclAllGather(slots + 1, slots, 1, ncclInt32, comm, STREAM), ncclSuccess);
    EQUAL(slots[0], 11);
    EQUAL(slots[2], 11);
    slots[0] = 1, slots[1] = 2, slots[2] = 3;
    EQUAL(ncclReduceScatter(slots, more, 1, ncclInt32, ncclSum, comm, STREAM), ncclSuccess);
    EQUAL(more[0], 6);
    EQUAL(ncclAlltoAll(slots, more, 1, ncclInt32, comm, STREAM), ncclSuccess);
    /* Every peer sends what this rank does: its row for this rank is the own one. */
    EQUAL(more[0], 2);
    EQUAL(more[2], 2);
    EQUAL(prism_test_received_fate, 2 /* mirrored */);
    EQUAL(prism_test_received_bytes, 12);
    more[0] = 5;
    EQUAL(ncclBcast(more, 1, ncclInt32, 0, comm, STREAM), ncclSuccess);
    EQUAL(more[0], 5);
    EQUAL(ncclBroadcast(slots + 2, more, 1, ncclInt32, 1, comm, STREAM), ncclSuccess);
    EQUAL(more[0], 3);
    /* Only the root of a reduction, a gather, a scatter has a result. */
    EQUAL(ncclReduce(slots, more, 1, ncclInt32, ncclSum, 0, comm, STREAM), ncclSuccess);
    EQUAL(more[0], 3);
    EQUAL(ncclReduce(slots, more, 1, ncclInt32, ncclSum, 1, comm, STREAM), ncclSuccess);
    EQUAL(more[0], 3);
    EQUAL(ncclGather(slots + 2, more, 1, ncclInt32, 1, comm, STREAM), ncclSuccess);
    EQUAL(more[0] + more[1] + more[2], 9);
    EQUAL(ncclScatter(slots, more, 1, ncclInt32, 1, comm, STREAM), ncclSuccess);
    EQUAL(more[0], 2);

    /* Too large, or not the device's memory: left alone, and said. */
    float *big = prism_test_alloc((1 << 20) + 4);
    big[0] = 1;
    EQUAL(ncclAllReduce(big, big, (1 << 18) + 1, ncclFloat32, ncclSum, comm, STREAM), ncclSuccess);
    CHECK(big[0] == 1);
    EQUAL(ncclAllReduce(big, big, 1 << 18, ncclFloat32, ncclSum, comm, STREAM), ncclSuccess);
    CHECK(big[0] == 3);
    float local = 1;
    EQUAL(ncclAllReduce(&local, &local, 1, ncclFloat32, ncclSum, comm, STREAM), ncclSuccess);
    CHECK(local == 1);
    EQUAL(ncclAllReduce(big, big, SIZE_MAX, ncclFloat64, ncclSum, comm, STREAM), ncclSuccess);
    CHECK(find_frame(NOTE, "ncclAllReduce: payload mirrored"));
    CHECK(find_frame(NOTE, "ncclAllReduce: payload over 1 MiB"));
    CHECK(find_frame(NOTE, "ncclAllReduce: payload outside device memory"));
    CHECK(!find_frame(NOTE, "ncclAllGather: payload over 1 MiB"));

    /* The notes add up to the number of calls. */
    EQUAL(ncclCommDestroy(comm), ncclSuccess);
    uint64_t too_large = 0;
    for (unsigned i = 0; i < prism_test_num_frames; i++) {
        uint64_t count;
        memcpy(&count, prism_test_frames[i].payload, 8);
        if (prism_test_frames[i].kind == NOTE && memmem(prism_test_frames[i].payload, 128, "AllReduce: payload over", 23))
            too_large += count;
    }
    EQUAL(too_large, 2);
}

static void operators(void) {
    ncclComm_t one = make_comm(2, 0), two = make_comm(2, 0);
    float factor = 0.5f, *buffer = prism_test_alloc(8);
    ncclRedOp_t op = -1;
    buffer[0] = 3;
    EQUAL(ncclRedOpCreatePreMulSum(&op, &factor, ncclFloat32, ncclScalarHostImmediate, one), ncclSuccess);
    CHECK(op > ncclAvg);
    factor = 100; /* The value was read at once. */
    EQUAL(ncclAllReduce(buffer, buffer, 1, ncclFloat32, op, two, STREAM), ncclInvalidArgument);
    EQUAL(ncclAllReduce(buffer, buffer, 1, ncclFloat64, op, one, STREAM), ncclInvalidArgument);
    /* Copied at the call: the operator may go before the group ends. */
    EQUAL(ncclGroupStart(), ncclSuccess);
    EQUAL(ncclAllReduce(buffer, buffer, 1, ncclFloat32, op, one, STREAM), ncclSuccess);
    EQUAL(ncclRedOpDestroy(op, one), ncclSuccess);
    EQUAL(ncclGroupEnd(), ncclSuccess);
    CHECK(buffer[0] == 3);
    EQUAL(last_record(1)->f, 0 | ncclFloat32 << 8 | 5 << 16);
    EQUAL(ncclRedOpDestroy(op, one), ncclInvalidArgument);
    EQUAL(ncclAllReduce(buffer, buffer, 1, ncclFloat32, op, one, STREAM), ncclInvalidArgument);

    float *scalar = prism_test_alloc(8);
    *scalar = 2;
    EQUAL(ncclRedOpCreatePreMulSum(&op, scalar, ncclFloat32, ncclScalarDevice, one), ncclSuccess);
    EQUAL(ncclAllReduce(buffer, buffer, 1, ncclFloat32, op, one, STREAM), ncclSuccess);
    CHECK(buffer[0] == 12);
    EQUAL(ncclCommDestroy(one), ncclSuccess);
    EQUAL(ncclCommDestroy(two), ncclSuccess);
}

static void splits(void) {
    ncclComm_t parent = make_comm(8, 5), child = (ncclComm_t)1;
    unsigned frames = prism_test_num_frames;
    EQUAL(ncclCommSplit(parent, -1, 0, &child, NULL), ncclSuccess);
    CHECK(child == NULL);
    EQUAL(prism_test_num_frames, frames + 1);
    EQUAL(last_frame()->kind, COMM_SPLIT);
    strcpy(prism_test_group_name, "tp_group");
    EQUAL(ncclCommSplit(parent, 2, 9, &child, NULL), ncclSuccess);
    prism_test_group_name[0] = 0;
    CHECK(child != NULL);
    int32_t sent[4], value;
    memcpy(sent, last_frame()->payload, sizeof sent);
    CHECK(sent[0] > sent[1]);
    EQUAL(sent[2], 2);
    EQUAL(sent[3], 9);
    EQUAL(last_frame()->length, 16 + 8);
    CHECK(memcmp(last_frame()->payload + 16, "tp_group", 8) == 0);
    EQUAL(ncclCommCount(child, &value), ncclSuccess);
    EQUAL(value, 4);
    EQUAL(ncclCommUserRank(child, &value), ncclSuccess);
    EQUAL(value, 3);
    EQUAL(ncclCommSplit(parent, 0, 0, NULL, NULL), ncclInvalidArgument);
    EQUAL(ncclCommDestroy(child), ncclSuccess);
    EQUAL(ncclCommDestroy(parent), ncclSuccess);
}

static void memory(void) {
    void *pointer = NULL, *handle = NULL;
    EQUAL(ncclMemAlloc(&pointer, 1000), ncclSuccess);
    CHECK(pointer != NULL);
    unsigned char *next = test_device_alloc(0);
    CHECK(next == (unsigned char *)pointer + (2 << 20));
    EQUAL(ncclMemFree(pointer), ncclSuccess);
    EQUAL(ncclMemFree(NULL), ncclSuccess);
    EQUAL(ncclMemFree(&pointer), ncclUnhandledCudaError);
    EQUAL(ncclMemAlloc(&pointer, SIZE_MAX), ncclUnhandledCudaError);
    EQUAL(ncclMemAlloc(NULL, 8), ncclUnhandledCudaError);

    ncclComm_t comm = make_comm(2, 0);
    EQUAL(ncclCommRegister(comm, next, 0, &handle), ncclInvalidArgument);
    EQUAL(ncclCommRegister(comm, next, 64, &handle), ncclSuccess);
    CHECK(handle != NULL);
    EQUAL(ncclCommDeregister(comm, handle), ncclSuccess);
    EQUAL(ncclCommDeregister(comm, handle), ncclInvalidUsage);
    EQUAL(ncclCommDestroy(comm), ncclSuccess);
}

static void membership_and_memory(void) {
    ncclComm_t comm = make_comm(8, 5), child = NULL;
    int excluded[3] = {6, 0, 3}, value = -1;
    EQUAL(ncclCommShrink(comm, NULL, 3, &child, NULL, 0), ncclInvalidArgument);
    EQUAL(ncclCommShrink(comm, excluded, 0, &child, NULL, 0), ncclInvalidArgument);
    EQUAL(ncclCommShrink(comm, excluded, 3, NULL, NULL, 0), ncclInvalidArgument);
    excluded[1] = 5;
    EQUAL(ncclCommShrink(comm, excluded, 3, &child, NULL, 0), ncclInvalidArgument);
    LAST_ERROR_HAS("rank 5 cannot be excluded");
    excluded[1] = 0;
    EQUAL(ncclCommShrink(comm, excluded, 3, &child, NULL, 0), ncclSuccess);
    EQUAL(last_frame()->kind, COMM_MEMBERS);
    EQUAL(last_frame()->length, 12 + 5 * 4);
    static const uint32_t KEPT[5] = {1, 2, 4, 5, 7};
    CHECK(memcmp(last_frame()->payload + 12, KEPT, sizeof KEPT) == 0);
    EQUAL(ncclCommCount(child, &value), ncclSuccess);
    EQUAL(value, 5);
    EQUAL(ncclCommUserRank(child, &value), ncclSuccess);
    EQUAL(value, 3);
    EQUAL(ncclCommDestroy(child), ncclSuccess);

    uint64_t bytes = 1;
    EQUAL(ncclCommMemStats(comm, 3, NULL), ncclInvalidArgument);
    EQUAL(ncclCommMemStats(comm, 4, &bytes), ncclInvalidArgument);
    EQUAL(ncclCommMemStats(comm, 3, &bytes), ncclSuccess);
    EQUAL(bytes, 308281344);
    EQUAL(ncclCommSuspend(comm, 1), ncclSuccess);
    EQUAL(ncclAllReduce(NULL, NULL, 1, ncclInt8, ncclSum, comm, STREAM), ncclInvalidUsage);
    EQUAL(ncclCommMemStats(comm, 1, &bytes), ncclSuccess);
    EQUAL(bytes, 1);
    EQUAL(ncclCommResume(comm), ncclSuccess);
    EQUAL(ncclCommMemStats(comm, 1, &bytes), ncclSuccess);
    EQUAL(bytes, 0);

    char buffer[64];
    void *window = comm, *pointer = NULL;
    EQUAL(ncclCommWindowRegister(comm, NULL, 8, &window, 0), ncclInvalidArgument);
    CHECK(window == NULL);
    EQUAL(ncclCommWindowRegister(comm, buffer, sizeof buffer, &window, 1), ncclSuccess);
    CHECK(window != NULL && find_frame(NOTE, "ncclCommWindowRegister"));
    EQUAL(ncclWinGetUserPtr(comm, window, &pointer), ncclSuccess);
    CHECK(pointer == buffer);
    EQUAL(ncclCommWindowDeregister(comm, window), ncclSuccess);
    EQUAL(ncclCommWindowDeregister(comm, window), ncclInvalidArgument);
    EQUAL(ncclCommWindowDeregister(comm, NULL), ncclSuccess);

    /* Revoked: no operation, no finalize; but a shrink. */
    EQUAL(ncclCommRevoke(comm, 1), ncclInvalidArgument);
    EQUAL(ncclCommRevoke(comm, 0), ncclSuccess);
    EQUAL(ncclAllReduce(NULL, NULL, 1, ncclInt8, ncclSum, comm, STREAM), ncclInvalidUsage);
    EQUAL(ncclCommFinalize(comm), ncclInvalidArgument);
    EQUAL(ncclCommShrink(comm, excluded, 3, &child, NULL, 0), ncclSuccess);
    EQUAL(ncclCommDestroy(child), ncclSuccess);
    EQUAL(ncclCommDestroy(comm), ncclSuccess);
}

static void refusals(void) {
    ncclComm_t comm = make_comm(2, 0), child = NULL;
    int exclude = 1;
    EQUAL(ncclCommGrow(comm, 3, NULL, -1, &child, NULL), ncclInvalidUsage);
    LAST_ERROR_HAS("ncclCommGrow with members that do not run");
    EQUAL(ncclCommShrink(NULL, &exclude, 1, &child, NULL, 0), ncclInvalidArgument);
    EQUAL(ncclPutSignal(NULL, 0, ncclInt8, 0, NULL, 0, 0, 0, 0, comm, STREAM), ncclInvalidArgument);
    EQUAL(ncclPutSignal(comm, 0, ncclInt8, 0, comm, 0, 0, 0, 0, comm, STREAM), ncclInvalidUsage);
    CHECK(find_frame(UNSUPPORTED, "ncclPutSignal"));

    unsigned char properties[160];
    size_t size = sizeof properties;
    unsigned magic = 0xcafebeef;
    int facts[4];
    memset(properties, 0xff, sizeof properties);
    memcpy(properties, &size, 8);
    EQUAL(ncclCommQueryProperties(comm, properties), ncclInvalidUsage);
    memcpy(properties + 8, &magic, 4);
    EQUAL(ncclCommQueryProperties(comm, properties), ncclSuccess);
    memcpy(facts, properties + 16, sizeof facts);
    EQUAL(facts[1], 2);
    EQUAL(facts[2], 3);
    EQUAL(properties[32], 0); /* no device API */

    /* Limits are hints; a forced algorithm is not. */
    struct {
        size_t size;
        unsigned magic, version;
        void *ext;
        int limits[4];
        const char *algorithm;
        int force, policy;
        uint64_t tag;
        void *event;
    } config = {72, 0xcafebeef, 23203, NULL, {1, 2, 3, 4}, NULL, 1, 0, 0, NULL};
    char *buffer = prism_test_alloc(8);
    EQUAL(ncclAllReduceConfig(buffer, buffer, 1, ncclInt8, ncclSum, comm, STREAM, NULL), ncclSuccess);
    EQUAL(ncclAllReduceConfig(buffer, buffer, 1, ncclInt8, ncclSum, comm, STREAM, &config), ncclSuccess);
    config.algorithm = "ring";
    EQUAL(ncclAllReduceConfig(buffer, buffer, 1, ncclInt8, ncclSum, comm, STREAM, &config), ncclInvalidUsage);
    LAST_ERROR_HAS("ncclAllReduceConfig");
    EQUAL(ncclCommDestroy(comm), ncclSuccess);
}

static void forked_child(void) {
    ncclComm_t comm = make_comm(2, 0);
    ncclUniqueId mine, theirs;
    int ends[2];
    CHECK(pipe(ends) == 0);
    pid_t child = fork();
    if (child == 0) {
        int value;
        if (ncclCommCount(comm, &value) != ncclInvalidArgument) _exit(1);
        if (ncclGetUniqueId(&theirs) != ncclSuccess) _exit(2);
        if (write(ends[1], &theirs, sizeof theirs) != sizeof theirs) _exit(3);
        /* A child is a rank of its own: it opens a session when it needs one. */
        if (ncclCommInitRank(&comm, 2, theirs, 0) != ncclSuccess) _exit(4);
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    EQUAL(status, 0);
    CHECK(read(ends[0], &theirs, sizeof theirs) == sizeof theirs);
    EQUAL(ncclGetUniqueId(&mine), ncclSuccess);
    CHECK(memcmp(&mine, &theirs, sizeof mine) != 0);
    EQUAL(ncclCommDestroy(comm), ncclSuccess);
}

static void *call_in_full_ring(void *comm) {
    void *buffer = prism_test_arena;
    return (void *)(intptr_t)ncclAllReduce(buffer, buffer, 1, ncclInt8, ncclMax, comm, STREAM);
}

static void *group_in_full_ring(void *comm) {
    void *buffer = prism_test_arena;
    ncclGroupStart();
    ncclSend(buffer, 1, ncclInt8, 1, comm, STREAM);
    ncclRecv(buffer, 1, ncclInt8, 1, comm, STREAM);
    return (void *)(intptr_t)ncclGroupEnd();
}

static void *send_in_full_ring(void *comm) {
    return (void *)(intptr_t)ncclSend(prism_test_arena, 1, ncclInt8, 1, comm, STREAM);
}

/* While the ring is full another thread ends the communicator: both calls come back within a second. */
static void end_in_full_ring(void *(*call)(void *), ncclResult_t (*end_comm)(ncclComm_t)) {
    ncclComm_t comm = make_comm(2, 0);
    pthread_t thread;
    void *result = NULL;
    int error = -1;
    struct timespec start, end;
    unsigned before = prism_test_num_records;
    prism_test_num_waiting = 0;
    prism_test_ring_is_full = 1;
    CHECK(pthread_create(&thread, NULL, call, comm) == 0);
    while (!prism_test_num_waiting) usleep(100);
    clock_gettime(CLOCK_MONOTONIC, &start);
    EQUAL(ncclCommGetAsyncError(comm, &error), ncclSuccess);
    EQUAL(end_comm(comm), ncclSuccess);
    pthread_join(thread, &result);
    clock_gettime(CLOCK_MONOTONIC, &end);
    CHECK((end.tv_sec - start.tv_sec) * 1000 + (end.tv_nsec - start.tv_nsec) / 1000000 < 1000);
    /* As when NCCL sees the abort flag in a wait. */
    EQUAL((intptr_t)result, ncclInternalError);
    EQUAL(prism_test_num_records, before);
    prism_test_ring_is_full = 0;
    if (end_comm == ncclCommAbort) {
        EQUAL(ncclCommCount(comm, &error), ncclInvalidArgument);
    } else {
        EQUAL((intptr_t)call(comm), ncclInvalidUsage);
        EQUAL(ncclCommDestroy(comm), ncclSuccess);
    }
}

static ncclResult_t revoke_comm(ncclComm_t comm) { return ncclCommRevoke(comm, 0); }

static void watchdog(void) {
    void *(*const CALLS[])(void *) = {call_in_full_ring, send_in_full_ring, group_in_full_ring};
    for (size_t i = 0; i < sizeof CALLS / sizeof *CALLS; i++) {
        end_in_full_ring(CALLS[i], revoke_comm);
        end_in_full_ring(CALLS[i], ncclCommAbort);
        /* The engine hears of the abort with the next record. */
        ncclComm_t other = make_comm(2, 0);
        unsigned before = prism_test_num_records;
        EQUAL(ncclAllReduce(prism_test_arena, prism_test_arena, 1, ncclInt8, ncclMax, other, STREAM), ncclSuccess);
        EQUAL(prism_test_num_records, before + 2);
        EQUAL(last_record(1)->kind, COMM_DESTROY);
        EQUAL(ncclCommDestroy(other), ncclSuccess);
    }
}

/* Last: the session is of no use afterwards. */
static void dead_engine(void) {
    ncclComm_t comm = make_comm(2, 0), other = make_comm(2, 1);
    int error = -1;
    prism_test_engine_is_dead = 1;
    EQUAL(ncclAllReduce(prism_test_arena, prism_test_arena, 1, ncclInt8, ncclSum, comm, STREAM), ncclRemoteError);
    EQUAL(ncclCommGetAsyncError(other, &error), ncclSuccess);
    EQUAL(error, ncclRemoteError);
    EQUAL(ncclGroupStart(), ncclSuccess);
    EQUAL(ncclSend(prism_test_arena, 1, ncclInt8, 0, other, STREAM), ncclRemoteError);
    EQUAL(ncclGroupEnd(), ncclRemoteError);
    EQUAL(ncclCommAbort(comm), ncclSuccess);
    EQUAL(ncclCommDestroy(other), ncclSuccess);
}

int main(void) {
    static const struct { const char *name; void (*run)(void); } CASES[] = {
        {"init_and_facts", init_and_facts}, {"configs", configs}, {"records", records}, {"groups", groups},
        {"values", values}, {"operators", operators}, {"splits", splits}, {"memory", memory}, {"membership_and_memory", membership_and_memory}, {"refusals", refusals},
        {"forked_child", forked_child}, {"watchdog", watchdog}, {"dead_engine", dead_engine}};
    alarm(60); /* A call that hangs is a failure. */
    for (unsigned i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        CASES[i].run();
        printf("%s ok\n", CASES[i].name);
    }
    return 0;
}
