/* Looks like NCCL to whoever loads or links it: some of its functions and the version text of its code. */
#define PUBLIC __attribute__((visibility("default")))

typedef struct {
    char internal[128];
} UniqueId;

PUBLIC int ncclGetVersion(int *version) {
    *version = 29999;
    return 0;
}

PUBLIC const char *ncclGetErrorString(int code) {
#ifdef STUB
    return code ? "libnccl.so.2 is opened when it is first used" : "no error";
#elif defined(NO_BANNER)
    return code ? "another NCCL" : "no error";
#else
    return code ? "NCCL version 2.99.9+cuda13.0" : "no error";
#endif
}

PUBLIC int ncclCommInitRank(void **communicator, int count, UniqueId id, int rank) {
    (void)communicator, (void)count, (void)id;
    return rank < 0 ? 4 : 1000;
}

PUBLIC int ncclAllReduce(void) { return 1000; }
