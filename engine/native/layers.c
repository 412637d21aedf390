/* All decoder layers of a transformer in one call: norm, query/key/value, rotation, attention, output, norm, gate and
 * up, down. The threads start once and meet between the stages. Each stage is what the functions of this folder do when
 * they are called one by one, so the result is the same bits. */

#include "attention.h"
#include "matmul.h"
#include "rows.h"

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
static int omp_get_num_threads(void) { return 1; }
#endif

typedef struct {
  Matrix qkv, out, gate_up, down;
  const float *norm_attention, *norm_mlp; /* [width] */
  void *key, *value;                      /* of the arena: [arena rows, kv_heads, dim] */
  float eps_attention, eps_mlp, scale, softcap;
  int64_t window;
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
} Pass;

/* What a matrix reads: the row itself or, for 8 bits and less, rounded; and in the form that this processor takes. */
#define FEED(matrix, plain, rounded)                                                   \
  _Pragma("omp for schedule(static)") for (int64_t r = 0; r < p->rows; r++) {          \
    char *fed = (char *)p->fed + r * fed_bytes(matrix);                                \
    char own[fed_as_is(matrix) ? 64 : (matrix)->in * 4] __attribute__((aligned(64)));  \
    void *to = fed_as_is(matrix) ? fed : own;                                          \
    if ((matrix)->bits <= 8)                                                           \
      p->step[r] = rounded;                                                            \
    else                                                                               \
      plain;                                                                           \
    feed(matrix, to, fed);                                                             \
  }

static void multiply(const Pass *p, const Matrix *m, void *out, int add) {
  Product product = {p->fed, p->step, out, p->rows, p->bits, add};
  int64_t panels = matmul_panels(m), me = omp_get_thread_num(), threads = omp_get_num_threads();
  multiply_panels(m, &product, panels * me / threads, panels * (me + 1) / threads);
#pragma omp barrier
}

static void norm(const Pass *p, const Matrix *m, const float *weight, float eps) {
  FEED(m, norm_row(row_of(p->hidden, r, p->width, p->bits), p->bits, p->width, weight, eps, to),
       norm_round_row(row_of(p->hidden, r, p->width, p->bits), p->bits, p->width, weight, eps, to))
}

static void attend(const Pass *p, const Layer *l, const Job *jobs, int count, Work *w) {
  Args a = p->attention;
  Heads h = {a.heads, a.kv_heads, a.dim, l->key, l->value};
  a.query = p->qkv, a.key = l->key, a.value = l->value, a.out = p->mixed;
  a.scale = l->scale, a.softcap = l->softcap, a.window = l->window;
#pragma omp for schedule(static)
  for (int64_t r = 0; r < p->rows; r++)
    rotate_row((void *)row_of(p->qkv, r, a.query_stride, p->bits), &h, row_of(p->cos, r, a.dim, p->bits),
               row_of(p->sin, r, a.dim, p->bits), p->places[r], p->bits);
  attention_share(&a, jobs, count, w, p->bits);
}

static void mlp(const Pass *p, const Layer *l) {
  int64_t inner = l->down.in;
  norm(p, &l->gate_up, l->norm_mlp, l->eps_mlp);
  multiply(p, &l->gate_up, p->gates, 0);
  FEED(&l->down, gate_row(row_of(p->gates, r, 2 * inner, p->bits), p->bits, inner, to),
       gate_round_row(row_of(p->gates, r, 2 * inner, p->bits), p->bits, inner, to))
  multiply(p, &l->down, p->hidden, 1);
}

static void run(const Pass *p, const Layer *l, const Job *jobs, int count, Work *w) {
  int64_t mixed = l->out.in;
  norm(p, &l->qkv, l->norm_attention, l->eps_attention);
  multiply(p, &l->qkv, p->qkv, 0);
  attend(p, l, jobs, count, w);
  FEED(&l->out, memcpy(to, row_of(p->mixed, r, mixed, p->bits), (size_t)(mixed * p->bits / 8)),
       wide_round_row(row_of(p->mixed, r, mixed, p->bits), p->bits, mixed, to))
  multiply(p, &l->out, p->hidden, 1);
  mlp(p, l);
}

/* Returns 0, or 1 if there was no memory. */
int pilotfish_layers(const Pass *p, const Layer *layers, int64_t depth, int threads) {
  int count = attention_plan(&p->attention, NULL), failed = 0;
  Job *jobs = malloc(sizeof(Job) * (size_t)(count ? count : 1));
  if (!jobs) return 1;
  attention_plan(&p->attention, jobs);
#pragma omp parallel num_threads(threads)
  {
    Work w;
    int ready = attention_begin(&p->attention, &w);
#pragma omp atomic
    failed |= !ready;
#pragma omp barrier
    if (!failed)
      for (int64_t i = 0; i < depth; i++) run(p, layers + i, jobs, count, &w);
    attention_end(&w);
  }
  free(jobs);
  return failed;
}
