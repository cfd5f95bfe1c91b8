// What a training step computes: losses, GMF with its gradient and candidates, the rows of a candidate and AdamW, each in
// one pass over memory. Called through kernels.py, which says what the arguments are; losses.py, gmf.py, row_moves.py and
// row_optimizers.py have the same in torch operators. Rows are `width` floats side by side, those of pairs users first.
//
// Work is divided among `threads` (parts.h). Sums over pairs are made of sums over blocks, in their order, whoever made
// those: results are the same to the bit for any number of threads.

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "parts.h"

enum { AHEAD = 8, BLOCK = 128, ROUND = 64 };  // sums of a round of blocks wait for each other

// exp(-x) for x >= 0 to the rounding of float64: 2^k times a Taylor series of the rest, which is at most log(2) / 2.
static inline void exp_of_minus(const double *x, double *out) {
    double power[LANES], scale[LANES];
    i64 bits[LANES];
    for (int l = 0; l < LANES; l++) {
        double y = x[l] > 708 ? -708 : -x[l];
        power[l] = rint(y * 1.4426950408889634);
        bits[l] = ((i64)power[l] + 1023) << 52;
    }
    memcpy(scale, bits, sizeof scale);
    for (int l = 0; l < LANES; l++) {
        double y = x[l] > 708 ? -708 : -x[l];
        double r = fma(power[l], -1.9082149292705877e-10, fma(power[l], -0.6931471803691238, y));
        double p = fma(r, 1.0 / 6227020800, 1.0 / 479001600);
        p = fma(p, r, 1.0 / 39916800), p = fma(p, r, 1.0 / 3628800), p = fma(p, r, 1.0 / 362880);
        p = fma(p, r, 1.0 / 40320), p = fma(p, r, 1.0 / 5040), p = fma(p, r, 1.0 / 720), p = fma(p, r, 1.0 / 120);
        p = fma(p, r, 1.0 / 24), p = fma(p, r, 1.0 / 6), p = fma(p, r, 0.5);
        p = (fma(p, r * r, r) + 1) * scale[l];
        out[l] = x[l] > 708 ? 0 : p;
    }
}

// The inverse dual loss of `some` logits (losses.py has the formulas): their losses, w1, w0, and slopes d loss / ds.
static inline void dual_losses(const float *logit, i64 some, double *losses, double *w1, double *w0, double *slopes) {
    double s[LANES] = {0}, size[LANES], e[LANES], found[4][LANES];
    for (int l = 0; l < some; l++) s[l] = logit[l];
    for (int l = 0; l < LANES; l++) size[l] = fabs(s[l]);
    exp_of_minus(size, e);
    for (int l = 0; l < LANES; l++) {
        // log(1 + e) as 2 atanh(e / (2 + e)): t is at most 1/3
        double one = 1 + e[l], t = e[l] / (1 + one), u = t * t;
        double q = fma(u, 1.0 / 35, 1.0 / 33);
        q = fma(q, u, 1.0 / 31), q = fma(q, u, 1.0 / 29), q = fma(q, u, 1.0 / 27), q = fma(q, u, 1.0 / 25);
        q = fma(q, u, 1.0 / 23), q = fma(q, u, 1.0 / 21), q = fma(q, u, 1.0 / 19), q = fma(q, u, 1.0 / 17);
        q = fma(q, u, 1.0 / 15), q = fma(q, u, 1.0 / 13), q = fma(q, u, 1.0 / 11), q = fma(q, u, 1.0 / 9);
        q = fma(q, u, 1.0 / 7), q = fma(q, u, 0.2), q = fma(q, u, 1.0 / 3);
        double smaller = 2 * fma(q * u, t, t), ratio = smaller / (smaller + size[l]), square = ratio * ratio;
        double unlikely = square / (square + 1), likely = 1 - unlikely, slope = unlikely - e[l] / one;
        found[0][l] = smaller + unlikely * size[l];
        found[1][l] = s[l] >= 0 ? likely : unlikely;
        found[2][l] = s[l] >= 0 ? unlikely : likely;
        found[3][l] = s[l] > 0 ? slope : s[l] < 0 ? -slope : s[l] == s[l] ? 0 : NAN;
    }
    i64 bytes = some * sizeof(double);
    memcpy(losses, found[0], bytes), memcpy(w1, found[1], bytes), memcpy(w0, found[2], bytes);
    memcpy(slopes, found[3], bytes);
}

static PART dual_loss_part(const float *logit, i64 n, i64 begin, i64 end, double *out) {
    double *w1 = out + n, *w0 = w1 + n, *slope = w0 + n;
    for (i64 i = begin; i < end; i += LANES)
        dual_losses(logit + i, least(LANES, end - i), out + i, w1 + i, w0 + i, slope + i);
    return -1;
}

// The same of n logits: `out` gets n losses, then n of each of w1, w0 and the slope.
void dual_loss(const float *logit, i64 n, double *out, int threads) {
    IN_PARTS(n, dual_loss_part(logit, n, begin, end, out));
}

// The log-loss of logits s, as in torch: (1 - label) * s + max(-s, 0) + log(1 + exp(-|s|)), so a logit that is not finite
// never has a finite loss. exp by powers of 2 and a polynomial, log(1 + e) as 2 atanh(e / (2 + e)): float32 to rounding.
// The slope d loss / ds is sigmoid(s) - label.
static inline void log_losses(const float *logit, const float *labels, i64 some, float *out, float *slopes) {
    float s[LANES] = {0}, label[LANES] = {0}, power[LANES], scale[LANES], loss[LANES], slope[LANES];
    int32_t bits[LANES];
    if (!some) return;
    // Through arrays of this function alone: the compiler uses vectors where nothing can overlap.
    memcpy(s, logit, some * sizeof *s), memcpy(label, labels, some * sizeof *s);
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
        loss[l] = (1 - label[l]) * s[l] + (opposite + 2 * fmaf(q * u, t, t));
        slope[l] = (s[l] < 0 ? e : 1.0f) / (1.0f + e) - label[l];
    }
    memcpy(out, loss, some * sizeof *out);
    if (slopes) memcpy(slopes, slope, some * sizeof *slopes);
}

static PART log_loss_part(const float *logit, const float *label, i64 n, i64 begin, i64 end, float *out) {
    i64 i = begin;
    for (; i + LANES <= end; i += LANES) log_losses(logit + i, label + i, LANES, out + i, out + n + i);
    log_losses(logit + i, label + i, end - i, out + i, out + n + i);
    return -1;
}

// The log-loss of each of n logits (`out`), and the slopes after them.
void log_loss(const float *logit, const float *label, i64 n, float *out, int threads) {
    IN_PARTS(n, log_loss_part(logit, label, n, begin, end, out));
}

static PART log_loss_sums_part(const float *logits, const float *label, i64 n, i64 begin, i64 end, double *out) {
    for (i64 row = begin; row < end; row++) {
        double sums[LANES] = {0}, sum = 0;
        for (i64 first = 0; first < n; first += BLOCK) {
            const i64 some = least(BLOCK, n - first);
            float loss[2 * BLOCK];  // and slopes, which nobody reads: so the loop is that of log_loss, in vectors
            log_loss_part(logits + row * n + first, label + first, some, 0, some, loss);
            memset(loss + some, 0, (BLOCK - some) * sizeof *loss);
            for (i64 i = 0; i < BLOCK; i += LANES)
                for (int l = 0; l < LANES; l++) sums[l] += (double)loss[i + l];
        }
        for (int l = 0; l < LANES; l++) sum += sums[l];
        out[row] = sum;
    }
    return -1;
}

// The sums over n pairs, in float64, of the log-loss of each row of logits `[count, n]`.
void log_loss_sums(const float *logits, const float *label, i64 count, i64 n, double *out, int threads) {
    IN_PARTS(count, log_loss_sums_part(logits, label, n, begin, end, out));
}

typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef float Half __attribute__((vector_size(LANES / 2 * sizeof(float))));

static inline Lanes load(const float *from, i64 some) {
    Lanes lanes = {0};
    if (some >= LANES) memcpy(&lanes, from, sizeof lanes);
    else memcpy(&lanes, from, some * sizeof *from);
    return lanes;
}

// The upper half of the lanes added to the lower one, twice: four are left.
static inline __m128 folded(Lanes lanes) {
    Half half[2];
    __m128 quarter[2];
    memcpy(half, &lanes, sizeof lanes);
    half[0] += half[1];
    memcpy(quarter, half, sizeof quarter);
    return _mm_add_ps(quarter[0], quarter[1]);
}

// `total` of four at once, with the same additions.
static inline __m128 totals(Lanes a, Lanes b, Lanes c, Lanes d) {
    __m128 x = folded(a), y = folded(b), z = folded(c), t = folded(d);
    __m128 xy = _mm_add_ps(_mm_movelh_ps(x, y), _mm_movehl_ps(y, x));
    __m128 zt = _mm_add_ps(_mm_movelh_ps(z, t), _mm_movehl_ps(t, z));
    return _mm_add_ps(_mm_shuffle_ps(xy, zt, 0x88), _mm_shuffle_ps(xy, zt, 0xdd));
}

// What whole vectors of a pair add to its logit, by lane.
static inline Lanes products(const float *u, const float *v, const float *w, i64 k) {
    Lanes sum = {0};
    for (i64 c = 0; c + LANES <= k; c += LANES) sum += load(w + c, LANES) * load(u + c, LANES) * load(v + c, LANES);
    return sum;
}

static PART gmf_logits_part(const float *user, const float *item, i64 begin, i64 end, i64 width, i64 k, i64 bias,
                            const float *w, const float *b, float *out) {
    for (i64 first = begin; first < end; first += 4) {
        const i64 some = least(4, end - first);
        Lanes lanes[4] = {0};
        float sums[4];
        for (i64 i = 0; i < some; i++)
            lanes[i] = products(user + (first + i) * width, item + (first + i) * width, w, k);
        _mm_storeu_ps(sums, totals(lanes[0], lanes[1], lanes[2], lanes[3]));
        for (i64 i = 0; i < some; i++) {
            const float *u = user + (first + i) * width, *v = item + (first + i) * width;
            float rest = bias ? *b + u[k] + v[k] : *b;
            for (i64 c = k / LANES * LANES; c < k; c++) rest += w[c] * u[c] * v[c];
            out[first + i] = sums[i] + rest;
        }
    }
    return -1;
}

// GMF: out = w . (user * item) + b, and with `bias` the column after the first k of both rows.
void gmf_logits(const float *user, const float *item, i64 n, i64 width, i64 k, i64 bias, const float *w,
                const float *b, float *out, int threads) {
    IN_PARTS(n, gmf_logits_part(user, item, begin, end, width, k, bias, w, b, out));
}

// That of the rows of some blocks of pairs from `first` on, and sums for w and b, k + 1 for each block.
static PART gmf_gradient_part(const float *user, const float *item, i64 n, i64 width, i64 k, i64 bias, const float *w,
                              const float *logit, i64 first, i64 begin, i64 end, float *restrict rows,
                              float *restrict sums) {
    for (i64 b = begin; b < end; b++) {
        float *restrict of_block = sums + b * (k + 1);
        memset(of_block, 0, (k + 1) * sizeof *of_block);
        for (i64 i = first + b * BLOCK; i < least(first + (b + 1) * BLOCK, n); i++) {
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
    }
    return -1;
}

// Its gradient, given that of the logits: of users and items (`rows`, users first), and of w and b (`dense`, k + 1).
void gmf_gradient(const float *user, const float *item, i64 n, i64 width, i64 k, i64 bias, const float *w,
                  const float *logit, float *rows, float *dense, int threads) {
    double sums[k + 1];
    float of_blocks[least(ROUND, (n + BLOCK - 1) / BLOCK + 1)][k + 1];
    memset(sums, 0, sizeof sums);
    for (i64 first = 0; first < n; first += ROUND * BLOCK) {
        const i64 blocks = (least(ROUND * BLOCK, n - first) + BLOCK - 1) / BLOCK;
        IN_PARTS(blocks, gmf_gradient_part(user, item, n, width, k, bias, w, logit, first, begin, end, rows, *of_blocks));
        for (i64 b = 0; b < blocks; b++)
            for (i64 c = 0; c <= k; c++) sums[c] += of_blocks[b][c];
    }
    for (i64 c = 0; c <= k; c++) dense[c] = (float)sums[c];
}

static PART gmf_candidates_part(const float *rows, const i64 *index, const float *deltas, i64 n, i64 begin, i64 end,
                                i64 width, i64 k, i64 bias, const float *w, const float *dw, const double *candidates,
                                i64 count, float *out) {
    float none[width];
    memset(none, 0, sizeof none);
    for (i64 i = begin; i < end; i++) {
        // Half of the rows or so are touched, in no order: no branch asks which.
        i64 next = i + AHEAD < end ? i + AHEAD : i;
        prefetch(index[next] >= 0 ? deltas + index[next] * width : none, k);
        prefetch(index[n + next] >= 0 ? deltas + index[n + next] * width : none, k);
        const float *u = rows + i * width, *v = rows + (n + i) * width;
        const float *du = index[i] >= 0 ? deltas + index[i] * width : none;
        const float *dv = index[n + i] >= 0 ? deltas + index[n + i] * width : none;
        Lanes a0 = {0}, a1 = {0}, a2 = {0}, a3 = {0};
        for (i64 c = 0; c < k; c += LANES) {
            Lanes U = load(u + c, k - c), V = load(v + c, k - c), dU = load(du + c, k - c), dV = load(dv + c, k - c);
            Lanes W = load(w + c, k - c), dW = load(dw + c, k - c);
            Lanes product = U * V, first = dU * V + U * dV, second = dU * dV;
            a0 += W * product;
            a1 += dW * product;
            a1 += W * first;
            a2 += W * second + dW * first;
            a3 += dW * second;
        }
        float sums[4];
        _mm_storeu_ps(sums, totals(a0, a1, a2, a3));
        float s0 = sums[0] + w[k], s1 = sums[1] + dw[k], s2 = sums[2], s3 = sums[3];
        if (bias) s0 += u[k] + v[k], s1 += du[k] + dv[k];
        for (i64 j = 0; j < count; j++) {
            float x = (float)candidates[j];  // at 0 a step that is not finite changes nothing
            out[j * n + i] = x == 0 ? s0 : s0 + x * (s1 + x * (s2 + x * s3));
        }
    }
    return -1;
}

// GMF at theta + c * step for each candidate c: a polynomial of degree 3 in c, whose coefficients are found once. The
// step of row i of `rows` (users first) is deltas[index[i]], or nothing if that is -1; w and dw end with the bias.
void gmf_candidates(const float *rows, const i64 *index, const float *deltas, i64 n, i64 width, i64 k, i64 bias,
                    const float *w, const float *dw, const double *candidates, i64 count, float *out, int threads) {
    IN_PARTS(n, gmf_candidates_part(rows, index, deltas, n, begin, end, width, k, bias, w, dw, candidates, count, out));
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
