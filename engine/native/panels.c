/* Packs matrices into panels (matmul.h) of `width` outputs: `count` rows, of which the first is output `first`. The
 * caller allocates whole panels. A row is treated as words of 4 bytes of any type. */

#include "vectors.h"

#define TILE 64 /* words of a row that are moved at once, so that their part of a panel stays in the L1 cache */

typedef uint32_t eight __attribute__((vector_size(32)));
typedef uint32_t eight_unaligned __attribute__((vector_size(32), aligned(4)));

#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define PAIRS(a, b, low, high)                   \
  eight low = MIX(a, b, 0, 8, 1, 9, 4, 12, 5, 13); \
  eight high = MIX(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define FOURS(a, b, low, high)                   \
  eight low = MIX(a, b, 0, 1, 8, 9, 4, 5, 12, 13); \
  eight high = MIX(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define HALVES(a, b, at)                                                    \
  *(eight_unaligned *)(to + (at) * width) = MIX(a, b, 0, 1, 2, 3, 8, 9, 10, 11); \
  *(eight_unaligned *)(to + ((at) + 4) * width) = MIX(a, b, 4, 5, 6, 7, 12, 13, 14, 15)

/* Eight words of eight rows; `stride` is from row to row, in bytes. */
INLINE void transpose8(const char *rows, int64_t stride, uint32_t *to, int64_t width) {
  eight row[8];
  for (int r = 0; r < 8; r++) memcpy(&row[r], rows + r * stride, sizeof(eight));
  PAIRS(row[0], row[1], a0, a1);
  PAIRS(row[2], row[3], b0, b1);
  PAIRS(row[4], row[5], c0, c1);
  PAIRS(row[6], row[7], d0, d1);
  FOURS(a0, b0, p0, p1);
  FOURS(a1, b1, p2, p3);
  FOURS(c0, d0, q0, q1);
  FOURS(c1, d1, q2, q3);
  HALVES(p0, q0, 0);
  HALVES(p1, q1, 1);
  HALVES(p2, q2, 2);
  HALVES(p3, q3, 3);
}

/* `count` words of `rows` rows: word i of row k goes to to[i * width + k]. */
INLINE void transpose(const char *from, int64_t stride, int64_t rows, int64_t count, uint32_t *to, int64_t width) {
  int64_t r = 0, even = count / 8 * 8;
  for (; r + 8 <= rows; r += 8)
    for (int64_t i = 0; i < even; i += 8) transpose8(from + r * stride + 4 * i, stride, to + i * width + r, width);
  for (int64_t k = 0; k < rows; k++)
    for (int64_t i = k < r ? even : 0; i < count; i++) memcpy(to + i * width + k, from + k * stride + 4 * i, 4);
}

void pilotfish_panels(const char *rows, int64_t count, int64_t words, int64_t width, int64_t first, uint32_t *panels) {
  for (int64_t row = 0, stop; row < count; row = stop) {
    stop = less(count, row + width - (first + row) % width); /* the end of this panel */
    uint32_t *panel = panels + (first + row) / width * width * words + (first + row) % width;
    for (int64_t at = 0; at < words; at += TILE) {
      int64_t here = less(TILE, words - at);
      transpose(rows + 4 * (row * words + at), 4 * words, stop - row, here, panel + at * width, width);
    }
  }
}

/* Spread four 4-bit codes over the low halves of 4 bytes. */
INLINE uint32_t apart(uint32_t x) {
  x = (x | x << 8) & 0x00ff00ff;
  return (x | x << 4) & 0x0f0f0f0f;
}

#define WIDEST 64 /* maximum outputs per panel */

/* Convert words of codes (4 bits: two per byte, else one) to words of a panel. Each byte of `from` is the number added
 * to codes of 8 bits. */
INLINE void codes_word(const uint32_t *codes, int64_t bits, uint32_t from, uint32_t *to) {
  const uint32_t halves = 0x0f0f0f0f;
  if (bits == 8) {
    *to = *codes ^ from;
  } else if (bits == 4) {
    *to = apart(*codes & 0xffff) | apart(*codes >> 16) << 4;
  } else if (bits == 6) {
    for (int s = 0; s < 3; s++) to[s] = codes[s] | (codes[3] >> 2 * s & 0x03030303) << 6;
  } else {
    *to = 0;
    for (int q = 0; q < 8; q++) *to |= (codes[q] >> 4 & 0x01010101) << q;
    for (int q = 0; q < 8; q += 2) to[1 + q / 2] = (codes[q] & halves) | (codes[q + 1] & halves) << 4;
  }
}

/* Pack codes of 4, 5, 6 or 8 bits in groups of `words` words (`Groups` in matmul.h). Panels have `block_head` bytes
 * before every block of `block` groups and `group_head` before every group, which the caller writes. `from` is 128 if
 * codes of 8 bits are stored plus 128, else 0. */
void pilotfish_codes(const char *rows, int64_t count, int64_t groups, int64_t words, int64_t bits, int64_t from,
                     int64_t width, int64_t first, int64_t block, int64_t block_head, int64_t group_head, char *panels) {
  const int64_t each = bits == 5 ? 8 : bits == 6 ? 4 : 1, made = bits == 5 ? 5 : bits == 6 ? 3 : 1; /* words per unit */
  const int64_t tile = TILE / each;
  const int64_t packed = words / each * made, stride = 4 * groups * words;
  const int64_t size = groups / block * block_head + groups * (group_head + 4 * packed * width);
  for (int64_t row = 0, stop; row < count; row = stop) {
    stop = less(count, row + width - (first + row) % width);
    char *panel = panels + (first + row) / width * size + (first + row) % width * 4;
    for (int64_t g = 0; g < groups; g++) {
      const char *codes = rows + row * stride + 4 * g * words;
      char *to = panel + (g / block + 1) * block_head + (g + 1) * group_head + 4 * g * packed * width;
      for (int64_t at = 0; at < words; at += tile * each, codes += 4 * tile * each, to += 4 * tile * made * width) {
        int64_t here = less(tile, (words - at) / each);
        uint32_t own[WIDEST][TILE], plain[TILE];
        for (int64_t r = 0; r < stop - row; r++) {
          memcpy(plain, codes + r * stride, (size_t)(here * each) * 4);
          for (int64_t i = 0; i < here; i++)
            codes_word(plain + i * each, bits, (uint32_t)from * 0x01010101, own[r] + i * made);
        }
        transpose((const char *)own, 4 * TILE, stop - row, here * made, (uint32_t *)to, width);
      }
    }
  }
}

/* Pack scales, steps or zeros of `count` outputs, [count, n] numbers of `size` bytes, into panels of `panel` bytes.
 * Number g is written g / per blocks of `block` bytes and g % per groups of `group` bytes after `panels`. Floats are in
 * the order of outputs; byte 4 i + v belongs to output v width / 4 + i. */
void pilotfish_numbers(const char *numbers, int64_t count, int64_t n, int64_t size, int64_t width, int64_t per,
                       int64_t block, int64_t group, char *panels, int64_t panel) {
  for (int64_t row = 0; row < count; row++) {
    int64_t w = row % width, place = size > 1 ? w * size : w % (width / 4) * 4 + w / (width / 4);
    char *to = panels + row / width * panel + place;
    const char *from = numbers + row * n * size;
    for (int64_t g = 0; g < n; g++, from += size) {
      char *at = to + g / per * block + g % per * group;
      if (size == 1) *at = *from;
      else if (size == 2) memcpy(at, from, 2);
      else memcpy(at, from, 4);
    }
  }
}
