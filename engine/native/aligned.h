/* Memory that begins at a whole cache line, and at a whole vector. */

#ifndef PILOTFISH_ALIGNED_H
#define PILOTFISH_ALIGNED_H

#include <stdint.h>
#include <stdlib.h>

/* Windows has no aligned_alloc, and its heap cannot free what is aligned. */
#if defined(_WIN32)
#include <malloc.h>
static inline void *aligned_bytes(int64_t count) { return _aligned_malloc((size_t)(count + 63) / 64 * 64, 64); }
static inline void aligned_free(void *memory) { _aligned_free(memory); }
#else
static inline void *aligned_bytes(int64_t count) { return aligned_alloc(64, (size_t)(count + 63) / 64 * 64); }
static inline void aligned_free(void *memory) { free(memory); }
#endif

#endif
