/* Rows times a matrix that lies in panels of 64 outputs: int8 in integers, bfloat16 and float in float sums. */

#ifndef PILOTFISH_MATMUL_H
#define PILOTFISH_MATMUL_H

#include "vectors.h"

#define PANEL 64 /* outputs that are summed together */

/* `panels` is [out / 64 rounded up, in / G, 64, G] with G numbers in 4 bytes (4 of int8, 2 of bfloat16, 1 float): one
 * vector holds the next G inputs of 16 outputs, and a panel is read from its beginning to its end. Outputs that are
 * not there are zeros. */
typedef struct {
  const void *panels;
  const float *scale;    /* [out rounded up], what a step of the weights is worth; int8 alone, as the next */
  const int32_t *offset; /* [out rounded up], 128 times the sum of each output's weights: rows are uint8 around 128 */
  const float *bias;     /* [out rounded up] or NULL */
  int64_t in, out, bits; /* 8, 16 or 32, of a weight */
} Matrix;

/* The rows that it multiplies, and where the products go. */
typedef struct {
  const void *in;    /* [rows, matrix.in], dense: uint8 for int8, else of the matrix' own type */
  const float *step; /* [rows], for int8 what one step of a row is worth */
  void *out;         /* [rows, matrix.out], dense, float or bfloat16 */
  int64_t rows;
  int bits; /* of `out`: 32 or 16 */
  int add;  /* whether to add to what stands in `out` */
} Product;

/* The share of thread `me` of `threads`: whole panels. A result is the same bits whoever computes it, and whatever
 * stands in the other rows. */
void multiply_share(const Matrix *m, const Product *p, int me, int threads);

#endif
