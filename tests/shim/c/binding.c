/* Gets at NCCL in the way the first argument names, and says whose it is: "VERSION PATH". What follows is done after that:
 * `device` asks for the CUDA device, `communicator` makes a communicator with the functions found. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    char internal[128];
} UniqueId;
typedef int GetVersion(int *);
typedef int CommInitRank(void **, int, UniqueId, int);

#ifdef LINKED
GetVersion ncclGetVersion;
#endif

static void *open_as(const char *how, const char *name) {
    if (!strcmp(how, "global")) return RTLD_DEFAULT;
    if (!strcmp(how, "dlopen")) return dlopen(name, RTLD_NOW);
    if (!strcmp(how, "lazy")) return dlopen(name, RTLD_LAZY | RTLD_GLOBAL);
    if (!strcmp(how, "deepbind")) return dlopen(name, RTLD_NOW | RTLD_DEEPBIND);
    if (!strcmp(how, "noload")) return dlopen(name, RTLD_NOW | RTLD_NOLOAD);
    if (!strcmp(how, "dlmopen")) return dlmopen(LM_ID_NEWLM, name, RTLD_NOW);
    return NULL;
}

static int fail(const char *what) {
    const char *why = dlerror();
    printf("%s: %s\n", what, why ? why : "not found");
    return 1;
}

int main(int count, char **arguments) {
    if (count < 3) return 2;
    const char *how = arguments[1];
    GetVersion *get_version = NULL;
    CommInitRank *init = NULL;
#ifdef LINKED
    if (!strcmp(how, "linked")) get_version = ncclGetVersion;
#endif
    if (!get_version) {
        void *handle = open_as(how, arguments[2]);
        if (!handle && strcmp(how, "global")) return fail("load");
        get_version = (GetVersion *)dlsym(handle, "ncclGetVersion");
        init = (CommInitRank *)dlsym(handle, "ncclCommInitRank");
    }
    if (!get_version) return fail("ncclGetVersion");
    int version = 0;
    Dl_info info;
    get_version(&version);
    /* An address in the program is its own jump to the library. */
    printf("%d %s\n", version, dladdr((void *)get_version, &info) ? info.dli_fname : "?");
    fflush(stdout);
    for (int i = 3; i < count; i++) {
        if (!strcmp(arguments[i], "device")) {
            void *driver = dlopen("libcuda.so.1", RTLD_NOW);
            int (*initialize)(unsigned) = driver ? (int (*)(unsigned))dlsym(driver, "cuInit") : NULL;
            if (!initialize) return fail("cuInit");
            printf("cuInit %d\n", initialize(0));
        } else if (!strcmp(arguments[i], "communicator")) {
            UniqueId id = {{0}};
            void *communicator = NULL;
            if (!init) return fail("ncclCommInitRank");
            printf("ncclCommInitRank %d\n", init(&communicator, 8, id, 0));
        }
        fflush(stdout);
    }
    return 0;
}
