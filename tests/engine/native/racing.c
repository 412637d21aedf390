/* Three callers, stage after stage: each piece sums what other pieces of the stage before have written. */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "pool.h"

#define MOST 200
#define PASSES 40
#define STAGES 20

typedef struct {
  const int64_t *in;
  int64_t *out;
} Stage;

static int64_t sum(const int64_t *in, int64_t i) {
  int64_t total = 0;
  for (int k = 0; k < 100; k++) total += in[(i + k) % MOST];
  return total % 1000;
}

static void piece(const void *stage, int64_t i, int worker) {
  const Stage *s = stage;
  s->out[i] = sum(s->in, i);
  (void)worker;
}

static void *call(void *seed) {
  int64_t numbers[2][MOST] = {{0}};
  for (int pass = 0; pass < PASSES; pass++) {
    pool_enter(*(int *)seed % 2 ? -(2 + pass % 7) : 4);
    for (int i = 0; i < MOST; i++) numbers[0][i] = i * *(int *)seed + pass;
    for (int at = 0; at < STAGES; at++) {
      int64_t *in = numbers[at % 2], *out = numbers[1 - at % 2], pieces = 1 + (pass * 31 + at * 7) % MOST;
      Stage stage = {in, out};
      pool_run(piece, &stage, pieces);
      for (int64_t i = 0; i < pieces; i++)
        if (out[i] != sum(in, i)) printf("piece %d of pass %d is wrong\n", (int)i, pass), exit(1);
    }
    if (pass % 10 == 0) nanosleep(&(struct timespec){0, 300000}, NULL); /* long enough for helpers to fall asleep */
    pool_leave(1);
  }
  return NULL;
}

int main(void) {
  static int seeds[] = {1, 2, 3};
  pthread_t callers[3];
  for (int i = 0; i < 3; i++) pthread_create(&callers[i], NULL, call, &seeds[i]);
  for (int i = 0; i < 3; i++) pthread_join(callers[i], NULL);
  return 0;
}
