/* One vector register of this processor, and the few instructions that are not compiler vector operations: products of
 * weights with rows. AVX-512, AVX2, SSE and NEON; plain vectors elsewhere.
 *
 * Integers are multiplied in one of three ways. An instruction that sums four 8-bit products (VNNI, NEON's dot product)
 * reads codes and bytes of rows as they are. One that sums two products of an unsigned and a signed byte in 16 bits
 * (SSSE3, AVX2, AVX-512 without VNNI) reads codes of 6 bits and less, whose sums fit. Codes of 8 bits, and all codes
 * elsewhere, are widened to 16 bits. No sum of products is rounded or saturated, so all ways give the same integers. */

#ifndef PILOTFISH_REGISTERS_H
#define PILOTFISH_REGISTERS_H

#include "vectors.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if WIDTH == 64 || defined(__ARM_NEON)
#define MATMUL_ROWS 6 /* rows per block: sums and weights fit in 32 registers */
#elif WIDTH == 32
#define MATMUL_ROWS 3 /* in 16 */
#else
#define MATMUL_ROWS 2 /* in 16, and most instructions overwrite an operand */
#endif

typedef float floats __attribute__((vector_size(WIDTH)));
typedef int32_t ints __attribute__((vector_size(WIDTH)));
typedef int16_t shorts __attribute__((vector_size(WIDTH)));
typedef uint16_t ushorts __attribute__((vector_size(WIDTH)));
typedef int8_t chars __attribute__((vector_size(WIDTH)));

/* Four bytes, or one float, in every lane. */
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

/* sum + w * x, rounded once if the processor supports it. */
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

/* Four inputs of a row in every lane. */
INLINE ints four_inputs(const char *x) { return every(four_bytes(x)); }

#if defined(__AVX512VNNI__) || (WIDTH == 32 && defined(__AVXVNNI__)) || defined(__ARM_NEON)

/* If the instruction needs unsigned weights, 8-bit codes are in panels plus 128, and sums are corrected by 128 times
 * the row's inputs. */
#if defined(__ARM_NEON)
#define CODES_FROM(bits) 0
#else
#define CODES_FROM(bits) ((bits) == 8 ? 128 : 0)
#endif
#define WIDE_ROWS 0

/* Four codes in each 32-bit lane, as stored in panels, times four 8-bit inputs. */
INLINE ints dot_bytes(ints sum, chars codes, const char *x) {
#if WIDTH == 64
  return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)four_inputs(x));
#elif WIDTH == 32
  return (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)four_inputs(x));
#elif defined(__ARM_FEATURE_DOTPROD)
  return (ints)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, (int8x16_t)four_inputs(x));
#else
  int8x16_t row = (int8x16_t)four_inputs(x);
  int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)codes), vget_low_s8(row));
  int16x8_t high = vmull_s8(vget_high_s8((int8x16_t)codes), vget_high_s8(row));
  /* The sum of four products of -128 does not fit in 16 bits: each two are widened. */
  return (ints)vaddq_s32((int32x4_t)sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}

/* Eight 8-bit inputs times codes of 0 to 63. */
INLINE ints dot_small_codes(ints sum, chars first, chars last, const char *x) {
  return dot_bytes(dot_bytes(sum, first, x), last, x + 4);
}

#else

#define CODES_FROM(bits) 0
#define WIDE_ROWS 1 /* 8-bit codes are multiplied by 16-bit rows */

/* The instruction of this name for a whole register, and its operand type. */
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

/* Sums of pairs of 16-bit products. */
INLINE ints pairs(shorts a, shorts b) {
#if defined(WHOLE)
  return (ints)WHOLE(madd_epi16)((whole)a, (whole)b);
#else
  ints low = ((ints)a << 16 >> 16) * ((ints)b << 16 >> 16);
  return low + ((ints)a >> 16) * ((ints)b >> 16);
#endif
}

/* Signed 8-bit codes in 16 bits. */
INLINE shorts even_codes(chars codes) { return (shorts)((ushorts)codes << 8) >> 8; }
INLINE shorts odd_codes(chars codes) { return (shorts)codes >> 8; }

/* Four 8-bit codes times four 16-bit inputs, the even ones first. */
INLINE ints dot_wide(ints sum, shorts even, shorts odd, const char *x) {
  sum += pairs(even, (shorts)every(four_bytes(x)));
  return sum + pairs(odd, (shorts)every(four_bytes(x + 4)));
}

#if WIDTH == 64 || WIDTH == 32 || defined(__SSSE3__)

/* Sums of pairs of 8-bit products, which must fit in 16 bits. */
INLINE shorts byte_pairs(chars without_sign, const char *x) {
  return (shorts)WHOLE(maddubs_epi16)((whole)without_sign, (whole)four_inputs(x));
}

/* Four 8-bit inputs times codes of 0 to 63. */
INLINE ints dot_bytes(ints sum, chars codes, const char *x) { return sum + pairs(byte_pairs(codes, x), (shorts){0} + 1); }

/* Eight inputs: four products of 128 and 63 are at most 32,256. */
INLINE ints dot_small_codes(ints sum, chars first, chars last, const char *x) {
  return sum + pairs(byte_pairs(first, x) + byte_pairs(last, x + 4), (shorts){0} + 1);
}

#else

INLINE ints dot_bytes(ints sum, chars codes, const char *x) {
  chars row = (chars)four_inputs(x);
  sum += pairs(even_codes(codes), even_codes(row));
  return sum + pairs(odd_codes(codes), odd_codes(row));
}

INLINE ints dot_small_codes(ints sum, chars first, chars last, const char *x) {
  return dot_bytes(dot_bytes(sum, first, x), last, x + 4);
}

#endif
#endif

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
#elif defined(__ARM_FEATURE_DOTPROD)
#define INTEGER_PATH "NEON dot product"
#elif defined(__ARM_NEON)
#define INTEGER_PATH "NEON"
#else
#define INTEGER_PATH "plain C"
#endif

/* Two bfloat16 weights in each 32-bit lane. */
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

/* A register of floats from numbers of 16 bits. */
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
  /* The exponent biases differ by 112. For finite numbers only; small ones stay exact. */
  ints bits = __builtin_convertvector(*(const halves *)x, ints);
  floats size = (floats)((bits & 0x7fff) << 13) * 0x1p112f;
  return (floats)((ints)size | (bits & 0x8000) << 16);
#endif
}

#endif
