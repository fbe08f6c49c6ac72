/* Some rows of a weight times some tokens, by the dot products of ARM CPUs. Compiled behind cpu_kernels.c, as one source
 * with it; cpu_products_x86.c has the same for x86-64.
 */

/* Weights of fewer than eight bits are multiplied as their upper bits in a byte: sixteen times themselves where they have
 * four, and so on. */
INLINE float steps_of(int values) {
    switch (values) {
    case TWO: return 64.0f;
    case THREE: return 32.0f;
    case FOUR: return 16.0f;
    case FIVE: return 8.0f;
    case SIX: return 4.0f;
    default: return 1.0f;
    }
}

/* Four columns of four rows: those of columns 0 to 15, and those of columns 16 to 31. `lane` is a literal. */
#define BOTH(lane) vld1q_s8(weights + (lane * 2 + half) * 16)
#define UPPER(offset) vld1q_s8(weights + NIBBLE_BYTES + offset + half * 16)
#define TWOS(offset, lane) vshlq_n_s8(vld1q_s8(weights + offset + half * 16), 6 - 2 * lane)
#define BITS vld1q_s8(weights + TWO_BYTES + half * 16)
#define PLACES(lane) vreinterpretq_u8_s8(BOTH(lane))
#define FIRST(lane)                                                                                                   \
    (values == EIGHT   ? BOTH(lane)                                                                                   \
     : values == TWO   ? vandq_s8(TWOS(0, lane), uppermost)                                                           \
     : values == THREE ? vsriq_n_s8(vshlq_n_s8(BITS, 7 - lane), vandq_s8(TWOS(0, lane), uppermost), 1)                \
     : values == FOUR  ? vshlq_n_s8(BOTH(lane), 4)                                                                    \
     : values == TABLE ? vqtbl1q_s8(table, vandq_u8(PLACES(lane), vdupq_n_u8(15)))                                    \
     : values == FIVE  ? vsriq_n_s8(vshlq_n_s8(UPPER(0), 7 - lane), vshlq_n_s8(BOTH(lane), 4), 1)                     \
                       : vsriq_n_s8(vshlq_n_s8(UPPER(0), 6 - 2 * lane), vshlq_n_s8(BOTH(lane), 4), 2))
#define SECOND(lane)                                                                                                  \
    (values == EIGHT   ? vld1q_s8(weights + ((lane + 4) * 2 + half) * 16)                                             \
     : values == TWO   ? vandq_s8(TWOS(32, lane), uppermost)                                                          \
     : values == THREE ? vsriq_n_s8(vshlq_n_s8(BITS, 3 - lane), vandq_s8(TWOS(32, lane), uppermost), 1)               \
     : values == FOUR  ? vandq_s8(BOTH(lane), upper)                                                                  \
     : values == TABLE ? vqtbl1q_s8(table, vshrq_n_u8(PLACES(lane), 4))                                               \
     : values == FIVE  ? vsriq_n_s8(vshlq_n_s8(UPPER(0), 3 - lane), vandq_s8(BOTH(lane), upper), 1)                   \
                       : vsriq_n_s8(vshlq_n_s8(UPPER(32), 6 - 2 * lane), vandq_s8(BOTH(lane), upper), 2))

/* A block in the layout of eight bits, for passes that multiply by it many times. Headers stay as they are. */
INLINE void widen_rows(int header, int values, const uint8_t *block, int groups, uint8_t *out) {
    const int8x16_t upper = vdupq_n_s8((int8_t)0xf0), uppermost = vdupq_n_s8((int8_t)0xc0), table = vld1q_s8(TABLE_VALUES);
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
    WIDEN(SUPER_SIGNED, TABLE)
    WIDEN(SUPER_SIXTEENS, THREE)
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

/* scales · 128 + least: what a group adds for each unit of its input's sum. Its integers are stored less 2, 8 or 16. */
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
    if (!has_min(header)) return (Outer){scale, none, none, none};
    const Eight least = times_number(eight_halves(super + SCALE_BYTES), -steps);
    return (Outer){scale, times_number(scale, -COUNT_FROM), least, times_number(least, -COUNT_FROM)};
}

/* Scales of a group and its minimums, with those of its columns 16 to 31 where they have their own. */
typedef struct {
    Eight scales, second, least, second_least;
} Scales;

INLINE Scales read_scales(int header, const Outer *outer, const uint8_t *group, float steps) {
    const Eight none = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)};
    Scales read = {none, none, none, none};
    if (header == BFLOATS) read.scales = eight_bfloats(group);
    if (header == HALVES || header == HALVES_MIN) read.scales = eight_halves(group);
    if (header == HALVES_MIN)
        read.least = shifted_min(read.scales, times_number(eight_halves(group + SCALE_BYTES), steps));
    if (header == SUPER_MIN) {
        const uint8x16_t bytes = vld1q_u8(group);
        read.scales = bytes_times(bytes, 0, outer->scale, outer->scale_offset);
        read.least = shifted_min(read.scales, bytes_times(bytes, 8, outer->least, outer->least_offset));
    }
    if (header == SUPER_SIGNED || header == SUPER_SIXTEENS) {
        const int8x16_t bytes = vld1q_s8((const int8_t *)group);
        read.scales = times(outer->scale, eight_signed(bytes, 0));
        if (header == SUPER_SIXTEENS) read.second = times(outer->scale, eight_signed(bytes, 8));
    }
    if (header == SUPER_MIN_SIXTEENS) {
        const uint8x16_t bytes = vld1q_u8(group), lows = vandq_u8(bytes, vdupq_n_u8(15)), highs = vshrq_n_u8(bytes, 4);
        read.scales = bytes_times(lows, 0, outer->scale, outer->scale_offset);
        read.second = bytes_times(lows, 8, outer->scale, outer->scale_offset);
        read.least = shifted_min(read.scales, bytes_times(highs, 0, outer->least, outer->least_offset));
        read.second_least = shifted_min(read.second, bytes_times(highs, 8, outer->least, outer->least_offset));
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

/* Minimums times the sum of their inputs. */
INLINE void add_min(Eight least, float sum, float32x4_t out[2]) {
    out[0] = vfmaq_n_f32(out[0], least.low, sum);
    out[1] = vfmaq_n_f32(out[1], least.high, sum);
}

/* A block of eight rows times `tokens` inputs, which is a constant wherever this is inlined, as the kinds are. */
INLINE void block_product(const uint8_t *block, int groups, int header, int values, float steps, Input x, int columns,
                          int tokens, float32x4_t out[TILE][2]) {
    const int8x16_t upper = vdupq_n_s8((int8_t)0xf0), uppermost = vdupq_n_s8((int8_t)0xc0), table = vld1q_s8(TABLE_VALUES);
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
        if (has_sixteens(header)) {
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
            if (has_min(header)) {
                UNROLL for (int token = 0; token < tokens; token++) {
                    const float scale = scales[(int64_t)token * groups];
                    add_min(read.least, scale * vaddlvq_s8(low[token]), out[token]);
                    add_min(read.second_least, scale * vaddlvq_s8(high[token]), out[token]);
                }
            }
        } else {
            QUAD(0)
            QUAD(1)
            QUAD(2)
            QUAD(3)
            const Scales read = read_scales(header, &outer, block, steps);
            add_dots(dots, read.scales, scales, groups, tokens, out);
            if (has_min(header)) {
                UNROLL for (int token = 0; token < tokens; token++)
                    add_min(read.least, sums[(int64_t)token * groups], out[token]);
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

INLINE void tile_product(const Rows *rows, int header, int values, int64_t token, int tokens) {
    const Weight *weight = rows->weight;
    const int groups = weight->columns / GROUP, first = rows->first;
    const int count = weight->rows - first < BLOCK_ROWS ? weight->rows - first : BLOCK_ROWS;
    const Input x = {rows->x.values + token * weight->columns, rows->x.scales + token * groups,
                     rows->x.sums + token * groups, 0, 0};
    const float unit = 1.0f / rows->steps;
    float32x4_t sums[TILE][2];
    block_product(rows->blocks[0], groups, header, values, rows->steps, x, weight->columns, tokens, sums);
    UNROLL for (int i = 0; i < tokens; i++) {
        store_rows(vmulq_n_f32(sums[i][0], unit), vmulq_n_f32(sums[i][1], unit), rows->bias ? rows->bias + first : 0,
                   rows->adds, rows->out + (token + i) * rows->stride + first, count);
    }
}

INLINE void tile_products(const Rows *rows, int header, int values) {
    int64_t token = rows->tokens.start;
    for (; token + 4 <= rows->tokens.end; token += 4) tile_product(rows, header, values, token, 4);
    switch (rows->tokens.end - token) {
    case 3: return tile_product(rows, header, values, token, 3);
    case 2: return tile_product(rows, header, values, token, 2);
    case 1: return tile_product(rows, header, values, token, 1);
    }
}

/* Tokens above which a block is widened once instead of being unpacked for every tile. */
static int widens_above(int values) {
    return values == EIGHT || values == TWO ? CHUNK : values == FOUR ? 4 * TILE : TILE;
}
