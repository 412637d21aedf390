/* Rows times a matrix that lies in panels of 64 outputs: int8 and 4 bits in integers, bfloat16 and float in float sums. */

#ifndef PILOTFISH_MATMUL_H
#define PILOTFISH_MATMUL_H

#include "vectors.h"

#define PANEL 64 /* outputs that are summed together */

/* `panels` is [out / 64 rounded up, in / G, 64, G] with G numbers in 4 bytes (4 of int8, 2 of bfloat16, 1 float): one
 * vector holds the next G inputs of 16 outputs, and a panel is read from its beginning to its end. Outputs that are
 * not there are zeros.
 *
 * In 4 bits a panel is a run of groups of 64 inputs. A group is [64 inputs / 8, 64, 4] bytes and then 64 floats, what a
 * step of each output is worth in it. Of the byte j in step s the low half is input 8 s + j, the high one 8 s + 4 + j;
 * a half names one of 16 levels. */
typedef struct {
  const void *panels;
  const float *scale;  /* int8: [out rounded up], what a step of the weights is worth. 4 bits: NULL */
  const void *offset;  /* int8 and 4 bits: [out rounded up], 128 times the sum of each output's weights, since rows are
                        * uint8 around 128: int32_t, or float and already times what steps are worth */
  const float *bias;     /* [out rounded up] or NULL */
  int64_t in, out, bits; /* 4, 8, 16 or 32, of a weight */
  int8_t levels[16];     /* of 4 bits */
} Matrix;

/* The rows that it multiplies, and where the products go. */
typedef struct {
  const void *in;    /* [rows, matrix.in], dense: uint8 for 4 and 8 bits, else of the matrix' own type */
  const float *step; /* [rows], for these what one step of a row is worth */
  void *out;         /* [rows, matrix.out], dense, float or bfloat16 */
  int64_t rows;
  int bits; /* of `out`: 32 or 16 */
  int add;  /* whether to add to what stands in `out` */
} Product;

/* The share of thread `me` of `threads`: whole panels. A result is the same bits whoever computes it, and whatever
 * stands in the other rows. */
void multiply_share(const Matrix *m, const Product *p, int me, int threads);

#endif
