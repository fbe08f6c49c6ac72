/* Some rows of a weight times some tokens on x86-64, in the forms that cpu_vectors_x86.c names. Compiled behind
 * cpu_kernels.c, as one source with it; cpu_products_neon.c has the same for ARM.
 *
 * A lane of a register is a row: a block has 32 bytes for every four columns, and four inputs are in all lanes at once.
 * The instructions multiply unsigned bytes by signed ones, so weights are raised to be unsigned: by 4, 8, 16, 32 or 128, as
 * many bits as they have. A sum begins with as many times its inputs' sum below zero (`InputGroup`), and is then the sum of
 * the signed products, exactly. Weights with a minimum are unsigned in the file, and stay so.
 */

#ifdef BLOCK_PAIRS

typedef __m512i Bytes; /* of 16 rows: a block in each half; or an integer for each row */
typedef __m512 Reals;

#define EACH(name) _mm512_##name

INLINE Bytes thirty_twos(const uint8_t *const places[SIDE_BLOCKS], int offset) {
    const __m256i first = _mm256_loadu_si256((const __m256i *)(places[0] + offset));
    const __m256i second = _mm256_loadu_si256((const __m256i *)(places[1] + offset));
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
}

INLINE __m256i sixteens(const uint8_t *const places[SIDE_BLOCKS], int offset) {
    const __m128i first = _mm_loadu_si128((const __m128i *)(places[0] + offset));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first), _mm_loadu_si128((const __m128i *)(places[1] + offset)), 1);
}

INLINE __m128i eights(const uint8_t *const places[SIDE_BLOCKS], int offset) {
    const __m128i first = _mm_loadl_epi64((const __m128i *)(places[0] + offset));
    return _mm_unpacklo_epi64(first, _mm_loadl_epi64((const __m128i *)(places[1] + offset)));
}

INLINE Bytes both(Bytes a, Bytes b) { return _mm512_and_si512(a, b); }
INLINE Bytes turned(Bytes a, Bytes b) { return _mm512_xor_si512(a, b); }
INLINE Bytes no_bytes(void) { return _mm512_setzero_si512(); }
INLINE Bytes sixteen_values(const int8_t *values) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)values));
}
/* (bytes ^ flips) & mask; and nibbles | (bytes & mask): one operation */
INLINE Bytes turned_part(Bytes bytes, Bytes flips, Bytes mask) { return _mm512_ternarylogic_epi32(bytes, flips, mask, 0x28); }
INLINE Bytes with_part(Bytes nibbles, Bytes bytes, Bytes mask) { return _mm512_ternarylogic_epi32(nibbles, bytes, mask, 0xf8); }
INLINE void store_bytes(uint8_t *place, Bytes bytes) { _mm256_storeu_si256((__m256i *)place, _mm512_castsi512_si256(bytes)); }
INLINE void store_reals(float *place, Reals x) { _mm512_storeu_ps(place, x); }
INLINE Reals load_reals(const float *place) { return _mm512_loadu_ps(place); }
INLINE Reals as_reals(Bytes bits) { return _mm512_castsi512_ps(bits); }
/* Inputs with the sign of weights. */
INLINE Bytes with_sign(Bytes inputs, Bytes weights) {
    return _mm512_mask_sub_epi8(inputs, _mm512_movepi8_mask(weights), _mm512_setzero_si512(), inputs);
}

#else

typedef __m256i Bytes; /* of the eight rows of a block; or an integer for each row */
typedef __m256 Reals;

#define EACH(name) _mm256_##name

INLINE Bytes thirty_twos(const uint8_t *const places[SIDE_BLOCKS], int offset) {
    return _mm256_loadu_si256((const __m256i *)(places[0] + offset));
}

INLINE __m128i sixteens(const uint8_t *const places[SIDE_BLOCKS], int offset) {
    return _mm_loadu_si128((const __m128i *)(places[0] + offset));
}

INLINE __m128i eights(const uint8_t *const places[SIDE_BLOCKS], int offset) {
    return _mm_loadl_epi64((const __m128i *)(places[0] + offset));
}

INLINE Bytes both(Bytes a, Bytes b) { return _mm256_and_si256(a, b); }
INLINE Bytes turned(Bytes a, Bytes b) { return _mm256_xor_si256(a, b); }
INLINE Bytes no_bytes(void) { return _mm256_setzero_si256(); }
INLINE Bytes sixteen_values(const int8_t *values) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)values));
}
INLINE Bytes turned_part(Bytes bytes, Bytes flips, Bytes mask) { return both(turned(bytes, flips), mask); }
INLINE Bytes with_part(Bytes nibbles, Bytes bytes, Bytes mask) { return _mm256_or_si256(nibbles, both(bytes, mask)); }
INLINE void store_bytes(uint8_t *place, Bytes bytes) { _mm256_storeu_si256((__m256i *)place, bytes); }
INLINE void store_reals(float *place, Reals x) { _mm256_storeu_ps(place, x); }
INLINE Reals load_reals(const float *place) { return _mm256_loadu_ps(place); }
INLINE Reals as_reals(Bytes bits) { return _mm256_castsi256_ps(bits); }
INLINE Bytes with_sign(Bytes inputs, Bytes weights) { return _mm256_sign_epi8(inputs, weights); }

#endif

/* --- weights as unsigned bytes ---------------------------------------------------------------------------------- */

/* Integers are multiplied as they are. */
INLINE float steps_of(int values) {
    (void)values;
    return 1.0f;
}

/* Weights are raised by 8, shifted by so many bits: to the left if above zero. */
INLINE int raise_bits(int values) {
    return values == THREE ? -1 : values == FOUR ? 0 : values == FIVE ? 1 : values == SIX ? 2 : 4;
}

/* Bytes shifted by so many bits, to the left if above zero: within words, so only the bits that a mask takes are right. */
INLINE Bytes moved(Bytes bytes, int bits) {
    return bits > 0 ? EACH(slli_epi16)(bytes, bits) : bits < 0 ? EACH(srli_epi16)(bytes, -bits) : bytes;
}

/* What a group's bytes are made of, beside its nibbles. */
typedef struct {
    Bytes bits;          /* the uppermost one of every column */
    Bytes first, second; /* two bits of columns 0 to 15, and of columns 16 to 31 */
    Bytes table;
} Unpacking;

INLINE Unpacking read_upper(int values, const uint8_t *const weights[SIDE_BLOCKS]) {
    Unpacking read = {no_bytes(), no_bytes(), no_bytes(), no_bytes()};
    const int bits = values == FIVE ? NIBBLE_BYTES : TWO_BYTES, twos = values == SIX ? NIBBLE_BYTES : 0;
    const Bytes signs = EACH(set1_epi8)((char)0xaa);
    if (values == TABLE) read.table = turned(sixteen_values(TABLE_VALUES), EACH(set1_epi8)((char)0x80));
    if (values == FIVE || values == THREE) read.bits = turned(thirty_twos(weights, bits), EACH(set1_epi8)((char)0xff));
    if (values == THREE) read.first = thirty_twos(weights, twos), read.second = thirty_twos(weights, twos + 32);
    if (values == SIX || values == TWO) {
        read.first = turned(thirty_twos(weights, twos), signs);
        read.second = turned(thirty_twos(weights, twos + 32), signs);
    }
    return read;
}

/* Four columns of every row, unsigned: those of columns 0 to 15 (`lane` 0 to 3), or of columns 16 to 31. */
INLINE Bytes quad(int values, const uint8_t *const weights[SIDE_BLOCKS], const Unpacking *upper, int lane, int is_second) {
    const Bytes low = EACH(set1_epi8)(15), twos = is_second ? upper->second : upper->first;
    const int place = lane + 4 * is_second;
    if (values == EIGHT) return turned(thirty_twos(weights, place * 32), EACH(set1_epi8)((char)0x80));
    if (values == TWO) return both(moved(twos, -2 * lane), EACH(set1_epi8)(3));
    if (values == THREE)
        return with_part(both(moved(twos, -2 * lane), EACH(set1_epi8)(3)), moved(upper->bits, 2 - place), EACH(set1_epi8)(4));
    const Bytes nibbles = moved(thirty_twos(weights, lane * 32), is_second ? -4 : 0);
    if (values == FOUR) return turned_part(nibbles, EACH(set1_epi8)((char)0x88), low);
    if (values == TABLE) return EACH(shuffle_epi8)(upper->table, both(nibbles, low));
    if (values == FIVE) return with_part(both(nibbles, low), moved(upper->bits, 4 - place), EACH(set1_epi8)(0x10));
    return with_part(both(nibbles, low), moved(twos, 4 - 2 * lane), EACH(set1_epi8)(0x30));
}

/* --- dot products of four columns ------------------------------------------------------------------------------- */

/* Sums of one token, an integer for each row; words: those that still have 16 bits. */
typedef struct {
    Bytes dots, words;
} Sums;

/* Four inputs in all lanes. */
INLINE Bytes four_inputs(const int8_t *place) {
    int32_t word;
    memcpy(&word, place, 4);
    return EACH(set1_epi32)(word);
}

#ifdef BYTE_DOTS

INLINE int is_signed(int values) { return (void)values, 0; }

/* place: of four inputs. count: quads before this one. */
INLINE void dot(Sums *sums, int values, Bytes weights, const int8_t *place, int count) {
    (void)values, (void)count;
#ifdef BLOCK_PAIRS
    /* The instruction spreads the inputs by itself, which compilers do not see. */
    __asm__("vpdpbusd %1%{1to16%}, %2, %0" : "+v"(sums->dots) : "m"(*(const int8_t(*)[4])place), "v"(weights));
#elif defined(__AVX512VNNI__) && defined(__AVX512VL__)
    sums->dots = _mm256_dpbusd_epi32(sums->dots, weights, four_inputs(place));
#else
    sums->dots = _mm256_dpbusd_avx_epi32(sums->dots, weights, four_inputs(place));
#endif
}

/* Tokens above which a block is widened once instead of being unpacked for every tile. */
static int widens_above(int values) { return values == EIGHT || values == FOUR || values == TWO ? CHUNK : TILE; }

#else

/* A sum stays in its register: compilers would add in another order, for which there are too few. */
#define KEEP(sum) __asm__("" : "+v"(sum))

/* Bytes of which two products may not fit a word are multiplied by their magnitude, with their sign at the inputs. */
INLINE int is_signed(int values) { return values == EIGHT || values == TABLE; }

/* Products that a word holds the sum of: the largest are 2 · 15 · 127, 2 · 31 · 127, 2 · 63 · 127 and 2 · 128 · 127. Weights of
 * two and three bits have scales for four quads each, which a word holds. */
INLINE int words_hold(int values) {
    return values == FOUR ? 8 : values == FIVE || values == THREE || values == TWO ? 4 : values == SIX ? 2 : 1;
}

/* count: quads before this one. */
INLINE void dot(Sums *sums, int values, Bytes weights, const int8_t *four, int count) {
    const int place = count % words_hold(values);
    Bytes inputs = four_inputs(four);
    if (is_signed(values)) {
        weights = turned(weights, EACH(set1_epi8)((char)0x80));
        inputs = with_sign(inputs, weights);
        weights = EACH(abs_epi8)(weights);
    }
    const Bytes words = EACH(maddubs_epi16)(weights, inputs);
    sums->words = place ? EACH(add_epi16)(sums->words, words) : words;
    KEEP(sums->words);
    if (place + 1 < words_hold(values)) return;
    sums->dots = EACH(add_epi32)(sums->dots, EACH(madd_epi16)(sums->words, EACH(set1_epi16)(1)));
    KEEP(sums->dots);
}

/* Unpacking costs less here than bytes of eight bits do. */
static int widens_above(int values) { return (void)values, CHUNK; }

#endif

/* Where the sums of a token begin. */
INLINE Sums begin_sums(int header, int values, int32_t start) {
    const int is_zero = is_signed(values) || (has_min(header) && values != EIGHT), bits = raise_bits(values);
    const Bytes starts = EACH(set1_epi32)(start);
    if (is_zero) return (Sums){no_bytes(), no_bytes()};
    return (Sums){bits < 0 ? EACH(srai_epi32)(starts, -bits) : EACH(slli_epi32)(starts, bits), no_bytes()};
}

/* --- scales ----------------------------------------------------------------------------------------------------- */

INLINE Reals row_bfloats(const uint8_t *const places[SIDE_BLOCKS], int offset) {
    return as_reals(EACH(slli_epi32)(EACH(cvtepu16_epi32)(sixteens(places, offset)), 16));
}

INLINE Reals row_halves(const uint8_t *const places[SIDE_BLOCKS], int offset) {
    return EACH(cvtph_ps)(sixteens(places, offset));
}

INLINE Reals row_counts(const uint8_t *const places[SIDE_BLOCKS], int offset) {
    return EACH(cvtepi32_ps)(EACH(cvtepu8_epi32)(eights(places, offset)));
}

INLINE Reals row_signed(const uint8_t *const places[SIDE_BLOCKS], int offset) {
    return EACH(cvtepi32_ps)(EACH(cvtepi8_epi32)(eights(places, offset)));
}

/* Of bytes that have a scale in their lower four bits and a minimum in their upper ones. */
INLINE Reals row_lows(const uint8_t *const places[SIDE_BLOCKS], int offset) {
    return EACH(cvtepi32_ps)(both(EACH(cvtepu8_epi32)(eights(places, offset)), EACH(set1_epi32)(15)));
}

INLINE Reals row_highs(const uint8_t *const places[SIDE_BLOCKS], int offset) {
    return EACH(cvtepi32_ps)(EACH(srli_epi32)(EACH(cvtepu8_epi32)(eights(places, offset)), 4));
}

/* What eight groups share: the factors of their scales and minimums. */
typedef struct {
    Reals scale, least;
} Outer;

INLINE Outer read_outer(int header, const uint8_t *const super[SIDE_BLOCKS]) {
    const Reals none = EACH(setzero_ps)();
    if (!is_super(header)) return (Outer){none, none};
    return (Outer){row_halves(super, 0), has_min(header) ? row_halves(super, SCALE_BYTES) : none};
}

/* Scales of a group and its minimums, with those of its columns 16 to 31 where they have their own. */
typedef struct {
    Reals scales, second, least, second_least;
} Scales;

INLINE Scales read_scales(int header, const Outer *outer, const uint8_t *const group[SIDE_BLOCKS]) {
    const Reals none = EACH(setzero_ps)();
    Scales read = {none, none, none, none};
    if (header == BFLOATS) read.scales = row_bfloats(group, 0);
    if (header == HALVES || header == HALVES_MIN) read.scales = row_halves(group, 0);
    if (header == HALVES_MIN) read.least = row_halves(group, SCALE_BYTES);
    if (header == SUPER_MIN) {
        read.scales = outer->scale * row_counts(group, 0);
        read.least = -(outer->least * row_counts(group, BLOCK_ROWS));
    }
    if (header == SUPER_SIGNED || header == SUPER_SIXTEENS) read.scales = outer->scale * row_signed(group, 0);
    if (header == SUPER_SIXTEENS) read.second = outer->scale * row_signed(group, BLOCK_ROWS);
    if (header == SUPER_MIN_SIXTEENS) {
        read.scales = outer->scale * row_lows(group, 0);
        read.second = outer->scale * row_lows(group, BLOCK_ROWS);
        read.least = -(outer->least * row_highs(group, 0));
        read.second_least = -(outer->least * row_highs(group, BLOCK_ROWS));
    }
    return read;
}

INLINE Reals fused_rows(Reals sum, Reals a, float b) { return EACH(fmadd_ps)(a, EACH(set1_ps)(b), sum); }

INLINE Reals add_sums(Reals out, Bytes dots, Reals rows, float scale) {
    return EACH(fmadd_ps)(EACH(cvtepi32_ps)(dots), rows * EACH(set1_ps)(scale), out);
}

/* Minimums of half a group times its inputs' sum, which `InputGroup` holds -8 times. */
INLINE Reals add_half_min(Reals out, Reals least, int32_t half, float scale) {
    return add_sums(out, EACH(set1_epi32)(half), least * EACH(set1_ps)(-0.125f), scale);
}

/* --- products --------------------------------------------------------------------------------------------------- */

/* Blocks side by side times `tokens` inputs, which is a constant wherever this is inlined, as the kinds are. */
INLINE void block_product(const uint8_t *const places[SIDE_BLOCKS], int groups, int header, int values, Input x, int columns,
                          int tokens, Reals out[TILE]) {
    const uint8_t *blocks[SIDE_BLOCKS];
    UNROLL for (int side = 0; side < SIDE_BLOCKS; side++) blocks[side] = places[side];
    const size_t next = SIDE_BLOCKS * rows_bytes(header, values, columns); /* to the same place of the next blocks */
    Outer outer = read_outer(header, blocks);
    UNROLL for (int token = 0; token < tokens; token++) out[token] = EACH(setzero_ps)();
    for (int group = 0; group < groups; group++) {
        if (is_super(header) && group % SUPER_GROUPS == 0) {
            outer = read_outer(header, blocks);
            UNROLL for (int side = 0; side < SIDE_BLOCKS; side++) blocks[side] += super_bytes(header);
        }
        const uint8_t *weights[SIDE_BLOCKS];
        UNROLL for (int side = 0; side < SIDE_BLOCKS; side++) weights[side] = blocks[side] + header_bytes(header);
        const Unpacking upper = read_upper(values, weights);
        const Scales read = read_scales(header, &outer, blocks);
        const InputGroup *inputs = x.groups + group;
        UNROLL for (int side = 0; side < SIDE_BLOCKS; side++)
            UNROLL for (int line = 0; line < header_bytes(header) + value_bytes(values); line += LINE)
                expect(blocks[side] + next + line);
        Sums sums[TILE];
        if (has_sixteens(header)) {
            UNROLL for (int second = 0; second < 2; second++) {
                UNROLL for (int token = 0; token < tokens; token++)
                    sums[token] = begin_sums(header, values, inputs[token * groups].halves[second]);
                UNROLL for (int lane = 0; lane < 4; lane++) {
                    const Bytes four = quad(values, weights, &upper, lane, second);
                    UNROLL for (int token = 0; token < tokens; token++)
                        dot(sums + token, values, four, inputs[token * groups].values + 16 * second + 4 * lane, lane);
                }
                UNROLL for (int token = 0; token < tokens; token++) {
                    const InputGroup *own = inputs + token * groups;
                    out[token] = add_sums(out[token], sums[token].dots, second ? read.second : read.scales, own->scale);
                    if (has_min(header))
                        out[token] = add_half_min(out[token], second ? read.second_least : read.least,
                                                  own->halves[second], own->scale);
                }
            }
        } else {
            UNROLL for (int token = 0; token < tokens; token++)
                sums[token] = begin_sums(header, values, inputs[token * groups].whole);
            UNROLL for (int place = 0; place < 8; place++) {
                const int lane = place / 2, second = place % 2;
                const Bytes four = quad(values, weights, &upper, lane, second);
                UNROLL for (int token = 0; token < tokens; token++)
                    dot(sums + token, values, four, inputs[token * groups].values + 16 * second + 4 * lane, place);
            }
            UNROLL for (int token = 0; token < tokens; token++) {
                out[token] = add_sums(out[token], sums[token].dots, read.scales, inputs[token * groups].scale);
                if (has_min(header)) out[token] = fused_rows(out[token], read.least, inputs[token * groups].sum);
            }
        }
        UNROLL for (int side = 0; side < SIDE_BLOCKS; side++) blocks[side] += header_bytes(header) + value_bytes(values);
    }
}

/* out (+)= product + bias of as many rows as there are lanes, or fewer at the end of the weight. */
INLINE void store_rows(Reals sums, const float *bias, int adds, float *out, int rows) {
    float each[SIDE_BLOCKS * BLOCK_ROWS];
    if (rows == SIDE_BLOCKS * BLOCK_ROWS) {
        if (bias) sums = sums + load_reals(bias);
        if (adds) sums = sums + load_reals(out);
        store_reals(out, sums);
        return;
    }
    store_reals(each, sums);
    for (int row = 0; row < rows; row++) {
        const float sum = bias ? each[row] + bias[row] : each[row];
        out[row] = adds ? sum + out[row] : sum;
    }
}

/* A tile of `tokens`, which is a constant, of which the first `kept` are stored. */
INLINE void tile_product(const Rows *rows, int header, int values, int64_t token, int tokens, int kept) {
    const Weight *weight = rows->weight;
    const int groups = weight->columns / GROUP, first = rows->first, lanes = SIDE_BLOCKS * BLOCK_ROWS;
    const int count = weight->rows - first < lanes ? weight->rows - first : lanes;
    const Input x = {rows->x.values + token * weight->columns, rows->x.scales + token * groups,
                     rows->x.sums + token * groups, 0, rows->x.groups + token * groups};
    Reals sums[TILE];
    block_product(rows->blocks, groups, header, values, x, weight->columns, tokens, sums);
    UNROLL for (int i = 0; i < tokens; i++) {
        if (i == kept) return;
        store_rows(sums[i], rows->bias ? rows->bias + first : 0, rows->adds,
                   rows->out + (token + i) * rows->stride + first, count);
    }
}

/* A tile costs little more than a smaller one where memory sets the pace, and each size is as much code again: so there
 * are few sizes, and tokens behind the last one are multiplied and not stored. Where products of words set the pace, a
 * tile is that of four with one or two tokens more. */
INLINE void tile_products(const Rows *rows, int header, int values) {
    int64_t token = rows->tokens.start;
    while (token < rows->tokens.end) {
        const int64_t left = rows->tokens.end - token;
        if (left > LEAST_TILED) {
            tile_product(rows, header, values, token, TILE, left);
            token += TILE;
        } else if (TILE > 4 && left > 2) {
            tile_product(rows, header, values, token, 4, left);
            token += 4;
        } else if (left == 2) {
            tile_product(rows, header, values, token, 2, 2);
            token += 2;
        } else {
            tile_product(rows, header, values, token, 1, 1);
            token += 1;
        }
    }
}

/* A block in the layout of eight bits, for passes that multiply by it many times. Headers stay as they are, and unsigned
 * weights unsigned. */
INLINE void widen_rows(int header, int values, const uint8_t *block, int groups, uint8_t *out) {
    const Bytes raised = EACH(set1_epi8)(has_min(header) ? 0 : 128 >> (4 - raise_bits(values)));
    for (int group = 0; group < groups; group++) {
        const int super = is_super(header) && group % SUPER_GROUPS == 0 ? super_bytes(header) : 0;
        const int before = super + header_bytes(header);
        memcpy(out, block, before);
        const uint8_t *weights[SIDE_BLOCKS];
        UNROLL for (int side = 0; side < SIDE_BLOCKS; side++) weights[side] = block + before;
        const Unpacking upper = read_upper(values, weights);
        UNROLL for (int place = 0; place < 8; place++)
            store_bytes(out + before + 32 * place,
                        EACH(sub_epi8)(quad(values, weights, &upper, place % 4, place / 4), raised));
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
