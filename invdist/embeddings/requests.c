// What ranks that share memory ask of each other. Called through requests.py, which says what the arguments are.

#include <stdint.h>
#include <string.h>

typedef int64_t i64;

enum { HEAD = 3 };  // words of a message about each group: rows, occurrences, rows of the rank's gradients

// The place of the first of n ascending keys that is not below `key`.
static i64 below(const i64 *keys, i64 n, i64 key) {
    i64 low = 0, high = n;
    while (low < high) {
        i64 middle = (low + high) / 2;
        if (keys[middle] < key) low = middle + 1;
        else high = middle;
    }
    return low;
}

// Writes a message to each owner: the head of each group, then of each group the local rows that are asked for
// (ascending), where the occurrences of each start, and the occurrences. Without `starts` a row has one occurrence: its
// place among the distinct ones. `sizes` are the words of each message, `asked` the rows in it, by owner and group.
void pack_requests(const i64 *const *keys, const i64 *const *starts, const i64 *const *order, const i64 *distinct,
                   const i64 *occurrences, i64 groups, i64 owners, i64 row_bits, i64 *sizes, i64 *asked, i64 *out) {
    i64 mask = ((i64)1 << row_bits) - 1;
    for (i64 owner = 0; owner < owners; owner++) {
        i64 *head = out, *to = out + HEAD * groups;
        for (i64 g = 0; g < groups; g++) {
            i64 n = distinct[g], from = below(keys[g], n, owner << row_bits);
            i64 count = below(keys[g], n, (owner + 1) << row_bits) - from;
            i64 first = 0, end = count;
            if (starts[g]) {
                first = from < n ? starts[g][from] : occurrences[g];
                end = from + count < n ? starts[g][from + count] : occurrences[g];
            }
            for (i64 i = 0; i < count; i++) to[i] = keys[g][from + i] & mask;
            to += count;
            for (i64 i = 0; i < count; i++) to[i] = starts[g] ? starts[g][from + i] - first : i;
            to += count;
            if (starts[g]) memcpy(to, order[g] + first, (end - first) * sizeof *to);
            else for (i64 i = 0; i < count; i++) to[i] = from + i;
            to += end - first;
            *head++ = asked[owner * groups + g] = count;
            *head++ = end - first;
            *head++ = starts[g] ? occurrences[g] : n;
        }
        sizes[owner] = to - out;
        out = to;
    }
}

// Merges what all ranks ask for in one group. `distinct` are the rows, ascending. By `order` and `starts` they are
// found in the list of all requests, rank after rank; by `rows_order` and `rows_starts` among the gradients of all ranks.
// `sizes` is what the heads say, by rank and group. Returns the number of distinct rows. Whose row is next cannot be
// foreseen, so there is no branch on it: each rank writes, and what was not its turn is written over. `order` and
// `rows_order` have room for one more.
i64 merge_requests(const i64 *const *messages, const i64 *sizes, i64 ranks, i64 groups, i64 group, i64 *distinct,
                   i64 *order, i64 *starts, i64 *rows_order, i64 *rows_starts) {
    struct {
        const i64 *rows, *starts, *occurrences;
        i64 size, all, next, requests, gradients, row;
    } from[ranks];
    i64 asking = 0, total = 0, of_gradients = 0;
    for (i64 r = 0; r < ranks; r++) {
        const i64 *size = sizes + r * groups * HEAD, *at = messages[r] + groups * HEAD;
        for (i64 g = 0; g < group; g++) at += 2 * size[g * HEAD] + size[g * HEAD + 1];
        size += group * HEAD;
        if (size[0]) {
            from[asking].rows = at, from[asking].starts = at + size[0], from[asking].occurrences = at + 2 * size[0];
            from[asking].size = size[0], from[asking].all = size[1], from[asking].next = 0;
            from[asking].requests = total, from[asking].gradients = of_gradients, from[asking++].row = *at;
        }
        total += size[0], of_gradients += size[2];
    }
    i64 count = 0, placed = 0, rows_placed = 0;
    while (placed < total) {
        i64 smallest = from[0].row;
        for (i64 r = 1; r < asking; r++) smallest = from[r].row < smallest ? from[r].row : smallest;
        distinct[count] = smallest, starts[count] = placed, rows_starts[count++] = rows_placed;
        for (i64 r = 0; r < asking; r++) {
            i64 is_next = from[r].row == smallest, last = from[r].size - 1;
            i64 i = from[r].next < last ? from[r].next : last, first = from[r].starts[i];
            i64 end = i < last ? from[r].starts[i + 1] : from[r].all;
            order[placed] = from[r].requests + i;
            rows_order[rows_placed] = from[r].gradients + from[r].occurrences[first];
            placed += is_next, rows_placed += is_next;
            for (i64 j = first + 1; j < end && is_next; j++)
                rows_order[rows_placed++] = from[r].gradients + from[r].occurrences[j];
            from[r].next += is_next;
            from[r].row = from[r].next <= last ? from[r].rows[from[r].next] : INT64_MAX;
        }
    }
    return count;
}

// Packs those of n requested rows that an update touches, `received` by each rank: place[i] is the place of request i in
// the update, or -1. `index` gets the place of each among the rows packed for its rank, or -1; `sizes` the rows of each.
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

// The place of the delta of each occurrence among the rows of all owners, or -1, from the answer of each owner to the
// distinct rows asked of it. `asked` and `rows` have the sizes of the answers.
void join_deltas(const i64 *const *answers, const i64 *asked, const i64 *rows, i64 owners, const i64 *order,
                 const i64 *starts, i64 n, i64 *out) {
    i64 s = 0, before = 0, distinct = 0;
    for (i64 o = 0; o < owners; o++) distinct += asked[o];
    for (i64 o = 0; o < owners; o++) {
        for (i64 i = 0; i < asked[o]; i++, s++) {
            i64 place = answers[o][i] < 0 ? -1 : before + answers[o][i], end = s + 1 < distinct ? starts[s + 1] : n;
            for (i64 j = starts[s]; j < end; j++) out[order[j]] = place;
        }
        before += rows[o];
    }
}
