/* Passes over blocked int4 and int8 weights, and over float32 ones, on ARM CPUs with NEON dot products: whole layers
 * in one call.
 *
 * What lies between the products of a small model costs more than the products when each step is a torch operation.
 * Here a layer is ten loops with a barrier between them, and all layers of a pass are one parallel region.
 *
 * A token's numbers never depend on what else is in the pass: a product sums the groups of a row in order, attention
 * sums keys in the order of their positions, and threads share out results, never sums.
 *
 * layers/cpu_kernels.py mirrors the structures below. Compiled at load with the system's compiler
 * (device/host_compiler.py). Threads come from the OpenMP runtime that torch has loaded: both share one pool.
 */

#include <arm_neon.h>
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef __ARM_FEATURE_DOTPROD
#error "this CPU has no dot product instructions"
#endif

#define INLINE static inline __attribute__((always_inline))
#define NOT_INLINE static __attribute__((noinline)) /* so that addresses stay in registers */
#define UNROLL _Pragma("GCC unroll 16") /* arrays that such loops read and write stay in registers */

enum { GROUP = 32, BLOCK_ROWS = 8, TILE = 4, CHUNK = 64, SCALE_BYTES = 2 * BLOCK_ROWS };
enum { NODE_TILE = 4, KEY_STEP = 64 }; /* of attention; a step of keys fits the first cache */

typedef struct {
    /* Eight rows at a time, group after group: eight bfloat16 scales, then the weights. 32 bits: a matrix of floats. */
    const uint8_t *blocks;
    int32_t bits, rows, columns, unused;
} Weight;

typedef struct {
    const float *attention_norm, *qkv_bias, *query_norm, *key_norm, *output_bias, *mlp_norm;
    Weight qkv, output, gate_up, down;
} Layer;

typedef struct {
    const Layer *layers;
    const float *rope; /* [positions, 2, head_dim / 2] */
    float *keys, *values; /* [layers, tokens, key heads, head_dim] */
    int64_t layer_stride;
    int32_t hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, block_size;
    float eps;
    int32_t num_threads;
} Model;

typedef struct {
    const int32_t *lengths; /* of each row: tokens cached before it */
    const int32_t *counts;  /* of each row: its nodes */
    const int32_t *skips;   /* of each row: nodes at its start that are cached already */
    const int32_t *parents; /* of all nodes, row after row */
    const int32_t *tables;  /* block tables, row after row, each as long as its tokens need */
    int32_t num_rows, num_nodes; /* nodes that are computed */
} Batch;

/* Where a node's keys are: `seen` slots from `slots`, then `tail_count` from `tail`. */
typedef struct {
    const int32_t *slots, *tail;
    int32_t seen, tail_count, position, slot;
} Node;

typedef struct {
    int64_t start, end;
} Share;

INLINE Share share_of(int64_t total, int thread, int threads) {
    return (Share){total * thread / threads, total * (thread + 1) / threads};
}

/* --- threads ---------------------------------------------------------------------------------------------------- */

/* GCC's OpenMP runtime, called as a compiler would: no pragma, so that any compiler will do. */
void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags);
int omp_get_thread_num(void);
int omp_get_num_threads(void);

enum { SPINS = 2000 };

typedef struct {
    int arrived, phase;
} Barrier;

/* Wait for all threads. One that waits long gives its core away: where other programs keep the machine busy, the
 * thread that is missing may be waiting for this very core, and OpenMP's own barrier spins for milliseconds. */
static void meet(Barrier *barrier, int threads) {
    if (threads == 1) return;
    const int phase = __atomic_load_n(&barrier->phase, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&barrier->arrived, 1, __ATOMIC_ACQ_REL) == threads) {
        __atomic_store_n(&barrier->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&barrier->phase, phase + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int spins = 0; __atomic_load_n(&barrier->phase, __ATOMIC_ACQUIRE) == phase; spins++) {
        if (spins < SPINS)
            __asm__ volatile("yield");
        else
            sched_yield();
    }
}

static size_t block_bytes(const Weight *weight) {
    return (size_t)(weight->columns / GROUP) * (SCALE_BYTES + BLOCK_ROWS * GROUP * weight->bits / 8);
}

/* --- rounding weights ------------------------------------------------------------------------------------------- */

static float bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
    memcpy(&value, &bits, 4);
    return value;
}

/* One group of up to eight rows: scales, then for every four columns four rows side by side. int4 holds columns
 * 0 to 15 in the low halves and columns 16 to 31 in the high ones. */
static void pack_group(const float *weight, int rows, int columns, int bits, uint8_t *out) {
    const float largest = bits == 4 ? 7.0f : 127.0f;
    uint8_t *packed = out + SCALE_BYTES;
    memset(out, 0, SCALE_BYTES + BLOCK_ROWS * GROUP * bits / 8);
    for (int row = 0; row < rows; row++) {
        const float *group = weight + (int64_t)row * columns;
        float peak = 0.0f;
        for (int k = 0; k < GROUP; k++) peak = fmaxf(peak, fabsf(group[k]));
        const float scale = bfloat16(fmaxf(peak / largest, 1e-8f));
        uint32_t scale_bits;
        memcpy(&scale_bits, &scale, 4);
        ((uint16_t *)out)[row] = (uint16_t)(scale_bits >> 16);
        for (int k = 0; k < GROUP; k++) {
            const int value = (int)fminf(fmaxf(nearbyintf(group[k] / scale), -largest - 1.0f), largest);
            const int lane = (row % 4) * 4 + k % 4, half = row / 4;
            if (bits == 8)
                packed[((k / 4) * 2 + half) * 16 + lane] = (uint8_t)value;
            else
                packed[((k / 4 % 4) * 2 + half) * 16 + lane] |= (uint8_t)((value & 15) << (k < 16 ? 0 : 4));
        }
    }
}

typedef struct {
    const float *weight;
    Weight shape;
    uint8_t *out;
} PackJob;

static void pack_share(void *data) {
    const PackJob *job = data;
    const int rows = job->shape.rows, columns = job->shape.columns, bits = job->shape.bits;
    const size_t bytes = block_bytes(&job->shape), group_bytes = bytes / (columns / GROUP);
    const Share blocks = share_of((rows + BLOCK_ROWS - 1) / BLOCK_ROWS, omp_get_thread_num(), omp_get_num_threads());
    for (int64_t block = blocks.start; block < blocks.end; block++) {
        const int first = block * BLOCK_ROWS, count = rows - first < BLOCK_ROWS ? rows - first : BLOCK_ROWS;
        for (int group = 0; group < columns / GROUP; group++)
            pack_group(job->weight + (int64_t)first * columns + group * GROUP, count, columns, bits,
                       job->out + block * bytes + group * group_bytes);
    }
}

void paceline_pack(const float *weight, int32_t rows, int32_t columns, int32_t bits, uint8_t *out, int32_t threads) {
    PackJob job = {weight, {out, bits, rows, columns, 0}, out};
    GOMP_parallel(pack_share, &job, threads, 0);
}

/* The weights as they are multiplied, in floating point. */
void paceline_unpack(const Weight *weight, float *out) {
    const int columns = weight->columns;
    const size_t bytes = block_bytes(weight), group_bytes = bytes / (columns / GROUP);
    for (int row = 0; row < weight->rows; row++)
        for (int k = 0; k < columns; k++) {
            const uint8_t *group = weight->blocks + row / BLOCK_ROWS * bytes + k / GROUP * group_bytes;
            const int column = k % GROUP, lane = (row % 4) * 4 + k % 4, half = row % BLOCK_ROWS / 4;
            const uint32_t scale_bits = (uint32_t)((const uint16_t *)group)[row % BLOCK_ROWS] << 16;
            const uint8_t *packed = group + SCALE_BYTES;
            float scale;
            int value;
            memcpy(&scale, &scale_bits, 4);
            if (weight->bits == 8) {
                value = (int8_t)packed[((column / 4) * 2 + half) * 16 + lane];
            } else {
                const int both = packed[((column / 4 % 4) * 2 + half) * 16 + lane];
                value = (int8_t)(column < 16 ? both << 4 : both & 0xf0) / 16;
            }
            out[(int64_t)row * columns + k] = value * scale;
        }
}

/* --- inputs of products ----------------------------------------------------------------------------------------- */

/* Input, where every 32 values of a token share a scale; or plain, for weights in floating point. */
typedef struct {
    int8_t *values;
    float *scales, *plain;
} Input;

INLINE void round_group(const float32x4_t x[8], int8_t *values, float *scale) {
    float32x4_t peak = vabsq_f32(x[0]);
    UNROLL for (int i = 1; i < 8; i++) peak = vmaxq_f32(peak, vabsq_f32(x[i]));
    const float largest = vmaxvq_f32(peak);
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    int16x8_t words[4];
    UNROLL for (int i = 0; i < 4; i++) {
        const int32x4_t low = vcvtnq_s32_f32(vmulq_n_f32(x[2 * i], inverse));
        const int32x4_t high = vcvtnq_s32_f32(vmulq_n_f32(x[2 * i + 1], inverse));
        words[i] = vcombine_s16(vqmovn_s32(low), vqmovn_s32(high));
    }
    UNROLL for (int i = 0; i < 2; i++)
        vst1q_s8(values + 16 * i, vcombine_s8(vqmovn_s16(words[2 * i]), vqmovn_s16(words[2 * i + 1])));
    *scale = largest / 127.0f;
}

INLINE void put_group(const float32x4_t x[8], Input out, int64_t group) {
    if (!out.plain) {
        round_group(x, out.values + group * GROUP, out.scales + group);
        return;
    }
    for (int i = 0; i < 8; i++) vst1q_f32(out.plain + group * GROUP + 4 * i, x[i]);
}

static void round_groups(const float *x, Input out, Share groups) {
    for (int64_t group = groups.start; group < groups.end; group++) {
        float32x4_t part[8];
        for (int i = 0; i < 8; i++) part[i] = vld1q_f32(x + group * GROUP + 4 * i);
        put_group(part, out, group);
    }
}

/* 1 / root mean square of a vector whose size is a multiple of 16. */
static float inverse_rms(const float *x, int size, float eps) {
    float32x4_t sums[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
    for (int k = 0; k < size; k += 16)
        for (int i = 0; i < 4; i++) {
            const float32x4_t part = vld1q_f32(x + k + 4 * i);
            sums[i] = vfmaq_f32(sums[i], part, part);
        }
    const float sum = vaddvq_f32(vaddq_f32(vaddq_f32(sums[0], sums[1]), vaddq_f32(sums[2], sums[3])));
    return 1.0f / sqrtf(sum / size + eps);
}

static void norm_groups(const float *x, const float *gain, int size, float eps, Input out, Share groups) {
    const int per_node = size / GROUP;
    int64_t last = -1;
    float scale = 0.0f;
    for (int64_t group = groups.start; group < groups.end; group++) {
        const int64_t node = group / per_node;
        const float *weights = gain + group % per_node * GROUP;
        float32x4_t part[8];
        if (node != last) scale = inverse_rms(x + node * size, size, eps);
        last = node;
        for (int i = 0; i < 8; i++)
            part[i] = vmulq_f32(vmulq_n_f32(vld1q_f32(x + group * GROUP + 4 * i), scale), vld1q_f32(weights + 4 * i));
        put_group(part, out, group);
    }
}

/* --- exponentials ----------------------------------------------------------------------------------------------- */

/* e to the power of x, to about one unit in the last place; 0 below -87. */
INLINE float32x4_t exponential(float32x4_t x) {
    const uint32x4_t tiny = vcltq_f32(x, vdupq_n_f32(-87.0f));
    const float32x4_t bounded = vmaxq_f32(vminq_f32(x, vdupq_n_f32(88.0f)), vdupq_n_f32(-87.0f));
    const float32x4_t turns = vrndnq_f32(vmulq_n_f32(bounded, 1.44269504f));
    float32x4_t rest = vfmsq_f32(bounded, turns, vdupq_n_f32(0.693145752f));
    rest = vfmsq_f32(rest, turns, vdupq_n_f32(1.42860677e-6f));
    float32x4_t sum = vdupq_n_f32(1.0f / 5040.0f);
    sum = vfmaq_f32(vdupq_n_f32(1.0f / 720.0f), sum, rest);
    sum = vfmaq_f32(vdupq_n_f32(1.0f / 120.0f), sum, rest);
    sum = vfmaq_f32(vdupq_n_f32(1.0f / 24.0f), sum, rest);
    sum = vfmaq_f32(vdupq_n_f32(1.0f / 6.0f), sum, rest);
    sum = vfmaq_f32(vdupq_n_f32(0.5f), sum, rest);
    sum = vfmaq_f32(vdupq_n_f32(1.0f), sum, rest);
    sum = vfmaq_f32(vdupq_n_f32(1.0f), sum, rest);
    const int32x4_t power = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(turns), vdupq_n_s32(127)), 23);
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(vmulq_f32(sum, vreinterpretq_f32_s32(power))), tiny));
}

/* silu(gate) * up of gate and up side by side. */
static void gate_groups(const float *both, int size, Input out, Share groups) {
    const int per_node = size / GROUP;
    for (int64_t group = groups.start; group < groups.end; group++) {
        const float *gate = both + group / per_node * 2 * size + group % per_node * GROUP, *up = gate + size;
        float32x4_t part[8];
        for (int i = 0; i < 8; i++) {
            const float32x4_t x = vld1q_f32(gate + 4 * i);
            const float32x4_t below = vaddq_f32(vdupq_n_f32(1.0f), exponential(vnegq_f32(x)));
            part[i] = vmulq_f32(vdivq_f32(x, below), vld1q_f32(up + 4 * i));
        }
        put_group(part, out, group);
    }
}

/* --- products --------------------------------------------------------------------------------------------------- */

/* int4 weights are multiplied as sixteen times themselves. */
INLINE float unit_of(int bits) { return bits == 4 ? 1.0f / 16.0f : 1.0f; }

/* A block of int4 weights in the layout of int8, for passes that multiply by it many times. */
static void widen_block(const uint8_t *block, int groups, uint8_t *out) {
    const int8x16_t upper = vdupq_n_s8((int8_t)0xf0);
    for (int group = 0; group < groups; group++) {
        vst1q_u8(out, vld1q_u8(block));
        for (int part = 0; part < 8; part++) {
            const int8x16_t both = vld1q_s8((const int8_t *)block + SCALE_BYTES + part * 16);
            vst1q_s8((int8_t *)out + SCALE_BYTES + part * 16, vshlq_n_s8(both, 4));
            vst1q_s8((int8_t *)out + SCALE_BYTES + 128 + part * 16, vandq_s8(both, upper));
        }
        block += SCALE_BYTES + BLOCK_ROWS * GROUP / 2;
        out += SCALE_BYTES + BLOCK_ROWS * GROUP;
    }
}

/* A block of eight rows times `tokens` inputs, which is a constant wherever this is inlined. */
INLINE void block_product(const uint8_t *block, int groups, int bits, const int8_t *values, const float *scales,
                          int columns, int tokens, float32x4_t out[TILE][2]) {
    const float32x4_t offset = vdupq_n_f32(12582912.0f); /* 1.5 · 2^23: its last bits count integers */
    const int32x4_t start = vreinterpretq_s32_f32(offset);
    const int8x16_t upper = vdupq_n_s8((int8_t)0xf0);
    UNROLL for (int token = 0; token < tokens; token++) out[token][0] = out[token][1] = vdupq_n_f32(0.0f);
    for (int group = 0; group < groups; group++) {
        const uint16x8_t packed_scales = vld1q_u16((const uint16_t *)block);
        const float32x4_t low_scales = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(packed_scales), 16));
        const float32x4_t high_scales = vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(packed_scales), 16));
        const int8_t *weights = (const int8_t *)block + SCALE_BYTES;
        int32x4_t sums[TILE][2];
        int8x16_t low[TILE], high[TILE];
        UNROLL for (int token = 0; token < tokens; token++) {
            low[token] = vld1q_s8(values + (int64_t)token * columns + group * GROUP);
            high[token] = vld1q_s8(values + (int64_t)token * columns + group * GROUP + 16);
            sums[token][0] = sums[token][1] = start;
        }
#define QUAD(lane)                                                                                                    \
    UNROLL for (int half = 0; half < 2; half++) {                                                                     \
        int8x16_t first = vld1q_s8(weights + (lane * 2 + half) * 16), second;                                         \
        if (bits == 4) {                                                                                              \
            second = vandq_s8(first, upper);                                                                          \
            first = vshlq_n_s8(first, 4);                                                                             \
        } else {                                                                                                      \
            second = vld1q_s8(weights + ((lane + 4) * 2 + half) * 16);                                                \
        }                                                                                                             \
        UNROLL for (int token = 0; token < tokens; token++)                                                           \
            sums[token][half] = vdotq_laneq_s32(sums[token][half], first, low[token], lane);                          \
        UNROLL for (int token = 0; token < tokens; token++)                                                           \
            sums[token][half] = vdotq_laneq_s32(sums[token][half], second, high[token], lane);                        \
    }
        QUAD(0)
        QUAD(1)
        QUAD(2)
        QUAD(3)
#undef QUAD
        UNROLL for (int token = 0; token < tokens; token++) {
            const float scale = scales[(int64_t)token * groups + group];
            const float32x4_t below = vsubq_f32(vreinterpretq_f32_s32(sums[token][0]), offset);
            const float32x4_t above = vsubq_f32(vreinterpretq_f32_s32(sums[token][1]), offset);
            out[token][0] = vfmaq_f32(out[token][0], below, vmulq_n_f32(low_scales, scale));
            out[token][1] = vfmaq_f32(out[token][1], above, vmulq_n_f32(high_scales, scale));
        }
        block += SCALE_BYTES + BLOCK_ROWS * GROUP * bits / 8;
    }
}

/* out (+)= product + bias of eight rows, or fewer at the end of the weight. */
INLINE void store_rows(float32x4_t low, float32x4_t high, const float *bias, int adds, float *out, int rows) {
    float sums[BLOCK_ROWS];
    if (rows == BLOCK_ROWS) {
        if (bias) low = vaddq_f32(low, vld1q_f32(bias)), high = vaddq_f32(high, vld1q_f32(bias + 4));
        if (adds) low = vaddq_f32(low, vld1q_f32(out)), high = vaddq_f32(high, vld1q_f32(out + 4));
        vst1q_f32(out, low);
        vst1q_f32(out + 4, high);
        return;
    }
    vst1q_f32(sums, low);
    vst1q_f32(sums + 4, high);
    for (int row = 0; row < rows; row++) {
        const float sum = bias ? sums[row] + bias[row] : sums[row];
        out[row] = adds ? sum + out[row] : sum;
    }
}

INLINE void tile_product(const Weight *weight, const uint8_t *block, int bits, float unit, int first, Input x,
                         int64_t token, int tokens, const float *bias, int adds, float *out) {
    const int groups = weight->columns / GROUP;
    const int rows = weight->rows - first < BLOCK_ROWS ? weight->rows - first : BLOCK_ROWS;
    float32x4_t sums[TILE][2];
    block_product(block, groups, bits, x.values + token * weight->columns, x.scales + token * groups,
                  weight->columns, tokens, sums);
    UNROLL for (int i = 0; i < tokens; i++)
        store_rows(vmulq_n_f32(sums[i][0], unit), vmulq_n_f32(sums[i][1], unit), bias ? bias + first : 0, adds,
                   out + (token + i) * weight->rows + first, rows);
}

/* One block of rows times tokens start to end; `bits` is a constant wherever this is inlined. */
INLINE void tokens_product(const Weight *weight, const uint8_t *block, int bits, float unit, int first, Input x,
                           Share tokens, const float *bias, int adds, float *out) {
    int64_t token = tokens.start;
    for (; token + 4 <= tokens.end; token += 4)
        tile_product(weight, block, bits, unit, first, x, token, 4, bias, adds, out);
    if (token + 2 <= tokens.end) {
        tile_product(weight, block, bits, unit, first, x, token, 2, bias, adds, out);
        token += 2;
    }
    if (token < tokens.end) tile_product(weight, block, bits, unit, first, x, token, 1, bias, adds, out);
}

/* Four rows of floats times `tokens` inputs, which is a constant wherever this is inlined. */
INLINE void plain_tile(const Weight *weight, int first, const float *x, int64_t token, int tokens, const float *bias,
                       int adds, float *out) {
    const int columns = weight->columns, rows = weight->rows - first < 4 ? weight->rows - first : 4;
    const float *matrix = (const float *)weight->blocks, *lines[4];
    float32x4_t sums[TILE][4];
    UNROLL for (int row = 0; row < 4; row++)
        lines[row] = matrix + (int64_t)(first + (row < rows ? row : rows - 1)) * columns;
    UNROLL for (int i = 0; i < tokens; i++)
        UNROLL for (int row = 0; row < 4; row++) sums[i][row] = vdupq_n_f32(0.0f);
    for (int k = 0; k < columns; k += 4) {
        float32x4_t part[4];
        UNROLL for (int row = 0; row < 4; row++) part[row] = vld1q_f32(lines[row] + k);
        UNROLL for (int i = 0; i < tokens; i++) {
            const float32x4_t input = vld1q_f32(x + (token + i) * columns + k);
            UNROLL for (int row = 0; row < 4; row++) sums[i][row] = vfmaq_f32(sums[i][row], part[row], input);
        }
    }
    UNROLL for (int i = 0; i < tokens; i++) {
        float results[4], *place = out + (token + i) * weight->rows + first;
        vst1q_f32(results, vpaddq_f32(vpaddq_f32(sums[i][0], sums[i][1]), vpaddq_f32(sums[i][2], sums[i][3])));
        for (int row = 0; row < rows; row++) {
            const float sum = bias ? results[row] + bias[first + row] : results[row];
            place[row] = adds ? sum + place[row] : sum;
        }
    }
}

static void plain_product(const Weight *weight, const float *x, int64_t nodes, const float *bias, int adds, float *out,
                          int thread, int threads) {
    const Share fours = share_of((weight->rows + 3) / 4, thread, threads);
    for (int64_t chunk = 0; chunk < nodes; chunk += CHUNK) {
        const int64_t end = nodes - chunk < CHUNK ? nodes : chunk + CHUNK;
        for (int64_t four = fours.start; four < fours.end; four++) {
            int64_t token = chunk;
            for (; token + 4 <= end; token += 4) plain_tile(weight, four * 4, x, token, 4, bias, adds, out);
            if (token + 2 <= end) {
                plain_tile(weight, four * 4, x, token, 2, bias, adds, out);
                token += 2;
            }
            if (token < end) plain_tile(weight, four * 4, x, token, 1, bias, adds, out);
        }
    }
}

/* out [nodes, rows] = x · weightᵀ + bias; adds: to what out holds. The thread's share of the rows; room: its own. */
static void product(const Weight *weight, Input x, int64_t nodes, const float *bias, int adds, float *out,
                    uint8_t *room, int thread, int threads) {
    if (x.plain) {
        plain_product(weight, x.plain, nodes, bias, adds, out, thread, threads);
        return;
    }
    const Share blocks = share_of((weight->rows + BLOCK_ROWS - 1) / BLOCK_ROWS, thread, threads);
    const size_t bytes = block_bytes(weight);
    const float unit = unit_of(weight->bits);
    for (int64_t chunk = 0; chunk < nodes; chunk += CHUNK) {
        const Share tokens = {chunk, nodes - chunk < CHUNK ? nodes : chunk + CHUNK};
        const int widens = weight->bits == 4 && tokens.end - chunk > TILE;
        for (int64_t index = blocks.start; index < blocks.end; index++) {
            const uint8_t *block = weight->blocks + index * bytes;
            const int first = index * BLOCK_ROWS;
            if (widens) widen_block(block, weight->columns / GROUP, room);
            if (weight->bits == 4 && !widens)
                tokens_product(weight, block, 4, unit, first, x, tokens, bias, adds, out);
            else
                tokens_product(weight, widens ? room : block, 8, unit, first, x, tokens, bias, adds, out);
        }
    }
}

/* Room that each thread needs to widen a block of so many columns. */
static size_t widened_bytes(int columns) {
    return (size_t)(columns / GROUP) * (SCALE_BYTES + BLOCK_ROWS * GROUP);
}

static int reserve_input(Input *out, int64_t values, int bits) {
    *out = (Input){0, 0, 0};
    if (bits == 32) return (out->plain = malloc(values * sizeof(float))) != 0;
    out->values = malloc(values);
    out->scales = malloc(values / GROUP * sizeof(float));
    return out->values && out->scales;
}

static void release_input(Input *input) {
    free(input->values);
    free(input->scales);
    free(input->plain);
}

typedef struct {
    const Weight *weight;
    const float *x, *bias;
    float *out;
    Input input;
    uint8_t *room;
    Barrier barrier;
    int32_t nodes;
} ProductJob;

static void product_share(void *data) {
    ProductJob *job = data;
    const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const int64_t groups = (int64_t)job->nodes * job->weight->columns / GROUP;
    round_groups(job->x, job->input, share_of(groups, thread, threads));
    meet(&job->barrier, threads);
    product(job->weight, job->input, job->nodes, job->bias, 0, job->out,
            job->room + thread * widened_bytes(job->weight->columns), thread, threads);
    meet(&job->barrier, threads); /* here and not in OpenMP's barrier, which does not give the core away */
}

/* 0, or -1 where memory is short. */
int paceline_product(const Weight *weight, const float *x, int32_t nodes, const float *bias, float *out,
                     int32_t threads) {
    uint8_t *room = malloc(widened_bytes(weight->columns) * threads);
    ProductJob job = {weight, x, bias, out, {0, 0, 0}, room, {0, 0}, nodes};
    const int fits = reserve_input(&job.input, (int64_t)nodes * weight->columns, weight->bits) && room;
    if (fits) GOMP_parallel(product_share, &job, threads, 0);
    release_input(&job.input);
    free(room);
    return fits ? 0 : -1;
}

/* --- attention -------------------------------------------------------------------------------------------------- */

static void norm_head(float *head, const float *gain, int size, float eps) {
    const float scale = inverse_rms(head, size, eps);
    for (int k = 0; k < size; k++) head[k] = head[k] * scale * gain[k];
}

static void rotate_head(float *head, const float *rope, int half) {
    const float *cosines = rope, *sines = rope + half;
    for (int k = 0; k < half; k++) {
        const float low = head[k], high = head[k + half];
        head[k] = low * cosines[k] - high * sines[k];
        head[k + half] = high * cosines[k] + low * sines[k];
    }
}

/* One head of a node: queries are normed and rotated in place, keys and values go to the cache. */
static void place_head(const Model *model, const Layer *layer, const Node *node, int64_t offset, int head,
                       float *vector) {
    const int size = model->head_dim, keys = head - model->num_heads, values = keys - model->num_kv_heads;
    const float *gain = keys < 0 ? layer->query_norm : layer->key_norm;
    if (values < 0) {
        if (gain) norm_head(vector, gain, size, model->eps);
        rotate_head(vector, model->rope + (int64_t)node->position * size, size / 2);
    }
    if (keys < 0) return;
    float *cache = values < 0 ? model->keys : model->values;
    const int index = values < 0 ? keys : values;
    memcpy(cache + offset + ((int64_t)node->slot * model->num_kv_heads + index) * size, vector, size * sizeof(float));
}

INLINE int32_t slot_of(const Node *node, int key) {
    return key < node->seen ? node->slots[key] : node->tail[key - node->seen];
}

/* Eight dot products of a query with keys, each summed alike. */
INLINE void eight_dots(const float *query, const float *const keys[8], int size, float scale, float *out) {
    float32x4_t sums[8];
    UNROLL for (int i = 0; i < 8; i++) sums[i] = vdupq_n_f32(0.0f);
    for (int k = 0; k < size; k += 4) {
        const float32x4_t part = vld1q_f32(query + k);
        UNROLL for (int i = 0; i < 8; i++) sums[i] = vfmaq_f32(sums[i], part, vld1q_f32(keys[i] + k));
    }
    UNROLL for (int i = 0; i < 8; i += 4) {
        const float32x4_t low = vpaddq_f32(sums[i], sums[i + 1]), high = vpaddq_f32(sums[i + 2], sums[i + 3]);
        vst1q_f32(out + i, vmulq_n_f32(vpaddq_f32(low, high), scale));
    }
}

/* Scores -> exponentials; returns 1 / their sum. Scores come in whole eights, those behind the last key -inf. */
static float softmax(float *scores, int padded) {
    float32x4_t peak = vdupq_n_f32(-INFINITY), sum = vdupq_n_f32(0.0f);
    for (int key = 0; key < padded; key += 4) peak = vmaxq_f32(peak, vld1q_f32(scores + key));
    const float32x4_t top = vdupq_n_f32(vmaxvq_f32(peak));
    for (int key = 0; key < padded; key += 4) {
        const float32x4_t part = exponential(vsubq_f32(vld1q_f32(scores + key), top));
        vst1q_f32(scores + key, part);
        sum = vaddq_f32(sum, part);
    }
    return 1.0f / vaddvq_f32(sum);
}

/* Columns of the values of some keys, weighed and added to out in the order of the keys. `width` is a constant where
 * this is inlined. */
INLINE void mix_columns(const float *values, int64_t stride, const Node *node, Share keys, const float *weights,
                        int width, float *out) {
    float32x4_t sums[16];
    UNROLL for (int i = 0; i < width / 4; i++) sums[i] = vld1q_f32(out + 4 * i);
    for (int64_t key = keys.start; key < keys.end; key++) {
        const float *value = values + slot_of(node, key) * stride;
        __asm__("" : "+r"(value)); /* one address, not sixteen */
        UNROLL for (int i = 0; i < width / 4; i++)
            sums[i] = vfmaq_n_f32(sums[i], vld1q_f32(value + 4 * i), weights[key]);
    }
    UNROLL for (int i = 0; i < width / 4; i++) vst1q_f32(out + 4 * i, sums[i]);
}

/* One node and the query heads that share a key head: a step goes over some of the keys. */
typedef struct {
    const Node *node;
    const float *queries; /* [group, head_dim] */
    float *scores;        /* [group, padded] */
    float *out;           /* [group, head_dim] */
    int32_t keys, padded;
} Attending;

INLINE Share keys_in(const Attending *one, int64_t start) {
    return (Share){start, one->keys - start < KEY_STEP ? one->keys : start + KEY_STEP};
}

NOT_INLINE void score_step(const Attending *one, const float *cached, int64_t stride, int64_t start, int group,
                           int size) {
    const float scale = 1.0f / sqrtf((float)size);
    const Share keys = keys_in(one, start);
    for (int64_t key = keys.start; key < keys.end; key += 8) {
        const float *eight[8];
        for (int i = 0; i < 8; i++) {
            const int near = key + i < one->keys ? key + i : one->keys - 1;
            eight[i] = cached + slot_of(one->node, near) * stride;
        }
        for (int head = 0; head < group; head++)
            eight_dots(one->queries + head * size, eight, size, scale, one->scores + (int64_t)head * one->padded + key);
    }
}

NOT_INLINE void mix_step(const Attending *one, const float *cached, int64_t stride, int64_t start, int group,
                         int size) {
    const Share keys = keys_in(one, start);
    for (int head = 0; head < group; head++) {
        const float *weights = one->scores + (int64_t)head * one->padded;
        float *out = one->out + head * size;
        int column = 0;
        for (; column + 64 <= size; column += 64)
            mix_columns(cached + column, stride, one->node, keys, weights, 64, out + column);
        for (; column < size; column += 16)
            mix_columns(cached + column, stride, one->node, keys, weights, 16, out + column);
    }
}

/* Scores -> weights that add up to one; out begins at zero. */
static void weigh(const Attending *one, int group, int size) {
    for (int head = 0; head < group; head++) {
        float *weights = one->scores + (int64_t)head * one->padded;
        for (int key = one->keys; key < one->padded; key++) weights[key] = -INFINITY;
        const float inverse = softmax(weights, one->padded);
        for (int key = 0; key < one->padded; key += 4)
            vst1q_f32(weights + key, vmulq_n_f32(vld1q_f32(weights + key), inverse));
    }
    memset(one->out, 0, (size_t)group * size * sizeof(float));
}

/* A few nodes over one key head, some keys at a time: what one node has read of the cache is near for the next. */
static void attend_nodes(const Model *model, int64_t offset, Attending *nodes, int count, int kv_head) {
    const int size = model->head_dim, group = model->num_heads / model->num_kv_heads;
    const int64_t stride = (int64_t)model->num_kv_heads * size, place = offset + (int64_t)kv_head * size;
    int64_t longest = 0;
    for (int i = 0; i < count; i++) longest = nodes[i].keys > longest ? nodes[i].keys : longest;
    for (int64_t start = 0; start < longest; start += KEY_STEP)
        for (int i = 0; i < count; i++) score_step(nodes + i, model->keys + place, stride, start, group, size);
    for (int i = 0; i < count; i++) weigh(nodes + i, group, size);
    for (int64_t start = 0; start < longest; start += KEY_STEP)
        for (int i = 0; i < count; i++) mix_step(nodes + i, model->values + place, stride, start, group, size);
}

/* --- layers ----------------------------------------------------------------------------------------------------- */

/* Everything a pass writes between its layers. */
typedef struct {
    Node *nodes, *row; /* those that are computed; and all of one row */
    int32_t *slots, *paths;
    float *qkv, *attended, *both, *scores;
    uint8_t *blocks;
    Input x, wide;
    int64_t score_room, block_room; /* of a thread */
} Work;

typedef struct {
    int64_t slots, paths, row, keys; /* all slots, all paths off the first branch, the longest row, the most keys */
} Room;

static int is_chain(const int32_t *parents, int count) {
    for (int node = 0; node < count; node++)
        if (parents[node] != node - 1) return 0;
    return 1;
}

static Room room_of(const Batch *batch) {
    Room room = {0, 0, 0, 0};
    const int32_t *parents = batch->parents;
    for (int row = 0; row < batch->num_rows; row++) {
        const int64_t count = batch->counts[row], keys = batch->lengths[row] + count;
        room.slots += keys;
        if (!is_chain(parents, count)) room.paths += count * count;
        if (count > room.row) room.row = count;
        if (keys > room.keys) room.keys = keys;
        parents += count;
    }
    return room;
}

/* Where the keys of every node of a row are. A node off the first branch has its ancestors as a tail. */
static void fill_row(Node *nodes, const int32_t *parents, int count, int length, const int32_t *slots,
                     int32_t **path) {
    for (int index = 0; index < count; index++) {
        const int parent = parents[index], depth = parent < 0 ? 0 : nodes[parent].position - length + 1;
        const int straight = parent == index - 1 && (parent < 0 || nodes[parent].tail_count == 0);
        Node node = {slots, *path, length + index + 1, 0, length + depth, slots[length + index]};
        if (!straight) {
            node.seen = length;
            node.tail_count = depth + 1;
            for (int at = index, place = depth; at >= 0; at = parents[at], place--)
                (*path)[place] = slots[length + at];
            *path += depth + 1;
        }
        nodes[index] = node;
    }
}

static void fill_nodes(const Batch *batch, int block_size, Work *work) {
    const int32_t *parents = batch->parents, *table = batch->tables;
    int32_t *slots = work->slots, *path = work->paths;
    Node *node = work->nodes;
    for (int row = 0; row < batch->num_rows; row++) {
        const int count = batch->counts[row], length = batch->lengths[row], skip = batch->skips[row];
        for (int key = 0; key < length + count; key++)
            slots[key] = table[key / block_size] * block_size + key % block_size;
        fill_row(work->row, parents, count, length, slots, &path);
        memcpy(node, work->row + skip, (count - skip) * sizeof(Node));
        node += count - skip;
        parents += count;
        slots += length + count;
        table += (length + count + block_size - 1) / block_size;
    }
}

static int reserve_work(const Model *model, const Batch *batch, Work *work) {
    const Room room = room_of(batch);
    const int64_t nodes = batch->num_nodes, query_size = (int64_t)model->num_heads * model->head_dim;
    const int64_t heads = model->num_heads + 2 * model->num_kv_heads;
    const int bits = model->layers->qkv.bits;
    const int64_t inner = query_size > model->intermediate_size ? query_size : model->intermediate_size;
    work->score_room = (room.keys + 7) / 8 * 8 * (model->num_heads / model->num_kv_heads) * NODE_TILE + 16;
    work->nodes = malloc(nodes * sizeof(Node));
    work->row = malloc(room.row * sizeof(Node));
    work->slots = malloc(room.slots * sizeof(int32_t));
    work->paths = malloc((room.paths + 1) * sizeof(int32_t));
    work->qkv = malloc(nodes * heads * model->head_dim * sizeof(float));
    work->attended = malloc(nodes * query_size * sizeof(float));
    work->both = malloc(nodes * 2 * model->intermediate_size * sizeof(float));
    work->scores = malloc(work->score_room * model->num_threads * sizeof(float));
    work->block_room = widened_bytes(inner > model->hidden_size ? inner : model->hidden_size);
    work->blocks = malloc(work->block_room * model->num_threads);
    const int x_fits = reserve_input(&work->x, nodes * model->hidden_size, bits);
    const int wide_fits = reserve_input(&work->wide, nodes * inner, bits);
    return x_fits && wide_fits && work->nodes && work->row && work->slots && work->paths && work->qkv &&
           work->attended && work->both && work->scores && work->blocks;
}

static void release_work(Work *work) {
    free(work->nodes);
    free(work->row);
    free(work->slots);
    free(work->paths);
    free(work->qkv);
    free(work->attended);
    free(work->both);
    free(work->scores);
    free(work->blocks);
    release_input(&work->x);
    release_input(&work->wide);
}

static void place_heads(const Model *model, const Layer *layer, int64_t offset, int64_t nodes, const Work *work,
                        int thread, int threads) {
    const int heads = model->num_heads + 2 * model->num_kv_heads;
    const Share share = share_of(nodes * heads, thread, threads);
    for (int64_t item = share.start; item < share.end; item++)
        place_head(model, layer, work->nodes + item / heads, offset, item % heads, work->qkv + item * model->head_dim);
}

/* Every thread takes nodes from the whole pass: later nodes of a prompt have more keys. */
static void attend(const Model *model, int64_t offset, int64_t nodes, const Work *work, int thread, int threads) {
    const int size = model->head_dim, kv_heads = model->num_kv_heads, group = model->num_heads / kv_heads;
    const int64_t heads = model->num_heads + 2 * kv_heads, tiles = (nodes + NODE_TILE - 1) / NODE_TILE;
    for (int64_t item = thread; item < tiles * kv_heads; item += threads) {
        const int64_t first = item / kv_heads * NODE_TILE, kv_head = item % kv_heads;
        const int count = nodes - first < NODE_TILE ? nodes - first : NODE_TILE;
        float *scores = work->scores + work->score_room * thread;
        Attending tile[NODE_TILE];
        for (int i = 0; i < count; i++) {
            const Node *node = work->nodes + first + i;
            const int keys = node->seen + node->tail_count, padded = (keys + 7) / 8 * 8;
            const float *queries = work->qkv + ((first + i) * heads + kv_head * group) * size;
            float *out = work->attended + ((first + i) * model->num_heads + kv_head * group) * size;
            tile[i] = (Attending){node, queries, scores, out, keys, padded};
            scores += (int64_t)padded * group;
        }
        attend_nodes(model, offset, tile, count, kv_head);
    }
}

static void run_layer(const Model *model, int index, int64_t nodes, const Work *work, float *hidden,
                      Barrier *barrier, int thread, int threads) {
    const Layer *layer = model->layers + index;
    const int64_t offset = model->layer_stride * index, query_size = (int64_t)model->num_heads * model->head_dim;
    const Share hidden_groups = share_of(nodes * model->hidden_size / GROUP, thread, threads);
    const Share query_groups = share_of(nodes * query_size / GROUP, thread, threads);
    const Share inner_groups = share_of(nodes * model->intermediate_size / GROUP, thread, threads);
    uint8_t *room = work->blocks + work->block_room * thread;
    norm_groups(hidden, layer->attention_norm, model->hidden_size, model->eps, work->x, hidden_groups);
    meet(barrier, threads);
    product(&layer->qkv, work->x, nodes, layer->qkv_bias, 0, work->qkv, room, thread, threads);
    meet(barrier, threads);
    place_heads(model, layer, offset, nodes, work, thread, threads);
    meet(barrier, threads);
    attend(model, offset, nodes, work, thread, threads);
    meet(barrier, threads);
    round_groups(work->attended, work->wide, query_groups);
    meet(barrier, threads);
    product(&layer->output, work->wide, nodes, layer->output_bias, 1, hidden, room, thread, threads);
    meet(barrier, threads);
    norm_groups(hidden, layer->mlp_norm, model->hidden_size, model->eps, work->x, hidden_groups);
    meet(barrier, threads);
    product(&layer->gate_up, work->x, nodes, 0, 0, work->both, room, thread, threads);
    meet(barrier, threads);
    gate_groups(work->both, model->intermediate_size, work->wide, inner_groups);
    meet(barrier, threads);
    product(&layer->down, work->wide, nodes, 0, 1, hidden, room, thread, threads);
    meet(barrier, threads);
}

typedef struct {
    const Model *model;
    float *hidden;
    Work work;
    Barrier barrier;
    int32_t nodes, first, last;
} LayersJob;

static void layers_share(void *data) {
    LayersJob *job = data;
    const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    for (int index = job->first; index < job->last; index++)
        run_layer(job->model, index, job->nodes, &job->work, job->hidden, &job->barrier, thread, threads);
}

/* hidden [nodes, hidden_size] through layers first to last, in place. Returns 0, or -1 where memory is short. */
int paceline_run_layers(const Model *model, const Batch *batch, float *hidden, int32_t first, int32_t last) {
    LayersJob job = {.model = model, .hidden = hidden, .nodes = batch->num_nodes, .first = first, .last = last};
    const int fits = reserve_work(model, batch, &job.work);
    if (fits) {
        fill_nodes(batch, model->block_size, &job.work);
        GOMP_parallel(layers_share, &job, model->num_threads, 0);
    }
    release_work(&job.work);
    return fits ? 0 : -1;
}
