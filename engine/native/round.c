/* Rounds float weights to codes in groups of 16 or 32, a row at a time, with the bits of the torch version in
 * `engine/model/linear/rounding.py`. */

#include "exact.h"
#include "rows.h"

#define MOST 32 /* maximum inputs per group */
#define TRIES 9
#define TINY 0x1p-24f /* the smallest positive float16 */

typedef float eight __attribute__((vector_size(32)));
typedef int32_t eight_ints __attribute__((vector_size(32)));

/* A group of inputs: `n` vectors. */
typedef struct {
  eight x[MOST / 8];
} Group;

INLINE eight all(float x) { return (eight){0} + x; }
INLINE eight choose(eight_ints which, eight yes, eight no) {
  return (eight)((which & (eight_ints)yes) | (~which & (eight_ints)no));
}
INLINE eight lower(eight a, eight b) { return choose(a < b, a, b); }
INLINE eight higher(eight a, eight b) { return choose(a > b, a, b); }
INLINE eight nearest(eight x) { return (x + 12582912.0f) - 12582912.0f; } /* ties to even */
INLINE eight size_of(eight x) { return (eight)((eight_ints)x & 0x7fffffff); }

/* Reduce a group by halves, as `_sum` in rounding.py: [a, b, c, d] -> [a + c, b + d] -> (a + c) + (b + d). */
#define BY_HALVES(name, combine, scalar)                                                \
  INLINE float name(const eight *x, const int n) {                                      \
    eight v = n == 4 ? combine(combine(x[0], x[2]), combine(x[1], x[3])) : combine(x[0], x[1]); \
    float a = scalar(v[0], v[4]), b = scalar(v[1], v[5]), c = scalar(v[2], v[6]), d = scalar(v[3], v[7]); \
    return scalar(scalar(a, c), scalar(b, d));                                          \
  }
#define PLUS(a, b) ((a) + (b))
#define LESS(a, b) ((a) < (b) ? (a) : (b))
#define MORE(a, b) ((a) > (b) ? (a) : (b))
BY_HALVES(sum_of_group, PLUS, PLUS)
BY_HALVES(least_of_group, lower, LESS)
BY_HALVES(most_of_group, higher, MORE)

INLINE void read_group(const void *row, int64_t i, const int bits, const int n, Group *g) {
  for (int k = 0; k < n; k++)
    for (int j = 0; j < 8; j++) g->x[k][j] = element(row, i + 8 * k + j, bits);
}

/* Round to float16, ties to even; larger numbers become infinite, and NaN stays NaN. */
INLINE uint16_t half_of(float x) {
  uint32_t bits, sign;
  memcpy(&bits, &x, 4);
  sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (bits < 0x38800000) { /* multiples of 2^-24: the sum has no lower bits */
    float size, whole;
    memcpy(&size, &bits, 4);
    whole = (size + 0.5f) - 0.5f;
    return (uint16_t)(sign | (uint32_t)(whole * 0x1p24f));
  }
  bits += 0xfff + (bits >> 13 & 1);
  return (uint16_t)(sign | ((bits >> 13) - 0x1c000));
}

INLINE float wide_half(uint16_t half) {
  uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
  float size;
  memcpy(&size, &bits, 4);
  size *= 0x1p112f; /* the exponent biases differ by 112 */
  if ((half & 0x7c00) == 0x7c00) size = INFINITY;
  return half & 0x8000 ? -size : size;
}

/* 0 if all inputs are finite, else NaN. */
INLINE float oddness(const Group *g, const int n) {
  eight odd[MOST / 8];
  for (int k = 0; k < n; k++) odd[k] = g->x[k] - g->x[k];
  return sum_of_group(odd, n);
}

INLINE void round_symmetric(const Group *g, const int n, int8_t *codes, uint16_t *scale) {
  eight sizes[MOST / 8];
  for (int k = 0; k < n; k++) sizes[k] = size_of(g->x[k]);
  float most = most_of_group(sizes, n) / 127 + oddness(g, n);
  *scale = half_of(most < TINY ? TINY : most);
  float step = wide_half(*scale);
  for (int k = 0; k < n; k++) {
    eight near = higher(lower(nearest(g->x[k] / step), all(127)), all(-127));
    for (int j = 0; j < 8; j++) codes[8 * k + j] = (int8_t)near[j];
  }
}

typedef struct {
  float step, low;
} Fit;

/* As `_best` in rounding.py. */
INLINE Fit best_of(const Group *g, const int n, const int most) {
  eight weight[MOST / 8], work[MOST / 8];
  for (int k = 0; k < n; k++) work[k] = size_of(g->x[k]);
  float mean = sum_of_group(work, n) / (float)(8 * n);
  for (int k = 0; k < n; k++) weight[k] = work[k] + mean, work[k] = weight[k] * g->x[k];
  float low = least_of_group(g->x, n), high = most_of_group(g->x, n);
  low = low < 0 ? low : 0;
  float sums = sum_of_group(weight, n), of_group = sum_of_group(work, n);
  float range = high - low < TINY ? TINY : high - low, error = 0;
  Fit best = {0, 0};
  for (int t = 0; t < TRIES; t++) {
    float per_step = 1 / range * ((float)(most - 1) + 0.25f * (float)t); /* as torch divides a constant */
    eight codes[MOST / 8], firsts[MOST / 8], seconds[MOST / 8], mixes[MOST / 8];
    for (int k = 0; k < n; k++) {
      codes[k] = higher(lower(nearest((g->x[k] - low) * per_step), all((float)most)), all(0));
      firsts[k] = weight[k] * codes[k];
      seconds[k] = firsts[k] * codes[k];
      mixes[k] = firsts[k] * g->x[k];
    }
    float first = sum_of_group(firsts, n), second = sum_of_group(seconds, n), mixed = sum_of_group(mixes, n);
    float apart = sums * second - first * first, divisor = apart > 0 ? apart : 1;
    Fit fit = {(sums * mixed - of_group * first) / divisor, (second * of_group - first * mixed) / divisor};
    if (apart <= 0 || fit.low > 0) fit = (Fit){mixed / (second < TINY ? TINY : second), 0};
    for (int k = 0; k < n; k++) {
      eight off = codes[k] * fit.step + fit.low - g->x[k];
      work[k] = weight[k] * off * off;
    }
    float here = sum_of_group(work, n);
    if (!t || here < error) best = fit, error = here;
  }
  return best;
}

/* `x` rounded to an integer and clamped to `least` .. `most`. */
INLINE uint8_t parts_of(float x, float least, float most) {
  float whole = (x + 12582912.0f) - 12582912.0f;
  return (uint8_t)(whole < least ? least : whole > most ? most : whole);
}

/* 4-bit codes are stored two per byte. `fits` is scratch memory for the groups of a row. */
INLINE void round_asymmetric(const void *row, const int bits, int64_t groups, const int n, const int code_bits,
                             Fit *fits, uint8_t *codes, uint16_t *scale, uint16_t *offset, uint8_t *steps,
                             uint8_t *zeros) {
  const int most = (1 << code_bits) - 1;
  float top = 0, bottom = 0, odd = 0;
  Group g;
  for (int64_t i = 0; i < groups; i++) {
    read_group(row, i * 8 * n, bits, n, &g);
    fits[i] = best_of(&g, n, most);
    odd += oddness(&g, n);
    top = i && top > fits[i].step ? top : fits[i].step;
    bottom = i && bottom < fits[i].low ? bottom : fits[i].low;
  }
  top = top / 127, bottom = bottom / 255;
  *scale = half_of((top < TINY ? TINY : top) + odd);
  *offset = half_of(bottom > -TINY ? -TINY : bottom);
  float of_steps = wide_half(*scale), of_zeros = wide_half(*offset);
  for (int64_t i = 0; i < groups; i++) {
    steps[i] = parts_of(fits[i].step / of_steps, 1, 127), zeros[i] = parts_of(fits[i].low / of_zeros, 0, 255);
    float low = of_zeros * zeros[i], step = of_steps * steps[i];
    read_group(row, i * 8 * n, bits, n, &g);
    for (int k = 0; k < n; k++) {
      eight near = higher(lower(nearest((g.x[k] - low) / step), all((float)most)), all(0));
      for (int j = 0; j < 8; j++) {
        uint8_t code = (uint8_t)near[j];
        if (code_bits > 4) *codes++ = code;
        else if (j & 1) *codes++ |= (uint8_t)(code << 4);
        else *codes = code;
      }
    }
  }
}

/* `stride` is from row to row, in elements; `group` is 16 or 32. */
void pilotfish_round_symmetric(const void *x, int bits, int64_t stride, int64_t rows, int64_t n, int64_t group,
                               int8_t *codes, uint16_t *scale) {
  Group g;
  for (int64_t r = 0; r < rows; r++) {
    const void *row = row_of(x, r, stride, bits);
    for (int64_t i = 0; i < n; i += group, codes += group, scale++) {
      bits == 32 ? read_group(row, i, 32, (int)group / 8, &g) : read_group(row, i, 16, (int)group / 8, &g);
      group == 32 ? round_symmetric(&g, 4, codes, scale) : round_symmetric(&g, 2, codes, scale);
    }
  }
}

void pilotfish_round_asymmetric(const void *x, int bits, int64_t stride, int64_t rows, int64_t n, int64_t group,
                                int64_t code_bits, uint8_t *codes, uint16_t *scale, uint16_t *offset, uint8_t *steps,
                                uint8_t *zeros) {
  int64_t groups = n / group;
  Fit fits[groups];
  for (int64_t r = 0; r < rows; r++) {
    const void *row = row_of(x, r, stride, bits);
    uint8_t *to = codes + r * (code_bits == 4 ? n / 2 : n);
    if (group == 32)
      round_asymmetric(row, bits, groups, 4, (int)code_bits, fits, to, scale + r, offset + r, steps + r * groups, zeros + r * groups);
    else
      round_asymmetric(row, bits, groups, 2, (int)code_bits, fits, to, scale + r, offset + r, steps + r * groups, zeros + r * groups);
  }
}
