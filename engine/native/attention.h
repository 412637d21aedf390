/* Attention of a ragged batch, one job at a time; see attention.c. */

#ifndef PILOTFISH_ATTENTION_H
#define PILOTFISH_ATTENTION_H

#include "vectors.h"

#define ATTENTION_ROWS 32  /* query rows of a job, at most */
#define ATTENTION_BLOCK 64 /* keys */

typedef struct {
  const void *query, *key, *value; /* [tokens, heads, dim], [arena rows, kv_heads, dim], [.., kv_heads, value_dim] */
                                   /* `rounded`: a head is a float scale and its int8 codes; dims count codes only */
  void *out;                       /* [tokens, heads, value_dim], dense */
  const int32_t *first_rows;       /* [sequences + 1] */
  const int32_t *kv_lens;          /* [sequences] */
  const int32_t *tables;           /* [sequences, width]: page numbers */
  const float *sinks;              /* [heads], one more score for each; NULL: none */
  int64_t query_stride, key_stride, value_stride; /* elements from one token, or one row of the arena, to the next */
  int64_t sequences, width, page_size, heads, kv_heads, dim, value_dim;
  int64_t window, chunk; /* 0: none */
  int64_t rounded;       /* 0: keys and values have the query's type */
  float scale, softcap;  /* softcap 0: none */
} Args;

typedef struct {
  int32_t sequence, head, first, count; /* `count` rows from `first` on, of group * tokens */
} Job;

/* Where a block's keys and values lie, in elements of the arena; of rounded ones their codes, a scale before each. */
typedef struct {
  int64_t key[ATTENTION_BLOCK], value[ATTENTION_BLOCK];
} Places;

/* What a thread works in. */
typedef struct {
  float *query;  /* [ATTENTION_ROWS, dim] */
  float *keys;   /* [dim, BLOCK]: transposed; or [BLOCK, dim] */
  float *values; /* [BLOCK, value_dim] */
  const float *key_rows[ATTENTION_BLOCK], *value_rows[ATTENTION_BLOCK]; /* where one lies, if it is read in its place */
  float key_scale[ATTENTION_BLOCK], value_scale[ATTENTION_BLOCK]; /* of a rounded block, which is multiplied as codes */
  float *scores; /* [ATTENTION_ROWS, BLOCK], which become weights */
  float *sums;   /* [ATTENTION_ROWS, value_dim], of weighted values */
  float maximum[ATTENTION_ROWS], weight[ATTENTION_ROWS];
} Work;

/* Rows of a job: ATTENTION_ROWS, and fewer where there would be fewer jobs than threads. */
int64_t attention_tile(const Args *a, int threads);

/* How many jobs of `tile` rows there are; written to `jobs` unless it is NULL. Which they are depends on no layer. */
int attention_plan(const Args *a, int64_t tile, Job *jobs);

/* Memory for this number of workers; NULL if there is none. */
Work *attention_begin(const Args *a, int workers);
void attention_end(Work *w, int workers);

/* All jobs, in pieces that the threads of the pool claim. */
void attention_together(const Args *a, const Job *jobs, int count, Work *w, int bits);

/* How much of the pool's time this takes, as `matmul_work` has it. */
double attention_work(const Args *a, int bits);

#endif
