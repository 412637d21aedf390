/* Attention of a ragged batch, one job at a time; see attention.c. */

#ifndef PILOTFISH_ATTENTION_H
#define PILOTFISH_ATTENTION_H

#include "vectors.h"

#define ATTENTION_ROWS 32  /* maximum query rows per job */
#define ATTENTION_BLOCK 64 /* keys */

typedef struct {
  const void *query, *key, *value; /* [tokens, heads, dim], [arena rows, kv_heads, dim], [.., kv_heads, value_dim] */
                                   /* `rounded`: a head is a float scale and int8 codes; dims exclude the scale */
  void *out;                       /* [tokens, heads, value_dim], dense */
  const int32_t *first_rows;       /* [sequences + 1] */
  const int32_t *kv_lens;          /* [sequences] */
  const int32_t *tables;           /* [sequences, width]: page numbers */
  const float *sinks;              /* [heads], one additional score each; NULL: none */
  int64_t query_stride, key_stride, value_stride; /* elements between tokens, or rows of the arena */
  int64_t sequences, width, page_size, heads, kv_heads, dim, value_dim;
  int64_t window, chunk; /* 0: none */
  int64_t rounded;       /* 0: keys and values have the query's type */
  float scale, softcap;  /* softcap 0: none */
} Args;

typedef struct {
  int32_t sequence, head, first, count; /* `count` of group * tokens rows, from `first` */
} Job;

/* Offsets of a block's keys and values in elements of the arena; int8: of the codes, each after its scale. */
typedef struct {
  int64_t key[ATTENTION_BLOCK], value[ATTENTION_BLOCK];
} Places;

/* The scratch memory of a thread. */
typedef struct {
  float *query;  /* [ATTENTION_ROWS, dim] */
  float *keys;   /* [dim, BLOCK]: transposed; or [BLOCK, dim] */
  float *values; /* [BLOCK, value_dim] */
  const float *key_rows[ATTENTION_BLOCK], *value_rows[ATTENTION_BLOCK]; /* in `keys` and `values`, or in the arena */
  float key_scale[ATTENTION_BLOCK], value_scale[ATTENTION_BLOCK]; /* of an int8 block, which is multiplied as codes */
  float *scores; /* [ATTENTION_ROWS, BLOCK], then weights */
  float *sums;   /* [ATTENTION_ROWS, value_dim], of weighted values */
  float maximum[ATTENTION_ROWS], weight[ATTENTION_ROWS];
} Work;

/* Rows per job: ATTENTION_ROWS, or fewer if there would be fewer jobs than threads. */
int64_t attention_tile(const Args *a, int threads);

/* The number of jobs of `tile` rows; writes them to `jobs` unless it is NULL. They are the same in all layers. */
int attention_plan(const Args *a, int64_t tile, Job *jobs);

/* Allocate scratch memory for this number of workers; NULL on failure. */
Work *attention_begin(const Args *a, int workers);
void attention_end(Work *w, int workers);

/* Run all jobs on the threads of the pool. */
void attention_together(const Args *a, const Job *jobs, int count, Work *w, int bits);

/* The amount of work, in the unit of `matmul_work`. */
double attention_work(const Args *a, int bits);

#endif
