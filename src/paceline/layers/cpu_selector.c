/* The path of a candidate selector (heads/candidate_selector.py) in one call: of every row of a block the likeliest
 * tokens, and of those the one that follows the token before it best. Compiled behind cpu_kernels.c, as one source with it.
 */

enum { MAX_CANDIDATES = 64 };

/* before [vocab, rank], after [draft_vocab_size, rank]: what tokens say as neighbours; target_ids [draft_vocab_size] */
typedef struct {
    const float *before, *after;
    const int64_t *target_ids;
    int32_t rank, vocab_size, draft_vocab_size, top_k;
} Selector;

typedef struct {
    float scores[MAX_CANDIDATES]; /* the highest first */
    int32_t ids[MAX_CANDIDATES], count;
} Candidates;

static void insert_candidate(Candidates *best, int top_k, float score, int32_t id) {
    int place = best->count < top_k ? best->count++ : top_k - 1;
    for (; place > 0 && best->scores[place - 1] < score; place--) {
        best->scores[place] = best->scores[place - 1];
        best->ids[place] = best->ids[place - 1];
    }
    best->scores[place] = score;
    best->ids[place] = id;
}

/* The highest scores of a row, sixteen at a time: few of them are above the lowest candidate so far. */
static void find_candidates(const float *scores, int size, int top_k, Candidates *best) {
    best->count = 0;
    for (int first = 0; first < size; first += 16) {
        const int end = size - first < 16 ? size : first + 16;
        if (end == first + 16 && best->count == top_k) {
            Floats peak = load(scores + first);
            for (int i = WIDTH; i < 16; i += WIDTH) peak = highest(peak, load(scores + first + i));
            if (!(highest_of(peak) > best->scores[top_k - 1])) continue;
        }
        for (int id = first; id < end; id++)
            if (best->count < top_k || scores[id] > best->scores[top_k - 1])
                insert_candidate(best, top_k, scores[id], id);
    }
}

/* The place of the best candidate after `previous`; sure: its probability among the candidates. */
static int best_after(const Selector *selector, const Candidates *candidates, const float *gate, int64_t previous,
                      float *sure) {
    const float *before = selector->before + previous * selector->rank;
    float scores[MAX_CANDIDATES], sum = 0.0f;
    int best = 0;
    for (int place = 0; place < candidates->count; place++) {
        const float *after = selector->after + (int64_t)candidates->ids[place] * selector->rank;
        float product = 0.0f;
        for (int k = 0; k < selector->rank; k++) product += before[k] * gate[k] * after[k];
        scores[place] = candidates->scores[place] + product;
        if (scores[place] > scores[best]) best = place;
    }
    for (int place = 0; place < candidates->count; place++) sum += expf(scores[place] - scores[best]);
    *sure = 1.0f / sum;
    return best;
}

/* logits [depth, draft_vocab_size], gates [depth, rank] of one sequence -> tokens [depth], ids of the target, and how sure
   the head is of each. Returns 0, or -1 for an anchor that is no token. */
int paceline_select_path(const Selector *selector, const float *logits, const float *gates, int32_t depth,
                         int64_t anchor, int64_t *tokens, float *confidence) {
    Candidates candidates;
    int64_t previous = anchor;
    if (anchor < 0 || anchor >= selector->vocab_size) return -1;
    for (int row = 0; row < depth; row++) {
        const int64_t size = selector->draft_vocab_size;
        find_candidates(logits + row * size, size, selector->top_k, &candidates);
        const int place = best_after(selector, &candidates, gates + (int64_t)row * selector->rank, previous,
                                     confidence + row);
        previous = tokens[row] = selector->target_ids[candidates.ids[place]];
    }
    return 0;
}
