/* Attention, and whole layers. Compiled behind cpu_products.c, as one source with cpu_kernels.c. */

/* --- attention -------------------------------------------------------------------------------------------------- */

static void norm_head(float *head, const float *gain, int size, float eps) {
    const float scale = inverse_rms(head, size, eps);
    for (int k = 0; k < size; k += WIDTH) store(head + k, load(head + k) * spread(scale) * load(gain + k));
}

static void rotate_head(float *head, const float *rope, int half) {
    const float *cosines = rope, *sines = rope + half;
    for (int k = 0; k < half; k += WIDTH) {
        const Floats low = load(head + k), high = load(head + k + half);
        const Floats cosine = load(cosines + k), sine = load(sines + k);
        store(head + k, low * cosine - high * sine);
        store(head + k + half, high * cosine + low * sine);
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
    Floats sums[8];
    UNROLL for (int i = 0; i < 8; i++) sums[i] = spread(0.0f);
    for (int k = 0; k < size; k += WIDTH) {
        const Floats part = load(query + k);
        UNROLL for (int i = 0; i < 8; i++) sums[i] = fused(sums[i], part, load(keys[i] + k));
    }
    UNROLL for (int i = 0; i < 8; i += 4)
        store_four(out + i, four_times(four_sums(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]), scale));
}

#ifdef BLOCK_PAIRS

/* Dot products of some queries, a constant where this is inlined, with eight keys: summed as in eight_dots, two keys at once. */
INLINE void pair_dots(const float *queries, int count, const float *const keys[8], int size, float scale, float *out,
                      int64_t stride) {
    Pair sums[4][4];
    UNROLL for (int i = 0; i < count; i++)
        UNROLL for (int key = 0; key < 4; key++) sums[i][key] = no_pair();
    for (int k = 0; k < size; k += WIDTH) {
        Pair parts[4];
        UNROLL for (int key = 0; key < 4; key++) parts[key] = pair_of(keys[key] + k, keys[key + 4] + k);
        UNROLL for (int i = 0; i < count; i++) {
            const Pair query = twice(queries + i * size + k);
            UNROLL for (int key = 0; key < 4; key++) sums[i][key] = fused_pair(sums[i][key], query, parts[key]);
        }
    }
    UNROLL for (int i = 0; i < count; i++)
        store_sums(out + i * stride, sums[i][0], sums[i][1], sums[i][2], sums[i][3], scale);
}

#endif

/* Eight dot products of each of some queries. stride: from the products of a query to the next one's. */
INLINE void score_eight(const float *queries, int count, const float *const keys[8], int size, float scale, float *out,
                        int64_t stride) {
#ifdef BLOCK_PAIRS
    for (; count >= 4; count -= 4, queries += 4 * size, out += 4 * stride)
        pair_dots(queries, 4, keys, size, scale, out, stride);
    if (count == 3) return pair_dots(queries, 3, keys, size, scale, out, stride);
    if (count == 2) return pair_dots(queries, 2, keys, size, scale, out, stride);
#endif
    for (int i = 0; i < count; i++) eight_dots(queries + i * size, keys, size, scale, out + i * stride);
}

/* Scores -> exponentials; returns 1 / their sum. Scores come in whole eights, those behind the last key -inf. */
static float softmax(float *scores, int padded) {
    Floats peak = spread(-INFINITY), sum = spread(0.0f);
    for (int key = 0; key < padded; key += WIDTH) peak = highest(peak, load(scores + key));
    const Floats top = spread(highest_of(peak));
    for (int key = 0; key < padded; key += WIDTH) {
        const Floats part = exponential(load(scores + key) - top);
        store(scores + key, part);
        sum = sum + part;
    }
    return 1.0f / sum_of(sum);
}

/* Columns of the values of some keys, weighed and added to out in the order of the keys. `width` is a constant where
 * this is inlined. */
INLINE void mix_columns(const float *values, int64_t stride, const Node *node, Share keys, const float *weights,
                        int width, float *out) {
    Floats sums[64 / WIDTH];
    UNROLL for (int i = 0; i < width / WIDTH; i++) sums[i] = load(out + WIDTH * i);
    for (int64_t key = keys.start; key < keys.end; key++) {
        const float *value = values + slot_of(node, key) * stride;
        __asm__("" : "+r"(value)); /* one address, not sixteen */
        UNROLL for (int i = 0; i < width / WIDTH; i++)
            sums[i] = fused(sums[i], load(value + WIDTH * i), spread(weights[key]));
    }
    UNROLL for (int i = 0; i < width / WIDTH; i++) store(out + WIDTH * i, sums[i]);
}

#ifdef BLOCK_PAIRS

/* The same for some query heads at once; `heads` and `width` are constants where this is inlined. */
INLINE void mix_heads(const float *values, int64_t stride, const Node *node, Share keys, const float *weights,
                      int64_t weight_stride, int heads, int width, float *out, int64_t out_stride) {
    Pair sums[3][4];
    UNROLL for (int head = 0; head < heads; head++)
        UNROLL for (int i = 0; i < width / 16; i++) sums[head][i] = load_pair(out + head * out_stride + 16 * i);
    for (int64_t key = keys.start; key < keys.end; key++) {
        const float *value = values + slot_of(node, key) * stride;
        Pair parts[4];
        UNROLL for (int i = 0; i < width / 16; i++) parts[i] = load_pair(value + 16 * i);
        UNROLL for (int head = 0; head < heads; head++) {
            const Pair weight = spread_pair(weights[head * weight_stride + key]);
            UNROLL for (int i = 0; i < width / 16; i++) sums[head][i] = fused_pair(sums[head][i], parts[i], weight);
        }
    }
    UNROLL for (int head = 0; head < heads; head++)
        UNROLL for (int i = 0; i < width / 16; i++) store_pair(out + head * out_stride + 16 * i, sums[head][i]);
}

#endif

/* Columns of the values for every query head. weights [heads, weight_stride], out [heads, out_stride] */
INLINE void mix_group(const float *values, int64_t stride, const Node *node, Share keys, const float *weights,
                      int64_t weight_stride, int heads, int width, float *out, int64_t out_stride) {
#ifdef BLOCK_PAIRS
    for (; heads >= 3; heads -= 3, weights += 3 * weight_stride, out += 3 * out_stride)
        mix_heads(values, stride, node, keys, weights, weight_stride, 3, width, out, out_stride);
    if (heads == 2) return mix_heads(values, stride, node, keys, weights, weight_stride, 2, width, out, out_stride);
    if (heads == 1) return mix_heads(values, stride, node, keys, weights, weight_stride, 1, width, out, out_stride);
#endif
    for (int head = 0; head < heads; head++)
        mix_columns(values, stride, node, keys, weights + head * weight_stride, width, out + head * out_stride);
}

/* One node and the query heads that share a key head: a step goes over some of the keys. */
typedef struct {
    const Node *node;
    const float *queries; /* [group, head_dim] */
    float *scores;        /* [group, padded] */
    float *out;           /* [group, head_dim] */
    int32_t keys, padded;
} Attending;

/* The next keys up to `end`, of those that there are. */
INLINE Share keys_of(const Attending *one, int64_t start, int64_t end) {
    const int64_t last = end - start < KEY_STEP ? end : start + KEY_STEP;
    return (Share){start, one->keys < last ? one->keys : last};
}

NOT_INLINE void score_step(const Attending *one, const float *cached, int64_t stride, Share keys, int group,
                           int size) {
    const float scale = 1.0f / sqrtf((float)size);
    for (int64_t key = keys.start; key < keys.end; key += 8) {
        const float *eight[8];
        for (int i = 0; i < 8; i++) {
            const int near = key + i < one->keys ? key + i : one->keys - 1;
            eight[i] = cached + slot_of(one->node, near) * stride;
        }
        score_eight(one->queries, group, eight, size, scale, one->scores + key, one->padded);
    }
}

NOT_INLINE void mix_step(const Attending *one, const float *cached, int64_t stride, Share keys, Share columns,
                         int group, int size) {
    int64_t column = columns.start;
    for (; column + 64 <= columns.end; column += 64)
        mix_group(cached + column, stride, one->node, keys, one->scores, one->padded, group, 64, one->out + column, size);
    for (; column + 32 <= columns.end; column += 32)
        mix_group(cached + column, stride, one->node, keys, one->scores, one->padded, group, 32, one->out + column, size);
    for (; column < columns.end; column += 16)
        mix_group(cached + column, stride, one->node, keys, one->scores, one->padded, group, 16, one->out + column, size);
}

/* Scores -> weights that add up to one; out begins at zero. */
static void weigh(const Attending *one, int group, int size) {
    for (int head = 0; head < group; head++) {
        float *weights = one->scores + (int64_t)head * one->padded;
        for (int key = one->keys; key < one->padded; key++) weights[key] = -INFINITY;
        const float inverse = softmax(weights, one->padded);
        for (int key = 0; key < one->padded; key += WIDTH)
            store(weights + key, load(weights + key) * spread(inverse));
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
        for (int i = 0; i < count; i++)
            score_step(nodes + i, model->keys + place, stride, keys_of(nodes + i, start, longest), group, size);
    for (int i = 0; i < count; i++) weigh(nodes + i, group, size);
    for (int64_t start = 0; start < longest; start += KEY_STEP)
        for (int i = 0; i < count; i++)
            mix_step(nodes + i, model->values + place, stride, keys_of(nodes + i, start, longest), (Share){0, size},
                     group, size);
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
    int64_t node_scores;            /* of a node, where there are few */
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
    const int64_t padded = (room.keys + 7) / 8 * 8, few = nodes <= FEW_NODES ? nodes * model->num_heads * padded : 0;
    work->node_scores = model->num_heads * padded;
    work->score_room = padded * (model->num_heads / model->num_kv_heads) * NODE_TILE + 16;
    work->nodes = malloc(nodes * sizeof(Node));
    work->row = malloc(room.row * sizeof(Node));
    work->slots = malloc(room.slots * sizeof(int32_t));
    work->paths = malloc((room.paths + 1) * sizeof(int32_t));
    work->qkv = malloc(nodes * heads * model->head_dim * sizeof(float));
    work->attended = malloc(nodes * query_size * sizeof(float));
    work->both = malloc(nodes * 2 * model->intermediate_size * sizeof(float));
    work->scores = malloc((few ? few : work->score_room * model->num_threads) * sizeof(float));
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

/* How attention is dealt out: nodes of a tile, and parts of the query heads that share a key head. */
typedef struct {
    int32_t nodes, parts;
} Dealing;

/* Nodes that share what they read of the cache go together, and query heads that share a key head. Where that leaves
 * threads without work, as few key heads leave some of many, tiles have fewer nodes, or heads go alone. */
static Dealing dealing_of(int64_t nodes, int kv_heads, int group, int threads) {
    for (int tile = NODE_TILE; tile > 0; tile--) {
        const int64_t items = (nodes + tile - 1) / tile * kv_heads;
        if (items % threads == 0 || items >= 4 * threads) return (Dealing){tile, 1};
    }
    return (Dealing){NODE_TILE, group};
}

/* A node and query heads from `head` on. */
INLINE Attending attending(const Model *model, const Work *work, int64_t index, int head, float *scores) {
    const Node *node = work->nodes + index;
    const int keys = node->seen + node->tail_count, size = model->head_dim;
    const int64_t heads = model->num_heads + 2 * model->num_kv_heads;
    return (Attending){node, work->qkv + (index * heads + head) * size, scores,
                       work->attended + (index * model->num_heads + head) * size, keys, (keys + 7) / 8 * 8};
}

/* The same in a pass of few nodes, whose scores all have their place. */
INLINE Attending few_attending(const Model *model, const Work *work, int64_t index, int head) {
    Attending one = attending(model, work, index, head, work->scores + index * work->node_scores);
    one.scores += (int64_t)head * one.padded;
    return one;
}

/* Some keys of a key head against all nodes, in steps that stay near for the next node. */
static void score_keys(const Model *model, int64_t offset, int64_t nodes, const Work *work, int kv_head, Share keys) {
    const int group = model->num_heads / model->num_kv_heads;
    const float *cached = model->keys + offset + kv_head * model->head_stride;
    for (int64_t start = keys.start; start < keys.end; start += KEY_STEP)
        for (int64_t index = 0; index < nodes; index++) {
            const Attending one = few_attending(model, work, index, kv_head * group);
            score_step(&one, cached, model->slot_stride, keys_of(&one, start, keys.end), group, model->head_dim);
        }
}

static void mix_values(const Model *model, int64_t offset, int64_t nodes, const Work *work, int kv_head, int64_t longest,
                       Share columns) {
    const int group = model->num_heads / model->num_kv_heads;
    const float *cached = model->values + offset + kv_head * model->head_stride;
    for (int64_t start = 0; start < longest; start += KEY_STEP)
        for (int64_t index = 0; index < nodes; index++) {
            const Attending one = few_attending(model, work, index, kv_head * group);
            mix_step(&one, cached, model->slot_stride, keys_of(&one, start, longest), columns, group, model->head_dim);
        }
}

/* Attention of few nodes. Threads share out keys, then heads, then columns of values: each reads a part of the cache
 * that no other reads, once for all nodes and heads, whatever the number of key heads is. */
static void attend_few(const Model *model, int64_t offset, int64_t nodes, const Work *work, Barrier *barrier, int thread,
                       int threads) {
    const int kv_heads = model->num_kv_heads, parts = model->head_dim / 16;
    int64_t eights = 0;
    for (int64_t index = 0; index < nodes; index++) {
        const int64_t own = few_attending(model, work, index, 0).padded / 8;
        eights = own > eights ? own : eights;
    }
    const Share scored = share_of(kv_heads * eights, thread, threads);
    for (int64_t at = scored.start, end; at < scored.end; at = end) {
        const int64_t before = at / eights * eights;
        end = before + eights < scored.end ? before + eights : scored.end;
        score_keys(model, offset, nodes, work, at / eights, (Share){8 * (at - before), 8 * (end - before)});
    }
    meet(barrier, threads);
    const Share weighed = share_of(nodes * model->num_heads, thread, threads);
    for (int64_t at = weighed.start; at < weighed.end; at++) {
        const Attending one = few_attending(model, work, at / model->num_heads, at % model->num_heads);
        weigh(&one, 1, model->head_dim);
    }
    meet(barrier, threads);
    const Share mixed = share_of(kv_heads * parts, thread, threads);
    for (int64_t at = mixed.start, end; at < mixed.end; at = end) {
        const int64_t before = at / parts * parts;
        end = before + parts < mixed.end ? before + parts : mixed.end;
        mix_values(model, offset, nodes, work, at / parts, 8 * eights, (Share){16 * (at - before), 16 * (end - before)});
    }
}

/* Every thread takes nodes from the whole pass: later nodes of a prompt have more keys. */
static void attend_many(const Model *model, int64_t offset, int64_t nodes, const Work *work, int thread, int threads) {
    const int kv_heads = model->num_kv_heads, group = model->num_heads / kv_heads;
    const Dealing dealing = dealing_of(nodes, kv_heads, group, threads);
    const int64_t tiles = (nodes + dealing.nodes - 1) / dealing.nodes;
    const int parts = dealing.parts, together = group / parts;
    const int64_t items = tiles * kv_heads * parts, step = parts > 1 ? 1 : threads;
    const Share share = parts > 1 ? share_of(items, thread, threads) : (Share){thread, items};
    for (int64_t item = share.start; item < share.end; item += step) {
        const int64_t first = item / (kv_heads * parts) * dealing.nodes, head = item % (kv_heads * parts) * together;
        const int count = nodes - first < dealing.nodes ? nodes - first : dealing.nodes;
        float *scores = work->scores + work->score_room * thread;
        Attending tile[NODE_TILE];
        for (int i = 0; i < count; i++) {
            tile[i] = attending(model, work, first + i, head, scores);
            scores += (int64_t)tile[i].padded * together;
        }
        attend_nodes(model, offset, tile, count, head / group, together);
    }
}

static void attend(const Model *model, int64_t offset, int64_t nodes, const Work *work, Barrier *barrier, int thread,
                   int threads) {
    if (nodes > FEW_NODES) return attend_many(model, offset, nodes, work, thread, threads);
    attend_few(model, offset, nodes, work, barrier, thread, threads);
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
    attend(model, offset, nodes, work, barrier, thread, threads);
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

/* x [rows, size], each row through a root-mean-square norm. size is a multiple of 16. */
void paceline_norm(const float *x, const float *gain, int64_t rows, int32_t size, float eps, float *out) {
    memcpy(out, x, rows * size * sizeof(float));
    for (int64_t row = 0; row < rows; row++) norm_head(out + row * size, gain, size, eps);
}
