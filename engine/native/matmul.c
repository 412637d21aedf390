/* See matmul.h. A block of rows is multiplied by a panel in registers: four of sums per row, the others for operands.
 * While a panel is multiplied the next one is prefetched, so that further blocks of rows do not wait for memory. */

#include "exact.h" /* float matrix sums use FMA intrinsics instead */
#include "matmul.h"
#include "pool.h"

#include "registers.h"

#define BLOCK MATMUL_ROWS
#define VECTORS 4              /* registers per panel */
#define PANEL WIDTH            /* outputs */
#define STEP (VECTORS * WIDTH) /* bytes of a panel for the inputs that share 4 bytes */
#define LINE 64                /* bytes of a cache line */
#define LINES (STEP / LINE)    /* per step */
/* Minimum blocks of rows for which codes are unpacked once for all blocks: 5 and 6 bits take longer than 4 where no
 * instruction sums four products (AVX2, 8 rows: 15 % less time). */
#define UNPACKS(bits) (WIDE_ROWS && (bits) > 4 ? 2 : 6)
#define AHEAD 8192             /* prefetch distance in bytes for one block of rows: hardware prefetches too late */

/* `rows` rows of `steps` steps times one panel; a step of a row has `fed` bytes. `next` is prefetched, `lines` cache
 * lines per step. */
INLINE void block(const char *x, int64_t steps, const char *panel, const char *next, int lines, void *sums,
                  const int rows, const int bits) {
  const int64_t fed = bits == 16 ? FED16 : 4, stride = steps * fed;
  ints sum[BLOCK][VECTORS];
  EACH(int r = 0; r < rows; r++) EACH(int v = 0; v < VECTORS; v++) sum[r][v] = (ints){0};
  for (int64_t s = 0; s < steps; s++, panel += STEP, x += fed) {
    for (int i = 0; i < lines; i++, next += LINE) __builtin_prefetch(next, 0, 2);
    EACH(int v = 0; v < VECTORS; v++) {
      const void *at = panel + v * WIDTH;
      if (bits == 16) {
        ints w = *(const ints *)at;
        EACH(int r = 0; r < rows; r++) sum[r][v] = (ints)two_products((floats)sum[r][v], w, x + r * stride);
      } else {
        floats w = *(const floats *)at;
        EACH(int r = 0; r < rows; r++)
          sum[r][v] = (ints)fma_floats((floats)sum[r][v], w, every_float(one_float(x + r * stride)));
      }
    }
  }
  EACH(int r = 0; r < rows; r++) EACH(int v = 0; v < VECTORS; v++) ((ints *)sums)[r * VECTORS + v] = sum[r][v];
}

#include "groups.h"

typedef void Block(const char *, int64_t, const char *, const char *, int, void *);
#define OF(rows, bits)                                                                                             \
  static void block_##rows##_##bits(const char *x, int64_t steps, const char *panel, const char *next, int lines, \
                                    void *sums) {                                                                 \
    block(x, steps, panel, next, lines, sums, rows, bits);                                                        \
  }

#define OF_GROUPS(rows, bits)                                                                                         \
  static void groups_##rows##_##bits(const Matrix *m, const char *x, const char *panel, int64_t ahead, int lines,     \
                                     void *sums) {                                                                    \
    block_of_groups(m, x, panel, ahead, lines, sums, rows, bits);                                                     \
  }

#define UP_TO_2(of, bits) of(1, bits) of(2, bits)
#define UP_TO_3(of, bits) UP_TO_2(of, bits) of(3, bits)
#define UP_TO_6(of, bits) UP_TO_3(of, bits) of(4, bits) of(5, bits) of(6, bits)
#define NAMES_2(name, bits) name##_1_##bits, name##_2_##bits
#define NAMES_3(name, bits) NAMES_2(name, bits), name##_3_##bits
#define NAMES_6(name, bits) NAMES_3(name, bits), name##_4_##bits, name##_5_##bits, name##_6_##bits
#if BLOCK == 6
#define FLOATS UP_TO_6
#define FLOATS_NAMES NAMES_6
#elif BLOCK == 3
#define FLOATS UP_TO_3
#define FLOATS_NAMES NAMES_3
#else
#define FLOATS UP_TO_2
#define FLOATS_NAMES NAMES_2
#endif
#if BLOCK < 3
#define CODES UP_TO_2
#define CODES_NAMES NAMES_2
#else
#define CODES UP_TO_3
#define CODES_NAMES NAMES_3
#endif
FLOATS(OF, 16)
FLOATS(OF, 32)
CODES(OF_GROUPS, 4)
CODES(OF_GROUPS, 5)
CODES(OF_GROUPS, 6)
CODES(OF_GROUPS, 7) /* UNPACKED */
CODES(OF_GROUPS, 8)
static Block *const BLOCKS[][BLOCK] = {{FLOATS_NAMES(block, 16)}, {FLOATS_NAMES(block, 32)}};
static BlockOfGroups *const BLOCKS_OF_GROUPS[][ROWS] = {{CODES_NAMES(groups, 4)}, {CODES_NAMES(groups, 5)},
                                                        {CODES_NAMES(groups, 6)}, {CODES_NAMES(groups, 7)},
                                                        {CODES_NAMES(groups, 8)}};

/* For float weights. */
static int fed_per_step(const Matrix *m) { return m->bits == 16 ? FED16 : 4; }
static int64_t steps_of(const Matrix *m) { return m->in / (32 / m->bits); }

int64_t fed_bytes(const Matrix *m) { return m->groups.size ? fed_groups(m) : steps_of(m) * fed_per_step(m); }

int fed_as_is(const Matrix *m) { return !m->groups.size && fed_per_step(m) == 4; }

int fed_alike(const Matrix *a, const Matrix *b) {
  int splits_alike = SPLIT(a->bits) == SPLIT(b->bits);
  return a->groups.size == b->groups.size && a->order == b->order && (a->groups.size ? splits_alike : a->bits == b->bits);
}

void feed(const Matrix *m, const void *row, void *to) {
  const uint32_t *from = row;
  uint32_t *two = to;
  if (m->groups.size) {
    feed_groups(m, row, to);
  } else if (fed_as_is(m)) {
    if (to != row) memcpy(to, row, (size_t)fed_bytes(m));
  } else {
    for (int64_t s = 0; s < steps_of(m); s++) two[2 * s] = from[s] << 16, two[2 * s + 1] = from[s] & 0xffff0000;
  }
}

/* Write a row's sums of a panel to its outputs from `first`. */
INLINE void finish(const Matrix *m, const Product *p, const vec *sums, int64_t row, int64_t first) {
  int64_t count = m->out - first < PANEL ? m->out - first : PANEL;
  for (int64_t i = 0; i < count; i += LANES) {
    vec y = sums[i / LANES];
    if (m->groups.size) y = y * p->step[row];
    if (m->bias) y += *(const vec_unaligned *)(m->bias + first + i);
    store_some(p->out, row * p->stride + first + i, y, p->bits, p->add, count - i);
  }
}

/* One block of rows times one panel, whose codes have `bits`. */
INLINE void meet(const Matrix *m, const Product *p, int64_t row, int64_t count, const char *weights, int64_t bits,
                 const char *next, int lines, void *sums) {
  const char *rows = (const char *)p->in + row * fed_bytes(m);
  if (m->groups.size)
    BLOCKS_OF_GROUPS[bits - 4][count - 1](m, rows, weights, next - weights, lines, sums);
  else
    BLOCKS[m->bits == 32][count - 1](rows, steps_of(m), weights, next, lines, sums);
}

int64_t matmul_panels(const Matrix *m) { return (m->out + PANEL - 1) / PANEL; }

static void unpack_panel(const Matrix *m, const char *panel, char *to) {
  m->bits == 4 ? unpack(m, panel, to, 4) : m->bits == 5 ? unpack(m, panel, to, 5) : unpack(m, panel, to, 6);
}

void multiply_panels(const Matrix *m, const Product *p, int64_t first, int64_t last) {
  int64_t size = m->groups.size ? panel_of_groups(m) : m->in * m->bits / 8 * PANEL;
  int64_t most = m->groups.size ? ROWS : BLOCK, parts = (p->rows + most - 1) / most;
  int lines = parts == 1 ? LINES : parts <= 3 ? (LINES + 1) / 2 : 1;
  const int unpacks = m->groups.size && m->bits < 8 && parts >= UNPACKS(m->bits);
  char unpacked[unpacks ? unpacked_panel(m) : 64] __attribute__((aligned(64)));
  for (int64_t panel = first; panel < last; panel++) {
    const char *weights = (const char *)m->panels + panel * size;
    if (unpacks) unpack_panel(m, weights, unpacked);
    for (int64_t part = 0; part < parts; part++) {
      int64_t row = p->rows * part / parts, count = p->rows * (part + 1) / parts - row;
      int64_t apart = m->groups.size ? LINE : size / LINES; /* consecutive lines of a step, or parts of the panel */
      const char *next = parts == 1 ? weights + AHEAD : weights + size + part * lines * apart;
      vec sums[BLOCK * PANEL / LANES];
      if (unpacks)
        meet(m, p, row, count, unpacked, UNPACKED, unpacked, 0, sums);
      else
        meet(m, p, row, count, weights, m->bits, next, lines, sums);
      for (int64_t r = 0; r < count; r++) finish(m, p, sums + r * (PANEL / LANES), row + r, panel * PANEL);
    }
  }
}

/* The number of outputs per panel, for packing. */
int pilotfish_panel(void) { return PANEL; }

/* The number added to 8-bit codes in panels. */
int pilotfish_codes_from(void) { return CODES_FROM(8); }

/* The instructions that multiply codes, and bfloat16 weights. */
const char *pilotfish_integer_path(void) { return INTEGER_PATH; }
const char *pilotfish_bfloat16_path(void) { return BFLOAT16_PATH; }

#define TILE 128        /* maximum rows per piece: a panel times a long prompt takes milliseconds */
#define PIECE (1 << 15) /* minimum bytes of weights times rows per piece: less costs no more than its start */

typedef struct {
  const Matrix *m;  /* one, or several of the same form */
  const Product *p; /* rows and products of the first; those of the others follow contiguously */
  int64_t tiles, panels, pieces; /* per matrix; per piece; per matrix */
} Stage;

/* Tiles of rows that use the same panels are adjacent, so that the panels stay in a cache. */
static void multiply_piece(const void *stage, int64_t piece, int worker) {
  const Stage *s = stage;
  const Matrix *m = s->m + piece / s->pieces;
  int64_t before = piece / s->pieces * s->p->rows;
  Product p = *s->p;
  piece %= s->pieces;
  int64_t tile = piece % s->tiles, first = p.rows * tile / s->tiles, panel = piece / s->tiles * s->panels;
  int64_t end = panel + s->panels, all = matmul_panels(m);
  p.in = (const char *)p.in + (before + first) * fed_bytes(m);
  p.out = (char *)p.out + (before + first) * p.stride * (p.bits / 8);
  p.step = p.step ? p.step + before + first : NULL;
  p.rows = p.rows * (tile + 1) / s->tiles - first;
  multiply_panels(m, &p, panel, end < all ? end : all);
  (void)worker;
}

static void multiply_several(const Matrix *m, int64_t count, const Product *p) {
  int64_t bytes = m->in * m->bits / 8 * PANEL * p->rows;
  Stage s = {m, p, (p->rows + TILE - 1) / TILE, bytes > 0 && bytes < PIECE ? PIECE / bytes : 1, 0};
  s.pieces = (matmul_panels(m) + s.panels - 1) / s.panels * s.tiles;
  pool_run(multiply_piece, &s, count * s.pieces);
}

void multiply_together(const Matrix *m, const Product *p) { multiply_several(m, 1, p); }

double matmul_work(const Matrix *m, int64_t rows) {
  return (double)m->out * (double)m->in * (double)m->bits / 8 * (1 + (double)rows / 4);
}

/* Multiply `count` matrices of one form, each by its own `p->rows` rows. `p->in` is dense, [count, rows, matrix.in]:
 * int16 for codes, else of the type of the weights; `p->out` is [count, rows, matrix.out]. Returns 0, or 1 if an
 * allocation failed. */
int pilotfish_multiply(const Matrix *m, int64_t count, const Product *p, int threads) {
  Product fed = *p;
  int64_t wide = fed_bytes(m), narrow = m->bits <= 8 ? m->in * 2 : m->in * m->bits / 8;
  void *own = NULL;
  if (!fed_as_is(m)) {
    own = malloc((size_t)(wide * p->rows * count));
    if (!own) return 1;
    for (int64_t r = 0; r < p->rows * count; r++) feed(m, (const char *)p->in + r * narrow, (char *)own + r * wide);
    fed.in = own;
  }
  pool_enter(threads);
  multiply_several(m, count, &fed);
  pool_leave(matmul_work(m, p->rows) * (double)count);
  free(own);
  return 0;
}
