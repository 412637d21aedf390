/* Rows times a matrix in panels: codes of 4 to 8 bits with integer sums, bfloat16 and float with float sums. */

#ifndef PILOTFISH_MATMUL_H
#define PILOTFISH_MATMUL_H

#include "vectors.h"

/* A panel is PANEL outputs that are summed together in four registers: 64, 32 or 16 (`registers.h`).
 *
 * `panels` is [out / PANEL rounded up, in / G, PANEL, G] with G numbers in 4 bytes (2 of bfloat16, 1 float): a register
 * holds the next G inputs of a quarter of the outputs, and a panel is read sequentially. Outputs beyond `out` are
 * zeros. */
/* Codes in groups of inputs: weight = code * step + offset, with a step and an offset per output and group. Codes of 4,
 * 5 and 6 bits are unsigned, and the middle one (8, 16, 32) means 0 if there is no offset; codes of 8 bits are -128 to
 * 127. A block is one or several groups. For each block a panel has [PANEL] numbers of `kind`, and as many again if
 * `has_offset`; then for each of its groups [PANEL] int8 if `has_steps`, [PANEL] uint8 if `has_zeros`, and the group's
 * inputs as in other panels (8 bits: plus `pilotfish_codes_from`). Byte 4 i + v of int8 and uint8 belongs to output v
 * PANEL / 4 + i. For 6 bits, the codes of 16 inputs are stored together in [3, PANEL, 4] bytes: byte j of step s is the
 * code of input 4 s + j, and above it two bits of input 12 + j, the lowest in the first step. For 5 bits, those of 32
 * are stored together: [PANEL, 4] bytes with the highest bits, of input 4 q + j in bit q of byte j, and then the others
 * as in codes of 4 bits.
 *
 * A step is the block's number, times the group's int8 if there is one. An offset is the block's second number, times
 * the group's uint8 if there is one; with uint8 and no second number it is minus the step times the uint8. */
typedef struct {
  int64_t size;  /* inputs per group, a multiple of 16 (5 bits: of 32); 0: no codes in groups */
  int64_t block; /* groups per block */
  int32_t kind;  /* FLOAT16, BFLOAT16 or FLOAT32 */
  int32_t has_steps, has_offset, has_zeros;
} Groups;

enum { FLOAT16, BFLOAT16, FLOAT32 };

typedef struct {
  const void *panels;
  const float *bias;     /* [out rounded up] or NULL */
  int64_t in, out, bits; /* per weight: 16 or 32, or per code: 4, 5, 6 or 8 */
  Groups groups;         /* of codes */
  const int64_t *order;  /* [in] or NULL: with groups, input j of the panels is input order[j] of a row */
} Matrix;

/* The rows to multiply, and where the products are written. */
typedef struct {
  const void *in;    /* [rows, fed_bytes(matrix)], from `feed` */
  const float *step; /* [rows], for codes: the value of one step of a row */
  void *out;         /* [rows, matrix.out], float or bfloat16 */
  int64_t stride;    /* elements of `out` from row to row */
  int64_t rows;
  int bits; /* of `out`: 32 or 16 */
  int add;  /* whether to add to `out` */
} Product;

/* The input form of a matrix: bytes per row, and the conversion of `row`, which is int16 for codes, else of the type of
 * the weights. `to` may be `row` if the two are the same (`fed_as_is`). */
int64_t fed_bytes(const Matrix *m);
int fed_as_is(const Matrix *m);
int fed_alike(const Matrix *a, const Matrix *b); /* whether both have the same input form */
void feed(const Matrix *m, const void *row, void *to);

int64_t matmul_panels(const Matrix *m);

/* The products of panels [first, last). A result has the same bits on every thread and in any batch. */
void multiply_panels(const Matrix *m, const Product *p, int64_t first, int64_t last);

/* Multiply all panels on the threads of the pool. */
void multiply_together(const Matrix *m, const Product *p);

/* The amount of work, for the pool: bytes of weights, and as much again for every four rows. */
double matmul_work(const Matrix *m, int64_t rows);

#endif
