/* Layers that keep a state per sequence: short convolutions, gated delta rules (Gated DeltaNet, KDA) and selective
 * state spaces (Mamba 1 and 2). Rows run one after the other with the same operations, so a row's result has the same
 * bits in any batch and for any split of its sequence.
 *
 * A piece of work is a part of the state of one sequence, small enough for the L1 cache: it is read once, stays there
 * while all rows of the sequence run, and is written to the slots of the plan. Rows that may be rolled back are logged:
 * not their inputs, but their changes of the state. So replaying a log does not need the sums over the state that new
 * rows need. */

#include "pool.h"
#include "vectors.h"
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#define VECTORS 4                /* registers of a block's sums */
#define BLOCK (VECTORS * LANES)  /* elements of a state row per piece */
#define MOST_KEYS 1024           /* maximum elements of a key, a row of Mamba's state or a convolution kernel */

/* The rows of one sequence, and the operations on its slots; see `SequenceScan` in engine/recurrent/plan.py. */
typedef struct {
  int64_t first, stop, read, replayed, write, settled, snapshot, reached;
} Sequence;

typedef struct {
  int64_t sequences;
  const Sequence *plan;
  void *states, *log;
  int64_t log_rows, log_width;
  const void *x[5]; /* new rows of the inputs */
  const float *a, *d;
  void *out;
  int64_t heads, groups, width, depth, blocks; /* heads that share a key are a group; see each rule */
  int bits, wide, corrects; /* of rows; a decay for each element of a key; a delta rule */
} Scan;

INLINE const void *at(const void *rows, int64_t i, int bits) { return (const char *)rows + i * (bits / 8); }

/* Elements of a row as floats, padded with zeros to a whole vector. */
INLINE void widen_some(const void *row, int64_t n, int bits, float *to) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) *(vec_unaligned *)(to + i) = load(row, i, bits);
  for (; i < n; i++) to[i] = element(row, i, bits);
  for (; i % LANES; i++) to[i] = 0;
}

/* Copy rows of a block from a state, whose rows are `stride` elements apart, to the memory of a piece. */
INLINE void fetch(const float *state, int64_t rows, int64_t stride, int64_t n, float *own) {
  for (int64_t i = 0; i < rows; i++) {
    if (n < BLOCK) memset(own + i * BLOCK, 0, 4 * BLOCK);
    memcpy(own + i * BLOCK, state + i * stride, 4 * (size_t)n);
  }
}

/* A state is next read in the following pass, after all weights. So x86 bypasses the caches, as normal stores would
 * first read every line of a slot. */
INLINE void put(float *state, int64_t rows, int64_t stride, int64_t n, const float *own) {
#if defined(__SSE__)
  if (n == BLOCK && stride % 4 == 0 && (uintptr_t)state % 16 == 0) {
    for (int64_t i = 0; i < rows; i++)
      for (int64_t k = 0; k < BLOCK; k += 4) _mm_stream_ps(state + i * stride + k, _mm_load_ps(own + i * BLOCK + k));
    _mm_sfence(); /* streaming stores are weakly ordered, but other threads rely on the order */
    return;
  }
#endif
  for (int64_t i = 0; i < rows; i++) memcpy(state + i * stride, own + i * BLOCK, 4 * (size_t)n);
}

/* Row t counts from the first row of the sequence's log. */
INLINE const void *old_row(const Scan *s, const Sequence *q, int64_t t, int bits) {
  return at(s->log, (q->read * s->log_rows + t) * s->log_width, bits);
}

/* Where the new row t is logged; NULL if it is not. */
INLINE void *log_row(const Scan *s, const Sequence *q, int64_t t, int bits) {
  if (t < q->settled) return NULL;
  return (char *)s->log + (q->write * s->log_rows + t - q->settled) * s->log_width * (bits / 8);
}

/* The slots of the state after this number of rows; returns their number. */
INLINE int slots_after(const Sequence *q, int64_t rows, int64_t slots[2]) {
  int count = 0;
  if (rows == q->settled) slots[count++] = q->write;
  if (rows == q->reached) slots[count++] = q->snapshot;
  return count;
}

INLINE void put_after(const Sequence *q, int64_t rows, float *states, int64_t size, int64_t depth, int64_t stride,
                      int64_t n, const float *own) {
  int64_t slots[2];
  for (int i = slots_after(q, rows, slots); i-- > 0;) put(states + slots[i] * size, depth, stride, n, own);
}

/* The columns of one head's values in a piece of a delta rule. A row of the log has the keys of all groups, then the
 * changes of all heads, then the logarithms of decays. */
typedef struct {
  const Scan *s;
  const Sequence *q;
  int64_t head, group, column, n; /* `group` of heads that share keys */
  int64_t changes, decays, num_decays; /* offsets in a row of the log; decays per head */
  int has_key, has_decay; /* whether this piece logs them */
} Columns;

typedef struct {
  float key[MOST_KEYS], decay[MOST_KEYS], decayed[MOST_KEYS]; /* the last one is the product of the others */
  const float *logarithms;
} Key;

INLINE Columns columns_of(const Scan *s, int64_t piece) {
  const int64_t block = piece % s->blocks, head = piece / s->blocks % s->heads, sharing = s->heads / s->groups;
  const int64_t keys = s->groups * s->depth, num_decays = s->wide ? s->depth : 1;
  return (Columns){
      .s = s, .q = s->plan + piece / s->blocks / s->heads,
      .head = head, .group = head / sharing, .column = block * BLOCK, .n = less(BLOCK, s->width - block * BLOCK),
      .changes = keys + head * s->width + block * BLOCK,
      .decays = keys + s->heads * s->width + head * num_decays, .num_decays = num_decays,
      .has_key = block == 0 && head % sharing == 0, .has_decay = block == 0,
  };
}

INLINE void key_of(const Columns *c, const void *key, int bits, const float *logarithms, Key *to) {
  const int64_t dk = c->s->depth;
  to->logarithms = logarithms;
  widen_some(key, dk, bits, to->key);
  for (int64_t k = 0; k < dk; k += LANES) {
    float few[LANES] __attribute__((aligned(64))) = {0};
    if (c->s->wide) memcpy(few, logarithms + k, 4 * (size_t)less(LANES, dk - k));
    vec decay = exponential(c->s->wide ? *(const vec *)few : (vec){0} + *logarithms);
    *(vec_unaligned *)(to->decay + k) = decay;
    *(vec_unaligned *)(to->decayed + k) = *(const vec_unaligned *)(to->key + k) * decay;
  }
}

/* The key of a new row of the batch. */
INLINE void new_key(const Columns *c, int64_t row, Key *to) {
  const Scan *s = c->s;
  const float *logarithms = (const float *)s->x[3] + (row * s->heads + c->head) * c->num_decays;
  key_of(c, at(s->x[2], (row * s->groups + c->group) * s->depth, s->bits), s->bits, logarithms, to);
}

/* A state row after a row of the sequence, with the same operations for a new row and one from the log. */
INLINE vec changed(vec state, float decay, float key, vec change) { return decay * state + key * change; }

INLINE void log_delta(const Columns *c, int64_t t, const Key *key, const vec *change) {
  float *to = log_row(c->s, c->q, t, 32), all[BLOCK] __attribute__((aligned(64)));
  if (!to) return;
  EACH(int v = 0; v < VECTORS; v++) *(vec *)(all + v * LANES) = change[v];
  memcpy(to + c->changes, all, 4 * (size_t)c->n);
  if (c->has_key) memcpy(to + c->group * c->s->depth, key->key, 4 * (size_t)c->s->depth);
  if (c->has_decay) memcpy(to + c->decays, key->logarithms, 4 * (size_t)c->num_decays);
}

/* Apply row t of the log. */
INLINE void delta_again(const Columns *c, int64_t t, float *own) {
  const float *row = old_row(c->s, c->q, t, 32);
  float all[BLOCK] __attribute__((aligned(64))) = {0};
  vec change[VECTORS];
  Key key;
  key_of(c, row + c->group * c->s->depth, 32, row + c->decays, &key);
  memcpy(all, row + c->changes, 4 * (size_t)c->n);
  EACH(int v = 0; v < VECTORS; v++) change[v] = *(const vec *)(all + v * LANES);
  for (int64_t i = 0; i < c->s->depth; i++)
    EACH(int v = 0; v < VECTORS; v++) {
      vec *state = (vec *)(own + i * BLOCK + v * LANES);
      *state = changed(*state, key.decay[i], key.key[i], change[v]);
    }
}

/* For a block of columns of the values, which are independent: S = decay S; S += k (beta (v - S^T k)); out = S^T q. One
 * pass over the state computes a row's result and S^T k of the next row. Without the correction S^T k it is Mamba 2,
 * with b, c and dt as key, query and beta. */
static void delta_piece(const void *stage, int64_t piece, int worker) {
  const Scan *s = stage;
  const Columns c = columns_of(s, piece);
  const Sequence *q = c.q;
  const int64_t dk = s->depth, dv = s->width, size = s->heads * dk * dv;
  float own[dk * BLOCK] __attribute__((aligned(64))), query[MOST_KEYS] __attribute__((aligned(64)));
  float *states = (float *)s->states + c.head * dk * dv + c.column;
  Key keys[2];
  vec seen[VECTORS];
  (void)worker;
  fetch(states + q->read * size, dk, dv, c.n, own);
  for (int64_t t = 0; t < q->replayed; t++) {
    delta_again(&c, t, own);
    put_after(q, t + 1, states, size, dk, dv, c.n, own);
  }
  EACH(int v = 0; v < VECTORS; v++) seen[v] = (vec){0};
  if (q->first < q->stop) new_key(&c, q->first, keys);
  for (int64_t i = 0; q->first < q->stop && s->corrects && i < dk; i++)
    EACH(int v = 0; v < VECTORS; v++) seen[v] += keys[0].decayed[i] * *(const vec *)(own + i * BLOCK + v * LANES);
  for (int64_t row = q->first; row < q->stop; row++) {
    const int64_t passed = row - q->first, t = q->replayed + passed, place = row * s->heads + c.head;
    const Key *now = keys + (passed & 1);
    Key *next = keys + (~passed & 1);
    float value[BLOCK] __attribute__((aligned(64))) = {0};
    vec change[VECTORS], sum[VECTORS];
    const float beta = ((const float *)s->x[4])[place];
    widen_some(at(s->x[0], place * dv + c.column, s->bits), c.n, s->bits, value);
    widen_some(at(s->x[1], (row * s->groups + c.group) * dk, s->bits), dk, s->bits, query);
    if (row + 1 < q->stop)
      new_key(&c, row + 1, next);
    else
      memset(next->decayed, 0, 4 * (size_t)dk);
    EACH(int v = 0; v < VECTORS; v++) {
      change[v] = beta * (*(const vec *)(value + v * LANES) - (s->corrects ? seen[v] : (vec){0}));
      seen[v] = sum[v] = (vec){0};
    }
    for (int64_t i = 0; i < dk; i++) {
      const float key = now->key[i], decay = now->decay[i], asked = query[i], later = next->decayed[i];
      float *to = own + i * BLOCK;
      EACH(int v = 0; v < VECTORS; v++) {
        vec state = changed(*(const vec *)(to + v * LANES), decay, key, change[v]);
        *(vec *)(to + v * LANES) = state;
        sum[v] += asked * state;
        seen[v] += later * state;
      }
    }
    EACH(int v = 0; v < VECTORS; v++) {
      vec out = s->d ? sum[v] + s->d[c.head] * *(const vec *)(value + v * LANES) : sum[v];
      if (v * LANES < c.n) store_some(s->out, place * dv + c.column + v * LANES, out, s->bits, 0, c.n - v * LANES);
    }
    log_delta(&c, t, now, change);
    put_after(q, t + 1, states, size, dk, dv, c.n, own);
  }
}

/* The changes dt x of some elements of a row, their steps dt, and the row's b. A row of the log has b, then changes,
 * then steps. */
typedef struct {
  float b[MOST_KEYS], change[BLOCK] __attribute__((aligned(64))), dt[BLOCK] __attribute__((aligned(64)));
} Step;

INLINE void step_again(const Scan *s, const Sequence *q, int64_t t, int64_t begin, int64_t n, Step *to) {
  const float *row = old_row(s, q, t, 32);
  memcpy(to->b, row, 4 * (size_t)s->depth);
  memcpy(to->change, row + s->depth + begin, 4 * (size_t)n);
  memcpy(to->dt, row + s->depth + s->width + begin, 4 * (size_t)n);
}

INLINE void step_of(const Scan *s, int64_t row, int64_t begin, int64_t n, const float *x, Step *to) {
  widen_some(at(s->x[1], row * s->width + begin, 32), n, 32, to->dt);
  widen_some(at(s->x[2], row * s->depth, s->bits), s->depth, s->bits, to->b);
  EACH(int v = 0; v < VECTORS; v++)
    *(vec *)(to->change + v * LANES) = *(const vec *)(to->dt + v * LANES) * *(const vec *)(x + v * LANES);
}

INLINE void log_step(const Scan *s, const Sequence *q, int64_t t, int64_t begin, int64_t n, const Step *step) {
  float *to = log_row(s, q, t, 32);
  if (!to) return;
  if (!begin) memcpy(to, step->b, 4 * (size_t)s->depth);
  memcpy(to + s->depth + begin, step->change, 4 * (size_t)n);
  memcpy(to + s->depth + s->width + begin, step->dt, 4 * (size_t)n);
}

/* S = exp(dt a) S + b (dt x); out = c S + d x, with a decay and a step for each element x; its state is a column of
 * S. */
static void mamba1_piece(const void *stage, int64_t piece, int worker) {
  const Scan *s = stage;
  const int64_t width = s->width, depth = s->depth, begin = piece % s->blocks * BLOCK, n = less(BLOCK, width - begin);
  const Sequence *q = s->plan + piece / s->blocks;
  float own[depth * BLOCK] __attribute__((aligned(64))), a[depth * BLOCK] __attribute__((aligned(64)));
  float c[MOST_KEYS] __attribute__((aligned(64))) = {0}, x[BLOCK] __attribute__((aligned(64))) = {0};
  float *states = (float *)s->states + begin;
  Step step = {0};
  (void)worker;
  fetch(states + q->read * width * depth, depth, width, n, own);
  fetch(s->a + begin, depth, width, n, a);
  for (int64_t t = 0, row = q->first - q->replayed; row < q->stop; t++, row++) {
    const int is_new = row >= q->first;
    vec sum[VECTORS];
    if (is_new) {
      widen_some(at(s->x[0], row * width + begin, s->bits), n, s->bits, x);
      widen_some(at(s->x[3], row * depth, s->bits), depth, s->bits, c);
      step_of(s, row, begin, n, x, &step);
    } else {
      step_again(s, q, t, begin, n, &step);
    }
    EACH(int v = 0; v < VECTORS; v++) sum[v] = (vec){0};
    for (int64_t i = 0; i < depth; i++) {
      float *to = own + i * BLOCK;
      const float *each = a + i * BLOCK, key = step.b[i], asked = c[i];
      EACH(int v = 0; v < VECTORS; v++) {
        vec decay = exponential(*(const vec *)(step.dt + v * LANES) * *(const vec *)(each + v * LANES));
        vec state = decay * *(const vec *)(to + v * LANES) + key * *(const vec *)(step.change + v * LANES);
        *(vec *)(to + v * LANES) = state;
        sum[v] += asked * state;
      }
    }
    for (int v = 0; is_new && v < VECTORS && v * LANES < n; v++) {
      float skip[LANES] __attribute__((aligned(64))) = {0};
      memcpy(skip, s->d + begin + v * LANES, 4 * (size_t)less(LANES, n - v * LANES));
      vec out = sum[v] + *(const vec *)skip * *(const vec *)(x + v * LANES);
      store_some(s->out, row * width + begin + v * LANES, out, s->bits, 0, n - v * LANES);
    }
    if (is_new) log_step(s, q, t, begin, n, &step);
    put_after(q, t + 1, states, width * depth, depth, width, n, own);
  }
}

/* A kernel over the last `depth` inputs of each channel. Its states [slots, channels, depth - 1] have the type of the
 * rows; `a` is [channels, depth], and `d` a bias or NULL; `wide`: SiLU of the result. Inputs are logged. */
static void conv_piece(const void *stage, int64_t piece, int worker) {
  const Scan *s = stage;
  const int64_t width = s->width, depth = s->depth, begin = piece % s->blocks * LANES, n = less(LANES, width - begin);
  const int64_t old = depth - 1, bytes = s->bits / 8;
  const Sequence *q = s->plan + piece / s->blocks;
  vec seen[depth], kernel[depth], bias = {0};
  (void)worker;
  for (int64_t p = 0; p < LANES; p++) {
    const int64_t channel = begin + (p < n ? p : 0);
    for (int64_t k = 0; k < depth; k++) kernel[k][p] = s->a[channel * depth + k];
    for (int64_t k = 0; k < old; k++) seen[k][p] = element(s->states, (q->read * width + channel) * old + k, s->bits);
    if (s->d) bias[p] = s->d[channel];
  }
  for (int64_t t = 0, row = q->first - q->replayed; row < q->stop; t++, row++) {
    const int is_new = row >= q->first;
    const void *x = is_new ? at(s->x[0], row * width + begin, s->bits) : at(old_row(s, q, t, s->bits), begin, s->bits);
    char *to = is_new ? log_row(s, q, t, s->bits) : NULL;
    float few[LANES] __attribute__((aligned(64)));
    int64_t slots[2];
    widen_some(x, n, s->bits, few);
    seen[old] = *(const vec *)few;
    vec sum = bias;
    for (int64_t k = 0; is_new && k < depth; k++) sum += kernel[k] * seen[k];
    if (is_new) store_some(s->out, row * width + begin, s->wide ? times_logistic(sum, 1, 0) : sum, s->bits, 0, n);
    if (to) memcpy(to + begin * bytes, x, (size_t)(n * bytes));
    for (int64_t k = 0; k < old; k++) seen[k] = seen[k + 1];
    for (int i = slots_after(q, t + 1, slots); i-- > 0;)
      for (int64_t k = 0; k < old; k++) {
        char kept[4 * LANES] __attribute__((aligned(64)));
        store(kept, 0, seen[k], s->bits);
        char *all = (char *)s->states + ((slots[i] * width + begin) * old + k) * bytes;
        for (int64_t p = 0; p < n; p++) memcpy(all + p * old * bytes, kept + p * bytes, (size_t)bytes);
      }
  }
}

/* The maximum of `depth`. */
int pilotfish_most_keys(void) { return MOST_KEYS; }

typedef enum { DELTA, MAMBA1, CONV } Rule;

void pilotfish_scan(Scan *s, int rule, int threads) {
  static Piece *const RUN[] = {delta_piece, mamba1_piece, conv_piece};
  const int64_t block = rule == CONV ? LANES : BLOCK, each = rule == DELTA ? s->heads : 1;
  s->blocks = (s->width + block - 1) / block;
  pool_enter(threads);
  pool_run(RUN[rule], s, s->sequences * each * s->blocks);
  pool_leave(0);
}
