/* Threads that share pieces of work; see pool.c. */

#ifndef PILOTFISH_POOL_H
#define PILOTFISH_POOL_H

#include <stdint.h>

#define POOL_MOST 256 /* threads, including the caller */

/* One piece of a stage. `worker` is below the result of `pool_enter` and differs between concurrent threads. */
typedef void Piece(const void *stage, int64_t piece, int worker);

/* Between these two calls the pool belongs to the calling thread; another one that enters meanwhile runs without it.
 * `threads` is a maximum, of which the fastest number runs; below 0 it is exact. Returns a bound on the workers.
 *
 * `work` is the amount done, in any unit that does not depend on the number of threads, to compare rates. */
int pool_enter(int threads);
void pool_leave(double work);

/* The number of threads of the last pass. */
int pool_threads(void);

/* Run all pieces of a stage, each once, in any order. All results are visible to the caller when this returns. */
void pool_run(Piece *run, const void *stage, int64_t pieces);

/* The state of choose_threads. */
typedef struct {
  int32_t most;                 /* maximum */
  int32_t now, home;            /* the current number; that before the current trial, or the same */
  int32_t step;                 /* difference of the next trial */
  double rate;                  /* work per second, with `home` threads */
  double seconds, work, lost;   /* of the current window */
  double due;                   /* the earliest time of the next trial */
} Choice;

/* Record a pass that ended at `clock`; returns the number of threads for the next one. */
int choose_threads(Choice *c, double clock, double seconds, double work, double lost);

#endif
