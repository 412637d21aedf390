/* Threads that claim pieces of work from each other; see pool.c. */

#ifndef PILOTFISH_POOL_H
#define PILOTFISH_POOL_H

#include <stdint.h>

#define POOL_MOST 256 /* threads, the caller among them */

/* One piece of a stage. `worker` is below what `pool_enter` returned and differs among threads that work at one time. */
typedef void Piece(const void *stage, int64_t piece, int worker);

/* Between these two the pool belongs to the calling thread; another one that enters meanwhile works without it.
 * `threads` is a maximum, of which the fastest number takes part; below 0 it is exact. Returns a bound on the workers.
 *
 * `work` is the amount done, in any unit that does not depend on the number of threads: rates are compared by it. */
int pool_enter(int threads);
void pool_leave(double work);

/* How many took part in the last pass. */
int pool_threads(void);

/* All pieces of a stage, each once, in no order. All of them are done when this returns, and what they wrote is seen. */
void pool_run(Piece *run, const void *stage, int64_t pieces);

/* How many threads take part; see choose_threads. */
typedef struct {
  int32_t most;                 /* that may */
  int32_t now, home;            /* that do; that did before the trial under way, or the same */
  int32_t step;                 /* by how many the next trial differs */
  double rate;                  /* of work per second, `home` threads */
  double seconds, work, lost;   /* of the window under way */
  double due;                   /* when there may be another trial */
} Choice;

/* Told of a pass that ended at `clock`, how many threads take part in the next one. */
int choose_threads(Choice *c, double clock, double seconds, double work, double lost);

#endif
