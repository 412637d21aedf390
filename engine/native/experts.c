/* All experts of a mixture in one call. A row goes to the few experts chosen for it: up, gate, down, and the weighted
 * sum of their results. Rows of one expert are multiplied together, and the pieces of all experts are one stage. A
 * row's sums have the same bits in any batch. */

#include "aligned.h"
#include "exact.h"
#include "matmul.h"
#include "pool.h"
#include "rows.h"

#define TILE 128        /* maximum rows per piece */
#define PIECE (1 << 15) /* minimum bytes of weights times rows per piece */
#define FEW 8192        /* minimum elements of rows per piece */

/* gate * logistic(linear * gate + cubic * gate^3) * (up + plus), with gate at most `limit` and up clamped to -limit ..
 * limit; or, if `squared`, max(gate, 0)^2 times the last factor. */
typedef struct {
  float linear, cubic, limit, plus;
  int32_t squared;
  int32_t ungated;     /* without up and its factor */
  int32_t interleaved; /* gate and up alternate in a row; else up follows the gate */
} Gate;

typedef struct {
  const Matrix *up, *down; /* [experts], all of one form */
  int64_t experts;
  Gate gate;
} Experts;

typedef struct {
  const void *in;        /* [rows, up.in] */
  const int64_t *chosen; /* [rows, each]: experts; invalid ones add nothing */
  const float *weights;  /* [rows, each] */
  void *out;             /* [rows, down.out] */
  int64_t rows, each;
  int bits; /* of `in` and `out`: 32 or 16 */
} Batch;

/* Panels [first, last) of an expert for `rows` of its places. */
typedef struct {
  int64_t expert, place, rows, first, last;
} Job;

/* Pairs of a row and an expert have places, in the order of the experts. Widths are multiples of LANES. */
typedef struct {
  const Experts *e;
  const Batch *b;
  int64_t *place;  /* [rows, each]; -1: an invalid expert */
  int64_t *starts; /* [experts + 1]: an expert's first place */
  char *fed;       /* [places, the larger fed_bytes]: input of the stage's matrix */
  float *step;     /* [places] */
  float *product;  /* [places, the larger matrix.out] */
  Job *jobs;
  const Matrix *m; /* [experts], of the stage */
  int64_t count;   /* rows or places in the stage */
  int64_t chunk;   /* rows or places per piece */
} Pass;

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static void sort(Pass *p) {
  const Batch *b = p->b;
  int64_t experts = p->e->experts;
  memset(p->starts, 0, sizeof(int64_t) * (size_t)(experts + 1));
  for (int64_t i = 0; i < b->rows * b->each; i++)
    if (b->chosen[i] >= 0 && b->chosen[i] < experts) p->starts[b->chosen[i] + 1]++;
  for (int64_t x = 0; x < experts; x++) p->starts[x + 1] += p->starts[x];
  int64_t next[experts];
  memcpy(next, p->starts, sizeof next);
  for (int64_t i = 0; i < b->rows * b->each; i++)
    p->place[i] = b->chosen[i] >= 0 && b->chosen[i] < experts ? next[b->chosen[i]]++ : -1;
}

/* Convert a row of floats to the input of a matrix; returns the row's step, for 8 bits and less. */
static float feed_floats(const Matrix *m, const float *row, char *to) {
  char own[m->in * 4] __attribute__((aligned(64)));
  float step = 0;
  if (m->bits <= 8) step = round_row(row, m->in, (int16_t *)own);
  else
    for (int64_t i = 0; i < m->in; i += LANES) store(own, i, *(const vec *)(row + i), (int)m->bits);
  feed(m, own, to);
  return step;
}

/* Write one row to all its places. */
static void spread(const Pass *p, int64_t r) {
  const Batch *b = p->b;
  const Matrix *m = p->m;
  const int64_t *place = p->place + r * b->each, size = fed_bytes(m);
  const void *row = row_of(b->in, r, m->in, b->bits);
  float wide[m->in] __attribute__((aligned(64)));
  int64_t first = -1;
  for (int64_t j = 0; j < b->each; j++) {
    if (place[j] < 0) continue;
    char *to = p->fed + place[j] * size;
    if (first < 0) {
      first = place[j];
      for (int64_t i = 0; i < m->in; i += LANES) *(vec *)(wide + i) = load(row, i, b->bits);
      p->step[first] = feed_floats(m, wide, to);
    } else {
      memcpy(to, p->fed + first * size, (size_t)size);
      p->step[place[j]] = p->step[first];
    }
  }
}

#if WIDTH == 64
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif WIDTH == 32
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#else
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#endif

INLINE vec at_most(vec x, float limit) { return either(x > limit, (vec){0} + limit, x); }

INLINE vec activated(const Gate *g, vec x) {
  if (g->squared) {
    vec positive = either(x < 0, (vec){0}, x);
    return positive * positive;
  }
  return times_logistic(x, g->linear, g->cubic);
}

static void gate(const Gate *g, const float *row, int64_t n, float *to) {
  for (int64_t i = 0; i < n; i += LANES) {
    const float *here = row + (g->interleaved ? 2 * i : i);
    vec first = *(const vec_unaligned *)here, second = {0};
    if (!g->ungated) second = *(const vec_unaligned *)(here + (g->interleaved ? LANES : n));
    vec x = g->interleaved ? __builtin_shufflevector(first, second, EVEN) : first;
    vec up = g->interleaved ? __builtin_shufflevector(first, second, ODD) : second;
    vec y = activated(g, at_most(x, g->limit));
    *(vec *)(to + i) = g->ungated ? y : y * (-at_most(-at_most(up, g->limit), g->limit) + g->plus);
  }
}

static void between(const Pass *p, int64_t place) {
  const Matrix *m = p->m;
  float gated[m->in] __attribute__((aligned(64)));
  gate(&p->e->gate, p->product + place * p->e->up->out, m->in, gated);
  p->step[place] = feed_floats(m, gated, p->fed + place * fed_bytes(m));
}

static void combine(const Pass *p, int64_t r) {
  const Batch *b = p->b;
  int64_t n = p->m->out;
  const int64_t *place = p->place + r * b->each;
  const float *weights = b->weights + r * b->each;
  void *to = (void *)row_of(b->out, r, n, b->bits);
  for (int64_t i = 0; i < n; i += LANES) {
    vec sum = {0};
    for (int64_t j = 0; j < b->each; j++)
      if (place[j] >= 0) sum += *(const vec_unaligned *)(p->product + place[j] * n + i) * weights[j];
    store(to, i, sum, b->bits);
  }
}

/* Defines the stage `name_all`: `name` for each of `count` items, about `width` elements of work each. */
#define STAGE_OF(name)                                                                       \
  static void name##_piece(const void *stage, int64_t piece, int worker) {                   \
    const Pass *p = stage;                                                                   \
    int64_t first = piece * p->chunk, last = first + p->chunk;                               \
    for (int64_t r = first; r < last && r < p->count; r++) name(p, r);                       \
    (void)worker;                                                                            \
  }                                                                                          \
  static void name##_all(Pass *p, const Matrix *m, int64_t count, int64_t width) {           \
    p->m = m, p->count = count, p->chunk = width < FEW ? FEW / width : 1;             \
    pool_run(name##_piece, p, (count + p->chunk - 1) / p->chunk);                            \
  }
STAGE_OF(spread)
STAGE_OF(between)
STAGE_OF(combine)

static void multiply_job(const void *stage, int64_t piece, int worker) {
  const Pass *p = stage;
  const Job *job = p->jobs + piece;
  const Matrix *m = p->m + job->expert;
  Product product = {p->fed + job->place * fed_bytes(m), p->step + job->place, p->product + job->place * m->out,
                     m->out, job->rows, 32, 0};
  multiply_panels(m, &product, job->first, job->last);
  (void)worker;
}

/* Panels per piece for `rows` rows of an expert. */
static int64_t panels_of_piece(const Matrix *m, int64_t rows) {
  int64_t bytes = m->in * m->bits / 8 * m->out / matmul_panels(m) * rows;
  return bytes < PIECE ? PIECE / larger(bytes, 1) : 1;
}

/* Write the jobs of a matrix of each expert, or only count them if `jobs` is NULL. Tiles of rows that use the same
 * panels are adjacent, so that the panels stay in a cache. */
static int64_t plan(const Pass *p, const Matrix *m, Job *jobs) {
  int64_t count = 0, panels = matmul_panels(m);
  for (int64_t x = 0; x < p->e->experts; x++) {
    int64_t start = p->starts[x], rows = p->starts[x + 1] - start, tiles = (rows + TILE - 1) / TILE;
    int64_t some = rows ? panels_of_piece(m, rows / tiles) : panels;
    for (int64_t first = 0; rows && first < panels; first += some)
      for (int64_t tile = 0; tile < tiles; tile++, count++) {
        if (!jobs) continue;
        int64_t from = rows * tile / tiles, to = rows * (tile + 1) / tiles;
        jobs[count] = (Job){x, start + from, to - from, first, first + some < panels ? first + some : panels};
      }
  }
  return count;
}

static void multiply_all(Pass *p, const Matrix *m) {
  p->m = m;
  pool_run(multiply_job, p, plan(p, m, p->jobs));
}

static double work_of(const Pass *p) {
  double work = 0;
  for (int64_t x = 0; x < p->e->experts; x++) {
    int64_t rows = p->starts[x + 1] - p->starts[x];
    if (rows) work += matmul_work(p->e->up, rows) + matmul_work(p->e->down, rows);
  }
  return work;
}

static void run(Pass *p, int threads) {
  const Matrix *up = p->e->up, *down = p->e->down;
  int64_t places = p->starts[p->e->experts];
  pool_enter(threads);
  spread_all(p, up, p->b->rows, up->in * p->b->each);
  multiply_all(p, up);
  between_all(p, down, places, up->out);
  multiply_all(p, down);
  combine_all(p, down, p->b->rows, down->out * p->b->each);
  pool_leave(work_of(p));
}

/* Returns 0, or 1 if an allocation failed. */
int pilotfish_experts(const Experts *e, const Batch *b, int threads) {
  int64_t pairs = b->rows * b->each;
  size_t fed = (size_t)larger(fed_bytes(e->up), fed_bytes(e->down)), wide = (size_t)larger(e->up->out, e->down->out);
  Pass p = {.e = e, .b = b};
  p.place = malloc(sizeof(int64_t) * (size_t)(pairs + e->experts + 1));
  p.fed = aligned_bytes((int64_t)((size_t)pairs * (fed + sizeof(float) * (wide + 1))) + 256);
  if (p.place && p.fed) {
    p.starts = p.place + pairs;
    sort(&p);
    p.product = (float *)(p.fed + ((size_t)pairs * fed / 64 + 1) * 64);
    p.step = p.product + (size_t)pairs * wide;
    p.jobs = malloc(sizeof(Job) * (size_t)(larger(plan(&p, e->up, NULL), plan(&p, e->down, NULL)) + 1));
    if (p.jobs) run(&p, threads);
  }
  int failed = !p.jobs;
  free(p.place), aligned_free(p.fed), free(p.jobs);
  return failed;
}
