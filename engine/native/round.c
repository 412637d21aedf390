/* Float weights to 8 and 4 bits, a row at a time: the bits that torch gives in `engine/model/linear/int8.py` and `engine/model/linear/int4.py`.
 * Plain loops, which compilers turn into vectors of whatever width the processor has. */

/* A product is rounded before it is added to, as in torch. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#include "rows.h"

#define GROUP 64 /* inputs that share a scale in 4 bits */
#define LEVELS 16
#define FEW 512  /* numbers that are widened at once */
#define INFINITE 0x7f800000

#if defined(__clang__)
#define EVERY_LEVEL _Pragma("clang loop unroll(full)") for
#else
#define EVERY_LEVEL _Pragma("GCC unroll 16") for
#endif

typedef float eight __attribute__((vector_size(32)));
typedef int32_t eight_ints __attribute__((vector_size(32)));

INLINE int32_t bits_of(float x) {
  int32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

/* `count` numbers of a row of floats (`bits` 32) or bfloat16 (16) from i on. */
INLINE void widen_some(const void *row, int64_t i, int64_t count, float *to, const int bits) {
  if (bits == 32) memcpy(to, (const float *)row + i, (size_t)count * 4);
  else
    for (int64_t k = 0; k < count; k++) to[k] = wide(((const bf16 *)row)[i + k]);
}

/* The larger of `top` and the largest magnitude of x, as bits: these are in the order of the numbers. */
INLINE int32_t largest(int32_t top, const float *x, int64_t count) {
  for (int64_t k = 0; k < count; k++) {
    int32_t here = bits_of(x[k]) & 0x7fffffff;
    top = here > top ? here : top;
  }
  return top;
}

/* At least 1e-30; NaN where a number is not finite: then the scale is NaN as well. */
INLINE float peak_of(int32_t top) {
  float peak;
  memcpy(&peak, &top, 4);
  return top >= INFINITE ? NAN : peak > 1e-30f ? peak : 1e-30f;
}

INLINE float round8(const void *row, int64_t n, int8_t *to, const int bits) {
  float x[FEW];
  int32_t top = 0;
  for (int64_t i = 0; i < n; i += FEW) {
    int64_t count = n - i < FEW ? n - i : FEW;
    widen_some(row, i, count, x, bits);
    top = largest(top, x, count);
  }
  float peak = peak_of(top), steps = 1.0f / peak * 127.0f;
  for (int64_t i = 0; i < n; i += FEW) {
    int64_t count = n - i < FEW ? n - i : FEW;
    widen_some(row, i, count, x, bits);
    /* The sum has no bits behind the point, ties went to even, and its last byte is the integer's. */
    for (int64_t k = 0; k < count; k++) to[i + k] = (int8_t)bits_of(x[k] * steps + 12582912.0f);
  }
  return peak * (float)(1.0 / 127);
}

/* `stride` is from row to row, in numbers. */
void pilotfish_round8(const void *x, int bits, int64_t stride, int64_t rows, int64_t n, int8_t *out, float *scale) {
  for (int64_t r = 0; r < rows; r++) {
    const void *row = row_of(x, r, stride, bits);
    scale[r] = bits == 32 ? round8(row, n, out + r * n, 32) : round8(row, n, out + r * n, 16);
  }
}

/* Numbers are added by halves: [a, b, c, d] -> [a + c, b + d] -> (a + c) + (b + d). */
INLINE float sum_by_halves(float *x) {
  for (int half = GROUP / 2; half; half /= 2)
    for (int i = 0; i < half; i++) x[i] += x[i + half];
  return x[0];
}

/* Eight numbers: which level each is nearest to, and what that is. Of two, the lower. */
INLINE void nearest(const float *scaled, const float *levels, const float *middles, int32_t *index, float *level) {
  eight here;
  memcpy(&here, scaled, sizeof here);
  eight chosen = (eight){0} + levels[0];
  eight_ints number = {0};
  EVERY_LEVEL(int l = 1; l < LEVELS; l++) {
    eight_ints above = here > (eight){0} + middles[l];
    number -= above;
    chosen += (eight)(above & (eight_ints)((eight){0} + (levels[l] - levels[l - 1]))); /* integers: exact */
  }
  memcpy(index, &number, sizeof number);
  memcpy(level, &chosen, sizeof chosen);
}

/* The scale is first what the group's largest number asks for, then what suits the chosen levels best,
 * as a bfloat16. */
INLINE bf16 round4(const void *row, const float *levels, const float *middles, uint8_t *to, const int bits) {
  float x[GROUP], scaled[GROUP], level[GROUP];
  int32_t index[GROUP];
  widen_some(row, 0, GROUP, x, bits);
  float scale = peak_of(largest(0, x, GROUP)) / levels[LEVELS - 1];
  for (int i = 0; i < GROUP; i++) scaled[i] = x[i] / scale;
  for (int i = 0; i < GROUP; i += 8) nearest(scaled + i, levels, middles, index + i, level + i);
  for (int i = 0; i < GROUP / 2; i++) to[i] = (uint8_t)(index[2 * i] | index[2 * i + 1] << 4);
  for (int i = 0; i < GROUP; i++) x[i] *= level[i], level[i] *= level[i];
  return narrow((vec){0} + sum_by_halves(x) / sum_by_halves(level))[0];
}

void pilotfish_round4(const void *x, int bits, int64_t stride, int64_t rows, int64_t n, const float *levels, uint8_t *out,
                      bf16 *scale) {
  float middles[LEVELS]; /* below each level */
  for (int l = 1; l < LEVELS; l++) middles[l] = (levels[l - 1] + levels[l]) / 2;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < n; i += GROUP, out += GROUP / 2, scale++) {
      const void *from = (const char *)row_of(x, r, stride, bits) + i * (bits / 8);
      *scale = bits == 32 ? round4(from, levels, middles, out, 32) : round4(from, levels, middles, out, 16);
    }
}
