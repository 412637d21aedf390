/* The products of attention for AVX-512: keys are transposed, so that a register holds one dimension of 16 keys. */

#include <immintrin.h>

/* At most a strip of rows: scores[row][key] = query[row] . key * scale. */
INLINE void multiply_keys_float(const Args *a, const Work *w, int row, const int rows) {
  vec sums[STRIP][BLOCK / LANES] = {0};
  const float *q = w->query + row * a->dim;
  for (int64_t d = 0; d < a->dim; d++) {
    const vec *k = (const vec *)(w->keys + d * BLOCK);
    EACH(int i = 0; i < rows; i++)
      EACH(int j = 0; j < BLOCK / LANES; j++) sums[i][j] += k[j] * q[i * a->dim + d];
  }
  EACH(int i = 0; i < rows; i++)
    EACH(int j = 0; j < BLOCK / LANES; j++) ((vec *)(w->scores + (row + i) * BLOCK))[j] = sums[i][j] * a->scale;
}

/* For `rows` rows and `width` vectors of values, from element `d`: sums = sums * shrink + weights . values. */
INLINE void multiply_values_float(const Args *a, const Work *w, int row, int64_t d, const float *shrink, const int rows,
                                  const int width) {
  vec sums[STRIP][STRIP];
  EACH(int i = 0; i < rows; i++)
    EACH(int v = 0; v < width; v++) sums[i][v] = ((vec *)(w->sums + (row + i) * a->value_dim + d))[v] * shrink[i];
  for (int j = 0; j < BLOCK; j++)
    EACH(int v = 0; v < width; v++) {
      vec value = ((const vec *)(w->values + j * a->value_dim + d))[v];
      EACH(int i = 0; i < rows; i++) sums[i][v] += value * w->scores[(row + i) * BLOCK + j];
    }
  EACH(int i = 0; i < rows; i++)
    EACH(int v = 0; v < width; v++) ((vec *)(w->sums + (row + i) * a->value_dim + d))[v] = sums[i][v];
}

/* Transpose 16 x 16 32-bit numbers: row i is read from from[i], column c is written to to + c * BLOCK. */
static void transpose(const void *const *from, float *to) {
  __m512i r[16], t[16];
  for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(from[i]);
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    _mm512_store_si512(to + i * BLOCK, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
    _mm512_store_si512(to + (i + 8) * BLOCK, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
  }
}

static void load_keys(const Args *a, const Work *w, const int64_t *places, const int64_t *ahead, int bits) {
  for (int j = 0; j < BLOCK; j++) fetch(a->key, ahead[j], a->dim, bits);
  for (int j = 0; j < BLOCK && bits == 32; j += 16)
    for (int64_t d = 0; d < a->dim; d += 16) {
      const void *from[16];
      for (int i = 0; i < 16; i++) from[i] = (const float *)a->key + places[j + i] + d;
      transpose(from, w->keys + d * BLOCK + j);
    }
  if (bits == 32) return;
  for (int j = 0; j < BLOCK; j++)
    for (int64_t d = 0; d < a->dim; d++) w->keys[d * BLOCK + j] = element(a->key, places[j] + d, bits);
}

static void load_values(const Args *a, const Work *w, const int64_t *places, const int64_t *ahead, int bits) {
  for (int j = 0; j < BLOCK; j++) {
    fetch(a->value, ahead[j], a->value_dim, bits);
    for (int64_t d = 0; d < a->value_dim; d += LANES)
      *(vec *)(w->values + j * a->value_dim + d) = load(a->value, places[j] + d, bits);
  }
}

/* Two integers that bfloat16 represents exactly, in each lane: the upper halves of their floats. */
INLINE vec pair_of(vec low, vec high) {
  return (vec)_mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32((__m512i)low, 16), (__m512i)high);
}

/* Number `i` of the four codes in each 32-bit lane, as a float. */
INLINE vec code(ivec four, const int i) { return __builtin_convertvector(four << (24 - 8 * i) >> 24, vec); }

/* 16 codes, from `d`, of each of 16 keys: lane j of to[c] holds codes 4 c .. 4 c + 3 of key j. */
INLINE void gather_codes(const int8_t *data, const int64_t *from, int64_t d, ivec *to) {
  __m512i r[4];
  EACH(int i = 0; i < 4; i++) {
    __m512i four = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(data + from[i] + d)));
    four = _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i *)(data + from[i + 4] + d)), 1);
    four = _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i *)(data + from[i + 8] + d)), 2);
    r[i] = _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i *)(data + from[i + 12] + d)), 3);
  }
  __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpacklo_epi32(r[2], r[3]);
  __m512i c = _mm512_unpackhi_epi32(r[0], r[1]), e = _mm512_unpackhi_epi32(r[2], r[3]);
  to[0] = (ivec)_mm512_unpacklo_epi64(a, b), to[1] = (ivec)_mm512_unpackhi_epi64(a, b);
  to[2] = (ivec)_mm512_unpacklo_epi64(c, e), to[3] = (ivec)_mm512_unpackhi_epi64(c, e);
}

INLINE void load_key_codes(const Args *a, const Work *w, const int64_t *places, const int64_t *ahead,
                           const int paired) {
  for (int j = 0; j < BLOCK; j++) fetch(a->key, ahead[j], a->dim, 8);
  for (int j = 0; j < BLOCK; j += 16)
    for (int64_t d = 0; d < a->dim; d += 16) {
      ivec four[4];
      gather_codes(a->key, places + j, d, four);
      EACH(int c = 0; c < 4; c++) {
        vec *to = (vec *)(w->keys + (d + 4 * c) / (paired ? 2 : 1) * BLOCK + j);
        EACH(int i = 0; i < 4; i += paired ? 2 : 1) {
          vec here = code(four[c], i);
          to[i / (paired ? 2 : 1) * (BLOCK / LANES)] = paired ? pair_of(here, code(four[c], i + 1)) : here;
        }
      }
    }
}

INLINE vec value_codes(const Args *a, int64_t at) {
  return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)((const char *)a->value + at))));
}

INLINE void load_value_codes(const Args *a, const Work *w, const int64_t *places, const int64_t *ahead,
                             const int paired) {
  for (int j = 0; j < BLOCK; j++) fetch(a->value, ahead[j], a->value_dim, 8);
  for (int j = 0; j < BLOCK; j += 2)
    for (int64_t d = 0; d < a->value_dim; d += LANES) {
      vec even = value_codes(a, places[j] + d), odd = value_codes(a, places[j + 1] + d);
      vec *to = (vec *)(w->values + (paired ? j / 2 : j) * a->value_dim + d);
      *to = paired ? pair_of(even, odd) : even;
      if (!paired) to[a->value_dim / LANES] = odd;
    }
}

/* Codes as floats or, if `paired`, as bfloat16: two adjacent elements of the summed dimension in each lane. */
INLINE void load_codes(const Args *a, const Work *w, const Places *places, const Places *ahead, const int paired) {
  load_key_codes(a, w, places->key, ahead->key, paired);
  load_value_codes(a, w, places->value, ahead->value, paired);
}

#ifdef __AVX512BF16__
/* The same with bfloat16 products: two adjacent elements of the summed dimension in each 32-bit lane. `query` is then
 * [ROWS, dim / 2] pairs, `keys` [dim / 2, BLOCK], `values` [BLOCK / 2, value_dim]; weights are rounded to bfloat16. */

INLINE __m512 dot(__m512 sum, __m512i pairs, uint32_t pair) {
  return _mm512_dpbf16_ps(sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32((int)pair));
}

INLINE void multiply_keys_bf16(const Args *a, const Work *w, int row, const int rows) {
  int64_t pairs = a->dim / 2;
  __m512 sums[STRIP][BLOCK / LANES];
  EACH(int i = 0; i < rows; i++)
    EACH(int j = 0; j < BLOCK / LANES; j++) sums[i][j] = _mm512_setzero_ps();
  const uint32_t *q = (const uint32_t *)w->query + row * pairs;
  for (int64_t d = 0; d < pairs; d++) {
    const float *k = w->keys + d * BLOCK;
    EACH(int i = 0; i < rows; i++)
      EACH(int j = 0; j < BLOCK / LANES; j++)
        sums[i][j] = dot(sums[i][j], _mm512_load_si512(k + j * LANES), q[i * pairs + d]);
  }
  EACH(int i = 0; i < rows; i++)
    EACH(int j = 0; j < BLOCK / LANES; j++) ((vec *)(w->scores + (row + i) * BLOCK))[j] = (vec)sums[i][j] * a->scale;
}

INLINE void multiply_values_bf16(const Args *a, const Work *w, int row, int64_t d, const float *shrink,
                                 const int rows, const int width) {
  __m512 sums[STRIP][STRIP];
  uint32_t weights[STRIP][BLOCK / 2];
  EACH(int i = 0; i < rows; i++) {
    for (int j = 0; j < BLOCK / LANES; j++) {
      __m256bh rounded = _mm512_cvtneps_pbh(_mm512_load_ps(w->scores + (row + i) * BLOCK + j * LANES));
      memcpy(weights[i] + j * LANES / 2, &rounded, sizeof rounded);
    }
    EACH(int v = 0; v < width; v++)
      sums[i][v] = (__m512)(((vec *)(w->sums + (row + i) * a->value_dim + d))[v] * shrink[i]);
  }
  for (int j = 0; j < BLOCK / 2; j++)
    EACH(int v = 0; v < width; v++) {
      __m512i value = _mm512_load_si512(w->values + j * a->value_dim + d + v * LANES);
      EACH(int i = 0; i < rows; i++) sums[i][v] = dot(sums[i][v], value, weights[i][j]);
    }
  EACH(int i = 0; i < rows; i++)
    EACH(int v = 0; v < width; v++) ((vec *)(w->sums + (row + i) * a->value_dim + d))[v] = (vec)sums[i][v];
}

static void load_keys_bf16(const Args *a, const Work *w, const int64_t *places, const int64_t *ahead) {
  for (int j = 0; j < BLOCK; j += 16) {
    for (int i = 0; i < 16; i++) fetch(a->key, ahead[j + i], a->dim, 16);
    for (int64_t d = 0; d < a->dim; d += 32) {
      const void *from[16];
      int64_t at = d + 32 <= a->dim ? d : a->dim - 32; /* if 32 does not divide dim, the last two overlap */
      for (int i = 0; i < 16; i++) from[i] = (const bf16 *)a->key + places[j + i] + at;
      transpose(from, w->keys + at / 2 * BLOCK + j);
    }
  }
}

static void load_values_bf16(const Args *a, const Work *w, const int64_t *places, const int64_t *ahead) {
  for (int j = 0; j < BLOCK; j += 2) {
    const bf16 *even = (const bf16 *)a->value + places[j], *odd = (const bf16 *)a->value + places[j + 1];
    fetch(a->value, ahead[j], a->value_dim, 16);
    fetch(a->value, ahead[j + 1], a->value_dim, 16);
    for (int64_t d = 0; d < a->value_dim; d += LANES) {
      __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(even + d)));
      __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(odd + d)));
      _mm512_store_si512(w->values + j / 2 * a->value_dim + d, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
}
#endif

#ifdef __AVX512BF16__
#define FAST(bits, dim) ((bits) == 16 && (dim) >= 32)
#else
#define FAST(bits, dim) 0
#define multiply_keys_bf16 multiply_keys_float
#define multiply_values_bf16 multiply_values_float
#define load_keys_bf16(a, w, places, ahead) load_keys(a, w, places, ahead, 16)
#define load_values_bf16(a, w, places, ahead) load_values(a, w, places, ahead, 16)
#endif

INLINE void multiply_keys(const Args *a, const Work *w, int row, const int rows, int fast) {
  fast ? multiply_keys_bf16(a, w, row, rows) : multiply_keys_float(a, w, row, rows);
}

INLINE void multiply_values(const Args *a, const Work *w, int row, const float *shrink, const int rows, int fast) {
  int64_t d = 0;
  for (; d + STRIP * LANES <= a->value_dim; d += STRIP * LANES)
    fast ? multiply_values_bf16(a, w, row, d, shrink, rows, STRIP)
         : multiply_values_float(a, w, row, d, shrink, rows, STRIP);
  for (; d < a->value_dim; d += LANES)
    fast ? multiply_values_bf16(a, w, row, d, shrink, rows, 1) : multiply_values_float(a, w, row, d, shrink, rows, 1);
}

static void load_block(const Args *a, Work *w, const Places *places, const Places *ahead, int bits) {
  if (a->rounded && FAST(bits, a->dim)) {
    load_codes(a, w, places, ahead, 1);
  } else if (a->rounded) {
    load_codes(a, w, places, ahead, 0);
  } else if (FAST(bits, a->dim)) {
    load_keys_bf16(a, w, places->key, ahead->key);
    load_values_bf16(a, w, places->value, ahead->value);
  } else {
    load_keys(a, w, places->key, ahead->key, bits);
    load_values(a, w, places->value, ahead->value, bits);
  }
}
