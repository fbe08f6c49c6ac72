// One pass of a whole decoder over up to 8 * TOKEN_TILES tokens, as one persistent kernel.
//
// Shapes are compile-time constants (see persistent_pass.py): HIDDEN, QUERY, HEAD_DIM, KV_HEADS, GROUP, INTER, VOCAB,
// TOKEN_TILES, BLOCK_SIZE, SPLIT, EPS, SCALE, QK_NORM, SLOTS, QKV_OUTPUTS, HIDDEN_OUTPUTS, CONFIDENCE_BINS, CONFIDENCE_EDGES; PACKED, BOXES, and
// which formats there are: WITH_PLAIN, WITH_INT4, WITH_Q4_K, WITH_Q6_K, WITH_FP8.
//
// The grid has one block a multiprocessor. What one block hands to others carries the number of its layer, word by word:
// readers ask for the words until they have that number, so a hand-over costs one trip to L2 and not a store, a fence, a flag
// and a load. Only the widest one, from gate to down, goes through flags, and where there are few tokens it does not either. The
// first weights of the next product are on their way while a block waits.
//
// Why nothing is overwritten that is still read: down needs what every block has written of gate, once a layer; a block that owns
// no rows of a product does not read its input; and output and down are divided alike, so whoever reads what attention or gate
// wrote must finish before the next layer has an input.
//
// Every sum runs in an order that depends on absolute positions only. So a token's numbers are the same bits whether it
// is read alone, among draft tokens, in a tree or among other sequences.

typedef unsigned int u32;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

constexpr int THREADS = 512;
constexpr int WARPS = 16;
constexpr int HALF = HEAD_DIM / 2;
constexpr int QKV = QUERY + 2 * KV_HEADS * HEAD_DIM;
constexpr int KV_STRIDE = KV_HEADS * HEAD_DIM;     // between tokens of the cache
constexpr int MAX_ROWS = 8 * TOKEN_TILES;
constexpr int SUMS = THREADS;                      // of one warp that are joined together: one a thread
constexpr int CHUNK = 32;                          // tokens of context of one warp
constexpr int CHUNKS = SPLIT / CHUNK;              // warps that attend; SPLIT: tokens of context that one block attends to
static_assert(BLOCK_SIZE % CHUNK == 0 && CHUNKS <= WARPS, "the tokens of a chunk lie side by side");
constexpr int HEAD_ROWS = 16;                      // (node, query head) pairs of one block
constexpr int NODES_PER_TILE = HEAD_ROWS / GROUP;
#if PACKED
constexpr int PART_BYTES = 2 * THREADS * 16;       // 16 bytes of a row of the tile and 16 of its partner for every thread
constexpr int STEP = 128;                          // columns of a unit of packed weights
constexpr int HIGH_AT = (WITH_FP8 ? 2 : 1) * PART_BYTES;           // in a slot: upper bits of codes
constexpr int BESIDE_AT = HIGH_AT + (WITH_Q6_K ? PART_BYTES / 2 : 0);  // scales and minimums
constexpr int BESIDE_BYTES = 192;                  // of a warp
constexpr int SLOT_BYTES = BESIDE_AT + WARPS * BESIDE_BYTES;
constexpr int X_STRIDE_PAD = 16;                   // elements: four rows of x share a row of banks
constexpr int SUMMED = WITH_Q4_K ? 32 : STEP;      // inputs of a sum of x
constexpr int SUMS_STRIDE = (HIDDEN > INTER ? (HIDDEN > QUERY ? HIDDEN : QUERY) : (INTER > QUERY ? INTER : QUERY)) / SUMMED + 4;  // of a token
#else
constexpr int BOX_COLUMNS = 64;                    // that lie together where a copy has put them
constexpr int UNIT_COLUMNS = BOXES * BOX_COLUMNS;  // that a warp multiplies together; one copy brings them
constexpr int UNIT_BYTES = 16 * UNIT_COLUMNS * 2;
constexpr int SLOT_BYTES = WARPS * UNIT_BYTES;     // of the ring of weights: a unit of every warp
constexpr u32 RING_ALIGNMENT = 1024;               // after so many bytes a copy spreads rows over the banks in the same way again
constexpr int X_STRIDE_PAD = 8;                    // elements: a row of x starts 16 bytes after the banks of the one before
#endif
constexpr int MOST_WORDS = 7168;                   // pairs of values that are handed from gate to down as words
constexpr int PAUSE = 200;                         // ns between two questions whether attention has finished
constexpr int PIECE_FIELDS = 9;                    // of a piece of a packed weight
constexpr int PIECES = 2;                          // of a weight at most
constexpr int LAYER_FIELDS = 11 + (PACKED ? 4 * PIECES * PIECE_FIELDS : 0);
#define NEGATIVE __int_as_float(0xff800000)

enum Field { ATTENTION_NORM, QKV_WEIGHT, QKV_BIAS, OUTPUT_WEIGHT, OUTPUT_BIAS, MLP_NORM, GATE_UP, DOWN, QUERY_NORM, KEY_NORM,
             FEATURES, WEIGHTS };  // WEIGHTS: pieces of the four products
enum Piece { PIECE_FORMAT, PIECE_ROWS, PIECE_CODES, PIECE_HIGH, PIECE_SCALES, PIECE_MINIMUMS, PIECE_OUTER_SCALES, PIECE_OUTER_MINIMUMS,
             PIECE_SHARED };  // 2^this units share a scale
enum Format { PLAIN, INT4, Q4_K, Q6_K, FP8 };

struct AttentionArgs {
  const i64* blocks;
  const int* table;  // the same in shared memory; null where they are too many
  const float* rope;
  u16 *keys, *values;
  const void *key_map, *value_map;
  u32 barriers;  // two of every warp, for its keys and for its values
  u32* parities;  // of every warp: of its next copies
  const u64* qkv;
  u64* attended;
  float *partial, *partial_stats;
  int* splits_done;
  int nodes, table_width, cache_tokens, max_splits, base;
};

// --- small things ---------------------------------------------------------------------------------------------------

// The index of this thread, read anew: what is derived from it is computed where it is used, not kept in a register.
__device__ __forceinline__ int this_thread() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}
__device__ __forceinline__ float wide(u16 value) { return __uint_as_float((u32)value << 16); }
__device__ __forceinline__ float wide_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float wide_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ u32 narrow2(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ u32 times(u32 a, u32 b) {  // of two pairs
  u32 product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
__device__ __forceinline__ u16 narrow(float value) { return (u16)(narrow2(value, 0.f) & 0xffffu); }

__device__ __forceinline__ uint4 load_shared_by_blocks(const u16* at) {  // written by other blocks: from L2
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}
__device__ __forceinline__ uint4 load_16(u32 at) {  // of shared memory
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ float load_float(const float* at) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(at) : "memory");
  return v;
}
__device__ __forceinline__ int load_int(const int* at) {
  int v;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
#if PACKED
// Sixteen bytes of weights into shared memory, beside everything else. Loads into registers cannot run as far ahead: the compiler
// waits for the youngest of them whenever it waits for the oldest.
__device__ __forceinline__ void copy_weights(u32 to, const u8* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
#endif
// Boxes of a matrix into shared memory, by the unit of the multiprocessor that copies tensors: what threads ask memory for does not
// queue behind it. A barrier counts the bytes of copies that were announced to it.
__device__ __forceinline__ void announce(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_boxes(u32 to, const void* map, int box, int row, u32 barrier) {  // box: the first, by columns
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%4, %3, %4, %2}], [%5];"
               ::"r"(to), "l"(map), "r"(box), "r"(row), "r"(0), "r"(barrier) : "memory");
}
// Both by one lane of a warp whose lanes all call it with the same arguments.
__device__ __forceinline__ void ask_for_boxes(u32 to, const void* map, int box, int row, u32 barrier, int bytes) {
  asm volatile("{\n.reg .pred chosen;\nelect.sync _|chosen, 0xffffffff;\n"
               "@chosen mbarrier.arrive.expect_tx.shared::cta.b64 _, [%4], %5;\n"
               "@chosen cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%6, %3, %6, %2}], [%4];\n}"
               ::"r"(to), "l"(map), "r"(box), "r"(row), "r"(barrier), "r"(bytes), "r"(0) : "memory");
}
__device__ __forceinline__ void wait_for_boxes(u32 barrier, u32 parity) {
  asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void init_barrier(u32 barrier) {  // one thread announces
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(barrier) : "memory");
}
// What threads have read or written in shared memory comes before what is copied there from now on.
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_groups() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
__device__ __forceinline__ void copy_async(u32 to, const u16* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_8(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }  // of this thread
__device__ __forceinline__ void prefetch_map(const void* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
__device__ __forceinline__ void prefetch_line(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// --- words that blocks hand to each other: two values, and the number of the layer counted over all launches ---------------

__device__ __forceinline__ void store_tagged(u64* at, u32 pair, u32 tag) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"((u64)tag << 32 | pair) : "memory");
}
struct Tagged {  // four values
  u64 first, second;

  __device__ __forceinline__ void load(const u64* at) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(at) : "memory");
  }
  __device__ __forceinline__ bool has(u32 tag) const { return (u32)(first >> 32) == tag && (u32)(second >> 32) == tag; }
};
__device__ __forceinline__ u64 load_word(const u64* at) {
  u64 word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
  return word;
}
template <int COUNT>
__device__ __forceinline__ void load_words(u64 (&words)[COUNT], const u64* from, u32 tag) {  // sixteen apart
  bool ready;
  do {
    ready = true;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) words[i] = load_word(from + i * 16);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) ready &= (u32)(words[i] >> 32) == tag;
  } while (!ready);
}
__device__ __forceinline__ u16 half_of(u32 pair, int index) { return (u16)(index & 1 ? pair >> 16 : pair); }
__device__ __forceinline__ u16 value_of(u64 word, int index) { return half_of((u32)word, index); }
__device__ __forceinline__ u32 load_pair(const void* at) {  // of a word, or where two values lie side by side
  u32 pair;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(pair) : "l"(at) : "memory");
  return pair;
}

__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_first(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {  // nothing is there yet
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
               : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.f));
}
// Four 8 x 8 matrices, as operands of a product. A lane points at a row: the first eight at those of the first matrix, and so on.
__device__ __forceinline__ uint4 load_matrices(u32 at) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ uint4 load_transposed(u32 at) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
// What is kept of many logits: the two best and where they are, and the sum of all exponentials over that of the best.
struct Best {
  float value, second, mass;
  int place, second_place;

  __device__ __forceinline__ void clear() {
    value = second = NEGATIVE;
    mass = 0.f;
    place = second_place = VOCAB;
  }
  __device__ __forceinline__ void add(float logit, int at) {  // of places in rising order
    if (logit > value) {
      second = value, second_place = place;
      mass = mass * __expf(value - logit) + 1.f;
      value = logit, place = at;
    } else {
      mass += __expf(logit - value);
      if (logit > second) second = logit, second_place = at;
    }
  }
  __device__ __forceinline__ void join(Best other) {  // the first of equals is the best
    if (other.value > value || (other.value == value && other.place < place)) {
      const Best own = *this;
      *this = other;
      other = own;
    }
    if (other.value == NEGATIVE) return;
    mass += other.mass * __expf(other.value - value);
    if (other.value > second || (other.value == second && other.place < second_place)) second = other.value, second_place = other.place;
  }
  __device__ __forceinline__ void join_warp() {
#pragma unroll
    for (int step = 16; step; step >>= 1) {
      Best other;
      other.value = __shfl_xor_sync(0xffffffffu, value, step);
      other.second = __shfl_xor_sync(0xffffffffu, second, step);
      other.mass = __shfl_xor_sync(0xffffffffu, mass, step);
      other.place = __shfl_xor_sync(0xffffffffu, place, step);
      other.second_place = __shfl_xor_sync(0xffffffffu, second_place, step);
      join(other);
    }
  }
};
__device__ __forceinline__ Best load_best(const Best* at) {  // written by another block
  Best best;
  const float* words = reinterpret_cast<const float*>(at);
  best.value = load_float(words), best.second = load_float(words + 1), best.mass = load_float(words + 2);
  best.place = __float_as_int(load_float(words + 3)), best.second_place = __float_as_int(load_float(words + 4));
  return best;
}

// A draft model's passes in a row, each a launch of its own: whether the next one is worth its time, decided by the one before.
// In memory: whether the chain goes on; draft tokens so far; how many there may be; the least tokens that a further one must
// promise to all sequences together; rows of the LM head that are read, zero: all; how often draft tokens are accepted, by
// confidence; of every sequence the probability that all its draft tokens are.
struct DraftChain {
  float* words;
  int step;                                   // passes before this one; less than zero: it is not of a chain

  enum Place { GOES_ON, COUNT, MOST, LEAST, VOCAB_ROWS, RATES, SURVIVAL = RATES + CONFIDENCE_BINS };

  __device__ __forceinline__ bool has_ended() const { return step > 0 && words[GOES_ON] == 0.f; }
  __device__ __forceinline__ int vocab_rows() const {
    const int rows = step < 0 ? 0 : (int)words[VOCAB_ROWS];
    return rows > 0 && rows < VOCAB ? rows : VOCAB;
  }
  // One more draft token; returns what the one after it promises if it is as sure.
  __device__ __forceinline__ float extend(int seq, float confidence) const {
    constexpr float edges[] = {CONFIDENCE_EDGES};
    int bin = 0;
#pragma unroll
    for (int i = 0; i < CONFIDENCE_BINS - 1; ++i) bin += confidence >= edges[i];
    const float rate = words[RATES + bin], survival = (step ? words[SURVIVAL + seq] : 1.f) * rate;
    words[SURVIVAL + seq] = survival;
    return survival * rate;
  }
  __device__ __forceinline__ void decide(const float* gains, int num_seqs) const {
    float sum = 0.f;
    for (int seq = 0; seq < num_seqs; ++seq) sum += gains[seq];
    words[COUNT] = step + 1;
    words[GOES_ON] = words[COUNT] < words[MOST] && sum >= words[LEAST];
  }
};
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int step = 16; step; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

// --- waiting for other blocks -----------------------------------------------------------------------------------------

// Each block has a flag. It holds the number of the last layer, counted over all launches, whose gate the block has
// finished. Single writers and many readers are quicker than one counter that all blocks add to.
struct Flags {
  int* flags;
  int base;

  __device__ __forceinline__ void arrive(int layer) const {
    __syncthreads();
    if (threadIdx.x == 0)
      asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(flags + blockIdx.x), "r"(base + layer + 1) : "memory");
  }
  __device__ __forceinline__ void wait(int layer) const {
    if (threadIdx.x < BLOCKS) {
      int seen;
      do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(flags + threadIdx.x) : "memory");
      } while (seen - (base + layer + 1) < 0);
    }
    __syncthreads();
  }
};

// --- products ---------------------------------------------------------------------------------------------------------

__host__ __device__ constexpr int divided_up(int value, int by) { return (value + by - 1) / by; }
constexpr int GATE_OUTPUTS = 8;
enum Kind { QKV_PRODUCT, OUTPUT_PRODUCT, GATE_PRODUCT, DOWN_PRODUCT, LM_HEAD };

__device__ __forceinline__ int kind_of(int step, int num_layers) { return step == 4 * num_layers ? (int)LM_HEAD : step % 4; }

// Sizes of a product, by kind. They are looked up, not known to the compiler, because one copy of the code must serve all products:
// code that does not fit the instruction cache is fetched again every layer.
struct Shape {
  int columns, rows, outputs;                 // outputs: rows of a tile
  int tiles, further;                         // of every block; so many blocks have one more
};
constexpr Shape shape_of(int kind) {
  const bool is_hidden = kind == OUTPUT_PRODUCT || kind == DOWN_PRODUCT;
  const int columns = kind == OUTPUT_PRODUCT ? QUERY : kind == DOWN_PRODUCT ? INTER : HIDDEN;
  const int rows = kind == QKV_PRODUCT ? QKV : is_hidden ? HIDDEN : kind == GATE_PRODUCT ? INTER : VOCAB;
  const int outputs = kind == QKV_PRODUCT ? QKV_OUTPUTS : is_hidden ? HIDDEN_OUTPUTS : kind == GATE_PRODUCT ? GATE_OUTPUTS : 16;
  const int all = divided_up(rows, outputs);
  return {columns, rows, outputs, all / BLOCKS, all % BLOCKS};
}
__constant__ const Shape SHAPES[] = {shape_of(QKV_PRODUCT), shape_of(OUTPUT_PRODUCT), shape_of(GATE_PRODUCT), shape_of(DOWN_PRODUCT), shape_of(LM_HEAD)};

__device__ __forceinline__ int map_field(int kind) { return kind == QKV_PRODUCT ? QKV_WEIGHT : kind == OUTPUT_PRODUCT ? OUTPUT_WEIGHT : kind == GATE_PRODUCT ? GATE_UP : DOWN; }

// What all threads know of a pass. Each step reads it again, so that it is not kept across calls: registers that do not suffice are
// kept in local memory, which is far away where shared memory has taken the place of its cache.
struct PassFacts {
  int rows, base, down_segment;               // base: layers of all launches before; down_segment: units of packed weights whose inputs fit
  int shares;                                 // of attention
  int vocab_rows;                             // of the LM head
  bool by_words, attends;                     // words: from gate to down; attends: this block, in the ring's memory
};

// A product x · weightᵀ. A tile is up to 16 rows of the weight; the 16 warps of a block share its columns, a unit of 64
// or 128 at a time. The tile of a gate is up to 8 rows of gate and as many of up.
struct Product {
  int kind;
  const i64* layer;                           // what is known of it, in shared memory
  int columns, rows, outputs;
  int tiles;                                  // of this block: every BLOCKS-th, so that blocks read neighbours together

  __device__ __forceinline__ Product(int kind, const i64* layer, const volatile PassFacts& facts) : kind(kind), layer(layer) {
    const Shape& shape = SHAPES[kind];
    columns = shape.columns, rows = shape.rows, outputs = shape.outputs;
    tiles = shape.tiles + ((int)blockIdx.x < shape.further);
    if (kind != LM_HEAD) return;
    rows = facts.vocab_rows;
    const int all = divided_up(rows, 16);
    tiles = all / BLOCKS + ((int)blockIdx.x < all % BLOCKS);
  }
  __device__ __forceinline__ bool paired() const { return kind == GATE_PRODUCT; }  // both halves have as many rows: gate and up
  __device__ __forceinline__ bool adds() const { return kind == OUTPUT_PRODUCT || kind == DOWN_PRODUCT; }  // to the residual stream
  __device__ __forceinline__ const u16* bias() const {
    return kind == QKV_PRODUCT ? (const u16*)layer[QKV_BIAS] : kind == OUTPUT_PRODUCT ? (const u16*)layer[OUTPUT_BIAS] : nullptr;
  }
#if PACKED
  __device__ __forceinline__ const i64* pieces(const i64* lm_head) const { return kind == LM_HEAD ? lm_head : layer + WEIGHTS + kind * PIECES * PIECE_FIELDS; }
  __device__ __forceinline__ int unit_columns(const i64* pieces) const { return WITH_PLAIN && (int)pieces[PIECE_FORMAT] == PLAIN ? 32 : STEP; }
  // Units whose inputs are in shared memory together.
  __device__ __forceinline__ int segment(int unit_columns, int down_segment) const {
    const int units = columns / unit_columns;
    return kind != DOWN_PRODUCT ? units : min(units, unit_columns == 32 ? 4 * down_segment : down_segment);
  }
#else
  // A tensor map: see device/tensor_maps.py.
  __device__ __forceinline__ const void* weight(const void* lm_head) const { return kind == LM_HEAD ? lm_head : (const void*)layer[map_field(kind)]; }
  __device__ __forceinline__ int units() const { return divided_up(columns, UNIT_COLUMNS); }
  __device__ __forceinline__ int box_rows() const { return paired() ? 16 : outputs; }
#endif
};

constexpr int TABLES = 3;                          // of layers: products of three are asked for or multiplied

static_assert(!PACKED || (BLOCKS % 2 == 0 && INTER % 16 == 0 && VOCAB % 16 == 0), "tiles of a block lie alike in their sixteen rows");

#if PACKED
#include "packed_units.cuh"
#else
constexpr int PRODUCTS_AHEAD = 4;                  // that may be asked for before they are multiplied

// The weights of a product, unit by unit of a warp: it takes every sixteenth of a tile. Which one it begins with goes on from tile to
// tile, so that all warps have as many.
struct Stream {
  const void* map;
  int row, step;                              // of the tile; rows from a tile of this block to its next one
  int unit, first, units;                     // the next one of this warp; its first of the tile; of a whole tile
  int tiles;                                  // that are left
  int bytes;                                  // of a unit

  __device__ __forceinline__ void open(const Product& product, const void* lm_head) {
    const int outputs = product.outputs;
    map = product.weight(lm_head);
    units = product.units();
    tiles = product.tiles;
    row = (int)blockIdx.x * outputs;
    step = BLOCKS * outputs;
    bytes = product.box_rows() * UNIT_COLUMNS * 2;
    unit = first = this_thread() >> 5;
    skip();
  }
  __device__ __forceinline__ void skip() {    // to the tile that has the next unit
    while (unit >= units && tiles) {
      --tiles;
      row += step;
      unit = first = (first - units) & (WARPS - 1);
    }
  }
  __device__ __forceinline__ void advance() {
    unit += WARPS;
    skip();
  }
  __device__ __forceinline__ void close() {
    map = nullptr;
    row = step = unit = first = units = tiles = bytes = 0;
  }
};

// A warp's weights on their way into shared memory, product after product: asking does not end with the product that is multiplied,
// so that memory is busy while blocks wait for each other.
struct Ring {
  Stream stream;
  u32 slots, barriers;                        // of this warp, in shared memory: the first ones
  int to, from;                               // the slot that is filled next; the one that is multiplied next
  u32 parity;                                 // of the copies into it
  int ahead;                                  // units asked for and not multiplied yet
  int opened;                                 // the step whose product is streamed

  __device__ __forceinline__ Ring(u32 memory, u32 barriers_of_block) {
    from = 0;
    parity = 0;
    begin(memory, barriers_of_block, -1);
  }
  __device__ __forceinline__ void begin(u32 memory, u32 barriers_of_block, int step) {  // empty, after the product of a step
    const int warp = this_thread() >> 5;
    slots = memory + warp * UNIT_BYTES;
    barriers = barriers_of_block + warp * 8;
    to = from;
    ahead = 0;
    opened = step;
    stream.close();
  }
  // last: the step whose product may be opened last
  template <typename ProductOf>
  __device__ __forceinline__ void fill(const ProductOf& product_of, const void* lm_head, int last) {
#pragma unroll 1
    while (ahead < SLOTS) {
      if (!stream.tiles) {
        if (opened == last) return;
        stream.open(product_of(++opened), lm_head);
        continue;
      }
      ask_for_boxes(slots + to * SLOT_BYTES, stream.map, stream.unit * BOXES, stream.row, barriers + to * (WARPS * 8), stream.bytes);
      stream.advance();
      to = to == SLOTS - 1 ? 0 : to + 1;
      ++ahead;
    }
  }
  __device__ __forceinline__ u32 wait() const {  // for the unit that is multiplied next; returns where it is
    wait_for_boxes(barriers + from * (WARPS * 8), parity);
    return slots + from * SLOT_BYTES;
  }
  __device__ __forceinline__ void release() {    // all lanes have read it
    __syncwarp();
    --ahead;
    from = from == SLOTS - 1 ? 0 : from + 1;
    parity ^= !from;
  }
};

// The input of a product, by tiles of tokens: where this lane points at in shared memory for the columns of a unit, or where its part
// lies if it is read in place. Rows that no token has are those of the last one: their sums are not used.
struct SharedInput {
  u32 at[TOKEN_TILES];                        // of the first unit

  __device__ __forceinline__ SharedInput(const u16* x, int stride, int rows) {
    const int lane = this_thread() & 31;
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; ++i)
      at[i] = (u32)__cvta_generic_to_shared(x) + (min(i * 8 + (lane & 7), rows - 1) * stride + (lane >> 3) * 8) * 2;
  }
  __device__ __forceinline__ uint4 load(int tile, int column) const { return load_matrices(at[tile] + column * 2); }  // 32 columns
};
struct InputInPlace {
  const u16* first;
  u32 at[TOKEN_TILES];                        // from there

  __device__ __forceinline__ InputInPlace(const u16* in_place, int rows) {
    const int lane = this_thread() & 31;
    first = in_place;
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; ++i) at[i] = min(i * 8 + (lane >> 2), rows - 1) * INTER + (lane & 3) * 16;
  }
  __device__ __forceinline__ uint4 load(int tile, int column) const {
    return load_shared_by_blocks(first + at[tile] + ((column & ~(BOX_COLUMNS - 1)) + (column & BOX_COLUMNS - 1) / 4));
  }
};

// Where this lane points at in a box of a unit: rows lie as copies spread them over the banks.
__device__ __forceinline__ u32 pointed(int first_row) {
  const int lane = this_thread() & 31, row = first_row + (lane & 15);
  return row * 128 + (lane >> 4 ^ row & 7) * 16;
}
struct Pointed {
  u32 boxes[BOXES];

  __device__ __forceinline__ Pointed(int box_rows) {
#pragma unroll
    for (int box = 0; box < BOXES; ++box) boxes[box] = pointed(box * box_rows);
  }
};
// Products of a box are two chains of sums, which wait less for each other than one; boxes are added one after the other, whatever
// the number of tokens.
template <typename Input>
__device__ __forceinline__ void add_unit(const Ring& ring, const Input& input, const Pointed& pointed, int column, int columns, float (&sums)[TOKEN_TILES][4]) {
  constexpr int TOGETHER = TOKEN_TILES == 1 ? BOXES : 1;  // boxes whose operands are in registers at once
  u32 unit = 0;
#pragma unroll
  for (int first = 0; first < BOXES; first += TOGETHER) {
    if (column + first * BOX_COLUMNS >= columns) break;  // the last unit may be a part of one
    const bool whole = column + (first + TOGETHER) * BOX_COLUMNS <= columns;
    uint4 x[TOGETHER][TOKEN_TILES][2], weights[TOGETHER][4];  // each of 32 columns; of 16
#pragma unroll
    for (int box = 0; box < TOGETHER; ++box)
#pragma unroll
      for (int tile = 0; tile < TOKEN_TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 2; ++i) x[box][tile][i] = input.load(tile, column + (box && !whole ? 0 : first + box) * BOX_COLUMNS + i * 32);
    if (!first) unit = ring.wait();
#pragma unroll
    for (int box = 0; box < TOGETHER; ++box)
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[box][i] = load_matrices(unit + pointed.boxes[first + box] ^ i * 32);
#pragma unroll
    for (int tile = 0; tile < TOKEN_TILES; ++tile) {
      float parts[TOGETHER][2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int box = 0; box < TOGETHER; ++box) {
          const uint4 &w = weights[box][i], &v = x[box][tile][i / 2];
          if (i < 2) multiply_first(parts[box][i % 2], w.x, w.y, w.z, w.w, i % 2 ? v.z : v.x, i % 2 ? v.w : v.y);
          else multiply(parts[box][i % 2], w.x, w.y, w.z, w.w, i % 2 ? v.z : v.x, i % 2 ? v.w : v.y);
        }
#pragma unroll
      for (int box = 0; box < TOGETHER; ++box)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[tile][i] += box && !whole ? 0.f : parts[box][0][i] + parts[box][1][i];
    }
  }
}
#endif

// Where sums lie that are joined together, and so how many tiles those are. Of each tile of eight tokens a lane has four sums: of two
// rows and of two neighbouring tokens. The fewer tokens there are, the fewer lanes have any that are used.
struct SumsLayout {
  int shift;                                  // 2^shift lanes of a row have sums that are used
  u32 own;                                    // in shared memory: of this thread, of the first tile; 0: it keeps none

  __device__ __forceinline__ SumsLayout(int rows, const float* joined) {
    const int thread = this_thread(), quarter = thread & 3;
    shift = TOKEN_TILES > 1 || rows > 4 ? 2 : rows > 2;
    own = quarter >> shift ? 0 : (u32)__cvta_generic_to_shared(joined) + ((thread >> 5) * (SUMS / 4) + ((thread >> 2 & 7) << shift) + quarter) * 16;
  }
  __device__ __forceinline__ bool has_sums(int tiles) const { return this_thread() < tiles * TOKEN_TILES * 32 << shift; }  // this warp, of so many tiles
  __device__ __forceinline__ int tiles_at_once() const { return (16 >> shift) / TOKEN_TILES; }
  __device__ __forceinline__ int next_row() const { return 4 << shift; }  // threads from a row's sum to that of the next one
  __device__ __forceinline__ u32 place_of(int in_batch, int tokens) const { return own + ((in_batch * TOKEN_TILES + tokens) * 128 << shift); }
  __device__ __forceinline__ void keep(int in_batch, float (&sums)[TOKEN_TILES][4]) const {
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; ++i) {
      if (own) asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(place_of(in_batch, i)), "f"(sums[i][0]), "f"(sums[i][1]), "f"(sums[i][2]), "f"(sums[i][3]) : "memory");
      sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.f;
    }
  }
  __device__ __forceinline__ void take(int in_batch, float (&sums)[TOKEN_TILES][4]) const {  // what was kept
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; ++i) {
      if (!own) continue;
      const uint4 kept = load_16(place_of(in_batch, i));
      sums[i][0] = __uint_as_float(kept.x), sums[i][1] = __uint_as_float(kept.y), sums[i][2] = __uint_as_float(kept.z), sums[i][3] = __uint_as_float(kept.w);
    }
  }
  // The thread that joins the sum of a token and of the i-th of all its rows.
  __device__ __forceinline__ int thread_of(int token, int i) const {
    const int tile = (i >> 4) * TOKEN_TILES + token / 8;
    return ((((tile * 8 + (i >> 1 & 7)) << shift) + token % 8 / 2) << 2) + (i & 1) * 2 + token % 2;
  }
};

// Where the gate's outputs lie that are read in place: of every 64 what a lane multiplies is together, two neighbours of every eight.
__device__ __forceinline__ int place_of(int row) { return row & ~63 | (row >> 1 & 3) << 4 | (row >> 3 & 7) << 1 | row & 1; }

// Which output the sum is that a thread joins: of the tiles from `tile` on that are joined together.
struct Target {
  int token, row;
  bool valid;
};
__device__ __forceinline__ Target target_of(const Product& product, const SumsLayout& layout, int tile, int rows) {
  const int thread = this_thread(), index = thread & 3, lane_row = thread >> (2 + layout.shift), outputs = product.outputs;
  const bool paired = product.paired();
  const int count = min(product.tiles - tile, layout.tiles_at_once());
  const int in_tile = (lane_row & 7) + (paired ? 0 : index / 2 * 8), in_batch = (lane_row >> 3) / TOKEN_TILES;
  Target target;
  target.token = (lane_row >> 3) % TOKEN_TILES * 8 + (thread >> 2 & (1 << layout.shift) - 1) * 2 + index % 2;
  target.row = ((int)blockIdx.x + (tile + in_batch) * BLOCKS) * outputs + in_tile;
  target.valid = in_batch < count && target.token < rows && in_tile < outputs && target.row < product.rows && (!paired || index < 2);
  return target;
}

// --- inputs of products -----------------------------------------------------------------------------------------------

// The weights of a norm into shared memory, a product before they are needed.
// index: which of `threads` this one is.
__device__ __forceinline__ void fetch_gain(u16* gain, const u16* from, int index, int threads) {
  const u32 to = (u32)__cvta_generic_to_shared(gain);
#pragma unroll 1
  for (int at = index * 8; at < HIDDEN; at += threads * 8) copy_async(to + at * 2, from + at);
}

// Where the sums of inputs go that the minimums of packed weights are multiplied by. VALUES: inputs that a thread has.
template <int VALUES>
__device__ __forceinline__ void keep_sum(float* x_sums, float sum, int row, int column, bool valid) {
#if PACKED && (WITH_Q4_K || WITH_INT4)
#pragma unroll
  for (int step = 1; step < SUMMED / VALUES; step <<= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (valid && column % SUMMED == 0) x_sums[row * SUMS_STRIDE + column / SUMMED] = sum;
#endif
}
__device__ __forceinline__ float sum_of(u32 pair) { return wide_low(pair) + wide_high(pair); }
__device__ __forceinline__ float sum_of(uint4 v) { return (sum_of(v.x) + sum_of(v.y)) + (sum_of(v.z) + sum_of(v.w)); }

// Of the threads that ask for an input. The first warps join sums, the last one asks for what later steps need: others come first.
__device__ __forceinline__ int asking_thread() { return (this_thread() + THREADS / 2) & (THREADS - 1); }

// Rows through the root-mean-square norm into shared memory, rounded as transformers rounds them. A warp a row. The rows are
// those of other blocks, or of the embedding.
__device__ __forceinline__ void stage_normed(u16* x, int rows, const u16* gain, u16* copy, u16* normed, const u64* hidden, u32 tag,
                                             const u16* embedding, const int* row_tokens, float* x_sums) {
  constexpr int STEPS = (HIDDEN + 255) / 256;
  const int thread = asking_thread(), lane = thread & 31, warp = thread >> 5;
#pragma unroll 1
  for (int row = warp; row < rows; row += WARPS) {
    uint4 values[STEPS];
    float squares = 0.f;
    if (embedding) {
      const u16* from = embedding + (i64)row_tokens[row] * HIDDEN;
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
        int column = (i * 32 + lane) * 8;
        values[i] = column < HIDDEN ? *reinterpret_cast<const uint4*>(from + column) : make_uint4(0, 0, 0, 0);
      }
    } else {
      const u64* from = hidden + (i64)row * (HIDDEN / 2) + lane * 4;
      bool ready;
      do {  // all words again: they come together, so asking for them one by one would wait for each
        Tagged low[STEPS], high[STEPS];
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
          const bool inside = (i * 32 + lane) * 8 < HIDDEN;
          low[i].load(from + (inside ? i * 128 : 0));
          high[i].load(from + (inside ? i * 128 : 0) + 2);
        }
        ready = true;
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
          ready &= low[i].has(tag) && high[i].has(tag);
          const bool inside = (i * 32 + lane) * 8 < HIDDEN;
          values[i] = inside ? make_uint4((u32)low[i].first, (u32)low[i].second, (u32)high[i].first, (u32)high[i].second) : make_uint4(0, 0, 0, 0);
        }
      } while (!ready);
    }
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const u32 pairs[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) squares += wide_low(pairs[j]) * wide_low(pairs[j]) + wide_high(pairs[j]) * wide_high(pairs[j]);
    }
    float scale = rsqrtf(warp_sum(squares) * (1.f / HIDDEN) + EPS);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      int column = (i * 32 + lane) * 8;
      const bool inside = column < HIDDEN;
      uint4 g = *reinterpret_cast<const uint4*>(gain + (inside ? column : 0));
      const u32 pairs[4] = {values[i].x, values[i].y, values[i].z, values[i].w}, gains[4] = {g.x, g.y, g.z, g.w};
      u32 out[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) out[j] = times(narrow2(wide_low(pairs[j]) * scale, wide_high(pairs[j]) * scale), gains[j]);
      uint4 packed = make_uint4(out[0], out[1], out[2], out[3]);
      keep_sum<8>(x_sums, sum_of(packed), row, column, inside);
      if (!inside) continue;
      *reinterpret_cast<uint4*>(x + row * (HIDDEN + X_STRIDE_PAD) + column) = packed;
      if (copy && blockIdx.x == 0) *reinterpret_cast<uint4*>(copy + (i64)row * HIDDEN + column) = values[i];
      if (normed && blockIdx.x == 0) *reinterpret_cast<uint4*>(normed + (i64)row * HIDDEN + column) = packed;
    }
  }
  __syncthreads();
}

// The same where a row is too long for the registers of a warp: four warps a row, which leave it in shared memory until its
// length is known.
__device__ __forceinline__ void stage_long_normed(u16* x, int rows, const u16* gain, u16* copy, u16* normed, const u64* hidden, u32 tag,
                                                  const u16* embedding, const int* row_tokens, float* x_sums) {
  constexpr int PARTS = 4, COLUMNS = (HIDDEN / PARTS + 127) / 128 * 128, STEPS = (COLUMNS + 255) / 256;
  __shared__ float part_squares[MAX_ROWS][PARTS];
  const int thread = asking_thread(), lane = thread & 31, warp = thread >> 5;
#pragma unroll 1
  for (int item = warp; item < rows * PARTS; item += WARPS) {
    const int row = item / PARTS, end = min((item % PARTS + 1) * COLUMNS, HIDDEN), first = item % PARTS * COLUMNS + lane * 8;
    const u16* token = embedding ? embedding + (i64)row_tokens[row] * HIDDEN : nullptr;
    const u64* from = hidden + (i64)row * (HIDDEN / 2);
    uint4 values[STEPS];
    bool ready;
    do {
      ready = true;
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
        const int column = first + i * 256 < end ? first + i * 256 : 0;
        if (embedding) {
          values[i] = *reinterpret_cast<const uint4*>(token + column);
        } else {
          Tagged low, high;
          low.load(from + column / 2);
          high.load(from + column / 2 + 2);
          ready &= low.has(tag) && high.has(tag);
          values[i] = make_uint4((u32)low.first, (u32)low.second, (u32)high.first, (u32)high.second);
        }
      }
    } while (!ready);
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const int column = first + i * 256;
      if (column >= end) continue;
      const u32 pairs[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) squares += wide_low(pairs[j]) * wide_low(pairs[j]) + wide_high(pairs[j]) * wide_high(pairs[j]);
      *reinterpret_cast<uint4*>(x + row * (HIDDEN + X_STRIDE_PAD) + column) = values[i];
      if (copy && blockIdx.x == 0) *reinterpret_cast<uint4*>(copy + (i64)row * HIDDEN + column) = values[i];
    }
    squares = warp_sum(squares);
    if (lane == 0) part_squares[row][item % PARTS] = squares;
  }
  __syncthreads();
#pragma unroll 1
  for (int item = warp; item < rows * PARTS; item += WARPS) {
    const int row = item / PARTS, end = min((item % PARTS + 1) * COLUMNS, HIDDEN), first = item % PARTS * COLUMNS + lane * 8;
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) squares += part_squares[row][i];
    const float scale = rsqrtf(squares * (1.f / HIDDEN) + EPS);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const int column = first + i * 256;
      const bool inside = column < end;
      uint4* at = reinterpret_cast<uint4*>(x + row * (HIDDEN + X_STRIDE_PAD) + (inside ? column : 0));
      const uint4 v = inside ? *at : make_uint4(0, 0, 0, 0), g = *reinterpret_cast<const uint4*>(gain + (inside ? column : 0));
      const u32 pairs[4] = {v.x, v.y, v.z, v.w}, gains[4] = {g.x, g.y, g.z, g.w};
      u32 out[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) out[j] = times(narrow2(wide_low(pairs[j]) * scale, wide_high(pairs[j]) * scale), gains[j]);
      const uint4 packed = make_uint4(out[0], out[1], out[2], out[3]);
      keep_sum<8>(x_sums, sum_of(packed), row, column, inside);
      if (!inside) continue;
      *at = packed;
      if (normed && blockIdx.x == 0) *reinterpret_cast<uint4*>(normed + (i64)row * HIDDEN + column) = packed;
    }
  }
  __syncthreads();
}

// Rows that other blocks hand over, as they are into shared memory. Nobody writes those of nodes that only fill up the pass.
__device__ __forceinline__ void stage_tagged(u16* x, int rows, int columns, const u64* from, u32 tag, const bool* in_use, float* x_sums) {
#pragma unroll 1
  for (int at = asking_thread() * 4; at < rows * columns; at += THREADS * 4) {
    const int row = at / columns;
    Tagged values = {0, 0};
    if (in_use[row]) {
      values.load(from + at / 2);
      while (!values.has(tag)) {  // attention takes a while; asking without a pause would delay those who work on it
        __nanosleep(PAUSE);
        values.load(from + at / 2);
      }
    }
    const int column = at - row * columns;
    *reinterpret_cast<uint2*>(x + row * (columns + X_STRIDE_PAD) + column) = make_uint2((u32)values.first, (u32)values.second);
    keep_sum<4>(x_sums, sum_of((u32)values.first) + sum_of((u32)values.second), row, column, true);
  }
  __syncthreads();
}

// The same for long rows that all blocks write: a thread asks for many words together.
__device__ __forceinline__ void stage_long_tagged(u16* x, int rows, int columns, const u64* from, u32 tag, float* x_sums) {
  constexpr int BATCH = 4;
#pragma unroll 1
  for (int at = this_thread() * 4; at < rows * columns; at += BATCH * THREADS * 4) {
    Tagged values[BATCH];
    bool ready;
    do {
      ready = true;
#pragma unroll
      for (int i = 0; i < BATCH; ++i) values[i].load(from + min(at + i * THREADS * 4, rows * columns - 4) / 2);
#pragma unroll
      for (int i = 0; i < BATCH; ++i) ready &= values[i].has(tag);
    } while (!ready);
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int place = at + i * THREADS * 4, row = place / columns, column = place - row * columns;
      const bool inside = place < rows * columns;
      if (inside) *reinterpret_cast<uint2*>(x + row * (columns + X_STRIDE_PAD) + column) = make_uint2((u32)values[i].first, (u32)values[i].second);
      keep_sum<4>(x_sums, sum_of((u32)values[i].first) + sum_of((u32)values[i].second), row, column, inside);
    }
  }
  __syncthreads();
}

// Some columns of rows as they are into shared memory, `stride` apart. pitch: elements between rows where they lie.
__device__ __forceinline__ void stage(u16* x, int rows, int columns, int stride, const u16* from, int pitch, float* x_sums) {
  constexpr int BATCH = 4;  // loads of a thread on the way together
  int row = 0, column = this_thread() * 8;
#pragma unroll 1
  for (int at = (this_thread() & ~31) * 8; at < rows * columns; at += BATCH * THREADS * 8) {  // warps stay together
    uint4 values[BATCH];
    int rows_of[BATCH], columns_of[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      while (column >= columns) {
        column -= columns;
        ++row;
      }
      rows_of[i] = row;
      columns_of[i] = column;
      values[i] = load_shared_by_blocks(from + (row < rows ? row * pitch + column : 0));
      column += THREADS * 8;
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      if (rows_of[i] < rows) *reinterpret_cast<uint4*>(x + rows_of[i] * stride + columns_of[i]) = values[i];
      keep_sum<8>(x_sums, sum_of(values[i]), rows_of[i], columns_of[i], rows_of[i] < rows);
    }
  }
  __syncthreads();
}

// --- attention ----------------------------------------------------------------------------------------------------------

struct SeqInfo {
  int length, count, chain;                   // chain: so many of its first nodes are one
  int chain_tiles, tiles;                     // nodes of the chain share tiles of attention, the others have one each
};
constexpr int TABLE_SIZE = 768;  // blocks of all sequences that are looked up in shared memory

// A head's vector of `HEAD_DIM` values by one warp: normed where the model does, rotated by its position.
// kept: a second place for the result, or null.
__device__ __forceinline__ void rotate(const u64* from, u32 tag, const u16* gain, const float* rope, int position, u16* to, u16* kept = nullptr) {
  int lane = threadIdx.x & 31;
  constexpr int STEPS = HALF / 32;
  float low[STEPS], high[STEPS], cosine[STEPS], sine[STEPS], squares = 0.f;
  u64 words[2 * STEPS];
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    cosine[i] = __ldg(rope + position * HEAD_DIM + i * 32 + lane);
    sine[i] = __ldg(rope + position * HEAD_DIM + HALF + i * 32 + lane);
  }
  load_words(words, from + lane / 2, tag);
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    low[i] = wide(value_of(words[i], lane));
    high[i] = wide(value_of(words[STEPS + i], lane));
    squares += low[i] * low[i] + high[i] * high[i];
  }
  if (QK_NORM) {
    float scale = rsqrtf(warp_sum(squares) * (1.f / HEAD_DIM) + EPS);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      low[i] = low[i] * scale * wide(gain[i * 32 + lane]);
      high[i] = high[i] * scale * wide(gain[HALF + i * 32 + lane]);
    }
  }
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const u16 first = narrow(low[i] * cosine[i] - high[i] * sine[i]), second = narrow(high[i] * cosine[i] + low[i] * sine[i]);
    to[i * 32 + lane] = first;
    to[HALF + i * 32 + lane] = second;
    if (kept) {
      kept[i * 32 + lane] = first;
      kept[HALF + i * 32 + lane] = second;
    }
  }
}

// The shares of attention are numbered: sequence by sequence, split by split, tile of nodes by tile, key head by key head. They
// are given out from the last block on: it has fewer rows of the products than the first, often none of the output, whose weights
// a block that attends could only ask for afterwards.
__device__ __forceinline__ int first_share() { return BLOCKS - 1 - (int)blockIdx.x; }
__device__ __forceinline__ int shares(const SeqInfo& info) {
  return KV_HEADS * info.tiles * divided_up(info.length + info.count, SPLIT);
}

// Ask L2 for the keys and values that this block's first share of the layer's attention reads: a token a thread.
__device__ __forceinline__ void prefetch_context(const AttentionArgs& args, const SeqInfo* infos, int num_seqs, int layer) {
  int share = first_share(), seq = 0;
  while (seq < num_seqs && share >= shares(infos[seq])) share -= shares(infos[seq++]);
  if (seq == num_seqs) return;
  int place = share / KV_HEADS / infos[seq].tiles * SPLIT + this_thread(), at = seq * args.table_width + place / BLOCK_SIZE;
  if (this_thread() >= SPLIT || place >= infos[seq].length) return;
  i64 block = args.table ? args.table[at] : args.blocks[at];
  i64 token = ((i64)layer * args.cache_tokens + block * BLOCK_SIZE + place % BLOCK_SIZE) * KV_STRIDE + share % KV_HEADS * HEAD_DIM;
#pragma unroll
  for (int column = 0; column < HEAD_DIM; column += 64) {
    prefetch_line(args.keys + token + column);
    prefetch_line(args.values + token + column);
  }
}

constexpr int KV_BOX_COLUMNS = 64, KV_BOX_BYTES = CHUNK * KV_BOX_COLUMNS * 2;  // of keys or values
constexpr int CHUNK_BYTES = CHUNK * HEAD_DIM * 2;

struct AttentionMemory {                      // begins at a multiple of 1024, and so do its chunks
  u8 keys[CHUNKS][CHUNK_BYTES], values[CHUNKS][CHUNK_BYTES];  // the sums of a warp take the place of its values
  alignas(16) u16 queries[HEAD_ROWS][HEAD_DIM + 8];
  alignas(16) u16 new_keys[MAX_ROWS][HEAD_DIM + 8], new_values[MAX_ROWS][HEAD_DIM + 8];  // of this pass
  int ancestors[MAX_ROWS];
  float2 stats[CHUNKS][HEAD_ROWS];            // the largest score; the sum of all
  int last;

  // Four neighbouring rows lie in other banks, eight columns at a time. column: an even one, of two.
  __device__ __forceinline__ float2* sums(int warp, int row, int column) {
    return reinterpret_cast<float2*>(reinterpret_cast<float*>(values[warp]) + row * HEAD_DIM + (column ^ (row & 3) << 3));
  }
};
static_assert(HEAD_ROWS * HEAD_DIM * 4 == CHUNK_BYTES && CHUNK_BYTES % 1024 == 0, "sums fit, chunks are aligned");

// Where a warp is in the pass and what it attends to, while it does. Read again where it is needed: registers do not suffice, and
// local memory is far away where shared memory has taken the place of its cache.
struct Progress {
  int step, share;
  int slot;                                   // of the ring: the one that is multiplied next, …
  u32 parity;                                 // … and of the copies into it
  int seq, head, tile, split;                 // of the share
};

// What is attended to, by what a warp knows of its share.
struct Attended {
  int seq, head, split, splits;
  int first_row, first_node, end_node, nodes_per_tile;
  bool chain;                                 // else a node off the first chain, alone in its tile

  __device__ __forceinline__ Attended(const volatile Progress& progress, const SeqInfo* infos, int nodes) {
    seq = progress.seq, head = progress.head, split = progress.split;
    const int tile = progress.tile;
    const SeqInfo& info = infos[seq];
    chain = tile < info.chain_tiles;
    nodes_per_tile = chain ? NODES_PER_TILE : 1;
    end_node = chain ? info.chain : info.count;
    first_node = chain ? tile * NODES_PER_TILE : info.chain + tile - info.chain_tiles;
    first_row = seq * nodes;
    splits = divided_up(info.length + info.count, SPLIT);
  }
  __device__ __forceinline__ int used_rows() const { return min(nodes_per_tile, end_node - first_node) * GROUP; }
};

// The sums of a share's warps, and of all splits of the context, first to last. A thread has two neighbouring columns.
__device__ __forceinline__ void join_warps(const AttentionArgs& args, int layer_index, AttentionMemory& memory, const SeqInfo* infos,
                                           const volatile Progress& progress) {
  constexpr int PAIRS = HEAD_DIM / 2;
  const Attended own(progress, infos, args.nodes);
  const int head = own.head, splits = own.splits, first_row = own.first_row, first_node = own.first_node, used_rows = own.used_rows();
  const int warps = min(CHUNKS, divided_up(infos[own.seq].length + infos[own.seq].count - own.split * SPLIT, CHUNK));
  const u32 tag = args.base + layer_index + 1;
  auto hand_over = [&](float2 sums, float total, int row, int column) {
    const i64 at = (i64)(first_row + first_node + row / GROUP) * QUERY + (head * GROUP + row % GROUP) * HEAD_DIM + column;
    store_tagged(args.attended + at / 2, narrow2(__fdividef(sums.x, total), __fdividef(sums.y, total)), tag);
  };
  const i64 item = (i64)((first_row + first_node) * KV_HEADS + head) * args.max_splits;  // one a tile of nodes
#pragma unroll 1
  for (int pair = threadIdx.x; pair < used_rows * PAIRS; pair += THREADS) {
    const int row = pair / PAIRS, column = pair % PAIRS * 2;
    float most = NEGATIVE, total = 0.f;
#pragma unroll 8
    for (int w = 0; w < warps; ++w) most = fmaxf(most, memory.stats[w][row].x);
    float2 sums = make_float2(0.f, 0.f);
#pragma unroll 8
    for (int w = 0; w < warps; ++w) {
      const float2 stats = memory.stats[w][row], part = *memory.sums(w, row, column);
      const float scale = stats.x == NEGATIVE ? 0.f : __expf(stats.x - most);
      total = fmaf(stats.y, scale, total);
      sums.x = fmaf(part.x, scale, sums.x);
      sums.y = fmaf(part.y, scale, sums.y);
    }
    if (splits == 1) {
      hand_over(sums, total, row, column);
    } else {
      const i64 at = (item + own.split) * HEAD_ROWS + row;
      *reinterpret_cast<float2*>(args.partial + at * HEAD_DIM + column) = sums;
      if (column == 0) {
        args.partial_stats[at * 2] = most;
        args.partial_stats[at * 2 + 1] = total;
      }
    }
  }
  if (splits > 1) {
    int* done = args.splits_done + item / args.max_splits;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      memory.last = atomicAdd(done, 1) == splits - 1;
      if (memory.last) *done = 0;
      __threadfence();
    }
    __syncthreads();
    if (memory.last) {
#pragma unroll 1
      for (int pair = threadIdx.x; pair < used_rows * PAIRS; pair += THREADS) {
        const int row = pair / PAIRS, column = pair % PAIRS * 2;
        float most = NEGATIVE, total = 0.f;
        float2 sums = make_float2(0.f, 0.f);
#pragma unroll 1
        for (int s = 0; s < splits; ++s) most = fmaxf(most, load_float(args.partial_stats + ((item + s) * HEAD_ROWS + row) * 2));
#pragma unroll 1
        for (int s = 0; s < splits; ++s) {
          const i64 at = (item + s) * HEAD_ROWS + row;
          const float m = load_float(args.partial_stats + at * 2), scale = m == NEGATIVE ? 0.f : __expf(m - most);
          total += load_float(args.partial_stats + at * 2 + 1) * scale;
          if (scale == 0.f) continue;
          sums.x += load_float(args.partial + at * HEAD_DIM + column) * scale;
          sums.y += load_float(args.partial + at * HEAD_DIM + column + 1) * scale;
        }
        hand_over(sums, total, row, column);
      }
    }
  }
  __syncthreads();
}

__device__ __noinline__ void attend(const AttentionArgs& args, const i64* layer, int layer_index, AttentionMemory& memory, const SeqInfo* infos,
                       const int* depths, const u64* masks, const volatile Progress& progress) {
  const Attended own(progress, infos, args.nodes);
  const int seq = own.seq, head = own.head, first_row = own.first_row, first_node = own.first_node, end_node = own.end_node, nodes_per_tile = own.nodes_per_tile;
  const bool chain = own.chain;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2, quarter = lane & 3;
  int length = infos[seq].length, count = infos[seq].count, end = length + count, begin = own.split * SPLIT;
  i64 cache_base = (i64)layer_index * args.cache_tokens * KV_STRIDE + head * HEAD_DIM;
  auto block_of = [&](int place) -> i64 {
    int at = seq * args.table_width + place / BLOCK_SIZE;
    return args.table ? args.table[at] : args.blocks[at];
  };
  // --- what does not depend on this layer's products: ask for it before waiting
  constexpr int UNITS = HEAD_DIM / 32;        // 16 bytes of a thread in every row
  int start = begin + warp * CHUNK;
  int warps = min(CHUNKS, (end - begin + CHUNK - 1) / CHUNK);
  const u32 barrier = args.barriers + warp * 16;
  fence_copies();                             // the memory was in use
  __syncthreads();
  if (warp < warps && lane == 0) {            // tokens of this pass and behind them are not in the cache: what is read there is not used
    const int token = layer_index * args.cache_tokens + (int)block_of(start) * BLOCK_SIZE + start % BLOCK_SIZE;
    const u32 to = (u32)__cvta_generic_to_shared(memory.keys[warp]), to_values = (u32)__cvta_generic_to_shared(memory.values[warp]);
    announce(barrier, CHUNK_BYTES);
    copy_boxes(to, args.key_map, head * (HEAD_DIM / KV_BOX_COLUMNS), token, barrier);
    announce(barrier + 8, CHUNK_BYTES);
    copy_boxes(to_values, args.value_map, head * (HEAD_DIM / KV_BOX_COLUMNS), token, barrier + 8);
  }
  if (!chain) {
    if (threadIdx.x == 0) {
      u64 mask = masks[first_row + first_node];
      for (int depth = 0; mask; ++depth) {
        memory.ancestors[depth] = __ffsll((i64)mask) - 1;
        mask &= mask - 1;
      }
    }
    __syncthreads();
  }
  // Rows of this warp's chunk from `fresh` on are not in the cache. Those that no token has are multiplied by zero: they are numbers.
  const u32 parity = args.parities[warp];
  const int fresh = max(length - start, 0);
  if (warp < warps && fresh < CHUNK) {
    wait_for_boxes(barrier + 8, parity);
    for (int i = fresh * 8 + lane; i < CHUNK * 8; i += 32)
#pragma unroll
      for (int box = 0; box < HEAD_DIM / KV_BOX_COLUMNS; ++box) *reinterpret_cast<uint4*>(memory.values[warp] + box * KV_BOX_BYTES + i * 16) = make_uint4(0, 0, 0, 0);
  }
  // Rows lie in a chunk as copies spread them over the banks.
  auto place_rows = [&](u8* chunk, const u16 (&rows)[MAX_ROWS][HEAD_DIM + 8]) {  // those of this pass
    for (int i = fresh * 8 + lane; i < min(CHUNK, end - start) * 8; i += 32) {
      const int row = i / 8, part = i % 8, place = start + row - length;
      const int node = chain ? place : memory.ancestors[min(place, depths[first_row + first_node])];
#pragma unroll
      for (int box = 0; box < HEAD_DIM / KV_BOX_COLUMNS; ++box)
        *reinterpret_cast<uint4*>(chunk + box * KV_BOX_BYTES + row * 128 + (part ^ row & 7) * 16) = *reinterpret_cast<const uint4*>(&rows[node][box * KV_BOX_COLUMNS + part * 8]);
    }
  };
  // A thread's columns of a key: 16 neighbours of every 64.
  auto column_of = [&](int unit) { return unit / 2 * KV_BOX_COLUMNS + quarter * 16 + unit % 2 * 8; };
  const u32 tag = args.base + layer_index + 1;

  int limits[2];  // the last position that the two rows of this thread may see
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int row = group + i * 8, node = first_node + row / GROUP;
    limits[i] = row < nodes_per_tile * GROUP && node < end_node ? length + depths[first_row + node] : -1;
  }
  const bool has_high = own.used_rows() > 8;  // rows 8 to 15 of the tile: else half of the work is not done

  // --- queries, a warp each
  {
    int node = first_node + warp / GROUP;
    if (warp < nodes_per_tile * GROUP && node < end_node) {
      const u64* from = args.qkv + ((i64)(first_row + node) * QKV + (head * GROUP + warp % GROUP) * HEAD_DIM) / 2;
      rotate(from, tag, (const u16*)layer[QUERY_NORM], args.rope, length + depths[first_row + node], memory.queries[warp]);
    } else {
      for (int i = lane; i < HEAD_DIM; i += 32) memory.queries[warp][i] = 0;
    }
  }
  // --- new keys and values: each block that reads them stores them, so that a token is treated alike, new or old
  if (begin + SPLIT > length) {
#pragma unroll 1
    for (int item = WARPS - 1 - warp; item < 2 * count; item += WARPS) {  // a key or a value; the last warps have no query
      const int node = item / 2, place = length + node;
      i64 at = cache_base + (block_of(place) * BLOCK_SIZE + place % BLOCK_SIZE) * KV_STRIDE;
      const u64* from = args.qkv + ((i64)(first_row + node) * QKV + QUERY + head * HEAD_DIM) / 2;
      if (item % 2 == 0) {
        rotate(from, tag, (const u16*)layer[KEY_NORM], args.rope, length + depths[first_row + node], args.keys + at, memory.new_keys[node]);
        continue;
      }
      u64 words[HEAD_DIM / 32];
      load_words(words, from + KV_STRIDE / 2 + lane / 2, tag);
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 32; ++i) {
        const u16 value = value_of(words[i], lane);
        args.values[at + i * 32 + lane] = value;
        memory.new_values[node][i * 32 + lane] = value;
      }
    }
  }
  __syncthreads();

  // --- scores of this warp's chunk
  if (warp < warps) {
    wait_for_boxes(barrier, parity);
    if (fresh < CHUNK) {
      place_rows(memory.keys[warp], memory.new_keys);
      place_rows(memory.values[warp], memory.new_values);
      __syncwarp();
    }
    uint4 keys[UNITS][4];
    const u32 keys_at = (u32)__cvta_generic_to_shared(memory.keys[warp]) + group * 128;
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit)
#pragma unroll
      for (int i = 0; i < 4; ++i) keys[unit][i] = load_16(keys_at + unit / 2 * KV_BOX_BYTES + i * 1024 + ((quarter * 2 + unit % 2) ^ group) * 16);
    float scores[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[i][j] = 0.f;
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
      uint4 low = *reinterpret_cast<const uint4*>(&memory.queries[group][column_of(unit)]);
      uint4 high = make_uint4(0, 0, 0, 0);
      if (has_high) high = *reinterpret_cast<const uint4*>(&memory.queries[group + 8][column_of(unit)]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        multiply(scores[i], low.x, high.x, low.y, high.y, keys[unit][i].x, keys[unit][i].y);
        multiply(scores[i], low.z, high.z, low.w, high.w, keys[unit][i].z, keys[unit][i].w);
      }
    }
    // --- probabilities
    float most[2] = {NEGATIVE, NEGATIVE}, total[2] = {0.f, 0.f};
    auto weigh = [&](const int half) {  // the row of this thread in that half of the tile
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 2 * half; j < 2 * half + 2; ++j) {
          int token = start + i * 8 + quarter * 2 + j % 2;
          scores[i][j] = token <= limits[half] ? scores[i][j] * SCALE : NEGATIVE;
          most[half] = fmaxf(most[half], scores[i][j]);
        }
      most[half] = fmaxf(most[half], __shfl_xor_sync(0xffffffffu, most[half], 1));
      most[half] = fmaxf(most[half], __shfl_xor_sync(0xffffffffu, most[half], 2));
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 2 * half; j < 2 * half + 2; ++j) {
          scores[i][j] = most[half] == NEGATIVE ? 0.f : __expf(scores[i][j] - most[half]);
          total[half] += scores[i][j];
        }
      total[half] += __shfl_xor_sync(0xffffffffu, total[half], 1);
      total[half] += __shfl_xor_sync(0xffffffffu, total[half], 2);
    };
    weigh(0);
    if (has_high) weigh(1);  // else its scores are zero, as its queries are
    // --- weighted values
    wait_for_boxes(barrier + 8, parity);
    uint4 values[HEAD_DIM / 16][2];           // of 16 columns: what 16 tokens multiply
    const u32 values_at = (u32)__cvta_generic_to_shared(memory.values[warp]) + (lane & 15) * 128;
#pragma unroll
    for (int unit = 0; unit < HEAD_DIM / 16; ++unit)
#pragma unroll
      for (int i = 0; i < 2; ++i) values[unit][i] = load_transposed(values_at + unit / 4 * KV_BOX_BYTES + i * 2048 + ((unit % 4 * 2 + (lane >> 4)) ^ lane & 7) * 16);
    __syncwarp();  // sums may follow
    if (lane == 0) args.parities[warp] = parity ^ 1;
    u32 probs[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      probs[i][0] = narrow2(scores[2 * i][0], scores[2 * i][1]);
      probs[i][1] = narrow2(scores[2 * i][2], scores[2 * i][3]);
      probs[i][2] = narrow2(scores[2 * i + 1][0], scores[2 * i + 1][1]);
      probs[i][3] = narrow2(scores[2 * i + 1][2], scores[2 * i + 1][3]);
    }
#pragma unroll
    for (int unit = 0; unit < HEAD_DIM / 16; ++unit) {
      float out[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint4& v = values[unit][i];
          if (i == 0) multiply_first(out[j], probs[i][0], probs[i][1], probs[i][2], probs[i][3], j ? v.z : v.x, j ? v.w : v.y);
          else multiply(out[j], probs[i][0], probs[i][1], probs[i][2], probs[i][3], j ? v.z : v.x, j ? v.w : v.y);
        }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = unit * 16 + j * 8 + quarter * 2;
        *memory.sums(warp, group, column) = make_float2(out[j][0], out[j][1]);
        if (has_high) *memory.sums(warp, group + 8, column) = make_float2(out[j][2], out[j][3]);
      }
    }
    if (quarter == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        memory.stats[warp][group + i * 8] = make_float2(most[i], total[i]);
      }
    }
  }
  __syncthreads();

  // --- join the warps, first to last
  join_warps(args, layer_index, memory, infos, progress);
}

// --- the pass -------------------------------------------------------------------------------------------------------------

extern __shared__ __align__(16) unsigned char memory[];

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_pass(
    const i64* tokens, const i64* lengths, const i64* counts, const i64* depths_, const i64* masks_, const i64* blocks, const i64* layers,
    const u16* embedding, const u16* final_norm, const void* lm_head_, const float* rope, u16* keys, u16* values, const void* key_map, const void* value_map, u64* between, u64* hidden, u64* qkv,
    u64* attended, u16* activated, u64* activated_words, float* partial, float* partial_stats, int* splits_done, float* logits, i64* best,
    i64* second_best, float* confidence, float* second_confidence, Best* block_best, u16* hidden_out, int* flags, float* chain_words,
    int num_seqs, int nodes, int table_width, int offset, int num_layers, int cache_tokens, int token_stride,
    int token_offset, int max_splits, int want_hidden, int want_logits, int x_limit, int embedded, int chain_step) {
  const DraftChain chain = {chain_words, chain_step};
  if (chain.has_ended()) return;
  __shared__ float row_gains[MAX_ROWS];
  __shared__ SeqInfo infos[MAX_ROWS];
  __shared__ int depths[MAX_ROWS];
  __shared__ u64 masks[MAX_ROWS];
  __shared__ int row_tokens[MAX_ROWS];
  __shared__ bool in_use[MAX_ROWS];  // rows of nodes that a sequence has
  __shared__ i64 table[TABLES][LAYER_FIELDS];
  __shared__ AttentionArgs args;
  __shared__ int block_table[TABLE_SIZE];
  __shared__ u64 attention_barriers[2 * WARPS];
  __shared__ u32 attention_parities[WARPS];
  if (threadIdx.x < 2 * WARPS) init_barrier((u32)__cvta_generic_to_shared(attention_barriers + threadIdx.x));
  if (threadIdx.x < WARPS) attention_parities[threadIdx.x] = 0;
  for (int i = threadIdx.x; i < min(num_seqs * table_width, TABLE_SIZE); i += THREADS) block_table[i] = (int)blocks[i];
  if (threadIdx.x == 0)
    args = {blocks, num_seqs * table_width <= TABLE_SIZE ? block_table : nullptr, rope, keys, values, key_map, value_map, (u32)__cvta_generic_to_shared(attention_barriers), attention_parities, qkv, attended, partial, partial_stats, splits_done, nodes, table_width, cache_tokens, max_splits, flags[BLOCKS]};
  // Of a single sequence no node is read that only fills up the pass.
  const int num_rows = num_seqs == 1 ? max(1, min(nodes, (int)counts[0])) : num_seqs * nodes, thread = threadIdx.x;
  __shared__ volatile PassFacts facts;
  __shared__ volatile Progress all_progress[WARPS];
  if (thread == 0) {
    facts.rows = num_rows;
    facts.base = flags[BLOCKS];
    facts.vocab_rows = want_logits ? VOCAB : chain.vocab_rows();
    facts.by_words = num_rows * (INTER / 2) <= MOST_WORDS && num_rows * (INTER + WARPS * 128) <= x_limit;
#if PACKED
    facts.down_segment = (x_limit / num_rows - X_STRIDE_PAD) / (WARPS * STEP) * WARPS;
#endif
  }
  float* joined = reinterpret_cast<float*>(memory);
  unsigned char* ring_memory = memory + WARPS * SUMS * sizeof(float);
#if !PACKED
  ring_memory += -(u32)__cvta_generic_to_shared(ring_memory) % RING_ALIGNMENT;
  __shared__ u64 barriers[SLOTS * WARPS];
  if (threadIdx.x < SLOTS * WARPS) init_barrier((u32)__cvta_generic_to_shared(barriers + threadIdx.x));
#endif
  u16* gain = reinterpret_cast<u16*>(ring_memory + SLOTS * SLOT_BYTES);
#if PACKED
  float* x_sums = reinterpret_cast<float*>(gain + HIDDEN);
  u16* x = reinterpret_cast<u16*>(x_sums + (WITH_Q4_K || WITH_INT4 ? MAX_ROWS * SUMS_STRIDE : 0));
  __shared__ i64 lm_head[PIECES * PIECE_FIELDS];
  if (threadIdx.x < PIECES * PIECE_FIELDS) lm_head[threadIdx.x] = ((const i64*)lm_head_)[threadIdx.x];
#else
  float* x_sums = nullptr;
  u16* x = gain + HIDDEN;
  const void* lm_head = lm_head_;
#endif
  AttentionMemory& attention = *reinterpret_cast<AttentionMemory*>(memory + -(u32)__cvta_generic_to_shared(memory) % 1024u);

  if (thread < num_rows) {
    int seq = thread / nodes, node = thread % nodes;
    i64 token = tokens[seq * token_stride + token_offset + node];
    row_tokens[thread] = embedded ? thread : (int)(token < 0 ? 0 : (token >= VOCAB ? VOCAB - 1 : token));
    depths[thread] = nodes == 1 ? 0 : (int)depths_[thread];  // a single node is a chain
    masks[thread] = nodes == 1 ? 1 : (u64)masks_[thread];
    in_use[thread] = node < (int)counts[seq];
  }
  for (int i = thread; i < min(num_layers, 2) * LAYER_FIELDS; i += THREADS) table[0][i] = layers[i];  // the second lies behind it
  __syncthreads();
  if (thread < num_seqs) {
    int count = min((int)counts[thread], nodes), chain = 0;
    while (chain < count && masks[thread * nodes + chain] == (2ull << chain) - 1) ++chain;
    infos[thread].length = (int)lengths[thread] + offset;
    infos[thread].count = count;
    infos[thread].chain = chain;
    infos[thread].chain_tiles = divided_up(chain, NODES_PER_TILE);
    infos[thread].tiles = infos[thread].chain_tiles + count - chain;
  }
  fetch_gain(gain, (const u16*)table[0][ATTENTION_NORM], thread, THREADS);
  const int last_step = 4 * num_layers;
  auto product_of = [&](int step) { return Product(kind_of(step, num_layers), table[step / 4 % TABLES], facts); };
  wait_for_copies();
  __syncthreads();
  if (thread == THREADS - 1) {
    int all_shares = 0;
    for (int seq = 0; seq < num_seqs; ++seq) all_shares += shares(infos[seq]);
    facts.shares = all_shares;
    facts.attends = first_share() < all_shares;
  }
  __syncthreads();

#if PACKED
  __shared__ WaitingRoom waiting;
  waiting.put(0, first_run_of(product_of(0), lm_head, facts.down_segment));
  __syncthreads();
  Ring ring;
#else
  Ring ring((u32)__cvta_generic_to_shared(ring_memory), (u32)__cvta_generic_to_shared(barriers));
  // Before a step weights are asked for as far ahead as there is room: in a block that attends up to the product before that.
  auto last_opened = [&](int step) { return min(last_step, facts.attends ? (step + 3) & ~3 : step + PRODUCTS_AHEAD); };
  auto ask_before = [&](int step) {
    if (ring.ahead < SLOTS) ring.fill(product_of, lm_head, last_opened(step));
  };
  const int maps = min(num_layers, 2) * LM_HEAD;
  if (thread <= maps) prefetch_map(thread == maps ? lm_head : (const void*)table[thread / LM_HEAD][map_field(thread % LM_HEAD)]);
  ask_before(0);
#endif
  auto wait_for_facts = [] {                  // that were copied for later steps, before the weights of this one
#if PACKED
    wait_groups<SLOTS>();
#else
    wait_for_copies();
#endif
  };
#pragma unroll 1
  for (int step = 0; step <= last_step; ++step) {
    const int index = step / 4, kind = kind_of(step, num_layers);
    const i64* layer = table[index % TABLES];
    const bool normed = kind == QKV_PRODUCT || kind == GATE_PRODUCT || kind == LM_HEAD;
    const Product product = product_of(step);
    const int rows = facts.rows;
    const bool by_words = facts.by_words;
    const Flags gates_done = {flags, facts.base};
    const SumsLayout layout(rows, joined);

    // One warp asks for what later steps need: whoever is to ask for the input first finds nothing else to do.
    if (this_thread() >= THREADS - 32) {
      const int lane = this_thread() & 31;
      if (kind == OUTPUT_PRODUCT) {
        fetch_gain(gain, (const u16*)layer[MLP_NORM], lane, 32);
        if (index + 2 < num_layers)
          for (int i = lane; i < LAYER_FIELDS; i += 32) copy_8((u32)__cvta_generic_to_shared(&table[(index + 2) % TABLES][i]), layers + (i64)(index + 2) * LAYER_FIELDS + i);
      } else if (kind == DOWN_PRODUCT) {
        const i64* next = table[(index + 1) % TABLES];
        fetch_gain(gain, step + 1 == last_step ? final_norm : (const u16*)next[ATTENTION_NORM], lane, 32);
#if !PACKED
        if (lane < LM_HEAD && index + 2 < num_layers) prefetch_map((const void*)table[(index + 2) % TABLES][map_field(lane)]);
#endif
      }
    }
#if PACKED
    end_group();
    ring.begin_product((u32)__cvta_generic_to_shared(ring_memory), product_of, lm_head, facts.down_segment, waiting, step, last_step);
#endif
    // What is added to the product, a bias and the residual, is there already. It is not touched before it is needed.
    u16 bias = 0;
    u32 residual = 0;                         // of two neighbours
    auto ask_for_added = [&](int tile) {      // of the tiles that are joined together next
      if (!layout.has_sums(min(product.tiles - tile, layout.tiles_at_once()))) return;
      const Target target = target_of(product, layout, tile, rows);
      if (!target.valid) return;
      const u16* biases = product.bias();
      if (biases) bias = biases[target.row];
      if (product.adds()) {                   // written by this block, or of the embedding
        const i64 at = (i64)target.token * HIDDEN + target.row;
        if (step == 1) residual = load_pair(embedding + ((i64)row_tokens[target.token] * HIDDEN + (target.row & ~1)));
        else residual = load_pair((kind == OUTPUT_PRODUCT ? hidden : between) + at / 2);
      }
    };
    ask_for_added(0);
    if (kind == QKV_PRODUCT && facts.attends) prefetch_context(args, infos, num_seqs, index);
#if !PACKED
    const int units = product.units(), columns = product.columns, opened = last_opened(step);
    const Pointed pointed(product.box_rows());
    const SharedInput shared_input(x, columns + X_STRIDE_PAD, rows);
#endif
    if (kind == DOWN_PRODUCT && !by_words) gates_done.wait(index);
    // --- the input
    const u32 tag = gates_done.base + index + 1;
#if PACKED
    int stride = product.columns + X_STRIDE_PAD;
    const i64* pieces = product.pieces(lm_head);
    const int unit_columns = product.unit_columns(pieces), segment = product.segment(unit_columns, facts.down_segment);
#endif
    if (!product.tiles && blockIdx.x) {
      wait_for_facts();
      __syncthreads();
    } else if (normed) {
      constexpr auto stage_rows = HIDDEN > 2048 ? stage_long_normed : stage_normed;
      stage_rows(x, rows, gain, kind == QKV_PRODUCT ? (u16*)layer[FEATURES] : nullptr, kind == LM_HEAD && want_hidden ? hidden_out : nullptr,
                 kind == GATE_PRODUCT ? between : hidden, kind == GATE_PRODUCT ? tag : tag - 1, step ? nullptr : embedding, row_tokens, x_sums);
    } else if (kind == OUTPUT_PRODUCT) {
      stage_tagged(x, rows, QUERY, attended, tag, in_use, x_sums);
    } else {
#if PACKED  // segment by segment
      stride = segment * unit_columns + X_STRIDE_PAD;
#else
      if (by_words) stage_long_tagged(x, rows, INTER, activated_words, tag, x_sums);
#endif
    }

    // --- the product
    Best found;  // among the logits that this thread joins, which are all of one token
    found.clear();
    float sums[TOKEN_TILES][4];
#pragma unroll
    for (int tile = 0; tile < TOKEN_TILES; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[tile][i] = 0.f;
    int tile = 0, in_batch = 0;
    const int tiles = product.tiles;
    int first_unit = this_thread() >> 5;  // of this warp in the tile: it goes on from tile to tile, so that all warps have as many units
#if PACKED
    int begin = 0;  // first unit of the segment; first_unit is less than that
#else
    auto add_units = [&](const auto& input) { // of a tile
#pragma unroll 1
      for (int unit = first_unit; unit < units; unit += WARPS) {
        add_unit(ring, input, pointed, unit * UNIT_COLUMNS, columns, sums);
        ring.release();
        // What other blocks wait for comes first: looking up a later product takes longer than a unit, so its weights are asked for
        // once the sums are handed over. With more tokens memory would stand still; there only the last unit's place waits.
        if (by_words ? ring.opened == step : unit + WARPS < units || tile + 1 < tiles || kind == GATE_PRODUCT) ring.fill(product_of, lm_head, opened);
      }
    };
#endif
#pragma unroll 1
    while (tile < tiles) {
#if PACKED
      if (kind == DOWN_PRODUCT && tile == 0) {
        const int first = begin * unit_columns;
        if (by_words) stage_long_tagged(x, rows, INTER, activated_words, tag, x_sums);
        else stage(x, rows, min(INTER - first, stride - X_STRIDE_PAD), stride, activated + first, INTER, x_sums);
      }
      if (begin) layout.take(in_batch, sums);  // go on where the segment before this one has ended
      const int format = format_of(pieces, ((int)blockIdx.x + tile * BLOCKS) * product.outputs), unit_bytes = unit_columns * 2;
      const int all_units = product.columns / unit_columns, end = min(all_units - begin, segment);  // less begin
      Unit current(unit_columns, stride, x, x_sums, rows, first_unit);
#pragma unroll 1
      for (int unit = first_unit; unit < end; unit += WARPS) {
        ring.wait();
        current.slot = ring.slot;
        current.beside = ring.slot + BESIDE_AT - this_thread() * 16 + (this_thread() >> 5) * BESIDE_BYTES;
        add_unit(format, current, sums);
        ring.refill(product, pieces, segment);
        current.move_on(unit_bytes);
      }
      first_unit = (first_unit - all_units) & (WARPS - 1);
#else
      if (first_unit < units) {
        if (kind == DOWN_PRODUCT && !by_words) add_units(InputInPlace(activated, rows));
        else add_units(shared_input);
      }
      first_unit = (first_unit - units) & (WARPS - 1);
#endif
      // --- keep the sums of the tile; at the end of a batch of tiles join those of the warps
      layout.keep(in_batch, sums);
      ++tile;
#if PACKED
      if (all_units - begin > segment) {  // further columns of the same tiles
        ++in_batch;
        if (tile == tiles) {
          begin += segment;
          tile = in_batch = 0;
          first_unit = this_thread() >> 5;
          __syncthreads();
        }
        continue;
      }
#endif
      if (++in_batch < layout.tiles_at_once() && tile < tiles) continue;
      const bool joins = layout.has_sums(in_batch);  // this warp
      const Target target = joins ? target_of(product, layout, tile - in_batch, rows) : Target{0, 0, false};
      wait_for_facts();  // long since there
      __syncthreads();
      if (joins) {
        const float* from = joined + this_thread();
        float total = 0.f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) total += from[warp * SUMS];
        const float up = __shfl_down_sync(0xffffffffu, total, 2);
        const float gated = __fdividef(total, 1.f + __expf(-total)) * up;
        const float output = kind == GATE_PRODUCT ? gated : total + (wide(bias) + wide(half_of(residual, target.row)));
        const float next = __shfl_down_sync(0xffffffffu, output, layout.next_row());
        if (target.valid) {
          const i64 token = target.token;
          const bool first = !(target.row & 1);
          if (kind == LM_HEAD) {
            if (want_logits) logits[token * VOCAB + target.row] = total;
            found.add(total, target.row);
          } else if (kind == GATE_PRODUCT && !by_words) {
            activated[token * INTER + (PACKED ? target.row : place_of(target.row))] = narrow(output);
          } else if (first) {
            u64* to = kind == QKV_PRODUCT ? qkv : kind == GATE_PRODUCT ? activated_words : kind == OUTPUT_PRODUCT ? between : hidden;
            store_tagged(to + (token * (kind == QKV_PRODUCT ? QKV : kind == GATE_PRODUCT ? INTER : HIDDEN) + target.row) / 2, narrow2(output, next), tag);
          }
        }
      }
      if (tile < tiles) ask_for_added(tile);
      in_batch = 0;
      if (tile < tiles || kind == LM_HEAD) __syncthreads();  // else another one comes before sums are overwritten
    }
    if (kind == LM_HEAD) {
      reinterpret_cast<Best*>(joined)[thread] = found;
      break;
    }
    if (kind == GATE_PRODUCT && !by_words) gates_done.arrive(index);
    // --- attention: blocks without a share of it go on at once
    if (kind != QKV_PRODUCT || !facts.attends) {
#if !PACKED
      ask_before(step + 1);
#endif
      continue;
    }
    auto progress = [&]() -> volatile Progress& { return all_progress[this_thread() >> 5]; };
    progress().step = step;
#if !PACKED
    progress().slot = ring.from, progress().parity = ring.parity;
#endif
#pragma unroll 1
    for (int share = first_share(); share < facts.shares; share = progress().share + BLOCKS) {
      progress().share = share;
      int item = share, seq = 0;
      while (item >= shares(infos[seq])) item -= shares(infos[seq++]);
      const int tiles = infos[seq].tiles, at = progress().step / 4;
      progress().seq = seq, progress().head = item % KV_HEADS, progress().tile = item / KV_HEADS % tiles, progress().split = item / KV_HEADS / tiles;
      attend(args, table[at % TABLES], at, attention, infos, depths, masks, progress());
    }
    step = progress().step;
#if !PACKED  // it is made again, not kept
    ring.from = progress().slot, ring.parity = progress().parity;
    ring.begin((u32)__cvta_generic_to_shared(ring_memory), (u32)__cvta_generic_to_shared(barriers), step);
    fence_copies();
    __syncthreads();
    ask_before(step + 1);
#endif
  }

  // --- the best of this block
  __syncthreads();
  const Best* all_found = reinterpret_cast<const Best*>(joined);
  const int rows = facts.rows;
  const SumsLayout layout(rows, joined);
  const int lane = thread & 31;
  Best found;
#pragma unroll 1
  for (int token = thread >> 5; token < rows; token += WARPS) {
    found.clear();
    for (int i = lane; i < 16 * layout.tiles_at_once(); i += 32) found.join(all_found[layout.thread_of(token, i)]);
    found.join_warp();
    if (lane == 0) block_best[token * BLOCKS + blockIdx.x] = found;
  }
  // --- the last block joins the blocks and counts the layers
  __shared__ int last;
  __threadfence();
  __syncthreads();
  if (thread == 0) {
    last = atomicAdd(flags + BLOCKS + 1, 1) == BLOCKS - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
#pragma unroll 1
  for (int row = thread >> 5; row < rows; row += WARPS) {
    found.clear();
    for (int block = lane; block < BLOCKS; block += 32) found.join(load_best(block_best + row * BLOCKS + block));
    found.join_warp();
    if (lane == 0) {
      best[row] = found.place < VOCAB ? found.place : 0;
      second_best[row] = found.second_place < VOCAB ? found.second_place : 0;
      confidence[row] = __fdividef(1.f, found.mass);
      second_confidence[row] = __fdividef(__expf(found.second - found.value), found.mass);
      if (chain_step >= 0 && row % nodes == nodes - 1) row_gains[row / nodes] = counts[row / nodes] ? chain.extend(row / nodes, confidence[row]) : 0.f;
    }
  }
  __syncthreads();
  if (thread == 0) {
    if (chain_step >= 0) chain.decide(row_gains, num_seqs);
    flags[BLOCKS] = facts.base + num_layers;
    flags[BLOCKS + 1] = 0;
  }
}
