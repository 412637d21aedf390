/* Codes in groups against a block of rows (`Groups` in matmul.h). Part of matmul.c.
 *
 * A fed row is [in] int8 and then, for each group, the sum of its inputs as int32: what an offset of the group is
 * multiplied by. A code whose zero is not 0 takes that many times the sum away before the first product, in integers, so
 * that the sums of a group are exact. Floats are multiplied, rounded, and then added, on every processor: results are the
 * same bits on all. */

/* Inputs whose codes lie together, and how many steps they take. */
#define INPUTS(bits) ((bits) == 8 ? 4 : (bits) == 6 ? 16 : (bits) == 5 ? 32 : 8)
#define STEPS(bits) (INPUTS(bits) * (bits) / 32)

INLINE int64_t head_of_block(const Groups *g) { return (1 + g->has_offset) * (g->kind == FLOAT32 ? 4 : 2) * PANEL; }
INLINE int64_t head_of_group(const Groups *g) { return (g->has_steps + g->has_zeros) * PANEL; }

/* Bytes of a panel. */
INLINE int64_t panel_of_groups(const Matrix *m) {
  const Groups *g = &m->groups;
  int64_t groups = m->in / g->size, each = head_of_group(g) + g->size * m->bits / 8 * PANEL;
  return groups / g->block * head_of_block(g) + groups * each;
}

INLINE void feed_groups(const Matrix *m, const uint8_t *row, int8_t *to) {
  int8_t *at = to;
  char *sums = (char *)to + m->in;
  if (m->order)
    for (int64_t i = 0; i < m->in; i++) to[i] = (int8_t)(row[m->order[i]] ^ 0x80);
  else
    for (int64_t i = 0; i < m->in; i++) to[i] = (int8_t)(row[i] ^ 0x80);
  for (int64_t i = 0; i < m->in; i += m->groups.size, sums += 4) {
    int32_t sum = 0;
    for (int64_t k = 0; k < m->groups.size; k++) sum += *at++;
    memcpy(sums, &sum, 4);
  }
}

/* The v-th register of a panel's numbers. */
INLINE floats numbers_of(const char *at, int v, int kind) {
  if (kind == FLOAT32) return *(const floats *)(at + v * WIDTH);
  return kind == FLOAT16 ? float16s(at + v * (WIDTH / 2)) : bfloat16s(at + v * (WIDTH / 2));
}

/* The v-th register of a panel's bytes: of every 4 bytes the v-th, as a number with a sign or without. */
INLINE floats small_numbers_of(const char *at, int v, const int is_signed) {
  ints left = *(const ints *)at << (24 - 8 * v);
  return __builtin_convertvector(is_signed ? left >> 24 : (left >> 24) & 255, floats);
}

typedef struct {
  floats step[VECTORS], offset[VECTORS];
} Worth;

/* What a group's codes are worth; `block` and `group` are where their heads lie. */
INLINE void worth_of(const Groups *g, const char *block, const char *group, Worth *w, const int bits) {
  const char *zeros = group + g->has_steps * PANEL;
  EACH(int v = 0; v < VECTORS; v++) {
    w->step[v] = numbers_of(block, v, g->kind);
    if (g->has_steps) w->step[v] *= small_numbers_of(group, v, 1);
  }
  if (g->has_offset)
    EACH(int v = 0; v < VECTORS; v++) w->offset[v] = numbers_of(block + head_of_block(g) / 2, v, g->kind);
  else
    EACH(int v = 0; v < VECTORS; v++) w->offset[v] = -w->step[v];
  if (g->has_zeros)
    EACH(int v = 0; v < VECTORS; v++) w->offset[v] *= small_numbers_of(zeros, v, bits == 8);
}

/* A register at `at`, and the bits of each byte from `up` upwards, without what its neighbour hands down. */
INLINE chars codes_at(const char *at) { return *(const chars *)at; }
INLINE chars above(chars x, const int up) { return (chars)((ushorts)x >> up) & (char)(255 >> up); }

/* Eight codes in each 32 bits: the p-th two registers of those that lie at `at` together. */
INLINE void codes_of(const char *at, const int p, const int bits, chars *first, chars *last) {
  if (bits == 6) {
    chars a = codes_at(at), b = codes_at(at + STEP), c = codes_at(at + 2 * STEP);
    chars spread = above(a, 6) | ((chars)((ushorts)b >> 4) & 12) | ((chars)((ushorts)c >> 2) & 48);
    *first = (p ? c : a) & 63, *last = p ? spread : b & 63;
    return;
  }
  chars both = codes_at(at + (p + (bits == 5)) * STEP);
  *first = both & 15, *last = above(both, 4);
  if (bits == 5) {
    ushorts fifth = (ushorts)codes_at(at); /* bit q of a byte is of its q-th code */
    *first |= (chars)(p > 2 ? fifth >> (2 * p - 4) : fifth << (4 - 2 * p)) & 16;
    *last |= (chars)(p > 1 ? fifth >> (2 * p - 3) : fifth << (3 - 2 * p)) & 16;
  }
}

INLINE int32_t sum_of_inputs(const char *x, int64_t group) {
  int32_t sum;
  memcpy(&sum, x + group * 4, 4);
  return sum;
}

/* `ahead` is from what is read to what is fetched: `lines` of every step. `sums` come out as floats. */
INLINE void block_of_groups(const Matrix *m, const char *x, const char *panel, int64_t ahead, int lines, void *sums,
                            const int rows, const int bits) {
  const Groups *g = &m->groups;
  const int64_t stride = fed_bytes(m), groups = m->in / g->size;
  const int has_offset = g->has_offset || g->has_zeros;
  const int from = bits == 8 ? CODES_FROM(8) : has_offset ? 0 : 1 << (bits - 1);
  const char *plain = x + m->in, *block = panel;
  floats total[BLOCK][VECTORS];
  EACH(int r = 0; r < rows; r++) EACH(int v = 0; v < VECTORS; v++) total[r][v] = (floats){0};
  for (int64_t i = 0, of_block = 0; i < groups; i++) {
    if (!of_block) {
      for (int64_t l = 0; l < head_of_block(g); l += LINE) __builtin_prefetch(panel + ahead + l, 0, 2);
      block = panel, panel += head_of_block(g), of_block = g->block;
    }
    of_block--;
    const char *head = panel;
    panel += head_of_group(g);
    ints sum[BLOCK][VECTORS];
    EACH(int r = 0; r < rows; r++) {
      ints start = every(-from * sum_of_inputs(plain + r * stride, i));
      EACH(int v = 0; v < VECTORS; v++) sum[r][v] = start;
    }
    for (int64_t k = 0; k < g->size; k += INPUTS(bits), panel += STEPS(bits) * STEP, x += INPUTS(bits)) {
      for (int s = 0; s < STEPS(bits); s++)
        for (int l = 0; l < lines; l++) __builtin_prefetch(panel + ahead + s * STEP + l * LINE, 0, 2);
      EACH(int v = 0; v < VECTORS; v++) {
        const char *at = panel + v * WIDTH;
        if (bits == 8) {
          Four w = four_of(*(const chars *)at);
          EACH(int r = 0; r < rows; r++) sum[r][v] = dot_codes(sum[r][v], w, x + r * stride);
        } else {
          EACH(int p = 0; p < 4; p++) {
            if (p == INPUTS(bits) / 8) break;
            chars first, last;
            codes_of(at, p, bits, &first, &last);
            EACH(int r = 0; r < rows; r++) sum[r][v] = dot_small_codes(sum[r][v], first, last, x + r * stride + 8 * p);
          }
        }
      }
    }
    Worth w;
    worth_of(g, block, head, &w, bits);
    EACH(int r = 0; r < rows; r++) {
      EACH(int v = 0; v < VECTORS; v++)
        total[r][v] = total[r][v] + w.step[v] * __builtin_convertvector(sum[r][v], floats);
      if (has_offset) {
        floats inputs = every_float((float)sum_of_inputs(plain + r * stride, i));
        EACH(int v = 0; v < VECTORS; v++) total[r][v] = total[r][v] + w.offset[v] * inputs;
      }
    }
  }
  EACH(int r = 0; r < rows; r++) EACH(int v = 0; v < VECTORS; v++) ((floats *)sums)[r * VECTORS + v] = total[r][v];
}

typedef void BlockOfGroups(const Matrix *, const char *, const char *, int64_t, int, void *);
