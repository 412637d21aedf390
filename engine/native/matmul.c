/* See matmul.h. A block of up to six rows meets a panel in registers: 24 vectors of sums, 4 of weights. While a panel
 * is multiplied the next one is fetched, so that blocks of rows beyond the first cost no waiting for memory. */

/* A product is rounded before it is added to, as in torch: then the bits are the same with any compiler. Sums of the
 * matrices themselves name the instruction. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#include "matmul.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define BLOCK 6                /* rows, at most */
#define VECTORS (PANEL / LANES)
#define LINE 64                /* bytes of a vector and of a cache line */
#define AHEAD 8192             /* bytes, where there is one block of rows and the processor's own foresight falls short */

/* sum + x * w for the G inputs of a step, in 16 outputs. */
#ifdef __AVX512VNNI__
INLINE vec step8(vec sum, int32_t x, const void *w) {
  return (vec)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(x), *(const __m512i *)w);
}
#else
INLINE vec step8(vec sum, int32_t x, const void *w) {
  ivec total = (ivec)sum;
  const int8_t *weights = w;
  for (int i = 0; i < LANES; i++)
    for (int g = 0; g < 4; g++) total[i] += (int32_t)((uint32_t)x >> (8 * g) & 255) * weights[4 * i + g];
  return (vec)total;
}
#endif

#ifdef __AVX512BF16__
INLINE vec step16(vec sum, int32_t x, const void *w) {
  return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(x), (__m512bh)*(const __m512i *)w);
}
#else
INLINE vec step16(vec sum, int32_t x, const void *w) {
  ivec pair = *(const ivec *)w;
  vec low = (vec)(pair << 16), high = (vec)(pair & (int32_t)0xffff0000);
  return sum + low * wide((bf16)x) + high * wide((bf16)((uint32_t)x >> 16));
}
#endif

INLINE vec step32(vec sum, int32_t x, const void *w) {
  float y;
  memcpy(&y, &x, 4);
#ifdef __AVX512F__
  return (vec)_mm512_fmadd_ps(_mm512_set1_ps(y), *(const __m512 *)w, (__m512)sum);
#else
  return sum + *(const vec *)w * y;
#endif
}

/* `rows` rows of `bytes` times one panel; `next` is what to fetch, `lines` of it in every step. */
INLINE void block(const char *x, int64_t bytes, const char *panel, const char *next, int lines, vec *sums,
                  const int rows, const int bits) {
  vec sum[BLOCK][VECTORS];
  EACH(int r = 0; r < rows; r++) EACH(int v = 0; v < VECTORS; v++) sum[r][v] = (vec){0};
  for (int64_t at = 0; at < bytes; at += 4, panel += VECTORS * LINE) {
    for (int i = 0; i < lines; i++, next += LINE) __builtin_prefetch(next, 0, 2);
    EACH(int r = 0; r < rows; r++) {
      int32_t few;
      memcpy(&few, x + r * bytes + at, 4);
      EACH(int v = 0; v < VECTORS; v++) {
        const void *w = panel + v * LINE;
        sum[r][v] = bits == 8 ? step8(sum[r][v], few, w) : bits == 16 ? step16(sum[r][v], few, w) : step32(sum[r][v], few, w);
      }
    }
  }
  EACH(int r = 0; r < rows; r++) EACH(int v = 0; v < VECTORS; v++) sums[r * VECTORS + v] = sum[r][v];
}

#define GROUP 64                                          /* inputs that share a scale in 4 bits */
#define GROUP_BYTES (GROUP / 8 * VECTORS * LINE + PANEL * 4)
#define BLOCK4 3 /* rows: there are sums of a group and sums of all */

/* The same in 4 bits, of `in` inputs; `sums` come out as floats. */
#ifdef __AVX512VNNI__
INLINE void block4(const Matrix *m, const uint8_t *x, const char *panel, const char *next, int lines, const float *offset,
                   vec *sums, const int rows) {
  const __m512i half = _mm512_set1_epi8(15);
  const __m512i levels = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)m->levels));
  vec total[BLOCK4][VECTORS];
  EACH(int r = 0; r < rows; r++) EACH(int v = 0; v < VECTORS; v++) total[r][v] = -*(const vec_unaligned *)(offset + v * LANES);
  for (int64_t first = 0; first < m->in; first += GROUP) {
    vec sum[BLOCK4][VECTORS];
    EACH(int r = 0; r < rows; r++) EACH(int v = 0; v < VECTORS; v++) sum[r][v] = (vec){0};
    for (int64_t i = first; i < first + GROUP; i += 8, panel += VECTORS * LINE) {
      for (int l = 0; l < lines; l++, next += LINE) __builtin_prefetch(next, 0, 2);
      EACH(int v = 0; v < VECTORS; v++) {
        __m512i both = *(const __m512i *)(panel + v * LINE);
        __m512i low = _mm512_shuffle_epi8(levels, _mm512_and_si512(both, half));
        __m512i high = _mm512_shuffle_epi8(levels, _mm512_and_si512(_mm512_srli_epi16(both, 4), half));
        EACH(int r = 0; r < rows; r++) {
          int32_t few[2];
          memcpy(few, x + r * m->in + i, 8);
          __m512i here = _mm512_dpbusd_epi32((__m512i)sum[r][v], _mm512_set1_epi32(few[0]), low);
          sum[r][v] = (vec)_mm512_dpbusd_epi32(here, _mm512_set1_epi32(few[1]), high);
        }
      }
    }
    EACH(int v = 0; v < VECTORS; v++) {
      vec worth = *(const vec *)(panel + v * LINE);
      EACH(int r = 0; r < rows; r++)
        total[r][v] = (vec)_mm512_fmadd_ps((__m512)__builtin_convertvector((ivec)sum[r][v], vec), (__m512)worth, (__m512)total[r][v]);
    }
    panel += PANEL * 4;
  }
  EACH(int r = 0; r < rows; r++) EACH(int v = 0; v < VECTORS; v++) sums[r * VECTORS + v] = total[r][v];
}

typedef void Block4(const Matrix *, const uint8_t *, const char *, const char *, int, const float *, vec *);
#define OF4(rows)                                                                                                    \
  static void block4_##rows(const Matrix *m, const uint8_t *x, const char *panel, const char *next, int lines,       \
                            const float *offset, vec *sums) {                                                        \
    block4(m, x, panel, next, lines, offset, sums, rows);                                                            \
  }
OF4(1) OF4(2) OF4(3)
static Block4 *const BLOCKS4[BLOCK4] = {block4_1, block4_2, block4_3};
#endif

typedef void Block(const char *, int64_t, const char *, const char *, int, vec *);
#define OF(rows, bits)                                                                                             \
  static void block_##rows##_##bits(const char *x, int64_t bytes, const char *panel, const char *next, int lines, \
                                    vec *sums) {                                                                  \
    block(x, bytes, panel, next, lines, sums, rows, bits);                                                        \
  }
#define ALL(bits) OF(1, bits) OF(2, bits) OF(3, bits) OF(4, bits) OF(5, bits) OF(6, bits)
#define NAMES(bits) {block_1_##bits, block_2_##bits, block_3_##bits, block_4_##bits, block_5_##bits, block_6_##bits}
ALL(8)
ALL(16)
ALL(32)
static Block *const BLOCKS[3][BLOCK] = {NAMES(8), NAMES(16), NAMES(32)};

/* One row's sums of a panel become its outputs from `first` on. */
INLINE void finish(const Matrix *m, const Product *p, const vec *sums, int64_t row, int64_t first) {
  int64_t count = m->out - first < PANEL ? m->out - first : PANEL;
  for (int64_t i = 0; i < count; i += LANES) {
    vec y = sums[i / LANES];
    if (m->bits == 8) {
      ivec whole = (ivec)y - *(const ivec_unaligned *)((const int32_t *)m->offset + first + i);
      y = __builtin_convertvector(whole, vec) * *(const vec_unaligned *)(m->scale + first + i) * p->step[row];
    }
    if (m->bits == 4) y = y * p->step[row];
    if (m->bias) y += *(const vec_unaligned *)(m->bias + first + i);
    store_some(p->out, row * m->out + first + i, y, p->bits, p->add, count - i);
  }
}

/* One block of rows against one panel. */
INLINE void meet(const Matrix *m, const Product *p, int64_t row, int64_t count, int64_t panel, const char *weights,
                 const char *next, int lines, vec *sums) {
  (void)panel; /* of no use where there is nothing in 4 bits */
  int64_t bytes = m->bits == 4 ? m->in : m->in * m->bits / 8; /* of a row */
  const char *rows = (const char *)p->in + row * bytes;
#ifdef __AVX512VNNI__
  if (m->bits == 4) {
    const float *offset = (const float *)m->offset + panel * PANEL;
    BLOCKS4[count - 1](m, (const uint8_t *)rows, weights, next, lines, offset, sums);
    return;
  }
#endif
  BLOCKS[m->bits == 8 ? 0 : m->bits == 16 ? 1 : 2][count - 1](rows, bytes, weights, next, lines, sums);
}

void multiply_share(const Matrix *m, const Product *p, int me, int threads) {
  int64_t panels = (m->out + PANEL - 1) / PANEL;
  int64_t size = m->bits == 4 ? m->in / GROUP * GROUP_BYTES : m->in * m->bits / 8 * PANEL;
  int64_t most = m->bits == 4 ? BLOCK4 : BLOCK, parts = (p->rows + most - 1) / most;
  int lines = parts == 1 ? VECTORS : parts <= 3 ? VECTORS / 2 : 1;
  for (int64_t panel = panels * me / threads; panel < panels * (me + 1) / threads; panel++) {
    const char *weights = (const char *)m->panels + panel * size;
    for (int64_t part = 0; part < parts; part++) {
      int64_t first = p->rows * part / parts, count = p->rows * (part + 1) / parts - first;
      const char *next = parts == 1 ? weights + AHEAD : weights + size + part * lines * (size / VECTORS);
      vec sums[BLOCK * VECTORS];
      meet(m, p, first, count, panel, weights, next, lines, sums);
      for (int64_t r = 0; r < count; r++) finish(m, p, sums + r * VECTORS, first + r, panel * PANEL);
    }
  }
}

/* Whether this was compiled for a processor on which it is worth having, for weights of so many bits. */
int pilotfish_multiplies(int bits) {
#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
  return bits == 4 || bits == 8 || bits == 16 || bits == 32;
#elif defined(__AVX512VNNI__)
  return bits == 4 || bits == 8 || bits == 32;
#elif defined(__AVX512F__)
  return bits == 32;
#else
  return 0 * bits;
#endif
}

void pilotfish_multiply(const Matrix *m, const Product *p, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int me = 0; me < threads; me++) multiply_share(m, p, me, threads);
}
