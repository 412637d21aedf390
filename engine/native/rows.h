/* Operations between the matmuls of a transformer, one row at a time. Rows are float (`bits` 32) or bfloat16 (16). */

#ifndef PILOTFISH_ROWS_H
#define PILOTFISH_ROWS_H

#include "vectors.h"

INLINE const void *row_of(const void *data, int64_t row, int64_t stride, int bits) {
  return (const char *)data + row * stride * (bits / 8);
}

/* A norm x / sqrt(sum of x^2 + eps) * weight; no weight: no norm. For the mean instead of the sum, eps is multiplied by
 * the width, and weight by its root. */
typedef struct {
  const float *weight;
  float eps;
} Norm;

/* The layout of query, key and value in a row, and where key and value are written: [arena rows, kv, dim]; `rounded`:
 * there a head is a float scale and int8 codes. Each head of query and key may have a norm. */
typedef struct {
  int64_t query, kv, dim;
  void *key, *value;
  int rounded;
  Norm norm_query, norm_key;
} Heads;

/* Round to integers, most of which fit in 8 bits; returns the value of one step, NaN if an element is not finite. */
#define ROUNDED_MOST 32512.0f /* 127 * 256: the high byte of 16 bits has room for the carry of the signed low byte */
#define MEANS 2.5              /* 127 steps are this times the mean magnitude of a row */
float round_row(const float *x, int64_t n, int16_t *to);
float wide_round_row(const void *row, int bits, int64_t n, int16_t *to);

/* Normalise a row, in its own type. */
void norm_row(const void *row, int bits, int64_t n, Norm norm, void *to);
float norm_round_row(const void *row, int bits, int64_t n, Norm norm, int16_t *to);

/* Normalise a row and add it to another one. */
void add_normed_row(const void *row, int bits, int64_t n, Norm norm, void *to);

/* x times the logistic function of linear x + cubic x^3. */
typedef struct {
  float linear, cubic;
} Activation;

/* activation(gate) * up of a row (gate, up) of 2 n numbers. */
void gate_row(const void *row, int bits, int64_t n, Activation activation, void *to);
float gate_round_row(const void *row, int bits, int64_t n, Activation activation, int16_t *to);

/* Normalise and rotate the query in place, and the key into the arena; write the value there. The second half of cos
 * and sin [dim] repeats the first: the halves (a, b) of a head become (a cos - b sin, b cos + a sin). */
void rotate_row(void *row, const Heads *h, const void *cos, const void *sin, int64_t place, int bits);

#endif
