/* Vectors of one register, as compiler extensions (GCC, Clang), and bfloat16, for any CPU. Compilers split comparisons
 * and conversions of vectors wider than a register into scalar operations. */

#ifndef PILOTFISH_VECTORS_H
#define PILOTFISH_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512BW__)
#define WIDTH 64 /* bytes of a register */
#elif defined(__AVX2__)
#define WIDTH 32
#else
#define WIDTH 16
#endif
#define LANES (WIDTH / 4) /* floats in a vector */
#define INLINE static inline __attribute__((always_inline))

/* Arrays of vectors stay in registers only if their loops are unrolled before other optimisations. */
#if defined(__clang__)
#define EACH _Pragma("clang loop unroll(full)") for
#else
#define EACH _Pragma("GCC unroll 8") for
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint16_t bf16;
typedef float vec_unaligned __attribute__((vector_size(4 * LANES), aligned(4)));
typedef bf16 bf16vec __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint8_t bytevec __attribute__((vector_size(LANES), aligned(1)));
typedef int8_t codevec __attribute__((vector_size(LANES), aligned(1)));
typedef int16_t shortvec __attribute__((vector_size(2 * LANES)));

INLINE int64_t less(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE float wide(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

INLINE float element(const void *data, int64_t i, int bits) {
  return bits == 32 ? ((const float *)data)[i] : wide(((const bf16 *)data)[i]);
}

INLINE vec either(ivec which, vec yes, vec no) { return (vec)((which & (ivec)yes) | (~which & (ivec)no)); }

/* e^x for x <= 0 in every lane, to about 2 ulp; -inf gives 0. */
INLINE vec exponential(vec x) {
  x = either(x < -87.0f, (vec){0} - 127.0f * 0.69314718f, x);
  vec scaled = x * 1.44269504f;
  vec rounded = (scaled + 12582912.0f) - 12582912.0f; /* 1.5 * 2^23: to the nearest integer */
  vec r = x - rounded * 0.693359375f;
  r = r + rounded * 2.12194440e-4f;
  vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  ivec power = __builtin_convertvector(rounded, ivec);
  power = (power + 127) << 23; /* 0 where x was clamped */
  return p * (vec)power;
}

#if WIDTH == 64
#define FOLD(x, combine)                                                                             \
  combine(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)); \
  combine(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)); \
  combine(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)); \
  combine(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14))
#elif WIDTH == 32
#define FOLD(x, combine)                                                 \
  combine(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3)); \
  combine(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5)); \
  combine(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6))
#else
#define FOLD(x, combine)                                     \
  combine(x, __builtin_shufflevector(x, x, 2, 3, 0, 1)); \
  combine(x, __builtin_shufflevector(x, x, 1, 0, 3, 2))
#endif
#define ADD(x, y) x = x + y
#define LARGER(x, y) x = either(x > y, x, y)

INLINE float sum_of(vec x) {
  FOLD(x, ADD);
  return x[0];
}

INLINE float maximum_of(vec x) {
  FOLD(x, LARGER);
  return x[0];
}

/* Rounded to nearest, ties to even; NaN stays NaN. */
INLINE bf16vec narrow(vec x) {
  ivec bits = (ivec)x;
  ivec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  ivec kept = (ivec)either(x == x, (vec)rounded, (vec)((bits >> 16) | 0x40));
  return __builtin_convertvector(kept, bf16vec);
}

/* A vector of elements of a row of floats (`bits` 32), bfloat16 (16) or int8 (8). */
INLINE vec load(const void *row, int64_t i, int bits) {
  if (bits == 8) { /* in two steps: GCC splits a single one into scalar operations */
    shortvec twice = __builtin_convertvector(*(const codevec *)((const int8_t *)row + i), shortvec);
    return __builtin_convertvector(__builtin_convertvector(twice, ivec), vec);
  }
  if (bits == 32) return *(const vec_unaligned *)((const float *)row + i);
  return (vec)(__builtin_convertvector(*(const bf16vec *)((const bf16 *)row + i), ivec) << 16);
}

INLINE void store(void *row, int64_t i, vec x, int bits) {
  if (bits == 32)
    *(vec_unaligned *)((float *)row + i) = x;
  else
    *(bf16vec *)((bf16 *)row + i) = narrow(x);
}

/* Write the first `count` elements of a vector to out[at...]; `add`: round them, then add them to the old ones. */
INLINE void store_some(void *out, int64_t at, vec y, int bits, int add, int64_t count) {
  char few[4 * LANES] __attribute__((aligned(64))) = {0};
  size_t size = (size_t)(bits / 8);
  char *to = (char *)out + at * (int64_t)size;
  void *whole = count >= LANES ? to : few; /* a whole vector would exceed the row */
  if (add) {
    vec rounded = bits == 32 ? y : (vec)(__builtin_convertvector(narrow(y), ivec) << 16);
    if (whole == few) memcpy(few, to, (size_t)count * size);
    y = load(whole, 0, bits) + rounded;
  }
  store(whole, 0, y, bits);
  if (whole == few) memcpy(to, few, (size_t)count * size);
}

/* x times the logistic function of linear x + cubic x^3. The argument of the exponential is not positive, so that it
 * cannot overflow. */
INLINE vec times_logistic(vec x, float linear, float cubic) {
  vec z = x * linear;
  if (cubic != 0) z = z + x * x * x * cubic;
  vec small = exponential(either(z > 0, -z, z));
  return x * either(z > 0, (vec){0} + 1.0f, small) / (1.0f + small);
}

#endif
