// What a training step computes from rows and logits: norms, losses, and GMF with its gradient and candidates, each in one
// pass over memory. Called through kernels.py, which says what the arguments are; losses.py and gmf.py have the same in
// torch operators. Rows are `width` floats side by side, users first.

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef int64_t i64;

enum { AHEAD = 8, LINE = 64 };

static inline void prefetch(const float *row, i64 width) {
    for (i64 byte = 0; byte < width * 4; byte += LINE) __builtin_prefetch((const char *)row + byte);
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
        float lanes[4 * LANES] = {0}, rest = 0;  // four vectors: the next addition need not wait for the last
        for (; i + 4 * LANES <= end; i += 4 * LANES)
            for (int l = 0; l < 4 * LANES; l++) lanes[l] = fmaf(values[i + l], values[i + l], lanes[l]);
        for (; i < end; i++) rest += values[i] * values[i];
        for (int v = 0; v < 4; v++) rest += total(lanes + v * LANES);
        sum += rest;
    }
    return sum;
}

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

// The same of n logits: `out` gets n losses, then n of each of w1, w0 and the slope.
void dual_loss(const float *logit, i64 n, double *out) {
    double *w1 = out + n, *w0 = w1 + n, *slope = w0 + n;
    i64 i = 0;
    for (; i + LANES <= n; i += LANES) dual_losses(logit + i, LANES, out + i, w1 + i, w0 + i, slope + i);
    dual_losses(logit + i, n - i, out + i, w1 + i, w0 + i, slope + i);
}

// The log-loss of logits s, as in torch: (1 - label) * s + max(-s, 0) + log(1 + exp(-|s|)), so a logit that is not finite
// never has a finite loss. exp by powers of 2 and a polynomial, log(1 + e) as 2 atanh(e / (2 + e)): float32 to rounding.
// The slope d loss / ds is sigmoid(s) - label.
static inline void log_losses(const float *logit, const float *labels, i64 some, float *out, float *slopes) {
    float s[LANES] = {0}, label[LANES] = {0}, power[LANES], scale[LANES], loss[LANES], slope[LANES];
    int32_t bits[LANES];
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

// The log-loss of each of n logits (`out`), and the slopes after them.
void log_loss(const float *logit, const float *label, i64 n, float *out) {
    i64 i = 0;
    for (; i + LANES <= n; i += LANES) log_losses(logit + i, label + i, LANES, out + i, out + n + i);
    log_losses(logit + i, label + i, n - i, out + i, out + n + i);
}

// The sums over n pairs, in float64, of the log-loss of each row of logits `[count, n]`.
void log_loss_sums(const float *logits, const float *label, i64 count, i64 n, double *out) {
    for (i64 row = 0; row < count; row++, logits += n) {
        double sums[LANES] = {0}, sum = 0;
        float loss[LANES];
        i64 i = 0;
        for (; i + LANES <= n; i += LANES) {
            log_losses(logits + i, label + i, LANES, loss, 0);
            for (int l = 0; l < LANES; l++) sums[l] += (double)loss[l];
        }
        log_losses(logits + i, label + i, n - i, loss, 0);
        for (int l = 0; l < n - i; l++) sums[l] += loss[l];
        for (int l = 0; l < LANES; l++) sum += sums[l];
        out[row] = sum;
    }
}

// values = alpha * values / (|values| + eps)
void sign_step(float *values, i64 n, float alpha, float eps) {
    for (i64 i = 0; i < n; i++) values[i] = alpha * (values[i] / (fabsf(values[i]) + eps));
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
