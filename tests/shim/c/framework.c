/* A framework that uses NCCL; how it is linked is the test's business. */
typedef struct {
    char internal[128];
} UniqueId;

int ncclGetVersion(int *version);
const char *ncclGetErrorString(int code);
int ncclCommInitRank(void **communicator, int count, UniqueId id, int rank);

__attribute__((visibility("default"))) int framework_version(void) {
    int version = 0;
    return ncclGetVersion(&version) ? -1 : version;
}

__attribute__((visibility("default"))) int framework_start(void) {
    UniqueId id = {{0}};
    void *communicator = 0;
    return ncclCommInitRank(&communicator, 8, id, 0) && ncclGetErrorString(1) ? 1 : 0;
}

#ifdef PROGRAM
#include <dlfcn.h>
#include <stdio.h>

int main(void) {
    printf("version %d\n", framework_version());
    fflush(stdout);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*initialize)(unsigned) = driver ? (int (*)(unsigned))dlsym(driver, "cuInit") : 0;
    printf("cuInit %d\n", initialize ? initialize(0) : -1);
    return framework_start() < 0;
}
#endif
