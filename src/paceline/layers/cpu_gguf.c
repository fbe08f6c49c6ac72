/* Blocks of GGUF files -> the blocks that cpu_kernels.c multiplies by: the same integers and scales, eight rows side by
 * side. Compiled behind cpu_kernels.c, as one source with it.
 *
 * Integers are kept as signed ones, so that a product takes them from a byte's upper bits as they are: of Q4, Q5 and Q6
 * the uppermost bit is turned over.
 */

enum { SUPER_COLUMNS = GROUP * SUPER_GROUPS, LONGEST_BLOCK = 210 };

/* Bytes of a row's block in a file, and the columns it holds. */
static int file_bytes(int kind) {
    switch (kind) {
    case Q4_1: return 20;
    case Q5_0: return 22;
    case Q5_1: return 24;
    case Q8_0: return 34;
    case Q4_K: return 144;
    case Q5_K: return 176;
    case Q6_K: return 210;
    default: return 18;
    }
}

static int file_columns(int kind) { return is_super(header_of(kind)) ? SUPER_COLUMNS : GROUP; }

INLINE uint32_t word_at(const uint8_t *place) {
    uint32_t word;
    memcpy(&word, place, 4);
    return word;
}

/* Four columns of one row, among those of the other rows. */
INLINE void put_word(uint8_t *weights, int quad, int row, uint32_t word) {
    memcpy(weights + (quad * 2 + row / 4) * 16 + row % 4 * 4, &word, 4);
}

/* Whether a scale in half precision is a number. */
INLINE int put_half(uint8_t *scales, int row, const uint8_t *place) {
    memcpy(scales + 2 * row, place, 2);
    return (place[1] & 0x7c) != 0x7c;
}

/* Every fourth bit, beginning with the first: eight of them, in order. */
INLINE uint32_t fourth_bits(uint32_t bits) {
    bits &= 0x11111111u;
    bits = (bits | bits >> 3) & 0x03030303u;
    bits = (bits | bits >> 6) & 0x000f000fu;
    return (bits | bits >> 12) & 0xffu;
}

/* The block of one row with one scale for 32 columns: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and IQ4_NL. */
static int repack_group(int kind, const uint8_t *block, int row, uint8_t *out) {
    const int header = header_of(kind), values = values_of(kind);
    uint8_t *weights = out + header_bytes(header);
    int is_number = put_half(out, row, block);
    block += 2;
    if (header == HALVES_MIN) {
        is_number &= put_half(out + SCALE_BYTES, row, block);
        block += 2;
    }
    if (values == FIVE) {
        const uint32_t upper = ~word_at(block);
        uint32_t bits = 0;
        for (int column = 0; column < 4; column++) bits |= fourth_bits(upper >> column) << 8 * column;
        put_word(weights + NIBBLE_BYTES, 0, row, bits);
        block += 4;
    }
    const uint32_t sign = values == FOUR ? 0x88888888u : 0;
    for (int quad = 0; quad < (values == EIGHT ? 8 : 4); quad++)
        put_word(weights, quad, row, word_at(block + 4 * quad) ^ sign);
    return is_number;
}

/* Half of the bytes at `place`, its lower or its upper four bits: 32 columns of one group. */
INLINE void put_nibbles(uint8_t *weights, int row, const uint8_t *place, int is_upper, uint32_t sign) {
    const uint32_t mask = 0x0f0f0f0fu;
    for (int quad = 0; quad < 4; quad++) {
        const uint32_t first = word_at(place + 4 * quad), second = word_at(place + 16 + 4 * quad);
        const uint32_t both = is_upper ? (first >> 4 & mask) | (second & ~mask) : (first & mask) | (second & mask) << 4;
        put_word(weights, quad, row, both ^ sign);
    }
}

/* 256 columns of one row: Q4_K and Q5_K. `out` is behind the outer scales of eight rows. */
static int repack_super_min(int kind, const uint8_t *block, int row, uint8_t *out) {
    const int values = values_of(kind), bytes = SCALE_BYTES + value_bytes(values);
    const uint8_t *scales = block + 4, *upper = block + 16, *nibbles = upper + (values == FIVE ? 32 : 0);
    uint8_t *outer = out - super_bytes(SUPER_MIN);
    for (int group = 0; group < SUPER_GROUPS; group++, out += bytes) {
        const int place = group % 4;
        const uint8_t a = scales[place], b = scales[4 + place], c = scales[8 + place];
        out[row] = group < 4 ? a & 63 : (c & 15) | (a >> 2 & 48);
        out[BLOCK_ROWS + row] = group < 4 ? b & 63 : c >> 4 | (b >> 2 & 48);
        put_nibbles(out + SCALE_BYTES, row, nibbles + group / 2 * 32, group % 2, values == FOUR ? 0x88888888u : 0);
        if (values != FIVE) continue;
        uint32_t bits = 0;
        for (int quad = 0; quad < 8; quad++) bits |= (word_at(upper + 4 * quad) >> group & 0x01010101u) << quad;
        put_word(out + SCALE_BYTES + NIBBLE_BYTES, 0, row, ~bits);
    }
    return put_half(outer, row, block) & put_half(outer + SCALE_BYTES, row, block + 2);
}

/* 256 columns of one row of Q6_K. */
static int repack_super_sixteens(const uint8_t *block, int row, uint8_t *out) {
    const int bytes = SCALE_BYTES + value_bytes(SIX);
    const uint8_t *scales = block + 192;
    uint8_t *outer = out - super_bytes(SUPER_SIXTEENS);
    for (int group = 0; group < SUPER_GROUPS; group++, out += bytes) {
        const int part = group / 4, place = group % 4;
        const uint8_t *upper = block + 128 + part * 32;
        out[row] = scales[2 * group];
        out[BLOCK_ROWS + row] = scales[2 * group + 1];
        put_nibbles(out + SCALE_BYTES, row, block + part * 64 + place % 2 * 32, place / 2, 0);
        for (int side = 0; side < 2; side++) {
            uint32_t bits = 0;
            for (int quad = 0; quad < 4; quad++)
                bits |= (word_at(upper + 16 * side + 4 * quad) >> 2 * place & 0x03030303u) << 2 * quad;
            put_word(out + SCALE_BYTES + NIBBLE_BYTES + 32 * side, 0, row, bits ^ 0xaaaaaaaau);
        }
    }
    return put_half(outer, row, block + 208);
}

INLINE int repack_block(int kind, const uint8_t *block, int row, uint8_t *out) {
    const int header = header_of(kind);
    if (header == SUPER_MIN) return repack_super_min(kind, block, row, out + super_bytes(header));
    if (header == SUPER_SIXTEENS) return repack_super_sixteens(block, row, out + super_bytes(header));
    return repack_group(kind, block, row, out);
}

typedef struct {
    const uint8_t *file;
    Weight shape;
    uint8_t *out;
    int32_t is_broken;
} RepackJob;

/* Rows behind the last one hold zeros. */
static void repack_share(void *data) {
    static const uint8_t zeros[LONGEST_BLOCK];
    RepackJob *job = data;
    const int kind = job->shape.kind, rows = job->shape.rows, steps = job->shape.columns / file_columns(kind);
    const size_t bytes = block_bytes(&job->shape), step_bytes = bytes / steps, file_step = file_bytes(kind);
    const Share blocks = share_of((rows + BLOCK_ROWS - 1) / BLOCK_ROWS, omp_get_thread_num(), omp_get_num_threads());
    int is_number = 1;
    for (int64_t index = blocks.start; index < blocks.end; index++)
        for (int step = 0; step < steps; step++)
            for (int row = 0; row < BLOCK_ROWS; row++) {
                const int64_t place = index * BLOCK_ROWS + row;
                const uint8_t *block = place < rows ? job->file + (place * steps + step) * file_step : zeros;
                is_number &= repack_block(kind, block, row, job->out + index * bytes + step * step_bytes);
            }
    if (!is_number) __atomic_store_n(&job->is_broken, 1, __ATOMIC_RELAXED);
}

/* 0, or -1 where a scale is no number. */
int paceline_repack(const uint8_t *file, int32_t kind, int32_t rows, int32_t columns, uint8_t *out, int32_t threads) {
    RepackJob job = {file, {out, kind, rows, columns, 0}, out, 0};
    GOMP_parallel(repack_share, &job, threads, 0);
    return job.is_broken ? -1 : 0;
}
