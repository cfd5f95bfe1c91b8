// What a training step does with table rows, each in one pass over memory. Called through kernels.py, which says what
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

enum { DIGIT = 11, BINS = 1 << DIGIT };

// How many rows ahead to fetch: 32 lines of memory, measured for rows of 128 bytes that another core has just written.
static inline i64 rows_ahead(i64 width) { return width <= 32 ? 16 : 8; }

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

static PART sum_segments_part(Rows rows, const i64 *order, const i64 *starts, i64 count, i64 n, float scale, i64 begin,
                              i64 end, float *restrict out) {
    const float *const *parts = rows.parts;
    const i64 *edges = rows.edges, width = rows.width, ahead = rows_ahead(width);
    const i64 last = segment_from(starts, count, n, end);
    float of_part[width];
    for (i64 s = segment_from(starts, count, n, begin); s < last; s++) {
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
    return -1;
}

// out[s] = scale * the sum of rows[order[j]] over the occurrences j of distinct row s, in their order. Those of each part
// are summed first: it makes no difference whether a rank sends its sums, or rows that are summed here.
void sum_segments(const float *const *parts, const i64 *edges, i64 width, const i64 *order, const i64 *starts,
                  i64 count, i64 n, float scale, float *restrict out, int threads) {
    Rows rows = {parts, edges, width};
    IN_PARTS(n, sum_segments_part(rows, order, starts, count, n, scale, begin, end, out));
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

static PART add_indexed_part(float *rows, i64 width, const i64 *index, i64 begin, i64 end, const float *values,
                             float c) {
    const i64 ahead = rows_ahead(width);
    for (i64 i = begin; i < end; i++) {
        if (i + ahead < end && index[i + ahead] >= 0) prefetch(values + index[i + ahead] * width, width);
        if (index[i] < 0) continue;
        float *restrict row = rows + i * width;
        const float *restrict value = values + index[i] * width;
        for (i64 x = 0; x < width; x++) row[x] = fmaf(c, value[x], row[x]);
    }
    return -1;
}

// rows[i] += c * values[index[i]] where the index is not -1
void add_indexed(float *rows, i64 n, i64 width, const i64 *index, const float *values, float c, int threads) {
    IN_PARTS(n, add_indexed_part(rows, width, index, begin, end, values, c));
}

// Three tables of the same shape, some of their columns, and the constants of a step.
typedef struct {
    float *values, *m, *v;
    i64 rows, width, first, columns;
    float kept, rate, b1, b2, c2, root, e;
} Step;

static PART adamw_part(Step t, const i64 *index, i64 begin, i64 end, const float *gradient) {
    const i64 ahead = rows_ahead(t.width), columns = t.columns;
    for (i64 i = begin; i < end; i++) {
        if ((u64)index[i] >= (u64)t.rows) return i;
        if (i + ahead < end && (u64)index[i + ahead] < (u64)t.rows) {
            i64 next = index[i + ahead] * t.width + t.first;
            prefetch(t.values + next, columns), prefetch(t.m + next, columns), prefetch(t.v + next, columns);
        }
        i64 at = index[i] * t.width + t.first;
        float *restrict row = t.values + at, *restrict m = t.m + at, *restrict v = t.v + at;
        const float *restrict g = gradient + i * t.width + t.first;
        for (i64 c = 0; c < columns; c++) {
            row[c] = row[c] * t.kept;
            m[c] = fmaf(t.b1, g[c] - m[c], m[c]);
            v[c] = fmaf(t.c2 * g[c], g[c], v[c] * t.b2);
            row[c] = row[c] + -t.rate * m[c] / (sqrtf(v[c]) / t.root + t.e);
        }
    }
    return -1;
}

// One AdamW step of some columns of distinct rows, with the operations of torch's fused kernel in the same order.
i64 adamw(float *values, float *m, float *v, i64 rows, i64 width, const i64 *index, i64 n, const float *gradient,
          i64 first, i64 columns, double step, double gamma, double beta1, double beta2, double eps,
          double weight_decay, int threads) {
    Step t = {values, m, v, rows, width, first, columns};
    t.kept = (float)(1 - gamma * weight_decay), t.rate = (float)(gamma / (1 - pow(beta1, step)));
    t.b1 = (float)(1 - beta1), t.b2 = (float)beta2, t.c2 = (float)(1 - beta2);
    t.root = (float)sqrt(1 - pow(beta2, step)), t.e = (float)eps;
    return IN_PARTS(n, adamw_part(t, index, begin, end, gradient));
}
