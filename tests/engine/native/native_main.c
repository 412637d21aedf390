/* Products by our C on another processor, for tests: what `test_instructions.py` writes is read, multiplied and printed. */

#include <stdio.h>

#include "matmul.h"

int pilotfish_multiply(const Matrix *m, int64_t count, const Product *p, int threads);
int pilotfish_panel(void);
const char *pilotfish_integer_path(void);

static void *bytes(int64_t count) {
  void *read = aligned_alloc(64, (size_t)(count + 63) / 64 * 64);
  if (!read || fread(read, 1, (size_t)count, stdin) != (size_t)count) exit(2);
  return read;
}

/* `path` prints the instructions and the width of a panel; else a matrix comes in: bits, inputs, outputs, rows, bytes of
 * panels and of rows as int64, groups, and then panels, steps of the rows, and the rows. */
int main(int count, char **words) {
  (void)words;
  if (count > 1) return printf("%d %s\n", pilotfish_panel(), pilotfish_integer_path()) < 0;
  int64_t *sizes = bytes(6 * 8);
  Matrix m = {.bits = sizes[0], .in = sizes[1], .out = sizes[2]};
  memcpy(&m.groups, bytes(sizeof(Groups)), sizeof(Groups));
  m.panels = bytes(sizes[4]);
  Product p = {.rows = sizes[3], .stride = m.out, .bits = 32};
  p.step = bytes(p.rows * 4);
  p.in = bytes(sizes[5]);
  float *out = aligned_alloc(64, (size_t)(p.rows * m.out * 4 + 63) / 64 * 64);
  p.out = out;
  if (pilotfish_multiply(&m, 1, &p, 2)) return 3;
  return fwrite(out, 4, (size_t)(p.rows * m.out), stdout) != (size_t)(p.rows * m.out);
}
