/* One vector register of this processor, and the few instructions of it that the compiler's own vectors do not name:
 * products of weights with rows. AVX-512, AVX2, SSE and NEON; any other in plain vectors.
 *
 * Integers meet in one of three ways. Where an instruction sums four products of 8 bits (VNNI, NEON's dot product) it
 * takes codes and the bytes of rows as they are. Where one sums two products of an unsigned and a signed byte in 16 bits
 * (SSSE3, AVX2, AVX-512 without VNNI) it takes codes of 6 bits and less, whose sums fit. Codes of 8 bits, and all codes
 * elsewhere, are widened to 16 bits. No sum of products is ever rounded or cut off, so all ways give the same integers.
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

/* Four inputs of a row in every place. */
INLINE ints four_inputs(const char *x) { return every(four_bytes(x)); }

#if defined(__AVX512VNNI__) || (WIDTH == 32 && defined(__AVXVNNI__)) || defined(__ARM_NEON)

/* Where an instruction takes unsigned weights, codes of 8 bits are in panels plus 128, and sums are corrected by 128 times
 * the row's inputs. */
#if defined(__ARM_NEON)
#define CODES_FROM(bits) 0
#else
#define CODES_FROM(bits) ((bits) == 8 ? 128 : 0)
#endif
#define WIDE_ROWS 0

/* Four codes in each 32 bits, as they lie in panels, times four inputs of 8 bits. */
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
  /* Of four products of -128 the sum does not fit in 16 bits: each two are widened. */
  return (ints)vaddq_s32((int32x4_t)sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}

/* Eight inputs of 8 bits times codes of 0 to 63. */
INLINE ints dot_small_codes(ints sum, chars first, chars last, const char *x) {
  return dot_bytes(dot_bytes(sum, first, x), last, x + 4);
}

#else

#define CODES_FROM(bits) 0
#define WIDE_ROWS 1 /* codes of 8 bits meet rows of 16 */

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

/* Codes of 8 bits with a sign, in 16. */
INLINE shorts even_codes(chars codes) { return (shorts)((ushorts)codes << 8) >> 8; }
INLINE shorts odd_codes(chars codes) { return (shorts)codes >> 8; }

/* Four codes of 8 bits times four inputs of 16, of which the even ones come first. */
INLINE ints dot_wide(ints sum, shorts even, shorts odd, const char *x) {
  sum += pairs(even, (shorts)every(four_bytes(x)));
  return sum + pairs(odd, (shorts)every(four_bytes(x + 4)));
}

#if WIDTH == 64 || WIDTH == 32 || defined(__SSSE3__)

/* The sums of two products of 8 bits each, which must fit in 16. */
INLINE shorts byte_pairs(chars without_sign, const char *x) {
  return (shorts)WHOLE(maddubs_epi16)((whole)without_sign, (whole)four_inputs(x));
}

/* Four inputs of 8 bits times codes of 0 to 63. */
INLINE ints dot_bytes(ints sum, chars codes, const char *x) { return sum + pairs(byte_pairs(codes, x), (shorts){0} + 1); }

/* Eight of them: four products of 128 and 63 are at most 32,256. */
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
  /* The exponent starts 112 lower. For finite numbers only; small ones stay exact. */
  ints bits = __builtin_convertvector(*(const halves *)x, ints);
  floats size = (floats)((bits & 0x7fff) << 13) * 0x1p112f;
  return (floats)((ints)size | (bits & 0x8000) << 16);
#endif
}

#endif
