// NeuMF: logits, gradient and candidates, in blocks of pairs whose layers stay in the cache. Called through neumf_kernels.py;
// neumf.py has the same in torch operators, with the formulas. A block is the work of one of `threads` (parts.h), and sums
// over pairs are made in the order of blocks: results are the same to the bit for any number of threads.
//
// Rows are `width` floats, users first: k columns of the product, 4k of the tower, the bias, others. Parameters are in
// their order in NeuMF: weight and bias of each layer, then those of the output. h are the outputs of the layers.

#include "products.h"

enum { LEVELS = 3, PAIRS = 256, RUN = 128 };

static inline i64 blocks_of(i64 n) { return (n + PAIRS - 1) / PAIRS; }

static inline i64 outputs(i64 k, int level) { return k << (LEVELS - 1 - level); }

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

static PART logits_part(Gemm gemm, const float *const *p, const float *rows, i64 n, i64 width, i64 k, i64 bias,
                        float *const *layers, float *logits, i64 first_block, i64 last_block) {
    const float *weight = p[2 * LEVELS];
    for (i64 begin = first_block * PAIRS; begin < least(last_block * PAIRS, n); begin += PAIRS) {
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
    return -1;
}

void neumf_logits(Gemm gemm, const float *const *p, const float *rows, i64 n, i64 width, i64 k, i64 bias,
                  float *const *layers, float *logits, int threads) {
    IN_PARTS(blocks_of(n), logits_part(gemm, p, rows, n, width, k, bias, layers, logits, begin, end));
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

// What a block of pairs gives to the gradient of its rows outside the tower (`du`, `dv`), of the output (2k + 1 sums for
// each of its runs) and of the last layer before its ReLU (`d`), from that of the logits `g`.
static void output_gradient(const float *u, const float *v, i64 m, i64 width, i64 k, i64 bias, const float *weight,
                            const float *h, const float *g, float *restrict du, float *restrict dv, float *restrict d,
                            float *restrict run) {
    for (i64 begin = 0; begin < m; begin += RUN, run += 2 * k + 1) {
        memset(run, 0, (2 * k + 1) * sizeof *run);
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
    }
}

// What a gradient is made from, and where it goes. `space` has for each of some blocks of pairs the gradients of its layers
// before their ReLU (7k floats for each pair), then for each the sums of its runs.
typedef struct {
    Gemm gemm;
    const float *const *p, *rows, *g;
    i64 n, width, k, bias;
    float *const *layers, *of_rows, *space;
    const float *found[2 * LEVELS + 2];  // where the gradients of parameters go
    double *sums[LEVELS], *of_output;
    int threads;
} Gradient;

static i64 pairs_of(const Gradient *t, i64 block) { return least(PAIRS, t->n - block * PAIRS); }

static void layers_of(const Gradient *t, i64 place, i64 m, float **d) {
    d[0] = t->space + place * 7 * t->k * least(t->n, PAIRS), d[1] = d[0] + 4 * t->k * m, d[2] = d[1] + 2 * t->k * m;
}

static float *runs_of(const Gradient *t, i64 place) {
    return t->space + t->threads * 7 * t->k * least(t->n, PAIRS) + place * (PAIRS / RUN) * (2 * t->k + 1);
}

// The gradient of the rows and layers of some blocks after `first`.
static PART gradient_of_blocks(const Gradient *t, i64 first, i64 begin, i64 end) {
    const i64 k = t->k, width = t->width;
    for (i64 place = begin; place < end; place++) {
        i64 pair = (first + place) * PAIRS, m = pairs_of(t, first + place), at[2] = {pair * width, (t->n + pair) * width};
        float *h[LEVELS], *d[LEVELS];
        at_block(t->layers, k, pair, h);
        layers_of(t, place, m, d);
        output_gradient(t->rows + at[0], t->rows + at[1], m, width, k, t->bias, t->p[2 * LEVELS], h[LEVELS - 1],
                        t->g + pair, t->of_rows + at[0], t->of_rows + at[1], d[LEVELS - 1], runs_of(t, place));
        for (int level = LEVELS - 1; level; level--) {
            i64 in = outputs(k, level - 1), out = outputs(k, level);
            float *before = d[level - 1];
            multiply(t->gemm, m, in, out, d[level], out, 'N', t->p[2 * level], in, 'N', 0, before, in);
            for (i64 c = 0; c < m * in; c++) before[c] = h[level - 1][c] <= 0 ? 0 : before[c];
        }
        for (int side = 0; side < 2; side++)
            multiply(t->gemm, m, 4 * k, 4 * k, d[0], 4 * k, 'N', t->p[0] + 4 * k * side, 8 * k, 'N', 0,
                     t->of_rows + at[side] + k, width);
    }
    return -1;
}

// Adds what `blocks` of them give to the gradient of some columns of a weight.
static void add_to_weight(const Gradient *t, i64 first, i64 blocks, int level, i64 column, i64 columns) {
    const i64 k = t->k, out = outputs(k, level), side = level == 0 && column >= out;
    for (i64 place = 0; place < blocks; place++) {
        i64 pair = (first + place) * PAIRS, m = pairs_of(t, first + place), line = level ? 2 * out : t->width;
        const float *given = level ? t->layers[level - 1] + pair * line + column
                                   : t->rows + (side * t->n + pair) * line + k + column - side * out;
        float *d[LEVELS], *to = (float *)t->found[2 * level] + column;
        layers_of(t, place, m, d);
        multiply(t->gemm, out, columns, m, d[level], out, 'T', given, line, 'N', first + place > 0, to, 2 * out);
    }
}

static void add_to_biases_and_output(const Gradient *t, i64 first, i64 blocks) {
    for (i64 place = 0; place < blocks; place++) {
        i64 m = pairs_of(t, first + place);
        float *d[LEVELS], *run = runs_of(t, place);
        layers_of(t, place, m, d);
        for (int level = 0; level < LEVELS; level++) add_columns(d[level], m, outputs(t->k, level), t->sums[level]);
        for (i64 begin = 0; begin < m; begin += RUN)
            for (i64 c = 0; c <= 2 * t->k; c++) t->of_output[c] += *run++;
    }
}

// Adds what `blocks` of them give to the gradient of the parameters: every `threads`-th task of all.
static PART add_to_parameters(const Gradient *t, i64 first, i64 blocks, i64 task) {
    for (int level = 0; level < LEVELS; level++) {
        const i64 in = 2 * outputs(t->k, level), half = level ? in : in / 2;
        const i64 columns = IS_SMALL && half % WIDE == 0 ? WIDE : half;
        for (i64 column = 0; column < in; column += columns)
            if (task-- == 0) add_to_weight(t, first, blocks, level, column, columns), task = t->threads - 1;
    }
    if (task == 0) add_to_biases_and_output(t, first, blocks);
    return -1;
}

// The gradient of rows and of all parameters (`dense`, one vector) from that of the logits. `space` has room for
// min(n, PAIRS) * 7k + 4k + 2 floats for each thread. Each takes one block at a time; then they divide the sums over pairs.
void neumf_gradient(Gemm gemm, const float *const *p, const float *rows, i64 n, i64 width, i64 k, i64 bias,
                    float *const *layers, const float *g, float *of_rows, float *dense, float *space, int threads) {
    double sums[LEVELS][4 * k], of_output[2 * k + 1];
    Gradient t = {gemm, p, rows, g, n, width, k, bias, layers, of_rows, space, {0}, {sums[0], sums[1], sums[2]}, of_output,
                  threads};
    split(dense, k, 0, t.found);
    memset(sums, 0, sizeof sums), memset(of_output, 0, sizeof of_output);
    for (i64 first = 0; first < blocks_of(n); first += threads) {
        const i64 blocks = least(threads, blocks_of(n) - first);
        IN_PARTS(blocks, gradient_of_blocks(&t, first, begin, end));
        IN_PARTS(threads, add_to_parameters(&t, first, blocks, begin));
    }
    for (int level = 0; level < LEVELS; level++)
        for (i64 c = 0; c < outputs(k, level); c++) ((float *)t.found[2 * level + 1])[c] = (float)sums[level][c];
    for (i64 c = 0; c <= 2 * k; c++) ((float *)t.found[2 * LEVELS])[c] = (float)of_output[c];
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

// Those of some blocks; `weights` are the parameters after the first layer of every candidate.
static PART candidates_part(Gemm gemm, const float *dense, const float *step, const float *rows, const i64 *index,
                            const float *deltas, i64 n, i64 width, i64 k, i64 bias, const double *candidates, i64 count,
                            const float *weights, i64 rest, float *const *layers, float *logits, float *space,
                            i64 first_block, i64 last_block) {
    const i64 columns = 4 * k;
    for (i64 begin = first_block * PAIRS; begin < least(last_block * PAIRS, n); begin += PAIRS) {
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
    return -1;
}

// Logits `[count, n]` and layers `[count, n, ...]` at theta + c * step for each c. The step of row i is
// deltas[index[i]], nothing at -1. `space` has room for min(n, PAIRS) * 20k floats for each thread, and `count` times the
// parameters.
void neumf_candidates(Gemm gemm, const float *dense, const float *step, i64 size, const float *rows, const i64 *index,
                      const float *deltas, i64 n, i64 width, i64 k, i64 bias, const double *candidates, i64 count,
                      float *const *layers, float *logits, float *space, int threads) {
    i64 of_first = 32 * k * k + 4 * k, rest = size - of_first, room = 20 * k * least(n, PAIRS), blocks = blocks_of(n);
    float *weights = space + threads * room;
    for (i64 j = 0; j < count; j++) {
        float x = (float)candidates[j];  // at 0 a step that is not finite changes nothing
        for (i64 c = of_first; c < size; c++) weights[j * rest + c - of_first] = x == 0 ? dense[c] : dense[c] + x * step[c];
    }
    IN_PARTS(threads, candidates_part(gemm, dense, step, rows, index, deltas, n, width, k, bias, candidates, count, weights,
                                      rest, layers, logits, space + begin * room, blocks * begin / threads,
                                      blocks * end / threads));
}
