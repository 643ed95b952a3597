// An NCCL for processes of one machine, for tests of what is passed to a real one: all-reduce sums float32 in a shared file,
// messages and groups are counted. Runs on the streams of fake_cuda.c.
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { RANKS = 8, COUNT = 4096 };
typedef struct { char text[128]; } ncclUniqueId;
typedef struct {
  uint32_t arrived[2], left[2];
  float data[RANKS][COUNT];
} board;
typedef struct { board *shared; int nranks, rank; uint32_t round; } comm;

extern int cuStreamSynchronize(void *stream);
static uint64_t groups, calls, live;

int ncclGetUniqueId(ncclUniqueId *id) {
  static int number;
  snprintf(id->text, sizeof id->text, "/dev/shm/fake-nccl-%d-%d", getpid(), number++);
  int file = open(id->text, O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, sizeof(board))) return 2;
  close(file);
  return 0;
}
int ncclCommInitRank(comm **out, int nranks, ncclUniqueId id, int rank) {
  int file = open(id.text, O_RDWR);
  if (file < 0 || nranks > RANKS) return 2;
  comm *c = calloc(1, sizeof *c);
  c->shared = mmap(NULL, sizeof(board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (c->shared == MAP_FAILED) return 2;
  c->nranks = nranks;
  c->rank = rank;
  if (rank == nranks - 1 && nranks > 1) unlink(id.text);
  if (nranks == 1) unlink(id.text);
  live++;
  *out = c;
  return 0;
}
static int end(comm *c) { munmap(c->shared, sizeof(board)); free(c); live--; return 0; }
int ncclCommDestroy(comm *c) { return end(c); }
int ncclCommAbort(comm *c) { return end(c); }
int ncclCommGetAsyncError(comm *c, int *error) { (void)c; *error = 0; return 0; }
int ncclGroupStart(void) { groups++; return 0; }
int ncclGroupEnd(void) { return 0; }
int ncclRedOpCreatePreMulSum(int *op, void *scalar, int dtype, int residence, comm *c) {
  (void)scalar, (void)dtype, (void)residence, (void)c;
  *op = 5;
  return 0;
}
int ncclRedOpDestroy(int op, comm *c) { (void)op, (void)c; return 0; }

static void meet(uint32_t *counter, uint32_t all) {
  __atomic_add_fetch(counter, 1, __ATOMIC_ACQ_REL);
  while (__atomic_load_n(counter, __ATOMIC_ACQUIRE) < all) sched_yield();
}
int ncclAllReduce(const float *send, float *recv, size_t count, int dtype, int op, comm *c, void *stream) {
  (void)op;
  if (count > COUNT || dtype != 7) return 4;
  calls++;
  cuStreamSynchronize(stream);
  uint32_t all = (uint32_t)c->nranks * ++c->round;
  memcpy(c->shared->data[c->rank], send, count * sizeof *send);
  meet(&c->shared->arrived[0], all);
  for (size_t i = 0; i < count; i++) {
    recv[i] = 0;
    for (int rank = 0; rank < c->nranks; rank++) recv[i] += c->shared->data[rank][i];
  }
  meet(&c->shared->left[0], all);
  return 0;
}
#define NOT_HERE(name) int name(void) { calls++; return 5; }
NOT_HERE(ncclAllGather)
NOT_HERE(ncclReduceScatter)
NOT_HERE(ncclBroadcast)
NOT_HERE(ncclReduce)
static const void *sent;
static size_t sent_bytes;
int ncclSend(const void *buffer, size_t count, int dtype, int peer, comm *c, void *stream) {
  (void)peer, (void)c;
  calls++;
  cuStreamSynchronize(stream);
  sent = buffer;
  sent_bytes = count * (dtype == 7 ? 4 : 1);
  return 0;
}
int ncclRecv(void *buffer, size_t count, int dtype, int peer, comm *c, void *stream) {
  (void)peer, (void)c, (void)stream, (void)count, (void)dtype;
  calls++;
  if (!sent) return 5;
  memmove(buffer, sent, sent_bytes);
  sent = NULL;
  return 0;
}
const char *ncclGetErrorString(int code) { return code == 5 ? "not in the fake" : "an error of the fake"; }
uint64_t fake_nccl_calls(void) { return calls; }
uint64_t fake_nccl_groups(void) { return groups; }
uint64_t fake_nccl_live(void) { return live; }
