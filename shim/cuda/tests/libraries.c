/* A C program that uses the math libraries of the emulated device. Exits 0 if everything was as it should be. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { R_32F = 0, R_16BF = 14, R_E4M3 = 28, COMPUTE_32F = 68, TF32_MATH = 3 };
enum { POINTWISE, CONVOLUTION, ENGINE, CONFIG, HEURISTIC, PLAN, GRAPH = 15, PACK = 16, TENSOR = 17, MATMUL = 19 };
enum { TYPE_DATA = 1, TYPE_INT64 = 3, TYPE_POINTER = 6, TYPE_DESCRIPTOR = 15 };

typedef struct { uint64_t data[8]; } layout_t, preference_t;
typedef struct { uint64_t data[32]; } matmul_t;
typedef struct { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; } heuristic_t;

extern int cudaStreamCreateWithFlags(void **, unsigned);
extern int cublasCreate_v2(void **), cublasDestroy_v2(void *), cublasSetStream_v2(void *, void *);
extern int cublasSetMathMode(void *, int), cublasSetPointerMode_v2(void *, int);
extern int cublasGemmEx(void *, int, int, int, int, int, const void *, const void *, int, int, const void *, int, int,
                        const void *, void *, int, int, int, int);
extern int cublasSgemmStridedBatched(void *, int, int, int, int, int, const float *, const float *, int, long long,
                                     const float *, int, long long, const float *, float *, int, long long, int);
extern int cublasSdot_v2(void *, int, const float *, int, const float *, int, float *);
extern const char *cublasGetStatusString(int);
extern int cublasLtMatrixLayoutInit_internal(layout_t *, size_t, int, uint64_t, uint64_t, int64_t);
extern int cublasLtGroupedMatrixLayoutInit_internal(layout_t *, size_t, int, int, const void *, const void *, const void *);
extern int cublasLtMatmulDescInit_internal(matmul_t *, size_t, int, int);
extern int cublasLtMatmulDescSetAttribute(matmul_t *, int, const void *, size_t);
extern int cublasLtMatmulPreferenceInit_internal(preference_t *, size_t);
extern int cublasLtMatmulAlgoGetHeuristic(void *, matmul_t *, layout_t *, layout_t *, layout_t *, layout_t *,
                                          preference_t *, int, heuristic_t *, int *);
extern int cublasLtMatmul(void *, matmul_t *, const void *, const void *, layout_t *, const void *, layout_t *,
                          const void *, const void *, layout_t *, void *, layout_t *, const void *, void *, size_t, void *);
extern int cudnnCreate(void **), cudnnSetStream(void *, void *);
extern int cudnnBackendCreateDescriptor(int, void **), cudnnBackendDestroyDescriptor(void *), cudnnBackendFinalize(void *);
extern int cudnnBackendSetAttribute(void *, int, int, int64_t, const void *);
extern int cudnnBackendGetAttribute(void *, int, int, int64_t, int64_t *, void *);
extern int cudnnBackendExecute(void *, void *, void *);
extern void cudnnGetLastErrorString(char *, size_t);

extern int cudaMalloc(void **, size_t), cudaMemset(void *, int, size_t), cudaMemcpy(void *, const void *, size_t, int);
extern int cusolverDnCreate(void **), cusolverDnSetStream(void *, void *), cusolverDnDestroy(void *);
extern int cusolverDnSpotrf_bufferSize(void *, int, int, void *, int, int *);
extern int cusolverDnSpotrf(void *, int, int, void *, int, void *, int, int *);
extern int cusolverDnXgeqrf_bufferSize(void *, void *, int64_t, int64_t, int, void *, int64_t, int, void *, int, size_t *,
                                       size_t *);
extern int cusolverDnXgeqrf(void *, void *, int64_t, int64_t, int, void *, int64_t, int, void *, int, void *, size_t,
                            void *, size_t, int *);

#define CHECK(condition) do { if (!(condition)) { \
    printf("line %d: %s\n", __LINE__, #condition); exit(1); } } while (0)

static void *stream;

static void blas(void) {
    void *handle;
    float one = 1, result = 0;
    CHECK(cublasCreate_v2(&handle) == 0);
    CHECK(cublasSetStream_v2(handle, stream) == 0);
    CHECK(cublasGemmEx(handle, 1, 0, 96, 64, 32, &one, 0, R_16BF, 32, 0, R_16BF, 32, &one, 0, R_16BF, 96, COMPUTE_32F, -1) == 0);
    CHECK(cublasSgemmStridedBatched(handle, 0, 0, 8, 4, 2, &one, 0, 8, 16, 0, 2, 8, &one, 0, 8, 32, 3) == 0);
    CHECK(cublasSetMathMode(handle, TF32_MATH) == 0);
    CHECK(cublasSgemmStridedBatched(handle, 0, 0, 8, 4, 2, &one, 0, 8, 16, 0, 2, 8, &one, 0, 8, 32, 3) == 0);
    /* An empty product is no launch; an impossible one is an error. */
    CHECK(cublasSgemmStridedBatched(handle, 0, 0, 0, 4, 2, &one, 0, 8, 16, 0, 2, 8, &one, 0, 8, 32, 3) == 0);
    CHECK(cublasSgemmStridedBatched(handle, 0, 0, 8, 4, 2, &one, 0, 7, 16, 0, 2, 8, &one, 0, 8, 32, 3) == 7);
    /* A result on the host is not known; one on the device is not asked for. */
    CHECK(cublasSdot_v2(handle, 10, 0, 1, 0, 1, &result) == 15);
    CHECK(cublasSetPointerMode_v2(handle, 1) == 0);
    CHECK(cublasSdot_v2(handle, 10, 0, 1, 0, 1, 0) == 0);
    CHECK(cublasDestroy_v2(handle) == 0);
    CHECK(cublasSetStream_v2(handle, 0) == 1);
    CHECK(strstr(cublasGetStatusString(1), "handle"));
}

static void blas_lt(int type) {
    matmul_t matmul;
    layout_t a, b, c;
    preference_t preference;
    heuristic_t found;
    int count = -1, transposed = 1;
    CHECK(cublasLtMatmulDescInit_internal(&matmul, sizeof matmul, COMPUTE_32F, R_32F) == 0);
    CHECK(cublasLtMatmulDescSetAttribute(&matmul, 3, &transposed, sizeof transposed) == 0);
    CHECK(cublasLtMatmulDescSetAttribute(&matmul, 99, &transposed, sizeof transposed) == 7);
    CHECK(cublasLtMatrixLayoutInit_internal(&a, sizeof a, type, 48, 16, 48) == 0);
    CHECK(cublasLtMatrixLayoutInit_internal(&b, sizeof b, type, 48, 32, 48) == 0);
    CHECK(cublasLtMatrixLayoutInit_internal(&c, sizeof c, R_16BF, 16, 32, 16) == 0);
    CHECK(cublasLtMatmulPreferenceInit_internal(&preference, sizeof preference) == 0);
    CHECK(cublasLtMatmulAlgoGetHeuristic(0, &matmul, &a, &b, &c, &c, &preference, 4, &found, &count) == 0);
    CHECK(count == 1 && found.state == 0 && found.workspace == 0);
    CHECK(cublasLtMatmul(0, &matmul, 0, 0, &a, 0, &b, 0, 0, &c, 0, &c, found.algorithm, 0, 0, stream) == 0);
    CHECK(cublasLtMatmul(0, &matmul, 0, 0, &b, 0, &a, 0, 0, &c, 0, &c, found.algorithm, 0, 0, stream) == 7);
}

/* Groups of matrices whose shapes kernels write: described, and refused by name when they are to be multiplied. */
static void grouped(void) {
    matmul_t matmul;
    layout_t one, group;
    CHECK(cublasLtMatmulDescInit_internal(&matmul, sizeof matmul, COMPUTE_32F, R_32F) == 0);
    CHECK(cublasLtMatrixLayoutInit_internal(&one, sizeof one, R_16BF, 8, 8, 8) == 0);
    CHECK(cublasLtGroupedMatrixLayoutInit_internal(&group, sizeof group, R_16BF, 0, &one, &one, &one) == 7);
    CHECK(cublasLtGroupedMatrixLayoutInit_internal(&group, 8, R_16BF, 2, &one, &one, &one) == 7);
    CHECK(cublasLtGroupedMatrixLayoutInit_internal(&group, sizeof group, R_16BF, 2, &one, &one, &one) == 0);
    CHECK(cublasLtMatmul(0, &matmul, 0, 0, &one, 0, &group, 0, 0, &one, 0, &one, 0, 0, 0, stream) == 15);
}

static void *descriptor(int kind) {
    void *made;
    CHECK(cudnnBackendCreateDescriptor(kind, &made) == 0);
    return made;
}

static void *tensor(int64_t id, int64_t rows, int64_t columns) {
    void *made = descriptor(TENSOR);
    int64_t sizes[3] = {2, rows, columns}, strides[3] = {rows * columns, columns, 1};
    int bfloat16 = 9;
    CHECK(cudnnBackendSetAttribute(made, 906, TYPE_INT64, 1, &id) == 0);
    CHECK(cudnnBackendSetAttribute(made, 901, TYPE_DATA, 1, &bfloat16) == 0);
    CHECK(cudnnBackendSetAttribute(made, 902, TYPE_INT64, 3, sizes) == 0);
    CHECK(cudnnBackendSetAttribute(made, 903, TYPE_INT64, 3, strides) == 0);
    CHECK(cudnnBackendFinalize(made) == 0);
    return made;
}

static void link_to(void *from, int attribute, void *to) {
    CHECK(cudnnBackendSetAttribute(from, attribute, TYPE_DESCRIPTOR, 1, &to) == 0);
}

static void dnn(void) {
    void *handle, *a = tensor(1, 16, 8), *b = tensor(2, 8, 4), *c = tensor(3, 16, 4), *operation = descriptor(MATMUL);
    void *graph = descriptor(GRAPH), *heuristic = descriptor(HEURISTIC), *config = descriptor(CONFIG);
    void *plan = descriptor(PLAN), *pack = descriptor(PACK), *pointers[3] = {&handle, &handle, &handle};
    int64_t count = -1, ids[3] = {1, 2, 3}, workspace = -1;
    char message[128];
    CHECK(cudnnCreate(&handle) == 0 && cudnnSetStream(handle, stream) == 0);
    link_to(operation, 1520, a);
    link_to(operation, 1521, b);
    link_to(operation, 1522, c);
    CHECK(cudnnBackendFinalize(operation) == 0);
    link_to(graph, 801, operation);
    CHECK(cudnnBackendFinalize(graph) == 0);
    link_to(heuristic, 201, graph);
    CHECK(cudnnBackendFinalize(heuristic) == 0);
    CHECK(cudnnBackendGetAttribute(heuristic, 202, TYPE_DESCRIPTOR, 1, &count, &config) == 0 && count == 1);
    link_to(plan, 401, config);
    CHECK(cudnnBackendFinalize(plan) == 0);
    CHECK(cudnnBackendGetAttribute(plan, 402, TYPE_INT64, 1, 0, &workspace) == 0 && workspace == 0);
    /* A plan keeps what it stands on, whatever the program destroys. */
    void *gone[] = {a, b, c, operation, graph, heuristic, config};
    for (int i = 0; i < 7; i++) CHECK(cudnnBackendDestroyDescriptor(gone[i]) == 0);
    CHECK(cudnnBackendDestroyDescriptor(graph) == 2000);
    CHECK(cudnnBackendExecute(handle, plan, pack) == 2004);
    CHECK(cudnnBackendSetAttribute(pack, 1000, TYPE_INT64, 3, ids) == 0);
    CHECK(cudnnBackendSetAttribute(pack, 1001, TYPE_POINTER, 3, pointers) == 0);
    CHECK(cudnnBackendFinalize(pack) == 0);
    CHECK(cudnnBackendExecute(handle, plan, pack) == 0);
    void *short_pack = descriptor(PACK);
    CHECK(cudnnBackendSetAttribute(short_pack, 1000, TYPE_INT64, 2, ids) == 0);
    CHECK(cudnnBackendSetAttribute(short_pack, 1001, TYPE_POINTER, 2, pointers) == 0);
    CHECK(cudnnBackendFinalize(short_pack) == 0);
    CHECK(cudnnBackendExecute(handle, plan, short_pack) == 2000);
    cudnnGetLastErrorString(message, sizeof message);
    CHECK(!strcmp(message, "cudnnBackendExecute: CUDNN_STATUS_BAD_PARAM"));
    void *odd = descriptor(28);
    CHECK(cudnnBackendFinalize(odd) == 0);
    graph = descriptor(GRAPH);
    link_to(graph, 801, odd);
    CHECK(cudnnBackendFinalize(graph) == 3001);
}

/* A factorisation has a workspace, is one operation, and says on the device that it went well. */
static void solver(void) {
    void *handle, *matrix;
    int *info, elements = -1, status = -1;
    size_t device = 0, host = 1;
    CHECK(cudaMalloc(&matrix, 64 * 64 * 4) == 0 && cudaMalloc((void **)&info, 4) == 0);
    CHECK(cudaMemset(info, 255, 4) == 0);
    CHECK(cusolverDnCreate(&handle) == 0 && cusolverDnSetStream(handle, stream) == 0);
    CHECK(cusolverDnSpotrf_bufferSize(handle, 0, 64, matrix, 64, &elements) == 0 && elements == 64 * 32);
    CHECK(cusolverDnSpotrf(handle, 0, -1, matrix, 64, matrix, elements, info) == 3);
    CHECK(cusolverDnSpotrf(handle, 0, 64, matrix, 64, matrix, elements, info) == 0);
    CHECK(cudaMemcpy(&status, info, 4, 2) == 0 && status == 0);
    CHECK(cusolverDnXgeqrf_bufferSize(handle, 0, 64, 32, R_32F, matrix, 64, R_32F, 0, R_32F, &device, &host) == 0);
    CHECK(device == 32 * 32 * 4 && host == 0);
    CHECK(cusolverDnXgeqrf(handle, 0, 64, 32, R_32F, matrix, 64, R_32F, 0, R_32F, 0, device, 0, 0, info) == 0);
    CHECK(cusolverDnDestroy(handle) == 0);
    CHECK(cusolverDnSpotrf(handle, 0, 64, matrix, 64, matrix, elements, info) == 1);
}

int main(void) {
    CHECK(cudaStreamCreateWithFlags(&stream, 1) == 0);
    blas();
    blas_lt(R_16BF);
    blas_lt(R_E4M3);
    grouped();
    dnn();
    solver();
    return 0;
}
