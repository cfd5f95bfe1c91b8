// What ranks that share memory ask of each other. Called through requests.py, which says what the arguments are.

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef int64_t i64;
typedef uint64_t u64;

enum { HEAD = 2 };  // words of a message about each group: rows that are asked for, rows of the rank's gradients

// About how many of n keys are distinct, within a few in a hundred: each sets a bit, and bits that are still clear tell
// how many were set (linear counting). `words` has room for 2^bits / 64, all 0.
double about_distinct(const i64 *keys, i64 n, i64 bits, u64 *words) {
    for (i64 i = 0; i < n; i++) {
        u64 bit = (u64)keys[i] * 0x9E3779B97F4A7C15u >> (64 - bits);
        words[bit / 64] |= (u64)1 << bit % 64;
    }
    i64 all = (i64)1 << bits, clear = all;
    for (i64 w = 0; w < all / 64; w++) clear -= __builtin_popcountll(words[w]);
    return clear ? -(double)all * log((double)clear / (double)all) : (double)n;
}

// Writes a message to each owner: the head of each group, then of each group the local rows that are asked for, in the
// order of `keys`, each with the row of the rank's gradients that belongs to it: the place of its key. `sizes` are the
// words of each message, `asked` the rows in it, by owner and group. Whose key is next cannot be foreseen, so there is
// no branch on it: each is written, and what is not for this owner is written over. `out` has room for one more.
void pack_requests(const i64 *const *keys, const i64 *n, i64 groups, i64 owners, i64 row_bits, i64 *sizes, i64 *asked,
                   i64 *out) {
    i64 mask = ((i64)1 << row_bits) - 1;
    for (i64 owner = 0; owner < owners; owner++) {
        i64 *head = out, *to = out + HEAD * groups;
        for (i64 g = 0; g < groups; g++) {
            const i64 *key = keys[g];
            i64 count = 0;
            for (i64 i = 0; i < n[g]; i++) {
                to[2 * count] = key[i] & mask, to[2 * count + 1] = i;
                count += key[i] >> row_bits == owner;
            }
            to += 2 * count;
            *head++ = *asked++ = count, *head++ = n[g];
        }
        sizes[owner] = to - out;
        out = to;
    }
}

// Joins what all ranks ask for in one group, rank after rank: the rows, and for each the row that belongs to it among
// the gradients that ranks show, one after the other.
void join_requests(const i64 *const *messages, i64 ranks, i64 groups, i64 group, i64 *rows, i64 *gradients) {
    i64 before = 0;
    for (i64 r = 0; r < ranks; r++) {
        const i64 *head = messages[r], *at = head + groups * HEAD;
        for (i64 g = 0; g < group; g++) at += 2 * head[g * HEAD];
        i64 count = head[group * HEAD];
        for (i64 i = 0; i < count; i++) rows[i] = at[2 * i], gradients[i] = before + at[2 * i + 1];
        rows += count, gradients += count, before += head[group * HEAD + 1];
    }
}

// The place of each key in the answers to it: those of each owner, one after the other, in the order of the keys.
void answer_places(const i64 *keys, i64 n, i64 row_bits, const i64 *asked, i64 owners, i64 *out) {
    i64 next[owners], before = 0;
    for (i64 o = 0; o < owners; o++) next[o] = before, before += asked[o];
    for (i64 i = 0; i < n; i++) out[i] = next[keys[i] >> row_bits]++;
}

// Packs those of n requested rows that an update touches, `received` by each rank: place[i] is the place of request i
// in the update, or -1. `index` gets the place of each among the rows packed for its rank, or -1; `sizes` the rows of
// each.
void pack_deltas(const i64 *place, const i64 *received, i64 ranks, const float *values, i64 width, i64 *index,
                 float *rows, i64 *sizes) {
    for (i64 r = 0, i = 0; r < ranks; r++) {
        i64 count = 0;
        for (i64 end = i + received[r]; i < end; i++) {
            index[i] = -1;
            if (place[i] < 0) continue;
            index[i] = count;
            memcpy(rows + count++ * width, values + place[i] * width, width * sizeof *rows);
        }
        sizes[r] = count;
        rows += count * width;
    }
}

// The place of the delta of each piece among the rows of all owners, or -1. `answer` has those of the owners one after
// the other, `place` the place of the piece there; `edges` say where those of each owner start; `rows` are its deltas.
void join_deltas(i64 *answer, const i64 *edges, const i64 *rows, i64 owners, const i64 *place, i64 n, i64 *out) {
    i64 before = 0;
    for (i64 o = 0; o < owners; o++) {
        for (i64 i = edges[o]; i < edges[o + 1]; i++) answer[i] = answer[i] < 0 ? -1 : before + answer[i];
        before += rows[o];
    }
    for (i64 i = 0; i < n; i++) out[i] = answer[place[i]];
}
