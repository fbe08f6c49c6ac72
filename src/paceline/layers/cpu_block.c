/* A block of a block drafter (heads/dflash.py) in one call: its rows through all layers of the head, behind a context
 * whose keys and values are cached. Another call writes those: of all layers, made of the target's states. Compiled behind cpu_kernels.c, as one source with it.
 *
 * A layer may have a convolution around each half of it: a row mixes in rows before it, by weights made of its own input.
 */

/* base [2 sides, taps, hidden_size], 0: there is none; projection: the weights a row adds, [2 sides, taps, channel groups] */
typedef struct {
    const float *base;
    Linear projection;
} Convolution;

typedef struct {
    Layer layer;
    Convolution attention, mlp;
} BlockLayer;

/* model: sizes, the cache of one sequence, and a rope with one entry for each row of the block. */
typedef struct {
    Model model;
    const BlockLayer *layers;
    const float *norm;
    int32_t num_layers, taps, channels; /* of a group that shares the weights of a convolution */
    int32_t length, rows, causal;       /* cached tokens before the block; its rows, who see those behind them or not */
} Block;

/* Beside what layers of a model write: normed rows, outputs of a half of a layer, weights of a convolution. */
typedef struct {
    Work work;
    Input normed;
    float *mixed, *weights;
} BlockWork;

typedef struct {
    const Block *block;
    float *hidden;
    BlockWork work;
    Barrier barrier;
} BlockJob;

static int weights_per_row(const Block *block) {
    return 2 * block->taps * (block->model.hidden_size / block->channels);
}

/* 32 channels of a row after one side of a convolution: Σ (base + weight of the group) · the row so many before. */
INLINE void convolve(const Block *block, const Convolution *convolution, const float *weights, int side,
                     const float *x, int64_t row, int column, Floats out[GROUP / WIDTH]) {
    const int size = block->model.hidden_size, groups = size / block->channels;
    for (int i = 0; i < GROUP / WIDTH; i++) out[i] = spread(0.0f);
    for (int tap = 0; tap < block->taps && tap <= row; tap++) {
        const float *base = convolution->base + (int64_t)(side * block->taps + tap) * size + column;
        const float *added = weights + row * weights_per_row(block) + (side * block->taps + tap) * groups;
        const float *given = x + (row - tap) * size + column;
        for (int i = 0; i < GROUP / WIDTH; i++) {
            const Floats own = spread(added[(column + WIDTH * i) / block->channels]);
            out[i] = fused(out[i], load(base + WIDTH * i) + own, load(given + WIDTH * i));
        }
    }
}

/* The input of a half of a layer: hidden states normed, and convolved where there is a convolution. */
static void half_input(const Block *block, const Convolution *convolution, const float *gain, const float *hidden,
                       BlockWork *work, Barrier *barrier, int thread, int threads) {
    const Model *model = &block->model;
    const int per_row = model->hidden_size / GROUP;
    const Share groups = share_of((int64_t)block->rows * per_row, thread, threads);
    const Input out = convolution->base ? work->normed : work->work.x;
    norm_groups(hidden, gain, model->hidden_size, model->eps, out, groups);
    meet(barrier, threads);
    if (!convolution->base) return;
    product(&convolution->projection, work->normed, block->rows, 0, 0, work->weights,
            work->work.blocks + work->work.block_room * thread, thread, threads);
    meet(barrier, threads);
    for (int64_t group = groups.start; group < groups.end; group++) {
        Floats part[GROUP / WIDTH];
        convolve(block, convolution, work->weights, 0, work->normed.plain, group / per_row, group % per_row * GROUP,
                 part);
        put_group(part, work->work.x, group);
    }
    meet(barrier, threads);
}

/* hidden += the output of a half of a layer, convolved where there is a convolution. */
static void half_output(const Block *block, const Convolution *convolution, const Linear *linear, const float *bias,
                        float *hidden, BlockWork *work, Barrier *barrier, int thread, int threads) {
    const int size = block->model.hidden_size, per_row = size / GROUP;
    const int convolves = convolution->base != 0;
    product(linear, work->work.wide, block->rows, bias, !convolves, convolves ? work->mixed : hidden,
            work->work.blocks + work->work.block_room * thread, thread, threads);
    meet(barrier, threads);
    if (!convolves) return;
    const Share groups = share_of((int64_t)block->rows * per_row, thread, threads);
    for (int64_t group = groups.start; group < groups.end; group++) {
        Floats part[GROUP / WIDTH];
        float *place = hidden + group * GROUP;
        convolve(block, convolution, work->weights, 1, work->mixed, group / per_row, group % per_row * GROUP, part);
        for (int i = 0; i < GROUP / WIDTH; i++) store(place + WIDTH * i, load(place + WIDTH * i) + part[i]);
    }
    meet(barrier, threads);
}

static void run_block_layer(const Block *block, int index, BlockWork *work, float *hidden, Barrier *barrier,
                            int thread, int threads) {
    const Model *model = &block->model;
    const BlockLayer *own = block->layers + index;
    const Layer *layer = &own->layer;
    const int64_t rows = block->rows, offset = model->layer_stride * index;
    const int64_t query_size = (int64_t)model->num_heads * model->head_dim;
    half_input(block, &own->attention, layer->attention_norm, hidden, work, barrier, thread, threads);
    product(&layer->qkv, work->work.x, rows, layer->qkv_bias, 0, work->work.qkv,
            work->work.blocks + work->work.block_room * thread, thread, threads);
    meet(barrier, threads);
    place_heads(model, layer, offset, rows, &work->work, thread, threads);
    meet(barrier, threads);
    attend(model, offset, rows, &work->work, barrier, thread, threads);
    meet(barrier, threads);
    round_groups(work->work.attended, work->work.wide, share_of(rows * query_size / GROUP, thread, threads));
    meet(barrier, threads);
    half_output(block, &own->attention, &layer->output, layer->output_bias, hidden, work, barrier, thread, threads);
    half_input(block, &own->mlp, layer->mlp_norm, hidden, work, barrier, thread, threads);
    product(&layer->gate_up, work->work.x, rows, 0, 0, work->work.both,
            work->work.blocks + work->work.block_room * thread, thread, threads);
    meet(barrier, threads);
    gate_groups(work->work.both, model->intermediate_size, work->work.wide,
                share_of(rows * model->intermediate_size / GROUP, thread, threads));
    meet(barrier, threads);
    half_output(block, &own->mlp, &layer->down, 0, hidden, work, barrier, thread, threads);
}

static void block_share(void *data) {
    BlockJob *job = data;
    const Block *block = job->block;
    const int thread = omp_get_thread_num(), threads = omp_get_num_threads(), size = block->model.hidden_size;
    for (int index = 0; index < block->num_layers; index++)
        run_block_layer(block, index, &job->work, job->hidden, &job->barrier, thread, threads);
    const Share rows = share_of(block->rows, thread, threads);
    for (int64_t row = rows.start; row < rows.end; row++)
        norm_head(job->hidden + row * size, block->norm, size, block->model.eps);
    meet(&job->barrier, threads);
}

static int block_needs(const Block *block) {
    int needs = 0;
    for (int index = 0; index < block->num_layers; index++) {
        const BlockLayer *own = block->layers + index;
        const Layer *layer = &own->layer;
        needs |= needs_of(&layer->qkv) | needs_of(&layer->output) | needs_of(&layer->gate_up) | needs_of(&layer->down);
        if (own->attention.base) needs |= needs_of(&own->attention.projection) | needs_of(&own->mlp.projection);
    }
    return needs;
}

/* Every row sees the context, and of the block the rows up to its own or all of them. */
static void fill_block(const Block *block, Work *work) {
    for (int key = 0; key < block->length + block->rows; key++) work->slots[key] = key;
    for (int row = 0; row < block->rows; row++) {
        const int seen = block->length + (block->causal ? row + 1 : block->rows);
        work->nodes[row] = (Node){work->slots, 0, seen, 0, row, block->length + row};
    }
}

/* hidden [rows, hidden_size]: embeddings of the block, in place through all layers and the last norm. The block's keys and
   values are written behind the context's. Returns 0, or -1 where memory is short. */
int paceline_run_block(const Block *block, float *hidden) {
    const int64_t size = block->model.hidden_size, rows = block->rows;
    int32_t *parents = malloc(rows * sizeof(int32_t));
    const Batch batch = {.lengths = &block->length, .counts = &block->rows, .parents = parents, .num_rows = 1,
                         .num_nodes = block->rows};
    BlockJob job = {.block = block, .hidden = hidden};
    const int needs = block_needs(block);
    if (!parents) return -1;
    for (int row = 0; row < rows; row++) parents[row] = row - 1;
    job.work.mixed = malloc(rows * size * sizeof(float));
    job.work.weights = malloc((rows * weights_per_row(block) + 1) * sizeof(float));
    const int work_fits = reserve_work(&block->model, &batch, needs, &job.work.work);
    const int fits = reserve_input(&job.work.normed, rows, size, needs | PLAIN) && work_fits && job.work.mixed &&
                     job.work.weights;
    if (fits) {
        fill_block(block, &job.work.work);
        GOMP_parallel(block_share, &job, block->model.num_threads, 0);
    }
    release_work(&job.work.work);
    release_input(&job.work.normed);
    free(job.work.mixed);
    free(job.work.weights);
    free(parents);
    return fits ? 0 : -1;
}

/* --- the context ------------------------------------------------------------------------------------------------ */

/* model: sizes, the cache of one sequence, and a rope with one entry for each row. input: states of the target -> hidden
 * states; entries: normed hidden states -> keys of all layers, then their values. key_norms [heads, head_dim] */
typedef struct {
    Model model;
    Linear input, entries;
    const float *norm, *key_norms;
    int32_t heads, length, rows, unused; /* heads: of all layers; tokens that are cached before the rows */
} Context;

typedef struct {
    const Context *context;
    const float *states;
    Input x, normed;
    float *hidden, *entries;
    uint8_t *room;
    size_t room_bytes; /* of a thread */
    Barrier barrier;
} ContextJob;

/* A key, normed and rotated, or a value of one row goes to the cache. */
static void place_entry(const Context *context, float *entry, int row, int head) {
    const Model *model = &context->model;
    const int size = model->head_dim, index = head % context->heads;
    const int64_t place = index * model->head_stride + (context->length + row) * model->slot_stride;
    if (head < context->heads) {
        norm_head(entry, context->key_norms + (int64_t)index * size, size, model->eps);
        rotate_head(entry, model->rope + (int64_t)row * size, size / 2);
    }
    memcpy((head < context->heads ? model->keys : model->values) + place, entry, size * sizeof(float));
}

static void context_share(void *data) {
    ContextJob *job = data;
    const Context *context = job->context;
    const Model *model = &context->model;
    const int thread = omp_get_thread_num(), threads = omp_get_num_threads(), heads = 2 * context->heads;
    const int64_t rows = context->rows, columns = context->input.pieces->columns;
    uint8_t *room = job->room + job->room_bytes * thread;
    round_groups(job->states, job->x, share_of(rows * columns / GROUP, thread, threads));
    meet(&job->barrier, threads);
    product(&context->input, job->x, rows, 0, 0, job->hidden, room, thread, threads);
    meet(&job->barrier, threads);
    norm_groups(job->hidden, context->norm, model->hidden_size, model->eps, job->normed,
                share_of(rows * model->hidden_size / GROUP, thread, threads));
    meet(&job->barrier, threads);
    product(&context->entries, job->normed, rows, 0, 0, job->entries, room, thread, threads);
    meet(&job->barrier, threads);
    const Share items = share_of(rows * heads, thread, threads);
    for (int64_t item = items.start; item < items.end; item++)
        place_entry(context, job->entries + item * model->head_dim, item / heads, item % heads);
    meet(&job->barrier, threads);
}

/* states [rows, columns of the input] of the target: their keys and values are written behind those that are cached.
   Returns 0, or -1 where memory is short. */
int paceline_run_context(const Context *context, const float *states) {
    const Model *model = &context->model;
    const int64_t rows = context->rows, columns = context->input.pieces->columns, size = model->hidden_size;
    ContextJob job = {.context = context, .states = states};
    job.room_bytes = widened_bytes(columns > size ? columns : size);
    job.room = malloc(job.room_bytes * model->num_threads);
    job.hidden = malloc(rows * size * sizeof(float));
    job.entries = malloc(rows * context->entries.rows * sizeof(float));
    const int x_fits = reserve_input(&job.x, rows, columns, needs_of(&context->input));
    const int normed_fits = reserve_input(&job.normed, rows, size, needs_of(&context->entries));
    const int fits = x_fits && normed_fits && job.room && job.hidden && job.entries;
    if (fits) GOMP_parallel(context_share, &job, model->num_threads, 0);
    release_input(&job.x);
    release_input(&job.normed);
    free(job.room);
    free(job.hidden);
    free(job.entries);
    return fits ? 0 : -1;
}
