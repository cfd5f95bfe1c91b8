// The permutation of NumPy's RandomState, to the bit, in a third of its time: the numbers of a Fisher-Yates shuffle are drawn
// without a branch, ahead of the swaps. hashing.py calls it, and NumPy where it cannot be compiled.

#include <stdint.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

enum { N = 624, M = 397, GROUP = 16 };

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

// The state of RandomState([low, high]): `init_by_array` of the Mersenne Twister's authors, with a key of two words.
static void seed(uint32_t low, uint32_t high, uint32_t *key) {
    const uint32_t words[2] = {low, high};
    key[0] = 19650218u;
    for (uint32_t i = 1; i < N; i++) key[i] = 1812433253u * (key[i - 1] ^ (key[i - 1] >> 30)) + i;
    int i = 1;
    for (int turn = 0; turn < N; turn++) {
        key[i] = (key[i] ^ ((key[i - 1] ^ (key[i - 1] >> 30)) * 1664525u)) + words[turn % 2] + (uint32_t)(turn % 2);
        if (++i == N) key[0] = key[N - 1], i = 1;
    }
    for (int turn = 1; turn < N; turn++) {
        key[i] = (key[i] ^ ((key[i - 1] ^ (key[i - 1] >> 30)) * 1566083941u)) - (uint32_t)i;
        if (++i == N) key[0] = key[N - 1], i = 1;
    }
    key[0] = 0x80000000u;
}

// Writes those of a group of numbers that are at most `next`, which each of them makes smaller by one. Returns how many
// they are, or -1 if that depends on the order of the numbers: then one at a time must be looked at. `out` has room for
// a group.
static inline int32_t keep(const uint32_t *words, int32_t mask, int32_t next, int32_t *out) {
    int32_t sure = next - GROUP;
#ifdef __AVX512F__
    __m512i value = _mm512_and_epi32(_mm512_loadu_si512(words), _mm512_set1_epi32(mask));
    __mmask16 fits = _mm512_cmple_epi32_mask(value, _mm512_set1_epi32(sure));
    if (_mm512_cmple_epi32_mask(value, _mm512_set1_epi32(next)) != fits) return -1;
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(fits, value));
    return __builtin_popcount(fits);
#else
    int32_t kept = 0, unsure = 0;
    for (int g = 0; g < GROUP; g++) {
        int32_t value = (int32_t)(words[g] & (uint32_t)mask);
        unsure |= (value > sure) & (value <= next);
        out[kept] = value;
        kept += value <= sure;
    }
    return unsure ? -1 : kept;
#endif
}

// A Fisher-Yates shuffle of `size` values (fewer than 2^31) of 4 bytes, or of 8, by the generator with the seed
// [low, high].
static inline __attribute__((always_inline)) void shuffle(uint32_t low, uint32_t high, int64_t size,
                                                          int32_t *restrict narrow, uint64_t *restrict wide) {
    uint32_t key[N], words[N];
    int32_t partners[N + GROUP];
    seed(low, high, key);
    for (int32_t i = (int32_t)size - 1; i >= 1;) {
        draw(key, words);
        int32_t next = i, taken = 0;
        for (int w = 0; w < N && next >= 1;) {
            int32_t edge = (int32_t)(1u << (31 - __builtin_clz((uint32_t)next))), mask = edge - 1 + edge;
            while (w < N && next >= edge) {  // while the mask is the same
                if (w + GROUP <= N && next - GROUP >= edge) {
                    int32_t kept = keep(words + w, mask, next, partners + taken);
                    if (kept >= 0) {
                        taken += kept, next -= kept, w += GROUP;
                        continue;
                    }
                }
                int32_t value = (int32_t)(words[w++] & (uint32_t)mask), fits = value <= next;
                partners[taken] = value;
                taken += fits, next -= fits;
            }
        }
        for (int t = 0; t < taken; t++, i--) {
            if (wide) {
                uint64_t swap = wide[i];
                wide[i] = wide[partners[t]], wide[partners[t]] = swap;
            } else {
                int32_t swap = narrow[i];
                narrow[i] = narrow[partners[t]], narrow[partners[t]] = swap;
            }
        }
    }
}

// Permutes 0 to size - 1.
void permutation(uint32_t low, uint32_t high, int64_t size, int32_t *out) {
    for (int32_t i = 0; i < size; i++) out[i] = i;
    shuffle(low, high, size, out, 0);
}

// Puts rows in the order of that permutation, in place: a row is one word (in `words`) while they are shuffled, which
// takes less time than to fetch each column by the order. Ids have 31 bits; labels, if there are any, are 0 to 3.
void shuffle_rows(uint32_t low, uint32_t high, int64_t size, uint32_t *user, uint32_t *item, uint8_t *label,
                  uint64_t *words) {
    for (int64_t i = 0; i < size; i++) words[i] = (uint64_t)user[i] << 33 | (uint64_t)item[i] << 2;
    if (label) for (int64_t i = 0; i < size; i++) words[i] |= label[i] & 3;
    shuffle(low, high, size, 0, words);
    for (int64_t i = 0; i < size; i++) user[i] = words[i] >> 33, item[i] = words[i] >> 2 & 0x7fffffff;
    if (label) for (int64_t i = 0; i < size; i++) label[i] = words[i] & 3;
}
