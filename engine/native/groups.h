/* Codes in groups times a block of rows (`Groups` in matmul.h). Part of matmul.c.
 *
 * A row is 16-bit integers, most of which fit in 8 bits (`round_row` in rows.c). For 8-bit products (`SPLIT`), a fed
 * row is [in] int8, the low bytes; then for each group the sum of its inputs and the number of its steps, of 4 inputs
 * each, that have high bytes; then for each of those, in order, its index in the group and 4 int8. Products of high
 * bytes are multiplied by 256 and added to those of low bytes: the sum equals that of 16-bit products. Otherwise a fed
 * row is [in] int16, of every 4 inputs the even ones first, and then the same sums.
 *
 * The zero point of codes, if not 0, is multiplied by the sum of inputs and subtracted before the first product, in
 * integers, so that the sums of a group are exact. An offset is multiplied by the same sum. Float products are rounded
 * before they are added, so results have the same bits on every processor. */

/* The number of inputs whose codes are stored together, and the number of panel steps that they occupy. */
#define BYTES(bits) ((bits) == 8 || (!WIDE_ROWS && (bits) == UNPACKED)) /* are multiplied four at a time, as stored */
#define INPUTS(bits) (BYTES(bits) ? 4 : (bits) == 6 ? 16 : (bits) == 5 ? 32 : 8)
#define STEPS(bits) (BYTES(bits) ? 1 : (bits) == UNPACKED ? 2 : INPUTS(bits) * (bits) / 32)
#define SPLIT(bits) (!WIDE_ROWS || (bits) != 8)
#define UNPACKED 7 /* instead of 4 to 6 bits: codes that `unpack` has converted to bytes */
#define ROWS (BLOCK < 3 ? BLOCK : 3) /* rows per block: each has the sums of a group and of all groups */

typedef struct {
  int32_t sum, high;
} GroupOfRow;

typedef struct {
  int32_t step;
  char bytes[4];
} High;

INLINE int64_t head_of_block(const Groups *g) { return (1 + g->has_offset) * (g->kind == FLOAT32 ? 4 : 2) * PANEL; }
INLINE int64_t head_of_group(const Groups *g) { return (g->has_steps + g->has_zeros) * PANEL; }

/* Bytes of a panel. */
INLINE int64_t panel_of_groups(const Matrix *m) {
  const Groups *g = &m->groups;
  int64_t groups = m->in / g->size, each = head_of_group(g) + g->size * m->bits / 8 * PANEL;
  return groups / g->block * head_of_block(g) + groups * each;
}

/* Bytes of a fed row, with room for all high bytes. */
INLINE int64_t fed_groups(const Matrix *m) {
  return m->in + m->in / m->groups.size * (int64_t)sizeof(GroupOfRow) + m->in / 4 * (int64_t)sizeof(High);
}

INLINE int32_t sum_of_row(const int16_t *row, int64_t count) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count; i++) sum += row[i];
  return sum;
}

INLINE void feed_groups(const Matrix *m, const int16_t *row, char *to) {
  const int64_t in = m->in, size = m->groups.size;
  int16_t own[m->order ? in : 1];
  if (m->order) {
    for (int64_t i = 0; i < in; i++) own[i] = row[m->order[i]];
    row = own;
  }
  if (!SPLIT(m->bits)) {
    int16_t *wide = (int16_t *)to;
    for (int64_t i = 0; i < in; i += 4)
      wide[i] = row[i], wide[i + 1] = row[i + 2], wide[i + 2] = row[i + 1], wide[i + 3] = row[i + 3];
    GroupOfRow *group = (GroupOfRow *)(to + 2 * in);
    for (int64_t i = 0; i < in; i += size) *group++ = (GroupOfRow){sum_of_row(row + i, size), 0};
    return;
  }
  char high[in] __attribute__((aligned(64)));
  for (int64_t i = 0; i < in; i++) {
    to[i] = (char)row[i];
    high[i] = (char)((row[i] + 128) >> 8);
  }
  GroupOfRow *group = (GroupOfRow *)(to + in);
  High *next = (High *)(group + in / size);
  for (int64_t i = 0; i < in; i += size, group++) {
    const High *first = next;
    for (int64_t k = 0; k < size; k += 4) {
      int32_t four = four_bytes(high + i + k);
      next->step = (int32_t)k / 4;
      memcpy(next->bytes, &four, 4);
      next += four != 0;
    }
    *group = (GroupOfRow){sum_of_row(row + i, size), (int32_t)(next - first)};
  }
}

/* Register v of a panel's numbers. */
INLINE floats numbers_of(const char *at, int v, int kind) {
  if (kind == FLOAT32) return *(const floats *)(at + v * WIDTH);
  return kind == FLOAT16 ? float16s(at + v * (WIDTH / 2)) : bfloat16s(at + v * (WIDTH / 2));
}

/* Register v of a panel's bytes: byte v of every 4, signed or unsigned. */
INLINE floats small_numbers_of(const char *at, int v, const int is_signed) {
  ints left = *(const ints *)at << (24 - 8 * v);
  return __builtin_convertvector(is_signed ? left >> 24 : (left >> 24) & 255, floats);
}

typedef struct {
  floats step[VECTORS], offset[VECTORS];
} Worth;

/* The steps and offsets of a group's codes; `block` and `group` point to their headers. */
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

/* A register at `at`, and each byte shifted right by `up`, without bits of the adjacent byte. */
INLINE chars codes_at(const char *at) { return *(const chars *)at; }
INLINE chars above(chars x, const int up) { return (chars)((ushorts)x >> up) & (int8_t)(255 >> up); }

/* Register pair p of the codes that are stored together at `at`: eight codes per output. */
INLINE void codes_of(const char *at, const int p, const int bits, chars *first, chars *last) {
  if (bits == UNPACKED) {
    *first = codes_at(at), *last = codes_at(at + STEP);
    return;
  }
  if (bits == 6) {
    chars a = codes_at(at), b = codes_at(at + STEP), c = codes_at(at + 2 * STEP);
    chars spread = above(a, 6) | ((chars)((ushorts)b >> 4) & 12) | ((chars)((ushorts)c >> 2) & 48);
    *first = (p ? c : a) & 63, *last = p ? spread : b & 63;
    return;
  }
  chars both = codes_at(at + (p + (bits == 5)) * STEP);
  *first = both & 15, *last = above(both, 4);
  if (bits == 5) {
    ushorts fifth = (ushorts)codes_at(at); /* bit q of a byte belongs to code q */
    *first |= (chars)(p > 2 ? fifth >> (2 * p - 4) : fifth << (4 - 2 * p)) & 16;
    *last |= (chars)(p > 1 ? fifth >> (2 * p - 3) : fifth << (3 - 2 * p)) & 16;
  }
}

/* The codes of one step of 4 inputs in a group whose codes begin at `at`. */
INLINE chars codes_of_step(const char *at, const int step, const int v, const int bits) {
  at += v * WIDTH;
  if (bits == 8 || bits == UNPACKED) return codes_at(at + step * STEP);
  if (bits == 4) {
    chars both = codes_at(at + step / 2 * STEP);
    return (chars)((ushorts)both >> (4 * (step & 1))) & 15;
  }
  if (bits == 5) {
    at += step / 8 * 5 * STEP;
    chars both = codes_at(at + (1 + step % 8 / 2) * STEP), fifth = codes_at(at);
    chars highest = (chars)((ushorts)fifth >> (step % 8)) & 1;
    return ((chars)((ushorts)both >> (4 * (step & 1))) & 15) | (chars)((ushorts)highest << 4);
  }
  at += step / 4 * 3 * STEP;
  if (step % 4 < 3) return codes_at(at + step % 4 * STEP) & 63;
  chars a = codes_at(at), b = codes_at(at + STEP), c = codes_at(at + 2 * STEP);
  return above(a, 6) | ((chars)((ushorts)b >> 4) & 12) | ((chars)((ushorts)c >> 2) & 48);
}

/* An unpacked panel, for many rows: for each group its steps and offsets, if any, as floats, then a byte per code. */
INLINE int has_offsets(const Groups *g) { return g->has_offset || g->has_zeros; }
INLINE int64_t unpacked_head(const Groups *g) { return (1 + has_offsets(g)) * VECTORS * WIDTH; }
INLINE int64_t unpacked_panel(const Matrix *m) {
  return m->in / m->groups.size * unpacked_head(&m->groups) + m->in * PANEL;
}

/* Unpack a panel and prefetch the next one. */
INLINE void unpack(const Matrix *m, const char *panel, char *to, const int bits) {
  const Groups *g = &m->groups;
  const int64_t next = panel_of_groups(m), groups = m->in / g->size;
  const char *block = panel;
  for (int64_t i = 0; i < groups; i++) {
    if (i % g->block == 0) block = panel, panel += head_of_block(g);
    Worth w;
    worth_of(g, block, panel, &w, bits);
    memcpy(to, w.step, sizeof w.step);
    if (has_offsets(g)) memcpy(to + sizeof w.step, w.offset, sizeof w.offset);
    to += unpacked_head(g), panel += head_of_group(g);
    for (int64_t k = 0; k < g->size; k += INPUTS(bits), panel += STEPS(bits) * STEP) {
      for (int64_t l = 0; l < STEPS(bits) * STEP; l += LINE) __builtin_prefetch(panel + next + l, 0, 2);
      EACH(int p = 0; p < 4; p++) {
        if (p == INPUTS(bits) / 8) break;
        EACH(int v = 0; v < VECTORS; v++)
          codes_of(panel + v * WIDTH, p, bits, (chars *)(to + v * WIDTH), (chars *)(to + STEP + v * WIDTH));
        to += 2 * STEP;
      }
    }
  }
}

/* Add 256 times the products of the high bytes of a row's group. */
INLINE void add_high(const char *codes, const High *high, int32_t count, ints *sum, const int bits) {
  ints found[VECTORS];
  EACH(int v = 0; v < VECTORS; v++) found[v] = (ints){0};
  for (int32_t i = 0; i < count; i++)
    EACH(int v = 0; v < VECTORS; v++)
      found[v] = dot_bytes(found[v], codes_of_step(codes, high[i].step, v, bits), high[i].bytes);
  EACH(int v = 0; v < VECTORS; v++) sum[v] += found[v] << 8;
}

/* `ahead`: bytes from the current position to the prefetched one; `lines`: to prefetch per step. `sums` are floats. */
INLINE void block_of_groups(const Matrix *m, const char *x, const char *panel, int64_t ahead, int lines, void *sums,
                            const int rows, const int bits) {
  const Groups *g = &m->groups;
  const int64_t stride = fed_groups(m), groups = m->in / g->size;
  const int has_offset = has_offsets(g), wide = SPLIT(bits) ? 1 : 2;
  const int from = bits == 8 ? CODES_FROM(8) : has_offset ? 0 : 1 << (m->bits - 1);
  const char *block = panel;
  const GroupOfRow *of_row = (const GroupOfRow *)(x + wide * m->in);
  const High *high[ROWS];
  EACH(int r = 0; r < rows; r++) high[r] = (const High *)((const char *)(of_row + groups) + r * stride);
  floats total[ROWS][VECTORS];
  EACH(int r = 0; r < rows; r++) EACH(int v = 0; v < VECTORS; v++) total[r][v] = (floats){0};
  for (int64_t i = 0, of_block = 0; i < groups; i++, of_row++) {
    if (bits != UNPACKED && !of_block) {
      for (int64_t l = 0; l < head_of_block(g); l += LINE) __builtin_prefetch(panel + ahead + l, 0, 2);
      block = panel, panel += head_of_block(g), of_block = g->block;
    }
    of_block--;
    const char *head = panel;
    if (bits != UNPACKED)
      for (int64_t l = 0; l < head_of_group(g); l += LINE) __builtin_prefetch(head + ahead + l, 0, 2);
    panel += bits == UNPACKED ? unpacked_head(g) : head_of_group(g);
    ints sum[ROWS][VECTORS];
    EACH(int r = 0; r < rows; r++) {
      const GroupOfRow *here = (const GroupOfRow *)((const char *)of_row + r * stride);
      ints start = every(-from * here->sum);
      EACH(int v = 0; v < VECTORS; v++) sum[r][v] = start;
    }
    const char *codes = panel;
    for (int64_t k = 0; k < g->size; k += INPUTS(bits), panel += STEPS(bits) * STEP, x += wide * INPUTS(bits)) {
      for (int s = 0; s < STEPS(bits); s++)
        for (int l = 0; l < lines; l++) __builtin_prefetch(panel + ahead + s * STEP + l * LINE, 0, 2);
      EACH(int v = 0; v < VECTORS; v++) {
        const char *at = panel + v * WIDTH;
        if (BYTES(bits)) {
#if WIDE_ROWS
          shorts even = even_codes(codes_at(at)), odd = odd_codes(codes_at(at));
          EACH(int r = 0; r < rows; r++) sum[r][v] = dot_wide(sum[r][v], even, odd, x + r * stride);
#else
          EACH(int r = 0; r < rows; r++) sum[r][v] = dot_bytes(sum[r][v], codes_at(at), x + r * stride);
#endif
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
    if (SPLIT(bits)) EACH(int r = 0; r < rows; r++) {
        const int32_t count = ((const GroupOfRow *)((const char *)of_row + r * stride))->high;
        if (count) add_high(codes, high[r], count, sum[r], bits);
        high[r] += count;
      }
    Worth w;
    if (bits == UNPACKED) {
      memcpy(w.step, head, sizeof w.step);
      if (has_offset) memcpy(w.offset, head + sizeof w.step, sizeof w.offset);
    } else {
      worth_of(g, block, head, &w, bits);
    }
    EACH(int r = 0; r < rows; r++) {
      EACH(int v = 0; v < VECTORS; v++)
        total[r][v] = total[r][v] + w.step[v] * __builtin_convertvector(sum[r][v], floats);
      if (has_offset) {
        floats inputs = every_float((float)((const GroupOfRow *)((const char *)of_row + r * stride))->sum);
        EACH(int v = 0; v < VECTORS; v++) total[r][v] = total[r][v] + w.offset[v] * inputs;
      }
    }
  }
  EACH(int r = 0; r < rows; r++) EACH(int v = 0; v < VECTORS; v++) ((floats *)sums)[r * VECTORS + v] = total[r][v];
}

typedef void BlockOfGroups(const Matrix *, const char *, const char *, int64_t, int, void *);
