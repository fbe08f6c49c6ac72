/* The NEON intrinsics that layers/cpu_*_neon.c calls, in plain C with vectors of GCC: the sources for ARM compile and run
 * on other CPUs, slowly. Types are those of ARM, so a vector of the wrong type does not compile.
 */

#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define __ARM_FEATURE_DOTPROD 1
#define __fp16 _Float16
/* Instructions of ARM: `__asm__("" : "+w"(x))` keeps a value in a register, `__asm__ volatile("yield")` waits. */
#define __asm__(statement)
#define volatile(statement) ("")

#define VECTOR_TYPE(name, type, lanes) typedef type name __attribute__((vector_size(sizeof(type) * lanes)));
VECTOR_TYPE(float32x4_t, float, 4)
VECTOR_TYPE(int32x4_t, int32_t, 4)
VECTOR_TYPE(uint32x4_t, uint32_t, 4)
VECTOR_TYPE(int16x8_t, int16_t, 8)
VECTOR_TYPE(uint16x8_t, uint16_t, 8)
VECTOR_TYPE(float16x8_t, _Float16, 8)
VECTOR_TYPE(int8x16_t, int8_t, 16)
VECTOR_TYPE(uint8x16_t, uint8_t, 16)
VECTOR_TYPE(int16x4_t, int16_t, 4)
VECTOR_TYPE(uint16x4_t, uint16_t, 4)
VECTOR_TYPE(float16x4_t, _Float16, 4)
VECTOR_TYPE(int8x8_t, int8_t, 8)

/* Calls, so that the compiler is done in seconds. */
#define CALL static __attribute__((noinline, unused))
#define LANES(count) for (int i = 0; i < count; i++)

#define LOAD(name, vector, type)                                                                                      \
    CALL vector name(const type *place) {                                                                             \
        vector result;                                                                                                \
        memcpy(&result, place, sizeof(result));                                                                       \
        return result;                                                                                                \
    }
LOAD(vld1q_f32, float32x4_t, float)
LOAD(vld1q_s8, int8x16_t, int8_t)
LOAD(vld1q_u8, uint8x16_t, uint8_t)
LOAD(vld1q_u16, uint16x8_t, uint16_t)

#define STORE(name, vector, type)                                                                                     \
    CALL void name(type *place, vector value) { memcpy(place, &value, sizeof(value)); }
STORE(vst1q_f32, float32x4_t, float)
STORE(vst1q_s8, int8x16_t, int8_t)

#define SPREAD(name, vector, type, count)                                                                             \
    CALL vector name(type number) {                                                                                   \
        vector result;                                                                                                \
        LANES(count) result[i] = number;                                                                              \
        return result;                                                                                                \
    }
SPREAD(vdupq_n_f32, float32x4_t, float, 4)
SPREAD(vdupq_n_s32, int32x4_t, int32_t, 4)
SPREAD(vdupq_n_u32, uint32x4_t, uint32_t, 4)
SPREAD(vdupq_n_s8, int8x16_t, int8_t, 16)
SPREAD(vdupq_n_u8, uint8x16_t, uint8_t, 16)

#define BOTH_OF(name, vector, formula)                                                                                \
    CALL vector name(vector a, vector b) { return formula; }
BOTH_OF(vaddq_f32, float32x4_t, a + b)
BOTH_OF(vsubq_f32, float32x4_t, a - b)
BOTH_OF(vmulq_f32, float32x4_t, a * b)
BOTH_OF(vpaddq_f32, float32x4_t, ((float32x4_t){a[0] + a[1], a[2] + a[3], b[0] + b[1], b[2] + b[3]}))
BOTH_OF(vaddq_s32, int32x4_t, a + b)
BOTH_OF(vorrq_u32, uint32x4_t, a | b)
BOTH_OF(vbicq_u32, uint32x4_t, a & ~b)
BOTH_OF(vandq_s8, int8x16_t, a & b)
BOTH_OF(vaddq_u8, uint8x16_t, a + b)
BOTH_OF(vandq_u8, uint8x16_t, a & b)
BOTH_OF(veorq_u8, uint8x16_t, a ^ b)

/* Of every lane. */
#define EACH_LANE(name, vector, count, formula, ...)                                                                  \
    CALL vector name(__VA_ARGS__) {                                                                                   \
        vector result;                                                                                                \
        LANES(count) result[i] = formula;                                                                             \
        return result;                                                                                                \
    }
EACH_LANE(vmulq_n_f32, float32x4_t, 4, a[i] * b, float32x4_t a, float b)
EACH_LANE(vfmaq_f32, float32x4_t, 4, fmaf(b[i], c[i], a[i]), float32x4_t a, float32x4_t b, float32x4_t c)
EACH_LANE(vfmsq_f32, float32x4_t, 4, fmaf(-b[i], c[i], a[i]), float32x4_t a, float32x4_t b, float32x4_t c)
EACH_LANE(vfmaq_n_f32, float32x4_t, 4, fmaf(b[i], c, a[i]), float32x4_t a, float32x4_t b, float c)
EACH_LANE(vabsq_f32, float32x4_t, 4, fabsf(a[i]), float32x4_t a)
EACH_LANE(vrndnq_f32, float32x4_t, 4, nearbyintf(a[i]), float32x4_t a)
/* What is no number stays none. */
EACH_LANE(vmaxq_f32, float32x4_t, 4, a[i] > b[i] || a[i] != a[i] ? a[i] : b[i], float32x4_t a, float32x4_t b)
EACH_LANE(vminq_f32, float32x4_t, 4, a[i] < b[i] || a[i] != a[i] ? a[i] : b[i], float32x4_t a, float32x4_t b)
EACH_LANE(vcltq_f32, uint32x4_t, 4, a[i] < b[i] ? ~0u : 0u, float32x4_t a, float32x4_t b)
EACH_LANE(vcvt_f32_f16, float32x4_t, 4, (float)a[i], float16x4_t a)
EACH_LANE(vcvtnq_s32_f32, int32x4_t, 4, (int32_t)nearbyintf(a[i]), float32x4_t a)
EACH_LANE(vcvtq_s32_f32, int32x4_t, 4, (int32_t)a[i], float32x4_t a)
EACH_LANE(vget_low_f16, float16x4_t, 4, a[i], float16x8_t a)
EACH_LANE(vget_high_f16, float16x4_t, 4, a[i + 4], float16x8_t a)
EACH_LANE(vget_low_u16, uint16x4_t, 4, a[i], uint16x8_t a)
EACH_LANE(vget_high_u16, uint16x4_t, 4, a[i + 4], uint16x8_t a)
EACH_LANE(vcombine_s16, int16x8_t, 8, i < 4 ? a[i & 3] : b[i & 3], int16x4_t a, int16x4_t b)
EACH_LANE(vcombine_s8, int8x16_t, 16, i < 8 ? a[i & 7] : b[i & 7], int8x8_t a, int8x8_t b)
EACH_LANE(vqmovn_s32, int16x4_t, 4, a[i] > 32767 ? 32767 : a[i] < -32768 ? -32768 : a[i], int32x4_t a)
EACH_LANE(vqmovn_s16, int8x8_t, 8, a[i] > 127 ? 127 : a[i] < -128 ? -128 : a[i], int16x8_t a)
EACH_LANE(vqtbl1q_s8, int8x16_t, 16, places[i] < 16 ? table[places[i] & 15] : 0, int8x16_t table, uint8x16_t places)
EACH_LANE(vqtbl1q_u8, uint8x16_t, 16, places[i] < 16 ? table[places[i] & 15] : 0, uint8x16_t table, uint8x16_t places)
EACH_LANE(vshll_n_u16, uint32x4_t, 4, (uint32_t)a[i] << bits, uint16x4_t a, int bits)
EACH_LANE(vshlq_n_s32, int32x4_t, 4, (int32_t)((uint32_t)a[i] << bits), int32x4_t a, int bits)
EACH_LANE(vshlq_n_s8, int8x16_t, 16, (int8_t)((uint8_t)a[i] << bits), int8x16_t a, int bits)
EACH_LANE(vshrq_n_u8, uint8x16_t, 16, a[i] >> bits, uint8x16_t a, int bits)
/* The upper bits of a, and b behind them. */
EACH_LANE(vsriq_n_s8, int8x16_t, 16, (int8_t)(((uint8_t)a[i] & ~(255 >> bits)) | (uint8_t)b[i] >> bits), int8x16_t a,
          int8x16_t b, int bits)

#define SAME_BITS(name, vector, other)                                                                                \
    CALL vector name(other value) { return (vector)value; }
SAME_BITS(vreinterpretq_f16_u16, float16x8_t, uint16x8_t)
SAME_BITS(vreinterpretq_f32_s32, float32x4_t, int32x4_t)
SAME_BITS(vreinterpretq_f32_u32, float32x4_t, uint32x4_t)
SAME_BITS(vreinterpretq_s32_f32, int32x4_t, float32x4_t)
SAME_BITS(vreinterpretq_u32_f32, uint32x4_t, float32x4_t)
SAME_BITS(vreinterpretq_u32_u8, uint32x4_t, uint8x16_t)
SAME_BITS(vreinterpretq_u8_s8, uint8x16_t, int8x16_t)
SAME_BITS(vreinterpretq_u8_u32, uint8x16_t, uint32x4_t)

CALL float vaddvq_f32(float32x4_t a) { return (a[0] + a[1]) + (a[2] + a[3]); }

CALL float vmaxvq_f32(float32x4_t a) {
    float peak = a[0];
    LANES(4) peak = a[i] > peak || a[i] != a[i] ? a[i] : peak;
    return peak;
}

CALL int16_t vaddlvq_s8(int8x16_t a) {
    int16_t sum = 0;
    LANES(16) sum += a[i];
    return sum;
}

CALL int32x4_t vdotq_laneq_s32(int32x4_t sums, int8x16_t a, int8x16_t b, int lane) {
    LANES(16) sums[i / 4] += a[i] * b[4 * lane + i % 4];
    return sums;
}
