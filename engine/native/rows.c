/* Operations between the matmuls of a transformer, a row of the batch at a time. All rows use the same instructions, so
 * a row's result has the same bits in any batch. `bits` is 32 for float, 16 for bfloat16; widths are multiples of
 * LANES. */

#include "exact.h" /* so that rounding to integers does not depend on the compiler */
#include "pool.h"
#include "rows.h"

#define MANY 65536 /* maximum elements for which a second thread does not save time */

INLINE vec magnitude(vec x) { return (vec)((ivec)x & 0x7fffffff); }

typedef struct {
  float most, poison; /* the largest magnitude, at least 1e-30; 0, or NaN if an element is not finite */
} Peak;

INLINE Peak peak_of(const float *x, int64_t n) {
  vec top = {0}, odd = {0};
  for (int64_t i = 0; i < n; i += LANES) {
    vec here = *(const vec *)(x + i), size = magnitude(here);
    top = either(size > top, size, top);
    odd += here - here; /* NaN for elements that are not finite: then the scale and all results are NaN */
  }
  float most = maximum_of(top);
  return (Peak){most > 1e-30f ? most : 1e-30f, sum_of(odd)};
}

INLINE ivec whole(vec scaled) { /* ties to even */
  return __builtin_convertvector((scaled + 12582912.0f) - 12582912.0f, ivec);
}

/* 127 steps are MEANS times the mean magnitude, which is summed in integers, so that the order does not matter. A step
 * is at least what the largest element needs to fit in 16 bits, and at most what it needs to fit in 8. */
float round_row(const float *x, int64_t n, int16_t *out) {
  Peak peak = peak_of(x, n);
  float fine = 1.0f / (peak.most + peak.poison) * ROUNDED_MOST;
  ivec sums = {0};
  for (int64_t i = 0; i < n; i += LANES) sums += whole(magnitude(*(const vec *)(x + i)) * fine);
  int64_t sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
  float steps = (float)sum * (float)(MEANS / 127 / (double)n);
  steps = steps < 1 ? 1 : steps > 256 ? 256 : steps;
  float per_step = fine / steps;
  for (int64_t i = 0; i < n; i += LANES)
    *(shortvec *)(out + i) = __builtin_convertvector(whole(*(const vec *)(x + i) * per_step), shortvec);
  return (peak.most + peak.poison) * (float)(1.0 / ROUNDED_MOST) * steps;
}

/* Round to uint8 around 128. */
static float round_bytes(const float *x, int64_t n, uint8_t *out) {
  Peak peak = peak_of(x, n);
  float most = peak.most + peak.poison, steps = 1.0f / most * 127.0f;
  for (int64_t i = 0; i < n; i += LANES)
    *(bytevec *)(out + i) = __builtin_convertvector(whole(*(const vec *)(x + i) * steps) + 128, bytevec);
  return most * (float)(1.0 / 127);
}

static void widen(const void *row, int bits, int64_t n, float *wide) {
  for (int64_t i = 0; i < n; i += LANES) *(vec *)(wide + i) = load(row, i, bits);
}

INLINE void normed(const void *row, int64_t n, Norm norm, void *to, int bits) {
  vec squares = {0};
  for (int64_t i = 0; i < n; i += LANES) {
    vec here = load(row, i, bits);
    squares += here * here;
  }
  float factor = 1.0f / sqrtf(sum_of(squares) + norm.eps);
  for (int64_t i = 0; i < n; i += LANES)
    store(to, i, load(row, i, bits) * factor * *(const vec_unaligned *)(norm.weight + i), bits);
}

void norm_row(const void *row, int bits, int64_t n, Norm norm, void *to) {
  bits == 32 ? normed(row, n, norm, to, 32) : normed(row, n, norm, to, 16);
}

float norm_round_row(const void *row, int bits, int64_t n, Norm norm, int16_t *to) {
  float own[n] __attribute__((aligned(64))), wide[n] __attribute__((aligned(64)));
  norm_row(row, bits, n, norm, own);
  widen(own, bits, n, wide);
  return round_row(wide, n, to);
}

void add_normed_row(const void *row, int bits, int64_t n, Norm norm, void *to) {
  float own[n] __attribute__((aligned(64)));
  norm_row(row, bits, n, norm, own);
  for (int64_t i = 0; i < n; i += LANES) store(to, i, load(to, i, bits) + load(own, i, bits), bits);
}

INLINE void gate(const void *row, int64_t n, Activation a, void *to, int bits, int out_bits) {
  for (int64_t i = 0; i < n; i += LANES) {
    vec bent = times_logistic(load(row, i, bits), a.linear, a.cubic);
    store(to, i, bent * load(row, n + i, bits), out_bits);
  }
}

void gate_row(const void *row, int bits, int64_t n, Activation activation, void *to) {
  bits == 32 ? gate(row, n, activation, to, 32, 32) : gate(row, n, activation, to, 16, 16);
}

float gate_round_row(const void *row, int bits, int64_t n, Activation activation, int16_t *to) {
  float gated[n] __attribute__((aligned(64)));
  bits == 32 ? gate(row, n, activation, gated, 32, 32) : gate(row, n, activation, gated, 16, 32);
  return round_row(gated, n, to);
}

float wide_round_row(const void *row, int bits, int64_t n, int16_t *to) {
  float wide[n] __attribute__((aligned(64)));
  widen(row, bits, n, wide);
  return round_row(wide, n, to);
}

/* Round a head into an int8 arena: the bits of `round_heads` in kernels/reference.py. */
static void round_head(const void *head, int bits, int64_t dim, void *arena, int64_t place) {
  char *to = (char *)arena + place * ((int64_t)sizeof(float) + dim);
  uint8_t around[dim];
  float wide[dim] __attribute__((aligned(64)));
  widen(head, bits, dim, wide);
  float scale = round_bytes(wide, dim, around);
  memcpy(to, &scale, sizeof scale);
  for (int64_t i = 0; i < dim; i++) to[sizeof scale + i] = (char)(around[i] ^ 128);
}

INLINE void rotate(void *row, const Heads *h, const void *c, const void *s, int64_t place, int bits) {
  int64_t half = h->dim / 2;
  float turned[h->dim], own[h->dim];
  for (int64_t head = 0; head < h->query + h->kv; head++) {
    const void *from = row_of(row, head, h->dim, bits);
    const Norm norm = head < h->query ? h->norm_query : h->norm_key;
    int64_t at = place * h->kv + head - h->query;
    if (norm.weight) {
      normed(from, h->dim, norm, own, bits);
      from = own;
    }
    void *of_key = h->rounded ? turned : (void *)row_of(h->key, at, h->dim, bits);
    void *to = head < h->query ? (void *)row_of(row, head, h->dim, bits) : of_key;
    for (int64_t i = 0; i < half; i += LANES) {
      vec a = load(from, i, bits), b = load(from, half + i, bits), x = load(c, i, bits), y = load(s, i, bits);
      store(to, i, a * x - b * y, bits);
      store(to, half + i, b * x + a * y, bits);
    }
    if (h->rounded && head >= h->query) round_head(turned, bits, h->dim, h->key, at);
  }
  for (int64_t head = 0; h->rounded && head < h->kv; head++)
    round_head(row_of(row, h->query + h->kv + head, h->dim, bits), bits, h->dim, h->value, place * h->kv + head);
  if (h->rounded) return;
  memcpy((void *)row_of(h->value, place * h->kv, h->dim, bits), row_of(row, h->query + h->kv, h->dim, bits),
         (size_t)(h->kv * h->dim * (bits / 8)));
}

void rotate_row(void *row, const Heads *h, const void *c, const void *s, int64_t place, int bits) {
  bits == 32 ? rotate(row, h, c, s, place, 32) : rotate(row, h, c, s, place, 16);
}

/* Functions for Python. `stride` is from row to row, in elements. */

typedef struct {
  const void *x;
  int64_t stride, n;
  void *out;
  float *scale; /* output, per row */
  int bits;
  Activation activation;
  Norm norm;
} Stage;

static void in_turn(Piece *row, const Stage *s, int64_t rows, int threads) {
  if (rows * s->n <= MANY) {
    for (int64_t r = 0; r < rows; r++) row(s, r, 0);
    return;
  }
  pool_enter(threads);
  pool_run(row, s, rows);
  pool_leave(0);
}

#define EACH_ROW(name, what)                                       \
  static void name(const void *stage, int64_t r, int worker) {     \
    const Stage *s = stage;                                        \
    (void)worker;                                                  \
    what;                                                          \
  }
#define ROW_OF_X row_of(s->x, r, s->stride, s->bits), s->bits, s->n
#define ROW_OF_OUT (void *)row_of(s->out, r, s->n, s->bits)

EACH_ROW(round_one, s->scale[r] = wide_round_row(ROW_OF_X, (int16_t *)s->out + r * s->n))
EACH_ROW(gate_round_one, s->scale[r] = gate_round_row(ROW_OF_X, s->activation, (int16_t *)s->out + r * s->n))
EACH_ROW(gate_one, gate_row(ROW_OF_X, s->activation, ROW_OF_OUT))
EACH_ROW(norm_one, norm_row(ROW_OF_X, s->norm, ROW_OF_OUT))

void pilotfish_round(const void *x, int bits, int64_t stride, int64_t rows, int64_t n, int16_t *out, float *scale,
                     int threads) {
  in_turn(round_one, &(Stage){x, stride, n, out, scale, bits, {0}, {0}}, rows, threads);
}

void pilotfish_gate_round(const void *x, int bits, int64_t rows, int64_t n, float linear, float cubic, int16_t *out,
                          float *scale, int threads) {
  in_turn(gate_round_one, &(Stage){x, 2 * n, n, out, scale, bits, {linear, cubic}, {0}}, rows, threads);
}

void pilotfish_gate(const void *x, int bits, int64_t rows, int64_t n, float linear, float cubic, void *out,
                    int threads) {
  in_turn(gate_one, &(Stage){x, 2 * n, n, out, NULL, bits, {linear, cubic}, {0}}, rows, threads);
}

void pilotfish_norm(const void *x, int bits, int64_t stride, int64_t rows, int64_t n, const float *weight, float eps,
                    void *out, int threads) {
  in_turn(norm_one, &(Stage){x, stride, n, out, NULL, bits, {0}, {weight, eps}}, rows, threads);
}

/* cos and sin are [rows, dim]; `places` are arena rows. */
void pilotfish_rotate(void *qkv, int bits, int64_t rows, const Heads *h, const void *cos, const void *sin,
                      const int64_t *places) {
  for (int64_t r = 0; r < rows; r++)
    rotate_row((void *)row_of(qkv, r, (h->query + 2 * h->kv) * h->dim, bits), h, row_of(cos, r, h->dim, bits),
               row_of(sin, r, h->dim, bits), places[r], bits);
}
