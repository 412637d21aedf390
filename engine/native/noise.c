/* Philox4x32-10 (Salmon et al. 2011, section 3.3): the numbers of `engine/sampling/noise.py`. All ten rounds run in
 * registers, where torch writes tensors of 64-bit numbers to memory seven times per round. Compilers vectorise these
 * loops. */

#include <stdint.h>

#define ROUNDS 10

/* 52 random bits as the middle of one of 2^52 equal cells of (0, 1): exact in a double. */
static inline double open_unit(uint32_t high, uint32_t low) {
  uint64_t bits = (uint64_t)high << 20 | low >> 12;
  return ((double)(int64_t)bits + 0.5) * 0x1p-52;
}

/* The numbers of one Philox call, for the tokens 2 * pair and 2 * pair + 1 of a row. */
static inline void two(uint64_t seed, uint64_t position, uint64_t stream, uint64_t pair, double *even, double *odd) {
  uint32_t c0 = (uint32_t)pair, c1 = (uint32_t)position, c2 = (uint32_t)stream, c3 = 1;
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int i = 0; i < ROUNDS; i++) {
    uint64_t left = (uint64_t)c0 * 0xd2511f53u, right = (uint64_t)c2 * 0xcd9e8d57u;
    c0 = (uint32_t)(right >> 32) ^ c1 ^ k0;
    c1 = (uint32_t)right;
    c2 = (uint32_t)(left >> 32) ^ c3 ^ k1;
    c3 = (uint32_t)left;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  *even = open_unit(c0, c1);
  *odd = open_unit(c2, c3);
}

/* Numbers in (0, 1) for the first 2 * pairs tokens of each row: out [rows, 2 * pairs]. */
void pilotfish_uniform(const int64_t *seed, const int64_t *position, const int64_t *stream, int64_t rows,
                       int64_t pairs, double *out) {
  for (int64_t row = 0; row < rows; row++) {
    uint64_t of_row = (uint64_t)seed[row], at = (uint64_t)position[row], use = (uint64_t)stream[row];
    double *to = out + row * 2 * pairs;
    for (int64_t pair = 0; pair < pairs; pair++) two(of_row, at, use, (uint64_t)pair, to + 2 * pair, to + 2 * pair + 1);
  }
}

/* The same for the tokens [rows, count] only: out [rows, count]. */
void pilotfish_uniform_at(const int64_t *seed, const int64_t *position, const int64_t *stream, const int64_t *tokens,
                          int64_t rows, int64_t count, double *out) {
  for (int64_t row = 0; row < rows; row++) {
    uint64_t of_row = (uint64_t)seed[row], at = (uint64_t)position[row], use = (uint64_t)stream[row];
    for (int64_t i = row * count; i < (row + 1) * count; i++) {
      double even, odd;
      two(of_row, at, use, (uint64_t)tokens[i] / 2, &even, &odd);
      out[i] = tokens[i] % 2 ? odd : even;
    }
  }
}
