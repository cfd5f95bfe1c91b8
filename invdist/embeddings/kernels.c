// What a training step does with table rows, each in one pass over memory. Called through kernels.py, which says what
// the arguments are; row_moves.py and row_optimizers.py have the same in torch operators, for GPUs and for machines
// without a compiler. Rows of a table are `width` floats side by side. Functions that take rows by index return the
// place of the first index that is out of range, or -1.

#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

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

// out = tables[key >> shift][the lower bits of key]
i64 gather_keys(const float *const *tables, const i64 *rows, i64 count, i64 shift, i64 width, const i64 *key, i64 n,
                float *out) {
    i64 mask = ((i64)1 << shift) - 1;
    for (i64 i = 0; i < n; i++) {
        i64 table = key[i] >> shift, row = key[i] & mask;
        if ((u64)table >= (u64)count || row >= rows[table]) return i;
        if (i + AHEAD < n && (u64)(key[i + AHEAD] >> shift) < (u64)count)
            prefetch(tables[key[i + AHEAD] >> shift] + (key[i + AHEAD] & mask) * width, width);
        memcpy(out + i * width, tables[table] + row * width, width * sizeof(float));
    }
    return -1;
}

// Rows that came from several ranks: those of part p are rows edges[p] to edges[p + 1] of the whole.
typedef struct {
    const float *const *parts;
    const i64 *edges;
    i64 width;
} Rows;

static inline const float *row_of(Rows rows, i64 index) {
    i64 part = 0;
    while (index >= rows.edges[part + 1]) part++;
    return rows.parts[part] + (index - rows.edges[part]) * rows.width;
}

// out = rows[index]; indices are in range
void gather_parts(const float *const *parts, const i64 *edges, i64 width, const i64 *index, i64 n, float *out) {
    Rows rows = {parts, edges, width};
    for (i64 i = 0; i < n; i++) {
        if (i + AHEAD < n) prefetch(row_of(rows, index[i + AHEAD]), width);
        memcpy(out + i * width, row_of(rows, index[i]), width * sizeof(float));
    }
}

// out[s] = scale * the sum of rows[order[j]] over the occurrences j of distinct row s, in their order
void sum_segments(const float *const *parts, const i64 *edges, i64 width, const i64 *order, const i64 *starts,
                  i64 count, i64 n, float scale, float *restrict out) {
    Rows rows = {parts, edges, width};
    for (i64 s = 0; s < count; s++) {
        float *restrict sum = out + s * width;
        i64 end = s + 1 < count ? starts[s + 1] : n;
        for (i64 j = starts[s]; j < end; j++) {
            const float *value = row_of(rows, order[j]);
            if (j + AHEAD < n) prefetch(row_of(rows, order[j + AHEAD]), width);
            if (j == starts[s]) memcpy(sum, value, width * sizeof(float));
            else for (i64 c = 0; c < width; c++) sum[c] += value[c];
        }
        if (scale != 1.0f) for (i64 c = 0; c < width; c++) sum[c] *= scale;
    }
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

// Each occurrence of the wanted rows gets the place of the same row among the given ones, or -1. Both lists of distinct
// rows ascend.
void places(const i64 *given, i64 given_count, const i64 *wanted, const i64 *order, const i64 *starts, i64 count,
            i64 n, i64 *out) {
    i64 at = 0;
    for (i64 s = 0; s < count; s++) {
        while (at < given_count && given[at] < wanted[s]) at++;
        i64 place = at < given_count && given[at] == wanted[s] ? at : -1;
        i64 end = s + 1 < count ? starts[s + 1] : n;
        for (i64 j = starts[s]; j < end; j++) out[order[j]] = place;
    }
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

// rows[i] += c * values[index[i]] where the index is not -1
void add_indexed(float *rows, i64 n, i64 width, const i64 *index, const float *values, float c) {
    for (i64 i = 0; i < n; i++) {
        if (i + AHEAD < n && index[i + AHEAD] >= 0) prefetch(values + index[i + AHEAD] * width, width);
        if (index[i] < 0) continue;
        float *restrict row = rows + i * width;
        const float *restrict value = values + index[i] * width;
        for (i64 x = 0; x < width; x++) row[x] = fmaf(c, value[x], row[x]);
    }
}

enum { LANES = 16, BLOCK = 128 };

static inline float total(float *lanes) {
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}

// The sum of squares, in float32 within blocks and in float64 over them.
double square_sum(const float *values, i64 n) {
    double sum = 0;
    for (i64 begin = 0; begin < n; begin += BLOCK * LANES) {
        i64 end = begin + BLOCK * LANES < n ? begin + BLOCK * LANES : n, i = begin;
        float lanes[LANES] = {0}, rest = 0;
        for (; i + LANES <= end; i += LANES)
            for (int l = 0; l < LANES; l++) lanes[l] = fmaf(values[i + l], values[i + l], lanes[l]);
        for (; i < end; i++) rest += values[i] * values[i];
        sum += total(lanes) + rest;
    }
    return sum;
}

// The inverse dual loss of each logit (losses.py has the formulas): `out` gets n losses, then n of each of w1, w0 and
// the slope d loss / ds.
void dual_loss(const float *logit, i64 n, double *restrict out) {
    for (i64 i = 0; i < n; i++) {
        double s = logit[i], size = fabs(s), e = exp(-size), one = 1 + e;
        double smaller = log(one) - (one - 1 - e) / one;  // log1p(e)
        double ratio = smaller / (smaller + size), square = ratio * ratio;
        double unlikely = square / (square + 1), likely = 1 - unlikely, slope = unlikely - e / one;
        out[i] = smaller + unlikely * size;
        out[n + i] = s >= 0 ? likely : unlikely;
        out[2 * n + i] = s >= 0 ? unlikely : likely;
        out[3 * n + i] = s > 0 ? slope : s < 0 ? -slope : s == s ? 0 : NAN;
    }
}

// The log-loss of logits s, as in torch: (1 - label) * s + max(-s, 0) + log(1 + exp(-|s|)), so a logit that is not finite
// never has a finite loss. exp by powers of 2 and a polynomial, log(1 + e) as 2 atanh(e / (2 + e)): float32 to rounding.
static inline void log_losses(const float *restrict s, const float *restrict label, float *restrict out) {
    float power[LANES], scale[LANES];
    int32_t bits[LANES];
    for (int l = 0; l < LANES; l++) {
        float x = -fabsf(s[l]);
        x = x < -87.0f ? -87.0f : x;
        power[l] = rintf(x * 1.44269504f);
        bits[l] = ((int32_t)power[l] + 127) << 23;
    }
    memcpy(scale, bits, sizeof scale);
    for (int l = 0; l < LANES; l++) {
        float x = -fabsf(s[l]);
        x = x < -87.0f ? -87.0f : x;
        float r = fmaf(power[l], 2.12194440e-4f, fmaf(power[l], -0.693359375f, x));
        float p = fmaf(1.9875691500e-4f, r, 1.3981999507e-3f);
        p = fmaf(p, r, 8.3334519073e-3f), p = fmaf(p, r, 4.1665795894e-2f);
        p = fmaf(p, r, 1.6666665459e-1f), p = fmaf(p, r, 5.0000001201e-1f);
        float e = (fmaf(p, r * r, r) + 1.0f) * scale[l], t = e / (2.0f + e), u = t * t;
        float q = fmaf(u, 1.0f / 13, 1.0f / 11);
        q = fmaf(q, u, 1.0f / 9), q = fmaf(q, u, 1.0f / 7), q = fmaf(q, u, 0.2f), q = fmaf(q, u, 1.0f / 3);
        float opposite = s[l] < 0 ? -s[l] : 0;
        out[l] = (1 - label[l]) * s[l] + (opposite + 2 * fmaf(q * u, t, t));
    }
}

// The sums over n pairs, in float64, of the log-loss of each row of logits `[count, n]`.
void log_loss_sums(const float *logits, const float *label, i64 count, i64 n, double *out) {
    for (i64 row = 0; row < count; row++) {
        double sums[LANES] = {0}, sum = 0;
        for (i64 i = 0; i < n; i += LANES) {
            float last[2][LANES] = {{0}}, loss[LANES];
            int some = n - i < LANES ? (int)(n - i) : LANES;
            const float *s = logits + row * n + i, *y = label + i;
            if (some < LANES) {
                memcpy(last[0], s, some * sizeof *s), memcpy(last[1], y, some * sizeof *y);
                s = last[0], y = last[1];
            }
            log_losses(s, y, loss);
            for (int l = 0; l < some; l++) sums[l] += loss[l];
        }
        for (int l = 0; l < LANES; l++) sum += sums[l];
        out[row] = sum;
    }
}

// values = alpha * values / (|values| + eps)
void sign_step(float *values, i64 n, float alpha, float eps) {
    for (i64 i = 0; i < n; i++) values[i] = alpha * (values[i] / (fabsf(values[i]) + eps));
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

// GMF: out = w . (user * item) + b, and with `bias` the column after the first k of both rows.
void gmf_logits(const float *user, const float *item, i64 n, i64 width, i64 k, i64 bias, const float *w,
                const float *b, float *out) {
    for (i64 i = 0; i < n; i++) {
        const float *u = user + i * width, *v = item + i * width;
        float lanes[LANES] = {0}, rest = bias ? *b + u[k] + v[k] : *b;
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

// The coefficients of one pair in gmf_candidates, from `lanes` columns.
static inline __attribute__((always_inline)) void add_terms(int lanes, int touched, const float *u, const float *v,
                                                            const float *du, const float *dv, const float *w,
                                                            const float *dw, float a[4][LANES]) {
    for (int l = 0; l < lanes; l++) {
        float product = u[l] * v[l];
        a[0][l] += w[l] * product;
        a[1][l] += dw[l] * product;
    }
    if (!touched) return;
    for (int l = 0; l < lanes; l++) {
        float first = du[l] * v[l] + u[l] * dv[l], second = du[l] * dv[l];
        a[1][l] += w[l] * first;
        a[2][l] += w[l] * second + dw[l] * first;
        a[3][l] += dw[l] * second;
    }
}

// GMF at theta + c * step for each candidate c: a polynomial of degree 3 in c, whose coefficients are found once. The
// step of row i of `rows` (users first) is deltas[index[i]], or nothing if that is -1; w and dw end with the bias.
void gmf_candidates(const float *rows, const i64 *index, const float *deltas, i64 n, i64 width, i64 k, i64 bias,
                    const float *w, const float *dw, const double *candidates, i64 count, float *out) {
    float none[width];
    memset(none, 0, sizeof none);
    for (i64 i = 0; i < n; i++) {
        const float *u = rows + i * width, *v = rows + (n + i) * width;
        int touched = index[i] >= 0 || index[n + i] >= 0;
        const float *du = index[i] >= 0 ? deltas + index[i] * width : none;
        const float *dv = index[n + i] >= 0 ? deltas + index[n + i] * width : none;
        if (i + AHEAD < n) {
            if (index[i + AHEAD] >= 0) prefetch(deltas + index[i + AHEAD] * width, k);
            if (index[n + i + AHEAD] >= 0) prefetch(deltas + index[n + i + AHEAD] * width, k);
        }
        float a[4][LANES] = {{0}};
        i64 c = 0;
        for (; c + LANES <= k; c += LANES) add_terms(LANES, touched, u + c, v + c, du + c, dv + c, w + c, dw + c, a);
        if (c < k) add_terms((int)(k - c), touched, u + c, v + c, du + c, dv + c, w + c, dw + c, a);
        float s0 = total(a[0]) + w[k], s1 = total(a[1]) + dw[k], s2 = 0, s3 = 0;
        if (touched) s2 = total(a[2]), s3 = total(a[3]);
        if (bias) s0 += u[k] + v[k], s1 += du[k] + dv[k];
        for (i64 j = 0; j < count; j++) {
            float x = (float)candidates[j];  // at 0 a step that is not finite changes nothing
            out[j * n + i] = x == 0 ? s0 : s0 + x * (s1 + x * (s2 + x * s3));
        }
    }
}
