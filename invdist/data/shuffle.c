// The permutation of NumPy's RandomState, to the bit, in half its time: the numbers of a Fisher-Yates shuffle are drawn
// without a branch, ahead of the swaps. hashing.py calls it, and NumPy where it cannot be compiled.

#include <stdint.h>

enum { N = 624, M = 397 };

static inline uint32_t twist(uint32_t high, uint32_t low) {
    uint32_t y = (high & 0x80000000u) | (low & 0x7fffffffu);
    return (y >> 1) ^ (-(low & 1) & 0x9908b0dfu);
}

// The next N words of the Mersenne Twister.
static void draw(uint32_t *key, uint32_t *words) {
    for (int i = 0; i < N - M; i++) key[i] = key[i + M] ^ twist(key[i], key[i + 1]);
    for (int i = N - M; i < N - 1; i++) key[i] = key[i + M - N] ^ twist(key[i], key[i + 1]);
    key[N - 1] = key[M - 1] ^ twist(key[N - 1], key[0]);
    for (int i = 0; i < N; i++) {
        uint32_t y = key[i];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        words[i] = y ^ (y >> 18);
    }
}

// Permutes 0 to size - 1 (below 2^31). `key` is the state of a generator of which nothing was drawn since its last N words.
void permutation(uint32_t *key, int64_t size, int32_t *restrict out) {
    uint32_t words[N];
    int32_t partners[N];
    for (int32_t i = 0; i < size; i++) out[i] = i;
    for (int32_t i = (int32_t)size - 1; i >= 1;) {
        draw(key, words);
        int32_t next = i, taken = 0;
        for (int w = 0; w < N && next >= 1;) {
            int32_t edge = (int32_t)(1u << (31 - __builtin_clz((uint32_t)next))), mask = 2 * edge - 1;
            for (; w < N && next >= edge; w++) {  // while the mask is the same
                int32_t value = (int32_t)(words[w] & (uint32_t)mask), fits = value <= next;
                partners[taken] = value;
                taken += fits, next -= fits;
            }
        }
        for (int t = 0; t < taken; t++, i--) {
            int32_t swap = out[i];
            out[i] = out[partners[t]];
            out[partners[t]] = swap;
        }
    }
}
