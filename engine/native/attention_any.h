/* The products of attention in registers of 16 and 32 bytes. Float keys and values are read in place; bfloat16 and int8
 * are first widened. A score is a sum across a register; four are summed at once. */

#include "registers.h"

#define REGISTER (WIDTH / 4) /* floats */
#if defined(__ARM_NEON)
#define SIDE 4 /* registers of sums per row: 4 rows and the operands fit */
#else
#define SIDE 2
#endif

typedef float floats_unaligned __attribute__((vector_size(WIDTH), aligned(4)));
typedef float four_floats __attribute__((vector_size(16)));

#define FAST(bits, dim) 0

INLINE floats read_floats(const float *from) { return (floats) * (const floats_unaligned *)from; }

/* The sums of four registers, each over its own lanes, always in the same order. */
INLINE four_floats sums_of(const floats *x) {
#if WIDTH == 32
  __m256 low = _mm256_hadd_ps((__m256)x[0], (__m256)x[1]), high = _mm256_hadd_ps((__m256)x[2], (__m256)x[3]);
  __m256 all = _mm256_hadd_ps(low, high);
  return (four_floats)_mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
#else
  floats a = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5) + __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7);
  floats b = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5) + __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
  return __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
#endif
}

/* At most a strip of rows: scores[row][key] = query[row] . key * scale. */
INLINE void multiply_keys(const Args *a, const Work *w, int row, const int rows, int fast) {
  const float *q = w->query + row * a->dim;
  (void)fast;
  for (int j = 0; j < BLOCK; j += 4) {
    floats sums[STRIP][4];
    for (int half = 0; half < 4; half += 2) {
      const float *one = w->key_rows[j + half], *two = w->key_rows[j + half + 1];
      floats first[STRIP], second[STRIP];
      EACH(int i = 0; i < rows; i++) first[i] = second[i] = (floats){0};
      for (int64_t d = 0; d < a->dim; d += REGISTER) {
        floats x = read_floats(one + d), y = read_floats(two + d);
        EACH(int i = 0; i < rows; i++) {
          floats here = *(const floats *)(q + i * a->dim + d);
          first[i] = fma_floats(first[i], here, x);
          second[i] = fma_floats(second[i], here, y);
        }
      }
      EACH(int i = 0; i < rows; i++) sums[i][half] = first[i], sums[i][half + 1] = second[i];
    }
    EACH(int i = 0; i < rows; i++) *(four_floats *)(w->scores + (row + i) * BLOCK + j) = sums_of(sums[i]) * a->scale;
  }
}

/* sums = sums * shrink + weights . values, for `rows` rows. */
INLINE void multiply_values(const Args *a, const Work *w, int row, const float *shrink, const int rows, int fast) {
  (void)fast;
  for (int64_t d = 0; d < a->value_dim; d += SIDE * REGISTER) {
    floats sums[STRIP][SIDE];
    EACH(int i = 0; i < rows; i++)
      EACH(int v = 0; v < SIDE; v++) sums[i][v] = ((floats *)(w->sums + (row + i) * a->value_dim + d))[v] * shrink[i];
    for (int j = 0; j < BLOCK; j++) {
      const float *value = w->value_rows[j] + d;
      floats here[SIDE];
      EACH(int v = 0; v < SIDE; v++) here[v] = read_floats(value + v * REGISTER);
      EACH(int i = 0; i < rows; i++) {
        floats weight = every_float(w->scores[(row + i) * BLOCK + j]);
        EACH(int v = 0; v < SIDE; v++) sums[i][v] = fma_floats(sums[i][v], weight, here[v]);
      }
    }
    EACH(int i = 0; i < rows; i++)
      EACH(int v = 0; v < SIDE; v++) ((floats *)(w->sums + (row + i) * a->value_dim + d))[v] = sums[i][v];
  }
}

/* Addresses of a block's keys or values as floats (codes without scales): in place, or widened into `wide`. */
static void load_rows(const void *data, const int64_t *places, const int64_t *ahead, int64_t dim, int bits, float *wide,
                      const float **rows) {
  for (int j = 0; j < BLOCK; j++) {
    fetch(data, ahead[j], dim, bits);
    rows[j] = bits == 32 ? (const float *)data + places[j] : wide + j * dim;
    for (int64_t d = 0; d < dim && bits != 32; d += LANES)
      *(vec *)(wide + j * dim + d) = load(data, places[j] + d, bits);
  }
}

static void load_block(const Args *a, Work *w, const Places *places, const Places *ahead, int bits) {
  load_rows(a->key, places->key, ahead->key, a->dim, kv_bits(a, bits), w->keys, w->key_rows);
  load_rows(a->value, places->value, ahead->value, a->value_dim, kv_bits(a, bits), w->values, w->value_rows);
}
