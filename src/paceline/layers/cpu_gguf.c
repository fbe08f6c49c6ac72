/* Blocks of GGUF files -> the blocks that cpu_kernels.c multiplies by: the same integers and scales, eight rows side by
 * side. Compiled behind cpu_kernels.c, as one source with it.
 *
 * Integers are kept as signed ones, so that a product takes them from a byte's upper bits as they are: of those with fewer
 * than eight bits the uppermost bit is turned over, unless the file has it so.
 */

enum { SUPER_COLUMNS = GROUP * SUPER_GROUPS, LONGEST_BLOCK = 210 };

/* Columns of a row's block in a file. */
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

/* One bit of every byte of 32 columns, turned over: those of columns four apart side by side in a byte. */
INLINE void put_bits(uint8_t *bits, int row, const uint8_t *place, int shift) {
    uint32_t word = 0;
    for (int quad = 0; quad < 8; quad++) word |= (word_at(place + 4 * quad) >> shift & 0x01010101u) << quad;
    put_word(bits, 0, row, ~word);
}

/* Two bits of every byte of 32 columns: of the first 16, and behind those of all rows of the others. */
INLINE void put_twos(uint8_t *twos, int row, const uint8_t *place, int shift, uint32_t turned) {
    for (int side = 0; side < 2; side++) {
        uint32_t word = 0;
        for (int quad = 0; quad < 4; quad++)
            word |= (word_at(place + 16 * side + 4 * quad) >> shift & 0x03030303u) << 2 * quad;
        put_word(twos + 32 * side, 0, row, word ^ turned);
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
        if (values == FIVE) put_bits(out + SCALE_BYTES + NIBBLE_BYTES, row, upper, group);
    }
    return put_half(outer, row, block) & put_half(outer + SCALE_BYTES, row, block + 2);
}

/* 256 columns of one row of Q6_K. */
static int repack_six(const uint8_t *block, int row, uint8_t *out) {
    const int bytes = SCALE_BYTES + value_bytes(SIX);
    const uint8_t *scales = block + 192;
    uint8_t *outer = out - super_bytes(SUPER_SIXTEENS);
    for (int group = 0; group < SUPER_GROUPS; group++, out += bytes) {
        const int part = group / 4, place = group % 4;
        out[row] = scales[2 * group];
        out[BLOCK_ROWS + row] = scales[2 * group + 1];
        put_nibbles(out + SCALE_BYTES, row, block + part * 64 + place % 2 * 32, place / 2, 0);
        put_twos(out + SCALE_BYTES + NIBBLE_BYTES, row, block + 128 + part * 32, 2 * place, 0xaaaaaaaau);
    }
    return put_half(outer, row, block + 208);
}

/* One of the 16 scales of Q3_K, which have their lower four bits in eight bytes and their upper two in four more. */
INLINE int scale_of_three(const uint8_t *scales, int index) {
    const int low = index < 8 ? scales[index] & 15 : scales[index - 8] >> 4;
    return (low | (scales[8 + index % 4] >> index / 4 * 2 & 3) << 4) - 32;
}

/* 256 columns of one row of Q3_K. */
static int repack_three(const uint8_t *block, int row, uint8_t *out) {
    const int bytes = SCALE_BYTES + value_bytes(THREE);
    const uint8_t *twos = block + 32, *scales = block + 96;
    uint8_t *outer = out - super_bytes(SUPER_SIXTEENS);
    for (int group = 0; group < SUPER_GROUPS; group++, out += bytes) {
        out[row] = scale_of_three(scales, 2 * group);
        out[BLOCK_ROWS + row] = scale_of_three(scales, 2 * group + 1);
        put_twos(out + SCALE_BYTES, row, twos + group / 4 * 32, group % 4 * 2, 0);
        put_bits(out + SCALE_BYTES + TWO_BYTES, row, block, group);
    }
    return put_half(outer, row, block + 108);
}

/* 256 columns of one row of Q2_K. */
static int repack_two(const uint8_t *block, int row, uint8_t *out) {
    const int bytes = SCALE_BYTES + value_bytes(TWO);
    uint8_t *outer = out - super_bytes(SUPER_MIN_SIXTEENS);
    for (int group = 0; group < SUPER_GROUPS; group++, out += bytes) {
        out[row] = block[2 * group];
        out[BLOCK_ROWS + row] = block[2 * group + 1];
        put_twos(out + SCALE_BYTES, row, block + 16 + group / 4 * 32, group % 4 * 2, 0xaaaaaaaau);
    }
    return put_half(outer, row, block + 80) & put_half(outer + SCALE_BYTES, row, block + 82);
}

/* 256 columns of one row of IQ4_XS. */
static int repack_table(const uint8_t *block, int row, uint8_t *out) {
    const int bytes = BLOCK_ROWS + value_bytes(TABLE), upper = block[2] | block[3] << 8;
    uint8_t *outer = out - super_bytes(SUPER_SIGNED);
    for (int group = 0; group < SUPER_GROUPS; group++, out += bytes) {
        const int low = block[4 + group / 2] >> group % 2 * 4 & 15;
        out[row] = (low | (upper >> 2 * group & 3) << 4) - 32;
        for (int quad = 0; quad < 4; quad++)
            put_word(out + BLOCK_ROWS, quad, row, word_at(block + 8 + 16 * group + 4 * quad));
    }
    return put_half(outer, row, block);
}

INLINE int repack_block(int kind, const uint8_t *block, int row, uint8_t *out) {
    uint8_t *groups = out + super_bytes(header_of(kind));
    switch (kind) {
    case Q4_K:
    case Q5_K: return repack_super_min(kind, block, row, groups);
    case Q6_K: return repack_six(block, row, groups);
    case IQ4_XS: return repack_table(block, row, groups);
    case Q3_K: return repack_three(block, row, groups);
    case Q2_K: return repack_two(block, row, groups);
    default: return repack_group(kind, block, row, out);
    }
}

typedef struct {
    const uint8_t *file;
    Weight shape;
    uint8_t *out;
    int64_t row_bytes;
    int32_t is_broken;
} RepackJob;

/* Rows behind the last one hold zeros. */
static void repack_share(void *data) {
    static const uint8_t zeros[LONGEST_BLOCK];
    RepackJob *job = data;
    const int kind = job->shape.kind, rows = job->shape.rows, steps = job->shape.columns / file_columns(kind);
    const size_t bytes = block_bytes(&job->shape), step_bytes = bytes / steps, file_step = job->row_bytes / steps;
    const Share blocks = share_of((rows + BLOCK_ROWS - 1) / BLOCK_ROWS, omp_get_thread_num(), omp_get_num_threads());
    int is_number = 1;
    for (int64_t index = blocks.start; index < blocks.end; index++)
        for (int step = 0; step < steps; step++)
            for (int row = 0; row < BLOCK_ROWS; row++) {
                const int64_t place = index * BLOCK_ROWS + row;
                const uint8_t *block = place < rows ? job->file + place * job->row_bytes + step * file_step : zeros;
                is_number &= repack_block(kind, block, row, job->out + index * bytes + step * step_bytes);
            }
    if (!is_number) __atomic_store_n(&job->is_broken, 1, __ATOMIC_RELAXED);
}

/* row_bytes: of a row of the file. Returns 0, or -1 where a scale is no number. */
int paceline_repack(const uint8_t *file, int64_t row_bytes, int32_t kind, int32_t rows, int32_t columns, uint8_t *out,
                    int32_t threads) {
    RepackJob job = {file, {out, kind, rows, columns, 0}, out, row_bytes, 0};
    GOMP_parallel(repack_share, &job, threads, 0);
    return job.is_broken ? -1 : 0;
}
