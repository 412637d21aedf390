/* Rows times a matrix that lies in panels: codes of 4 to 8 bits in integers, bfloat16 and float in float sums. */

#ifndef PILOTFISH_MATMUL_H
#define PILOTFISH_MATMUL_H

#include "vectors.h"

/* A panel is PANEL outputs that are summed together, four registers of this processor: 64, 32 or 16 (`registers.h`).
 *
 * `panels` is [out / PANEL rounded up, in / G, PANEL, G] with G numbers in 4 bytes (2 of bfloat16, 1 float):
 * a register holds the next G inputs of a quarter of the outputs, and a panel is read from its beginning to its end.
 * Outputs that are not there are zeros.
 */
/* Codes in groups of inputs: weight = code * step + offset, a step and an offset for each output and group. Codes of 4, 5
 * and 6 bits have no sign, and the middle one (8, 16, 32) means 0 where there is no offset; codes of 8 bits are -128 to
 * 127. A block is one or several groups. Of a panel lies first, for every block, [PANEL] numbers of `kind`, and as many again if `has_offset`; then for each of its
 * groups [PANEL] int8 if `has_steps`, [PANEL] uint8 if `has_zeros`, and the group's inputs as in other panels (8 bits: plus
 * `pilotfish_codes_from`). Of these bytes 4 i + v is that of output v PANEL / 4 + i. Of 6 bits the codes of 16 inputs lie
 * together in [3, PANEL, 4] bytes: byte j of step s is the code of input 4 s + j, and above it two bits of input 12 + j,
 * the lowest in the first step. Of 5 bits those of 32 lie together: [PANEL, 4] bytes with the highest bits, of input
 * 4 q + j in bit q of byte j, and then the others as in codes of 4 bits.
 *
 * A step is the block's number, times the group's int8 if there is one. An offset is the block's second number, times the
 * group's uint8 if there is one; with uint8 and no second number it is minus the step times the uint8. */
typedef struct {
  int64_t size;  /* inputs of a group, a multiple of 16 (5 bits: of 32); 0: no codes in groups */
  int64_t block; /* groups of a block */
  int32_t kind;  /* FLOAT16, BFLOAT16 or FLOAT32 */
  int32_t has_steps, has_offset, has_zeros;
} Groups;

enum { FLOAT16, BFLOAT16, FLOAT32 };

typedef struct {
  const void *panels;
  const float *bias;     /* [out rounded up] or NULL */
  int64_t in, out, bits; /* of a weight: 16 or 32, or of a code: 4, 5, 6 or 8 */
  Groups groups;         /* of codes */
  const int64_t *order;  /* [in] or NULL: with groups, input j of the panels is input order[j] of a row */
} Matrix;

/* The rows that it multiplies, and where the products go. */
typedef struct {
  const void *in;    /* [rows, fed_bytes(matrix)], by `feed` */
  const float *step; /* [rows], for codes what one step of a row is worth */
  void *out;         /* [rows, matrix.out], float or bfloat16 */
  int64_t stride;    /* numbers of `out` from row to row */
  int64_t rows;
  int bits; /* of `out`: 32 or 16 */
  int add;  /* whether to add to `out` */
} Product;

/* What a matrix reads of a row: bytes, and how they are made of `row`, which is int16 for codes, else
 * of the matrix' own type. `to` may be `row` where the two are the same (`fed_as_is`). */
int64_t fed_bytes(const Matrix *m);
int fed_as_is(const Matrix *m);
int fed_alike(const Matrix *a, const Matrix *b); /* whether they read the same bytes of the same row */
void feed(const Matrix *m, const void *row, void *to);

int64_t matmul_panels(const Matrix *m);

/* The products of panels [first, last). A result has the same bits on every thread, and whatever is in the other
 * rows. */
void multiply_panels(const Matrix *m, const Product *p, int64_t first, int64_t last);

/* All of them, in pieces that the threads of the pool claim. */
void multiply_together(const Matrix *m, const Product *p);

/* How much of the pool's time that takes: what is read, and as much again for every few rows. */
double matmul_work(const Matrix *m, int64_t rows);

#endif
