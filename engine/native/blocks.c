/* Splits blocks of GGUF files (ggml's `ggml-quants.c`) into codes, scales and offsets, like the torch version in
 * `engine/model/gguf/blocks.py`, whose comments describe the layouts. */

#include "vectors.h"

#define NEGATIVE 0x8000 /* the sign of a float16 */

/* Where the parts of the next block are written; NULL if the type does not have them. */
typedef struct {
  uint8_t *codes;
  uint16_t *scale, *offset;
  int8_t *steps;
  uint8_t *zeros;
} Parts;

INLINE uint16_t half_at(const uint8_t *block) {
  uint16_t half;
  memcpy(&half, block, 2);
  return half;
}

/* `count` bytes of 4-bit codes, the low halves of all before the high ones -> two adjacent codes per byte. */
INLINE void neighbours(const uint8_t *bytes, const int count, uint8_t *codes) {
  for (int i = 0; i < count / 2; i++) {
    uint8_t even = bytes[2 * i], odd = bytes[2 * i + 1];
    codes[i] = (uint8_t)((even & 15) | odd << 4);
    codes[count / 2 + i] = (uint8_t)(even >> 4 | (odd & 240));
  }
}

/* 16 bytes of low bits and 4 bytes of fifth bits -> 32 codes. */
INLINE void fives(const uint8_t *low, const uint8_t *high, uint8_t *codes) {
  uint32_t fifth;
  memcpy(&fifth, high, 4);
  for (int i = 0; i < 16; i++) {
    codes[i] = (uint8_t)((low[i] & 15) | (fifth >> i & 1) << 4);
    codes[16 + i] = (uint8_t)(low[i] >> 4 | (fifth >> (16 + i) & 1) << 4);
  }
}

/* The two float16 of a block of Q4_K or Q5_K, and the 6-bit steps and offsets of its 8 groups. */
INLINE void two_levels(const uint8_t *block, const Parts *to) {
  *to->scale = half_at(block), *to->offset = half_at(block + 2) ^ NEGATIVE;
  const uint8_t *first = block + 4, *second = block + 8, *low = block + 12;
  for (int i = 0; i < 4; i++) {
    to->steps[i] = (int8_t)(first[i] & 63), to->zeros[i] = second[i] & 63;
    to->steps[4 + i] = (int8_t)((low[i] & 15) | (first[i] >> 2 & 48));
    to->zeros[4 + i] = (uint8_t)(low[i] >> 4 | (second[i] >> 2 & 48));
  }
}

typedef void Split(const uint8_t *block, const Parts *to);

static void q4_0(const uint8_t *block, const Parts *to) {
  *to->scale = half_at(block);
  neighbours(block + 2, 16, to->codes);
}

static void q4_1(const uint8_t *block, const Parts *to) {
  *to->scale = half_at(block), *to->offset = half_at(block + 2);
  neighbours(block + 4, 16, to->codes);
}

static void q5_0(const uint8_t *block, const Parts *to) {
  *to->scale = half_at(block);
  fives(block + 6, block + 2, to->codes);
}

static void q5_1(const uint8_t *block, const Parts *to) {
  *to->scale = half_at(block), *to->offset = half_at(block + 2);
  fives(block + 8, block + 4, to->codes);
}

static void q8_0(const uint8_t *block, const Parts *to) {
  *to->scale = half_at(block);
  memcpy(to->codes, block + 2, 32);
}

static void q4_k(const uint8_t *block, const Parts *to) {
  two_levels(block, to);
  for (int i = 0; i < 128; i += 32) neighbours(block + 16 + i, 32, to->codes + i);
}

static void q5_k(const uint8_t *block, const Parts *to) {
  two_levels(block, to);
  const uint8_t *high = block + 16, *low = block + 48;
  for (int g = 0; g < 8; g += 2, low += 32)
    for (int i = 0; i < 32; i++) {
      to->codes[32 * g + i] = (uint8_t)((low[i] & 15) | (high[i] >> g & 1) << 4);
      to->codes[32 * g + 32 + i] = (uint8_t)(low[i] >> 4 | (high[i] >> (g + 1) & 1) << 4);
    }
}

static void q6_k(const uint8_t *block, const Parts *to) {
  *to->scale = half_at(block + 208);
  memcpy(to->steps, block + 192, 16);
  for (int half = 0; half < 2; half++) {
    const uint8_t *low = block + 64 * half, *high = block + 128 + 32 * half;
    uint8_t *codes = to->codes + 128 * half;
    for (int i = 0; i < 32; i++) {
      codes[i] = (uint8_t)((low[i] & 15) | (high[i] & 3) << 4);
      codes[32 + i] = (uint8_t)((low[32 + i] & 15) | (high[i] >> 2 & 3) << 4);
      codes[64 + i] = (uint8_t)(low[i] >> 4 | (high[i] >> 4 & 3) << 4);
      codes[96 + i] = (uint8_t)(low[32 + i] >> 4 | (high[i] >> 6) << 4);
    }
  }
}

static const struct {
  Split *split;
  int size, codes, groups; /* bytes per block, bytes of its codes, groups with a step */
} KINDS[] = {{q4_0, 18, 16, 0},  {q4_1, 20, 16, 0},  {q5_0, 22, 32, 0},   {q5_1, 24, 32, 0},
             {q8_0, 34, 32, 0}, {q4_k, 144, 128, 8}, {q5_k, 176, 256, 8}, {q6_k, 210, 256, 16}};

/* Split `count` blocks; `kind` is an index of `KINDS`. */
void pilotfish_blocks(const uint8_t *blocks, int64_t count, int64_t kind, uint8_t *codes, uint16_t *scale,
                      uint16_t *offset, int8_t *steps, uint8_t *zeros) {
  Split *split = KINDS[kind].split;
  for (int64_t i = 0; i < count; i++) {
    Parts to = {codes + i * KINDS[kind].codes, scale + i, offset ? offset + i : NULL,
                steps ? steps + i * KINDS[kind].groups : NULL, zeros ? zeros + i * KINDS[kind].groups : NULL};
    split(blocks + i * KINDS[kind].size, &to);
  }
}
