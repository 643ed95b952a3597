/* A fat binary with one cubin that describes one kernel: `void (int, const struct { char *pointers[3]; })`, as much as
 * libprism_cuda reads of one. */
#include <stdint.h>
#include <string.h>

typedef struct { uint32_t magic, version; const void *data, *file; } fatbin_wrapper;

static struct {
    uint32_t magic;
    uint16_t version, header;
    uint64_t bytes;
    struct {
        uint16_t kind, version;
        uint32_t header, padded, unknown, payload, unknown2[2], architecture, bits, unknown3;
        uint64_t flags, unknown4, unpacked;
    } entry;
    struct {
        uint8_t header[64], info[32];
        char names[64];
        uint8_t sections[2][64];
    } cubin;
} fatbin_image __attribute__((aligned(8)));
static fatbin_wrapper fatbin;

static void fatbin_parameter(uint8_t *at, uint16_t ordinal, uint16_t offset, uint32_t bytes) {
    uint32_t size = bytes << 18;
    memcpy(at, (uint8_t[]){4, 0x17, 12, 0}, 4);
    memcpy(at + 8, &ordinal, 2);
    memcpy(at + 10, &offset, 2);
    memcpy(at + 12, &size, 4);
}

static void fatbin_section(uint8_t *header, uint32_t name, const void *start, uint64_t bytes) {
    uint64_t offset = (const uint8_t *)start - (const uint8_t *)&fatbin_image.cubin;
    memcpy(header, &name, 4);
    memcpy(header + 24, &offset, 8);
    memcpy(header + 32, &bytes, 8);
}

/* The wrapper for __cudaRegisterFatBinary. */
static void *fatbin_of(const char *kernel) {
    uint64_t table = (uint8_t *)fatbin_image.cubin.sections - (uint8_t *)&fatbin_image.cubin;
    uint16_t sections = 2, names = 1;
    memcpy(fatbin_image.cubin.header, "\177ELF", 4);
    memcpy(fatbin_image.cubin.header + 0x28, &table, 8);
    memcpy(fatbin_image.cubin.header + 0x3C, &sections, 2);
    memcpy(fatbin_image.cubin.header + 0x3E, &names, 2);
    fatbin_parameter(fatbin_image.cubin.info, 0, 0, 4);
    fatbin_parameter(fatbin_image.cubin.info + 16, 1, 8, 24);
    strcpy(fatbin_image.cubin.names + 1, ".nv.info.");
    strncat(fatbin_image.cubin.names + 1, kernel, 40);
    fatbin_section(fatbin_image.cubin.sections[0], 1, fatbin_image.cubin.info, 32);
    fatbin_section(fatbin_image.cubin.sections[1], 0, fatbin_image.cubin.names, 64);
    fatbin_image.magic = 0xBA55ED50;
    fatbin_image.header = 16;
    fatbin_image.bytes = 64 + sizeof fatbin_image.cubin;
    fatbin_image.entry.kind = 2;
    fatbin_image.entry.header = 64;
    fatbin_image.entry.padded = sizeof fatbin_image.cubin;
    fatbin = (fatbin_wrapper){0x466243B1, 1, &fatbin_image, 0};
    return &fatbin;
}
