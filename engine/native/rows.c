/* What lies between the matmuls of a transformer, a row of the batch at a time. All rows take the same instructions, so
 * a row's result is the same bits whatever stands beside it. `bits` is 32 for float, 16 for bfloat16; widths are
 * multiples of LANES. */

/* A product is rounded before it is added to: then rounding to integers is what anyone would compute. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#include "vectors.h"

#define MANY 65536 /* numbers from which on a second thread is worth waking */

INLINE vec load(const void *row, int64_t i, int bits) {
  if (bits == 32) return *(const vec_unaligned *)((const float *)row + i);
  ivec wide = __builtin_convertvector(*(const bf16vec *)((const bf16 *)row + i), ivec) << 16;
  return (vec)wide;
}

INLINE void store(void *row, int64_t i, vec x, int bits) {
  if (bits == 32)
    *(vec_unaligned *)((float *)row + i) = x;
  else
    *(bf16vec *)((bf16 *)row + i) = narrow_all(x);
}

INLINE const void *row_of(const void *data, int64_t row, int64_t stride, int bits) {
  return (const char *)data + row * stride * (bits / 8);
}

INLINE vec magnitude(vec x) { return (vec)((ivec)x & 0x7fffffff); }

/* A row to uint8 around 128, its largest number to 1 or 255; returns what one step is worth. */
INLINE float round_row(const float *x, int64_t n, uint8_t *out) {
  vec top = {0}, odd = {0};
  for (int64_t i = 0; i < n; i += LANES) {
    vec here = *(const vec *)(x + i), size = magnitude(here);
    top = either(size > top, size, top);
    odd += here - here; /* not 0, but NaN, where there is no number: then the scale is NaN, and all that comes of it */
  }
  float peak = maximum_of(top);
  peak = (peak > 1e-30f ? peak : 1e-30f) + sum_of(odd);
  float steps = 1.0f / peak * 127.0f;
  for (int64_t i = 0; i < n; i += LANES) {
    vec scaled = *(const vec *)(x + i) * steps;
    vec rounded = (scaled + 12582912.0f) - 12582912.0f; /* ties to even */
    ivec whole = __builtin_convertvector(rounded, ivec) + 128;
    *(bytevec *)(out + i) = __builtin_convertvector(whole, bytevec);
  }
  return peak * (float)(1.0 / 127);
}

/* x [rows, n] -> uint8 [rows, n] and scale [rows]. */
void pilotfish_round(const void *x, int bits, int64_t stride, int64_t rows, int64_t n, uint8_t *out, float *scale,
                     int threads) {
#pragma omp parallel for num_threads(threads) if (rows * n > MANY)
  for (int64_t r = 0; r < rows; r++) {
    float wide[n] __attribute__((aligned(64)));
    const void *row = row_of(x, r, stride, bits);
    for (int64_t i = 0; i < n; i += LANES) *(vec *)(wide + i) = load(row, i, bits);
    scale[r] = round_row(wide, n, out + r * n);
  }
}

/* act(gate) * up, rounded as above, of rows (gate, up) of twice the width. act: x times the logistic function. */
void pilotfish_gate_round(const void *x, int bits, int64_t rows, int64_t n, uint8_t *out, float *scale, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * n > MANY)
  for (int64_t r = 0; r < rows; r++) {
    float gated[n] __attribute__((aligned(64)));
    const void *row = row_of(x, r, 2 * n, bits);
    for (int64_t i = 0; i < n; i += LANES) *(vec *)(gated + i) = silu(load(row, i, bits)) * load(row, n + i, bits);
    scale[r] = round_row(gated, n, out + r * n);
  }
}

/* The same, not rounded. */
void pilotfish_gate(const void *x, int bits, int64_t rows, int64_t n, void *out, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * n > MANY)
  for (int64_t r = 0; r < rows; r++) {
    const void *row = row_of(x, r, 2 * n, bits);
    void *to = (void *)row_of(out, r, n, bits);
    for (int64_t i = 0; i < n; i += LANES) store(to, i, silu(load(row, i, bits)) * load(row, n + i, bits), bits);
  }
}

/* x / sqrt(sum of x^2 + eps) * weight. Who wants the mean has the width in eps and its root in weight. */
void pilotfish_norm(const void *x, int bits, int64_t stride, int64_t rows, int64_t n, const float *weight, float eps,
                        void *out, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * n > MANY)
  for (int64_t r = 0; r < rows; r++) {
    const void *row = row_of(x, r, stride, bits);
    void *to = (void *)row_of(out, r, n, bits);
    vec squares = {0};
    for (int64_t i = 0; i < n; i += LANES) {
      vec here = load(row, i, bits);
      squares += here * here;
    }
    float factor = 1.0f / sqrtf(sum_of(squares) + eps);
    for (int64_t i = 0; i < n; i += LANES)
      store(to, i, load(row, i, bits) * factor * *(const vec_unaligned *)(weight + i), bits);
  }
}

/* Integer sums, already times what a step of the weights is worth, times that of the rows, plus any bias. */
void pilotfish_scale(const float *sums, int64_t rows, int64_t n, const float *scale, const float *bias, void *out,
                     int bits, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * n > MANY)
  for (int64_t r = 0; r < rows; r++) {
    void *to = (void *)row_of(out, r, n, bits);
    for (int64_t i = 0; i < n; i += LANES) {
      vec y = *(const vec_unaligned *)(sums + r * n + i) * scale[r];
      if (bias) y += *(const vec_unaligned *)(bias + i);
      store(to, i, y, bits);
    }
  }
}

/* Turn the query in place and the key on its way into the arena; the value goes there as it is.
 *
 * qkv [rows, (heads + 2 kv_heads) * dim]: query, key, value side by side. cos and sin [rows, dim], of which the second
 * half repeats the first: the halves (a, b) of a head become (a cos - b sin, b cos + a sin). `places` are arena rows. */
void pilotfish_rotate(void *qkv, int bits, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, const void *cos,
                      const void *sin, const int64_t *places, void *key, void *value) {
  int64_t width = (heads + 2 * kv_heads) * dim, half = dim / 2;
  for (int64_t r = 0; r < rows; r++) {
    const void *c = row_of(cos, r, dim, bits), *s = row_of(sin, r, dim, bits);
    for (int64_t h = 0; h < heads + kv_heads; h++) {
      const void *from = row_of(qkv, r * width + h * dim, 1, bits);
      void *to = h < heads ? (void *)from : (void *)row_of(key, (places[r] * kv_heads + h - heads) * dim, 1, bits);
      for (int64_t i = 0; i < half; i += LANES) {
        vec a = load(from, i, bits), b = load(from, half + i, bits), x = load(c, i, bits), y = load(s, i, bits);
        store(to, i, a * x - b * y, bits);
        store(to, half + i, b * x + a * y, bits);
      }
    }
    memcpy((void *)row_of(value, places[r] * kv_heads * dim, 1, bits),
           row_of(qkv, r * width + (heads + kv_heads) * dim, 1, bits), (size_t)(kv_heads * dim * (bits / 8)));
  }
}
