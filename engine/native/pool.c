/* A work-sharing pool: threads take pieces of a stage. A stage is over when its pieces are done, not when every thread
 * has arrived: a thread that has lost its core delays at most the piece that it holds.
 *
 * The pieces of a stage are split into spans, one per thread, so that a thread reads memory in order and the same parts
 * in every pass. A thread that has finished its own span takes pieces of the others.
 *
 * Memory ordering. A span's `left` counts down; the thread that changes it from n > 0 to n - 1 has taken a piece. The
 * caller writes the stage (plain memory), then each `left` (release). Taking a piece is a read-modify-write (acquire),
 * so the thread reads the stage of its piece, however late it is; and that stage stays until the piece is done, because
 * the caller writes the next one only when it has counted all pieces. A helper counts each piece in `helped` after its
 * work (release), and the caller reads that before it continues (acquire): it reads what was written. No other thread
 * accesses plain memory.
 *
 * Sleep. A waiting thread spins for a while, sets `asleep`, checks once more, and sleeps until it is woken. A thread
 * that raises the counter checks `asleep` afterwards. Both are sequentially consistent: one of the two reads the
 * other's write. */

#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

#define SPIN 50e-6 /* seconds: longer than the gap between two stages, far shorter than a scheduler's time slice */
#define CACHE_LINE 64

typedef struct {
  _Alignas(CACHE_LINE) atomic_llong left; /* pieces of the span not yet taken */
  _Alignas(CACHE_LINE) atomic_int asleep;
  pthread_mutex_t lock;
  pthread_cond_t woken;
} Seat; /* per thread; the caller's is the first */

static Seat seats[POOL_MOST];
static struct {
  _Alignas(CACHE_LINE) atomic_llong stages; /* started so far */
  _Alignas(CACHE_LINE) atomic_llong helped; /* pieces of this stage done by helpers */
  _Alignas(CACHE_LINE) atomic_int taken;    /* whether a thread holds the pool */
  atomic_int threads;                       /* in this pass */
  /* The caller writes these; helpers read those of a stage. */
  Piece *run;
  const void *stage;
  int64_t pieces;
  int spans, started, exactly;
  double begun, busy, spun; /* start of the pass, in wall time and CPU time of the caller; seconds of spinning */
  Choice choice;
} pool;
static _Thread_local int mine; /* whether this thread holds the pool */

static double now(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* Returns the seconds slept. */
static double sleep_for(atomic_llong *counter, long long value, Seat *seat) {
  double begun = now(CLOCK_MONOTONIC);
  atomic_store(&seat->asleep, 1);
  pthread_mutex_lock(&seat->lock);
  while (atomic_load(&seat->asleep) && atomic_load(counter) < value) pthread_cond_wait(&seat->woken, &seat->lock);
  pthread_mutex_unlock(&seat->lock);
  atomic_store(&seat->asleep, 0);
  return now(CLOCK_MONOTONIC) - begun;
}

static void wake(Seat *seat) {
  if (!atomic_load(&seat->asleep)) return;
  pthread_mutex_lock(&seat->lock);
  atomic_store(&seat->asleep, 0);
  pthread_mutex_unlock(&seat->lock);
  pthread_cond_signal(&seat->woken);
}

/* Wait until the counter has this value: spinning at first unless `sleepy`, then asleep. Returns the seconds slept. */
static double wait_for(atomic_llong *counter, long long value, Seat *seat, int sleepy) {
  double end = 0, slept = 0;
  for (int i = 1; atomic_load_explicit(counter, memory_order_acquire) < value; i++) {
    relax();
    if (!sleepy && i % 32) continue;
    double here = now(CLOCK_MONOTONIC);
    if (end == 0) end = here + SPIN;
    if (sleepy || here > end) slept += sleep_for(counter, value, seat);
  }
  return slept;
}

/* Run the remaining pieces of all spans, its own first; returns how many it ran. */
static int64_t work(int me, int spans) {
  int64_t done = 0;
  for (int i = 0; i < spans; i++) {
    int span = (me + i) % spans;
    atomic_llong *left = &seats[span].left;
    while (atomic_load_explicit(left, memory_order_relaxed) > 0) {
      long long n = atomic_fetch_sub_explicit(left, 1, memory_order_acquire);
      if (n <= 0) break;
      pool.run(pool.stage, pool.pieces * (span + 1) / pool.spans - n, me);
      done++;
      if (me == 0) continue;
      atomic_fetch_add(&pool.helped, 1);
      wake(&seats[0]);
    }
  }
  return done;
}

static void *help(void *seat) {
  int me = (int)((Seat *)seat - seats);
  for (long long seen = 0;;) {
    int threads = atomic_load(&pool.threads);
    wait_for(&pool.stages, seen + 1, seat, me >= threads);
    seen = atomic_load(&pool.stages);
    threads = atomic_load(&pool.threads);
    if (me < threads) work(me, threads);
  }
  return NULL;
}

static void restart(void) {
  for (int i = 0; i < POOL_MOST; i++) {
    pthread_mutex_init(&seats[i].lock, NULL), pthread_cond_init(&seats[i].woken, NULL);
    atomic_store(&seats[i].asleep, 0), atomic_store(&seats[i].left, 0);
  }
  atomic_store(&pool.taken, 0);
  pool.started = 1, mine = 0;
}

/* In a forked child there are no helpers, and no thread holds the pool. */
__attribute__((constructor)) static void begin(void) {
  restart();
#if !defined(_WIN32)
  pthread_atfork(NULL, NULL, restart);
#endif
}

static void start_helpers(int threads) {
#if !defined(_WIN32)
  /* Helpers block signals, which the other threads handle. */
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
  for (pthread_t thread; pool.started < threads; pool.started++) {
    if (pthread_create(&thread, NULL, help, &seats[pool.started])) break;
    pthread_detach(thread);
  }
#if !defined(_WIN32)
  pthread_sigmask(SIG_SETMASK, &before, NULL);
#endif
}

int pool_enter(int threads) {
  if (atomic_exchange(&pool.taken, 1)) return 1;
  mine = 1;
  int most = threads < 0 ? -threads : threads > 1 ? threads : 1;
  if (most > POOL_MOST) most = POOL_MOST;
  pool.exactly = threads < 0;
  if (!pool.exactly && pool.choice.most != most)
    pool.choice = (Choice){.most = most, .now = most, .home = most, .step = 1};
  int wanted = pool.exactly ? most : pool.choice.now;
  if (pool.started < wanted) start_helpers(wanted);
  if (wanted > pool.started) wanted = pool.started;
  atomic_store(&pool.threads, wanted);
  pool.begun = now(CLOCK_MONOTONIC), pool.busy = now(CLOCK_THREAD_CPUTIME_ID), pool.spun = 0;
  return pool.started;
}

int pool_threads(void) { return atomic_load(&pool.threads); }

void pool_leave(double work) {
  if (!mine) return;
  if (pool.choice.most > 1 && !pool.exactly && work > 0) {
    double clock = now(CLOCK_MONOTONIC), seconds = clock - pool.begun;
    double lost = seconds - (now(CLOCK_THREAD_CPUTIME_ID) - pool.busy - pool.spun);
    choose_threads(&pool.choice, clock, seconds, work, lost);
  }
  mine = 0;
  atomic_store(&pool.taken, 0);
}

void pool_run(Piece *run, const void *stage, int64_t pieces) {
  int threads = mine ? atomic_load_explicit(&pool.threads, memory_order_relaxed) : 1;
  if (threads > pieces) threads = (int)pieces;
  if (threads <= 1) {
    for (int64_t i = 0; i < pieces; i++) run(stage, i, 0);
    return;
  }
  pool.run = run, pool.stage = stage, pool.pieces = pieces, pool.spans = threads;
  atomic_store_explicit(&pool.helped, 0, memory_order_relaxed);
  for (int i = 0; i < threads; i++) {
    int64_t count = pieces * (i + 1) / threads - pieces * i / threads;
    atomic_store_explicit(&seats[i].left, count, memory_order_release);
  }
  atomic_fetch_add(&pool.stages, 1);
  for (int i = 1; i < threads; i++) wake(&seats[i]);
  int64_t others = pieces - work(0, threads);
  if (atomic_load_explicit(&pool.helped, memory_order_acquire) >= others) return;
  double begun = now(CLOCK_MONOTONIC), slept = wait_for(&pool.helped, others, &seats[0], 0);
  pool.spun += now(CLOCK_MONOTONIC) - begun - slept;
}
