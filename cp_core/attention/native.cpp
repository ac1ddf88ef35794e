// Kernels of CPUs: attention with its log-sum-exp, merges of its parts, linear layers, norms, rotary positions, and the
// choice of tokens.
//
// One source, compiled once for each instruction set (hatch_build.py) and called through ctypes (native.py): it needs
// no header of Python or torch. Vectors are those of gcc and clang, W floats wide.
//
// Shapes: T query tokens, S keys, B single queries, H query heads, K key/value heads, D head dimension, P pages of G
// tokens, M pages of the longest table, C input features, N output features. K and V are fp32 or bfloat16, and so are
// weights; everything is summed in fp32.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__)
#include <cpuid.h>
#endif
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__AVX512F__)
#define W 16
#elif defined(__AVX__)
#define W 8
#else
#define W 4
#endif

// Rows and vectors of a product's tile: as many sums as fit into the registers beside a vector or two of operands.
#if W == 16
#define TILE_ROWS 12
#else
#define TILE_ROWS 6
#endif
#define TILE_VECTORS 2

#define MAX_DIM 256
#define KEY_BLOCK 128
// Rows of queries of one task: many, so that keys are fetched and transposed seldom; fewer in short calls, so that
// every thread has some.
#define QUERY_BLOCK 192
#define SHORT_BLOCK 96
// Rows of queries that take the time of fetching and transposing the keys.
#define TRANSPOSED_ROWS 48
// Keys of one task of paged attention. It does not depend on the number of threads, so neither do the results' bits.
#define PAGED_CHUNK 256
// Fewer numbers of keys and values are read in less time than another thread takes to wake.
#define LEAST_SHARED_NUMBERS (1 << 18)

#define INLINE static inline __attribute__((always_inline))

namespace {

typedef float vf __attribute__((vector_size(4 * W)));
typedef float vf_u __attribute__((vector_size(4 * W), aligned(4)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint16_t vh_u __attribute__((vector_size(2 * W), aligned(2)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint32_t vu_u __attribute__((vector_size(4 * W), aligned(2), may_alias));  // two bfloat16 a lane
typedef uint16_t bf16;

const float INFINITE = __builtin_inff();

// Numbers of 16 bits, a lane each. To convert vectors of 512 bits gcc takes four instructions, the processor has one.
INLINE vu spread(vh_u bits) {
#if W == 16
    return (vu)_mm512_cvtepu16_epi32((__m256i)bits);
#else
    return __builtin_convertvector(bits, vu);
#endif
}

INLINE vf load(const float *at) { return *(const vf_u *)at; }
INLINE vf load(const bf16 *at) { return (vf)(spread(*(const vh_u *)at) << 16); }
INLINE float widen(float value) { return value; }
INLINE float widen(bf16 value) {
    uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}
INLINE void store(float *at, vf value) { *(vf_u *)at = value; }
INLINE vf all(float value) { return value - (vf){}; }
INLINE vf select(vi chosen, vf yes, vf no) { return chosen ? yes : no; }
// The larger of two numbers: b if a is a NaN.
INLINE vf larger(vf a, vf b) {
#if W == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return select(a > b, a, b);
#endif
}

INLINE void put(float *at, float value) { *at = value; }
INLINE void put(bf16 *at, float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    // Round to nearest, ties to even. A NaN stays one.
    *at = value != value ? 0x7fc0 : (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE void put(float *at, vf value) { store(at, value); }
INLINE void put(bf16 *at, vf value) {
    vu bits = (vu)value, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const vi is_number = value == value;
    *(vh_u *)at = __builtin_convertvector((rounded & (vu)is_number) | (0x7fc0 & ~(vu)is_number), vh_u);
}

// A number as it is after it was stored, which bfloat16 rounds.
INLINE vf stored(vf value, const float *) { return value; }
INLINE vf stored(vf value, const bf16 *) {
    const vu bits = (vu)value;
    return select(value == value, (vf)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000), value);
}

// The same for kernels that multiply bfloat16, whose processors have an instruction for it. It writes tiny numbers as
// zeros.
template <bool IN_ONE, class Result>
INLINE void put_rounded(Result *at, vf value) {
#if defined(__AVX512BF16__)
    if (IN_ONE && sizeof(Result) == sizeof(bf16)) {
        *(vh_u *)at = (vh_u)_mm512_cvtneps_pbh((__m512)value);
        return;
    }
#endif
    put(at, value);
}
template <bool IN_ONE, class Result>
INLINE vf rounded(vf value, const Result *kind) {
#if defined(__AVX512BF16__)
    if (IN_ONE && sizeof(Result) == sizeof(bf16))
        return (vf)(spread((vh_u)_mm512_cvtneps_pbh((__m512)value)) << 16);
#endif
    return stored(value, kind);
}

// Add the products of two bfloat16 numbers a lane to a sum, in fp32. The processor's instruction for it takes tiny
// numbers for zeros.
INLINE vf add_pairs(vf sum, vf x, vf y) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
#else
    const uint32_t high = 0xffff0000;
    return sum + (vf)((vu)x & high) * (vf)((vu)y & high) + (vf)((vu)x << 16) * (vf)((vu)y << 16);
#endif
}
INLINE vf all_pairs(const bf16 *at) {
    uint32_t both;
    memcpy(&both, at, sizeof(both));
    return (vf)(both + (vu){});
}

#if defined(__clang__)
#define LANES(...) __VA_ARGS__
#define SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define LANES(...) __VA_ARGS__
#define SHUFFLE(x, y, ...) __builtin_shuffle(x, y, (vi){__VA_ARGS__})
#endif

// Lanes of pairs of vectors that a network of log2(W) stages exchanges: in stage n, those whose numbers differ by n.
#if W == 16
#define LOW_1 LANES(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#define HIGH_1 LANES(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)
#define LOW_2 LANES(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH_2 LANES(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define LOW_4 LANES(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
#define HIGH_4 LANES(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)
#define LOW_8 LANES(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
#define HIGH_8 LANES(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
#define STAGES(STAGE) STAGE(1) STAGE(2) STAGE(4) STAGE(8)
#elif W == 8
#define LOW_1 LANES(0, 8, 2, 10, 4, 12, 6, 14)
#define HIGH_1 LANES(1, 9, 3, 11, 5, 13, 7, 15)
#define LOW_2 LANES(0, 1, 8, 9, 4, 5, 12, 13)
#define HIGH_2 LANES(2, 3, 10, 11, 6, 7, 14, 15)
#define LOW_4 LANES(0, 1, 2, 3, 8, 9, 10, 11)
#define HIGH_4 LANES(4, 5, 6, 7, 12, 13, 14, 15)
#define STAGES(STAGE) STAGE(1) STAGE(2) STAGE(4)
#else
#define LOW_1 LANES(0, 4, 2, 6)
#define HIGH_1 LANES(1, 5, 3, 7)
#define LOW_2 LANES(0, 1, 4, 5)
#define HIGH_2 LANES(2, 3, 6, 7)
#define STAGES(STAGE) STAGE(1) STAGE(2)
#endif

// Sum of each of W vectors: lane l of the result is the sum of vector l.
INLINE vf sums_of(vf *each) {
#define STAGE(n)                                                                     \
    _Pragma("GCC unroll 8") for (int i = 0; i < W / 2 / n; ++i) {                     \
        vf x = each[2 * i], y = each[2 * i + 1];                                      \
        each[i] = SHUFFLE(x, y, LOW_##n) + SHUFFLE(x, y, HIGH_##n);                   \
    }
    STAGES(STAGE)
#undef STAGE
    return each[0];
}

// Transpose W vectors in place.
INLINE void transpose(vf *each) {
#define STAGE(n)                                                                     \
    _Pragma("GCC unroll 16") for (int i = 0; i < W; ++i) if (!(i & n)) {              \
        vf x = each[i], y = each[i + n];                                              \
        each[i] = SHUFFLE(x, y, LOW_##n);                                             \
        each[i + n] = SHUFFLE(x, y, HIGH_##n);                                        \
    }
    STAGES(STAGE)
#undef STAGE
}

INLINE float sum_of(vf value) {
#define STAGE(n) value += SHUFFLE(value, value, HIGH_##n);
    STAGES(STAGE)
#undef STAGE
    return value[0];
}

INLINE float largest_of(vf value) {
#define STAGE(n) value = larger(value, SHUFFLE(value, value, HIGH_##n));
    STAGES(STAGE)
#undef STAGE
    return value[0];
}

// e^x for x <= 0 within 2 units in the last place, 0 below -87.3. A NaN stays one.
INLINE vf exponential(vf x) {
    const vf least = all(-87.3f);
    vf bounded = select(x < least, least, x);
    vf shifted = bounded * 1.44269504f + 12582912.0f;  // rounds to the nearest integer, in the lowest bits
    vf whole = shifted - 12582912.0f;
    vf rest = bounded - whole * 0.693359375f;
    rest = rest + whole * 2.12194440e-4f;
    vf sum = all(1.9875691500e-4f);
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    vf power = (vf)(((vi)shifted + (127 - 0x4b400000)) << 23);
    return select(x < least, all(0.0f), sum * power);
}

// 2^x for x <= 0, 0 below -126. A NaN stays one. It is within 2 units in the last place, or IN_BRIEF within 3.
template <bool IN_BRIEF = false>
INLINE vf power_of_two(vf x) {
    const vf shifted = x + (12582912.0f + 127.0f);  // rounds to the nearest integer; the exponent is in the lowest bits
    const vf rest = x - (shifted - (12582912.0f + 127.0f));
    vf sum;
    if (IN_BRIEF) {
        sum = all(1.3264727e-3f);
        sum = sum * rest + 9.6715128e-3f;
        sum = sum * rest + 5.5507337e-2f;
        sum = sum * rest + 2.4022242e-1f;
        sum = sum * rest + 6.9314698e-1f;
    } else {
        sum = all(1.5353362e-4f);
        sum = sum * rest + 1.3398874e-3f;
        sum = sum * rest + 9.6184369e-3f;
        sum = sum * rest + 5.5503324e-2f;
        sum = sum * rest + 2.4022648e-1f;
        sum = sum * rest + 6.9314718e-1f;
    }
    sum = sum * rest + 1.0f;
    const vf power = (vf)((vi)shifted << 23);
#if W == 16
    const __mmask16 is_some = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (vf)_mm512_maskz_mul_ps(is_some, (__m512)sum, (__m512)power);
#else
    return select(x < -126.0f, all(0.0f), sum * power);
#endif
}

// 1 / x for x in [1, 2], within a unit in the last place.
INLINE vf inverse(vf x) {
#if defined(__AVX512F__)
    const vf near = (vf)_mm512_rcp14_ps((__m512)x);
    return near + near * (1.0f - x * near);
#else
    return 1.0f / x;
#endif
}

float exponential(float x) {
    vf out = exponential(all(x));
    return out[0];
}

// Threads: tasks are taken from a counter by the threads of torch's own pool, which `use_pool` names.

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);
Parallel parallel = nullptr;

template <class Arguments>
struct Job {
    const Arguments *arguments;
    int64_t tasks, next;
};

template <class Arguments, void (*RUN)(const Arguments &, int64_t)>
void work(void *given) {
    auto *job = (Job<Arguments> *)given;
    for (;;) {
        const int64_t task = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (task >= job->tasks) return;
        RUN(*job->arguments, task);
    }
}

template <class Arguments, void (*RUN)(const Arguments &, int64_t)>
void run_tasks(const Arguments &arguments, int64_t tasks, int threads) {
    Job<Arguments> job = {&arguments, tasks, 0};
    if (threads > tasks) threads = (int)tasks;
    if (threads <= 1 || !parallel) work<Arguments, RUN>(&job);
    else parallel(work<Arguments, RUN>, &job, threads, 0);
}

// Attention of many queries.

// Keys and values of some tokens: [S, K, D], with strides in elements.
struct KeyRun {
    const void *k, *v;
    int64_t tokens, k_token, k_head, v_token, v_head;
};

struct Attention {
    const void *q;              // [T, H, D], of the keys' type
    const KeyRun *runs;         // one behind the other; the last is long enough for every query
    const int64_t *low, *high;  // query t sees keys [low[t], high[t]) of all runs; both ascend
    void *out;                  // [T, H, D]
    float *lse;                 // [T, H], or none
    int64_t tokens, heads, kv_heads, dim;
    int64_t per_block;        // tokens of a task
    int64_t q_token, q_head;  // strides in elements
    int is_out_wide;
    float scale;

    void put_out(int64_t at, vf value) const {
        if (is_out_wide) put((float *)out + at, value);
        else put((bf16 *)out + at, value);
    }
};

// Keys [key, key + count) of all runs that lie in one of them, for a KV head.
template <class Stored>
struct Keys {
    const Stored *k, *v;
    int64_t count, k_token, v_token;
};

// Blocks of up to `most` keys from `key` to `stop`, each of one run.
template <class Stored>
struct KeyBlocks {
    const KeyRun *run;
    int64_t passed;  // keys of the runs before

    Keys<Stored> next(int64_t key, int64_t stop, int64_t most, int64_t kv_head) {
        for (; key - passed >= run->tokens; ++run) passed += run->tokens;
        const int64_t within = key - passed, left = run->tokens - within < stop - key ? run->tokens - within : stop - key;
        return {(const Stored *)run->k + within * run->k_token + kv_head * run->k_head,
                (const Stored *)run->v + within * run->v_token + kv_head * run->v_head, left < most ? left : most,
                run->k_token, run->v_token};
    }
    // Return how many keys lie behind the block up to `stop` in its run.
    int64_t behind(int64_t key, int64_t stop) const {
        const int64_t end = passed + run->tokens < stop ? passed + run->tokens : stop;
        return end - key;
    }
};

// Queries and keys of bfloat16 that are multiplied in pairs lie so, too: a pair takes the place of an fp32 number.
struct alignas(64) Scratch {
    float q[QUERY_BLOCK * MAX_DIM];  // tiles of [D][TILE_ROWS]
    float k[MAX_DIM * KEY_BLOCK];    // [D][KEY_BLOCK]
    float v[KEY_BLOCK * MAX_DIM];    // [KEY_BLOCK][D]
    float scores[QUERY_BLOCK * KEY_BLOCK];
    float out[QUERY_BLOCK * MAX_DIM];
    float highest[QUERY_BLOCK], total[QUERY_BLOCK], decay[QUERY_BLOCK];
};
thread_local Scratch scratch;

// scores[rows][KEY_BLOCK] = q tile x k, for all keys of the block; `depth` numbers or pairs.
template <bool IN_PAIRS>
INLINE void multiply_keys(const float *q, const float *k, float *scores, int64_t depth, int64_t vectors) {
    for (int64_t at = 0; at < vectors; at += TILE_VECTORS) {
        vf sums[TILE_ROWS][TILE_VECTORS] = {};
        const float *column = k + at * W, *each = q;
        for (int64_t d = 0; d < depth; ++d, column += KEY_BLOCK, each += TILE_ROWS) {
            vf first = load(column), second = load(column + W);
#pragma GCC unroll 12
            for (int row = 0; row < TILE_ROWS; ++row) {
                if (IN_PAIRS) {
                    const vf both = all_pairs((const bf16 *)(each + row));
                    sums[row][0] = add_pairs(sums[row][0], both, first);
                    sums[row][1] = add_pairs(sums[row][1], both, second);
                } else {
                    sums[row][0] += each[row] * first;
                    sums[row][1] += each[row] * second;
                }
            }
        }
#pragma GCC unroll 12
        for (int row = 0; row < TILE_ROWS; ++row) {
            store(scores + row * KEY_BLOCK + at * W, sums[row][0]);
            store(scores + row * KEY_BLOCK + (at + 1) * W, sums[row][1]);
        }
    }
}

// out[rows][dim] = out * decay + weights[rows][keys] x v[keys][dim].
template <int VECTORS>
INLINE void add_values(const float *weights, const float *v, float *out, const float *decay, int64_t keys, int64_t dim,
                       int64_t at) {
    vf sums[TILE_ROWS][VECTORS];
#pragma GCC unroll 12
    for (int row = 0; row < TILE_ROWS; ++row)
        for (int each = 0; each < VECTORS; ++each)
            sums[row][each] = load(out + row * dim + (at + each) * W) * decay[row];
    const float *value = v + at * W;
    for (int64_t key = 0; key < keys; ++key, value += dim) {
        vf some[VECTORS];
        for (int each = 0; each < VECTORS; ++each) some[each] = load(value + each * W);
#pragma GCC unroll 12
        for (int row = 0; row < TILE_ROWS; ++row)
            for (int each = 0; each < VECTORS; ++each) sums[row][each] += weights[row * KEY_BLOCK + key] * some[each];
    }
#pragma GCC unroll 12
    for (int row = 0; row < TILE_ROWS; ++row)
        for (int each = 0; each < VECTORS; ++each) store(out + row * dim + (at + each) * W, sums[row][each]);
}

// A vector of numbers, or of pairs of which the last may be missing.
template <bool IN_PAIRS>
INLINE vf load_some(const float *at, int64_t) { return load(at); }
template <bool IN_PAIRS>
INLINE vf load_some(const bf16 *at, int64_t pairs) {
    if (!IN_PAIRS) return load(at);
    if (pairs >= W) return (vf)(*(const vu_u *)at);
    vf some = {};
    memcpy(&some, at, sizeof(float) * pairs);
    return some;
}

template <bool IN_PAIRS, class Stored>
void transpose_keys(const Stored *k, int64_t stride, int64_t keys, int64_t depth, float *out) {
    constexpr int beside = IN_PAIRS ? 2 : 1;
    // Keys behind the last are zeros: their scores are never used.
    for (int64_t first = 0; first < keys; first += W)
        for (int64_t d = 0; d < depth; d += W) {
            vf lines[W];
#pragma GCC unroll 16
            for (int key = 0; key < W; ++key)
                lines[key] = first + key < keys
                                 ? load_some<IN_PAIRS>(k + (first + key) * stride + d * beside, depth - d)
                                 : all(0.0f);
            transpose(lines);
#pragma GCC unroll 16
            for (int column = 0; column < W; ++column)
                if (!IN_PAIRS || d + column < depth) store(out + (d + column) * KEY_BLOCK + first, lines[column]);
        }
}

// Fetch tokens [first, stop), which the processor does not foresee: those of a head lie apart.
template <class Stored>
INLINE void fetch_tokens(const Stored *from, int64_t stride, int64_t first, int64_t stop, int64_t dim) {
    for (const Stored *each = from + first * stride; first < stop; ++first, each += stride)
        for (int64_t d = 0; d < dim; d += 64 / (int64_t)sizeof(Stored)) __builtin_prefetch(each + d, 0, 2);
}

template <bool IN_PAIRS, class Stored>
void attend_block(const Attention &a, int64_t task) {
    Scratch &s = scratch;
    const int64_t group = a.heads / a.kv_heads, dim = a.dim, depth = IN_PAIRS ? dim / 2 : dim;
    const int64_t kv_head = task % a.kv_heads;
    // The last blocks of a causal call are the longest: they are taken first.
    const int64_t per_block = a.per_block, blocks = (a.tokens + per_block - 1) / per_block;
    const int64_t first_token = (blocks - 1 - task / a.kv_heads) * per_block;
    const int64_t tokens = a.tokens - first_token < per_block ? a.tokens - first_token : per_block;
    const int64_t rows = tokens * group, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t *low = a.low + first_token, *high = a.high + first_token;
    const float scale = a.scale * 1.44269504f;  // weights are powers of two
    for (int64_t row = 0; row < tiles * TILE_ROWS; ++row) {
        float *to = s.q + row / TILE_ROWS * TILE_ROWS * depth + row % TILE_ROWS;
        const Stored *from = row < rows ? (const Stored *)a.q + (first_token + row / group) * a.q_token +
                                             (kv_head * group + row % group) * a.q_head
                                       : nullptr;
        for (int64_t d = 0; d < depth; ++d) {
            if (!from) to[d * TILE_ROWS] = 0.0f;
            else if (IN_PAIRS) memcpy(to + d * TILE_ROWS, from + 2 * d, sizeof(float));
            else to[d * TILE_ROWS] = widen(from[d]);
        }
        s.highest[row] = -INFINITE;
        s.total[row] = 0.0f;
        s.decay[row] = 1.0f;
    }
    memset(s.out, 0, sizeof(float) * tiles * TILE_ROWS * dim);
    const int64_t end = high[tokens - 1];
    KeyBlocks<Stored> key_blocks = {a.runs, 0};
    int64_t keys;
    for (int64_t key = low[0]; key < end; key += keys) {
        const auto [k, v, count, k_token, v_token] = key_blocks.next(key, end, KEY_BLOCK, kv_head);
        keys = count;
        const int64_t vectors = (keys + W * TILE_VECTORS - 1) / (W * TILE_VECTORS) * TILE_VECTORS;
        transpose_keys<IN_PAIRS>(k, k_token, keys, depth, s.k);
        for (int64_t each = 0; each < keys; ++each)
            for (int64_t d = 0; d < dim; d += W) store(s.v + each * dim + d, load(v + each * v_token + d));
        // Each tile fetches a part of the next block.
        const int64_t left = key_blocks.behind(key + keys, end), following = left < KEY_BLOCK ? left : KEY_BLOCK;
        const Stored *next_k = k + keys * k_token, *next_v = v + keys * v_token;
        for (int64_t tile = 0; tile < tiles; ++tile) {
            fetch_tokens(next_k, k_token, following * tile / tiles, following * (tile + 1) / tiles, dim);
            fetch_tokens(next_v, v_token, following * tile / tiles, following * (tile + 1) / tiles, dim);
            const int64_t top = tile * TILE_ROWS;
            const int64_t last = (top + TILE_ROWS <= rows ? top + TILE_ROWS : rows) - 1;
            // Both bounds ascend: a tile whose last row sees none of these keys yet, or whose first has passed them.
            if (high[last / group] <= key || low[top / group] >= key + keys) continue;
            float *scores = s.scores + top * KEY_BLOCK;
            multiply_keys<IN_PAIRS>(s.q + top * depth, s.k, scores, depth, vectors);
            const bool all_seen = high[top / group] >= key + keys && low[last / group] <= key;
            for (int64_t row = top; row < top + TILE_ROWS; ++row) {
                float *line = s.scores + row * KEY_BLOCK;
                const int64_t token = (row < rows ? row : rows - 1) / group;
                if (!all_seen || keys % (W * TILE_VECTORS)) {
                    int64_t from = low[token] - key, to = high[token] - key;
                    if (to > keys) to = keys;
                    for (int64_t each = 0; each < vectors * W; ++each)
                        if (each < from || each >= to) line[each] = -INFINITE;
                }
                vf most = load(line);
                for (int64_t at = 1; at < vectors; ++at) most = larger(load(line + at * W), most);
                float highest = largest_of(most) * scale;
                if (!(highest > s.highest[row])) highest = s.highest[row];
                const float shift = highest == -INFINITE ? 0.0f : highest;
                s.decay[row] = highest == s.highest[row] ? 1.0f : power_of_two(all(s.highest[row] - shift))[0];
                s.highest[row] = highest;
                vf sum = {};
                for (int64_t at = 0; at < vectors; ++at) {
                    vf weight = power_of_two(load(line + at * W) * scale - shift);
                    store(line + at * W, weight);
                    sum += weight;
                }
                s.total[row] = s.total[row] * s.decay[row] + sum_of(sum);
            }
            float *out = s.out + top * dim;
            int64_t at = 0;
            for (; at + 2 <= dim / W; at += 2)
                add_values<2>(scores, s.v, out, s.decay + top, keys, dim, at);
            for (; at < dim / W; ++at) add_values<1>(scores, s.v, out, s.decay + top, keys, dim, at);
        }
    }
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t at = (first_token + row / group) * a.heads + kv_head * group + row % group;
        const float total = s.total[row], by = total == 0.0f ? 0.0f : 1.0f / total;
        for (int64_t d = 0; d < dim; d += W) a.put_out(at * dim + d, load(s.out + row * dim + d) * by);
        if (a.lse) a.lse[at] = total == 0.0f ? -INFINITE : s.highest[row] * 0.693147181f + __builtin_logf(total);
    }
}

// Tokens of a task of a short call, at most `most`: as many as let the last thread end soonest. A task takes the time
// of its rows and of its keys' transposition.
int64_t tokens_of_task(int64_t tokens, int64_t group, int64_t kv_heads, int64_t most, int threads) {
    int64_t best = most, least = INT64_MAX;
    for (int64_t blocks = (tokens + most - 1) / most; blocks <= tokens; ++blocks) {
        if ((blocks - 1) * kv_heads >= 4 * threads) break;
        const int64_t each = (tokens + blocks - 1) / blocks;
        const int64_t rows = (each * group + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS + TRANSPOSED_ROWS;
        const int64_t cost = (blocks * kv_heads + threads - 1) / threads * rows;
        if (cost < least) least = cost, best = each;
    }
    return best;
}

// Attention of single queries over the pages of their sequences.

// Head dimensions that are served, in vectors.
#if W == 16
#define DIMS(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(12) CASE(16)
#elif W == 8
#define DIMS(CASE) CASE(2) CASE(4) CASE(6) CASE(8) CASE(10) CASE(12) CASE(14) CASE(16) CASE(24) CASE(32)
#else
#define DIMS(CASE) CASE(4) CASE(8) CASE(12) CASE(16) CASE(20) CASE(24) CASE(28) CASE(32) CASE(48) CASE(64)
#endif

struct Paged {
    const float *q;          // [B, H, D]
    const void *k, *v;       // [P, G, K, D], contiguous
    const int32_t *table;    // [B, M]
    const int32_t *lengths;  // [B]
    float *out, *lse;        // [B, H, D], [B, H]
    float *parts;            // of each row and chunk: [H, D + 2]
    const int64_t *groups;   // first row of each group of rows with one table, and B
    int64_t rows, columns, page, heads, kv_heads, dim, chunks;
    float scale;
};

// Keys that are read together: neighbours in a page.
struct Tile {
    int64_t row, slot, count, next;  // `next` is the slot of the tile behind it, or -1 if that is not to be fetched
};

// Attend heads [head, head + ROWS) of a row over a tile, with VECTORS vectors a head. part[H, D + 2] has the sums of
// values, the highest score, and the sum of weights of each head so far.
template <class Stored, int ROWS, int VECTORS>
void attend_tile(const Paged &a, const Tile &tile, int64_t head, float *part) {
    const int64_t dim = VECTORS * W, stride = a.kv_heads * dim, kv_head = head / (a.heads / a.kv_heads);
    const float *q = a.q + (tile.row * a.heads + head) * dim;
    const Stored *k = (const Stored *)a.k + tile.slot * stride + kv_head * dim;
    const Stored *v = (const Stored *)a.v + tile.slot * stride + kv_head * dim;
    part += head * (dim + 2);
    vf products[ROWS][W], lanes;
    for (int lane = 0; lane < W; ++lane) lanes[lane] = (float)lane;
    for (int64_t key = 0; key < W; ++key) {
        vf sums[ROWS] = {};
        if (key < tile.count) {
#pragma GCC unroll 16
            for (int at = 0; at < VECTORS; ++at) {
                vf some = load(k + key * stride + at * W);
#pragma GCC unroll 4
                for (int each = 0; each < ROWS; ++each) sums[each] += some * load(q + each * dim + at * W);
            }
        }
        for (int each = 0; each < ROWS; ++each) products[each][key] = sums[each];
    }
    float weights[ROWS][W];
    for (int each = 0; each < ROWS; ++each) {
        float *highest = part + each * (dim + 2) + dim;
        vf scores = sums_of(products[each]) * a.scale;
        scores = select(lanes < all((float)tile.count), scores, all(-INFINITE));
        const float most = largest_of(scores);
        if (most > *highest) {
            const float decay = exponential(*highest - most);
            highest[1] *= decay;
            float *out = part + each * (dim + 2);
            for (int at = 0; at < VECTORS; ++at) store(out + at * W, load(out + at * W) * decay);
            *highest = most;
        }
        vf weight = exponential(scores - (*highest == -INFINITE ? 0.0f : *highest));
        highest[1] += sum_of(weight);
        store(weights[each], weight);
    }
    // A few vectors of the values at a time: their sums stay in registers.
    constexpr int STEP = VECTORS < 4 ? VECTORS : 4;
    for (int at = 0; at < VECTORS; at += STEP) {
        vf sums[ROWS][STEP];
#pragma GCC unroll 4
        for (int each = 0; each < ROWS; ++each)
#pragma GCC unroll 4
            for (int some = 0; some < STEP; ++some)
                sums[each][some] = at + some < VECTORS ? load(part + each * (dim + 2) + (at + some) * W) : (vf){};
        for (int64_t key = 0; key < tile.count; ++key) {
#pragma GCC unroll 4
            for (int some = 0; some < STEP; ++some) {
                if (at + some >= VECTORS) break;
                vf value = load(v + key * stride + (at + some) * W);
#pragma GCC unroll 4
                for (int each = 0; each < ROWS; ++each) sums[each][some] += weights[each][key] * value;
            }
        }
#pragma GCC unroll 4
        for (int each = 0; each < ROWS; ++each)
#pragma GCC unroll 4
            for (int some = 0; some < STEP; ++some)
                if (at + some < VECTORS) store(part + each * (dim + 2) + (at + some) * W, sums[each][some]);
    }
}

template <class Stored, int VECTORS>
void attend_heads(const Paged &a, const Tile &tile, float *part) {
    const int64_t group = a.heads / a.kv_heads, stride = a.kv_heads * VECTORS * W;
    if (tile.next >= 0)
        for (int which = 0; which < 2; ++which) {
            const void *stored = which ? a.v : a.k;
            const char *next = (const char *)((const Stored *)stored + tile.next * stride);
            const int64_t bytes = W * stride * (int64_t)sizeof(Stored);
            for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(next + at, 0, 1);
        }
    for (int64_t first = 0; first < a.heads; first += group)
        for (int64_t head = first; head < first + group;) {
            const int64_t left = first + group - head;
            if (left >= 4) attend_tile<Stored, 4, VECTORS>(a, tile, head, part);
            else if (left == 3) attend_tile<Stored, 3, VECTORS>(a, tile, head, part);
            else if (left == 2) attend_tile<Stored, 2, VECTORS>(a, tile, head, part);
            else attend_tile<Stored, 1, VECTORS>(a, tile, head, part);
            head += left < 4 ? left : 4;
        }
}

INLINE int64_t slot_of(const Paged &a, int64_t row, int64_t key) {
    return (int64_t)a.table[row * a.columns + key / a.page] * a.page + key % a.page;
}

// Rows with the same table, as drafts of one sequence have it, are attended together: each tile is read once.
template <class Stored>
void attend_paged(const Paged &a, int64_t task) {
    const int64_t group = task / a.chunks, chunk = task % a.chunks, top = a.groups[group], stop = a.groups[group + 1];
    const int64_t begin = chunk * PAGED_CHUNK, width = a.heads * (a.dim + 2);
    int64_t longest = 0;
    for (int64_t row = top; row < stop; ++row)
        if (a.lengths[row] > longest) longest = a.lengths[row];
    const int64_t end = begin + PAGED_CHUNK < longest ? begin + PAGED_CHUNK : longest;
    if (begin >= end) return;
    for (int64_t row = top; row < stop; ++row) {
        float *part = a.parts + (row * a.chunks + chunk) * width;
        memset(part, 0, sizeof(float) * width);
        for (int64_t head = 0; head < a.heads; ++head) part[head * (a.dim + 2) + a.dim] = -INFINITE;
    }
    for (int64_t first = begin; first < end;) {
        int64_t count = a.page - first % a.page;
        if (count > end - first) count = end - first;
        if (count > W) count = W;
        const int64_t next = first + count < longest ? first + count : first;
        for (int64_t row = top; row < stop; ++row) {
            const int64_t seen = a.lengths[row] - first < count ? a.lengths[row] - first : count;
            if (seen <= 0) continue;
            const Tile tile = {row, slot_of(a, top, first), seen, row == top ? slot_of(a, top, next) : -1};
            float *part = a.parts + (row * a.chunks + chunk) * width;
            switch (a.dim / W) {
#define CASE(n) case n: attend_heads<Stored, n>(a, tile, part); break;
                DIMS(CASE)
#undef CASE
            }
        }
        first += count;
    }
}

void merge_chunks(const Paged &a, int64_t row) {
    const int64_t dim = a.dim, filled = (a.lengths[row] + PAGED_CHUNK - 1) / PAGED_CHUNK, stride = dim + 2;
    for (int64_t head = 0; head < a.heads; ++head) {
        const float *part = a.parts + (row * a.chunks * a.heads + head) * stride;
        float highest = -INFINITE, total = 0.0f;
        for (int64_t chunk = 0; chunk < filled; ++chunk) {
            const float each = part[chunk * a.heads * stride + dim];
            if (each > highest) highest = each;
        }
        float *out = a.out + (row * a.heads + head) * dim;
        memset(out, 0, sizeof(float) * dim);
        const float shift = highest == -INFINITE ? 0.0f : highest;
        for (int64_t chunk = 0; chunk < filled; ++chunk) {
            const float *each = part + chunk * a.heads * stride;
            const float weight = exponential(each[dim] - shift);
            total += each[dim + 1] * weight;
            for (int64_t d = 0; d < dim; d += W) store(out + d, load(out + d) + load(each + d) * weight);
        }
        const float by = total == 0.0f ? 0.0f : 1.0f / total;
        for (int64_t d = 0; d < dim; d += W) store(out + d, load(out + d) * by);
        a.lse[row * a.heads + head] = total == 0.0f ? -INFINITE : highest + __builtin_logf(total);
    }
}

// Linear layers: x W^T + bias, or silu(x W^T) * (x second^T). Weights are packed: [N / W][C][W], so W outputs are
// summed side by side, and a weight is read once, in its order. Each sum adds its products one after the other: its bits
// do not depend on the rows beside it.
//
// Columns of bfloat16 weights lie in pairs, as tiles want them: [N / W][C / 2][W][2], with C rounded up to even.

struct Linear {
    const void *x;                // [T, C] of the result's type; fp32 where vectors multiply, unless they do in pairs
    const void *weight, *second;  // packed [N, C]; `second` may be null
    const void *bias;             // [N] of the result's type, or null
    const void *added;            // [T, N] of the result's type, or null; it may be `out`
    void *out;                    // [T, N]
    int64_t rows, in_features, out_features, panels, band;
};

#if W == 8
#define OUT_BLOCKS 2
#else
#define OUT_BLOCKS 4
#endif
#define OUT_LANES (OUT_BLOCKS * W)
// A task has GROUP_ROWS rows and OUT_LANES outputs. Weights of COLUMN_BLOCK columns stay in the first cache, and a band
// of rows, of BAND_FLOATS together, in the second.
#define GROUP_ROWS 96
#define BAND_FLOATS (1 << 17)
#define COLUMN_BLOCK 128
// Rows that are worth the widening of weights into memory.
#define LEAST_WIDENED_ROWS 25

template <class Stored>
INLINE int64_t packed_columns(int64_t columns) {
    return sizeof(Stored) == sizeof(bf16) ? (columns + 1) / 2 * 2 : columns;
}

// Weights AHEAD bytes behind those that are read are fetched meanwhile: by itself the processor fetches too few.
#define AHEAD 2048
INLINE void fetch_ahead(const void *at) { __builtin_prefetch((const char *)at + AHEAD); }

// The weights of W outputs in column `column + side` of packed weights that begin at an even column.
INLINE vf load_column(const float *at, int) { return load(at); }
INLINE vf load_column(const bf16 *at, int side) {
    const vu both = *(const vu_u *)at;
    return (vf)(side ? both & 0xffff0000 : both << 16);
}

// Add the products of a column, or of two if rows and weights are bfloat16: the second may be missing.
template <class Stored, int ROWS, int BLOCKS>
INLINE void add_columns(vf (&each)[ROWS][BLOCKS], const float *x, const Stored *weight, int64_t in_features,
                        int64_t apart, bool both) {
    constexpr int beside = sizeof(Stored) == sizeof(bf16) ? 2 : 1;
#pragma GCC unroll 2
    for (int side = 0; side < beside; ++side) {
        if (side && !both) break;
        vf some[BLOCKS];
#pragma GCC unroll 4
        for (int block = 0; block < BLOCKS; ++block) {
            if (!side) fetch_ahead(weight + block * apart * W);
            some[block] = load_column(weight + block * apart * W, side);
        }
#pragma GCC unroll 6
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
            for (int block = 0; block < BLOCKS; ++block) each[row][block] += x[row * in_features + side] * some[block];
    }
}
template <class Stored, int ROWS, int BLOCKS>
INLINE void add_columns(vf (&each)[ROWS][BLOCKS], const bf16 *x, const Stored *weight, int64_t in_features,
                        int64_t apart, bool both) {
    vf some[BLOCKS];
#pragma GCC unroll 4
    for (int block = 0; block < BLOCKS; ++block) {
        fetch_ahead(weight + block * apart * W);
        some[block] = load((const float *)(weight + block * apart * W));
    }
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row) {
        const bf16 *at = x + row * in_features;
        const vf pair = both ? all_pairs(at) : (vf)((uint32_t)*at + (vu){});
#pragma GCC unroll 4
        for (int block = 0; block < BLOCKS; ++block) each[row][block] = add_pairs(each[row][block], pair, some[block]);
    }
}

// sums[ROWS][OUT_LANES] += x[ROWS][columns] x weight[BLOCKS][columns][W]; rows of x lie `in_features` apart, and blocks
// of W outputs `apart` columns.
template <class Row, class Stored, int ROWS, int BLOCKS>
INLINE void multiply_tile(const Row *x, const Stored *weight, float *sums, int64_t in_features, int64_t apart,
                          int64_t columns) {
    constexpr int beside = sizeof(Stored) == sizeof(bf16) ? 2 : 1;
    vf each[ROWS][BLOCKS];
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int block = 0; block < BLOCKS; ++block) each[row][block] = (vf){};
    int64_t column = 0;
    for (; column + beside <= columns; column += beside)
        add_columns<Stored, ROWS, BLOCKS>(each, x + column, weight + column * W, in_features, apart, true);
    if (column < columns)
        add_columns<Stored, ROWS, BLOCKS>(each, x + column, weight + column * W, in_features, apart, false);
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int block = 0; block < BLOCKS; ++block) {
            float *to = sums + row * OUT_LANES + block * W;
            store(to, load(to) + each[row][block]);
        }
}

// The same for any number of rows.
template <class Row, class Stored, int BLOCKS>
void multiply_columns(const Row *x, const Stored *weight, float *sums, int64_t rows, int64_t in_features,
                      int64_t apart, int64_t columns) {
    int64_t row = 0;
    for (; row + 6 <= rows; row += 6)
        multiply_tile<Row, Stored, 6, BLOCKS>(x + row * in_features, weight, sums + row * OUT_LANES, in_features, apart,
                                              columns);
    x += row * in_features;
    float *to = sums + row * OUT_LANES;
    switch (rows - row) {
#define CASE(n) case n: multiply_tile<Row, Stored, n, BLOCKS>(x, weight, to, in_features, apart, columns); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
#undef CASE
    }
}

template <class Row, class Stored, int BLOCKS>
void multiply_group(const Row *x, const Stored *weight, float *sums, int64_t rows, int64_t in_features) {
    const int64_t apart = packed_columns<Stored>(in_features);
    // Weights that are read as they lie may be twice as many, if each takes half of the room.
    constexpr bool is_widened = sizeof(Stored) < sizeof(Row);
    constexpr int64_t most = COLUMN_BLOCK * (int64_t)(is_widened ? 1 : sizeof(float) / sizeof(Stored));
    memset(sums, 0, sizeof(float) * rows * OUT_LANES);
    for (int64_t column = 0; column < in_features; column += most) {
        const int64_t columns = in_features - column < most ? in_features - column : most;
        const Stored *some = weight + column * W;
        if constexpr (is_widened) {
            if (rows >= LEAST_WIDENED_ROWS) {
                float *wide = scratch.k;
                for (int block = 0; block < BLOCKS; ++block)
                    for (int64_t at = 0; at < columns; at += 2)
                        for (int side = 0; side < 2; ++side)
                            store(wide + (block * COLUMN_BLOCK + at + side) * W,
                                  load_column(some + (block * apart + at) * W, side));
                multiply_columns<Row, float, BLOCKS>(x + column, wide, sums, rows, in_features, COLUMN_BLOCK, columns);
                continue;
            }
        }
        multiply_columns<Row, Stored, BLOCKS>(x + column, some, sums, rows, in_features, apart, columns);
    }
}

// A gated product: silu(gate) * up, rounded after the same operations as in the modules. For bfloat16 silu is
// gate / (1 + 2^power), and 0 where that is smaller than any normal number.
template <bool IN_ONE, class Result>
INLINE vf gated(vf gate, vf up) {
    const Result *kind = nullptr;
    gate = rounded<IN_ONE>(gate, kind), up = rounded<IN_ONE>(up, kind);
    if (IN_ONE && sizeof(Result) == sizeof(bf16)) {
        const vf power = gate * -1.44269504f;
        const vi is_tiny = power > 126.0f;
        const vf part = inverse(power_of_two<true>(select(is_tiny, all(126.0f), power)) + 1.0f);
        return rounded<IN_ONE>(select(is_tiny, all(0.0f), gate * part), kind) * up;
    }
    // 1 / (1 + e^-x) with an exponent that is never positive.
    const vf small = exponential(select(gate < 0.0f, gate, -gate));
    return rounded<IN_ONE>(gate * (select(gate < 0.0f, small, all(1.0f)) * inverse(small + 1.0f)), kind) * up;
}

// Write rows [first, first + rows) and outputs [line, line + width) of a product: its sums, or with a second weight
// their gated product with `ups`; both [rows][width]. Where a model stores results, they are rounded: products before
// `added` is added to them. Only the first `lanes` outputs are there; if that is a constant, no loop over them remains.
template <class Result, bool IN_ONE>
INLINE void finish_some(const Linear &a, int64_t first, int64_t rows, int64_t line, int64_t width, const float *sums,
                        const float *ups, int64_t lanes) {
    for (int64_t row = 0; row < rows; ++row, sums += width, ups += width) {
        const int64_t at = (first + row) * a.out_features + line;
        Result *out = (Result *)a.out + at;
        const Result *bias = a.bias ? (const Result *)a.bias + line : nullptr;
        const Result *added = a.added ? (const Result *)a.added + at : nullptr;
        int64_t lane = 0;
        for (; lane + W <= lanes; lane += W) {
            vf value = load(sums + lane);
            if (a.second) value = gated<IN_ONE, Result>(value, load(ups + lane));
            if (bias) value += load(bias + lane);
            put_rounded<IN_ONE>(out + lane, added ? load(added + lane) + rounded<IN_ONE>(value, added) : value);
        }
        if (lane == lanes) continue;
        vf last = load(sums + lane);
        if (a.second) last = gated<IN_ONE, Result>(last, load(ups + lane));
        for (int at = 0; lane < lanes; ++lane, ++at) {
            float value = last[at];
            if (bias) value += widen(bias[lane]);
            put(out + lane, added ? widen(added[lane]) + stored(all(value), added)[0] : value);
        }
    }
}
template <class Result, bool IN_ONE>
void finish_rows(const Linear &a, int64_t first, int64_t rows, int64_t line, int64_t width, const float *sums,
                 const float *ups) {
    const int64_t left = a.out_features - line;
    finish_some<Result, IN_ONE>(a, first, rows, line, width, sums, ups, left < width ? left : width);
}

template <class Row, class Stored, class Result>
void multiply_task(const Linear &a, int64_t task) {
    // Tasks side by side read the same weights and, a band of rows at a time, rows that the cache still has.
    const int64_t above = task / (a.band * a.panels) * a.band, groups = (a.rows + GROUP_ROWS - 1) / GROUP_ROWS - above;
    const int64_t height = groups < a.band ? groups : a.band, within = task - above * a.panels;
    const int64_t line = within / height * OUT_LANES, first = (above + within % height) * GROUP_ROWS;
    const int64_t left = a.out_features - line, lanes = left < OUT_LANES ? left : OUT_LANES;
    const int64_t at = line * packed_columns<Stored>(a.in_features);
    float *sums = scratch.scores, *ups = sums + GROUP_ROWS * OUT_LANES;
    const int64_t rows = a.rows - first < GROUP_ROWS ? a.rows - first : GROUP_ROWS;
    const Row *x = (const Row *)a.x + first * a.in_features;
    for (int part = 0; part < (a.second ? 2 : 1); ++part) {
        float *to = part ? ups : sums;
        const Stored *from = (const Stored *)(part ? a.second : a.weight) + at;
        switch ((lanes + W - 1) / W) {
            case 1: multiply_group<Row, Stored, 1>(x, from, to, rows, a.in_features); break;
            case 2: multiply_group<Row, Stored, 2>(x, from, to, rows, a.in_features); break;
#if OUT_BLOCKS == 4
            case 3: multiply_group<Row, Stored, 3>(x, from, to, rows, a.in_features); break;
            case 4: multiply_group<Row, Stored, 4>(x, from, to, rows, a.in_features); break;
#endif
        }
    }
    finish_rows<Result, sizeof(Row) == sizeof(bf16)>(a, first, rows, line, OUT_LANES, sums, ups);
}

struct Packing {
    const void *weight;  // [out_features, in_features]
    void *packed;
    int64_t out_features, in_features;
};

// W lines of a weight.
template <class Stored>
void pack_task(const Packing &a, int64_t task) {
    constexpr int64_t beside = sizeof(Stored) == sizeof(bf16) ? 2 : 1;
    const int64_t apart = packed_columns<Stored>(a.in_features), line = task * W;
    const Stored *const weight = (const Stored *)a.weight;
    Stored *const to = (Stored *)a.packed + line * apart;
    const int64_t lanes = a.out_features - line < W ? a.out_features - line : W;
    for (int64_t first = 0; first < apart; first += W) {
        // A few columns of all lines at a time: each cache line is read once.
        const int64_t stop = first + W < apart ? first + W : apart;
        for (int64_t lane = 0; lane < W; ++lane)
            for (int64_t column = first; column < stop; ++column)
                to[(column / beside * W + lane) * beside + column % beside] =
                    lane < lanes && column < a.in_features ? weight[(line + lane) * a.in_features + column] : Stored{};
    }
}

bool uses_tiles = false, uses_pairs = false;
// Fewer rows are not worth the splitting of fp32 weights, the splitting of fp32 rows, or tiles that are not full.
#define LEAST_SPLIT_ROWS 128
#define LEAST_TILE_ROWS 32
#define LEAST_NARROW_ROWS 8

#if defined(__AMX_BF16__)

// Products of many rows by tiles (AMX), as exact as those of vectors.
//
// The processor multiplies tiles of bfloat16 sixteen times as fast as vectors of fp32. An fp32 number is the sum of
// three bfloat16 numbers of 8 bits each, so a product of two is the sum of six products of such parts; what is left out
// is smaller than the rounding of an fp32 sum. A block of numbers that are bfloat16, as the weights of most models are,
// is narrow: its first parts are the whole.
//
// A block is 32 rows of 32 numbers: two tiles of 16 rows for each part. A row of a tile has pairs of numbers. Those of
// linear layers, and of bfloat16 queries and keys, are neighbours; others are from columns 0 to 15 and 16 to 31.

#define BLOCK 32
#define PARTS 3
#define TILE_NUMBERS (16 * BLOCK)
#define PART_NUMBERS (2 * TILE_NUMBERS)
#define BLOCK_NUMBERS (PARTS * PART_NUMBERS)
// A task of a linear layer takes the weights of some outputs, which then stay in the second cache, and 32 rows at a
// time: blocks of columns, parts of weights' blocks, and blocks of rows and of sums at most. fp32 weights are split;
// those of bfloat16 are read where they lie.
#define SPLIT_DEPTH 24
#define NARROW_DEPTH 48
#define SPLIT_PARTS 648
#define SPLIT_ROWS 32
#define SPLIT_SUMS 144

struct alignas(64) LinearScratch {
    bf16 weights[SPLIT_PARTS * PART_NUMBERS];  // [outputs / 32][columns / 32]
    bf16 rows[NARROW_DEPTH * BLOCK_NUMBERS];   // [columns / 32]
    float sums[SPLIT_SUMS][BLOCK * BLOCK], some[BLOCK * BLOCK];
};
thread_local LinearScratch linear_scratch;

// Tests on other processors bring their own.
#if !defined(LOAD_TILE)
#define LOAD_TILE(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(stride)) : "memory")
#define STORE_TILE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(stride)) : "memory")
#define CLEAR_TILE(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define MULTIPLY_TILES(sum, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)
#define CONFIGURE_TILES(shapes) __asm__ volatile("ldtilecfg %0" ::"m"(shapes))
#define RELEASE_TILES() __asm__ volatile("tilerelease" ::)
#endif

INLINE void configure_tiles() {
    static const struct alignas(64) {
        uint8_t palette, start, none[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } eight = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    CONFIGURE_TILES(eight);
}
// The system saves tiles whenever it stops a thread that has some.
INLINE void release_tiles() { RELEASE_TILES(); }

// Sums of a product of two blocks are four tiles: rows 0 to 15 of the first block by rows 0 to 15 and 16 to 31 of the
// second, then rows 16 to 31. In memory the second of each two is `right` numbers behind the first, the second two
// `down`; a tile's rows are `stride` numbers apart.
INLINE void clear_sums() { CLEAR_TILE(0); CLEAR_TILE(1); CLEAR_TILE(2); CLEAR_TILE(3); }
INLINE void load_sums(const float *from, int64_t right, int64_t down, int64_t stride) {
    LOAD_TILE(0, from, 4 * stride);
    LOAD_TILE(1, from + right, 4 * stride);
    LOAD_TILE(2, from + down, 4 * stride);
    LOAD_TILE(3, from + down + right, 4 * stride);
}
INLINE void store_sums(float *to, int64_t right, int64_t down, int64_t stride) {
    STORE_TILE(0, to, 4 * stride);
    STORE_TILE(1, to + right, 4 * stride);
    STORE_TILE(2, to + down, 4 * stride);
    STORE_TILE(3, to + down + right, 4 * stride);
}

// Numbers of bfloat16 from a block's first tile to its second, and from a tile's line to the next.
struct Strides {
    int64_t tile = TILE_NUMBERS, line = BLOCK;
};

// Add the product of two blocks to the sums: of parts whose numbers add up to 2 or less. A block has 1 to 3 parts. Each
// tile is multiplied as soon as it is there, the first block's second one last: four loads first take a tenth longer.
INLINE void multiply_blocks(const bf16 *a, const bf16 *b, int a_parts, int b_parts, Strides of_a = {},
                            Strides of_b = {}) {
#define LOAD_A(to, part, half) LOAD_TILE(to, a + part * PART_NUMBERS + half * of_a.tile, 2 * of_a.line)
#define LOAD_B(to, part, half) LOAD_TILE(to, b + part * PART_NUMBERS + half * of_b.tile, 2 * of_b.line)
#define MULTIPLY_BOTH(b_part)                                          \
    LOAD_A(4, 0, 0); LOAD_B(6, b_part, 0); MULTIPLY_TILES(0, 4, 6);    \
    LOAD_B(7, b_part, 1); MULTIPLY_TILES(1, 4, 7);                     \
    LOAD_A(5, 0, 1); MULTIPLY_TILES(2, 5, 6); MULTIPLY_TILES(3, 5, 7)
#define MULTIPLY_B(part)                                                            \
    LOAD_B(6, part, 0); MULTIPLY_TILES(0, 4, 6); MULTIPLY_TILES(2, 5, 6);           \
    LOAD_B(7, part, 1); MULTIPLY_TILES(1, 4, 7); MULTIPLY_TILES(3, 5, 7)
#define MULTIPLY_A(part)                                                            \
    LOAD_A(4, part, 0); MULTIPLY_TILES(0, 4, 6); MULTIPLY_TILES(1, 4, 7);           \
    LOAD_A(5, part, 1); MULTIPLY_TILES(2, 5, 6); MULTIPLY_TILES(3, 5, 7)
    if (b_parts > 2) {
        MULTIPLY_BOTH(2);
        MULTIPLY_B(1);
        MULTIPLY_B(0);
    } else if (b_parts > 1) {
        MULTIPLY_BOTH(1);
        MULTIPLY_B(0);
    } else {
        MULTIPLY_BOTH(0);
    }
    if (a_parts == 1) return;
    MULTIPLY_A(2);
    MULTIPLY_A(1);
    if (b_parts == 1) return;
    MULTIPLY_B(1);
#undef LOAD_A
#undef LOAD_B
#undef MULTIPLY_BOTH
#undef MULTIPLY_B
#undef MULTIPLY_A
}

// Split off the first 8 bits of a number, rounded. What is not finite leaves a rest that is a NaN.
INLINE vf split(vf &rest) {
    const vf part = (vf)(((vu)rest + 0x8000) & 0xffff0000);
    rest -= part;
    return part;
}
INLINE vf paired(vf first, vf second) { return (vf)(((vu)first >> 16) | ((vu)second & 0xffff0000)); }
// The same 16 + 16 numbers, in their order.
INLINE vf in_order(vf first, vf second) {
    alignas(64) static const uint16_t upper[2 * W] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                      33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    return (vf)_mm512_permutex2var_epi16((__m512i)first, _mm512_load_si512(upper), (__m512i)second);
}

// How the numbers of a half of a block lie in its lines: pairs of numbers `second` apart, or of neighbours; and, of
// pairs, whether a line has those of one column.
enum Order { PAIRED, TRANSPOSED, IN_ORDER, IN_ORDER_TRANSPOSED };

// Write a half of a block whose lines are `stride` apart. Returns bits of what is left behind the first part; with
// FIRST_ONLY only that is written.
template <Order ORDER, bool FIRST_ONLY, class Stored>
INLINE vu split_half(bf16 *half, const Stored *from, int64_t stride, int64_t second) {
    constexpr bool is_narrow = sizeof(Stored) == sizeof(bf16);
    constexpr bool is_in_order = ORDER == IN_ORDER || ORDER == IN_ORDER_TRANSPOSED;
    constexpr int num_parts = FIRST_ONLY || is_narrow ? 1 : PARTS;
    vu left = {};
    vf parts[PARTS][16];
#pragma GCC unroll 16
    for (int line = 0; line < 16; ++line) {
        const Stored *one_at = from + line * stride, *other_at = one_at + second;
        if constexpr (is_narrow && is_in_order) {
            parts[0][line] = (vf)(*(const vu_u *)one_at);
        } else if constexpr (is_narrow) {
            parts[0][line] = (vf)(spread(*(const vh_u *)one_at) | spread(*(const vh_u *)other_at) << 16);
        } else {
            vf one = load(one_at), other = load(other_at);
            for (int part = 0; part < num_parts; ++part) {
                const bool is_rest = part == PARTS - 1;
                const vf top = is_rest ? one : split(one), beside = is_rest ? other : split(other);
                parts[part][line] = is_in_order ? in_order(top, beside) : paired(top, beside);
                if (!part) left |= (vu)one | (vu)other;
            }
        }
    }
    for (int part = 0; part < num_parts; ++part) {
        if (ORDER == TRANSPOSED || ORDER == IN_ORDER_TRANSPOSED) transpose(parts[part]);
#pragma GCC unroll 16
        for (int line = 0; line < 16; ++line)
            store((float *)(half + part * PART_NUMBERS) + line * W, parts[part][line]);
    }
    return left;
}

// Split a block whose halves of 16 rows begin at `upper` and `lower`. Returns whether it is narrow; if that is likely,
// the other parts are left out at first.
template <Order ORDER, class Stored>
INLINE bool split_block(bf16 *block, const Stored *upper, const Stored *lower, int64_t stride, int64_t second,
                        bool likely) {
    for (;;) {
        vu left;
        if (likely || sizeof(Stored) == sizeof(bf16)) {
            left = split_half<ORDER, true>(block, upper, stride, second);
            left |= split_half<ORDER, true>(block + TILE_NUMBERS, lower, stride, second);
        } else {
            left = split_half<ORDER, false>(block, upper, stride, second);
            left |= split_half<ORDER, false>(block + TILE_NUMBERS, lower, stride, second);
        }
        // A zero may have a sign.
        const bool is_narrow = !_mm512_test_epi32_mask((__m512i)left, _mm512_set1_epi32(0x7fffffff));
        if (is_narrow || !likely) return is_narrow;
        likely = false;
    }
}

struct TiledLinear {
    Linear linear;
    const bf16 *last;             // the last rows if they are no whole block, with rows of zeros behind them; or none
    int64_t rows, panels, depth;  // of a task, in blocks: rows, outputs, and columns at a time
};

// Return up to 32 rows of 32 numbers, `stride` apart, which becomes BLOCK if they are copied: missing ones are zeros.
template <class Stored>
INLINE const Stored *whole_block(const Stored *from, int64_t &stride, int64_t rows, int64_t width, float *memory) {
    if (rows >= BLOCK && width >= BLOCK) return from;
    Stored *some = (Stored *)memory;
    memset(some, 0, sizeof(Stored) * BLOCK * BLOCK);
    for (int64_t row = 0; row < rows && row < BLOCK; ++row)
        memcpy(some + row * BLOCK, from + row * stride, sizeof(Stored) * (width < BLOCK ? width : BLOCK));
    stride = BLOCK;
    return some;
}

// Split columns [0, columns) of up to 32 rows; what is missing in the last blocks are zeros.
template <class Stored>
void split_rows(const Stored *x, int64_t rows, int64_t columns, int64_t stride, bf16 *blocks, float *memory) {
    constexpr bool is_narrow = sizeof(Stored) == sizeof(bf16);
    for (int64_t column = 0; column < columns; column += BLOCK, blocks += is_narrow ? PART_NUMBERS : BLOCK_NUMBERS) {
        int64_t apart = stride;
        const Stored *from = whole_block(x + column, apart, rows, columns - column, memory);
        split_half<IN_ORDER, false>(blocks, from, apart, 16);
        split_half<IN_ORDER, false>(blocks + TILE_NUMBERS, from + 16 * apart, apart, 16);
    }
}

// Split columns [0, columns) of the packed weights of 16 outputs, and of 16 others unless there are none. Those of
// bfloat16 are copied.
template <class Stored>
void split_panel(const Stored *weight, const Stored *others, int64_t columns, bf16 *blocks) {
    constexpr bool is_narrow = sizeof(Stored) == sizeof(bf16);
    Stored some[BLOCK * W];
    for (int64_t column = 0; column < columns; column += BLOCK, blocks += is_narrow ? PART_NUMBERS : BLOCK_NUMBERS)
        for (int half = 0; half < 2; ++half) {
            const Stored *from = half ? others : weight;
            const int64_t left = columns - column < BLOCK ? columns - column : BLOCK;
            if (from && left == BLOCK && !is_narrow) {
                split_half<PAIRED, false>(blocks + half * TILE_NUMBERS, from + column * W, 2 * W, W);
                continue;
            }
            memset(some, 0, sizeof(some));
            if (from) memcpy(some, from + column * W, sizeof(Stored) * W * packed_columns<Stored>(left));
            if (is_narrow) memcpy(blocks + half * TILE_NUMBERS, some, sizeof(some));
            else split_half<PAIRED, false>(blocks + half * TILE_NUMBERS, some, 2 * W, W);
        }
}

template <class Row, class Stored>
void multiply_by_tiles(const TiledLinear &a, int64_t task) {
    LinearScratch &s = linear_scratch;
    // A copy, whose members stay in registers: the compiler expects tiles' instructions to write any other memory.
    const Linear l = a.linear;
    constexpr bool is_narrow = sizeof(Stored) == sizeof(bf16);
    constexpr int parts = is_narrow ? 1 : PARTS, x_parts = sizeof(Row) == sizeof(bf16) ? 1 : PARTS;
    const int64_t count = l.second ? 2 : 1, apart = packed_columns<Stored>(l.in_features);
    const int64_t above = (l.rows + BLOCK * a.rows - 1) / (BLOCK * a.rows);
    const int64_t first = task % above * a.rows * BLOCK, line = task / above * a.panels * BLOCK;
    const int64_t stop = first + a.rows * BLOCK < l.rows ? first + a.rows * BLOCK : l.rows;
    const int64_t right = (l.out_features - line + BLOCK - 1) / BLOCK, panels = right < a.panels ? right : a.panels;
    const bool at_once = a.depth * BLOCK >= l.in_features;
    configure_tiles();
    for (int64_t column = 0; column < l.in_features; column += a.depth * BLOCK) {
        const int64_t behind = l.in_features - column, columns = behind < a.depth * BLOCK ? behind : a.depth * BLOCK;
        const int64_t depth = (columns + BLOCK - 1) / BLOCK;
        const auto packed = [&](int64_t panel, int64_t which) {
            return (const Stored *)(which ? l.second : l.weight) + (line + panel * BLOCK) * apart + column * W;
        };
        // Whole tiles of bfloat16 weights need no other order.
        const auto is_whole = [&](int64_t panel) {
            return is_narrow && depth * BLOCK == columns && line + (panel + 1) * BLOCK <= l.out_features;
        };
        for (int64_t panel = 0; panel < panels; ++panel)
            for (int64_t which = 0; which < count && !is_whole(panel); ++which) {
                const Stored *from = packed(panel, which);
                const Stored *others = line + panel * BLOCK + W < l.out_features ? from + W * apart : nullptr;
                split_panel(from, others, columns, s.weights + (panel * count + which) * depth * parts * PART_NUMBERS);
            }
        // Vectors finish the rows of the sums before, `done` of `height`, beside the products of two blocks: the
        // processor runs both at once if they are one stream of instructions, without a call.
        struct {
            int64_t row, height, line, done;
            float *sums;
        } last = {};
        const int64_t at_a_time = (BLOCK + depth * count - 1) / (depth * count);
        const auto finish = [&](int64_t rows) __attribute__((always_inline)) {
            for (; rows && last.done < last.height; --rows, ++last.done) {
                const float *const sums = last.sums + last.done * BLOCK, *const ups = sums + BLOCK * BLOCK;
                const int64_t row = last.row + last.done;
                if (last.line + BLOCK <= l.out_features)
                    finish_some<Row, true>(l, row, 1, last.line, BLOCK, sums, ups, BLOCK);
                else
                    finish_rows<Row, true>(a.linear, row, 1, last.line, BLOCK, sums, ups);
            }
        };
        for (int64_t row = first; row < stop; row += BLOCK) {
            const int64_t height = stop - row < BLOCK ? stop - row : BLOCK;
            // Whole blocks of bfloat16 rows are multiplied where they lie.
            const bool is_last = height < BLOCK && a.last;
            const bool in_place = x_parts == 1 && (height == BLOCK || is_last) && depth * BLOCK == columns;
            const Row *x = is_last ? (const Row *)a.last + column : (const Row *)l.x + row * l.in_features + column;
            if (!in_place) split_rows(x, height, columns, l.in_features, s.rows, s.some);
            const bf16 *x_blocks = in_place ? (const bf16 *)x : s.rows;
            const int64_t x_size = in_place ? BLOCK : x_parts * PART_NUMBERS;
            const Strides of_x = in_place ? Strides{16 * l.in_features, l.in_features} : Strides{};
            for (int64_t panel = 0; panel < panels; ++panel) {
                const int64_t number = (row - first) / BLOCK * panels + panel, at = at_once ? number % 2 : number;
                float(*sums)[BLOCK * BLOCK] = s.sums + at * count;
                for (int64_t which = 0; which < count; ++which) {
                    const bf16 *weights = s.weights + (panel * count + which) * depth * parts * PART_NUMBERS;
                    int64_t size = parts * PART_NUMBERS, beside = TILE_NUMBERS;
                    if (is_whole(panel)) {
                        weights = (const bf16 *)packed(panel, which);
                        size = TILE_NUMBERS, beside = W * apart;
                    }
                    clear_sums();
                    for (int64_t block = 0; block < depth; ++block) {
                        multiply_blocks(x_blocks + block * x_size, weights + block * size, x_parts, parts, of_x,
                                        {beside});
                        finish(at_a_time);
                    }
                    if (!column) {
                        store_sums(sums[which], W, 16 * BLOCK, BLOCK);
                        continue;
                    }
                    store_sums(s.some, W, 16 * BLOCK, BLOCK);
                    for (int64_t each = 0; each < BLOCK * BLOCK; each += W)
                        store(sums[which] + each, load(sums[which] + each) + load(s.some + each));
                }
                if (behind == columns) last = {row, height, line + panel * BLOCK, 0, sums[0]};
            }
        }
        finish(BLOCK);
    }
    release_tiles();
}

// The size of equal parts of `all`, each at most `most`.
INLINE int64_t equal_share(int64_t all, int64_t most) {
    const int64_t times = (all + most - 1) / most;
    return (all + times - 1) / times;
}

// Products of a few rows of bfloat16 numbers by vectors, with the bits that tiles give them: of each 32 columns, the
// even ones have a sum and the odd ones another, and subnormal numbers are zeros. So a row has the same bits whatever
// is beside it, though tiles take over from some rows on.

// sums[ROWS][OUT_LANES] += x[ROWS][2 pairs] x weight[BLOCKS][2 pairs][W]; rows of x lie `x_apart` apart.
template <int ROWS, int BLOCKS>
INLINE void add_in_tile_order(const float *x, const bf16 *weight, float *sums, int64_t x_apart, int64_t apart,
                              int64_t pairs) {
    vf even[ROWS][BLOCKS] = {}, odd[ROWS][BLOCKS] = {};
    for (int64_t column = 0; column < 2 * pairs; column += 2)
#pragma GCC unroll 4
        for (int block = 0; block < BLOCKS; ++block) {
            const bf16 *from = weight + (block * apart + column) * W;
            fetch_ahead(from);
            const vf first = load_column(from, 0), second = load_column(from, 1);
#pragma GCC unroll 6
            for (int row = 0; row < ROWS; ++row) {
                even[row][block] += x[row * x_apart + column] * first;
                odd[row][block] += x[row * x_apart + column + 1] * second;
            }
        }
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int block = 0; block < BLOCKS; ++block) {
            float *to = sums + row * OUT_LANES + block * W;
            store(to, load(to) + (even[row][block] + odd[row][block]));
        }
}

// Three rows or fewer take four blocks of outputs at a time, more take two: as many sums as the registers hold.
template <int ROWS>
INLINE void add_rows_in_tile_order(const float *x, const bf16 *weight, float *sums, int64_t x_apart, int64_t apart,
                                   int64_t pairs, int64_t blocks) {
    constexpr int BLOCKS = ROWS <= 3 ? 4 : 2;
    int64_t block = 0;
    for (; block + BLOCKS <= blocks; block += BLOCKS)
        add_in_tile_order<ROWS, BLOCKS>(x, weight + block * apart * W, sums + block * W, x_apart, apart, pairs);
    for (; block < blocks; ++block)
        add_in_tile_order<ROWS, 1>(x, weight + block * apart * W, sums + block * W, x_apart, apart, pairs);
}

// Rows of x are fp32, of packed_columns() numbers each, and fewer than LEAST_NARROW_ROWS.
void multiply_in_tile_order(const Linear &a, int64_t task) {
    const int64_t apart = packed_columns<bf16>(a.in_features), line = task * OUT_LANES;
    const int64_t left = a.out_features - line, lanes = left < OUT_LANES ? left : OUT_LANES;
    const int64_t blocks = (lanes + W - 1) / W, size = LEAST_NARROW_ROWS * OUT_LANES;
    const int64_t depth = BLOCK * equal_share((a.in_features + BLOCK - 1) / BLOCK, PARTS * NARROW_DEPTH);
    float *const sums = scratch.scores, *const some = sums + 2 * size;
    memset(sums, 0, sizeof(float) * 2 * size);
    // Subnormal operands and results are zeros; the compiler keeps what reads and writes memory in between.
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    __asm__ volatile("" ::: "memory");
    for (int which = 0; which < (a.second ? 2 : 1); ++which)
        for (int64_t column = 0; column < apart; column += depth) {
            const int64_t stop = column + depth < apart ? column + depth : apart;
            float *const to = column ? some : sums + which * size;
            if (column) memset(some, 0, sizeof(float) * size);
            for (int64_t at = column; at < stop; at += BLOCK) {
                const bf16 *weight = (const bf16 *)(which ? a.second : a.weight) + line * apart + at * W;
                const int64_t pairs = (stop - at < BLOCK ? stop - at : BLOCK) / 2;
                const float *x = (const float *)a.x + at;
                int64_t row = 0;
                for (; row + 6 <= a.rows; row += 6)
                    add_rows_in_tile_order<6>(x + row * apart, weight, to + row * OUT_LANES, apart, apart, pairs,
                                              blocks);
                x += row * apart;
                float *const rest = to + row * OUT_LANES;
                switch (a.rows - row) {
#define CASE(n) case n: add_rows_in_tile_order<n>(x, weight, rest, apart, apart, pairs, blocks); break;
                    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
#undef CASE
                }
            }
            for (int64_t at = 0; column && at < size; at += W)
                store(sums + which * size + at, load(sums + which * size + at) + load(some + at));
        }
    __asm__ volatile("" ::: "memory");
    _mm_setcsr(before);
    finish_rows<bf16, true>(a, 0, a.rows, line, OUT_LANES, sums, sums + size);
}

// Divide a product into tasks, of which each thread gets some: if nothing is split, more, so that a thread does not wait
// long for one that another process has stopped. Larger ones split rows and weights less often.
int64_t divide(TiledLinear &a, bool is_narrow, bool x_is_narrow, int threads) {
    const int64_t rows = (a.linear.rows + BLOCK - 1) / BLOCK, panels = (a.linear.out_features + BLOCK - 1) / BLOCK;
    const int64_t columns = (a.linear.in_features + BLOCK - 1) / BLOCK, count = a.linear.second ? 2 : 1;
    const int64_t deepest = is_narrow ? x_is_narrow ? PARTS * NARROW_DEPTH : NARROW_DEPTH : SPLIT_DEPTH;
    const int64_t times = (columns + deepest - 1) / deepest;
    a.depth = equal_share(columns, deepest);
    int64_t wide = SPLIT_PARTS / (is_narrow ? 1 : PARTS) / a.depth / count, most = SPLIT_ROWS;
    if (times > 1) {
        if (wide * 4 * count > SPLIT_SUMS) wide = SPLIT_SUMS / 4 / count;
        if (most > SPLIT_SUMS / (wide * count)) most = SPLIT_SUMS / (wide * count);
    }
    const int64_t least = (is_narrow && x_is_narrow ? 8 : 2) * threads;
    for (;;) {
        const int64_t above = (rows + most - 1) / most, beside = (panels + wide - 1) / wide;
        a.rows = (rows + above - 1) / above, a.panels = (panels + beside - 1) / beside;
        if (above * beside >= least || (most == 1 && wide == 1))
            return ((rows + a.rows - 1) / a.rows) * ((panels + a.panels - 1) / a.panels);
        if (most > 4 || wide == 1) most = (most + 1) / 2;
        else wide = (wide + 1) / 2;
    }
}

// Attention of many queries by tiles. Scores are computed transposed, keys by rows, so that 16 rows have one lane each
// in all that follows, and neither keys nor weights need another order for their products.
//
// If queries, keys and values are bfloat16, each has one part, and weights have two: they are rounded to 16 bits, and
// what comes of it to 8.

// Rows of queries of a task, at most; D of more than 128 halves them. Keys at a time, at most, as far as D leaves room:
// the processor is slow whenever it turns from tiles to vectors and back.
#define TILED_QUERIES 384
#define TILED_KEYS 512

struct alignas(64) AttentionScratch {
    bf16 q[QUERY_BLOCK / BLOCK * MAX_DIM / BLOCK * BLOCK_NUMBERS];  // [rows / 32][D / 32]
    bf16 k[KEY_BLOCK / BLOCK * MAX_DIM / BLOCK * BLOCK_NUMBERS];    // [keys / 32][D / 32]
    bf16 v[KEY_BLOCK / BLOCK * MAX_DIM / BLOCK * BLOCK_NUMBERS];    // [D / 32][keys / 32], of [D][keys]
    bf16 weights[TILED_KEYS / BLOCK * BLOCK_NUMBERS];               // [keys / 32]
    float scores[2][TILED_KEYS * W];                                // of 16 rows: [keys][16]
    float out[QUERY_BLOCK * MAX_DIM];                               // of 16 rows: [D][16]
    float highest[TILED_QUERIES], total[TILED_QUERIES];
    float some[BLOCK * BLOCK];
};
thread_local AttentionScratch attention_scratch;

// Split a block of up to 32 tokens of k or v; missing tokens and dimensions are zeros. Returns whether it is narrow.
template <bool IS_V, class Stored>
INLINE bool split_tokens(bf16 *block, const Stored *from, int64_t stride, int64_t tokens, int64_t width, float *memory,
                         bool likely) {
    from = whole_block(from, stride, tokens, width, memory);
    constexpr Order order = sizeof(Stored) == sizeof(bf16) ? IN_ORDER : PAIRED;
    if (IS_V) return split_block<TRANSPOSED>(block, from, from + 16, stride, 16 * stride, likely);
    return split_block<order>(block, from, from + 16 * stride, stride, 16, likely);
}

// Raise `most` to the largest scores of each of 16 rows among the keys [first, last), in two vectors.
INLINE void raise(vf (&most)[2], const float *scores, int64_t first, int64_t last) {
    for (int64_t key = first; key < last; key += 4)
        for (int side = 0; side < 2; ++side) {
            const float *const two = scores + (key + 2 * side) * W;
            most[side] = larger(load(two), larger(load(two + W), most[side]));
        }
}

// Turn the scores of 16 rows into weights of some parts, by powers of two: `scale` includes the logarithm. Each row sees
// keys [from, to), and all rows the first `common` ones. `most` are the rows' largest scores if these are `known`,
// `highest` the largest so far, scaled. The weights go to halves of blocks, which are `apart` numbers apart.
template <int SOME_PARTS>
INLINE void weigh(float *scores, int64_t keys, float scale, int64_t common, vi from, vi to, bool known, vf (&most)[2],
                  float *highest, float *total, float *out, int64_t dim, bf16 *halves, int64_t apart) {
    vf sum = {}, other = {};
    if (!known) {
        most[0] = most[1] = all(-INFINITE);
        for (int64_t key = common; key < keys; ++key) {
            const vi at = (int32_t)key - (vi){};
            store(scores + key * W, select((at >= from) & (at < to), load(scores + key * W), most[0]));
        }
        raise(most, scores, 0, keys);
    }
    const vf before = load(highest), now = larger(larger(most[0], most[1]) * scale, before);
    const vf shift = select(now == -INFINITE, all(0.0f), now);
    for (int64_t key = 0; key < keys; key += BLOCK, halves += apart)
        for (int64_t line = 0; line < 16; ++line) {
            vf weight = power_of_two<(SOME_PARTS < PARTS)>(load(scores + (key + line) * W) * scale - shift);
            vf next = power_of_two<(SOME_PARTS < PARTS)>(load(scores + (key + line + 16) * W) * scale - shift);
            sum += weight;
            other += next;
            float *to = (float *)halves + line * W;
            for (int part = 0; part < SOME_PARTS; ++part) {
                const bool is_rest = part == PARTS - 1;
                const vf top = is_rest ? weight : split(weight), beside = is_rest ? next : split(next);
                store(to + part * PART_NUMBERS / 2, paired(top, beside));
            }
        }
    const vf decay = select(now == before, all(1.0f), power_of_two(before - shift));
    store(highest, now);
    if (!_mm512_cmp_ps_mask((__m512)now, (__m512)before, _CMP_NEQ_UQ)) {
        store(total, load(total) + (sum + other));
        return;
    }
    store(total, load(total) * decay + (sum + other));
    for (int64_t d = 0; d < dim; ++d) store(out + d * W, load(out + d * W) * decay);
}

template <class Stored>
void attend_by_tiles(const Attention &a, int64_t task) {
    AttentionScratch &s = attention_scratch;
    constexpr bool is_narrow = sizeof(Stored) == sizeof(bf16);
    constexpr int weight_parts = is_narrow ? 2 : PARTS;
    constexpr Order order = is_narrow ? IN_ORDER_TRANSPOSED : TRANSPOSED;
    constexpr int64_t size = is_narrow ? PART_NUMBERS : BLOCK_NUMBERS, apart = weight_parts * PART_NUMBERS;
    const int64_t group = a.heads / a.kv_heads, depth = (a.dim + BLOCK - 1) / BLOCK, dim = depth * BLOCK;
    const int64_t kv_head = task % a.kv_heads;
    const int64_t per_block = a.per_block, blocks = (a.tokens + per_block - 1) / per_block;
    const int64_t first_token = (blocks - 1 - task / a.kv_heads) * per_block;
    const int64_t left = a.tokens - first_token, tokens = left < per_block ? left : per_block, rows = tokens * group;
    const int64_t *low = a.low + first_token, *high = a.high + first_token;
    bool q_is_narrow = true;
    configure_tiles();
    for (int64_t row = 0; row < rows; row += BLOCK)
        for (int64_t d = 0; d < dim; d += BLOCK) {
            Stored *some = (Stored *)s.some;
            memset(some, 0, sizeof(Stored) * BLOCK * BLOCK);
            for (int64_t each = 0; each < BLOCK && row + each < rows; ++each)
                memcpy(some + each * BLOCK,
                       (const Stored *)a.q + (first_token + (row + each) / group) * a.q_token +
                           (kv_head * group + (row + each) % group) * a.q_head + d,
                       sizeof(Stored) * (a.dim - d < BLOCK ? a.dim - d : BLOCK));
            bf16 *block = s.q + (row / BLOCK * depth + d / BLOCK) * size;
            q_is_narrow &= split_block<order>(block, some, some + 16 * BLOCK, BLOCK, 16, q_is_narrow);
        }
    for (int64_t row = 0; row < TILED_QUERIES; ++row) s.highest[row] = -INFINITE, s.total[row] = 0.0f;
    memset(s.out, 0, sizeof(float) * (rows + BLOCK - 1) / BLOCK * BLOCK * dim);
    const int64_t room = sizeof(s.k) / sizeof(bf16) / (depth * size) * BLOCK, most = room < TILED_KEYS ? room : TILED_KEYS;
    KeyBlocks<Stored> key_blocks = {a.runs, 0};
    int64_t keys;
    for (int64_t key = low[0]; key < high[tokens - 1]; key += keys) {
        const auto [k, v, count, k_token, v_token] = key_blocks.next(key, high[tokens - 1], most, kv_head);
        keys = count;
        const int64_t parts = (keys + BLOCK - 1) / BLOCK;
        bool k_is_narrow = true, v_is_narrow = true;
        for (int64_t part = 0; part < parts; ++part)
            for (int64_t d = 0; d < depth; ++d) {
                const int64_t first = part * BLOCK, at = d * BLOCK;
                k_is_narrow &= split_tokens<false>(s.k + (part * depth + d) * size, k + first * k_token + at, k_token,
                                                   keys - first, a.dim - at, s.some, k_is_narrow);
                v_is_narrow &= split_tokens<true>(s.v + (d * parts + part) * size, v + first * v_token + at, v_token,
                                                  keys - first, a.dim - at, s.some, v_is_narrow);
            }
        for (int64_t top = 0; top < rows; top += BLOCK) {
            const int64_t last = (top + BLOCK < rows ? top + BLOCK : rows) - 1;
            // Both bounds ascend: rows of which the last sees none of these keys yet, or the first has passed them.
            if (high[last / group] <= key || low[top / group] >= key + keys) continue;
            const int64_t end = high[last / group] - key < keys ? high[last / group] - key : keys;
            const int64_t seen = (end + BLOCK - 1) / BLOCK;
            const bool is_whole = seen * BLOCK <= keys;
            const bool sees_all = is_whole && high[top / group] >= key + seen * BLOCK && low[last / group] <= key;
            // Vectors look for the largest scores of the part before, which the first cache still has, if all rows see
            // all keys.
            vf most[2][2];
            for (auto &half : most) half[0] = half[1] = all(-INFINITE);
            const auto look = [&](int64_t part) __attribute__((always_inline)) {
                for (int half = 0; half < 2; ++half)
                    raise(most[half], s.scores[half], part * BLOCK, (part + 1) * BLOCK);
            };
            for (int64_t part = 0; part < seen; ++part) {
                clear_sums();
                for (int64_t d = 0; d < depth; ++d)
                    multiply_blocks(s.k + (part * depth + d) * size, s.q + (top / BLOCK * depth + d) * size,
                                    is_narrow || k_is_narrow ? 1 : PARTS, is_narrow || q_is_narrow ? 1 : PARTS);
                if (sees_all && part) look(part - 1);
                store_sums(s.scores[0] + part * BLOCK * W, TILED_KEYS * W, 16 * W, W);
            }
            if (sees_all) look(seen - 1);
            for (int half = 0; half < 2; ++half) {
                const int64_t begin = top + half * W;
                vi from = {}, to = {};
                int64_t common = seen * BLOCK;
                if (!sees_all)
                    for (int64_t lane = 0; lane < W && begin + lane < rows; ++lane) {
                        const int64_t token = (begin + lane) / group;
                        const int64_t first = low[token] - key, stop = high[token] - key;
                        from[lane] = (int32_t)(first < 0 ? 0 : first < keys ? first : keys);
                        to[lane] = (int32_t)(stop < 0 ? 0 : stop < keys ? stop : keys);
                        if (from[lane] || to[lane] < common) common = from[lane] ? 0 : to[lane];
                    }
                weigh<weight_parts>(s.scores[half], seen * BLOCK, a.scale * 1.44269504f, common, from, to, sees_all,
                                    most[half], s.highest + begin, s.total + begin, s.out + begin * dim, dim,
                                    s.weights + half * TILE_NUMBERS, apart);
            }
            for (int64_t d = 0; d < depth; ++d) {
                float *out = s.out + top * dim + d * BLOCK * W;
                load_sums(out, dim * W, 16 * W, W);
                for (int64_t part = 0; part < seen; ++part)
                    multiply_blocks(s.v + (d * parts + part) * size, s.weights + part * apart,
                                    is_narrow || v_is_narrow ? 1 : PARTS, weight_parts);
                store_sums(out, dim * W, 16 * W, W);
            }
        }
    }
    release_tiles();
    for (int64_t begin = 0; begin < rows; begin += W) {
        const vf total = load(s.total + begin), by = select(total == 0.0f, all(0.0f), 1.0f / total);
        for (int64_t d = 0; d < a.dim; d += W) {
            vf lines[W];
#pragma GCC unroll 16
            for (int each = 0; each < W; ++each) lines[each] = load(s.out + begin * dim + (d + each) * W) * by;
            transpose(lines);
            for (int64_t each = 0; each < W && begin + each < rows; ++each) {
                const int64_t row = begin + each, token = first_token + row / group;
                a.put_out((token * a.heads + kv_head * group + row % group) * a.dim + d, lines[each]);
            }
        }
        for (int64_t row = begin; a.lse && row < begin + W && row < rows; ++row)
            a.lse[(first_token + row / group) * a.heads + kv_head * group + row % group] =
                s.total[row] == 0.0f ? -INFINITE : s.highest[row] * 0.693147181f + __builtin_logf(s.total[row]);
    }
}

// Ask the system for the tiles' registers, once for all threads: it gives them if the processor has them and every
// thread's stack of signals has room to save them.
bool may_use_tiles() {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(edx >> 22 & 1) || !(edx >> 24 & 1)) return false;
    const long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return !syscall(SYS_arch_prctl, request, tile_data);
}
#endif

// Merge of parts of attention over the same rows, each row of one head: see partial.py.

struct Merge {
    const float *const *outs, *const *lses;  // [M] of [T, D] and [T]
    void *out;                               // [T, D]
    float *lse;                              // [T]
    int64_t parts, rows, dim;
};

#define MERGED_PARTS 64
#define MERGED_ROWS (4 * W)
// Fewer numbers are merged in less time than another thread takes to wake.
#define LEAST_MERGED_NUMBERS (1 << 17)

template <class Result>
void merge_task(const Merge &a, int64_t task) {
    const int64_t stop = (task + 1) * MERGED_ROWS < a.rows ? (task + 1) * MERGED_ROWS : a.rows;
    for (int64_t first = task * MERGED_ROWS; first < stop; first += W) {
        const int64_t lanes = stop - first < W ? stop - first : W;
        alignas(64) float weights[MERGED_PARTS][W];
        vf highest = all(-INFINITE), total = {};
        for (int64_t part = 0; part < a.parts; ++part) {
            store(weights[part], all(-INFINITE));
            memcpy(weights[part], a.lses[part] + first, sizeof(float) * lanes);
            highest = larger(load(weights[part]), highest);
        }
        const vf base = select(highest == -INFINITE, all(0.0f), highest);
        for (int64_t part = 0; part < a.parts; ++part) {
            const vf weight = exponential(load(weights[part]) - base);
            store(weights[part], weight);
            total += weight;
        }
        // A row without any key has no weight, and an out of 0. An LSE that is a NaN makes all weights of its row one.
        const vf by = select(total == 0.0f, all(1.0f), total);
        for (int64_t part = 0; part < a.parts; ++part) store(weights[part], load(weights[part]) / by);
        for (int64_t lane = 0; lane < lanes; ++lane) {
            const int64_t row = first + lane;
            Result *out = (Result *)a.out + row * a.dim;
            a.lse[row] = total[lane] == 0.0f ? -INFINITE : highest[lane] + __builtin_logf(total[lane]);
            int64_t d = 0;
            for (; d + W <= a.dim; d += W) {
                vf sum = {};
                for (int64_t part = 0; part < a.parts; ++part)
                    if (const float weight = weights[part][lane]; weight != 0.0f)
                        sum += weight * load(a.outs[part] + row * a.dim + d);
                put(out + d, sum);
            }
            for (; d < a.dim; ++d) {
                float sum = 0.0f;
                for (int64_t part = 0; part < a.parts; ++part)
                    if (const float weight = weights[part][lane]; weight != 0.0f)
                        sum += weight * a.outs[part][row * a.dim + d];
                put(out + d, sum);
            }
        }
    }
}

// Norms by the root of the mean square: x / sqrt(mean(x^2) + epsilon) * weight.

struct Norm {
    const void *x, *weight;  // [T, C], [C]
    void *out;               // [T, C]
    int64_t rows, features;
    float epsilon;
    int64_t beside, apart;  // rows that lie one behind the other, and numbers between such groups, of x and of out
};

#define NORM_ROWS 16

template <class Stored>
void normalize_task(const Norm &a, int64_t task) {
    const int64_t stop = (task + 1) * NORM_ROWS < a.rows ? (task + 1) * NORM_ROWS : a.rows;
    const Stored *weight = (const Stored *)a.weight;
    for (int64_t row = task * NORM_ROWS; row < stop; ++row) {
        const int64_t begin = row / a.beside * a.apart + row % a.beside * a.features;
        const Stored *x = (const Stored *)a.x + begin;
        Stored *out = (Stored *)a.out + begin;
        vf squares = {};
        int64_t at = 0;
        for (; at + W <= a.features; at += W) squares += load(x + at) * load(x + at);
        float sum = sum_of(squares);
        for (int64_t rest = at; rest < a.features; ++rest) sum += widen(x[rest]) * widen(x[rest]);
        const float by = 1.0f / __builtin_sqrtf(sum / (float)a.features + a.epsilon);
        for (at = 0; at + W <= a.features; at += W) put(out + at, stored(load(x + at) * by, x) * load(weight + at));
        for (; at < a.features; ++at) put(out + at, stored(all(widen(x[at]) * by), x)[0] * widen(weight[at]));
    }
}

// Rotary positions: the halves of each head are turned by the angles of its token.

struct Rotation {
    const void *x, *cos, *sin;  // [T, H, D], [T, D]
    void *out;                  // [T, H, D]
    int64_t rows, heads, dim, token, head;  // strides of x in elements
};

#define ROTATED_ROWS 16

template <class Stored>
INLINE vf turned(vf x, vf cos, vf other, vf sin, const Stored *kind) {
    return stored(x * cos, kind) + stored(other * sin, kind);
}

template <class Stored>
void rotate_task(const Rotation &a, int64_t task) {
    const int64_t stop = (task + 1) * ROTATED_ROWS < a.rows ? (task + 1) * ROTATED_ROWS : a.rows, half = a.dim / 2;
    for (int64_t row = task * ROTATED_ROWS; row < stop; ++row)
        for (int64_t head = 0; head < a.heads; ++head) {
            const Stored *x = (const Stored *)a.x + row * a.token + head * a.head;
            const Stored *cos = (const Stored *)a.cos + row * a.dim, *sin = (const Stored *)a.sin + row * a.dim;
            Stored *out = (Stored *)a.out + (row * a.heads + head) * a.dim;
            int64_t at = 0;
            for (; at + W <= half; at += W) {
                const vf low = load(x + at), high = load(x + half + at);
                put(out + at, turned(low, load(cos + at), -high, load(sin + at), x));
                put(out + half + at, turned(high, load(cos + half + at), low, load(sin + half + at), x));
            }
            for (; at < half; ++at) {
                const vf low = all(widen(x[at])), high = all(widen(x[half + at]));
                put(out + at, turned(low, all(widen(cos[at])), -high, all(widen(sin[at])), x)[0]);
                put(out + half + at, turned(high, all(widen(cos[half + at])), low, all(widen(sin[half + at])), x)[0]);
            }
        }
}

// Choice of tokens by their logits, in fp64. `workers/sampling/sampler.py` has the formulas.

typedef double vd __attribute__((vector_size(4 * W)));
typedef double vd_u __attribute__((vector_size(4 * W), aligned(8)));
typedef int64_t vl __attribute__((vector_size(4 * W)));
typedef float half_u __attribute__((vector_size(2 * W), aligned(4)));
typedef uint32_t half_bits __attribute__((vector_size(2 * W)));
typedef uint16_t quarter_u __attribute__((vector_size(W), aligned(2)));

#define DOUBLES (W / 2)
// Tokens whose weights are summed at a time.
#define SUMMED_TOKENS 256
// Tokens are sorted into buckets by the logarithm of their weight, so many to a unit. The last has all smaller ones.
#define BUCKETS 2048
#define BUCKETS_OF_UNIT 64
#define BROKEN -1

INLINE double as_double(double value) { return value; }
INLINE double as_double(float value) { return value; }
INLINE double as_double(bf16 value) { return widen(value); }
INLINE vd load_doubles(const double *at) { return *(const vd_u *)at; }
INLINE vd load_doubles(const float *at) { return __builtin_convertvector(*(const half_u *)at, vd); }
INLINE vd load_doubles(const bf16 *at) {
    const half_bits bits = __builtin_convertvector(*(const quarter_u *)at, half_bits) << 16;
    return __builtin_convertvector((half_u)bits, vd);
}

// e^x for x <= 0 within 2 units in the last place, 0 below -708.
INLINE vd exponential(vd x) {
    const vd least = -708.0 - (vd){};
    const vd bounded = x < least ? least : x;
    const vd shifted = bounded * 1.4426950408889634 + 6755399441055744.0;  // rounds, as for fp32
    const vd whole = shifted - 6755399441055744.0;
    const vd rest = bounded - whole * 0.69314718036912382 - whole * 1.9082149292705877e-10;
    static const double inverse_factorials[] = {  // from 12! on down
        2.0876756987868099e-9, 2.505210838544172e-8,  2.7557319223985893e-7, 2.7557319223985888e-6,
        2.4801587301587302e-5, 1.9841269841269841e-4, 1.3888888888888889e-3, 8.3333333333333332e-3,
        4.1666666666666664e-2, 1.6666666666666666e-1, 0.5,                   1.0,
        1.0};
    vd sum = 1.6059043836821613e-10 - (vd){};
    for (const double each : inverse_factorials)
        sum = sum * rest + each;
    const vd power = (vd)(((vl)shifted + 1023) << 52);
    return x < least ? (vd){} : sum * power;
}

struct Choice {
    const void *logits;        // [R, V]
    const double *parameters;  // [R, 5]: temperature, top_k, top_p, min_p, a random number in [0, 1)
    int64_t *tokens;           // [R]: BROKEN if the largest logit is not finite
    int64_t size, stride;
};

struct Candidate {
    double scaled, weight;

    int bucket() const {
        const double place = -scaled * BUCKETS_OF_UNIT;
        return place < BUCKETS - 1 ? (int)place : BUCKETS - 1;
    }
};

int descending(const void *one, const void *other) {
    const double a = ((const Candidate *)one)->scaled, b = ((const Candidate *)other)->scaled;
    return (a < b) - (a > b);
}

// A thread's memory for the tokens of a row, padded to whole blocks of SUMMED_TOKENS, whose weights have a sum each.
// It grows to 48 bytes a token of the vocabulary and is never freed: its threads, torch's, live as long as the process.
struct Weights {
    double *scaled = nullptr, *weights, *sums;  // scaled are (logit - largest) / temperature, weights e to their power
    Candidate *some;
    int64_t *ids;  // of the tokens, if `is_part`: else all are there
    int64_t room = 0, padded;
    bool is_part;

    void make_room(int64_t size) {
        padded = (size + SUMMED_TOKENS - 1) / SUMMED_TOKENS * SUMMED_TOKENS;
        if (padded > room) {
            free(scaled);
            scaled = (double *)aligned_alloc(64, sizeof(double) * 6 * padded);
            room = padded;
        }
        weights = scaled + padded;
        sums = weights + padded;
        some = (Candidate *)(sums + padded);
        ids = (int64_t *)(some + padded);
        is_part = false;
    }

    void weigh() {
        for (int64_t at = 0; at < padded; at += DOUBLES)
            *(vd *)(weights + at) = exponential(*(vd *)(scaled + at));
    }

    double sum() {
        double total = 0.0;
        for (int64_t block = 0; block < padded / SUMMED_TOKENS; ++block) {
            vd each = {};
            for (int64_t at = 0; at < SUMMED_TOKENS; at += DOUBLES)
                each += load_doubles(weights + block * SUMMED_TOKENS + at);
            sums[block] = 0.0;
            for (int lane = 0; lane < DOUBLES; ++lane) sums[block] += each[lane];
            total += sums[block];
        }
        return total;
    }

    // Drop most of the tokens that are not among the `count` largest: of the largest logits of all blocks, at least
    // `count` tokens reach the `count`th, so what is below it goes.
    void drop_small(int64_t count) {
        const int64_t blocks = padded / SUMMED_TOKENS;
        if (count > blocks) return;
        for (int64_t block = 0; block < blocks; ++block) {
            vd most = load_doubles(scaled + block * SUMMED_TOKENS);
            for (int64_t at = DOUBLES; at < SUMMED_TOKENS; at += DOUBLES) {
                const vd each = load_doubles(scaled + block * SUMMED_TOKENS + at);
                most = each > most ? each : most;
            }
            sums[block] = most[0];
            for (int lane = 1; lane < DOUBLES; ++lane) sums[block] = most[lane] > sums[block] ? most[lane] : sums[block];
            some[block].scaled = sums[block];
        }
        qsort(some, blocks, sizeof(Candidate), descending);
        const double reached = some[count - 1].scaled;
        int64_t found = 0;
        for (int64_t block = 0; block < blocks; ++block) {
            if (sums[block] < reached) continue;
            for (int64_t at = block * SUMMED_TOKENS; at < (block + 1) * SUMMED_TOKENS; ++at) {
                scaled[found] = scaled[at];
                ids[found] = at;
                found += scaled[at] >= reached;
            }
        }
        is_part = true;
        padded = (found + SUMMED_TOKENS - 1) / SUMMED_TOKENS * SUMMED_TOKENS;
        while (found < padded) scaled[found++] = -__builtin_inf();
    }

    // Keep the largest tokens that together count `limit` or more, each by its weight; or `by_number` as one, and all
    // equals of the last. Tokens that weigh `least` or less never stay.
    void keep_largest(double limit, double least, bool by_number) {
        int64_t found = 0, members = 0, kept = 0, equals = 0, kept_equals = 0;
        for (int64_t at = 0; at < padded; ++at) {
            some[found] = {scaled[at], weights[at]};
            found += weights[at] > least;
        }
        double counts[BUCKETS] = {}, before = 0.0;
        for (int64_t at = 0; at < found; ++at) counts[some[at].bucket()] += by_number ? 1.0 : some[at].weight;
        int last = 0;
        while (last < BUCKETS - 1 && before + counts[last] < limit) before += counts[last++];
        for (int64_t at = 0; at < found; ++at)
            if (some[at].bucket() == last) some[members++] = some[at];
        qsort(some, members, sizeof(Candidate), descending);
        double boundary = -__builtin_inf();  // if rounding leaves the last bucket empty, all stay
        while (kept < members && (!kept || before < limit)) {
            before += by_number ? 1.0 : some[kept].weight;
            boundary = some[kept++].scaled;
        }
        for (int64_t at = 0; at < members; ++at) {
            equals += some[at].scaled == boundary;
            kept_equals += at < kept && some[at].scaled == boundary;
        }
        for (int64_t at = 0; at < padded; at += DOUBLES) {
            vd *const each = (vd *)(weights + at);
            *each = (*(vd *)(scaled + at) >= boundary) & (*each > least) ? *each : (vd){};
        }
        if (by_number || equals == kept_equals) return;
        for (int64_t at = 0; at < padded; ++at)
            if (scaled[at] == boundary && --kept_equals < 0) weights[at] = 0.0;
    }
};
thread_local Weights drawn;

template <class Stored>
void choose_token(const Choice &a, int64_t row) {
    const Stored *x = (const Stored *)a.logits + row * a.stride;
    const double *given = a.parameters + 5 * row;
    const double temperature = given[0], top_k = given[1], top_p = given[2], min_p = given[3];
    int64_t *const token = a.tokens + row;
    // Each lane's first largest number. A NaN counts as larger than any.
    vd most = -__builtin_inf() - (vd){};
    vl is_odd = {}, firsts = {}, place = {};
    int64_t at = 0;
    for (; at + DOUBLES <= a.size; at += DOUBLES, place += 1) {
        const vd each = load_doubles(x + at);
        is_odd |= each != each;
        firsts = each > most ? place : firsts;
        most = each > most ? each : most;
    }
    double largest = -__builtin_inf();
    int64_t first = 0;
    bool is_broken = false;
    for (int lane = 0; lane < DOUBLES; ++lane) {
        const int64_t lane_first = firsts[lane] * DOUBLES + lane;
        is_broken |= is_odd[lane] != 0;
        if (most[lane] > largest || (most[lane] == largest && lane_first < first)) first = lane_first;
        largest = most[lane] > largest ? most[lane] : largest;
    }
    for (int64_t rest = at; rest < a.size; ++rest) {
        const double each = as_double(x[rest]);
        is_broken |= each != each;
        if (each > largest) first = rest, largest = each;
    }
    if (is_broken || largest - largest != 0.0) {
        *token = BROKEN;
        return;
    }
    *token = first;
    if (temperature <= 0.0) return;
    Weights &w = drawn;
    w.make_room(a.size);
    for (int64_t each = 0; each < w.padded; each += DOUBLES) {
        if (each + DOUBLES <= a.size) {
            *(vd *)(w.scaled + each) = (load_doubles(x + each) - largest) / temperature;
        } else {
            for (int64_t rest = each; rest < each + DOUBLES; ++rest)
                w.scaled[rest] = rest < a.size ? (as_double(x[rest]) - largest) / temperature : -__builtin_inf();
        }
    }
    const bool is_limited = top_k > 0.0 && top_k < (double)a.size;
    if (is_limited) w.drop_small((int64_t)top_k);
    w.weigh();
    if (is_limited) w.keep_largest(top_k, -1.0, true);
    double total = w.sum();
    if (top_p < 1.0) {
        // Together, tokens of this share at most have 1 - top_p at most. The largest, of weight 1, always stays.
        const double least = (1.0 - top_p) / (double)a.size * total;
        w.keep_largest(top_p * total, least < 1.0 ? least : 1.0 - 0x1p-53, false);
    }
    if (min_p > 0.0)
        for (int64_t each = 0; each < w.padded; each += DOUBLES) {
            vd *const weight = (vd *)(w.weights + each);
            *weight = *weight < min_p ? (vd){} : *weight;
        }
    if (top_p < 1.0 || min_p > 0.0) total = w.sum();
    // The first token up to which the weights are more than the random share of all. None has the weight 0.
    const double target = given[4] * total;
    double before = 0.0;
    for (int64_t block = 0; block < w.padded / SUMMED_TOKENS; ++block) {
        if (w.sums[block] > 0.0 && before + w.sums[block] > target) {
            for (int64_t each = block * SUMMED_TOKENS; each < (block + 1) * SUMMED_TOKENS; ++each) {
                if (w.weights[each] <= 0.0) continue;
                *token = w.is_part ? w.ids[each] : each;
                if ((before += w.weights[each]) > target) return;
            }
            return;  // rounding: the block's last token
        }
        before += w.sums[block];
    }
}

void normalize(const Norm &a, int is_wide, int threads) {
    // A few rows take less time than other threads take to begin.
    const int64_t tasks = (a.rows + NORM_ROWS - 1) / NORM_ROWS;
    if (is_wide) run_tasks<Norm, normalize_task<float>>(a, tasks, tasks > 1 ? threads : 1);
    else run_tasks<Norm, normalize_task<bf16>>(a, tasks, tasks > 1 ? threads : 1);
}

void rotate(const Rotation &a, int is_wide, int threads) {
    const int64_t tasks = (a.rows + ROTATED_ROWS - 1) / ROTATED_ROWS;
    if (is_wide) run_tasks<Rotation, rotate_task<float>>(a, tasks, tasks > 1 ? threads : 1);
    else run_tasks<Rotation, rotate_task<bf16>>(a, tasks, tasks > 1 ? threads : 1);
}

// `types`: 0 for weights, rows and results of bfloat16, 1 for fp32, 2 for weights of bfloat16 and all else of fp32. With
// `alone` a row's bits do not depend on the number of rows; those of bfloat16 never do.
bool takes_tiles(int64_t rows, int types, int alone) {
    if (!types) return uses_tiles && rows >= LEAST_NARROW_ROWS;
    return uses_tiles && !alone && rows >= (types == 1 ? LEAST_SPLIT_ROWS : LEAST_TILE_ROWS);
}

// Widen rows of bfloat16 numbers into memory that the caller frees, each of `width` with zeros behind its numbers.
float *widened(const bf16 *x, int64_t rows, int64_t features, int64_t width) {
    float *const wide = (float *)malloc(sizeof(float) * rows * width);
    for (int64_t row = 0; row < rows; ++row) {
        float *const to = wide + row * width;
        for (int64_t at = 0; at < features; ++at) to[at] = widen(x[row * features + at]);
        for (int64_t at = features; at < width; ++at) to[at] = 0.0f;
    }
    return wide;
}

void multiply(Linear a, int types, int alone, int threads) {
    a.panels = (a.out_features + OUT_LANES - 1) / OUT_LANES;
#if defined(__AMX_BF16__)
    if (takes_tiles(a.rows, types, alone)) {
        TiledLinear tiled = {a, nullptr, 0, 0, 0};
        const int64_t parts = divide(tiled, types != 1, types == 0, threads), left = a.rows % BLOCK;
        bf16 *const last = types == 0 && left ? (bf16 *)calloc(BLOCK * a.in_features, sizeof(bf16)) : nullptr;
        if (last) memcpy(last, (const bf16 *)a.x + (a.rows - left) * a.in_features, sizeof(bf16) * left * a.in_features);
        tiled.last = last;
        if (types == 1) run_tasks<TiledLinear, multiply_by_tiles<float, float>>(tiled, parts, threads);
        else if (types == 2) run_tasks<TiledLinear, multiply_by_tiles<float, bf16>>(tiled, parts, threads);
        else run_tasks<TiledLinear, multiply_by_tiles<bf16, bf16>>(tiled, parts, threads);
        free(last);
        return;
    }
    if (uses_tiles && !types) {
        float *const wide = widened((const bf16 *)a.x, a.rows, a.in_features, packed_columns<bf16>(a.in_features));
        a.x = wide;
        run_tasks<Linear, multiply_in_tile_order>(a, a.panels, threads);
        free(wide);
        return;
    }
#endif
    a.band = BAND_FLOATS / (GROUP_ROWS * a.in_features);
    if (a.band < 1) a.band = 1;
    const int64_t tasks = (a.rows + GROUP_ROWS - 1) / GROUP_ROWS * a.panels;
    if (types == 1) return run_tasks<Linear, multiply_task<float, float, float>>(a, tasks, threads);
    if (types == 2) return run_tasks<Linear, multiply_task<float, bf16, float>>(a, tasks, threads);
    if (uses_pairs) return run_tasks<Linear, multiply_task<bf16, bf16, bf16>>(a, tasks, threads);
    float *const wide = widened((const bf16 *)a.x, a.rows, a.in_features, a.in_features);
    a.x = wide;
    run_tasks<Linear, multiply_task<float, bf16, bf16>>(a, tasks, threads);
    free(wide);
}

// A decoder layer around its attention, in two calls: norm, joined projections [H + 2 K heads], norms of the heads of
// queries and keys unless they are null, and rotary positions; then projection, norm and gated MLP, each added to the
// layer's input.
struct Layer {
    const void *norm, *joined, *joined_bias, *q_norm, *k_norm, *out, *out_bias, *mlp_norm, *gate, *up, *down, *down_bias;
    int64_t features, heads, kv_heads, dim, middle, is_wide, joined_types, out_types, gate_types, down_types;
    float norm_epsilon, q_epsilon, k_epsilon, mlp_epsilon;
};

// Tokens that lie in adjacent slots from `start` on, or in the slots that are listed, whose KV is copied together.
struct Piece {
    const int64_t *slots;
    int64_t start, tokens;
};

// A sequence of a prompt: its next `rows` rows attend `cached` pieces and, behind them, their own keys. Row t sees keys
// [low[t], high[t]).
struct Sequence {
    const Piece *pieces;
    const int64_t *low, *high;
    int64_t cached, rows;
};

// Slots of a layer's cache that rows are stored in, [K, D] each, and what they attend: the pages of a table, each by
// itself, or `count` sequences, one after the other, with `copies` as memory for a sequence's copied KV.
struct OwnRows {
    void *k, *v;
    const int64_t *slots;             // [T]
    const int32_t *table, *lengths;   // [T, columns], [T]
    int64_t columns, page, longest;   // pages of a table, slots of a page, the largest length
    const Sequence *sequences;
    void *copies;
    int64_t count;
    float scale;
};

}  // namespace

extern "C" {

int ringserve_version() { return 11; }

// Multiply by tiles from now on, or not. Returns whether it does: the processor and the system must allow it.
int ringserve_use_tiles(int wanted) {
#if defined(__AMX_BF16__)
    uses_tiles = wanted && may_use_tiles();
#endif
    return uses_tiles;
}

// Multiply bfloat16 numbers in pairs from now on, or not. Returns whether it does: the processor must have it.
int ringserve_use_pairs(int wanted) {
#if defined(__AVX512BF16__)
    unsigned eax, ebx, ecx, edx;
    uses_pairs = wanted && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 5 & 1);
#endif
    return uses_pairs;
}

void ringserve_use_pool(void *given) { parallel = (Parallel)given; }

void ringserve_attend(const void *q, const KeyRun *runs, const int64_t *low, const int64_t *high, void *out, float *lse,
                      const int64_t *sizes, float scale, int is_wide, int is_out_wide, int threads) {
    const int64_t group = sizes[1] / sizes[2];
    const int64_t all = sizes[0] * group;
    const bool is_short = all <= 8 * QUERY_BLOCK;
    int64_t per_block = (is_short ? SHORT_BLOCK : QUERY_BLOCK) / group;
    bool by_tiles = false;
#if defined(__AMX_BF16__)
    by_tiles = uses_tiles && all >= LEAST_TILE_ROWS;
    if (by_tiles && all > 8 * TILED_QUERIES && sizes[3] <= 128) per_block = TILED_QUERIES / group;
    else if (by_tiles && all * sizes[2] >= 8 * QUERY_BLOCK) per_block = QUERY_BLOCK / group;
#endif
    // Blocks of keys begin where the first row of a task begins to see. So tasks change no row's bits without a window.
    if (is_short && !by_tiles && sizes[0] && low[0] == low[sizes[0] - 1])
        per_block = tokens_of_task(sizes[0], group, sizes[2], per_block, threads);
    Attention a = {q,        runs,     low,       high,     out,      lse,         sizes[0], sizes[1],
                   sizes[2], sizes[3], per_block, sizes[4], sizes[5], is_out_wide, scale};
    const int64_t tasks = (a.tokens + per_block - 1) / per_block * a.kv_heads;
#if defined(__AMX_BF16__)
    if (by_tiles) {
        if (is_wide) run_tasks<Attention, attend_by_tiles<float>>(a, tasks, threads);
        else run_tasks<Attention, attend_by_tiles<bf16>>(a, tasks, threads);
        return;
    }
#endif
    if (is_wide) run_tasks<Attention, attend_block<false, float>>(a, tasks, threads);
    else if (uses_pairs) run_tasks<Attention, attend_block<true, bf16>>(a, tasks, threads);
    else run_tasks<Attention, attend_block<false, bf16>>(a, tasks, threads);
}

int64_t ringserve_paged_floats(int64_t rows, int64_t most, int64_t heads, int64_t dim) {
    return rows * ((most + PAGED_CHUNK - 1) / PAGED_CHUNK) * heads * (dim + 2);
}

void ringserve_attend_pages(const float *q, const void *k, const void *v, const int32_t *table, const int32_t *lengths,
                            float *out, float *lse, float *parts, const int64_t *sizes, float scale, int is_wide,
                            int threads) {
    const int64_t rows = sizes[0], columns = sizes[1];
    int64_t *groups = (int64_t *)malloc(sizeof(int64_t) * (rows + 1)), count = 0;
    for (int64_t row = 0; row < rows; ++row) {
        // What lies behind a row's last page is not its own.
        const int64_t most = row && lengths[row - 1] > lengths[row] ? lengths[row - 1] : lengths[row];
        const int64_t used = (most + sizes[2] - 1) / sizes[2];
        if (!row || memcmp(table + row * columns, table + (row - 1) * columns, sizeof(int32_t) * used))
            groups[count++] = row;
    }
    groups[count] = rows;
    Paged a = {q,       k,        v,        table,    lengths,  out,
               lse,     parts,    groups,   rows,     columns,  sizes[2],
               sizes[3], sizes[4], sizes[5], (sizes[6] + PAGED_CHUNK - 1) / PAGED_CHUNK, scale};
    int64_t numbers = 0;
    for (int64_t group = 0; group < count; ++group) numbers += 2 * lengths[groups[group]] * a.kv_heads * a.dim;
    if (numbers < LEAST_SHARED_NUMBERS) threads = 1;
    if (is_wide) run_tasks<Paged, attend_paged<float>>(a, count * a.chunks, threads);
    else run_tasks<Paged, attend_paged<bf16>>(a, count * a.chunks, threads);
    for (int64_t row = 0; row < rows; ++row) merge_chunks(a, row);
    free(groups);
}

void ringserve_normalize(const void *x, const void *weight, void *out, int64_t rows, int64_t features, float epsilon,
                         int is_wide, int threads) {
    normalize({x, weight, out, rows, features, epsilon, 1, features}, is_wide, threads);
}

void ringserve_rotate(const void *x, const void *cos, const void *sin, void *out, const int64_t *sizes, int is_wide,
                      int threads) {
    rotate({x, cos, sin, out, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]}, is_wide, threads);
}

void ringserve_choose(const void *logits, const double *parameters, int64_t *tokens, int64_t rows, int64_t size,
                      int64_t stride, int type, int threads) {
    const Choice a = {logits, parameters, tokens, size, stride};
    if (type == 0) run_tasks<Choice, choose_token<float>>(a, rows, threads);
    else if (type == 1) run_tasks<Choice, choose_token<bf16>>(a, rows, threads);
    else run_tasks<Choice, choose_token<double>>(a, rows, threads);
}

int ringserve_most_parts() { return MERGED_PARTS; }

void ringserve_merge(const float *const *outs, const float *const *lses, void *out, float *lse, int64_t parts,
                     int64_t rows, int64_t dim, int is_wide, int threads) {
    const Merge a = {outs, lses, out, lse, parts, rows, dim};
    const int64_t tasks = (rows + MERGED_ROWS - 1) / MERGED_ROWS;
    if (rows * dim * parts < LEAST_MERGED_NUMBERS) threads = 1;
    if (is_wide) run_tasks<Merge, merge_task<float>>(a, tasks, threads);
    else run_tasks<Merge, merge_task<bf16>>(a, tasks, threads);
}

int ringserve_lanes() { return W; }

void ringserve_pack(const void *weight, void *packed, int64_t out_features, int64_t in_features, int is_wide,
                    int threads) {
    const Packing a = {weight, packed, out_features, in_features};
    const int64_t tasks = (out_features + W - 1) / W;
    if (is_wide) run_tasks<Packing, pack_task<float>>(a, tasks, threads);
    else run_tasks<Packing, pack_task<bf16>>(a, tasks, threads);
}

int ringserve_multiplies_bfloat16() { return uses_tiles || uses_pairs; }

void ringserve_linear(const void *x, const void *weight, const void *second, const void *bias, void *out, int64_t rows,
                      int64_t in_features, int64_t out_features, int types, int alone, int threads) {
    multiply({x, weight, second, bias, nullptr, out, rows, in_features, out_features, 0, 0}, types, alone, threads);
}

void ringserve_before_attention(const Layer *layer, const void *x, const void *cos, const void *sin, void *normed,
                                void *joined, void *q, void *k, int64_t rows, int alone, int threads) {
    const Layer &l = *layer;
    const int64_t width = (l.heads + 2 * l.kv_heads) * l.dim, size = l.is_wide ? sizeof(float) : sizeof(bf16);
    char *const k_part = (char *)joined + l.heads * l.dim * size;
    normalize({x, l.norm, normed, rows, l.features, l.norm_epsilon, 1, l.features}, l.is_wide, threads);
    multiply({normed, l.joined, nullptr, l.joined_bias, nullptr, joined, rows, l.features, width, 0, 0}, l.joined_types,
             alone, threads);
    if (l.q_norm) {
        normalize({joined, l.q_norm, joined, rows * l.heads, l.dim, l.q_epsilon, l.heads, width}, l.is_wide, threads);
        normalize({k_part, l.k_norm, k_part, rows * l.kv_heads, l.dim, l.k_epsilon, l.kv_heads, width}, l.is_wide,
                  threads);
    }
    rotate({joined, cos, sin, q, rows, l.heads, l.dim, width, l.dim}, l.is_wide, threads);
    rotate({k_part, cos, sin, k, rows, l.kv_heads, l.dim, width, l.dim}, l.is_wide, threads);
}

void ringserve_behind_attention(const Layer *layer, const void *x, const void *attended, void *normed, void *product,
                                void *out, int64_t rows, int64_t part, int alone, int threads) {
    const Layer &l = *layer;
    const int64_t size = l.is_wide ? sizeof(float) : sizeof(bf16);
    multiply({attended, l.out, nullptr, l.out_bias, x, out, rows, l.heads * l.dim, l.features, 0, 0}, l.out_types, alone,
             threads);
    normalize({out, l.mlp_norm, normed, rows, l.features, l.mlp_epsilon, 1, l.features}, l.is_wide, threads);
    for (int64_t first = 0; first < rows; first += part) {
        const int64_t some = rows - first < part ? rows - first : part, at = first * l.features * size;
        void *const result = (char *)out + at;
        multiply({(char *)normed + at, l.gate, l.up, nullptr, nullptr, product, some, l.features, l.middle, 0, 0},
                 l.gate_types, alone, threads);
        multiply({product, l.down, nullptr, l.down_bias, result, result, some, l.middle, l.features, 0, 0}, l.down_types,
                 alone, threads);
    }
}

static void attend_sequences(const Layer &l, const OwnRows &o, const void *q, const void *k, const void *v,
                             void *attended, int threads) {
    const int64_t size = l.is_wide ? sizeof(float) : sizeof(bf16), width = (l.heads + 2 * l.kv_heads) * l.dim;
    const int64_t token = l.kv_heads * l.dim, bytes = token * size;
    int64_t first = 0;
    for (const Sequence *s = o.sequences; s < o.sequences + o.count; first += s->rows, ++s) {
        KeyRun *const runs = (KeyRun *)malloc(sizeof(KeyRun) * (s->cached + 1));
        char *copy = (char *)o.copies;
        for (int64_t run = 0; run < s->cached; ++run) {
            const Piece &piece = s->pieces[run];
            const char *k_run = (const char *)o.k + piece.start * bytes, *v_run = (const char *)o.v + piece.start * bytes;
            if (piece.slots) {
                char *const k_copy = copy, *const v_copy = copy + piece.tokens * bytes;
                for (int64_t at = 0; at < piece.tokens; ++at) {
                    memcpy(k_copy + at * bytes, (const char *)o.k + piece.slots[at] * bytes, bytes);
                    memcpy(v_copy + at * bytes, (const char *)o.v + piece.slots[at] * bytes, bytes);
                }
                k_run = k_copy;
                v_run = v_copy;
                copy += 2 * piece.tokens * bytes;
            }
            runs[run] = {k_run, v_run, piece.tokens, token, l.dim, token, l.dim};
        }
        const int64_t at = first * l.heads * l.dim * size;
        runs[s->cached] = {(const char *)k + first * bytes, (const char *)v + first * width * size, s->rows,
                           token, l.dim, width, l.dim};
        const int64_t sizes[] = {s->rows, l.heads, l.kv_heads, l.dim, l.heads * l.dim, l.dim};
        ringserve_attend((const char *)q + at, runs, s->low, s->high, (char *)attended + at, nullptr, sizes, o.scale,
                         l.is_wide, l.is_wide, threads);
        free(runs);
    }
}

static void attend_own_pages(const Layer &l, const OwnRows &o, const void *q, void *attended, int64_t rows,
                             int threads) {
    const int64_t numbers = rows * l.heads * l.dim;
    const int64_t of_parts = ringserve_paged_floats(rows, o.longest, l.heads, l.dim);
    float *const wide = (float *)malloc(sizeof(float) * (2 * numbers + rows * l.heads + of_parts));
    float *const found = l.is_wide ? (float *)attended : wide + numbers;
    float *const lse = wide + 2 * numbers, *const parts = lse + rows * l.heads;
    if (!l.is_wide)
        for (int64_t at = 0; at < numbers; at += W) store(wide + at, load((const bf16 *)q + at));
    const int64_t sizes[] = {rows, o.columns, o.page, l.heads, l.kv_heads, l.dim, o.longest};
    ringserve_attend_pages(l.is_wide ? (const float *)q : wide, o.k, o.v, o.table, o.lengths, found, lse, parts, sizes,
                           o.scale, l.is_wide, threads);
    if (!l.is_wide)
        for (int64_t at = 0; at < numbers; at += W) put((bf16 *)attended + at, load(found + at));
    free(wide);
}

// A whole layer of rows that this process alone stores and attends. `joined`, `q`, `k`, `attended`, `normed` and
// `product` are memory for what the other two calls take and return.
void ringserve_whole_layer(const Layer *layer, const OwnRows *own, const void *x, const void *cos, const void *sin,
                           void *normed, void *joined, void *q, void *k, void *attended, void *product, void *out,
                           int64_t rows, int64_t part, int alone, int threads) {
    const Layer &l = *layer;
    const OwnRows &o = *own;
    const int64_t size = l.is_wide ? sizeof(float) : sizeof(bf16), width = l.heads + 2 * l.kv_heads;
    const int64_t token = l.kv_heads * l.dim;
    const char *const v = (const char *)joined + (l.heads + l.kv_heads) * l.dim * size;
    ringserve_before_attention(layer, x, cos, sin, normed, joined, q, k, rows, alone, threads);
    for (int64_t row = 0; row < rows; ++row) {
        memcpy((char *)o.k + o.slots[row] * token * size, (const char *)k + row * token * size, token * size);
        memcpy((char *)o.v + o.slots[row] * token * size, v + row * width * l.dim * size, token * size);
    }
    if (o.sequences) attend_sequences(l, o, q, k, v, attended, threads);
    else attend_own_pages(l, o, q, attended, rows, threads);
    ringserve_behind_attention(layer, x, attended, normed, product, out, rows, part, alone, threads);
}
}
