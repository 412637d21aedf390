/* Stands in for the compiler's own <immintrin.h>, for tests: instructions that the processor at hand lacks are computed by
 * SIMDe (Debian's libsimde-dev), or here where its version has none. Sources see the macros of the processor that is
 * emulated; SIMDe must not, or it would take the instructions for real. */

#ifndef PILOTFISH_EMULATED_H
#define PILOTFISH_EMULATED_H

#include <stdint.h>
#include <string.h>

#define SIMDE_NO_NATIVE
#define SIMDE_ENABLE_NATIVE_ALIASES
#pragma push_macro("__AVX512BW__")
#pragma push_macro("__AVX512F__")
#pragma push_macro("__AVX512VNNI__")
#pragma push_macro("__AVX512BF16__")
#pragma push_macro("__AVXVNNI__")
#undef __AVX512BW__
#undef __AVX512F__
#undef __AVX512VNNI__
#undef __AVX512BF16__
#undef __AVXVNNI__
#include <simde/x86/avx2.h>
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>
#pragma pop_macro("__AVX512BW__")
#pragma pop_macro("__AVX512F__")
#pragma pop_macro("__AVX512VNNI__")
#pragma pop_macro("__AVX512BF16__")
#pragma pop_macro("__AVXVNNI__")

#undef _mm512_madd_epi16
static inline __m512i _mm512_madd_epi16(__m512i a, __m512i b) {
  int16_t x[32], y[32];
  int32_t z[16];
  __m512i sums;
  memcpy(x, &a, 64), memcpy(y, &b, 64);
  for (int i = 0; i < 16; i++) z[i] = x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1];
  memcpy(&sums, z, 64);
  return sums;
}

#undef _mm512_cvtepu16_epi32
static inline __m512i _mm512_cvtepu16_epi32(__m256i a) {
  uint16_t x[16];
  uint32_t z[16];
  __m512i wide;
  memcpy(x, &a, 32);
  for (int i = 0; i < 16; i++) z[i] = x[i];
  memcpy(&wide, z, 64);
  return wide;
}

#undef _mm512_cvtepi8_epi32
static inline __m512i _mm512_cvtepi8_epi32(__m128i a) {
  int8_t x[16];
  int32_t z[16];
  __m512i wide;
  memcpy(x, &a, 16);
  for (int i = 0; i < 16; i++) z[i] = x[i];
  memcpy(&wide, z, 64);
  return wide;
}

#undef _mm512_cvtepi32_ps
static inline __m512 _mm512_cvtepi32_ps(__m512i a) {
  int32_t x[16];
  float z[16];
  __m512 numbers;
  memcpy(x, &a, 64);
  for (int i = 0; i < 16; i++) z[i] = (float)x[i];
  memcpy(&numbers, z, 64);
  return numbers;
}

#undef _mm512_cvtph_ps
static inline __m512 _mm512_cvtph_ps(__m256i a) {
  __m128i halves[2];
  __m256 parts[2];
  __m512 wide;
  memcpy(halves, &a, 32);
  for (int i = 0; i < 2; i++) parts[i] = simde_mm256_cvtph_ps(halves[i]);
  memcpy(&wide, parts, 64);
  return wide;
}

#undef _mm512_cvtneps_pbh
static inline __m256bh _mm512_cvtneps_pbh(__m512 a) {
  uint32_t x[16];
  uint16_t z[16];
  __m256bh narrow;
  memcpy(x, &a, 64);
  for (int i = 0; i < 16; i++) z[i] = (uint16_t)((x[i] + 0x7fff + (x[i] >> 16 & 1)) >> 16);
  memcpy(&narrow, z, 32);
  return narrow;
}

#undef _mm256_dpbusd_avx_epi32
static inline __m256i _mm256_dpbusd_avx_epi32(__m256i sum, __m256i a, __m256i b) {
  return simde_mm256_dpbusd_epi32(sum, a, b);
}

#endif
