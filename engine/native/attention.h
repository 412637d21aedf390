/* Attention of a ragged batch, one job at a time; see attention.c. */

#ifndef PILOTFISH_ATTENTION_H
#define PILOTFISH_ATTENTION_H

#include "vectors.h"

#define ATTENTION_ROWS 32  /* query rows of a job, at most */
#define ATTENTION_BLOCK 64 /* keys */

typedef struct {
  const void *query, *key, *value; /* [tokens, heads, dim], [arena rows, kv_heads, dim] twice */
  void *out;                       /* [tokens, heads, dim], dense */
  const int32_t *first_rows;       /* [sequences + 1] */
  const int32_t *kv_lens;          /* [sequences] */
  const int32_t *tables;           /* [sequences, width]: page numbers */
  int64_t query_stride;            /* elements from one token of the query to the next */
  int64_t sequences, width, page_size, heads, kv_heads, dim, window; /* window 0: none */
  float scale, softcap;                                               /* softcap 0: none */
} Args;

typedef struct {
  int32_t sequence, head, first, count; /* `count` rows from `first` on, of group * tokens */
} Job;

/* What a thread works in. Sizes are for the widest head. */
typedef struct {
  float *query;  /* [ATTENTION_ROWS, dim] */
  float *keys;   /* [dim, BLOCK]: transposed; or [BLOCK, dim] */
  float *values; /* [BLOCK, dim] */
  const float *key_rows[ATTENTION_BLOCK], *value_rows[ATTENTION_BLOCK]; /* where one lies, if it is read in its place */
  float *scores; /* [ATTENTION_ROWS, BLOCK], which become weights */
  float *sums;   /* [ATTENTION_ROWS, dim], of weighted values */
  float maximum[ATTENTION_ROWS], weight[ATTENTION_ROWS];
} Work;

/* How many jobs there are; written to `jobs` unless it is NULL. Which they are depends on no layer. */
int attention_plan(const Args *a, Job *jobs);

/* Whether there was memory. */
int attention_begin(const Args *a, Work *w);
void attention_end(Work *w);

/* The calling thread's share, and a meeting of all at the end. */
void attention_share(const Args *a, const Job *jobs, int count, Work *w, int bits);

#endif
