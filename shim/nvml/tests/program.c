/* A program that has a session of its own and asks NVML about the cards, as a framework would: by dlopen. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(condition) do { if (!(condition)) { \
    fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); exit(1); } } while (0)

/* The session: prism_wire::device::SessionTable with only `config` filled in. */
static const char *config(const char *key) {
    static const char *const VALUES[][2] = {
        {"node.gpus", "4"}, {"device.name", "Test Card"}, {"device.compute_capability", "9.0"},
        {"device.clock_khz", "1980000"}, {"device.memory_clock_khz", "2619000"},
    };
    for (size_t i = 0; i < sizeof VALUES / sizeof *VALUES; i++) {
        if (strcmp(key, VALUES[i][0]) == 0) return VALUES[i][1];
    }
    return 0;
}

static struct { size_t size; void *functions[9]; const char *(*config)(const char *); void *more[6]; } table;

const void *prism_session_table_v1(void) {
    if (!getenv("WITH_SESSION")) return 0;
    table.size = sizeof table;
    table.config = config;
    return &table;
}

int prism_device_memory(int device, size_t *free_bytes, size_t *total_bytes) {
    *free_bytes = device == 2 ? 600 : 1000;
    *total_bytes = 1000;
    return 0;
}

typedef void *device_t;
static void *library;

static int (*find(const char *name))() {
    void *address = dlsym(library, name);
    if (!address) fprintf(stderr, "no %s\n", name);
    CHECK(address);
    return (int (*)())address;
}

int main(void) {
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    CHECK(library);
    if (!getenv("WITH_SESSION")) {
        CHECK(find("nvmlInit_v2")() == 9);
        return 0;
    }
    CHECK(find("nvmlInit_v2")() == 0);
    unsigned count = 0, number = 77, one = 1, none = 0;
    CHECK(find("nvmlDeviceGetCount_v2")(&count) == 0 && count == 4);
    device_t card, same;
    CHECK(find("nvmlDeviceGetHandleByIndex_v2")(4, &card) == 2);
    CHECK(find("nvmlDeviceGetHandleByIndex_v2")(2, &card) == 0);
    char text[96];
    CHECK(find("nvmlDeviceGetUUID")(card, text, 96) == 0);
    CHECK(find("nvmlDeviceGetHandleByUUID")(text, &same) == 0 && same == card);
    CHECK(find("nvmlDeviceGetUUID")(card, text, 10) == 7);
    CHECK(find("nvmlDeviceGetHandleByPciBusId_v2")("0000:1a:00.0", &same) == 0 && same == card);
    CHECK(find("nvmlDeviceGetHandleByPciBusId_v2")("0000:99:00.0", &same) == 6);
    CHECK(find("nvmlDeviceGetName")(card, text, 96) == 0 && strcmp(text, "Test Card") == 0);
    CHECK(find("nvmlDeviceGetIndex")(card, &number) == 0 && number == 2);
    CHECK(find("nvmlDeviceGetIndex")((char *)card + 1, &number) == 2);
    unsigned long long memory[3];
    CHECK(find("nvmlDeviceGetMemoryInfo")(card, memory) == 0);
    CHECK(memory[0] == 1000 && memory[1] == 600 && memory[2] == 400);
    struct { unsigned pid; unsigned long long bytes; } process;
    CHECK(find("nvmlDeviceGetComputeRunningProcesses")(card, &none, NULL) == 7 && none == 1);
    CHECK(find("nvmlDeviceGetComputeRunningProcesses")(card, &one, &process) == 0);
    CHECK(one == 1 && process.pid == (unsigned)getpid() && process.bytes == 400);
    int major = 0, minor = 1;
    CHECK(find("nvmlDeviceGetCudaComputeCapability")(card, &major, &minor) == 0 && major == 9 && minor == 0);
    CHECK(find("nvmlDeviceGetClockInfo")(card, 1, &number) == 0 && number == 1980);
    CHECK(find("nvmlDeviceGetPowerUsage")(card, &number) == 3);
    static const char *const FRAMEWORK[] = {
        "nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetNvLinkRemotePciInfo_v2", "nvmlDeviceGetGpuFabricInfoV",
        "nvmlSystemGetCudaDriverVersion_v2", "nvmlDeviceGetP2PStatus", "nvmlErrorString", "nvmlShutdown",
    };
    for (size_t i = 0; i < sizeof FRAMEWORK / sizeof *FRAMEWORK; i++) find(FRAMEWORK[i]);
    return 0;
}
