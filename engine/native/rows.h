/* One row at a time, of what lies between the matmuls of a transformer. Rows are floats (`bits` 32) or bfloat16 (16). */

#ifndef PILOTFISH_ROWS_H
#define PILOTFISH_ROWS_H

#include "vectors.h"

INLINE const void *row_of(const void *data, int64_t row, int64_t stride, int bits) {
  return (const char *)data + row * stride * (bits / 8);
}

/* A norm x / sqrt(sum of x^2 + eps) * weight; no weight: none. Who wants the mean has the width in eps and its root in
 * weight. */
typedef struct {
  const float *weight;
  float eps;
} Norm;

/* How query, key and value lie side by side in a row, and where the last two go: [arena rows, kv, dim]; `rounded`:
 * there a head is a float scale and int8 codes. Each head of query and key may have a norm. */
typedef struct {
  int64_t query, kv, dim;
  void *key, *value;
  int rounded;
  Norm norm_query, norm_key;
} Heads;

/* To integers, most of which fit in 8 bits; returns what one step is worth, NaN if there is a NaN. */
#define ROUNDED_MOST 32512.0f /* 127 * 256: the high byte of 16 bits has room for what the low one, with its sign, hands up */
#define MEANS 2.5              /* 127 steps are this times the mean magnitude of a row */
float round_row(const float *x, int64_t n, int16_t *to);
float wide_round_row(const void *row, int bits, int64_t n, int16_t *to);

/* A normed row, in its own type. */
void norm_row(const void *row, int bits, int64_t n, Norm norm, void *to);
float norm_round_row(const void *row, int bits, int64_t n, Norm norm, int16_t *to);

/* Adds a row, normed, to another one. */
void add_normed_row(const void *row, int bits, int64_t n, Norm norm, void *to);

/* x times the logistic function of linear x + cubic x^3. */
typedef struct {
  float linear, cubic;
} Activation;

/* activation(gate) * up of a row (gate, up) of 2 n numbers. */
void gate_row(const void *row, int bits, int64_t n, Activation activation, void *to);
float gate_round_row(const void *row, int bits, int64_t n, Activation activation, int16_t *to);

/* Turn the query in place, and the key on its way into the arena, after their norms; the value goes there as it is. The
 * second half of cos and sin [dim] repeats the first: the halves (a, b) of a head become (a cos - b sin, b cos + a sin). */
void rotate_row(void *row, const Heads *h, const void *cos, const void *sin, int64_t place, int bits);

#endif
