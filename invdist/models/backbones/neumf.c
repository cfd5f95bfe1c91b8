// NeuMF: logits, gradient and candidates, in blocks of pairs whose layers stay in the cache. Matrix products are those of
// torch's own BLAS; what is between them is here. Called through neumf_kernels.py; neumf.py has the same in torch
// operators, with the formulas.
//
// Rows are `width` floats, users first: k columns of the product, 4k of the tower, the bias, others. Parameters are in
// their order in NeuMF: weight and bias of each layer, then those of the output. h are the outputs of the layers.

#include <stdint.h>
#include <string.h>

typedef int64_t i64;
typedef void (*Gemm)(const char *, const char *, const int *, const int *, const int *, const float *, const float *,
                     const int *, const float *, const int *, const float *, float *, const int *);

enum { LEVELS = 3, PAIRS = 256, LANES = 16, RUN = 128 };

static inline i64 least(i64 a, i64 b) { return a < b ? a : b; }

static inline i64 outputs(i64 k, int level) { return k << (LEVELS - 1 - level); }

// c[m, n] = a[m, k] b[k, n] + beta c by rows, each as it is ('N') or transposed in memory ('T'); a line has `l` floats.
static void multiply(Gemm gemm, i64 m, i64 n, i64 k, const float *a, i64 la, char ta, const float *b, i64 lb, char tb,
                     float beta, float *c, i64 lc) {
    int im = (int)m, in = (int)n, ik = (int)k, ila = (int)la, ilb = (int)lb, ilc = (int)lc;
    float one = 1;
    gemm(&tb, &ta, &in, &im, &ik, &one, b, &ilb, a, &ila, &beta, c, &ilc);
}

static inline float total(float *lanes) {
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}

static inline float dot(const float *a, const float *b, i64 n) {
    float lanes[LANES] = {0}, rest = 0;
    i64 c = 0;
    for (; c + LANES <= n; c += LANES)
        for (int l = 0; l < LANES; l++) lanes[l] += a[c + l] * b[c + l];
    for (; c < n; c++) rest += a[c] * b[c];
    return total(lanes) + rest;
}

static inline float relu(float x) { return x < 0 ? 0 : x; }  // what is not a number stays so

static void add_bias_relu(float *h, i64 m, i64 width, const float *bias) {
    for (i64 i = 0; i < m; i++)
        for (i64 c = 0; c < width; c++) h[i * width + c] = relu(h[i * width + c] + bias[c]);
}

// The first layer of users and items without its bias.
static void first_layer(Gemm gemm, const float *weight, const float *user, const float *item, i64 m, i64 width, i64 k,
                        float *out) {
    multiply(gemm, m, 4 * k, 4 * k, user + k, width, 'N', weight, 8 * k, 'T', 0, out, 4 * k);
    multiply(gemm, m, 4 * k, 4 * k, item + k, width, 'N', weight + 4 * k, 8 * k, 'T', 1, out, 4 * k);
}

// The layers after the first; `p` are the parameters after those of the first.
static void other_layers(Gemm gemm, const float *const *p, i64 m, i64 k, float *const *h) {
    for (int level = 1; level < LEVELS; level++) {
        i64 in = outputs(k, level - 1), out = outputs(k, level);
        multiply(gemm, m, out, in, h[level - 1], in, 'N', p[2 * level - 2], in, 'T', 0, h[level], out);
        add_bias_relu(h[level], m, out, p[2 * level - 1]);
    }
}

// The parameters in a vector, from the layer `level` on, whose weight is at `flat`.
static void split(const float *flat, i64 k, int level, const float **p) {
    for (; level < LEVELS; level++) {
        i64 out = outputs(k, level);
        *p++ = flat, flat += 2 * out * out;
        *p++ = flat, flat += out;
    }
    p[0] = flat, p[1] = flat + 2 * k;
}

static void at_block(float *const *h, i64 k, i64 pair, float **out) {
    for (int level = 0; level < LEVELS; level++) out[level] = h[level] + pair * outputs(k, level);
}

void neumf_logits(Gemm gemm, const float *const *p, const float *rows, i64 n, i64 width, i64 k, i64 bias,
                  float *const *layers, float *logits) {
    const float *weight = p[2 * LEVELS];
    for (i64 begin = 0; begin < n; begin += PAIRS) {
        i64 m = least(PAIRS, n - begin);
        const float *user = rows + begin * width, *item = rows + (n + begin) * width;
        float *h[LEVELS], product[k];
        at_block(layers, k, begin, h);
        first_layer(gemm, p[0], user, item, m, width, k, h[0]);
        add_bias_relu(h[0], m, 4 * k, p[1]);
        other_layers(gemm, p + 2, m, k, h);
        for (i64 i = 0; i < m; i++) {
            const float *u = user + i * width, *v = item + i * width;
            for (i64 c = 0; c < k; c++) product[c] = u[c] * v[c];
            float s = dot(product, weight, k) + dot(h[LEVELS - 1] + i * k, weight + k, k) + *p[2 * LEVELS + 1];
            logits[begin + i] = bias ? s + (u[5 * k] + v[5 * k]) : s;
        }
    }
}

// sums += the sums of the columns of d[m, width]
static void add_columns(const float *d, i64 m, i64 width, double *sums) {
    float run[width];
    for (i64 begin = 0; begin < m; begin += RUN) {
        memset(run, 0, sizeof run);
        for (i64 i = begin; i < least(begin + RUN, m); i++)
            for (i64 c = 0; c < width; c++) run[c] += d[i * width + c];
        for (i64 c = 0; c < width; c++) sums[c] += run[c];
    }
}

// What a block of pairs gives to the gradient of its rows outside the tower (`du`, `dv`), of the output (2k + 1 `sums`)
// and of the last layer before its ReLU (`d`), from that of the logits `g`.
static void output_gradient(const float *u, const float *v, i64 m, i64 width, i64 k, i64 bias, const float *weight,
                            const float *h, const float *g, float *restrict du, float *restrict dv, float *restrict d,
                            double *sums) {
    float run[2 * k + 1];
    for (i64 begin = 0; begin < m; begin += RUN) {
        memset(run, 0, sizeof run);
        for (i64 i = begin; i < least(begin + RUN, m); i++) {
            const float *own = u + i * width, *other = v + i * width, *last = h + i * k, slope = g[i];
            float *restrict of_own = du + i * width, *restrict of_other = dv + i * width, *restrict of_last = d + i * k;
            for (i64 c = 0; c < k; c++) {
                float part = slope * weight[c], deep = slope * weight[k + c];
                of_own[c] = part * other[c];
                of_other[c] = part * own[c];
                of_last[c] = last[c] <= 0 ? 0 : deep;
                run[c] += slope * (own[c] * other[c]);
                run[k + c] += slope * last[c];
            }
            run[2 * k] += slope;
            for (i64 c = 5 * k; c < width; c++) of_own[c] = of_other[c] = bias && c == 5 * k ? slope : 0;
        }
        for (i64 c = 0; c <= 2 * k; c++) sums[c] += run[c];
    }
}

// The gradient of rows and of all parameters (`dense`, one vector) from that of the logits. `space` has room for
// min(n, PAIRS) * 7k floats.
void neumf_gradient(Gemm gemm, const float *const *p, const float *rows, i64 n, i64 width, i64 k, i64 bias,
                    float *const *layers, const float *g, float *of_rows, float *dense, float *space) {
    const float *found[2 * LEVELS + 2];
    double sums[LEVELS][4 * k], of_output[2 * k + 1];
    split(dense, k, 0, found);
    memset(sums, 0, sizeof sums), memset(of_output, 0, sizeof of_output);
    for (i64 begin = 0; begin < n; begin += PAIRS) {
        i64 m = least(PAIRS, n - begin), at[2] = {begin * width, (n + begin) * width};
        float *h[LEVELS], *d[LEVELS] = {space, space + 4 * k * m, space + 6 * k * m}, beta = begin > 0;
        at_block(layers, k, begin, h);
        output_gradient(rows + at[0], rows + at[1], m, width, k, bias, p[2 * LEVELS], h[LEVELS - 1], g + begin,
                        of_rows + at[0], of_rows + at[1], d[LEVELS - 1], of_output);
        for (int level = LEVELS - 1; level; level--) {
            i64 in = outputs(k, level - 1), out = outputs(k, level);
            float *before = d[level - 1], *of_weight = (float *)found[2 * level];
            add_columns(d[level], m, out, sums[level]);
            multiply(gemm, out, in, m, d[level], out, 'T', h[level - 1], in, 'N', beta, of_weight, in);
            multiply(gemm, m, in, out, d[level], out, 'N', p[2 * level], in, 'N', 0, before, in);
            for (i64 c = 0; c < m * in; c++) before[c] = h[level - 1][c] <= 0 ? 0 : before[c];
        }
        add_columns(d[0], m, 4 * k, sums[0]);
        for (int side = 0; side < 2; side++) {
            const float *tower = rows + at[side] + k, *half = p[0] + 4 * k * side;
            float *of_half = (float *)found[0] + 4 * k * side;
            multiply(gemm, 4 * k, 4 * k, m, d[0], 4 * k, 'T', tower, width, 'N', beta, of_half, 8 * k);
            multiply(gemm, m, 4 * k, 4 * k, d[0], 4 * k, 'N', half, 8 * k, 'N', 0, of_rows + at[side] + k, width);
        }
    }
    for (int level = 0; level < LEVELS; level++)
        for (i64 c = 0; c < outputs(k, level); c++) ((float *)found[2 * level + 1])[c] = (float)sums[level][c];
    for (i64 c = 0; c <= 2 * k; c++) ((float *)found[2 * LEVELS])[c] = (float)of_output[c];
}

// Adds what the deltas of one side of a block of pairs change in its first layer: W dx to `first`, dW dx to `second`,
// whose rows count only where `touched`. `x` and `y` have room for m * 4k floats each.
static void add_deltas(Gemm gemm, const float *weight, const float *d_weight, const i64 *index, const float *deltas,
                       i64 m, i64 width, i64 k, float *first, float *second, char *touched, float *x, float *y) {
    i64 count = 0, place[PAIRS], columns = 4 * k;
    for (i64 i = 0; i < m; i++)
        if (index[i] >= 0) {
            memcpy(x + count * columns, deltas + index[i] * width + k, columns * sizeof *x);
            place[count++] = i;
        }
    if (!count) return;
    multiply(gemm, count, columns, columns, x, columns, 'N', weight, 8 * k, 'T', 0, y, columns);
    for (i64 j = 0; j < count; j++)
        for (i64 c = 0; c < columns; c++) first[place[j] * columns + c] += y[j * columns + c];
    multiply(gemm, count, columns, columns, x, columns, 'N', d_weight, 8 * k, 'T', 0, y, columns);
    for (i64 j = 0; j < count; j++) {
        float *row = second + place[j] * columns;
        if (!touched[place[j]]) memset(row, 0, columns * sizeof *row);
        touched[place[j]] = 1;
        for (i64 c = 0; c < columns; c++) row[c] += y[j * columns + c];
    }
}

// Logits `[count, n]` and layers `[count, n, ...]` at theta + c * step for each c. The step of row i is
// deltas[index[i]], nothing at -1. `space` has room for min(n, PAIRS) * 20k floats and `count` times the parameters.
void neumf_candidates(Gemm gemm, const float *dense, const float *step, i64 size, const float *rows, const i64 *index,
                      const float *deltas, i64 n, i64 width, i64 k, i64 bias, const double *candidates, i64 count,
                      float *const *layers, float *logits, float *space) {
    i64 of_first = 32 * k * k + 4 * k, rest = size - of_first, columns = 4 * k;
    float *weights = space + 5 * columns * least(n, PAIRS);
    for (i64 j = 0; j < count; j++) {
        float x = (float)candidates[j];  // at 0 a step that is not finite changes nothing
        for (i64 c = of_first; c < size; c++) weights[j * rest + c - of_first] = x == 0 ? dense[c] : dense[c] + x * step[c];
    }
    for (i64 begin = 0; begin < n; begin += PAIRS) {
        i64 m = least(PAIRS, n - begin), block = columns * m;
        const float *user = rows + begin * width, *item = rows + (n + begin) * width;
        const i64 *at[2] = {index + begin, index + n + begin};
        float *value = space, *first = value + block, *second = first + block, *x = second + block, *y = x + block;
        char touched[PAIRS] = {0};
        first_layer(gemm, dense, user, item, m, width, k, value);
        first_layer(gemm, step, user, item, m, width, k, first);
        for (i64 i = 0; i < m; i++)
            for (i64 c = 0; c < columns; c++) {
                value[i * columns + c] += dense[32 * k * k + c];
                first[i * columns + c] += step[32 * k * k + c];
            }
        for (int side = 0; side < 2; side++)
            add_deltas(gemm, dense + columns * side, step + columns * side, at[side], deltas, m, width, k, first, second,
                       touched, x, y);
        for (i64 j = 0; j < count; j++) {
            const float *p[2 * LEVELS], s = (float)candidates[j];
            float *h[LEVELS], product[k];
            split(weights + j * rest, k, 1, p);
            at_block(layers, k, j * n + begin, h);
            for (i64 i = 0; i < m; i++) {
                const float *v = value + i * columns, *f = first + i * columns, *q = second + i * columns;
                float *restrict out = h[0] + i * columns;
                if (s == 0)
                    for (i64 c = 0; c < columns; c++) out[c] = relu(v[c]);
                else if (!touched[i])
                    for (i64 c = 0; c < columns; c++) out[c] = relu(v[c] + s * f[c]);
                else
                    for (i64 c = 0; c < columns; c++) out[c] = relu(v[c] + s * (f[c] + s * q[c]));
            }
            other_layers(gemm, p, m, k, h);
            const float *weight = p[2 * LEVELS - 2];
            for (i64 i = 0; i < m; i++) {
                const float *u = user + i * width, *v = item + i * width;
                const float *du = s != 0 && at[0][i] >= 0 ? deltas + at[0][i] * width : 0;
                const float *dv = s != 0 && at[1][i] >= 0 ? deltas + at[1][i] * width : 0;
                float own = bias ? u[5 * k] + v[5 * k] : 0;
                if (du || dv)
                    for (i64 c = 0; c < k; c++)
                        product[c] = (du ? u[c] + s * du[c] : u[c]) * (dv ? v[c] + s * dv[c] : v[c]);
                else
                    for (i64 c = 0; c < k; c++) product[c] = u[c] * v[c];
                if (bias && du) own += s * du[5 * k];
                if (bias && dv) own += s * dv[5 * k];
                float deep = dot(h[LEVELS - 1] + i * k, weight + k, k) + *p[2 * LEVELS - 1];
                logits[j * n + begin + i] = dot(product, weight, k) + deep + own;
            }
        }
    }
}
