/* All decoder layers of a transformer in one call: norm, query/key/value, rotation, attention, output, norm, gate and
 * up, down. Each is a stage whose pieces the threads of the pool claim. Each stage is what the functions of this folder
 * do when they are called one by one, so the result is the same bits.
 *
 * A layer may have no first norm (`norm_attention` NULL: the matrix reads the row itself), or read two rows, both normed:
 * first that of `beside`, then its own (`norm_beside` not NULL). `normed_residual`: what it adds to is its normed row. */

#include "attention.h"
#include "matmul.h"
#include "pool.h"
#include "rows.h"

typedef struct {
  Matrix qkv, out, gate_up, down;
  const float *norm_attention, *norm_mlp; /* [width] */
  void *key, *value;                      /* of the arena: [arena rows, kv_heads, dim], perhaps rounded (`Args`) */
  float eps_attention, eps_mlp, scale, softcap;
  int64_t window;
  const float *norm_beside; /* [width] */
  float eps_beside;
  int32_t normed_residual;
} Layer;

/* Scratch memory is the caller's; sizes in numbers of the hidden type unless said. */
typedef struct {
  void *hidden;              /* [rows, width]: in, and out */
  const void *cos, *sin;     /* [rows, dim] */
  const int64_t *places;     /* [rows]: arena rows */
  void *qkv, *mixed, *gates; /* [rows, (heads + 2 kv_heads) dim], [rows, heads dim], [rows, 2 inner] */
  void *fed;                 /* [rows, the widest matrix.in] floats: what a matrix reads (`feed`) */
  float *step;               /* [rows] */
  Args attention;            /* all but what differs from layer to layer */
  int64_t rows, width;
  int bits;
  const void *beside; /* [rows, width], for layers with `norm_beside` */
  void *const *read;  /* [depth]: where a copy of `hidden` before each layer goes, NULL for nowhere; or NULL */
} Pass;

/* What a stage of a layer is told. */
typedef struct {
  const Pass *p;
  const Layer *l;
  int64_t chunk; /* rows of a piece */
} Stage;

#define FEW 8192 /* numbers: below, another thread is not worth telling */

/* The stage `name_rows`: `name` of every row, which is about `width` numbers of work. */
#define ROWS_OF(name)                                                                             \
  static void name##_piece(const void *stage, int64_t piece, int worker) {                        \
    const Stage *s = stage;                                                                       \
    int64_t first = piece * s->chunk, last = first + s->chunk;                                    \
    for (int64_t r = first; r < last && r < s->p->rows; r++) name(s->p, s->l, r);                 \
    (void)worker;                                                                                 \
  }                                                                                               \
  static void name##_rows(const Pass *p, const Layer *l, int64_t width) {                         \
    Stage stage = {p, l, width < FEW ? FEW / width : 1};                                          \
    pool_run(name##_piece, &stage, (p->rows + stage.chunk - 1) / stage.chunk);                    \
  }

/* What a matrix reads: the row itself or, for 8 bits and less, rounded; and in the form that this processor takes. */
#define FEED(matrix, plain, rounded)                                                 \
  {                                                                                  \
    char *fed = (char *)p->fed + r * fed_bytes(matrix);                              \
    char own[fed_as_is(matrix) ? 64 : (matrix)->in * 4] __attribute__((aligned(64))); \
    void *to = fed_as_is(matrix) ? fed : own;                                        \
    if ((matrix)->bits <= 8)                                                         \
      p->step[r] = rounded;                                                          \
    else                                                                             \
      plain;                                                                         \
    feed(matrix, to, fed);                                                           \
  }

static void norm(const Pass *p, const Matrix *m, const float *weight, float eps, int64_t r) {
  const void *row = row_of(p->hidden, r, p->width, p->bits);
  FEED(m, norm_row(row, p->bits, p->width, weight, eps, to), norm_round_row(row, p->bits, p->width, weight, eps, to))
}

static void as_is(const Pass *p, const Matrix *m, int64_t r) {
  const void *row = row_of(p->hidden, r, p->width, p->bits);
  FEED(m, memcpy(to, row, (size_t)(p->width * p->bits / 8)), wide_round_row(row, p->bits, p->width, to))
}

/* The two rows that such a layer reads, normed, one behind the other. */
static void norm_both(const Pass *p, const Layer *l, int64_t r, void *to) {
  void *row = (void *)row_of(p->hidden, r, p->width, p->bits), *second = (void *)row_of(to, 1, p->width, p->bits);
  norm_row(row_of(p->beside, r, p->width, p->bits), p->bits, p->width, l->norm_beside, l->eps_beside, to);
  norm_row(row, p->bits, p->width, l->norm_attention, l->eps_attention, second);
  if (l->normed_residual) memcpy(row, second, (size_t)(p->width * p->bits / 8));
}

static float norm_round_both(const Pass *p, const Layer *l, int64_t r, int16_t *to) {
  char both[8 * p->width] __attribute__((aligned(64)));
  norm_both(p, l, r, both);
  return wide_round_row(both, p->bits, 2 * p->width, to);
}

static void beside(const Pass *p, const Layer *l, const Matrix *m, int64_t r) {
  FEED(m, norm_both(p, l, r, to), norm_round_both(p, l, r, to))
}

static void norm_attention(const Pass *p, const Layer *l, int64_t r) {
  if (l->norm_beside)
    beside(p, l, &l->qkv, r);
  else if (l->norm_attention)
    norm(p, &l->qkv, l->norm_attention, l->eps_attention, r);
  else
    as_is(p, &l->qkv, r);
}

static void norm_mlp(const Pass *p, const Layer *l, int64_t r) {
  norm(p, &l->gate_up, l->norm_mlp, l->eps_mlp, r);
}

static void rotate(const Pass *p, const Layer *l, int64_t r) {
  const Args *a = &p->attention;
  Heads h = {a->heads, a->kv_heads, a->dim, l->key, l->value, a->rounded != 0};
  rotate_row((void *)row_of(p->qkv, r, a->query_stride, p->bits), &h, row_of(p->cos, r, a->dim, p->bits),
             row_of(p->sin, r, a->dim, p->bits), p->places[r], p->bits);
}

static void mix(const Pass *p, const Layer *l, int64_t r) {
  int64_t n = l->out.in;
  const void *row = row_of(p->mixed, r, n, p->bits);
  FEED(&l->out, memcpy(to, row, (size_t)(n * p->bits / 8)), wide_round_row(row, p->bits, n, to))
}

static void gate(const Pass *p, const Layer *l, int64_t r) {
  int64_t n = l->down.in;
  const void *row = row_of(p->gates, r, 2 * n, p->bits);
  FEED(&l->down, gate_row(row, p->bits, n, to), gate_round_row(row, p->bits, n, to))
}

ROWS_OF(norm_attention)
ROWS_OF(norm_mlp)
ROWS_OF(rotate)
ROWS_OF(mix)
ROWS_OF(gate)

static void multiply(const Pass *p, const Matrix *m, void *out, int add) {
  Product product = {p->fed, p->step, out, p->rows, p->bits, add};
  multiply_together(m, &product);
}

static void attend(const Pass *p, const Layer *l, const Job *jobs, int count, Work *w) {
  Args a = p->attention;
  a.query = p->qkv, a.key = l->key, a.value = l->value, a.out = p->mixed;
  a.scale = l->scale, a.softcap = l->softcap, a.window = l->window;
  attention_together(&a, jobs, count, w, p->bits);
}

static void run(const Pass *p, const Layer *l, const Job *jobs, int count, Work *w) {
  norm_attention_rows(p, l, p->width);
  multiply(p, &l->qkv, p->qkv, 0);
  rotate_rows(p, l, p->attention.query_stride);
  attend(p, l, jobs, count, w);
  mix_rows(p, l, l->out.in);
  multiply(p, &l->out, p->hidden, 1);
  norm_mlp_rows(p, l, p->width);
  multiply(p, &l->gate_up, p->gates, 0);
  gate_rows(p, l, 2 * l->down.in);
  multiply(p, &l->down, p->hidden, 1);
}

static double work_of(const Pass *p, const Layer *l) {
  return attention_work(&p->attention, p->bits) + matmul_work(&l->qkv, p->rows) + matmul_work(&l->out, p->rows) +
         matmul_work(&l->gate_up, p->rows) + matmul_work(&l->down, p->rows);
}

/* Returns 0, or 1 if there was no memory. */
int pilotfish_layers(const Pass *p, const Layer *layers, int64_t depth, int threads) {
  int workers = pool_enter(threads);
  int64_t tile = attention_tile(&p->attention, pool_threads());
  int count = attention_plan(&p->attention, tile, NULL);
  Job *jobs = malloc(sizeof(Job) * (size_t)(count ? count : 1));
  Work *w = jobs ? attention_begin(&p->attention, workers) : NULL;
  if (w) {
    attention_plan(&p->attention, tile, jobs);
    for (int64_t i = 0; i < depth; i++) {
      if (p->read && p->read[i]) memcpy(p->read[i], p->hidden, (size_t)(p->rows * p->width * p->bits / 8));
      run(p, layers + i, jobs, count, w);
    }
    attention_end(w, workers);
  }
  free(jobs);
  pool_leave((double)depth * work_of(p, layers));
  return !w;
}
