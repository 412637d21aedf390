/* Ragged paged attention on a CPU: prompts, decoding and verification in one call, K/V where it lies.
 *
 * A job is one sequence, one K/V head and a tile of its query rows (a row: one token and one of the query heads that
 * share the K/V head). It walks the keys in blocks that begin at multiples of BLOCK and keeps a running maximum and sum
 * (online softmax; Milakov and Gimelshein 2018, arXiv 1805.02867), so every block of K and V is read once for all rows
 * of the tile. What a row may not see has weight 0 exactly and changes neither its maximum nor its sums, and all rows
 * take the same instructions: so a row's result is the same, bit for bit, whatever stands beside it.
 *
 * Vectors are the compiler's own (GCC, Clang), so this runs on any CPU; bfloat16 products take AVX512-BF16 if any.
 */

#include "attention.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define BLOCK 64 /* keys */
#define ROWS ATTENTION_ROWS
#define CHUNK 6  /* jobs */
#define STRIP 4  /* rows, or vectors, that are kept in registers together */

/* Ask for one K/V head of a position ahead of time: they lie too far apart for the processor to foresee. */
INLINE void fetch(const void *data, int64_t place, int64_t dim, int bits) {
  for (int64_t d = 0; d < dim; d += 512 / bits) __builtin_prefetch((const char *)data + (place + d) * bits / 8);
}

/* Where the block's keys lie, in elements of the arena; those behind the last stand for it, and nobody sees them. */
static void find(const Args *a, const int32_t *table, int64_t first, int64_t kv_len, int64_t head, int64_t *places) {
  int64_t step = a->kv_heads * a->dim, page = -1, at = 0;
  for (int64_t j = 0; j < BLOCK; j++) {
    int64_t position = first + j < kv_len ? first + j : kv_len - 1;
    if (j == 0 || at == a->page_size) page = position / a->page_size, at = position % a->page_size;
    places[j] = (table[page] * a->page_size + at) * step + head * a->dim;
    at += position < kv_len - 1;
  }
}

/* The same of the first block that a job will read. */
static void find_first(const Args *a, const Job *job, int64_t *places) {
  int64_t tokens = a->first_rows[job->sequence + 1] - a->first_rows[job->sequence], kv_len = a->kv_lens[job->sequence];
  int64_t token = kv_len - tokens + job->first / (a->heads / a->kv_heads);
  int64_t oldest = a->window && token >= a->window ? token - a->window + 1 : 0;
  find(a, a->tables + job->sequence * a->width, oldest / BLOCK * BLOCK, kv_len, job->head, places);
}

static void cap(const Args *a, float *scores) {
  if (a->softcap > 0)
    for (int j = 0; j < BLOCK; j++) scores[j] = tanhf(scores[j] / a->softcap) * a->softcap;
}

/* Scores of a row that its token may not see become -inf; `first` is the block's first position. */
static void mask(const Args *a, float *scores, int64_t first, int64_t position) {
  int64_t last = position - first;                               /* the newest key it sees */
  int64_t oldest = a->window ? position - a->window + 1 - first : 0; /* and the oldest */
  if (last >= BLOCK - 1 && oldest <= 0) return;
  for (int64_t j = 0; j < BLOCK; j++)
    if (j > last || j < oldest) scores[j] = -INFINITY;
}

/* Scores to weights in place; returns the factor by which what was summed before must shrink. */
static float weigh(float *scores, float *maximum, float *weight) {
  vec *s = (vec *)scores;
  vec best = s[0];
  for (int j = 1; j < BLOCK / LANES; j++) best = either(s[j] > best, s[j], best);
  float highest = maximum_of(best);
  if (!(highest > *maximum)) highest = *maximum;
  if (highest == -INFINITY) { /* nothing seen yet */
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

/* `rows` rows, a strip at most: scores[row][key] = query[row] . key * scale. */
INLINE void multiply_keys(const Args *a, const Work *w, int row, const int rows) {
  vec sums[STRIP][BLOCK / LANES] = {0};
  const float *q = w->query + row * a->dim;
  for (int64_t d = 0; d < a->dim; d++) {
    const vec *k = (const vec *)(w->keys + d * BLOCK);
    EACH(int i = 0; i < rows; i++)
      EACH(int j = 0; j < BLOCK / LANES; j++) sums[i][j] += k[j] * q[i * a->dim + d];
  }
  EACH(int i = 0; i < rows; i++)
    EACH(int j = 0; j < BLOCK / LANES; j++) ((vec *)(w->scores + (row + i) * BLOCK))[j] = sums[i][j] * a->scale;
}

/* `rows` rows and `width` vectors of the head from `d` on: sums = sums * shrink + weights . values. */
INLINE void multiply_values(const Args *a, const Work *w, int row, int64_t d, const float *shrink, const int rows,
                            const int width) {
  vec sums[STRIP][STRIP];
  EACH(int i = 0; i < rows; i++)
    EACH(int v = 0; v < width; v++) sums[i][v] = ((vec *)(w->sums + (row + i) * a->dim + d))[v] * shrink[i];
  for (int j = 0; j < BLOCK; j++)
    EACH(int v = 0; v < width; v++) {
      vec value = ((const vec *)(w->values + j * a->dim + d))[v];
      EACH(int i = 0; i < rows; i++) sums[i][v] += value * w->scores[(row + i) * BLOCK + j];
    }
  EACH(int i = 0; i < rows; i++)
    EACH(int v = 0; v < width; v++) ((vec *)(w->sums + (row + i) * a->dim + d))[v] = sums[i][v];
}

#ifdef __AVX512F__
/* 16 rows of 16 32-bit numbers, rows[i] read from `from[i]`; column c goes to to + c * BLOCK. */
static void transpose(const void *const *from, float *to) {
  __m512i r[16], t[16];
  for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(from[i]);
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    _mm512_store_si512(to + i * BLOCK, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
    _mm512_store_si512(to + (i + 8) * BLOCK, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
  }
}
#endif

static void load_keys(const Args *a, const Work *w, const int64_t *places, const int64_t *ahead, int bits) {
  for (int j = 0; j < BLOCK; j++) fetch(a->key, ahead[j], a->dim, bits);
#ifdef __AVX512F__
  for (int j = 0; j < BLOCK && bits == 32; j += 16)
    for (int64_t d = 0; d < a->dim; d += 16) {
      const void *from[16];
      for (int i = 0; i < 16; i++) from[i] = (const float *)a->key + places[j + i] + d;
      transpose(from, w->keys + d * BLOCK + j);
    }
  if (bits == 32) return;
#endif
  for (int j = 0; j < BLOCK; j++)
    for (int64_t d = 0; d < a->dim; d++) w->keys[d * BLOCK + j] = element(a->key, places[j] + d, bits);
}

static void load_values(const Args *a, const Work *w, const int64_t *places, const int64_t *ahead, int bits) {
  for (int j = 0; j < BLOCK; j++) {
    fetch(a->value, ahead[j], a->dim, bits);
    for (int64_t d = 0; d < a->dim; d += LANES) *(vec *)(w->values + j * a->dim + d) = load(a->value, places[j] + d, bits);
  }
}

static void load_query(const Args *a, const Work *w, int row, int64_t place, int bits) {
  for (int64_t d = 0; d < a->dim; d++) w->query[row * a->dim + d] = element(a->query, place + d, bits);
}

#ifdef __AVX512BF16__
/* The same with bfloat16 products: two neighbours of the summed dimension side by side in each 32-bit lane. `query` is
 * then [ROWS, dim / 2] pairs, `keys` [dim / 2, BLOCK], `values` [BLOCK / 2, dim]; weights are rounded to bfloat16. */

INLINE __m512 dot(__m512 sum, __m512i pairs, uint32_t pair) {
  return _mm512_dpbf16_ps(sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32((int)pair));
}

INLINE void multiply_keys_bf16(const Args *a, const Work *w, int row, const int rows) {
  int64_t pairs = a->dim / 2;
  __m512 sums[STRIP][BLOCK / LANES];
  EACH(int i = 0; i < rows; i++)
    EACH(int j = 0; j < BLOCK / LANES; j++) sums[i][j] = _mm512_setzero_ps();
  const uint32_t *q = (const uint32_t *)w->query + row * pairs;
  for (int64_t d = 0; d < pairs; d++) {
    const float *k = w->keys + d * BLOCK;
    EACH(int i = 0; i < rows; i++)
      EACH(int j = 0; j < BLOCK / LANES; j++)
        sums[i][j] = dot(sums[i][j], _mm512_load_si512(k + j * LANES), q[i * pairs + d]);
  }
  EACH(int i = 0; i < rows; i++)
    EACH(int j = 0; j < BLOCK / LANES; j++) ((vec *)(w->scores + (row + i) * BLOCK))[j] = (vec)sums[i][j] * a->scale;
}

INLINE void multiply_values_bf16(const Args *a, const Work *w, int row, int64_t d, const float *shrink,
                                 const int rows, const int width) {
  __m512 sums[STRIP][STRIP];
  uint32_t weights[STRIP][BLOCK / 2];
  EACH(int i = 0; i < rows; i++) {
    for (int j = 0; j < BLOCK / LANES; j++) {
      __m256bh rounded = _mm512_cvtneps_pbh(_mm512_load_ps(w->scores + (row + i) * BLOCK + j * LANES));
      memcpy(weights[i] + j * LANES / 2, &rounded, sizeof rounded);
    }
    EACH(int v = 0; v < width; v++)
      sums[i][v] = (__m512)(((vec *)(w->sums + (row + i) * a->dim + d))[v] * shrink[i]);
  }
  for (int j = 0; j < BLOCK / 2; j++)
    EACH(int v = 0; v < width; v++) {
      __m512i value = _mm512_load_si512(w->values + j * a->dim + d + v * LANES);
      EACH(int i = 0; i < rows; i++) sums[i][v] = dot(sums[i][v], value, weights[i][j]);
    }
  EACH(int i = 0; i < rows; i++)
    EACH(int v = 0; v < width; v++) ((vec *)(w->sums + (row + i) * a->dim + d))[v] = (vec)sums[i][v];
}

static void load_keys_bf16(const Args *a, const Work *w, const int64_t *places, const int64_t *ahead) {
  for (int j = 0; j < BLOCK; j += 16) {
    for (int i = 0; i < 16; i++) fetch(a->key, ahead[j + i], a->dim, 16);
    for (int64_t d = 0; d < a->dim; d += 32) {
      const void *from[16];
      int64_t at = d + 32 <= a->dim ? d : a->dim - 32; /* where 32 is no divisor the last ones overlap */
      for (int i = 0; i < 16; i++) from[i] = (const bf16 *)a->key + places[j + i] + at;
      transpose(from, w->keys + at / 2 * BLOCK + j);
    }
  }
}

static void load_values_bf16(const Args *a, const Work *w, const int64_t *places, const int64_t *ahead) {
  for (int j = 0; j < BLOCK; j += 2) {
    const bf16 *even = (const bf16 *)a->value + places[j], *odd = (const bf16 *)a->value + places[j + 1];
    fetch(a->value, ahead[j], a->dim, 16);
    fetch(a->value, ahead[j + 1], a->dim, 16);
    for (int64_t d = 0; d < a->dim; d += LANES) {
      __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(even + d)));
      __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(odd + d)));
      _mm512_store_si512(w->values + j / 2 * a->dim + d, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
}
#endif

#ifdef __AVX512BF16__
#define FAST(bits, dim) ((bits) == 16 && (dim) >= 32)
#else
#define FAST(bits, dim) 0
#define multiply_keys_bf16 multiply_keys
#define multiply_values_bf16 multiply_values
#define load_keys_bf16(a, w, places, ahead) load_keys(a, w, places, ahead, 16)
#define load_values_bf16(a, w, places, ahead) load_values(a, w, places, ahead, 16)
#endif

/* One strip against one block, for a number of rows and kind of products that are known when this is compiled. */
INLINE void strip(const Args *a, Work *w, const Job *job, int row, int64_t first, const int rows, const int fast) {
  int64_t group = a->heads / a->kv_heads, kv_len = a->kv_lens[job->sequence];
  int64_t tokens = a->first_rows[job->sequence + 1] - a->first_rows[job->sequence];
  float shrink[STRIP];
  fast ? multiply_keys_bf16(a, w, row, rows) : multiply_keys(a, w, row, rows);
  for (int i = 0; i < rows; i++) {
    float *scores = w->scores + (row + i) * BLOCK;
    cap(a, scores);
    mask(a, scores, first, kv_len - tokens + (job->first + row + i) / group);
    shrink[i] = weigh(scores, &w->maximum[row + i], &w->weight[row + i]);
  }
  int64_t d = 0;
  for (; d + STRIP * LANES <= a->dim; d += STRIP * LANES)
    fast ? multiply_values_bf16(a, w, row, d, shrink, rows, STRIP) : multiply_values(a, w, row, d, shrink, rows, STRIP);
  for (; d < a->dim; d += LANES)
    fast ? multiply_values_bf16(a, w, row, d, shrink, rows, 1) : multiply_values(a, w, row, d, shrink, rows, 1);
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

/* Row r of a job is token r / group and query head head * group + r % group of its sequence. */
INLINE void begin(const Args *a, const Job *job, Work *w, int64_t group, int64_t start, int bits, int fast) {
  memset(w->sums, 0, sizeof(float) * job->count * a->dim);
  for (int r = 0; r < job->count; r++) w->maximum[r] = -INFINITY, w->weight[r] = 0;
  for (int r = 0; r < job->count; r++) {
    int64_t row = job->first + r;
    int64_t at = (start + row / group) * a->query_stride + (job->head * group + row % group) * a->dim;
    if (fast)
      memcpy((uint32_t *)w->query + r * (a->dim / 2), (const bf16 *)a->query + at, 2 * a->dim);
    else
      load_query(a, w, r, at, bits);
  }
}

INLINE void finish(const Args *a, const Job *job, const Work *w, int64_t group, int64_t start, int bits) {
  for (int r = 0; r < job->count; r++) {
    int64_t row = job->first + r;
    int64_t at = ((start + row / group) * a->heads + job->head * group + row % group) * a->dim;
    for (int64_t d = 0; d < a->dim; d += LANES)
      store(a->out, at + d, *(vec *)(w->sums + r * a->dim + d) / w->weight[r], bits);
  }
}

static void attention_run(const Args *a, const Job *job, const Job *after, Work *w, int bits) {
  int fast = FAST(bits, a->dim);
  int64_t group = a->heads / a->kv_heads, start = a->first_rows[job->sequence];
  int64_t tokens = a->first_rows[job->sequence + 1] - start, kv_len = a->kv_lens[job->sequence];
  int64_t newest_token = kv_len - tokens + (job->first + job->count - 1) / group;
  int64_t oldest_token = kv_len - tokens + job->first / group;
  int64_t oldest_key = a->window && oldest_token >= a->window ? oldest_token - a->window + 1 : 0;
  const int32_t *table = a->tables + job->sequence * a->width;
  int64_t first = oldest_key / BLOCK * BLOCK, here[BLOCK], next[BLOCK], *places = here, *ahead = next;
  begin(a, job, w, group, start, bits, fast);
  find(a, table, first, kv_len, job->head, places);
  /* Of a short context everything is the first block, and nobody asked for that ahead of time. */
  for (int j = 0; j < BLOCK; j++) fetch(a->value, places[j], a->dim, bits);
  for (; first <= newest_token; first += BLOCK) {
    if (first + BLOCK <= newest_token) {
      find(a, table, first + BLOCK, kv_len, job->head, ahead);
    } else if (after) {
      find_first(a, after, ahead);
    } else {
      memcpy(ahead, places, sizeof here);
    }
    if (fast) {
      load_keys_bf16(a, w, places, ahead);
      load_values_bf16(a, w, places, ahead);
    } else {
      load_keys(a, w, places, ahead, bits);
      load_values(a, w, places, ahead, bits);
    }
    for (int row = 0; row < job->count; row += STRIP) meet(a, w, job, row, first, fast);
    int64_t *done = places;
    places = ahead, ahead = done;
  }
  finish(a, job, w, group, start, bits);
}

int attention_plan(const Args *a, Job *jobs) {
  int count = 0;
  int64_t group = a->heads / a->kv_heads;
  for (int64_t i = 0; i < a->sequences; i++) {
    int64_t rows = (a->first_rows[i + 1] - a->first_rows[i]) * group;
    for (int64_t first = 0; first < rows; first += ROWS)
      for (int64_t head = 0; head < a->kv_heads; head++, count++)
        if (jobs) {
          int64_t here = rows - first < ROWS ? rows - first : ROWS;
          jobs[count] = (Job){(int32_t)i, (int32_t)head, (int32_t)first, (int32_t)here};
        }
  }
  return count;
}

static void *floats(int64_t count) { return aligned_alloc(64, (size_t)(count * 4 + 63) / 64 * 64); }

int attention_begin(const Args *a, Work *w) {
  w->query = floats(ROWS * a->dim), w->sums = floats(ROWS * a->dim), w->scores = floats(ROWS * BLOCK);
  w->keys = floats(BLOCK * a->dim), w->values = floats(BLOCK * a->dim);
  return w->keys && w->values && w->query && w->scores && w->sums;
}

void attention_end(Work *w) { free(w->query), free(w->keys), free(w->values), free(w->scores), free(w->sums); }

void attention_share(const Args *a, const Job *jobs, int count, Work *w, int bits) {
  /* Several in a row, so that the first keys of the next can be asked for; one at a time if that left a thread idle. */
  int many = count >= 16 * CHUNK;
  if (many) {
#pragma omp for schedule(dynamic, CHUNK)
    for (int i = 0; i < count; i++)
      attention_run(a, &jobs[i], i % CHUNK < CHUNK - 1 && i + 1 < count ? &jobs[i + 1] : NULL, w, bits);
  } else {
#pragma omp for schedule(dynamic)
    for (int i = 0; i < count; i++) attention_run(a, &jobs[i], NULL, w, bits);
  }
}

/* Returns 0, or 1 if there was no memory. `bits`: 32 for float, 16 for bfloat16. */
int pilotfish_attend(const Args *a, int bits, int threads) {
  int count = attention_plan(a, NULL), failed = 0;
  Job *jobs = malloc(sizeof(Job) * (size_t)(count ? count : 1));
  if (!jobs) return 1;
  attention_plan(a, jobs);
#pragma omp parallel num_threads(threads < count ? threads : (count ? count : 1))
  {
    Work w;
    int ready = attention_begin(a, &w);
#pragma omp atomic
    failed |= !ready;
#pragma omp barrier
    if (!failed) attention_share(a, jobs, count, &w, bits);
    attention_end(&w);
  }
  free(jobs);
  return failed;
}
