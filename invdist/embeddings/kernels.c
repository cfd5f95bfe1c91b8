// What a training step does with table rows, each in one pass over memory. Called through kernels.py, which says what
// the arguments are; row_moves.py and row_optimizers.py have the same in torch operators, for GPUs and for machines
// without a compiler. Rows of a table are `width` floats side by side. Functions that take rows by index return the
// place of the first index that is out of range, or -1.

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef int64_t i64;
typedef uint64_t u64;

enum { AHEAD = 8, LINE = 64, DIGIT = 11, BINS = 1 << DIGIT };

static inline void prefetch(const float *row, i64 width) {
    for (i64 byte = 0; byte < width * 4; byte += LINE) __builtin_prefetch((const char *)row + byte);
}

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
    for (int shift = index_bits; shift < index_bits + key_bits; shift += DIGIT) {
        i64 place[BINS] = {0}, sum = 0;
        for (i64 i = 0; i < n; i++) place[from[i] >> shift & (BINS - 1)]++;
        for (int bin = 0; bin < BINS; bin++) {
            i64 count = place[bin];
            place[bin] = sum;
            sum += count;
        }
        for (i64 i = 0; i < n; i++) to[place[from[i] >> shift & (BINS - 1)]++] = from[i];
        u64 *swap = from;
        from = to, to = swap;
    }
    i64 count = 0;
    u64 mask = ((u64)1 << index_bits) - 1;
    for (i64 i = 0; i < n; i++) {
        order[i] = (i64)(from[i] & mask);
        if (i == 0 || from[i] >> index_bits != from[i - 1] >> index_bits) {
            distinct[count] = (i64)(from[i] >> index_bits);
            starts[count++] = i;
        }
    }
    return count;
}

// inverse[i]: the place of occurrence i among the distinct rows.
void inverse(const i64 *order, const i64 *starts, i64 count, i64 n, i64 *out) {
    for (i64 s = 0; s < count; s++) {
        i64 end = s + 1 < count ? starts[s + 1] : n;
        for (i64 j = starts[s]; j < end; j++) out[order[j]] = s;
    }
}

// out = table[index]
i64 gather(const float *table, i64 rows, i64 width, const i64 *index, i64 n, float *out) {
    for (i64 i = 0; i < n; i++) {
        if ((u64)index[i] >= (u64)rows) return i;
        if (i + AHEAD < n && (u64)index[i + AHEAD] < (u64)rows) prefetch(table + index[i + AHEAD] * width, width);
        memcpy(out + i * width, table + index[i] * width, width * sizeof(float));
    }
    return -1;
}

// out[s] = scale * the sum of values[order[j]] over the occurrences j of distinct row s, in their order
void sum_segments(const float *values, i64 width, const i64 *order, const i64 *starts, i64 count, i64 n, float scale,
                  float *restrict out) {
    for (i64 s = 0; s < count; s++) {
        float *restrict sum = out + s * width;
        i64 end = s + 1 < count ? starts[s + 1] : n;
        for (i64 j = starts[s]; j < end; j++) {
            const float *value = values + order[j] * width;
            if (j + AHEAD < n) prefetch(values + order[j + AHEAD] * width, width);
            if (j == starts[s]) memcpy(sum, value, width * sizeof(float));
            else for (i64 c = 0; c < width; c++) sum[c] += value[c];
        }
        if (scale != 1.0f) for (i64 c = 0; c < width; c++) sum[c] *= scale;
    }
}

// table[index] += scale * values, for distinct indices
i64 add_rows(float *table, i64 rows, i64 width, const i64 *index, i64 n, const float *values, float scale) {
    for (i64 i = 0; i < n; i++) {
        if ((u64)index[i] >= (u64)rows) return i;
        if (i + AHEAD < n && (u64)index[i + AHEAD] < (u64)rows) prefetch(table + index[i + AHEAD] * width, width);
        float *restrict row = table + index[i] * width;
        const float *restrict value = values + i * width;
        for (i64 c = 0; c < width; c++) row[c] = fmaf(scale, value[c], row[c]);
    }
    return -1;
}

// Each occurrence of the wanted rows gets the value of the same row among the given ones, or zeros. Both lists of
// distinct rows ascend.
void lookup(const i64 *given, i64 given_count, const float *values, i64 width, const i64 *wanted, const i64 *order,
            const i64 *starts, i64 count, i64 n, float *out) {
    i64 at = 0;
    for (i64 s = 0; s < count; s++) {
        while (at < given_count && given[at] < wanted[s]) at++;
        const float *value = at < given_count && given[at] == wanted[s] ? values + at * width : 0;
        i64 end = s + 1 < count ? starts[s + 1] : n;
        for (i64 j = starts[s]; j < end; j++) {
            if (value) memcpy(out + order[j] * width, value, width * sizeof(float));
            else memset(out + order[j] * width, 0, width * sizeof(float));
        }
    }
}

// One AdamW step of some columns of distinct rows, with the operations of torch's fused kernel in the same order.
i64 adamw(float *table, float *m_table, float *v_table, i64 rows, i64 width, const i64 *index, i64 n,
          const float *gradient, i64 first, i64 columns, double step, double gamma, double beta1, double beta2,
          double eps, double weight_decay) {
    double correction1 = 1 - pow(beta1, step), root2 = sqrt(1 - pow(beta2, step));
    float kept = (float)(1 - gamma * weight_decay), rate = (float)(gamma / correction1), b1 = (float)(1 - beta1);
    float b2 = (float)beta2, c2 = (float)(1 - beta2), root = (float)root2, e = (float)eps;
    for (i64 i = 0; i < n; i++) {
        if ((u64)index[i] >= (u64)rows) return i;
        if (i + AHEAD < n && (u64)index[i + AHEAD] < (u64)rows) {
            i64 next = index[i + AHEAD] * width + first;
            prefetch(table + next, columns), prefetch(m_table + next, columns), prefetch(v_table + next, columns);
        }
        i64 at = index[i] * width + first;
        float *restrict row = table + at, *restrict m = m_table + at, *restrict v = v_table + at;
        const float *restrict g = gradient + i * width + first;
        for (i64 c = 0; c < columns; c++) {
            row[c] = row[c] * kept;
            m[c] = fmaf(b1, g[c] - m[c], m[c]);
            v[c] = fmaf(c2 * g[c], g[c], v[c] * b2);
            row[c] = row[c] + -rate * m[c] / (sqrtf(v[c]) / root + e);
        }
    }
    return -1;
}

enum { LANES = 16, BLOCK = 128 };

static inline float total(const float *lanes) {
    float sum = 0;
    for (int l = 0; l < LANES; l++) sum += lanes[l];
    return sum;
}

// GMF: out = w . (user * item) + b, and with `bias` the column after the first k of both rows.
void gmf_logits(const float *user, const float *item, i64 n, i64 width, i64 k, i64 bias, const float *w, float b,
                float *out) {
    for (i64 i = 0; i < n; i++) {
        const float *u = user + i * width, *v = item + i * width;
        float lanes[LANES] = {0}, rest = bias ? b + u[k] + v[k] : b;
        i64 c = 0;
        for (; c + LANES <= k; c += LANES)
            for (int l = 0; l < LANES; l++) lanes[l] += w[c + l] * u[c + l] * v[c + l];
        for (; c < k; c++) rest += w[c] * u[c] * v[c];
        out[i] = total(lanes) + rest;
    }
}

// Its gradient, given that of the logits: of users and items (`rows`, users first), and of w and b (`dense`, k + 1).
void gmf_gradient(const float *user, const float *item, i64 n, i64 width, i64 k, i64 bias, const float *w,
                  const float *logit, float *restrict rows, float *restrict dense) {
    double sums[k + 1];
    float of_block[k + 1];
    memset(sums, 0, sizeof sums);
    for (i64 begin = 0; begin < n; begin += BLOCK) {
        i64 end = begin + BLOCK < n ? begin + BLOCK : n;
        memset(of_block, 0, sizeof of_block);
        for (i64 i = begin; i < end; i++) {
            const float *u = user + i * width, *v = item + i * width;
            float *restrict du = rows + i * width, *restrict dv = rows + (n + i) * width, g = logit[i];
            for (i64 c = 0; c < k; c++) {
                du[c] = g * w[c] * v[c];
                dv[c] = g * w[c] * u[c];
                of_block[c] += g * u[c] * v[c];
            }
            for (i64 c = k; c < width; c++) du[c] = dv[c] = bias && c == k ? g : 0;
            of_block[k] += g;
        }
        for (i64 c = 0; c <= k; c++) sums[c] += of_block[c];
    }
    for (i64 c = 0; c <= k; c++) dense[c] = (float)sums[c];
}

// GMF at theta + c * step for each candidate c: a polynomial of degree 3 in c, whose coefficients are found once.
void gmf_candidates(const float *user, const float *item, const float *d_user, const float *d_item, i64 n, i64 width,
                    i64 k, i64 bias, const float *w, const float *dw, float b, float db, const float *candidates,
                    i64 count, float *out) {
    for (i64 i = 0; i < n; i++) {
        const float *u = user + i * width, *v = item + i * width, *du = d_user + i * width, *dv = d_item + i * width;
        float a0[LANES] = {0}, a1[LANES] = {0}, a2[LANES] = {0}, a3[LANES] = {0};
        for (i64 c = 0; c < k; c += LANES) {
            int lanes = k - c < LANES ? (int)(k - c) : LANES;
            for (int l = 0; l < lanes; l++) {
                float x = u[c + l], y = v[c + l], dx = du[c + l], dy = dv[c + l];
                float first = dx * y + x * dy;
                a0[l] += w[c + l] * x * y;
                a1[l] += w[c + l] * first + dw[c + l] * x * y;
                a2[l] += w[c + l] * dx * dy + dw[c + l] * first;
                a3[l] += dw[c + l] * dx * dy;
            }
        }
        float s0 = total(a0) + b, s1 = total(a1) + db, s2 = total(a2), s3 = total(a3);
        if (bias) s0 += u[k] + v[k], s1 += du[k] + dv[k];
        for (i64 j = 0; j < count; j++) {
            float c = candidates[j];  // at 0 a step that is not finite changes nothing
            out[j * n + i] = c == 0 ? s0 : s0 + c * (s1 + c * (s2 + c * s3));
        }
    }
}
