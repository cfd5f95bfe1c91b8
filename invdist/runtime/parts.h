// What all kernels share. How they divide their work among threads: with OpenMP, without it on one thread. They use the threads of the OpenMP
// that torch has loaded (native.py), so that a process has one team of them. One thread starts none.

#include <stdint.h>

typedef int64_t i64;
typedef uint64_t u64;

enum { LINE = 64, LANES = 16 };  // bytes of a line of memory; values that a loop adds side by side

static inline i64 least(i64 a, i64 b) { return a < b ? a : b; }

static inline void prefetch(const float *row, i64 width) {
    for (i64 byte = 0; byte < width * 4; byte += LINE) __builtin_prefetch((const char *)row + byte);
}

// How many rows ahead to fetch: 32 lines of memory, measured for rows of 128 bytes that another core has just written.
static inline i64 rows_ahead(i64 width) { return width <= 32 ? 16 : 8; }

static inline float total(float *lanes) {
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}

// What a function gives that works on a part: the first row that is wrong, or -1. It is not compiled into its callers: where
// the compiler knows that a part begins at 0, it was seen to make slower code.
#define PART __attribute__((noinline)) i64

// `call` for parts of n rows, from `begin` to `end`, one for each of `threads`. Gives the first row that
// is wrong in any, or -1.
#define IN_PARTS(n, call)                                                                                        \
    ({                                                                                                           \
        const i64 all_ = (n);                                                                                    \
        u64 wrong_ = -1;                                                                                         \
        if (threads < 2) {                                                                                       \
            const i64 begin = 0, end = all_;                                                                     \
            wrong_ = (u64)(call);                                                                                \
        } else {                                                                                                 \
            _Pragma("omp parallel for num_threads(threads) schedule(static, 1) reduction(min : wrong_)")         \
            for (int part_ = 0; part_ < threads; part_++) {                                                      \
                const i64 begin = all_ * part_ / threads, end = all_ * (part_ + 1) / threads;                    \
                const u64 found_ = (u64)(call);                                                                  \
                if (found_ < wrong_) wrong_ = found_;                                                            \
            }                                                                                                    \
        }                                                                                                        \
        (i64)wrong_;                                                                                             \
    })
