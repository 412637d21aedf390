/* One vector register of this processor, and the few instructions of it that the compiler's own vectors do not name:
 * products of weights with rows, and a table's entries. AVX-512, AVX2, SSE and NEON; any other in plain vectors.
 *
 * Integers of 8 bits meet in one of three ways. Where an instruction sums four products (VNNI, NEON's dot product) it
 * takes weights and rows as they are. Where one sums two products of an unsigned and a signed byte in 16 bits (SSSE3,
 * AVX2, AVX-512 without VNNI) weights hand their signs to the rows, so that no sum overflows. Elsewhere both are widened
 * to 16 bits. No sum of products is ever rounded or cut off, so all ways give the same integers.
 */

#ifndef PILOTFISH_REGISTERS_H
#define PILOTFISH_REGISTERS_H

#include "vectors.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if WIDTH == 64 || defined(__ARM_NEON)
#define MATMUL_ROWS 6 /* rows that meet a panel together: sums and weights in 32 registers */
#elif WIDTH == 32
#define MATMUL_ROWS 3 /* in 16 */
#else
#define MATMUL_ROWS 2 /* in 16, and one operand of most instructions is lost */
#endif

typedef float floats __attribute__((vector_size(WIDTH)));
typedef int32_t ints __attribute__((vector_size(WIDTH)));
typedef int16_t shorts __attribute__((vector_size(WIDTH)));
typedef uint16_t ushorts __attribute__((vector_size(WIDTH)));
typedef int8_t chars __attribute__((vector_size(WIDTH)));

/* Four bytes, or one float, in every place. */
INLINE ints every(int32_t x) { return (ints){0} + x; }
INLINE floats every_float(float x) { return (floats){0} + x; }

INLINE int32_t four_bytes(const char *x) {
  int32_t bytes;
  memcpy(&bytes, x, 4);
  return bytes;
}

INLINE float one_float(const char *x) {
  float number;
  memcpy(&number, x, 4);
  return number;
}

/* sum + w * x, rounded once where the processor can. */
INLINE floats fma_floats(floats sum, floats w, floats x) {
#if WIDTH == 64
  return (floats)_mm512_fmadd_ps((__m512)x, (__m512)w, (__m512)sum);
#elif WIDTH == 32 && defined(__FMA__)
  return (floats)_mm256_fmadd_ps((__m256)x, (__m256)w, (__m256)sum);
#elif defined(__ARM_NEON)
  return (floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)w, (float32x4_t)x);
#else
  return sum + w * x;
#endif
}

/* Four inputs of a row in every place: 1 to 255 around 128, or without it (`SIGNED_ROWS`). */
INLINE ints four_inputs(const char *x) { return every(four_bytes(x)); }

#if defined(__AVX512VNNI__) || (WIDTH == 32 && defined(__AVXVNNI__)) || defined(__ARM_NEON)

typedef chars Four; /* four weights in each 32 bits */

INLINE Four four_of(chars weights) { return weights; }

INLINE ints dot(ints sum, Four w, const char *x) {
#if WIDTH == 64
  return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)four_inputs(x), (__m512i)w);
#elif WIDTH == 32
  return (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)four_inputs(x), (__m256i)w);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return (ints)vusdotq_s32((int32x4_t)sum, (uint8x16_t)four_inputs(x), (int8x16_t)w);
#elif defined(__ARM_FEATURE_DOTPROD)
  return (ints)vdotq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)four_inputs(x));
#else
  /* A sum of two products of -127 to 127 fits in 16 bits. */
  int8x16_t row = (int8x16_t)four_inputs(x);
  int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)w), vget_low_s8(row));
  int16x8_t high = vmull_s8(vget_high_s8((int8x16_t)w), vget_high_s8(row));
  return (ints)vpadalq_s16((int32x4_t)sum, vpaddq_s16(low, high));
#endif
}

#else

/* The instruction of this name for a whole register, and what such instructions take. */
#if WIDTH == 64
#define WHOLE(name) _mm512_##name
typedef __m512i whole;
#elif WIDTH == 32
#define WHOLE(name) _mm256_##name
typedef __m256i whole;
#elif defined(__SSE2__)
#define WHOLE(name) _mm_##name
typedef __m128i whole;
#endif

/* The sums of two products of 16 bits each. */
INLINE ints pairs(shorts a, shorts b) {
#if defined(WHOLE)
  return (ints)WHOLE(madd_epi16)((whole)a, (whole)b);
#else
  ints low = ((ints)a << 16 >> 16) * ((ints)b << 16 >> 16);
  return low + ((ints)a >> 16) * ((ints)b >> 16);
#endif
}

#if WIDTH == 64 || WIDTH == 32 || defined(__SSSE3__)

#define TWO_PRODUCTS 1
typedef struct {
  chars size;
#if WIDTH == 64
  uint64_t is_negative;
#else
  chars sign;
#endif
} Four;

INLINE Four four_of(chars w) {
  chars size = (chars)WHOLE(abs_epi8)((whole)w);
#if WIDTH == 64
  return (Four){size, _mm512_movepi8_mask((whole)w)};
#else
  return (Four){size, w};
#endif
}

/* The sums of two products of 8 bits each, cut off at 16 bits. */
INLINE shorts byte_pairs(ints without_sign, ints with_sign) {
  return (shorts)WHOLE(maddubs_epi16)((whole)without_sign, (whole)with_sign);
}

/* Two products of -127 to 127 are at most 32,258. */
INLINE ints dot(ints sum, Four w, const char *x) {
  ints row = four_inputs(x);
#if WIDTH == 64
  row = (ints)_mm512_mask_sub_epi8((whole)row, w.is_negative, _mm512_setzero_si512(), (whole)row);
#else
  row = (ints)WHOLE(sign_epi8)((whole)row, (whole)w.sign);
#endif
  return sum + pairs(byte_pairs((ints)w.size, row), (shorts){0} + 1);
}

#else

typedef struct {
  shorts even, odd;
} Four;

INLINE Four four_of(chars weights) {
  shorts two = (shorts)weights;
  return (Four){(shorts)((ushorts)two << 8) >> 8, two >> 8};
}

INLINE ints dot(ints sum, Four w, const char *x) {
  int32_t row = four_bytes(x);
  sum += pairs(w.even, (shorts)every(row & 0xff00ff));
  return sum + pairs(w.odd, (shorts)every(row >> 8 & 0xff00ff));
}

#endif
#endif

/* Eight inputs of a row times levels of -32 to 32: four products of 255 and 32 are at most 32,640. */
INLINE ints dot_levels(ints sum, chars low, chars high, const char *x) {
#if defined(TWO_PRODUCTS)
  shorts four = byte_pairs(four_inputs(x), (ints)low) + byte_pairs(four_inputs(x + 4), (ints)high);
  return sum + pairs(four, (shorts){0} + 1);
#else
  return dot(dot(sum, four_of(low), x), four_of(high), x + 4);
#endif
}

/* Codes in groups meet rows without their 128. Where an instruction takes unsigned weights, codes of 8 bits lie in panels
 * with 128 more, and whoever sums them takes as many times the row's inputs away. */
#if defined(__AVX512VNNI__) || (WIDTH == 32 && defined(__AVXVNNI__))
#define CODES_FROM(bits) ((bits) == 8 ? 128 : 0)
#else
#define CODES_FROM(bits) 0
#endif

INLINE ints dot_codes(ints sum, Four w, const char *x) {
#if defined(__AVX512VNNI__)
  return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)four_inputs(x));
#elif WIDTH == 32 && defined(__AVXVNNI__)
  return (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)four_inputs(x));
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return (ints)vdotq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)four_inputs(x));
#elif defined(__ARM_NEON) || defined(TWO_PRODUCTS)
  return dot(sum, w, x);
#else
  shorts row = (shorts)four_inputs(x);
  sum += pairs(w.even, (shorts)((ushorts)row << 8) >> 8);
  return sum + pairs(w.odd, row >> 8);
#endif
}

/* Eight inputs times codes of 0 to 63: four products of 127 and 63 are at most 32,004. */
INLINE ints dot_small_codes(ints sum, chars first, chars last, const char *x) {
#if defined(TWO_PRODUCTS)
  shorts four = byte_pairs((ints)first, four_inputs(x)) + byte_pairs((ints)last, four_inputs(x + 4));
  return sum + pairs(four, (shorts){0} + 1);
#else
  return dot_codes(dot_codes(sum, four_of(first), x), four_of(last), x + 4);
#endif
}

#if defined(__AVX512VNNI__)
#define INTEGER_PATH "AVX-512 VNNI"
#elif WIDTH == 32 && defined(__AVXVNNI__)
#define INTEGER_PATH "AVX-VNNI"
#elif WIDTH == 64
#define INTEGER_PATH "AVX-512"
#elif WIDTH == 32
#define INTEGER_PATH "AVX2"
#elif defined(__SSE2__)
#define INTEGER_PATH "SSE"
#elif defined(__ARM_FEATURE_MATMUL_INT8)
#define INTEGER_PATH "NEON i8mm"
#elif defined(__ARM_FEATURE_DOTPROD)
#define INTEGER_PATH "NEON dot product"
#elif defined(__ARM_NEON)
#define INTEGER_PATH "NEON"
#else
#define INTEGER_PATH "plain C"
#endif

/* Whether rows are fed to weights of 8 or 4 bits without their 128. */
#if defined(__ARM_NEON) && !defined(__ARM_FEATURE_MATMUL_INT8)
#define SIGNED_ROWS(bits) 1
#elif defined(TWO_PRODUCTS)
#define SIGNED_ROWS(bits) ((bits) == 8)
#else
#define SIGNED_ROWS(bits) 0
#endif

/* Two weights of bfloat16 in each 32 bits. */
#if defined(__AVX512BF16__)

#define FED16 4
#define BFLOAT16_PATH "AVX512-BF16"
INLINE floats two_products(floats sum, ints w, const char *x) {
  return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)every(four_bytes(x)), (__m512bh)w);
}

#else

#define FED16 8 /* two floats */
#define BFLOAT16_PATH "float32 products"
INLINE floats two_products(floats sum, ints w, const char *x) {
  sum = fma_floats(sum, (floats)(w << 16), every_float(one_float(x)));
  return fma_floats(sum, (floats)(w & (int32_t)0xffff0000), every_float(one_float(x + 4)));
}

#endif

/* The numbers of a register from 16 bits each. */
typedef uint16_t halves __attribute__((vector_size(WIDTH / 2)));

INLINE floats bfloat16s(const char *x) {
#if WIDTH == 64
  return (floats)((ints)_mm512_cvtepu16_epi32(*(const __m256i *)x) << 16);
#elif WIDTH == 32
  return (floats)((ints)_mm256_cvtepu16_epi32(*(const __m128i *)x) << 16);
#else
  return (floats)(__builtin_convertvector(*(const halves *)x, ints) << 16);
#endif
}

INLINE floats float16s(const char *x) {
#if WIDTH == 64
  return (floats)_mm512_cvtph_ps(*(const __m256i *)x);
#elif WIDTH == 32 && defined(__F16C__)
  return (floats)_mm256_cvtph_ps(*(const __m128i *)x);
#else
  /* The exponent starts 112 lower. Finite numbers alone, and small ones stay exact. */
  ints bits = __builtin_convertvector(*(const halves *)x, ints);
  floats size = (floats)((bits & 0x7fff) << 13) * 0x1p112f;
  return (floats)((ints)size | (bits & 0x8000) << 16);
#endif
}

/* A table of 16 bytes in every 16 bytes, and its entries by numbers of 0 to 15. */
INLINE chars table_of(const int8_t *levels) {
  chars table;
  for (int i = 0; i < WIDTH; i += 16) memcpy((char *)&table + i, levels, 16);
  return table;
}

INLINE chars entries(chars table, chars at) {
#if WIDTH == 64
  return (chars)_mm512_shuffle_epi8((__m512i)table, (__m512i)at);
#elif WIDTH == 32
  return (chars)_mm256_shuffle_epi8((__m256i)table, (__m256i)at);
#elif defined(__SSSE3__)
  return (chars)_mm_shuffle_epi8((__m128i)table, (__m128i)at);
#elif defined(__ARM_NEON)
  return (chars)vqtbl1q_s8((int8x16_t)table, (uint8x16_t)at);
#else
  chars found;
  for (int i = 0; i < WIDTH; i++) found[i] = table[(int)at[i]];
  return found;
#endif
}

#endif
