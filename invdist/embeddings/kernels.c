// Table rows in motion: sorted, gathered, summed, added, and the norms of sums, each in one pass over memory. Called through kernels.py, which says what
// the arguments are; row_moves.py and row_optimizers.py have the same in torch operators, for GPUs and for machines
// without a compiler. Rows of a table are `width` floats side by side. Functions that take rows by index return the
// place of the first index that is out of range, or -1.
//
// Work is divided among `threads` (parts.h): a row, and a sum of rows, is the work of one of them, in the order of one
// thread, so that results are the same to the bit for any number of threads.

#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "parts.h"

enum { DIGIT = 11, BINS = 1 << DIGIT, SQUARES = 2048, ROUND = 1024 };

// Sorts keys (stable radix sort), finds where each distinct one starts, and the number of distinct ones.
// Returns -1 if a key and an index do not fit one word together. `words` has room for 2n.
i64 unique_rows(const i64 *keys, i64 n, i64 *distinct, i64 *order, i64 *starts, u64 *words) {
    u64 largest = 0;
    for (i64 i = 0; i < n; i++) largest |= (u64)keys[i];
    int index_bits = n > 1 ? 64 - __builtin_clzll((u64)n - 1) : 1;
    int key_bits = largest ? 64 - __builtin_clzll(largest) : 1;
    if (index_bits + key_bits > 64) return -1;
    u64 *from = words, *to = words + n;
    for (i64 i = 0; i < n; i++) from[i] = (u64)keys[i] << index_bits | (u64)i;
    const int passes = (key_bits + DIGIT - 1) / DIGIT, digit = (key_bits + passes - 1) / passes, bins = 1 << digit;
    for (int shift = index_bits; shift < index_bits + key_bits; shift += digit) {
        i64 place[BINS], sum = 0;
        memset(place, 0, bins * sizeof *place);
        for (i64 i = 0; i < n; i++) place[from[i] >> shift & (bins - 1)]++;
        for (int bin = 0; bin < bins; bin++) {
            i64 count = place[bin];
            place[bin] = sum;
            sum += count;
        }
        for (i64 i = 0; i < n; i++) to[place[from[i] >> shift & (bins - 1)]++] = from[i];
        u64 *swap = from;
        from = to, to = swap;
    }
    i64 count = 0;
    u64 mask = ((u64)1 << index_bits) - 1, before = ~(u64)0;  // which is no key
    for (i64 i = 0; i < n; i++) {
        u64 key = from[i] >> index_bits;
        order[i] = (i64)(from[i] & mask);
        distinct[count] = (i64)key, starts[count] = i;  // stays if the key is new: nobody can foresee that, so no branch
        count += key != before;
        before = key;
    }
    return count;
}

static PART gather_part(const float *table, i64 rows, i64 width, const i64 *index, i64 begin, i64 end, float *out) {
    const i64 ahead = rows_ahead(width);
    for (i64 i = begin; i < end; i++) {
        if ((u64)index[i] >= (u64)rows) return i;
        if (i + ahead < end && (u64)index[i + ahead] < (u64)rows) prefetch(table + index[i + ahead] * width, width);
        memcpy(out + i * width, table + index[i] * width, width * sizeof(float));
    }
    return -1;
}

// out = table[index]
i64 gather(const float *table, i64 rows, i64 width, const i64 *index, i64 n, float *out, int threads) {
    return IN_PARTS(n, gather_part(table, rows, width, index, begin, end, out));
}

static PART gather_keys_part(const float *const *tables, const i64 *rows, i64 count, i64 shift, i64 width,
                             const i64 *key, i64 begin, i64 end, float *out) {
    const i64 ahead = rows_ahead(width);
    i64 mask = ((i64)1 << shift) - 1;
    for (i64 i = begin; i < end; i++) {
        i64 table = key[i] >> shift, row = key[i] & mask;
        if ((u64)table >= (u64)count || row >= rows[table]) return i;
        if (i + ahead < end && (u64)(key[i + ahead] >> shift) < (u64)count)
            prefetch(tables[key[i + ahead] >> shift] + (key[i + ahead] & mask) * width, width);
        memcpy(out + i * width, tables[table] + row * width, width * sizeof(float));
    }
    return -1;
}

// out = tables[key >> shift][the lower bits of key]
i64 gather_keys(const float *const *tables, const i64 *rows, i64 count, i64 shift, i64 width, const i64 *key, i64 n,
                float *out, int threads) {
    return IN_PARTS(n, gather_keys_part(tables, rows, count, shift, width, key, begin, end, out));
}

// Rows that came from several ranks: those of part p are rows edges[p] to edges[p + 1] of the whole.
typedef struct {
    const float *const *parts;
    const i64 *edges;
    i64 width;
} Rows;

static inline i64 part_of(Rows rows, i64 index) {
    i64 part = 0;
    while (index >= rows.edges[part + 1]) part++;
    return part;
}

static inline const float *row_of(Rows rows, i64 index) {
    i64 part = part_of(rows, index);
    return rows.parts[part] + (index - rows.edges[part]) * rows.width;
}

static PART gather_parts_part(Rows rows, const i64 *index, i64 begin, i64 end, float *out) {
    const i64 width = rows.width, ahead = rows_ahead(width);
    for (i64 i = begin; i < end; i++) {
        if (i + ahead < end) prefetch(row_of(rows, index[i + ahead]), width);
        memcpy(out + i * width, row_of(rows, index[i]), width * sizeof(float));
    }
    return -1;
}

// out = rows[index]; indices are in range
void gather_parts(const float *const *parts, const i64 *edges, i64 width, const i64 *index, i64 n, float *out,
                  int threads) {
    Rows rows = {parts, edges, width};
    IN_PARTS(n, gather_parts_part(rows, index, begin, end, out));
}

static inline void add(float *restrict sum, const float *restrict value, i64 width) {
    for (i64 c = 0; c < width; c++) sum[c] += value[c];
}

// The first of `count` ascending values that is not below `least`.
static i64 first_from(const i64 *values, i64 count, i64 least) {
    i64 low = 0;
    while (low < count) {
        i64 middle = (low + count) / 2;
        if (values[middle] < least) low = middle + 1;
        else count = middle;
    }
    return low;
}

// The first of `count` segments of n occurrences that starts at one of them or later.
static i64 segment_from(const i64 *starts, i64 count, i64 n, i64 occurrence) {
    return occurrence <= 0 ? 0 : occurrence >= n ? count : first_from(starts, count, occurrence);
}

static PART inverse_part(const i64 *order, const i64 *starts, i64 count, i64 n, i64 begin, i64 end, i64 *out) {
    const i64 last = segment_from(starts, count, n, end);
    for (i64 s = segment_from(starts, count, n, begin); s < last; s++) {
        i64 stop = s + 1 < count ? starts[s + 1] : n;
        for (i64 j = starts[s]; j < stop; j++) out[order[j]] = s;
    }
    return -1;
}

// inverse[i]: the place of occurrence i among the distinct rows.
void inverse(const i64 *order, const i64 *starts, i64 count, i64 n, i64 *out, int threads) {
    IN_PARTS(n, inverse_part(order, starts, count, n, begin, end, out));
}

// The sums of the segments from `first` to `last`: sum_segments says of what.
static inline void sums_of(Rows rows, const i64 *order, const i64 *starts, i64 count, i64 n, float scale, i64 first,
                           i64 last, float *restrict out) {
    const float *const *parts = rows.parts;
    const i64 *edges = rows.edges, width = rows.width, ahead = rows_ahead(width);
    float of_part[width];
    for (i64 s = first; s < last; s++) {
        float *sum = out + s * width, *into = sum;
        i64 stop = s + 1 < count ? starts[s + 1] : n, before = -1;
        for (i64 j = starts[s]; j < stop; j++) {
            i64 part = part_of(rows, order[j]);
            const float *value = parts[part] + (order[j] - edges[part]) * width;
            if (j + ahead < n) prefetch(row_of(rows, order[j + ahead]), width);
            if (part == before) {
                add(into, value, width);
                continue;
            }
            if (into != sum) add(sum, into, width);
            into = before < 0 ? sum : of_part;
            memcpy(into, value, width * sizeof(float));
            before = part;
        }
        if (into != sum) add(sum, into, width);
        if (scale != 1.0f) for (i64 c = 0; c < width; c++) sum[c] *= scale;
    }
}

static PART sum_segments_part(Rows rows, const i64 *order, const i64 *starts, i64 count, i64 n, float scale, i64 begin,
                              i64 end, float *out) {
    const i64 first = segment_from(starts, count, n, begin), last = segment_from(starts, count, n, end);
    sums_of(rows, order, starts, count, n, scale, first, last, out);
    return -1;
}

// out[s] = scale * the sum of rows[order[j]] over the occurrences j of distinct row s, in their order. Those of each part
// are summed first: it makes no difference whether a rank sends its sums, or rows that are summed here.
void sum_segments(const float *const *parts, const i64 *edges, i64 width, const i64 *order, const i64 *starts,
                  i64 count, i64 n, float scale, float *restrict out, int threads) {
    Rows rows = {parts, edges, width};
    IN_PARTS(n, sum_segments_part(rows, order, starts, count, n, scale, begin, end, out));
}

static float square_sum_of_block(const float *values, i64 n) {
    float lanes[4 * LANES] = {0}, rest = 0;  // four vectors: the next addition need not wait for the last
    i64 i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int l = 0; l < 4 * LANES; l++) lanes[l] = fmaf(values[i + l], values[i + l], lanes[l]);
    for (; i < n; i++) rest += values[i] * values[i];
    for (int v = 0; v < 4; v++) rest += total(lanes + v * LANES);
    return rest;
}

static PART square_sums(const float *values, i64 n, i64 block, i64 begin, i64 end, float *out) {
    for (i64 b = begin; b < end; b++) out[b] = square_sum_of_block(values + b * block, least(block, n - b * block));
    return -1;
}

static PART sign_step_part(float *values, i64 begin, i64 end, float alpha, float eps) {
    for (i64 i = begin; i < end; i++) values[i] = alpha * (values[i] / (fabsf(values[i]) + eps));
    return -1;
}

// values = alpha * values / (|values| + eps)
void sign_step(float *values, i64 n, float alpha, float eps, int threads) {
    IN_PARTS(n, sign_step_part(values, begin, end, alpha, eps));
}

// The sum over the blocks of n values of what `found[]` gets for each in `call`: sums of a round of blocks wait for each
// other, and are added in their order, whoever made them.
#define SUM_OF_BLOCKS(n, size, call)                                                     \
    ({                                                                                   \
        const i64 blocks_ = ((n) + (size)-1) / (size);                                   \
        double sum_ = 0;                                                                 \
        for (i64 done = 0; done < blocks_; done += ROUND) {                              \
            float found[ROUND];                                                          \
            const i64 some_ = least(ROUND, blocks_ - done);                              \
            IN_PARTS(some_, call);                                                       \
            for (i64 b = 0; b < some_; b++) sum_ += found[b];                            \
        }                                                                                \
        sum_;                                                                            \
    })

// The sum of squares, in float32 within blocks and in float64 over them.
double square_sum(const float *values, i64 n, int threads) {
    return SUM_OF_BLOCKS(n, SQUARES,
                         square_sums(values + done * SQUARES, n - done * SQUARES, SQUARES, begin, end, found));
}

static PART sum_and_step_part(Rows rows, const i64 *order, const i64 *starts, i64 count, i64 n, float scale,
                              i64 sign, float alpha, float eps, i64 block, i64 begin, i64 end, float *out,
                              float *squares) {
    for (i64 b = begin; b < end; b++) {
        const i64 first = b * block, last = least(count, first + block), values = (last - first) * rows.width;
        sums_of(rows, order, starts, count, n, scale, first, last, out);
        squares[b] = square_sum_of_block(out + first * rows.width, values);
        if (sign) sign_step_part(out + first * rows.width, 0, values, alpha, eps);
    }
    return -1;
}

// sum_segments, the sum of squares of the sums, which it returns, and then, if asked for, sign_step of them: block by block,
// while they are in the cache.
double sum_and_step(const float *const *parts, const i64 *edges, i64 width, const i64 *order, const i64 *starts,
                    i64 count, i64 n, float scale, i64 sign, float alpha, float eps, float *out, int threads) {
    Rows rows = {parts, edges, width};
    const i64 block = width < SQUARES ? SQUARES / width : 1;
    return SUM_OF_BLOCKS(count, block,
                         sum_and_step_part(rows, order, starts, count, n, scale, sign, alpha, eps, block, done + begin,
                                           done + end, out, found - done));
}

// Looks whether another process wrote `number`, for at most `microseconds`: first without pause, then giving way to
// other processes. Returns whether it did.
int wait_for(const volatile i64 *word, i64 number, i64 microseconds) {
    for (int look = 0; look < 256; look++) {
        if (__atomic_load_n(word, __ATOMIC_ACQUIRE) == number) return 1;
        __builtin_ia32_pause();
    }
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    i64 end = now.tv_sec * 1000000 + now.tv_nsec / 1000 + microseconds;
    while (now.tv_sec * 1000000 + now.tv_nsec / 1000 < end) {
        for (int look = 0; look < 8; look++) {
            if (__atomic_load_n(word, __ATOMIC_ACQUIRE) == number) return 1;
            sched_yield();
        }
        clock_gettime(CLOCK_MONOTONIC, &now);
    }
    return __atomic_load_n(word, __ATOMIC_ACQUIRE) == number;
}

static PART add_rows_part(float *table, i64 rows, i64 width, const i64 *index, i64 begin, i64 end, const float *values,
                          float scale) {
    const i64 ahead = rows_ahead(width);
    for (i64 i = begin; i < end; i++) {
        if ((u64)index[i] >= (u64)rows) return i;
        if (i + ahead < end && (u64)index[i + ahead] < (u64)rows) prefetch(table + index[i + ahead] * width, width);
        float *restrict row = table + index[i] * width;
        const float *restrict value = values + i * width;
        for (i64 c = 0; c < width; c++) row[c] = fmaf(scale, value[c], row[c]);
    }
    return -1;
}

// table[index] += scale * values, for distinct indices
i64 add_rows(float *table, i64 rows, i64 width, const i64 *index, i64 n, const float *values, float scale,
             int threads) {
    return IN_PARTS(n, add_rows_part(table, rows, width, index, begin, end, values, scale));
}

static PART places_part(const i64 *given, i64 given_count, const i64 *wanted, const i64 *order, const i64 *starts,
                        i64 count, i64 n, i64 begin, i64 end, i64 *out) {
    const i64 first = segment_from(starts, count, n, begin), last = segment_from(starts, count, n, end);
    i64 at = first && first < last ? first_from(given, given_count, wanted[first]) : 0;
    for (i64 s = first; s < last; s++) {
        while (at < given_count && given[at] < wanted[s]) at++;
        i64 place = at < given_count && given[at] == wanted[s] ? at : -1;
        i64 stop = s + 1 < count ? starts[s + 1] : n;
        for (i64 j = starts[s]; j < stop; j++) out[order[j]] = place;
    }
    return -1;
}

// Each occurrence of the wanted rows gets the place of the same row among the given ones, or -1. Both lists of distinct
// rows ascend.
void places(const i64 *given, i64 given_count, const i64 *wanted, const i64 *order, const i64 *starts, i64 count,
            i64 n, i64 *out, int threads) {
    IN_PARTS(n, places_part(given, given_count, wanted, order, starts, count, n, begin, end, out));
}

// The keys of ids of a table that is cut into blocks of rows: ids[i] + bases[owner of its row]. The row of an id is
// id * multiplier % rows.
i64 locate(const i64 *ids, i64 n, i64 block, const i64 *bases, i64 multiplier, i64 rows, i64 *out) {
    double per_block = 1.0 / (double)block;
    for (i64 i = 0; i < n; i++) {
        i64 id = ids[i];
        if ((u64)id >= (u64)rows) return i;
        if (multiplier != 1) id = id * multiplier % rows;
        i64 owner = (i64)((double)id * per_block);
        owner += (id >= (owner + 1) * block) - (id < owner * block);
        out[i] = id + bases[owner];
    }
    return -1;
}

