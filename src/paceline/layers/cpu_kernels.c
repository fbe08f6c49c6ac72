/* Passes over blocked weights (int4, int8, those of GGUF files), and over float32 ones, on ARM CPUs with NEON dot
 * products: whole layers in one call.
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

/* How a weight is stored: a matrix of floats, or blocks of eight rows, group after group of 32 columns. */
enum Kind { FLOAT32, INT4, INT8, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, Q4_K, Q5_K, Q6_K };

/* What is before the weights of a group: bfloat16 or half-precision scales, with a minimum or without. SUPER ones are
 * small integers: every eight groups begin with the scales that they are multiplied by. */
enum Header { BFLOATS, HALVES, HALVES_MIN, SUPER_MIN, SUPER_SIXTEENS };

/* The weights of a group: signed integers of so many bits, or places in a table of sixteen values. */
enum Values { FOUR, TABLE, FIVE, SIX, EIGHT };

enum { SUPER_GROUPS = 8, NIBBLE_BYTES = 128 };

typedef struct {
    const uint8_t *blocks;
    int32_t kind, rows, columns, unused;
} Weight;

/* Weights with the same input, joined by rows. */
typedef struct {
    Weight pieces[3];
    int32_t count, rows;
} Linear;

typedef struct {
    const float *attention_norm, *qkv_bias, *query_norm, *key_norm, *output_bias, *mlp_norm;
    Linear qkv, output, gate_up, down;
} Layer;

typedef struct {
    const Layer *layers;
    const float *rope; /* [positions, 2, head_dim / 2] */
    float *keys, *values;
    int64_t layer_stride, slot_stride, head_stride; /* from a layer, token or key head of the cache to the next */
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

/* --- kinds of weights ------------------------------------------------------------------------------------------- */

INLINE int header_of(int kind) {
    switch (kind) {
    case INT4:
    case INT8: return BFLOATS;
    case Q4_1:
    case Q5_1: return HALVES_MIN;
    case Q4_K:
    case Q5_K: return SUPER_MIN;
    case Q6_K: return SUPER_SIXTEENS;
    default: return HALVES;
    }
}

INLINE int values_of(int kind) {
    switch (kind) {
    case INT8:
    case Q8_0: return EIGHT;
    case IQ4_NL: return TABLE;
    case Q5_0:
    case Q5_1:
    case Q5_K: return FIVE;
    case Q6_K: return SIX;
    default: return FOUR;
    }
}

INLINE int has_min(int header) { return header == HALVES_MIN || header == SUPER_MIN; }
INLINE int is_super(int header) { return header == SUPER_MIN || header == SUPER_SIXTEENS; }
INLINE int super_bytes(int header) { return header == SUPER_MIN ? 32 : header == SUPER_SIXTEENS ? 16 : 0; }
INLINE int header_bytes(int header) { return header == HALVES_MIN ? 2 * SCALE_BYTES : SCALE_BYTES; }

INLINE int value_bytes(int values) {
    return values == EIGHT ? 256 : values == SIX ? 192 : values == FIVE ? 160 : NIBBLE_BYTES;
}

/* Bytes of a block of eight rows. */
static size_t rows_bytes(int header, int values, int columns) {
    const size_t groups = columns / GROUP, supers = is_super(header) ? groups / SUPER_GROUPS : 0;
    return supers * super_bytes(header) + groups * (header_bytes(header) + value_bytes(values));
}

static size_t block_bytes(const Weight *weight) {
    return rows_bytes(header_of(weight->kind), values_of(weight->kind), weight->columns);
}

/* Values of IQ4_NL. */
static const int8_t TABLE_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

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
    const int rows = job->shape.rows, columns = job->shape.columns, bits = job->shape.kind == INT4 ? 4 : 8;
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
    PackJob job = {weight, {out, bits == 4 ? INT4 : INT8, rows, columns, 0}, out};
    GOMP_parallel(pack_share, &job, threads, 0);
}

static float half(const uint8_t *place) {
    __fp16 value;
    memcpy(&value, place, 2);
    return value;
}

static float bfloat(const uint8_t *place) {
    uint16_t bits;
    memcpy(&bits, place, 2);
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

/* The integer of a row of a block at one of the 32 columns of a group. */
static int value_at(int values, const uint8_t *weights, int row, int column) {
    const int quad = column / 4, half_block = row / 4, lane = (row % 4) * 4 + column % 4;
    if (values == EIGHT) return (int8_t)weights[(quad * 2 + half_block) * 16 + lane];
    const int both = weights[(quad % 4 * 2 + half_block) * 16 + lane], nibble = column < 16 ? both & 15 : both >> 4;
    const uint8_t *upper = weights + NIBBLE_BYTES + half_block * 16 + lane;
    if (values == TABLE) return TABLE_VALUES[nibble];
    if (values == FIVE) return ((nibble | (*upper >> quad & 1) << 4) ^ 16) - 16;
    if (values == SIX) return ((nibble | (upper[column < 16 ? 0 : 32] >> quad % 4 * 2 & 3) << 4) ^ 32) - 32;
    return (nibble ^ 8) - 8;
}

/* 32 columns of a row in floating point, by the same operations as the file format defines. */
static void unpack_group(int header, int values, const uint8_t *super, const uint8_t *group, int row, float *out) {
    const uint8_t *weights = group + header_bytes(header);
    const int zero = !has_min(header) ? 0 : values == FOUR ? 8 : 16;
    const float outer = is_super(header) ? half(super + 2 * row) : 1.0f;
    float scale = header == BFLOATS ? bfloat(group + 2 * row) : half(group + 2 * row), least = 0.0f;
    if (header == HALVES_MIN) least = half(group + SCALE_BYTES + 2 * row);
    if (header == SUPER_MIN) {
        scale = outer * group[row];
        least = -(half(super + SCALE_BYTES + 2 * row) * group[BLOCK_ROWS + row]);
    }
    for (int column = 0; column < GROUP; column++) {
        if (header == SUPER_SIXTEENS) scale = outer * (int8_t)group[column / 16 * BLOCK_ROWS + row];
        const float product = scale * (value_at(values, weights, row, column) + zero);
        out[column] = has_min(header) ? product + least : product;
    }
}

static void unpack_row(const Weight *weight, int64_t row, float *out) {
    const int header = header_of(weight->kind), values = values_of(weight->kind), columns = weight->columns;
    const uint8_t *place = weight->blocks + row / BLOCK_ROWS * block_bytes(weight), *super = place;
    if (weight->kind == FLOAT32) {
        memcpy(out, weight->blocks + row * columns * sizeof(float), columns * sizeof(float));
        return;
    }
    for (int group = 0; group < columns / GROUP; group++) {
        if (is_super(header) && group % SUPER_GROUPS == 0) {
            super = place;
            place += super_bytes(header);
        }
        unpack_group(header, values, super, place, row % BLOCK_ROWS, out + group * GROUP);
        place += header_bytes(header) + value_bytes(values);
    }
}

/* The weights of some rows as they are multiplied, in floating point; rows 0: of all of them. Returns 0, or -1 for a row
 * that there is none of. */
int paceline_unpack(const Weight *weight, const int64_t *rows, int64_t count, float *out) {
    for (int64_t place = 0; place < count; place++) {
        const int64_t row = rows ? rows[place] : place;
        if (row < 0 || row >= weight->rows) return -1;
        unpack_row(weight, row, out + place * weight->columns);
    }
    return 0;
}

/* --- inputs of products ----------------------------------------------------------------------------------------- */

/* What the weights of a product, or of all products of a pass, ask of their input. */
enum Needs { ROUNDED = 1, SUMS = 2, PLAIN = 4 };

/* Input, where every 32 values of a token share a scale, and their sum is kept for weights with a minimum; and plain,
 * for weights in floating point. */
typedef struct {
    int8_t *values;
    float *scales, *sums, *plain;
} Input;

static int needs_of(const Linear *linear) {
    int needs = 0;
    for (int piece = 0; piece < linear->count; piece++) {
        const int kind = linear->pieces[piece].kind;
        needs |= kind == FLOAT32 ? PLAIN : has_min(header_of(kind)) ? ROUNDED | SUMS : ROUNDED;
    }
    return needs;
}

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
    int8_t *values = out.values + group * GROUP;
    if (out.values) round_group(x, values, out.scales + group);
    if (out.sums) out.sums[group] = out.scales[group] * (vaddlvq_s8(vld1q_s8(values)) + vaddlvq_s8(vld1q_s8(values + 16)));
    if (!out.plain) return;
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

/* Weights of fewer than eight bits are multiplied as their upper bits in a byte: sixteen times themselves, or eight, or
 * four. */
INLINE float steps_of(int values) { return values == FOUR ? 16.0f : values == FIVE ? 8.0f : values == SIX ? 4.0f : 1.0f; }

/* Four columns of four rows: those of columns 0 to 15, and those of columns 16 to 31. `lane` is a literal. */
#define BOTH(lane) vld1q_s8(weights + (lane * 2 + half) * 16)
#define UPPER(offset) vld1q_s8(weights + NIBBLE_BYTES + offset + half * 16)
#define PLACES(lane) vreinterpretq_u8_s8(BOTH(lane))
#define FIRST(lane)                                                                                                   \
    (values == EIGHT   ? BOTH(lane)                                                                                   \
     : values == FOUR  ? vshlq_n_s8(BOTH(lane), 4)                                                                    \
     : values == TABLE ? vqtbl1q_s8(table, vandq_u8(PLACES(lane), vdupq_n_u8(15)))                                    \
     : values == FIVE  ? vsriq_n_s8(vshlq_n_s8(UPPER(0), 7 - lane), vshlq_n_s8(BOTH(lane), 4), 1)                     \
                       : vsriq_n_s8(vshlq_n_s8(UPPER(0), 6 - 2 * lane), vshlq_n_s8(BOTH(lane), 4), 2))
#define SECOND(lane)                                                                                                  \
    (values == EIGHT   ? vld1q_s8(weights + ((lane + 4) * 2 + half) * 16)                                             \
     : values == FOUR  ? vandq_s8(BOTH(lane), upper)                                                                  \
     : values == TABLE ? vqtbl1q_s8(table, vshrq_n_u8(PLACES(lane), 4))                                               \
     : values == FIVE  ? vsriq_n_s8(vshlq_n_s8(UPPER(0), 3 - lane), vandq_s8(BOTH(lane), upper), 1)                   \
                       : vsriq_n_s8(vshlq_n_s8(UPPER(32), 6 - 2 * lane), vandq_s8(BOTH(lane), upper), 2))

/* A block in the layout of eight bits, for passes that multiply by it many times. Headers stay as they are. */
INLINE void widen_rows(int header, int values, const uint8_t *block, int groups, uint8_t *out) {
    const int8x16_t upper = vdupq_n_s8((int8_t)0xf0), table = vld1q_s8(TABLE_VALUES);
    for (int group = 0; group < groups; group++) {
        const int super = is_super(header) && group % SUPER_GROUPS == 0 ? super_bytes(header) : 0;
        const int before = super + header_bytes(header);
        memcpy(out, block, before);
        const int8_t *weights = (const int8_t *)block + before;
        int8_t *wide = (int8_t *)out + before;
#define WIDEN(lane)                                                                                                   \
    vst1q_s8(wide + (lane * 2 + half) * 16, FIRST(lane));                                                             \
    vst1q_s8(wide + ((lane + 4) * 2 + half) * 16, SECOND(lane));
        for (int half = 0; half < 2; half++) {
            WIDEN(0)
            WIDEN(1)
            WIDEN(2)
            WIDEN(3)
        }
#undef WIDEN
        block += before + value_bytes(values);
        out += before + value_bytes(EIGHT);
    }
}

static void widen_block(int header, int values, const uint8_t *block, int groups, uint8_t *out) {
#define WIDEN(a_header, a_values)                                                                                     \
    if (header == a_header && values == a_values) return widen_rows(a_header, a_values, block, groups, out);
    WIDEN(BFLOATS, FOUR)
    WIDEN(HALVES, FOUR)
    WIDEN(HALVES, TABLE)
    WIDEN(HALVES, FIVE)
    WIDEN(HALVES_MIN, FOUR)
    WIDEN(HALVES_MIN, FIVE)
    WIDEN(SUPER_MIN, FOUR)
    WIDEN(SUPER_MIN, FIVE)
    WIDEN(SUPER_SIXTEENS, SIX)
#undef WIDEN
}

/* A number for each of eight rows. */
typedef struct {
    float32x4_t low, high;
} Eight;

INLINE Eight eight_bfloats(const uint8_t *place) {
    const uint16x8_t bits = vld1q_u16((const uint16_t *)place);
    return (Eight){vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16)),
                   vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(bits), 16))};
}

INLINE Eight eight_halves(const uint8_t *place) {
    const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16((const uint16_t *)place));
    return (Eight){vcvt_f32_f16(vget_low_f16(halves)), vcvt_f32_f16(vget_high_f16(halves))};
}

/* Four of sixteen bytes in the last bits of 2^23: floats without a conversion, of which the core does one in two cycles. */
INLINE float32x4_t counted(uint8x16_t bytes, int first) {
    static const uint8_t PLACES[16] = {0, 255, 255, 255, 1, 255, 255, 255, 2, 255, 255, 255, 3, 255, 255, 255};
    const uint8x16_t places = vaddq_u8(vld1q_u8(PLACES), vreinterpretq_u8_u32(vdupq_n_u32(first)));
    return vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_u8(vqtbl1q_u8(bytes, places)), vdupq_n_u32(0x4b000000)));
}

#define COUNT_FROM 8388608.0f /* 2^23 */

/* Bytes times a factor, exact but for the last rounding. offset: -2^23 · factor, which has no rounding. */
INLINE Eight bytes_times(uint8x16_t bytes, int first, Eight factor, Eight offset) {
    return (Eight){vfmaq_f32(offset.low, counted(bytes, first), factor.low),
                   vfmaq_f32(offset.high, counted(bytes, first + 4), factor.high)};
}

INLINE Eight eight_signed(int8x16_t bytes, int first) {
    const uint8x16_t raised = veorq_u8(vreinterpretq_u8_s8(bytes), vdupq_n_u8(128));
    const float32x4_t zero = vdupq_n_f32(COUNT_FROM + 128.0f);
    return (Eight){vsubq_f32(counted(raised, first), zero), vsubq_f32(counted(raised, first + 4), zero)};
}

INLINE Eight times(Eight a, Eight b) { return (Eight){vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }

INLINE Eight times_number(Eight a, float number) {
    return (Eight){vmulq_n_f32(a.low, number), vmulq_n_f32(a.high, number)};
}

/* scales · 128 + least: what a group adds for each unit of its input's sum. Its integers are stored less 8 or 16. */
INLINE Eight shifted_min(Eight scales, Eight least) {
    const float32x4_t units = vdupq_n_f32(128.0f);
    return (Eight){vfmaq_f32(least.low, scales.low, units), vfmaq_f32(least.high, scales.high, units)};
}

/* What eight groups share: the factors of their scales and minimums, which come `steps` times, and -2^23 times those. */
typedef struct {
    Eight scale, scale_offset, least, least_offset;
} Outer;

INLINE Outer read_outer(int header, const uint8_t *super, float steps) {
    const Eight none = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)};
    if (!is_super(header)) return (Outer){none, none, none, none};
    const Eight scale = eight_halves(super);
    if (header != SUPER_MIN) return (Outer){scale, none, none, none};
    const Eight least = times_number(eight_halves(super + SCALE_BYTES), -steps);
    return (Outer){scale, times_number(scale, -COUNT_FROM), least, times_number(least, -COUNT_FROM)};
}

/* Scales of a group, with those of its columns 16 to 31 where they have their own, and its minimums. */
typedef struct {
    Eight scales, second, least;
} Scales;

INLINE Scales read_scales(int header, const Outer *outer, const uint8_t *group, float steps) {
    const Eight none = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)};
    Scales read = {none, none, none};
    if (header == BFLOATS) read.scales = eight_bfloats(group);
    if (header == HALVES || header == HALVES_MIN) read.scales = eight_halves(group);
    if (header == HALVES_MIN)
        read.least = shifted_min(read.scales, times_number(eight_halves(group + SCALE_BYTES), steps));
    if (header == SUPER_MIN) {
        const uint8x16_t bytes = vld1q_u8(group);
        read.scales = bytes_times(bytes, 0, outer->scale, outer->scale_offset);
        read.least = shifted_min(read.scales, bytes_times(bytes, 8, outer->least, outer->least_offset));
    }
    if (header == SUPER_SIXTEENS) {
        const int8x16_t bytes = vld1q_s8((const int8_t *)group);
        read.scales = times(outer->scale, eight_signed(bytes, 0));
        read.second = times(outer->scale, eight_signed(bytes, 8));
    }
    return read;
}

/* 1.5 · 2^23: its last bits count integers */
#define OFFSET 12582912.0f

/* Where sums of dot products begin. It is read each time: loads are free beside dot products, copies are not. */
static const float32x4_t BEGIN = {OFFSET, OFFSET, OFFSET, OFFSET};

INLINE int32x4_t begin_dots(void) { return vreinterpretq_s32_f32(*(const volatile float32x4_t *)&BEGIN); }

INLINE void add_dots(int32x4_t dots[TILE][2], Eight rows, const float *scales, int64_t stride, int tokens,
                     float32x4_t out[TILE][2]) {
    const float32x4_t offset = vdupq_n_f32(OFFSET);
    UNROLL for (int token = 0; token < tokens; token++) {
        float scale = scales[token * stride];
        __asm__("" : "+w"(scale)); /* one lane: a copy in all lanes is one more operation */
        const float32x4_t below = vsubq_f32(vreinterpretq_f32_s32(dots[token][0]), offset);
        const float32x4_t above = vsubq_f32(vreinterpretq_f32_s32(dots[token][1]), offset);
        out[token][0] = vfmaq_f32(out[token][0], below, vmulq_n_f32(rows.low, scale));
        out[token][1] = vfmaq_f32(out[token][1], above, vmulq_n_f32(rows.high, scale));
    }
}

/* A block of eight rows times `tokens` inputs, which is a constant wherever this is inlined, as the kinds are. */
INLINE void block_product(const uint8_t *block, int groups, int header, int values, float steps, Input x, int columns,
                          int tokens, float32x4_t out[TILE][2]) {
    const int8x16_t upper = vdupq_n_s8((int8_t)0xf0), table = vld1q_s8(TABLE_VALUES);
    Outer outer = read_outer(header, block, steps);
    UNROLL for (int token = 0; token < tokens; token++) out[token][0] = out[token][1] = vdupq_n_f32(0.0f);
    for (int group = 0; group < groups; group++) {
        if (is_super(header) && group % SUPER_GROUPS == 0) {
            outer = read_outer(header, block, steps);
            block += super_bytes(header);
        }
        const int8_t *weights = (const int8_t *)block + header_bytes(header);
        int32x4_t dots[TILE][2];
        int8x16_t low[TILE], high[TILE];
        UNROLL for (int token = 0; token < tokens; token++) {
            low[token] = vld1q_s8(x.values + (int64_t)token * columns + group * GROUP);
            high[token] = vld1q_s8(x.values + (int64_t)token * columns + group * GROUP + 16);
            dots[token][0] = begin_dots(), dots[token][1] = begin_dots();
        }
#define DOT(part, input, lane)                                                                                        \
    UNROLL for (int token = 0; token < tokens; token++) dots[token][half] =                                           \
        vdotq_laneq_s32(dots[token][half], part, input[token], lane);
#define QUAD(lane)                                                                                                    \
    UNROLL for (int half = 0; half < 2; half++) {                                                                     \
        const int8x16_t first = FIRST(lane), second = SECOND(lane);                                                   \
        DOT(first, low, lane)                                                                                         \
        DOT(second, high, lane)                                                                                       \
    }
#define FIRST_QUAD(lane)                                                                                              \
    UNROLL for (int half = 0; half < 2; half++) {                                                                     \
        const int8x16_t first = FIRST(lane);                                                                          \
        DOT(first, low, lane)                                                                                         \
    }
#define SECOND_QUAD(lane)                                                                                             \
    UNROLL for (int half = 0; half < 2; half++) {                                                                     \
        const int8x16_t second = SECOND(lane);                                                                        \
        DOT(second, high, lane)                                                                                       \
    }
        const float *scales = x.scales + group, *sums = x.sums + group;
        if (header == SUPER_SIXTEENS) {
            FIRST_QUAD(0)
            FIRST_QUAD(1)
            FIRST_QUAD(2)
            FIRST_QUAD(3)
            const Scales read = read_scales(header, &outer, block, steps);
            add_dots(dots, read.scales, scales, groups, tokens, out);
            UNROLL for (int token = 0; token < tokens; token++) dots[token][0] = begin_dots(), dots[token][1] = begin_dots();
            SECOND_QUAD(0)
            SECOND_QUAD(1)
            SECOND_QUAD(2)
            SECOND_QUAD(3)
            add_dots(dots, read.second, scales, groups, tokens, out);
        } else {
            QUAD(0)
            QUAD(1)
            QUAD(2)
            QUAD(3)
            const Scales read = read_scales(header, &outer, block, steps);
            add_dots(dots, read.scales, scales, groups, tokens, out);
            if (has_min(header)) {
                UNROLL for (int token = 0; token < tokens; token++) {
                    const float sum = sums[(int64_t)token * groups];
                    out[token][0] = vfmaq_n_f32(out[token][0], read.least.low, sum);
                    out[token][1] = vfmaq_n_f32(out[token][1], read.least.high, sum);
                }
            }
        }
#undef SECOND_QUAD
#undef FIRST_QUAD
#undef QUAD
#undef DOT
        block += header_bytes(header) + value_bytes(values);
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

/* One block of rows of a weight, times some tokens. `stride`: from a token's outputs to the next one's. */
typedef struct {
    const Weight *weight;
    const uint8_t *block;
    Input x;
    Share tokens;
    const float *bias;
    float *out;
    int64_t stride;
    float steps;
    int32_t first, adds;
} Rows;

INLINE void tile_product(const Rows *rows, int header, int values, int64_t token, int tokens) {
    const Weight *weight = rows->weight;
    const int groups = weight->columns / GROUP, first = rows->first;
    const int count = weight->rows - first < BLOCK_ROWS ? weight->rows - first : BLOCK_ROWS;
    const Input x = {rows->x.values + token * weight->columns, rows->x.scales + token * groups,
                     rows->x.sums + token * groups, 0};
    const float unit = 1.0f / rows->steps;
    float32x4_t sums[TILE][2];
    block_product(rows->block, groups, header, values, rows->steps, x, weight->columns, tokens, sums);
    UNROLL for (int i = 0; i < tokens; i++) {
        store_rows(vmulq_n_f32(sums[i][0], unit), vmulq_n_f32(sums[i][1], unit), rows->bias ? rows->bias + first : 0,
                   rows->adds, rows->out + (token + i) * rows->stride + first, count);
    }
}

/* A function for each way that weights are stored, so that all its loops have constants. */
#define ROWS_PRODUCT(name, header, values)                                                                            \
    NOT_INLINE void name(const Rows *rows) {                                                                          \
        int64_t token = rows->tokens.start;                                                                           \
        for (; token + 4 <= rows->tokens.end; token += 4) tile_product(rows, header, values, token, 4);               \
        switch (rows->tokens.end - token) {                                                                           \
        case 3: return tile_product(rows, header, values, token, 3);                                                  \
        case 2: return tile_product(rows, header, values, token, 2);                                                  \
        case 1: return tile_product(rows, header, values, token, 1);                                                  \
        }                                                                                                             \
    }
ROWS_PRODUCT(bfloats_four, BFLOATS, FOUR)
ROWS_PRODUCT(bfloats_eight, BFLOATS, EIGHT)
ROWS_PRODUCT(halves_four, HALVES, FOUR)
ROWS_PRODUCT(halves_table, HALVES, TABLE)
ROWS_PRODUCT(halves_five, HALVES, FIVE)
ROWS_PRODUCT(halves_eight, HALVES, EIGHT)
ROWS_PRODUCT(halves_min_four, HALVES_MIN, FOUR)
ROWS_PRODUCT(halves_min_five, HALVES_MIN, FIVE)
ROWS_PRODUCT(halves_min_eight, HALVES_MIN, EIGHT)
ROWS_PRODUCT(super_min_four, SUPER_MIN, FOUR)
ROWS_PRODUCT(super_min_five, SUPER_MIN, FIVE)
ROWS_PRODUCT(super_min_eight, SUPER_MIN, EIGHT)
ROWS_PRODUCT(super_sixteens_six, SUPER_SIXTEENS, SIX)
ROWS_PRODUCT(super_sixteens_eight, SUPER_SIXTEENS, EIGHT)

typedef void (*RowsProduct)(const Rows *);

static const RowsProduct ROWS_PRODUCTS[5][5] = {
    /* four, table, five, six, eight */
    [BFLOATS] = {bfloats_four, 0, 0, 0, bfloats_eight},
    [HALVES] = {halves_four, halves_table, halves_five, 0, halves_eight},
    [HALVES_MIN] = {halves_min_four, 0, halves_min_five, 0, halves_min_eight},
    [SUPER_MIN] = {super_min_four, 0, super_min_five, 0, super_min_eight},
    [SUPER_SIXTEENS] = {0, 0, 0, super_sixteens_six, super_sixteens_eight},
};

/* Four rows of floats times `tokens` inputs, which is a constant wherever this is inlined. */
INLINE void plain_tile(const Weight *weight, int first, const float *x, int64_t token, int tokens, const float *bias,
                       int adds, float *out, int64_t stride) {
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
        float results[4], *place = out + (token + i) * stride + first;
        vst1q_f32(results, vpaddq_f32(vpaddq_f32(sums[i][0], sums[i][1]), vpaddq_f32(sums[i][2], sums[i][3])));
        for (int row = 0; row < rows; row++) {
            const float sum = bias ? results[row] + bias[first + row] : results[row];
            place[row] = adds ? sum + place[row] : sum;
        }
    }
}

static void plain_product(const Weight *weight, const float *x, int64_t nodes, const float *bias, int adds, float *out,
                          int64_t stride, int thread, int threads) {
    const Share fours = share_of((weight->rows + 3) / 4, thread, threads);
    for (int64_t chunk = 0; chunk < nodes; chunk += CHUNK) {
        const int64_t end = nodes - chunk < CHUNK ? nodes : chunk + CHUNK;
        for (int64_t four = fours.start; four < fours.end; four++) {
            int64_t token = chunk;
            for (; token + 4 <= end; token += 4) plain_tile(weight, four * 4, x, token, 4, bias, adds, out, stride);
            if (token + 2 <= end) {
                plain_tile(weight, four * 4, x, token, 2, bias, adds, out, stride);
                token += 2;
            }
            if (token < end) plain_tile(weight, four * 4, x, token, 1, bias, adds, out, stride);
        }
    }
}

/* Tokens above which a block is widened once instead of being unpacked for every tile. */
static int widens_above(int values) { return values == EIGHT ? CHUNK : values == FOUR ? 4 * TILE : TILE; }

/* One piece of a linear layer; `room` is the thread's own. */
static void piece_product(const Weight *weight, Input x, int64_t nodes, const float *bias, int adds, float *out,
                          int64_t stride, uint8_t *room, int thread, int threads) {
    const Share blocks = share_of((weight->rows + BLOCK_ROWS - 1) / BLOCK_ROWS, thread, threads);
    const size_t bytes = block_bytes(weight);
    const int header = header_of(weight->kind), values = values_of(weight->kind);
    Rows rows = {weight, 0, x, {0, 0}, bias, out, stride, steps_of(values), 0, adds};
    for (int64_t chunk = 0; chunk < nodes; chunk += CHUNK) {
        rows.tokens = (Share){chunk, nodes - chunk < CHUNK ? nodes : chunk + CHUNK};
        const int widens = rows.tokens.end - chunk > widens_above(values);
        const RowsProduct multiply = ROWS_PRODUCTS[header][widens ? EIGHT : values];
        for (int64_t index = blocks.start; index < blocks.end; index++) {
            rows.block = weight->blocks + index * bytes;
            rows.first = index * BLOCK_ROWS;
            if (widens) {
                widen_block(header, values, rows.block, weight->columns / GROUP, room);
                rows.block = room;
            }
            multiply(&rows);
        }
    }
}

/* out [nodes, rows] = x · weightᵀ + bias; adds: to what out holds. The thread's share of the rows; room: its own. */
static void product(const Linear *linear, Input x, int64_t nodes, const float *bias, int adds, float *out,
                    uint8_t *room, int thread, int threads) {
    int64_t start = 0;
    for (int index = 0; index < linear->count; index++) {
        const Weight *piece = linear->pieces + index;
        const float *added = bias ? bias + start : 0;
        if (piece->kind == FLOAT32)
            plain_product(piece, x.plain, nodes, added, adds, out + start, linear->rows, thread, threads);
        else
            piece_product(piece, x, nodes, added, adds, out + start, linear->rows, room, thread, threads);
        start += piece->rows;
    }
}

/* Room that each thread needs to widen a block of so many columns: with the longest headers. */
static size_t widened_bytes(int columns) {
    return (size_t)(columns / GROUP) * (4 * SCALE_BYTES + value_bytes(EIGHT));
}

/* Room for the inputs of some tokens. */
static int reserve_input(Input *out, int64_t tokens, int64_t columns, int needs) {
    const int64_t count = tokens * columns;
    *out = (Input){0, 0, 0, 0};
    if (needs & PLAIN) out->plain = malloc(count * sizeof(float));
    if (needs & ROUNDED) out->values = malloc(count);
    if (needs & ROUNDED) out->scales = malloc(count / GROUP * sizeof(float));
    if (needs & SUMS) out->sums = malloc(count / GROUP * sizeof(float));
    return (out->plain || !(needs & PLAIN)) && ((out->values && out->scales) || !(needs & ROUNDED)) &&
           (out->sums || !(needs & SUMS));
}

static void release_input(Input *input) {
    free(input->values);
    free(input->scales);
    free(input->sums);
    free(input->plain);
}

typedef struct {
    const Linear *linear;
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
    const int columns = job->linear->pieces->columns;
    const int64_t groups = (int64_t)job->nodes * columns / GROUP;
    round_groups(job->x, job->input, share_of(groups, thread, threads));
    meet(&job->barrier, threads);
    product(job->linear, job->input, job->nodes, job->bias, 0, job->out, job->room + thread * widened_bytes(columns),
            thread, threads);
    meet(&job->barrier, threads); /* here and not in OpenMP's barrier, which does not give the core away */
}

/* 0, or -1 where memory is short. */
int paceline_product(const Linear *linear, const float *x, int32_t nodes, const float *bias, float *out,
                     int32_t threads) {
    const int columns = linear->pieces->columns;
    uint8_t *room = malloc(widened_bytes(columns) * threads);
    ProductJob job = {linear, x, bias, out, {0, 0, 0, 0}, room, {0, 0}, nodes};
    const int fits = reserve_input(&job.input, nodes, columns, needs_of(linear)) && room;
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
    const int64_t place = node->slot * model->slot_stride + index * model->head_stride;
    memcpy(cache + offset + place, vector, size * sizeof(float));
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
static void attend_nodes(const Model *model, int64_t offset, Attending *nodes, int count, int kv_head, int group) {
    const int size = model->head_dim;
    const int64_t stride = model->slot_stride, place = offset + kv_head * model->head_stride;
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

/* What all products from layer first to last ask of their inputs. */
static int layers_need(const Model *model, int first, int last) {
    int needs = 0;
    for (int index = first; index < last; index++) {
        const Layer *layer = model->layers + index;
        needs |= needs_of(&layer->qkv) | needs_of(&layer->output) | needs_of(&layer->gate_up) | needs_of(&layer->down);
    }
    return needs;
}

static int reserve_work(const Model *model, const Batch *batch, int needs, Work *work) {
    const Room room = room_of(batch);
    const int64_t nodes = batch->num_nodes, query_size = (int64_t)model->num_heads * model->head_dim;
    const int64_t heads = model->num_heads + 2 * model->num_kv_heads;
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
    const int x_fits = reserve_input(&work->x, nodes, model->hidden_size, needs);
    const int wide_fits = reserve_input(&work->wide, nodes, inner, needs);
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

/* Query heads that share a key head go together; alone where that leaves a thread without work, as 3 key heads do 2. */
static int parts_of(int64_t items, int group, int threads) {
    return items % threads && items < 4 * threads ? group : 1;
}

/* Every thread takes nodes from the whole pass: later nodes of a prompt have more keys. */
static void attend(const Model *model, int64_t offset, int64_t nodes, const Work *work, int thread, int threads) {
    const int size = model->head_dim, kv_heads = model->num_kv_heads, group = model->num_heads / kv_heads;
    const int64_t heads = model->num_heads + 2 * kv_heads, tiles = (nodes + NODE_TILE - 1) / NODE_TILE;
    const int parts = parts_of(tiles * kv_heads, group, threads), together = group / parts;
    const int64_t items = tiles * kv_heads * parts, step = parts > 1 ? 1 : threads;
    const Share share = parts > 1 ? share_of(items, thread, threads) : (Share){thread, items};
    for (int64_t item = share.start; item < share.end; item += step) {
        const int64_t first = item / (kv_heads * parts) * NODE_TILE, head = item % (kv_heads * parts) * together;
        const int count = nodes - first < NODE_TILE ? nodes - first : NODE_TILE;
        float *scores = work->scores + work->score_room * thread;
        Attending tile[NODE_TILE];
        for (int i = 0; i < count; i++) {
            const Node *node = work->nodes + first + i;
            const int keys = node->seen + node->tail_count, padded = (keys + 7) / 8 * 8;
            const float *queries = work->qkv + ((first + i) * heads + head) * size;
            float *out = work->attended + ((first + i) * model->num_heads + head) * size;
            tile[i] = (Attending){node, queries, scores, out, keys, padded};
            scores += (int64_t)padded * together;
        }
        attend_nodes(model, offset, tile, count, head / group, together);
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
    const int32_t *feature_layers;
    int32_t num_features;
    float *features;
} LayersJob;

/* What enters a layer, for those who read it. Nobody writes hidden states before the first product of the layer is done. */
static void keep_feature(const LayersJob *job, int layer, int thread, int threads) {
    const int64_t size = job->model->hidden_size;
    const Share share = share_of(job->nodes, thread, threads);
    for (int feature = 0; feature < job->num_features; feature++) {
        if (job->feature_layers[feature] != layer) continue;
        for (int64_t node = share.start; node < share.end; node++)
            memcpy(job->features + (node * job->num_features + feature) * size, job->hidden + node * size,
                   size * sizeof(float));
    }
}

static void layers_share(void *data) {
    LayersJob *job = data;
    const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    for (int index = job->first; index < job->last; index++) {
        keep_feature(job, index, thread, threads);
        run_layer(job->model, index, job->nodes, &job->work, job->hidden, &job->barrier, thread, threads);
    }
    keep_feature(job, job->last, thread, threads);
}

/* hidden [nodes, hidden_size] through layers first to last, in place. features [nodes, num_features, hidden_size] takes what
   enters the feature layers; what leaves the last layer enters layer `last`. Returns 0, or -1 where memory is short. */
int paceline_run_layers(const Model *model, const Batch *batch, float *hidden, int32_t first, int32_t last,
                        const int32_t *feature_layers, int32_t num_features, float *features) {
    LayersJob job = {.model = model, .hidden = hidden, .nodes = batch->num_nodes, .first = first, .last = last,
                     .feature_layers = feature_layers, .num_features = num_features, .features = features};
    const int fits = reserve_work(model, batch, layers_need(model, first, last), &job.work);
    if (fits) {
        fill_nodes(batch, model->block_size, &job.work);
        GOMP_parallel(layers_share, &job, model->num_threads, 0);
    }
    release_work(&job.work);
    return fits ? 0 : -1;
}
