/* How fast memory can be read: the sum of a buffer, in words of 64 bytes, each thread its own stretch. */
#include <stddef.h>
#include <stdint.h>

typedef uint64_t word __attribute__((vector_size(64)));

#define STREAMS 4 /* places read at a time: one alone leaves the memory waiting */
#define AHEAD 24  /* words asked for before they are needed */

static uint64_t stretch(const word *at, size_t count)
{
    word sums[STREAMS] = {0};
    size_t each = count / STREAMS;
    for (size_t i = 0; i < each; i++)
        for (int s = 0; s < STREAMS; s++) {
            __builtin_prefetch(&at[s * each + i + AHEAD]);
            sums[s] += at[s * each + i];
        }
    uint64_t total = 0;
    for (int s = 0; s < STREAMS; s++)
        for (int lane = 0; lane < 8; lane++)
            total += sums[s][lane];
    return total;
}

/* `bytes` is a multiple of 64 * STREAMS * threads, `buffer` is aligned to 64 bytes. */
uint64_t read_through(const void *buffer, size_t bytes, int threads)
{
    size_t each = bytes / sizeof(word) / threads;
    uint64_t total = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : total) schedule(static, 1)
    for (int t = 0; t < threads; t++)
        total += stretch((const word *)buffer + t * each, each);
    return total;
}
