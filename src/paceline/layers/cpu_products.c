/* Products of linear layers over what the machine multiplies at once (`tile_products` of cpu_products_neon.c
 * or cpu_products_x86.c). Compiled behind it, as one source with cpu_kernels.c.
 */

/* A function for each way that weights are stored, so that all its loops have constants. */
#define ROWS_PRODUCT(name, header, values)                                                                            \
    NOT_INLINE void name(const Rows *rows) { tile_products(rows, header, values); }
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
ROWS_PRODUCT(super_signed_table, SUPER_SIGNED, TABLE)
ROWS_PRODUCT(super_signed_eight, SUPER_SIGNED, EIGHT)
ROWS_PRODUCT(super_sixteens_three, SUPER_SIXTEENS, THREE)
ROWS_PRODUCT(super_sixteens_six, SUPER_SIXTEENS, SIX)
ROWS_PRODUCT(super_sixteens_eight, SUPER_SIXTEENS, EIGHT)
ROWS_PRODUCT(super_min_sixteens_two, SUPER_MIN_SIXTEENS, TWO)

typedef void (*RowsProduct)(const Rows *);

/* EIGHT: also of weights that are widened. */
static const RowsProduct ROWS_PRODUCTS[][EIGHT + 1] = {
    [BFLOATS] = {[FOUR] = bfloats_four, [EIGHT] = bfloats_eight},
    [HALVES] = {[FOUR] = halves_four, [TABLE] = halves_table, [FIVE] = halves_five, [EIGHT] = halves_eight},
    [HALVES_MIN] = {[FOUR] = halves_min_four, [FIVE] = halves_min_five, [EIGHT] = halves_min_eight},
    [SUPER_MIN] = {[FOUR] = super_min_four, [FIVE] = super_min_five, [EIGHT] = super_min_eight},
    [SUPER_SIGNED] = {[TABLE] = super_signed_table, [EIGHT] = super_signed_eight},
    [SUPER_SIXTEENS] = {[THREE] = super_sixteens_three, [SIX] = super_sixteens_six, [EIGHT] = super_sixteens_eight},
    [SUPER_MIN_SIXTEENS] = {[TWO] = super_min_sixteens_two},
};

/* Four rows of floats times `tokens` inputs, which is a constant wherever this is inlined. */
INLINE void plain_tile(const Weight *weight, int first, const float *x, int64_t token, int tokens, const float *bias,
                       int adds, float *out, int64_t stride) {
    const int columns = weight->columns, rows = weight->rows - first < 4 ? weight->rows - first : 4;
    const float *matrix = (const float *)weight->blocks, *lines[4];
    Floats sums[PLAIN_TILE][4];
    UNROLL for (int row = 0; row < 4; row++)
        lines[row] = matrix + (int64_t)(first + (row < rows ? row : rows - 1)) * columns;
    UNROLL for (int i = 0; i < tokens; i++)
        UNROLL for (int row = 0; row < 4; row++) sums[i][row] = spread(0.0f);
    for (int k = 0; k < columns; k += WIDTH) {
        Floats part[4];
        UNROLL for (int row = 0; row < 4; row++) part[row] = load(lines[row] + k);
        UNROLL for (int row = 0; row < 4; row++) expect(lines[row] + 4 * columns + k);
        UNROLL for (int i = 0; i < tokens; i++) {
            const Floats input = load(x + (token + i) * columns + k);
            UNROLL for (int row = 0; row < 4; row++) sums[i][row] = fused(sums[i][row], part[row], input);
        }
    }
    UNROLL for (int i = 0; i < tokens; i++) {
        float results[4], *place = out + (token + i) * stride + first;
        store_four(results, four_sums(sums[i][0], sums[i][1], sums[i][2], sums[i][3]));
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
            for (; token + PLAIN_TILE <= end; token += PLAIN_TILE)
                plain_tile(weight, four * 4, x, token, PLAIN_TILE, bias, adds, out, stride);
            if (token + 2 <= end) {
                plain_tile(weight, four * 4, x, token, 2, bias, adds, out, stride);
                token += 2;
            }
            if (token < end) plain_tile(weight, four * 4, x, token, 1, bias, adds, out, stride);
        }
    }
}

/* Room that each thread needs to widen blocks of so many columns: with the longest headers. */
static size_t widened_bytes(int columns) {
    return (size_t)SIDE_BLOCKS * (columns / GROUP) * (4 * SCALE_BYTES + value_bytes(EIGHT));
}

/* The blocks from `index`, widened in `room`. The last block of a weight is beside itself, and multiplied once too often. */
static void place_blocks(Rows *rows, int64_t index, int64_t last, size_t bytes, int widens, uint8_t *room) {
    const Weight *weight = rows->weight;
    const int header = header_of(weight->kind), values = values_of(weight->kind);
    rows->first = index * BLOCK_ROWS;
    UNROLL for (int side = 0; side < SIDE_BLOCKS; side++) {
        const int64_t place = index + side < last ? index + side : last;
        rows->blocks[side] = weight->blocks + place * bytes;
        if (!widens) continue;
        uint8_t *wide = room + side * widened_bytes(weight->columns) / SIDE_BLOCKS;
        widen_block(header, values, rows->blocks[side], weight->columns / GROUP, wide);
        rows->blocks[side] = wide;
    }
}

/* One piece of a linear layer; `room` is the thread's own. */
static void piece_product(const Weight *weight, Input x, int64_t nodes, const float *bias, int adds, float *out,
                          int64_t stride, uint8_t *room, int thread, int threads) {
    const int64_t count = (weight->rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const Share places = share_of((count + SIDE_BLOCKS - 1) / SIDE_BLOCKS, thread, threads);
    const size_t bytes = block_bytes(weight);
    const int header = header_of(weight->kind), values = values_of(weight->kind);
    Rows rows = {weight, {0}, x, {0, 0}, bias, out, stride, steps_of(values), 0, adds};
    for (int64_t chunk = 0; chunk < nodes; chunk += CHUNK) {
        rows.tokens = (Share){chunk, nodes - chunk < CHUNK ? nodes : chunk + CHUNK};
        const int widens = rows.tokens.end - chunk > widens_above(values);
        const RowsProduct multiply = ROWS_PRODUCTS[header][widens ? EIGHT : values];
        for (int64_t place = places.start; place < places.end; place++) {
            place_blocks(&rows, place * SIDE_BLOCKS, count - 1, bytes, widens, room);
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

/* Room for the inputs of some tokens, and of those that a tile computes beside them. */
static int reserve_input(Input *out, int64_t tokens, int64_t columns, int needs) {
    const int64_t count = (tokens + MORE_TOKENS) * columns;
    *out = (Input){0, 0, 0, 0, 0};
    if (needs & PLAIN) out->plain = malloc(count * sizeof(float));
    if (needs & ROUNDED) out->values = malloc(count);
    if (needs & ROUNDED) out->scales = malloc(count / GROUP * sizeof(float));
    if (KEEPS_GROUPS && needs & ROUNDED) out->groups = malloc(count / GROUP * sizeof(InputGroup));
    if (needs & SUMS) out->sums = malloc(count / GROUP * sizeof(float));
    const int64_t kept = tokens * columns / GROUP, more = MORE_TOKENS * columns / GROUP;
    if (MORE_TOKENS && out->scales) memset(out->scales + kept, 0, more * sizeof(float));
    if (MORE_TOKENS && out->sums) memset(out->sums + kept, 0, more * sizeof(float));
    if (MORE_TOKENS && out->groups) memset(out->groups + kept, 0, more * sizeof(InputGroup));
    return (out->plain || !(needs & PLAIN)) && ((out->values && out->scales) || !(needs & ROUNDED)) &&
           (out->sums || !(needs & SUMS)) && (out->groups || !KEEPS_GROUPS || !(needs & ROUNDED));
}

static void release_input(Input *input) {
    free(input->values);
    free(input->scales);
    free(input->sums);
    free(input->plain);
    free(input->groups);
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
    ProductJob job = {linear, x, bias, out, {0, 0, 0, 0, 0}, room, {0, 0}, nodes};
    const int fits = reserve_input(&job.input, nodes, columns, needs_of(linear)) && room;
    if (fits) GOMP_parallel(product_share, &job, threads, 0);
    release_input(&job.input);
    free(room);
    return fits ? 0 : -1;
}
