/* Layers that keep a state per sequence: short convolutions, gated delta rules (Gated DeltaNet, KDA) and selective state
 * spaces (Mamba 1 and 2). A row of the batch after the other, each in the same operations, so that a row's result is the
 * same bits in any batch and however its sequence is cut.
 *
 * A piece of work is a part of the state of one sequence, small enough for the first cache: it is read once, stays there
 * while all rows of the sequence run, and is written where the plan says. */

#include "pool.h"
#include "vectors.h"

#define VECTORS 4                /* registers of a block's sums */
#define BLOCK (VECTORS * LANES)  /* numbers of a row of a state that a piece takes */
#define MOST_KEYS 1024           /* numbers of a key, a row of Mamba's state or a kernel of a convolution */

/* S rows of B sequences, and what is done with their slots. */
typedef struct {
  int64_t sequences;
  const int64_t *rows;   /* [B + 1], the first row of each sequence */
  const int64_t *read;   /* [B], slots */
  const int64_t *first;  /* [B + 1], the first write of each sequence */
  const int64_t *writes; /* pairs: after how many rows of its sequence, slot */
} Plan;

typedef struct {
  Plan plan;
  float *states;
  const void *x[6]; /* rows of the inputs */
  const float *a, *d;
  void *out;
  int64_t heads, groups, width, depth, blocks; /* heads that share a key are a group; see each rule */
  int bits, wide, corrects; /* of rows; a decay for each number of a key; a delta rule */
} Scan;

INLINE int64_t less(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE const void *at(const void *rows, int64_t i, int bits) { return (const char *)rows + i * (bits / 8); }

/* Numbers of a row as floats, with zeros up to a whole vector. */
INLINE void widen_some(const void *row, int64_t n, int bits, float *to) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) *(vec_unaligned *)(to + i) = load(row, i, bits);
  for (; i < n; i++) to[i] = element(row, i, bits);
  for (; i % LANES; i++) to[i] = 0;
}

/* Rows of a block between a state, whose rows are `stride` numbers apart, and the piece's own memory. */
INLINE void fetch(const float *state, int64_t rows, int64_t stride, int64_t n, float *own) {
  for (int64_t i = 0; i < rows; i++) {
    if (n < BLOCK) memset(own + i * BLOCK, 0, 4 * BLOCK);
    memcpy(own + i * BLOCK, state + i * stride, 4 * (size_t)n);
  }
}

INLINE void put(float *state, int64_t rows, int64_t stride, int64_t n, const float *own) {
  for (int64_t i = 0; i < rows; i++) memcpy(state + i * stride, own + i * BLOCK, 4 * (size_t)n);
}

/* Which of the rows' keys and queries a head has. */
INLINE int64_t shared(const Scan *s, int64_t row, int64_t head) {
  return row * s->groups + head / (s->heads / s->groups);
}

/* The key of a row, times the decay of each of its numbers too. */
INLINE void keys_of(const Scan *s, int64_t row, int64_t head, float *key, float *decay, float *decayed) {
  const int64_t i = row * s->heads + head, dk = s->depth;
  widen_some(at(s->x[1], shared(s, row, head) * dk, s->bits), dk, s->bits, key);
  if (s->wide) {
    const float *g = (const float *)s->x[3] + i * dk;
    for (int64_t k = 0; k < dk; k += LANES) {
      float few[LANES] __attribute__((aligned(64))) = {0};
      memcpy(few, g + k, 4 * (size_t)less(LANES, dk - k));
      *(vec_unaligned *)(decay + k) = exponential(*(const vec *)few);
    }
  } else {
    vec all = exponential((vec){0} + ((const float *)s->x[3])[i]);
    for (int64_t k = 0; k < dk; k += LANES) *(vec_unaligned *)(decay + k) = all;
  }
  for (int64_t k = 0; k < dk; k += LANES)
    *(vec_unaligned *)(decayed + k) = *(const vec_unaligned *)(key + k) * *(const vec_unaligned *)(decay + k);
}

/* For the columns of a block of the values, which do not meet: S = decay S; S += k (beta (v - S^T k)); out = S^T q. One
 * walk over the state serves a row, and what the next one wants to know of the state. Without the correction S^T k it is
 * Mamba 2, with b, c and dt as key, query and beta. */
static void delta_piece(const void *stage, int64_t piece, int worker) {
  const Scan *s = stage;
  const int64_t dk = s->depth, dv = s->width, block = piece % s->blocks, head = piece / s->blocks % s->heads;
  const int64_t one = piece / s->blocks / s->heads, first = s->plan.rows[one], count = s->plan.rows[one + 1] - first;
  const int64_t column = block * BLOCK, n = less(BLOCK, dv - column), size = s->heads * dk * dv;
  float own[dk * BLOCK] __attribute__((aligned(64)));
  float keys[2][3][MOST_KEYS] __attribute__((aligned(64))), query[MOST_KEYS] __attribute__((aligned(64)));
  const int64_t *write = s->plan.writes + 2 * s->plan.first[one], *last = s->plan.writes + 2 * s->plan.first[one + 1];
  vec seen[VECTORS];
  (void)worker;
  fetch(s->states + s->plan.read[one] * size + head * dk * dv + column, dk, dv, n, own);
  if (count) keys_of(s, first, head, keys[0][0], keys[0][1], keys[0][2]);
  EACH(int v = 0; v < VECTORS; v++) seen[v] = (vec){0};
  for (int64_t i = 0; count && s->corrects && i < dk; i++)
    EACH(int v = 0; v < VECTORS; v++) seen[v] += keys[0][2][i] * *(const vec *)(own + i * BLOCK + v * LANES);
  for (int64_t t = 0; t < count; t++) {
    const int64_t row = (first + t) * s->heads + head;
    float (*now)[MOST_KEYS] = keys[t & 1], (*next)[MOST_KEYS] = keys[~t & 1];
    float value[BLOCK] __attribute__((aligned(64)));
    vec change[VECTORS], sum[VECTORS];
    const float beta = ((const float *)s->x[4])[row];
    memset(value, 0, sizeof value);
    widen_some(at(s->x[2], row * dv + column, s->bits), n, s->bits, value);
    widen_some(at(s->x[0], shared(s, first + t, head) * dk, s->bits), dk, s->bits, query);
    if (t + 1 < count)
      keys_of(s, first + t + 1, head, next[0], next[1], next[2]);
    else
      memset(next[2], 0, 4 * (size_t)dk);
    EACH(int v = 0; v < VECTORS; v++) {
      change[v] = beta * (*(const vec *)(value + v * LANES) - (s->corrects ? seen[v] : (vec){0}));
      seen[v] = sum[v] = (vec){0};
    }
    for (int64_t i = 0; i < dk; i++) {
      const float key = now[0][i], decay = now[1][i], asked = query[i], later = next[2][i];
      float *to = own + i * BLOCK;
      EACH(int v = 0; v < VECTORS; v++) {
        vec state = decay * *(const vec *)(to + v * LANES) + key * change[v];
        *(vec *)(to + v * LANES) = state;
        sum[v] += asked * state;
        seen[v] += later * state;
      }
    }
    EACH(int v = 0; v < VECTORS; v++) {
      vec out = s->d ? sum[v] + s->d[head] * *(const vec *)(value + v * LANES) : sum[v];
      if (v * LANES < n) store_some(s->out, row * dv + column + v * LANES, out, s->bits, 0, n - v * LANES);
    }
    for (; write < last && write[0] == t + 1; write += 2)
      put(s->states + write[1] * size + head * dk * dv + column, dk, dv, n, own);
  }
}

/* S = exp(dt a) S + b (dt x); out = c S + d x, with a decay and a step for each number x; its state is a column of S. */
static void mamba1_piece(const void *stage, int64_t piece, int worker) {
  const Scan *s = stage;
  const int64_t width = s->width, depth = s->depth, begin = piece % s->blocks * BLOCK, n = less(BLOCK, width - begin);
  const int64_t one = piece / s->blocks, first = s->plan.rows[one], count = s->plan.rows[one + 1] - first;
  const int64_t size = width * depth;
  float own[depth * BLOCK] __attribute__((aligned(64))), a[depth * BLOCK] __attribute__((aligned(64)));
  float b[MOST_KEYS] __attribute__((aligned(64))), c[MOST_KEYS] __attribute__((aligned(64)));
  float x[BLOCK] __attribute__((aligned(64))), dt[BLOCK] __attribute__((aligned(64)));
  const int64_t *write = s->plan.writes + 2 * s->plan.first[one], *last = s->plan.writes + 2 * s->plan.first[one + 1];
  (void)worker;
  memset(x, 0, sizeof x), memset(dt, 0, sizeof dt);
  fetch(s->states + s->plan.read[one] * size + begin, depth, width, n, own);
  fetch(s->a + begin, depth, width, n, a);
  for (int64_t t = 0; t < count; t++) {
    const int64_t row = first + t;
    vec fed[VECTORS], sum[VECTORS];
    widen_some(at(s->x[0], row * width + begin, s->bits), n, s->bits, x);
    widen_some(at(s->x[1], row * width + begin, 32), n, 32, dt);
    widen_some(at(s->x[2], row * depth, s->bits), depth, s->bits, b);
    widen_some(at(s->x[3], row * depth, s->bits), depth, s->bits, c);
    EACH(int v = 0; v < VECTORS; v++) {
      fed[v] = *(const vec *)(dt + v * LANES) * *(const vec *)(x + v * LANES);
      sum[v] = (vec){0};
    }
    for (int64_t i = 0; i < depth; i++) {
      float *to = own + i * BLOCK;
      const float *each = a + i * BLOCK, key = b[i], asked = c[i];
      EACH(int v = 0; v < VECTORS; v++) {
        vec decay = exponential(*(const vec *)(dt + v * LANES) * *(const vec *)(each + v * LANES));
        vec state = decay * *(const vec *)(to + v * LANES) + key * fed[v];
        *(vec *)(to + v * LANES) = state;
        sum[v] += asked * state;
      }
    }
    for (int v = 0; v < VECTORS && v * LANES < n; v++) {
      float skip[LANES] __attribute__((aligned(64))) = {0};
      memcpy(skip, s->d + begin + v * LANES, 4 * (size_t)less(LANES, n - v * LANES));
      vec out = sum[v] + *(const vec *)skip * *(const vec *)(x + v * LANES);
      store_some(s->out, row * width + begin + v * LANES, out, s->bits, 0, n - v * LANES);
    }
    for (; write < last && write[0] == t + 1; write += 2) put(s->states + write[1] * size + begin, depth, width, n, own);
  }
}

/* A kernel over the newest `depth` inputs of each channel. Its states [slots, channels, depth - 1] have the type of the
 * rows; `a` is [channels, depth], and `d` a bias or NULL; `wide`: silu of what comes out. */
static void conv_piece(const void *stage, int64_t piece, int worker) {
  const Scan *s = stage;
  const int64_t width = s->width, depth = s->depth, begin = piece % s->blocks * LANES, n = less(LANES, width - begin);
  const int64_t one = piece / s->blocks, first = s->plan.rows[one], count = s->plan.rows[one + 1] - first, old = depth - 1;
  vec seen[depth], kernel[depth], bias = {0};
  const int64_t *write = s->plan.writes + 2 * s->plan.first[one], *last = s->plan.writes + 2 * s->plan.first[one + 1];
  (void)worker;
  for (int64_t p = 0; p < LANES; p++) {
    const int64_t channel = begin + (p < n ? p : 0);
    for (int64_t k = 0; k < depth; k++) kernel[k][p] = s->a[channel * depth + k];
    for (int64_t k = 0; k < old; k++) seen[k][p] = element(s->states, (s->plan.read[one] * width + channel) * old + k, s->bits);
    if (s->d) bias[p] = s->d[channel];
  }
  for (int64_t t = 0; t < count; t++) {
    float few[LANES] __attribute__((aligned(64)));
    widen_some(at(s->x[0], (first + t) * width + begin, s->bits), n, s->bits, few);
    seen[old] = *(const vec *)few;
    vec sum = bias;
    for (int64_t k = 0; k < depth; k++) sum += kernel[k] * seen[k];
    store_some(s->out, (first + t) * width + begin, s->wide ? silu(sum) : sum, s->bits, 0, n);
    for (int64_t k = 0; k < old; k++) seen[k] = seen[k + 1];
    for (; write < last && write[0] == t + 1; write += 2)
      for (int64_t k = 0; k < old; k++) {
        char kept[4 * LANES] __attribute__((aligned(64)));
        store(kept, 0, seen[k], s->bits);
        for (int64_t p = 0; p < n; p++)
          memcpy((char *)s->states + ((write[1] * width + begin + p) * old + k) * (s->bits / 8), kept + p * (s->bits / 8),
                 (size_t)(s->bits / 8));
      }
  }
}

/* Numbers that a rule takes at most as `depth`. */
int pilotfish_most_keys(void) { return MOST_KEYS; }

typedef enum { DELTA, MAMBA1, CONV } Rule;

void pilotfish_scan(Scan *s, int rule, int threads) {
  static Piece *const RUN[] = {delta_piece, mamba1_piece, conv_piece};
  const int64_t block = rule == CONV ? LANES : BLOCK, each = rule == DELTA ? s->heads : 1;
  s->blocks = (s->width + block - 1) / block;
  pool_enter(threads);
  pool_run(RUN[rule], s, s->plan.sequences * each * s->blocks);
  pool_leave(0);
}
