/* All decoder layers of a transformer in one call: norm, query/key/value, rotation, attention, output, norm, gate and
 * up, down. Each is a stage whose pieces the threads of the pool share; its results have the same bits as the separate
 * functions of this folder.
 *
 * A norm without a weight is omitted. The outputs of attention and MLP may be normalised before they are added
 * (`after_attention`, `after_mlp`). A layer may read two normalised rows: first that of `beside`, then its own
 * (`norm_beside`). `normed_residual`: the layer adds to its normalised row. */

#include "attention.h"
#include "matmul.h"
#include "pool.h"
#include "rows.h"

/* Matrices that read the same row. Their outputs are concatenated. */
typedef struct {
  Matrix part[3];
  int64_t parts;
} Joined;

typedef struct {
  Joined qkv, out, gate_up, down;
  Norm norm_attention, after_attention, norm_mlp, after_mlp; /* [width] */
  Norm norm_query, norm_key;                                 /* [dim]: of each head */
  Norm norm_beside;                                          /* [width] */
  void *key, *value; /* in the arena: [arena rows, kv_heads, dim], int8 if `rounded` (`Args`) */
  int64_t number, window;
  float scale, softcap;
  Activation activation;
  int32_t normed_residual;
} Layer;

/* The caller allocates scratch memory; sizes in elements of the hidden type unless noted. */
typedef struct {
  void *hidden;              /* [rows, width]: input and output */
  const void *const *cos, *const *sin; /* [depth]: for each layer [rows, dim] */
  const int64_t *places;     /* [rows]: arena rows */
  void *qkv, *mixed, *gates; /* [rows, (heads + 2 kv_heads) dim], [rows, heads dim], [rows, 2 inner] */
  void *made;                /* [rows, width]: outputs to normalise before they are added */
  void *fed;                 /* [rows, 4 in] bytes for every matrix with its own input form */
  float *step;               /* [rows] */
  Args attention;            /* without the fields that differ between layers */
  int64_t rows, width;
  int bits;
  const void *beside; /* [rows, width], for layers with `norm_beside` */
  void *const *read;  /* [depth]: where to copy `hidden` before each layer, NULL: no copy; or NULL */
} Pass;

/* The arguments of a stage of a layer. */
typedef struct {
  const Pass *p;
  const Layer *l;
  int64_t chunk; /* rows per piece */
} Stage;

#define FEW 8192 /* elements; for fewer, another thread does not save time */

/* Defines the stage `name_rows`: `name` for every row, about `width` elements of work each. */
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

/* The input rows of part `i`. Parts with the same input form share them. */
static void *fed_rows(const Pass *p, const Joined *j, int64_t i) {
  char *at = p->fed;
  for (int64_t k = 1; k <= i; k++)
    if (!fed_alike(j->part + k, j->part + k - 1)) at += p->rows * j->part[k - 1].in * 4;
  return at;
}

/* `from` is the input of `feed`. If the first part reads it unchanged, it is already in place. */
static void feed_all(const Pass *p, const Joined *j, const void *from, int64_t r) {
  for (int64_t i = 0; i < j->parts; i++) {
    const Matrix *m = j->part + i;
    if (!i || !fed_alike(m, m - 1)) feed(m, from, (char *)fed_rows(p, j, i) + r * fed_bytes(m));
  }
}

/* The input of matrices: the row, rounded for 8 bits and less, in the form for this processor. */
#define FEED(joined, plain, rounded)                                       \
  {                                                                        \
    const Matrix *m = (joined)->part;                                      \
    char own[fed_as_is(m) ? 64 : m->in * 4] __attribute__((aligned(64)));  \
    void *to = fed_as_is(m) ? (char *)p->fed + r * fed_bytes(m) : own;     \
    if (m->bits <= 8)                                                      \
      p->step[r] = rounded;                                                \
    else                                                                   \
      plain;                                                               \
    feed_all(p, joined, to, r);                                            \
  }

static void norm(const Pass *p, const Joined *j, Norm norm, int64_t r) {
  const void *row = row_of(p->hidden, r, p->width, p->bits);
  FEED(j, norm_row(row, p->bits, p->width, norm, to), norm_round_row(row, p->bits, p->width, norm, to))
}

static void as_is(const Pass *p, const Joined *j, const void *rows, int64_t n, int64_t r) {
  const void *row = row_of(rows, r, n, p->bits);
  FEED(j, memcpy(to, row, (size_t)(n * p->bits / 8)), wide_round_row(row, p->bits, n, to))
}

/* The two input rows of a layer with `norm_beside`, normalised and concatenated. */
static void norm_both(const Pass *p, const Layer *l, int64_t r, void *to) {
  void *row = (void *)row_of(p->hidden, r, p->width, p->bits), *second = (void *)row_of(to, 1, p->width, p->bits);
  norm_row(row_of(p->beside, r, p->width, p->bits), p->bits, p->width, l->norm_beside, to);
  norm_row(row, p->bits, p->width, l->norm_attention, second);
  if (l->normed_residual) memcpy(row, second, (size_t)(p->width * p->bits / 8));
}

static float norm_round_both(const Pass *p, const Layer *l, int64_t r, int16_t *to) {
  char both[8 * p->width] __attribute__((aligned(64)));
  norm_both(p, l, r, both);
  return wide_round_row(both, p->bits, 2 * p->width, to);
}

static void beside(const Pass *p, const Layer *l, const Joined *j, int64_t r) {
  FEED(j, norm_both(p, l, r, to), norm_round_both(p, l, r, to))
}

static void norm_attention(const Pass *p, const Layer *l, int64_t r) {
  if (l->norm_beside.weight)
    beside(p, l, &l->qkv, r);
  else if (l->norm_attention.weight)
    norm(p, &l->qkv, l->norm_attention, r);
  else
    as_is(p, &l->qkv, p->hidden, p->width, r);
}

static void rotate(const Pass *p, const Layer *l, int64_t r) {
  const Args *a = &p->attention;
  Heads h = {a->heads, a->kv_heads, a->dim, l->key, l->value, a->rounded != 0, l->norm_query, l->norm_key};
  rotate_row((void *)row_of(p->qkv, r, a->query_stride, p->bits), &h, row_of(p->cos[l->number], r, a->dim, p->bits),
             row_of(p->sin[l->number], r, a->dim, p->bits), p->places[r], p->bits);
}

static void mix(const Pass *p, const Layer *l, int64_t r) { as_is(p, &l->out, p->mixed, l->out.part->in, r); }

static void add_made(const Pass *p, Norm norm, int64_t r) {
  void *to = (void *)row_of(p->hidden, r, p->width, p->bits);
  if (norm.weight) add_normed_row(row_of(p->made, r, p->width, p->bits), p->bits, p->width, norm, to);
}

static void norm_mlp(const Pass *p, const Layer *l, int64_t r) {
  add_made(p, l->after_attention, r);
  norm(p, &l->gate_up, l->norm_mlp, r);
}

static void gate(const Pass *p, const Layer *l, int64_t r) {
  int64_t n = l->down.part->in;
  const void *row = row_of(p->gates, r, 2 * n, p->bits);
  FEED(&l->down, gate_row(row, p->bits, n, l->activation, to), gate_round_row(row, p->bits, n, l->activation, to))
}

static void add_mlp(const Pass *p, const Layer *l, int64_t r) { add_made(p, l->after_mlp, r); }

ROWS_OF(norm_attention)
ROWS_OF(norm_mlp)
ROWS_OF(rotate)
ROWS_OF(mix)
ROWS_OF(gate)
ROWS_OF(add_mlp)

/* The products of all parts, concatenated. */
static void multiply(const Pass *p, const Joined *j, void *out, int add) {
  int64_t stride = 0, at = 0;
  for (int64_t i = 0; i < j->parts; i++) stride += j->part[i].out;
  for (int64_t i = 0; i < j->parts; at += j->part[i++].out) {
    Product product = {fed_rows(p, j, i), p->step, (char *)out + at * (p->bits / 8), stride, p->rows, p->bits, add};
    multiply_together(j->part + i, &product);
  }
}

/* Add products to the hidden rows, or write them to `made` if a norm comes first. */
static void multiply_and_add(const Pass *p, const Joined *j, Norm after) {
  if (after.weight)
    multiply(p, j, p->made, 0);
  else
    multiply(p, j, p->hidden, 1);
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
  mix_rows(p, l, l->out.part->in);
  multiply_and_add(p, &l->out, l->after_attention);
  norm_mlp_rows(p, l, p->width);
  multiply(p, &l->gate_up, p->gates, 0);
  gate_rows(p, l, 2 * l->down.part->in);
  multiply_and_add(p, &l->down, l->after_mlp);
  if (l->after_mlp.weight) add_mlp_rows(p, l, p->width);
}

static double work_of(const Pass *p, const Layer *l) {
  const Joined *joined[] = {&l->qkv, &l->out, &l->gate_up, &l->down};
  double work = attention_work(&p->attention, p->bits);
  for (int k = 0; k < 4; k++)
    for (int64_t i = 0; i < joined[k]->parts; i++) work += matmul_work(joined[k]->part + i, p->rows);
  return work;
}

/* Returns 0, or 1 if an allocation failed. */
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
