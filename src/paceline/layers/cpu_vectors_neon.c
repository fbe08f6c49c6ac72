/* Vectors of four floats on ARM CPUs, under the names that the passes of cpu_kernels.c call them by. Compiled before
 * it, as one source with it; cpu_vectors_x86.c has the same names for x86-64. Sums, products and quotients of vectors
 * are written with C's own operators.
 */

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#ifndef __ARM_FEATURE_DOTPROD
#error "this CPU has no dot product instructions"
#endif

#define INLINE static inline __attribute__((always_inline))
#define NOT_INLINE static __attribute__((noinline)) /* so that addresses stay in registers */
#define UNROLL _Pragma("GCC unroll 16") /* arrays that such loops read and write stay in registers */

typedef float32x4_t Floats;
typedef float32x4_t Four;

/* WIDTH: floats of a vector. SPINS: looks at a barrier before a thread gives its core away. */
enum { WIDTH = 4, SPINS = 2000 };

/* Tokens, or for weights in floating point tokens beside four rows, whose sums stay in registers; blocks that are
 * multiplied side by side. Products of signed integers need no sums of their inputs (`InputGroup`).
 * MORE_TOKENS: those behind the last one whose inputs a tile reads. */
enum { TILE = 4, PLAIN_TILE = 4, SIDE_BLOCKS = 1, KEEPS_GROUPS = 0, MORE_TOKENS = 0 };

INLINE void relax(void) { __asm__ volatile("yield"); }

/* Weights that are read soon: these CPUs see by themselves what comes next. */
INLINE void expect(const void *place) { (void)place; }

INLINE Floats load(const float *place) { return vld1q_f32(place); }
INLINE void store(float *place, Floats x) { vst1q_f32(place, x); }
INLINE Floats spread(float number) { return vdupq_n_f32(number); }
INLINE Floats fused(Floats sum, Floats a, Floats b) { return vfmaq_f32(sum, a, b); }       /* sum + a · b */
INLINE Floats fused_minus(Floats sum, Floats a, Floats b) { return vfmsq_f32(sum, a, b); } /* sum - a · b */
INLINE Floats highest(Floats a, Floats b) { return vmaxq_f32(a, b); }
INLINE Floats lowest(Floats a, Floats b) { return vminq_f32(a, b); }
INLINE Floats nearest(Floats x) { return vrndnq_f32(x); } /* whole numbers */
INLINE float highest_of(Floats x) { return vmaxvq_f32(x); }
INLINE float sum_of(Floats x) { return vaddvq_f32(x); }

/* Two to the power of whole numbers. */
INLINE Floats power_of_two(Floats whole) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(whole), vdupq_n_s32(127)), 23));
}

/* `value`, but 0 where x is below the bound. */
INLINE Floats zero_below(Floats value, Floats x, float bound) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), vcltq_f32(x, vdupq_n_f32(bound))));
}

INLINE void store_four(float *place, Four x) { vst1q_f32(place, x); }
INLINE Four four_times(Four x, float number) { return vmulq_n_f32(x, number); }

/* The sums of four vectors, side by side. */
INLINE Four four_sums(Floats a, Floats b, Floats c, Floats d) { return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)); }

/* The largest magnitude of 32 numbers; none where one of them is none. */
INLINE float largest_of_group(const Floats x[8]) {
    float32x4_t peak = vabsq_f32(x[0]);
    UNROLL for (int i = 1; i < 8; i++) peak = vmaxq_f32(peak, vabsq_f32(x[i]));
    return vmaxvq_f32(peak);
}

/* 32 numbers times `factor`, rounded to bytes. */
INLINE void round_to_bytes(const Floats x[8], float factor, int8_t *out) {
    int16x8_t words[4];
    UNROLL for (int i = 0; i < 4; i++) {
        const int32x4_t low = vcvtnq_s32_f32(vmulq_n_f32(x[2 * i], factor));
        const int32x4_t high = vcvtnq_s32_f32(vmulq_n_f32(x[2 * i + 1], factor));
        words[i] = vcombine_s16(vqmovn_s32(low), vqmovn_s32(high));
    }
    UNROLL for (int i = 0; i < 2; i++)
        vst1q_s8(out + 16 * i, vcombine_s8(vqmovn_s16(words[2 * i]), vqmovn_s16(words[2 * i + 1])));
}

INLINE int sum_of_sixteen(const int8_t *bytes) { return vaddlvq_s8(vld1q_s8(bytes)); }

/* A number in half precision. */
INLINE float half(const uint8_t *place) {
    __fp16 value;
    memcpy(&value, place, 2);
    return value;
}
