// Products of matrices for neumf.c: by `multiply_small` where it can, else by torch's own BLAS.

#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "parts.h"

typedef void (*Gemm)(const char *, const char *, const int *, const int *, const int *, const float *, const float *,
                     const int *, const float *, const int *, const float *, float *, const int *);

enum { WIDE = 32, DEEP = 128 };  // a panel of b has 32 columns and up to 128 lines: half of the first cache

// Products of matrices that are in the cache already, for processors with AVX-512. A general BLAS spends a quarter of the
// time of such small ones on copies and on clearing the result.
#ifdef __AVX512F__
enum { IS_SMALL = 1 };

// c[rows, WIDE] = a * panel + c if `add`; a[i, p] is at a[i * by_row + p * by_step]. `rows` is a constant: all sums stay in
// registers.
static inline __attribute__((always_inline)) void tile(int rows, i64 depth, const float *a, i64 by_row, i64 by_step,
                                                       const float *panel, int add, float *c, i64 lc) {
    __m512 sums[rows][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        sums[i][0] = add ? _mm512_loadu_ps(c + i * lc) : _mm512_setzero_ps();
        sums[i][1] = add ? _mm512_loadu_ps(c + i * lc + WIDE / 2) : _mm512_setzero_ps();
    }
    for (i64 p = 0; p < depth; p++, a += by_step, panel += WIDE) {
        __m512 low = _mm512_loadu_ps(panel), high = _mm512_loadu_ps(panel + WIDE / 2);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            __m512 x = _mm512_set1_ps(a[i * by_row]);
            sums[i][0] = _mm512_fmadd_ps(x, low, sums[i][0]);
            sums[i][1] = _mm512_fmadd_ps(x, high, sums[i][1]);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        _mm512_storeu_ps(c + i * lc, sums[i][0]);
        _mm512_storeu_ps(c + i * lc + WIDE / 2, sums[i][1]);
    }
}

// panel[p, x] = b[x, p] for WIDE lines of b, in squares of 4 by 4.
static void transpose(const float *b, i64 lb, i64 depth, float *panel) {
    for (i64 x = 0; x < WIDE; x += 4)
        for (i64 p = 0; p < depth; p += 4) {
            const float *from = b + x * lb + p;
            if (p + 4 > depth) {
                for (i64 q = p; q < depth; q++)
                    for (int y = 0; y < 4; y++) panel[q * WIDE + x + y] = b[(x + y) * lb + q];
                break;
            }
            __m128 r0 = _mm_loadu_ps(from), r1 = _mm_loadu_ps(from + lb), r2 = _mm_loadu_ps(from + 2 * lb);
            __m128 r3 = _mm_loadu_ps(from + 3 * lb);
            _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
            float *to = panel + p * WIDE + x;
            _mm_storeu_ps(to, r0), _mm_storeu_ps(to + WIDE, r1);
            _mm_storeu_ps(to + 2 * WIDE, r2), _mm_storeu_ps(to + 3 * WIDE, r3);
        }
}

// `multiply` (below) of matrices that have a shape for it. Returns whether they have. A value of c is summed over p in
// order, whatever m and n are.
static int multiply_small(i64 m, i64 n, i64 k, const float *a, i64 la, char ta, const float *b, i64 lb, char tb,
                          float beta, float *c, i64 lc) {
    if (n % WIDE || !k) return 0;
    i64 by_row = ta == 'T' ? 1 : la, by_step = ta == 'T' ? la : 1;
    float panel[DEEP * WIDE];
    for (i64 column = 0; column < n; column += WIDE)
        for (i64 first = 0; first < k; first += DEEP) {
            i64 depth = k - first < DEEP ? k - first : DEEP, i = 0;
            const float *from = tb == 'T' ? b + column * lb + first : b + first * lb + column;
            if (tb == 'T')
                transpose(from, lb, depth, panel);
            else
                for (i64 p = 0; p < depth; p++) memcpy(panel + p * WIDE, from + p * lb, WIDE * sizeof *panel);
            const float *at = a + first * by_step;
            float *to = c + column;
            int add = first > 0 || beta != 0;
            for (; i + 12 <= m; i += 12) tile(12, depth, at + i * by_row, by_row, by_step, panel, add, to + i * lc, lc);
            for (; i + 8 <= m; i += 8) tile(8, depth, at + i * by_row, by_row, by_step, panel, add, to + i * lc, lc);
            for (; i + 4 <= m; i += 4) tile(4, depth, at + i * by_row, by_row, by_step, panel, add, to + i * lc, lc);
            for (; i < m; i++) tile(1, depth, at + i * by_row, by_row, by_step, panel, add, to + i * lc, lc);
        }
    return 1;
}
#else
enum { IS_SMALL = 0 };

static inline int multiply_small(i64 m, i64 n, i64 k, const float *a, i64 la, char ta, const float *b, i64 lb, char tb,
                                 float beta, float *c, i64 lc) {
    return 0;
}
#endif

// c[m, n] = a[m, k] b[k, n] + beta c by rows, each as it is ('N') or transposed in memory ('T'); a line has `l` floats, and
// beta is 0 or 1.
static void multiply(Gemm gemm, i64 m, i64 n, i64 k, const float *a, i64 la, char ta, const float *b, i64 lb, char tb,
                     float beta, float *c, i64 lc) {
    if (multiply_small(m, n, k, a, la, ta, b, lb, tb, beta, c, lc)) return;
    int im = (int)m, in = (int)n, ik = (int)k, ila = (int)la, ilb = (int)lb, ilc = (int)lc;
    float one = 1;
    gemm(&tb, &ta, &in, &im, &ik, &one, b, &ilb, a, &ila, &beta, c, &ilc);
}
