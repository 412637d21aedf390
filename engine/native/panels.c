/* Matrices on their way into panels (matmul.h): `count` rows, of which the first is output `first`, to panels of `width`
 * outputs. Whoever calls has room for whole panels. A row is seen as words of 4 bytes, whatever they hold. */

#include "vectors.h"

#define TILE 64 /* words of a row that are moved at once: the part of a panel that they go to stays in the first cache */
#define STEPS 8 /* words of a group in 4 bits; one more word is its scale */

INLINE int64_t less(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int32_t sum_of_bytes(const uint32_t *words, int64_t count) {
  const int8_t *bytes = (const int8_t *)words;
  int32_t sum = 0;
  for (int64_t i = 0; i < 4 * count; i++) sum += bytes[i];
  return sum;
}

/* `offset` [outputs] is for int8 (see Matrix), else NULL. */
void pilotfish_panels(const char *rows, int64_t count, int64_t words, int64_t width, int64_t first, uint32_t *panels,
                      int32_t *offset) {
  uint32_t few[TILE];
  for (int64_t row = 0, stop; row < count; row = stop) {
    stop = less(count, row + width - (first + row) % width); /* as far as this panel goes */
    uint32_t *panel = panels + (first + row) / width * width * words;
    for (int64_t r = row; offset && r < stop; r++) offset[first + r] = 0;
    for (int64_t at = 0; at < words; at += TILE) {
      int64_t here = less(TILE, words - at);
      for (int64_t r = row; r < stop; r++) {
        uint32_t *to = panel + at * width + (first + r) % width;
        memcpy(few, rows + 4 * (r * words + at), (size_t)(4 * here));
        for (int64_t i = 0; i < here; i++) to[i * width] = few[i];
        if (offset) offset[first + r] += 128 * sum_of_bytes(few, here);
      }
    }
  }
}

/* The halves 0 to 3 of 16 bits to the low halves of 4 bytes. */
INLINE uint32_t apart(uint32_t x) {
  x = (x | x << 8) & 0x00ff00ff;
  return (x | x << 4) & 0x0f0f0f0f;
}

/* In 4 bits: rows are [inputs / 2] bytes, the first of two inputs low; `scale` is [count, groups]. */
void pilotfish_panels4(const char *rows, const float *scale, int64_t count, int64_t groups, int64_t width, int64_t first,
                       const int8_t *levels, uint32_t *panels, float *offset) {
  int16_t pair[256];
  for (int i = 0; i < 256; i++) pair[i] = (int16_t)(levels[i & 15] + levels[i >> 4]);
  for (int64_t row = 0, stop; row < count; row = stop) {
    stop = less(count, row + width - (first + row) % width);
    uint32_t *panel = panels + (first + row) / width * width * groups * (STEPS + 1);
    double total[stop - row];
    for (int64_t r = row; r < stop; r++) total[r - row] = 0;
    for (int64_t g = 0; g < groups; g++, panel += width * (STEPS + 1)) {
      for (int64_t r = row; r < stop; r++) {
        uint32_t few[STEPS], *to = panel + (first + r) % width;
        int sum = 0;
        memcpy(few, rows + 4 * STEPS * (r * groups + g), sizeof few);
        for (int i = 0; i < STEPS; i++) {
          to[i * width] = apart(few[i] & 0xffff) | apart(few[i] >> 16) << 4;
          for (int b = 0; b < 32; b += 8) sum += pair[few[i] >> b & 255];
        }
        memcpy(to + STEPS * width, scale + r * groups + g, 4);
        total[r - row] += (double)scale[r * groups + g] * sum;
      }
    }
    for (int64_t r = row; r < stop; r++) offset[first + r] = (float)(128 * total[r - row]);
  }
}
