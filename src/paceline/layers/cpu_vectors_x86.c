/* Vectors of eight floats on x86-64 CPUs, under the names that the passes of cpu_kernels.c call them by. Compiled before
 * it, as one source with it; cpu_vectors_neon.c has the same names for ARM. Sums, products and quotients of vectors are
 * written with C's own operators.
 *
 * Products have four forms, of which the compiler's flags for this CPU choose one:
 *   BLOCK_PAIRS   AVX-512: over 16 rows, two blocks side by side; without it over the eight rows of a block
 *   BYTE_DOTS     VNNI or AVX-VNNI: dot products of bytes; without it products of bytes are added up as words
 * PACELINE_256_BITS, if defined, keeps AVX-512 to eight rows, so that tests run that where there is no AVX-VNNI.
 */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "this CPU has no AVX2, FMA and F16C instructions"
#endif

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && !defined(PACELINE_256_BITS)
#define BLOCK_PAIRS 1
#endif
#if (defined(__AVX512VNNI__) && defined(__AVX512VL__)) || defined(__AVXVNNI__)
#define BYTE_DOTS 1
#endif

#define INLINE static inline __attribute__((always_inline))
#define NOT_INLINE static __attribute__((noinline)) /* so that addresses stay in registers */
#define UNROLL _Pragma("GCC unroll 16") /* arrays that such loops read and write stay in registers */

typedef __m256 Floats;
typedef __m128 Four;

/* WIDTH: floats of a vector. SPINS: looks at a barrier before a thread gives its core away; a pause is long here. LINE: bytes that
 * come from memory together. */
enum { WIDTH = 8, SPINS = 100, LINE = 64 };

/* Tokens, or for weights in floating point tokens beside four rows, whose sums stay in registers, of which AVX-512 has
 * 32 and AVX2 16; blocks that are multiplied side by side. Weights are multiplied as unsigned integers: sums of the inputs
 * (`InputGroup`) take away what that adds. MORE_TOKENS: those behind the last one whose inputs a tile reads. */
#ifdef BLOCK_PAIRS
enum { TILE = 8, PLAIN_TILE = 4, SIDE_BLOCKS = 2, KEEPS_GROUPS = 1, MORE_TOKENS = 3 };
#else
enum { TILE = 4, PLAIN_TILE = 2, SIDE_BLOCKS = 1, KEEPS_GROUPS = 1, MORE_TOKENS = 1 };
#endif
/* Tokens above which a tile is multiplied although it is not full. */
#if defined(BLOCK_PAIRS) && !defined(BYTE_DOTS)
enum { LEAST_TILED = 6 };
#else
enum { LEAST_TILED = TILE / 2 };
#endif

INLINE void relax(void) { _mm_pause(); }

/* Weights that are read soon. What a CPU sees by itself ends with each page of 4 kB, which holds less than two blocks. */
INLINE void expect(const void *place) { _mm_prefetch((const char *)place, _MM_HINT_T0); }

INLINE Floats load(const float *place) { return _mm256_loadu_ps(place); }
INLINE void store(float *place, Floats x) { _mm256_storeu_ps(place, x); }
INLINE Floats spread(float number) { return _mm256_set1_ps(number); }
INLINE Floats fused(Floats sum, Floats a, Floats b) { return _mm256_fmadd_ps(a, b, sum); }        /* sum + a · b */
INLINE Floats fused_minus(Floats sum, Floats a, Floats b) { return _mm256_fnmadd_ps(a, b, sum); } /* sum - a · b */
INLINE Floats highest(Floats a, Floats b) { return _mm256_max_ps(a, b); } /* b where one of them is no number */
INLINE Floats lowest(Floats a, Floats b) { return _mm256_min_ps(a, b); }
INLINE Floats nearest(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

INLINE float highest_of(Floats x) {
    __m128 peak = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    peak = _mm_max_ps(peak, _mm_movehl_ps(peak, peak));
    return _mm_cvtss_f32(_mm_max_ss(peak, _mm_movehdup_ps(peak)));
}

INLINE float sum_of(Floats x) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

/* Two to the power of whole numbers. */
INLINE Floats power_of_two(Floats whole) {
    const __m256i exponents = _mm256_add_epi32(_mm256_cvttps_epi32(whole), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponents, 23));
}

/* `value`, but 0 where x is below the bound. */
INLINE Floats zero_below(Floats value, Floats x, float bound) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(bound), _CMP_LT_OQ), value);
}

INLINE void store_four(float *place, Four x) { _mm_storeu_ps(place, x); }
INLINE Four four_times(Four x, float number) { return _mm_mul_ps(x, _mm_set1_ps(number)); }

/* The sums of four vectors, side by side. */
INLINE Four four_sums(Floats a, Floats b, Floats c, Floats d) {
    const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
}

/* The largest magnitude of 32 numbers; none where one of them is none. Compared as integers, where what is no number is
 * above infinity: comparisons of floats would lose it. */
INLINE float largest_of_group(const Floats x[4]) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i peaks = _mm256_and_si256(_mm256_castps_si256(x[0]), magnitude);
    UNROLL for (int i = 1; i < 4; i++)
        peaks = _mm256_max_epi32(peaks, _mm256_and_si256(_mm256_castps_si256(x[i]), magnitude));
    __m128i peak = _mm_max_epi32(_mm256_castsi256_si128(peaks), _mm256_extracti128_si256(peaks, 1));
    peak = _mm_max_epi32(peak, _mm_shuffle_epi32(peak, _MM_SHUFFLE(1, 0, 3, 2)));
    peak = _mm_max_epi32(peak, _mm_shuffle_epi32(peak, _MM_SHUFFLE(2, 3, 0, 1)));
    return _mm_cvtss_f32(_mm_castsi128_ps(peak));
}

/* 32 numbers times `factor`, rounded to bytes. */
INLINE void round_to_bytes(const Floats x[4], float factor, int8_t *out) {
    const __m256 factors = _mm256_set1_ps(factor);
    __m256i whole[4];
    UNROLL for (int i = 0; i < 4; i++) whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[i], factors));
    const __m256i low = _mm256_packs_epi32(whole[0], whole[1]), high = _mm256_packs_epi32(whole[2], whole[3]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* packing goes by halves of a register */
    _mm256_storeu_si256((__m256i *)out, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order));
}

INLINE int sum_of_sixteen(const int8_t *bytes) {
    const __m128i raised = _mm_xor_si128(_mm_loadu_si128((const __m128i *)bytes), _mm_set1_epi8((char)0x80));
    const __m128i sums = _mm_sad_epu8(raised, _mm_setzero_si128());
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128;
}

/* A number in half precision. */
INLINE float half(const uint8_t *place) {
    uint16_t bits;
    memcpy(&bits, place, 2);
    return _cvtsh_ss(bits);
}

#ifdef BLOCK_PAIRS

/* Two vectors side by side, for loops that are bound by operations: each half is what a vector would be. */
typedef __m512 Pair;

INLINE Pair no_pair(void) { return _mm512_setzero_ps(); }
INLINE Pair pair_of(const float *first, const float *second) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(first)), _mm256_loadu_ps(second), 1);
}
INLINE Pair twice(const float *place) { return _mm512_broadcast_f32x8(_mm256_loadu_ps(place)); }
INLINE Pair load_pair(const float *place) { return _mm512_loadu_ps(place); }
INLINE void store_pair(float *place, Pair x) { _mm512_storeu_ps(place, x); }
INLINE Pair spread_pair(float number) { return _mm512_set1_ps(number); }
INLINE Pair fused_pair(Pair sum, Pair a, Pair b) { return _mm512_fmadd_ps(a, b, sum); } /* sum + a · b */

/* Neighbours of two vectors added, as _mm256_hadd_ps does in each half. */
INLINE Pair neighbour_sums(Pair a, Pair b) { return _mm512_shuffle_ps(a, b, 0x88) + _mm512_shuffle_ps(a, b, 0xdd); }

/* Eight sums times a number: of the first halves of four pairs, then of their second halves; each summed as in four_sums. */
INLINE void store_sums(float *place, Pair a, Pair b, Pair c, Pair d, float number) {
    const Pair sums = neighbour_sums(neighbour_sums(a, b), neighbour_sums(c, d));
    const Pair others = _mm512_shuffle_f32x4(sums, sums, 0xb1), whole = (sums + others) * _mm512_set1_ps(number);
    _mm_storeu_ps(place, _mm512_castps512_ps128(whole));
    _mm_storeu_ps(place + 4, _mm512_extractf32x4_ps(whole, 2));
}

#endif
