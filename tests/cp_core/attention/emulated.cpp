// The kernels for AVX-512, its bfloat16 numbers and tiles (AMX), for processors that have none of these: each
// instruction is a loop, after Intel's manual (volume 2, and the AMX chapter of volume 1). Slow, for tests alone.

#include <cpuid.h>
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define __AVX512F__ 1
#define __AVX512BF16__ 1
#define __AMX_BF16__ 1

namespace emulated {

typedef float floats __attribute__((vector_size(64)));
typedef int32_t numbers __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(64)));
typedef uint16_t half __attribute__((vector_size(32)));

// Instructions for bfloat16 take subnormal numbers for zeros.
static inline float widen(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    if (!(bits & 0x7f800000)) bits &= 0x80000000;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}
static inline uint16_t narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (!(bits & 0x7f800000)) return bits >> 16 & 0x8000;
    if (value != value) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static inline floats max(floats a, floats b) { return a > b ? a : b; }
static inline half narrow_all(floats x) {
    half out;
    for (int lane = 0; lane < 16; ++lane) out[lane] = narrow(x[lane]);
    return out;
}
// Nor do they give any.
static inline float flushed(float value) {
    return __builtin_fabsf(value) < 0x1p-126f ? __builtin_copysignf(0.0f, value) : value;
}
static inline floats dot(floats sum, floats x, floats y) {
    const halves one = (halves)x, other = (halves)y;
    for (int lane = 0; lane < 16; ++lane)
        for (int each = 1; each >= 0; --each)
            sum[lane] = flushed(__builtin_fmaf(widen(one[2 * lane + each]), widen(other[2 * lane + each]), sum[lane]));
    return sum;
}
static inline uint16_t compare(floats x, floats y, int kind) {
    uint16_t mask = 0;
    for (int lane = 0; lane < 16; ++lane)
        mask |= (uint16_t)!(kind == _CMP_NEQ_UQ ? x[lane] == y[lane] : x[lane] < y[lane]) << lane;
    return mask;
}
static inline floats masked_product(uint16_t mask, floats x, floats y) {
    for (int lane = 0; lane < 16; ++lane) x[lane] = mask >> lane & 1 ? x[lane] * y[lane] : 0.0f;
    return x;
}
// Within 2^-14, as the instruction is.
static inline floats about_inverse(floats x) { return (floats)((numbers)(1.0f / x) & ~0x1ff); }
static inline numbers permute(numbers first, numbers at, numbers second) {
    const halves one = (halves)first, other = (halves)second, index = (halves)at;
    halves out;
    for (int lane = 0; lane < 32; ++lane) out[lane] = (index[lane] & 32 ? other : one)[index[lane] & 31];
    return (numbers)out;
}
static inline uint16_t common_bits(numbers x, numbers y) {
    uint16_t mask = 0;
    for (int lane = 0; lane < 16; ++lane) mask |= (uint16_t)((x[lane] & y[lane]) != 0) << lane;
    return mask;
}

static thread_local union {
    float sums[16][16];
    uint16_t numbers[16][32];
} tiles[8];

static inline void load_tile(int tile, const void *from, int64_t stride) {
    for (int row = 0; row < 16; ++row) memcpy(tiles[tile].sums[row], (const char *)from + row * stride, 64);
}
static inline void store_tile(int tile, void *to, int64_t stride) {
    for (int row = 0; row < 16; ++row) memcpy((char *)to + row * stride, tiles[tile].sums[row], 64);
}
static inline void multiply_tiles(int sum, int a, int b) {
    for (int row = 0; row < 16; ++row) {
        float even[16] = {}, odd[16] = {};
        for (int pair = 0; pair < 16; ++pair)
            for (int column = 0; column < 16; ++column) {
                const uint16_t *x = tiles[a].numbers[row] + 2 * pair, *y = tiles[b].numbers[pair] + 2 * column;
                even[column] = flushed(__builtin_fmaf(widen(x[0]), widen(y[0]), even[column]));
                odd[column] = flushed(__builtin_fmaf(widen(x[1]), widen(y[1]), odd[column]));
            }
        for (int column = 0; column < 16; ++column) {
            float &to = tiles[sum].sums[row][column];
            to = flushed(to + flushed(even[column] + odd[column]));
        }
    }
}

// A thread that uses tiles without their shapes, or keeps them, is stopped.
static thread_local bool has_shapes = false;
static inline void need(bool there) {
    if (has_shapes != there) __builtin_trap();
}

}  // namespace emulated

#define __m512 emulated::floats
#define __m512i emulated::numbers
#define __m512bh emulated::floats
#define _mm512_max_ps emulated::max
#define _mm512_cvtneps_pbh emulated::narrow_all
#define _mm512_cvtepu16_epi32(x) __builtin_convertvector((emulated::half)(x), emulated::numbers)
#define _mm512_dpbf16_ps emulated::dot
#define _mm512_set1_ps(x) ((x) - emulated::floats{})
#define _mm512_cmp_ps_mask emulated::compare
#define _mm512_maskz_mul_ps emulated::masked_product
#define _mm512_rcp14_ps emulated::about_inverse
#define _mm512_permutex2var_epi16 emulated::permute
#define _mm512_load_si512(from) (*(const emulated::numbers *)(from))
#define _mm512_set1_epi32(x) ((x) - emulated::numbers{})
#define _mm512_test_epi32_mask emulated::common_bits
#define __get_cpuid_count(leaf, part, eax, ebx, ecx, edx) (*(eax) = *(ebx) = *(ecx) = *(edx) = ~0u, 1)
#define syscall(...) 0L

#define LOAD_TILE(tile, from, stride) (emulated::need(true), emulated::load_tile(tile, from, stride))
#define STORE_TILE(tile, to, stride) (emulated::need(true), emulated::store_tile(tile, to, stride))
#define CLEAR_TILE(tile) (emulated::need(true), (void)memset(&emulated::tiles[tile], 0, sizeof(emulated::tiles[tile])))
#define MULTIPLY_TILES(sum, a, b) (emulated::need(true), emulated::multiply_tiles(sum, a, b))
#define CONFIGURE_TILES(shapes) (emulated::need(false), emulated::has_shapes = true)
#define RELEASE_TILES() (emulated::need(true), emulated::has_shapes = false)

#include "../../../cp_core/attention/native.cpp"
