/* Passes over blocked weights (int4, int8, those of GGUF files), and over float32 ones: whole layers in one call, on ARM
 * CPUs with dot products and on x86-64 with AVX2 or more.
 *
 * What lies between the products of a small model costs more than the products when each step is a torch operation.
 * Here a layer is ten loops with a barrier between them, and all layers of a pass are one parallel region.
 *
 * A token's numbers never depend on what else is in the pass: a product sums the groups of a row in order, attention
 * sums keys in the order of their positions, and threads share out results, never sums.
 *
 * One source is made of these files, in this order; those named twice are for one machine each:
 *   cpu_vectors_neon.c, cpu_vectors_x86.c     vectors of floats: nothing else below names an instruction but
 *   cpu_kernels.c                             structures, threads, rounding, norms
 *   cpu_products_neon.c, cpu_products_x86.c   some rows of a weight times some tokens
 *   cpu_products.c, cpu_layers.c              products, attention and layers
 *   cpu_gguf.c, cpu_block.c, cpu_selector.c   what files, block drafters and candidate selectors need
 *
 * layers/cpu_kernels.py mirrors the structures below. Compiled at load with the system's compiler
 * (device/host_compiler.py). Threads come from the OpenMP runtime that torch has loaded: both share one pool.
 */

#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { GROUP = 32, BLOCK_ROWS = 8, CHUNK = 64, SCALE_BYTES = 2 * BLOCK_ROWS };
/* Of attention: a step of keys fits the first cache; passes of few nodes read it as threads share it out. */
enum { NODE_TILE = 4, KEY_STEP = 64, FEW_NODES = 16 };

/* How a weight is stored: a matrix of floats, or blocks of eight rows, group after group of 32 columns. */
enum Kind { FLOAT32, INT4, INT8, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, Q4_K, Q5_K, Q6_K, IQ4_XS, Q3_K, Q2_K };

/* What is before the weights of a group: bfloat16 or half-precision scales, with a minimum or without. SUPER ones are
 * small integers: every eight groups begin with the scales that they are multiplied by. Those of SIXTEENS are for half
 * of a group each; in SUPER_MIN_SIXTEENS a byte has a scale in its lower four bits and a minimum in its upper ones. */
enum Header { BFLOATS, HALVES, HALVES_MIN, SUPER_MIN, SUPER_SIGNED, SUPER_SIXTEENS, SUPER_MIN_SIXTEENS };

/* The weights of a group: signed integers of so many bits, or places in a table of sixteen values. */
enum Values { TWO, THREE, FOUR, TABLE, FIVE, SIX, EIGHT };

enum { SUPER_GROUPS = 8, NIBBLE_BYTES = 128, TWO_BYTES = 64 };

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
            relax();
        else
            sched_yield();
    }
}

/* --- kinds of weights ------------------------------------------------------------------------------------------- */

static const struct {
    uint8_t header, values;
} KINDS[] = {
    [INT4] = {BFLOATS, FOUR},
    [INT8] = {BFLOATS, EIGHT},
    [Q4_0] = {HALVES, FOUR},
    [Q4_1] = {HALVES_MIN, FOUR},
    [Q5_0] = {HALVES, FIVE},
    [Q5_1] = {HALVES_MIN, FIVE},
    [Q8_0] = {HALVES, EIGHT},
    [IQ4_NL] = {HALVES, TABLE},
    [Q4_K] = {SUPER_MIN, FOUR},
    [Q5_K] = {SUPER_MIN, FIVE},
    [Q6_K] = {SUPER_SIXTEENS, SIX},
    [IQ4_XS] = {SUPER_SIGNED, TABLE},
    [Q3_K] = {SUPER_SIXTEENS, THREE},
    [Q2_K] = {SUPER_MIN_SIXTEENS, TWO},
};

INLINE int header_of(int kind) { return KINDS[kind].header; }
INLINE int values_of(int kind) { return KINDS[kind].values; }

INLINE int has_min(int header) { return header == HALVES_MIN || header == SUPER_MIN || header == SUPER_MIN_SIXTEENS; }
INLINE int has_sixteens(int header) { return header == SUPER_SIXTEENS || header == SUPER_MIN_SIXTEENS; }
INLINE int is_super(int header) { return header >= SUPER_MIN; }
INLINE int super_bytes(int header) { return !is_super(header) ? 0 : has_min(header) ? 2 * SCALE_BYTES : SCALE_BYTES; }

INLINE int header_bytes(int header) {
    return header == HALVES_MIN ? 2 * SCALE_BYTES : header == SUPER_SIGNED ? BLOCK_ROWS : SCALE_BYTES;
}

INLINE int value_bytes(int values) {
    switch (values) {
    case TWO: return TWO_BYTES;
    case THREE: return TWO_BYTES + 32;
    case FIVE: return NIBBLE_BYTES + 32;
    case SIX: return NIBBLE_BYTES + TWO_BYTES;
    case EIGHT: return 256;
    default: return NIBBLE_BYTES;
    }
}

/* Bytes of a block of eight rows. */
static size_t rows_bytes(int header, int values, int columns) {
    const size_t groups = columns / GROUP, supers = is_super(header) ? groups / SUPER_GROUPS : 0;
    return supers * super_bytes(header) + groups * (header_bytes(header) + value_bytes(values));
}

static size_t block_bytes(const Weight *weight) {
    return rows_bytes(header_of(weight->kind), values_of(weight->kind), weight->columns);
}

int64_t paceline_block_bytes(int32_t kind, int32_t columns) {
    return rows_bytes(header_of(kind), values_of(kind), columns);
}

/* Values of IQ4_NL and IQ4_XS. */
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
    const int quad = column / 4, place = row / 4 * 16 + row % 4 * 4 + column % 4, second = column / 16 * 32;
    if (values == EIGHT) return (int8_t)weights[quad * 32 + place];
    const int two = weights[second + place] >> quad % 4 * 2 & 3;
    if (values == TWO) return (two ^ 2) - 2;
    if (values == THREE) return ((two | (weights[TWO_BYTES + place] >> quad & 1) << 2) ^ 4) - 4;
    const int both = weights[quad % 4 * 32 + place], nibble = column < 16 ? both & 15 : both >> 4;
    const uint8_t *upper = weights + NIBBLE_BYTES + place;
    if (values == TABLE) return TABLE_VALUES[nibble];
    if (values == FIVE) return ((nibble | (*upper >> quad & 1) << 4) ^ 16) - 16;
    if (values == SIX) return ((nibble | (upper[second] >> quad % 4 * 2 & 3) << 4) ^ 32) - 32;
    return (nibble ^ 8) - 8;
}

/* 32 columns of a row in floating point, by the same operations as the file format defines. */
static void unpack_group(int header, int values, const uint8_t *super, const uint8_t *group, int row, float *out) {
    const uint8_t *weights = group + header_bytes(header);
    const int zero = !has_min(header) ? 0 : values == TWO ? 2 : values == FOUR ? 8 : 16;
    const float outer = is_super(header) ? half(super + 2 * row) : 1.0f;
    const float outer_least = is_super(header) && has_min(header) ? half(super + SCALE_BYTES + 2 * row) : 1.0f;
    float scale = header == BFLOATS ? bfloat(group + 2 * row) : half(group + 2 * row), least = 0.0f;
    if (header == HALVES_MIN) least = half(group + SCALE_BYTES + 2 * row);
    if (header == SUPER_MIN) scale = outer * group[row], least = -(outer_least * group[BLOCK_ROWS + row]);
    if (header == SUPER_SIGNED) scale = outer * (int8_t)group[row];
    for (int column = 0; column < GROUP; column++) {
        const uint8_t *own = group + column / 16 * BLOCK_ROWS + row;
        if (header == SUPER_SIXTEENS) scale = outer * (int8_t)*own;
        if (header == SUPER_MIN_SIXTEENS) scale = outer * (*own & 15), least = -(outer_least * (*own >> 4));
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

/* All that a product on x86-64 reads of a token's group, so that a token is one address. whole, halves: -8 times the sum of
 * the values, and of each half of them, where dot products with unsigned weights begin. */
typedef struct {
    int8_t values[GROUP];
    float scale, sum;
    int32_t whole, halves[2];
} InputGroup;

/* Input, where every 32 values of a token share a scale, and their sum is kept for weights with a minimum; and plain,
 * for weights in floating point. */
typedef struct {
    int8_t *values;
    float *scales, *sums, *plain;
    InputGroup *groups;
} Input;

static int needs_of(const Linear *linear) {
    int needs = 0;
    for (int piece = 0; piece < linear->count; piece++) {
        const int kind = linear->pieces[piece].kind;
        needs |= kind == FLOAT32 ? PLAIN : has_min(header_of(kind)) ? ROUNDED | SUMS : ROUNDED;
    }
    return needs;
}

INLINE void round_group(const Floats x[GROUP / WIDTH], int8_t *values, float *scale) {
    const float largest = largest_of_group(x);
    round_to_bytes(x, largest > 0.0f ? 127.0f / largest : 0.0f, values);
    *scale = largest / 127.0f;
}

INLINE void put_group(const Floats x[GROUP / WIDTH], Input out, int64_t group) {
    int8_t *values = out.values + group * GROUP;
    if (out.values) round_group(x, values, out.scales + group);
    if (out.sums || (KEEPS_GROUPS && out.groups)) {
        const int first = sum_of_sixteen(values), second = sum_of_sixteen(values + 16);
        const float sum = out.scales[group] * (first + second);
        if (out.sums) out.sums[group] = sum;
        if (KEEPS_GROUPS && out.groups) {
            InputGroup *own = out.groups + group;
            memcpy(own->values, values, GROUP);
            own->scale = out.scales[group], own->sum = sum;
            own->whole = -8 * (first + second), own->halves[0] = -8 * first, own->halves[1] = -8 * second;
        }
    }
    if (!out.plain) return;
    for (int i = 0; i < GROUP / WIDTH; i++) store(out.plain + group * GROUP + WIDTH * i, x[i]);
}

static void round_groups(const float *x, Input out, Share groups) {
    for (int64_t group = groups.start; group < groups.end; group++) {
        Floats part[GROUP / WIDTH];
        for (int i = 0; i < GROUP / WIDTH; i++) part[i] = load(x + group * GROUP + WIDTH * i);
        put_group(part, out, group);
    }
}

/* 1 / root mean square of a vector whose size is a multiple of 16. */
static float inverse_rms(const float *x, int size, float eps) {
    Floats sums[16 / WIDTH];
    UNROLL for (int i = 0; i < 16 / WIDTH; i++) sums[i] = spread(0.0f);
    for (int k = 0; k < size; k += 16)
        for (int i = 0; i < 16 / WIDTH; i++) {
            const Floats part = load(x + k + WIDTH * i);
            sums[i] = fused(sums[i], part, part);
        }
    UNROLL for (int count = 8 / WIDTH; count > 0; count /= 2) /* neighbours, then their neighbours */
        UNROLL for (int i = 0; i < count; i++) sums[i] = sums[2 * i] + sums[2 * i + 1];
    return 1.0f / sqrtf(sum_of(sums[0]) / size + eps);
}

static void norm_groups(const float *x, const float *gain, int size, float eps, Input out, Share groups) {
    const int per_node = size / GROUP;
    int64_t last = -1;
    float scale = 0.0f;
    for (int64_t group = groups.start; group < groups.end; group++) {
        const int64_t node = group / per_node;
        const float *weights = gain + group % per_node * GROUP;
        Floats part[GROUP / WIDTH];
        if (node != last) scale = inverse_rms(x + node * size, size, eps);
        last = node;
        for (int i = 0; i < GROUP / WIDTH; i++)
            part[i] = load(x + group * GROUP + WIDTH * i) * spread(scale) * load(weights + WIDTH * i);
        put_group(part, out, group);
    }
}

/* --- exponentials ----------------------------------------------------------------------------------------------- */

/* e to the power of x, to about one unit in the last place; 0 below -87. */
INLINE Floats exponential(Floats x) {
    const Floats bounded = highest(spread(-87.0f), lowest(spread(88.0f), x)); /* in this order, what is no number stays */
    const Floats turns = nearest(bounded * spread(1.44269504f));
    Floats rest = fused_minus(bounded, turns, spread(0.693145752f));
    rest = fused_minus(rest, turns, spread(1.42860677e-6f));
    Floats sum = spread(1.0f / 5040.0f);
    sum = fused(spread(1.0f / 720.0f), sum, rest);
    sum = fused(spread(1.0f / 120.0f), sum, rest);
    sum = fused(spread(1.0f / 24.0f), sum, rest);
    sum = fused(spread(1.0f / 6.0f), sum, rest);
    sum = fused(spread(0.5f), sum, rest);
    sum = fused(spread(1.0f), sum, rest);
    sum = fused(spread(1.0f), sum, rest);
    return zero_below(sum * power_of_two(turns), x, -87.0f);
}

/* silu(gate) * up of gate and up side by side. */
static void gate_groups(const float *both, int size, Input out, Share groups) {
    const int per_node = size / GROUP;
    for (int64_t group = groups.start; group < groups.end; group++) {
        const float *gate = both + group / per_node * 2 * size + group % per_node * GROUP, *up = gate + size;
        Floats part[GROUP / WIDTH];
        for (int i = 0; i < GROUP / WIDTH; i++) {
            const Floats x = load(gate + WIDTH * i);
            part[i] = x / (spread(1.0f) + exponential(-x)) * load(up + WIDTH * i);
        }
        put_group(part, out, group);
    }
}

/* --- what a product is given ------------------------------------------------------------------------------------ */

/* Some rows of a weight, times some tokens. blocks: those multiplied side by side. `stride`: from a token's outputs to the
 * next one's. steps: what the machine's products multiply a weight's integers by (`steps_of`). */
typedef struct {
    const Weight *weight;
    const uint8_t *blocks[SIDE_BLOCKS];
    Input x;
    Share tokens;
    const float *bias;
    float *out;
    int64_t stride;
    float steps;
    int32_t first, adds;
} Rows;
