/* Ragged paged attention on a CPU: prompts, decoding and verification in one call. K/V is read in place.
 *
 * A job is one sequence, one K/V head and a tile of its query rows (a row: one token and one of the query heads that
 * share the K/V head). It processes the keys in blocks that begin at multiples of BLOCK and keeps a running maximum and
 * sum (online softmax; Milakov and Gimelshein 2018, arXiv 1805.02867), so every block of K and V is read once for all
 * rows of the tile. A masked key has weight exactly 0 and changes neither the maximum nor the sums of a row, and all
 * rows use the same instructions: so a row's result has the same bits in any batch.
 *
 * Keys and values may be int8, each with a scale. Their codes are multiplied as integers, which both float types
 * represent exactly; scores are then multiplied by the keys' scales, and weights by the values'.
 *
 * The products of queries with keys and of weights with values have a version for AVX-512 and one for other CPUs. */

#include "aligned.h"
#include "attention.h"
#include "pool.h"

#define BLOCK ATTENTION_BLOCK
#define ROWS ATTENTION_ROWS
#define CHUNK 6  /* jobs */
#define STRIP 4  /* rows, or vectors, that are processed together in registers */

/* Prefetch one K/V head of a position: positions are too far apart for hardware prefetching. */
INLINE void fetch(const void *data, int64_t place, int64_t dim, int bits) {
  for (int64_t d = 0; d < dim; d += 512 / bits) __builtin_prefetch((const char *)data + (place + d) * bits / 8);
  if (bits == 8) __builtin_prefetch((const char *)data + place + dim - 1); /* codes may start within a line */
}

/* Bits per number in the arena. */
INLINE int kv_bits(const Args *a, int bits) { return a->rounded ? 8 : bits; }

/* The first key position that a token attends to. */
INLINE int64_t oldest_of(const Args *a, int64_t position) {
  int64_t in_window = a->window && position >= a->window ? position - a->window + 1 : 0;
  int64_t in_chunk = a->chunk ? position / a->chunk * a->chunk : 0;
  return in_chunk > in_window ? in_chunk : in_window;
}

/* The offsets of the block at position `first`; positions after the last one map to it, and are masked. */
static void find(const Args *a, const Job *job, int64_t first, Places *places) {
  const int32_t *table = a->tables + job->sequence * a->width;
  int64_t kv_len = a->kv_lens[job->sequence], page = -1, at = 0, before = a->rounded ? (int64_t)sizeof(float) : 0;
  for (int64_t j = 0; j < BLOCK; j++) {
    int64_t position = first + j < kv_len ? first + j : kv_len - 1;
    if (j == 0 || at == a->page_size) page = position / a->page_size, at = position % a->page_size;
    int64_t row = table[page] * a->page_size + at;
    places->key[j] = row * a->key_stride + job->head * (before + a->dim) + before;
    places->value[j] = row * a->value_stride + job->head * (before + a->value_dim) + before;
    at += position < kv_len - 1;
  }
}

/* The position of the token of a job's row. */
INLINE int64_t position_of(const Args *a, const Job *job, int64_t row) {
  int64_t tokens = a->first_rows[job->sequence + 1] - a->first_rows[job->sequence];
  return a->kv_lens[job->sequence] - tokens + (job->first + row) / (a->heads / a->kv_heads);
}

/* The start of the first block that a job reads. */
INLINE int64_t first_of(const Args *a, const Job *job) { return oldest_of(a, position_of(a, job, 0)) / BLOCK * BLOCK; }

static void cap(const Args *a, float *scores) {
  if (a->softcap > 0)
    for (int j = 0; j < BLOCK; j++) scores[j] = tanhf(scores[j] / a->softcap) * a->softcap;
}

/* Set the masked scores of a row to -inf; `first` is the block's first position. */
static void mask(const Args *a, float *scores, int64_t first, int64_t position) {
  int64_t last = position - first;                 /* the last visible key */
  int64_t oldest = oldest_of(a, position) - first; /* the first visible key */
  if (last >= BLOCK - 1 && oldest <= 0) return;
  for (int64_t j = 0; j < BLOCK; j++)
    if (j > last || j < oldest) scores[j] = -INFINITY;
}

/* Convert scores to weights in place; returns the factor by which the earlier sums must be multiplied. */
static float weigh(float *scores, float *maximum, float *weight) {
  vec *s = (vec *)scores;
  vec best = s[0];
  for (int j = 1; j < BLOCK / LANES; j++) best = either(s[j] > best, s[j], best);
  float highest = maximum_of(best);
  if (!(highest > *maximum)) highest = *maximum;
  if (highest == -INFINITY) { /* all keys so far are masked */
    memset(scores, 0, BLOCK * sizeof(float));
    return 1;
  }
  vec total = {0};
  for (int j = 0; j < BLOCK / LANES; j++) {
    s[j] = exponential(s[j] - highest);
    total += s[j];
  }
  vec before = (vec){0} + (*maximum - highest);
  float shrink = *maximum == -INFINITY ? 0 : (highest == *maximum ? 1 : exponential(before)[0]);
  *maximum = highest;
  *weight = *weight * shrink + sum_of(total);
  return shrink;
}

/* The scales of int8 vectors, whose codes begin at `places`. */
static void load_scales(const void *data, const int64_t *places, float *scales) {
  for (int j = 0; j < BLOCK; j++) memcpy(scales + j, (const char *)data + places[j] - sizeof(float), sizeof(float));
}

INLINE void scale_by(float *x, const float *scales) {
  for (int j = 0; j < BLOCK; j++) x[j] *= scales[j];
}

#if WIDTH == 64
#include "attention_avx512.h"
#else
#include "attention_any.h"
#endif

static void load_query(const Args *a, const Work *w, int row, int64_t place, int bits) {
  for (int64_t d = 0; d < a->dim; d++) w->query[row * a->dim + d] = element(a->query, place + d, bits);
}

/* One strip times one block; the number of rows and the kind of products are compile-time constants. */
INLINE void strip(const Args *a, Work *w, const Job *job, int row, int64_t first, const int rows, const int fast) {
  float shrink[STRIP];
  multiply_keys(a, w, row, rows, fast);
  for (int i = 0; i < rows; i++) {
    float *scores = w->scores + (row + i) * BLOCK;
    if (a->rounded) scale_by(scores, w->key_scale);
    cap(a, scores);
    mask(a, scores, first, position_of(a, job, row + i));
    shrink[i] = weigh(scores, &w->maximum[row + i], &w->weight[row + i]);
    if (a->rounded) scale_by(scores, w->value_scale);
  }
  multiply_values(a, w, row, shrink, rows, fast);
}

#define STRIPS(rows) \
  case rows: fast ? strip(a, w, job, row, first, rows, 1) : strip(a, w, job, row, first, rows, 0); break;

static void meet(const Args *a, Work *w, const Job *job, int row, int64_t first, int fast) {
  switch (job->count - row) {
    STRIPS(1)
    STRIPS(2)
    STRIPS(3)
    default: fast ? strip(a, w, job, row, first, STRIP, 1) : strip(a, w, job, row, first, STRIP, 0);
  }
}

/* Row r of a job is token r / group and query head head * group + r % group of its sequence. A sink is a score without
 * a key: it is the initial maximum, with weight 1. */
INLINE void begin(const Args *a, const Job *job, Work *w, int64_t group, int64_t start, int bits, int fast) {
  memset(w->sums, 0, sizeof(float) * job->count * a->value_dim);
  for (int r = 0; r < job->count; r++) {
    int64_t row = job->first + r, head = job->head * group + row % group;
    int64_t at = (start + row / group) * a->query_stride + head * a->dim;
    w->maximum[r] = a->sinks ? a->sinks[head] : -INFINITY, w->weight[r] = a->sinks ? 1 : 0;
    if (fast)
      memcpy((uint32_t *)w->query + r * (a->dim / 2), (const bf16 *)a->query + at, 2 * a->dim);
    else
      load_query(a, w, r, at, bits);
  }
}

INLINE void finish(const Args *a, const Job *job, const Work *w, int64_t group, int64_t start, int bits) {
  for (int r = 0; r < job->count; r++) {
    int64_t row = job->first + r;
    int64_t at = ((start + row / group) * a->heads + job->head * group + row % group) * a->value_dim;
    for (int64_t d = 0; d < a->value_dim; d += LANES)
      store(a->out, at + d, *(vec *)(w->sums + r * a->value_dim + d) / w->weight[r], bits);
  }
}

static void attention_run(const Args *a, const Job *job, const Job *after, Work *w, int bits) {
  int fast = FAST(bits, a->dim);
  int64_t group = a->heads / a->kv_heads, start = a->first_rows[job->sequence], first = first_of(a, job);
  int64_t newest = position_of(a, job, job->count - 1);
  Places here, next, *places = &here, *ahead = &next;
  begin(a, job, w, group, start, bits, fast);
  find(a, job, first, places);
  /* A short context is a single block, which would otherwise not be prefetched. */
  for (int j = 0; j < BLOCK; j++) fetch(a->value, places->value[j], a->value_dim, kv_bits(a, bits));
  for (; first <= newest; first += BLOCK) {
    if (first + BLOCK <= newest) {
      find(a, job, first + BLOCK, ahead);
    } else if (after) {
      find(a, after, first_of(a, after), ahead);
    } else {
      *ahead = *places;
    }
    load_block(a, w, places, ahead, bits);
    if (a->rounded) {
      load_scales(a->key, places->key, w->key_scale);
      load_scales(a->value, places->value, w->value_scale);
    }
    for (int row = 0; row < job->count; row += STRIP) meet(a, w, job, row, first, fast);
    Places *done = places;
    places = ahead, ahead = done;
  }
  finish(a, job, w, group, start, bits);
}

int64_t attention_tile(const Args *a, int threads) {
  int64_t tile = ROWS;
  while (tile > STRIP && attention_plan(a, tile, NULL) < threads) tile /= 2;
  return tile;
}

int attention_plan(const Args *a, int64_t tile, Job *jobs) {
  int count = 0;
  int64_t group = a->heads / a->kv_heads;
  for (int64_t i = 0; i < a->sequences; i++) {
    int64_t rows = (a->first_rows[i + 1] - a->first_rows[i]) * group;
    for (int64_t first = 0; first < rows; first += tile)
      for (int64_t head = 0; head < a->kv_heads; head++, count++)
        if (jobs) {
          int64_t here = rows - first < tile ? rows - first : tile;
          jobs[count] = (Job){(int32_t)i, (int32_t)head, (int32_t)first, (int32_t)here};
        }
  }
  return count;
}

static void *aligned_floats(int64_t count) { return aligned_bytes(count * (int64_t)sizeof(float)); }

Work *attention_begin(const Args *a, int workers) {
  Work *all = calloc((size_t)workers, sizeof(Work));
  for (Work *w = all; all && w < all + workers; w++) {
    w->query = aligned_floats(ROWS * a->dim), w->sums = aligned_floats(ROWS * a->value_dim);
    w->keys = aligned_floats(BLOCK * a->dim), w->values = aligned_floats(BLOCK * a->value_dim);
    w->scores = aligned_floats(ROWS * BLOCK);
    if (!(w->keys && w->values && w->query && w->scores && w->sums)) return attention_end(all, workers), NULL;
  }
  return all;
}

void attention_end(Work *w, int workers) {
  for (int i = 0; i < workers; i++) {
    aligned_free(w[i].query), aligned_free(w[i].keys), aligned_free(w[i].values);
    aligned_free(w[i].scores), aligned_free(w[i].sums);
  }
  free(w);
}

typedef struct {
  const Args *a;
  const Job *jobs;
  Work *w;
  int count, chunk, bits;
} Stage;

static void attend_piece(const void *stage, int64_t piece, int worker) {
  const Stage *s = stage;
  for (int64_t i = piece * s->chunk; i < s->count && i < (piece + 1) * s->chunk; i++)
    attention_run(s->a, &s->jobs[i], i % s->chunk < s->chunk - 1 && i + 1 < s->count ? &s->jobs[i + 1] : NULL,
                  &s->w[worker], s->bits);
}

void attention_together(const Args *a, const Job *jobs, int count, Work *w, int bits) {
  /* Several jobs per piece, to prefetch the first keys of the next one, but at least two pieces per thread. */
  int threads = pool_threads(), most = count / (threads > 1 ? 2 * threads : 2), chunk = most > CHUNK ? CHUNK : most;
  Stage stage = {a, jobs, w, count, chunk > 1 ? chunk : 1, bits};
  pool_run(attend_piece, &stage, (count + stage.chunk - 1) / stage.chunk);
}

double attention_work(const Args *a, int bits) {
  double all = 0;
  for (int64_t i = 0; i < a->sequences; i++)
    all += a->kv_lens[i] * (1 + (double)(a->first_rows[i + 1] - a->first_rows[i]) * (double)(a->heads / a->kv_heads) / 4);
  return all * (double)(a->kv_heads * (a->dim + a->value_dim) * kv_bits(a, bits) / 8);
}

/* Returns 0, or 1 if an allocation failed. `bits`: 32 for float, 16 for bfloat16. */
int pilotfish_attend(const Args *a, int bits, int threads) {
  int workers = pool_enter(threads);
  int64_t tile = attention_tile(a, pool_threads());
  int count = attention_plan(a, tile, NULL);
  Job *jobs = malloc(sizeof(Job) * (size_t)(count ? count : 1));
  Work *w = jobs ? attention_begin(a, workers) : NULL;
  if (w) {
    attention_plan(a, tile, jobs);
    attention_together(a, jobs, count, w, bits);
    attention_end(w, workers);
  }
  free(jobs);
  pool_leave(attention_work(a, bits));
  return !w;
}
