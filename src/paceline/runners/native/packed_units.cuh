// Weights of few bits in the pass that is one kernel: how they are copied into the ring, and how a unit of them is multiplied.
//
// A unit is a step of quantization/packed_layout.py: 128 columns of 16 rows, which lie side by side. Sixteen bytes of a row are
// codes of four neighbours of every 16 columns, which is what a thread holds of an operand of m16n8k16 once the columns are
// counted in another order; the input is read in that order too. Codes enter the product as the whole numbers they are. Scales
// multiply the sums of their group, in float32, and minimums the sums of the inputs.
//
// Four bits a weight are read faster than integer instructions can take them apart. So asking for a unit and multiplying it have
// as few of those as possible: addresses are a base and 32 bits, inputs are always in shared memory, tiles are never cut off.

// What a lane copies of the numbers beside the codes of a unit: 16 bytes, of the tile's first or second half.
struct Beside {
  const u8* at;                               // of the run's first tile; null: nothing
  u32 tile_bytes;                             // to the next tile of this block
  u32 bytes;                                  // from one group to the next
  int shift;                                  // 2^shift units share them
};

// row: the tile's first one in the piece. Lanes 0 to 7 copy what groups within a step have, the others what whole steps share.
__device__ __forceinline__ Beside beside_of(const i64* piece, int row, int units, bool paired, bool halves, int step) {
  const int lane = this_thread() & 31, format = (int)piece[PIECE_FORMAT];
  int field = -1, part = 0, second = lane & 1, row_bytes = 2;  // part: of sixteen bytes of the eight rows; row_bytes: of a row's numbers
  int shift = 0;
  if (format == Q4_K && lane < 8) {
    field = lane < 4 ? PIECE_SCALES : PIECE_MINIMUMS, second = lane >> 1 & 1, part = lane & 1, row_bytes = 4;
  } else if (format == Q6_K && lane < 8) {
    field = PIECE_SCALES, second = lane >> 2, part = lane & 3, row_bytes = 8;
  } else if ((format == Q4_K && lane < 12) || (format == Q6_K && lane < 10)) {
    field = lane < 10 ? PIECE_OUTER_SCALES : PIECE_OUTER_MINIMUMS, shift = 1;
  } else if ((format == INT4 && (lane == 8 || lane == 9)) || (format == FP8 && lane < 4)) {
    field = PIECE_SCALES, shift = (int)piece[PIECE_SHARED];
    if (format == FP8) second = lane >> 1, part = lane & 1, row_bytes = 4;
  }
  const int own = row + (second ? (paired ? INTER : 8) : 0);
  const u32 bytes = 16 * row_bytes, rows_16 = (((units - 1) >> shift) + 1) * bytes;
  Beside beside;
  beside.at = field < 0 || (second && !halves) ? nullptr : (const u8*)piece[field < 0 ? 0 : field] + (i64)(own >> 4) * rows_16 + (own & 15) * row_bytes + part * 16;
  beside.tile_bytes = (step >> 4) * rows_16;
  beside.bytes = bytes;
  beside.shift = shift;
  return beside;
}

// Streams the weights of a product through the ring. Warps take every sixteenth unit of a tile; which one a warp begins with goes
// on from tile to tile, so that all have as many. A run has the tiles that lie in one piece, and the same columns of the input;
// then the next run follows.
struct Stream {
  const u8 *codes, *upper;                    // of this thread in the run's first tile; upper: null where there are none
  Beside beside;
  u32 tile_offset, beside_offset;             // of the tile
  u32 tile_bytes, to_partner, unit_bytes, row_bytes;
  int unit, begin, end;                       // of the tile: the next unit; those of the run
  int first, units;                           // the warp's first unit of the tile, less begin; of a whole tile
  int tiles, next_tile;                       // that are left in the run; of the run behind it
  bool halves, two_parts;                     // halves: the tile has a second one

  __device__ __forceinline__ void copy(u32 slot) const {  // the next unit; slot: this thread's part
    const u32 offset = tile_offset + unit * unit_bytes;
    const u8* from = codes + offset;
    copy_weights(slot, from);
    if (halves) copy_weights(slot + THREADS * 16, from + to_partner);
#if WITH_FP8
    if (two_parts) {
      copy_weights(slot + PART_BYTES, from + 64);
      if (halves) copy_weights(slot + PART_BYTES + THREADS * 16, from + to_partner + 64);
    }
#endif
    const int thread = this_thread();
#if WITH_Q6_K
    if (upper) {
      const u8* high = upper + offset / 2;
      const u32 to = slot + HIGH_AT - thread * 8;
      asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(high) : "memory");
      if (halves) asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to + THREADS * 8), "l"(high + to_partner / 2) : "memory");
    }
#endif
    // The 12 copies of a warp lie behind each other: 192 bytes; a thread's slot is 16 bytes further than that of the one before.
    if (beside.at)
      copy_weights(slot + BESIDE_AT - (thread >> 5) * (512 - BESIDE_BYTES), beside.at + (beside_offset + (unit >> beside.shift) * beside.bytes));
  }
  __device__ __forceinline__ void advance() {
    unit += WARPS;
    if (unit >= end) {
      do {
        --tiles;
        tile_offset += tile_bytes;
        beside_offset += beside.tile_bytes;
        first = (first - units) & (WARPS - 1);
        unit = begin + first;
      } while (unit >= end && tiles);
    }
  }
};

// The run from a tile of this block on, and from a unit on. A segment is a multiple of the warps or all. Not inlined: it is called rarely, and the code of a layer must stay in the instruction cache.
// segment: units whose inputs are in shared memory together.
__device__ __noinline__ Stream run_of(const Product product, const i64* pieces, int segment, int tile, int begin) {
  const int thread = this_thread(), warp = thread >> 5, group = (thread & 31) >> 2, outputs = product.outputs, step = BLOCKS * outputs;
  const int units = product.columns / product.unit_columns(pieces), all_tiles = product.tiles, row = ((int)blockIdx.x + tile * BLOCKS) * outputs;
  const bool paired = product.paired();
  const bool second = row >= (int)pieces[PIECE_ROWS];
  const i64* piece = second ? pieces + PIECE_FIELDS : pieces;
  const int first = row - (second ? (int)pieces[PIECE_ROWS] : 0), format = (int)piece[PIECE_FORMAT];

  Stream stream;
  int tiles = all_tiles - tile;
  if (!second && pieces[PIECE_FIELDS + PIECE_ROWS]) tiles = min(tiles, ((int)pieces[PIECE_ROWS] - row + step - 1) / step);
  stream.next_tile = tile + tiles == all_tiles ? 0 : tile + tiles;
  stream.begin = begin;
  stream.end = min(units, begin + segment);
  stream.units = units;
  stream.first = (warp - tile * units) & (WARPS - 1);
  stream.unit = begin + stream.first;
  stream.tiles = tiles;
  stream.halves = paired || outputs == 16;
  stream.two_parts = format == FP8;

  const u32 row_bytes = format == PLAIN ? product.columns * 2 : format == FP8 ? STEP : STEP / 2;
  stream.row_bytes = row_bytes;
  stream.unit_bytes = format == PLAIN ? 64 : 16 * row_bytes;
  const u32 rows_16 = 16 * row_bytes * (format == PLAIN ? 1 : units);
  const i64 at = (i64)(first >> 4) * rows_16 + ((first & 15) + group) * row_bytes + (thread & 3) * 16;
  stream.codes = (const u8*)piece[PIECE_CODES] + at;
  stream.upper = format == Q6_K ? (const u8*)piece[PIECE_HIGH] + at / 2 : nullptr;
  stream.to_partner = paired ? (INTER / 16) * rows_16 : 8 * row_bytes;
  stream.tile_bytes = (step >> 4) * rows_16;
  stream.tile_offset = stream.beside_offset = 0;
  stream.beside = beside_of(piece, first, units, paired, stream.halves, step);
  if (tiles && stream.unit >= stream.end) {   // this warp has no unit of the first tile
    stream.unit -= WARPS;
    stream.advance();
  }
  return stream;
}

__device__ __forceinline__ Stream first_run_of(const Product& product, const i64* lm_head, int down_segment) {
  const i64* pieces = product.pieces(lm_head);
  return run_of(product, pieces, product.segment(product.unit_columns(pieces), down_segment), 0, 0);
}
__device__ __forceinline__ int format_of(const i64* pieces, int row) {
  return (int)pieces[(row >= (int)pieces[PIECE_ROWS] ? PIECE_FIELDS : 0) + PIECE_FORMAT];
}

// A stream that waits in shared memory until its product begins: kept in registers it would end up in local memory, which is far away.
// What is the same for all threads is there once, and so is what warps or lanes have. Warps that are ahead may write the next one
// while others read this one, hence two.
constexpr int BESIDE_LANES = BESIDE_BYTES / 16;
struct WaitingStream {
  const u8 *codes, *upper;                    // of the first lane
  u32 tile_bytes, to_partner, unit_bytes, row_bytes;
  int begin, end, units, next_tile;
  bool halves, two_parts;
  Beside beside[BESIDE_LANES];
};
struct WaitingWarp {
  u32 skipped;                                // tiles of the run that have no unit of this warp
  int unit, first, tiles;
};
struct WaitingRoom {
  WaitingStream streams[2];
  WaitingWarp warps[WARPS];

  __device__ __forceinline__ void put(int step, const Stream& stream) {
    const int thread = this_thread(), lane = thread & 31;
    WaitingStream& waiting = streams[step & 1];
    if (lane == 0) warps[thread >> 5] = {stream.tile_offset / stream.tile_bytes, stream.unit, stream.first, stream.tiles};
    if (thread < BESIDE_LANES) waiting.beside[lane] = stream.beside;
    if (thread) return;
    waiting.codes = stream.codes, waiting.upper = stream.upper;
    waiting.tile_bytes = stream.tile_bytes, waiting.to_partner = stream.to_partner;
    waiting.unit_bytes = stream.unit_bytes, waiting.row_bytes = stream.row_bytes;
    waiting.begin = stream.begin, waiting.end = stream.end, waiting.units = stream.units, waiting.next_tile = stream.next_tile;
    waiting.halves = stream.halves, waiting.two_parts = stream.two_parts;
  }
  __device__ __forceinline__ Stream take(int step) const {  // all threads have met since it was put there
    const int thread = this_thread(), lane = thread & 31;
    const WaitingStream& waiting = streams[step & 1];
    const WaitingWarp& warp = warps[thread >> 5];
    const u32 own = (lane >> 2) * waiting.row_bytes + (lane & 3) * 16;
    Stream stream;
    stream.codes = waiting.codes + own;
    stream.upper = waiting.upper ? waiting.upper + own / 2 : nullptr;
    stream.beside = waiting.beside[lane < BESIDE_LANES ? lane : 0];
    if (lane >= BESIDE_LANES) stream.beside.at = nullptr;
    stream.tile_offset = warp.skipped * waiting.tile_bytes, stream.beside_offset = warp.skipped * stream.beside.tile_bytes;
    stream.tile_bytes = waiting.tile_bytes, stream.to_partner = waiting.to_partner;
    stream.unit_bytes = waiting.unit_bytes, stream.row_bytes = waiting.row_bytes;
    stream.unit = warp.unit, stream.begin = waiting.begin, stream.end = waiting.end;
    stream.first = warp.first, stream.units = waiting.units;
    stream.tiles = warp.tiles, stream.next_tile = waiting.next_tile;
    stream.halves = waiting.halves, stream.two_parts = waiting.two_parts;
    return stream;
  }
};

// The ring of weights in shared memory. Each thread copies what it multiplies itself, but for the numbers beside the codes. The stream
// of a product is opened during the one before, while others are waited for.
struct Ring {
  Stream stream;
  u32 slot, last;                             // this thread's part: of the slot that is multiplied next, of the last one

  template <typename ProductOf>
  __device__ __forceinline__ void begin_product(u32 memory, const ProductOf& product_of, const i64* lm_head, int down_segment, WaitingRoom& waiting, int step, int last_step) {
    const Product product = product_of(step);
    const i64* pieces = product.pieces(lm_head);
    const int segment = product.segment(product.unit_columns(pieces), down_segment);
    stream = waiting.take(step);
    slot = memory + this_thread() * 16;
    last = slot + (SLOTS - 1) * SLOT_BYTES;
#pragma unroll 1
    for (int i = 0; i < SLOTS; ++i) ask(product, pieces, segment, slot + i * SLOT_BYTES);
    if (step < last_step) waiting.put(step + 1, first_run_of(product_of(step + 1), lm_head, down_segment));
  }
  // At the end of the product a group is empty.
  __device__ __forceinline__ void ask(const Product& product, const i64* pieces, int segment, u32 to) {
    while (!stream.tiles && (stream.next_tile || stream.end < stream.units) && product.tiles)
      stream = run_of(product, pieces, segment, stream.next_tile, stream.next_tile ? stream.begin : stream.end);
    if (stream.tiles) {
      stream.copy(to);
      stream.advance();
    }
    end_group();
  }
  __device__ __forceinline__ void wait() const {
    wait_groups<SLOTS - 1>();
    __syncwarp();  // scales are copied by other threads of the warp
  }
  __device__ __forceinline__ void refill(const Product& product, const i64* pieces, int segment) {  // what was multiplied makes room
    __syncwarp();
    ask(product, pieces, segment, slot);
    slot = slot == last ? slot - (SLOTS - 1) * SLOT_BYTES : slot + SLOT_BYTES;
  }
};

// --- numbers out of codes ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint2 load_8(u32 at) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_4(u32 at) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ float load_half(u32 at) {
  float v;
  asm volatile("{.reg .b16 h; ld.shared.b16 h, [%1]; cvt.f32.f16 %0, h;}" : "=f"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ float load_bfloat(u32 at) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
  return wide(v);
}
__device__ __forceinline__ u32 times_plus(u32 a, u32 b, u32 c) {  // pairs of bfloat16
  u32 result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}
__device__ __forceinline__ u32 masked_or(u32 a, u32 mask, u32 other) {  // (a & mask) | other in one instruction
  u32 result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(a), "r"(mask), "r"(other));
  return result;
}
// A byte of a word, as the lowest bits of the float 2²³.
__device__ __forceinline__ float byte_of(u32 word, int index) { return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7540 | index)); }

// The codes of one row that a thread has of a unit: of two neighbours in the two halves of a word.
struct RowCodes {
  u32 pairs[2][2];                            // first or second two of four neighbours; the first or last 64 columns
  u32 high[2];                                // upper bits of the first and second two

  __device__ __forceinline__ void load(u32 at) {
    const uint4 words = load_16(at);
    pairs[0][0] = __byte_perm(words.x, words.y, 0x5410);
    pairs[0][1] = __byte_perm(words.x, words.y, 0x7632);
    pairs[1][0] = __byte_perm(words.z, words.w, 0x5410);
    pairs[1][1] = __byte_perm(words.z, words.w, 0x7632);
  }
  // Codes, written into the mantissa of 128. What they are too large by is taken back with the sums of the inputs. index: which
  // 16 columns of the unit.
  __device__ __forceinline__ u32 numbers(int index, int which) const {
    return masked_or(pairs[which][index / 4] >> (index % 4 * 4), 0x000F000Fu, 0x43004300u);
  }
  __device__ __forceinline__ u32 numbers_of_six(int index, int which) const {  // less 160
    const u32 bits = index < 2 ? high[which] << (4 - 2 * index) : high[which] >> (2 * index - 4);
    const u32 codes = masked_or(pairs[which][index / 4] >> (index % 4 * 4), 0x000F000Fu, masked_or(bits, 0x00300030u, 0x43004300u));
    return times_plus(codes, 0x3F803F80u, 0xC320C320u);
  }
};

struct Unit {                                 // addresses in shared memory of a thread's part of a unit and of its inputs
  u32 slot, beside;
  u32 x[TOKEN_TILES];
  u32 sums;                                   // of the inputs: of this thread's first token

  // index: of the unit among those whose inputs are there.
  __device__ __forceinline__ Unit(int columns, int stride, const u16* inputs, const float* sums_of_inputs, int rows, int index) {
    const int thread = this_thread();
    const u32 x_at = (u32)__cvta_generic_to_shared(inputs) + (thread & 3) * (columns == 32 ? 16 : 8) + index * columns * 2;
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; ++i) x[i] = x_at + min(i * 8 + ((thread & 31) >> 2), rows - 1) * stride * 2;  // any row: its sums are not used
    sums = (u32)__cvta_generic_to_shared(sums_of_inputs) + ((thread & 3) * 2 * SUMS_STRIDE + index * (STEP / SUMMED)) * 4;
  }
  __device__ __forceinline__ void move_on(int unit_bytes) {  // to the warp's next unit
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; ++i) x[i] += WARPS * unit_bytes;
    sums += WARPS * (STEP / SUMMED) * 4;
  }
};

typedef float Sums[TOKEN_TILES][4];

__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
  for (int tile = 0; tile < TOKEN_TILES; ++tile) sums[tile][0] = sums[tile][1] = sums[tile][2] = sums[tile][3] = 0.f;
}
__device__ __forceinline__ void add_scaled(Sums& sums, const Sums& parts, float first, float second) {
#pragma unroll
  for (int tile = 0; tile < TOKEN_TILES; ++tile) {
    sums[tile][0] = fmaf(parts[tile][0], first, sums[tile][0]);
    sums[tile][1] = fmaf(parts[tile][1], first, sums[tile][1]);
    sums[tile][2] = fmaf(parts[tile][2], second, sums[tile][2]);
    sums[tile][3] = fmaf(parts[tile][3], second, sums[tile][3]);
  }
}
__device__ __forceinline__ void add_columns(Sums& sums, const Unit& unit, int index, u32 a0, u32 a1, u32 a2, u32 a3) {
#pragma unroll
  for (int tile = 0; tile < TOKEN_TILES; ++tile) {
    const uint2 v = load_8(unit.x[tile] + index * 32);
    multiply(sums[tile], a0, a1, a2, a3, v.x, v.y);
  }
}

// --- units of each format ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ void add_plain(const Unit& unit, Sums& sums) {  // 32 columns
  const uint4 low = load_16(unit.slot), high = load_16(unit.slot + THREADS * 16);
#pragma unroll
  for (int tile = 0; tile < TOKEN_TILES; ++tile) {
    const uint4 v = load_16(unit.x[tile]);
    multiply(sums[tile], low.x, high.x, low.y, high.y, v.x, v.y);
    multiply(sums[tile], low.z, high.z, low.w, high.w, v.z, v.w);
  }
}

#if WITH_Q4_K
// Sums of the inputs, of 32 columns each: of this thread's two tokens of a tile.
__device__ __forceinline__ void load_sums(float (&sums)[2][4], const Unit& unit, int tile) {
#pragma unroll
  for (int token = 0; token < 2; ++token) {
    const uint4 v = load_16(unit.sums + (tile * 8 + token) * SUMS_STRIDE * 4);
    sums[token][0] = __uint_as_float(v.x), sums[token][1] = __uint_as_float(v.y);
    sums[token][2] = __uint_as_float(v.z), sums[token][3] = __uint_as_float(v.w);
  }
}
#endif

#if WITH_INT4
__device__ __forceinline__ float sum_of_unit(u32 at) {  // of a token's inputs
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < STEP / SUMMED; ++i) sum += __uint_as_float(load_4(at + i * 4));
  return sum;
}
__device__ __forceinline__ void add_int4(const Unit& unit, Sums& sums) {  // one scale a row; codes are 8 too large
  RowCodes low, high;
  low.load(unit.slot);
  high.load(unit.slot + THREADS * 16);
  Sums parts[2];                              // two chains of sums wait less for each other than one
  clear(parts[0]);
  clear(parts[1]);
#pragma unroll
  for (int index = 0; index < 8; ++index)
    add_columns(parts[index % 2], unit, index, low.numbers(index, 0), high.numbers(index, 0), low.numbers(index, 1), high.numbers(index, 1));
  const u32 scales = unit.beside + 128 + (this_thread() >> 1 & 14);
  const float first = load_bfloat(scales), second = load_bfloat(scales + 16);
#pragma unroll
  for (int tile = 0; tile < TOKEN_TILES; ++tile) {
    float offsets[2];
#pragma unroll
    for (int token = 0; token < 2; ++token) offsets[token] = -136.f * sum_of_unit(unit.sums + (tile * 8 + token) * SUMS_STRIDE * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sums[tile][i] = fmaf((parts[0][tile][i] + parts[1][tile][i]) + offsets[i % 2], i < 2 ? first : second, sums[tile][i]);
  }
}
#endif

#if WITH_Q4_K
__device__ __forceinline__ void add_q4_k(const Unit& unit, Sums& sums) {  // a scale and a minimum for 32 columns of a row
  RowCodes low, high;
  low.load(unit.slot);
  high.load(unit.slot + THREADS * 16);
  const u32 own = unit.beside + (this_thread() & 28), outer = unit.beside + 128 + (this_thread() >> 1 & 14);
  const u32 scales[2] = {load_4(own), load_4(own + 32)}, minimums[2] = {load_4(own + 64), load_4(own + 96)};
  const float outer_scales[2] = {load_half(outer), load_half(outer + 16)}, outer_minimums[2] = {load_half(outer + 32), load_half(outer + 48)};
  float x[TOKEN_TILES][2][4];
#pragma unroll
  for (int tile = 0; tile < TOKEN_TILES; ++tile) load_sums(x[tile], unit, tile);
  auto scale_of = [](u32 word, int index, float outer_scale) { return fmaf(byte_of(word, index), outer_scale, -8388608.f * outer_scale); };
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    Sums parts;
    clear(parts);
#pragma unroll
    for (int index = 2 * part; index < 2 * part + 2; ++index)
      add_columns(parts, unit, index, low.numbers(index, 0), high.numbers(index, 0), low.numbers(index, 1), high.numbers(index, 1));
    const float first = scale_of(scales[0], part, outer_scales[0]), second = scale_of(scales[1], part, outer_scales[1]);
    add_scaled(sums, parts, first, second);
    const float less[2] = {fmaf(-128.f, first, scale_of(minimums[0], part, outer_minimums[0])), fmaf(-128.f, second, scale_of(minimums[1], part, outer_minimums[1]))};
#pragma unroll
    for (int tile = 0; tile < TOKEN_TILES; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[tile][i] = fmaf(x[tile][i % 2][part], less[i / 2], sums[tile][i]);
  }
}
#endif

#if WITH_Q6_K
__device__ __forceinline__ void add_q6_k(const Unit& unit, Sums& sums) {  // a scale for 16 columns of a row
  RowCodes low, high;
  low.load(unit.slot);
  high.load(unit.slot + THREADS * 16);
  const int thread = this_thread();
  const u32 upper = unit.slot + HIGH_AT - thread * 8;
  const uint2 low_bits = load_8(upper), high_bits = load_8(upper + THREADS * 8);
  low.high[0] = low_bits.x, low.high[1] = low_bits.y;
  high.high[0] = high_bits.x, high.high[1] = high_bits.y;
  const u32 own = unit.beside + (thread & 28) * 2, outer = unit.beside + 128 + (thread >> 1 & 14);
  const uint2 first = load_8(own), second = load_8(own + 64);
  const float outer_scales[2] = {load_half(outer), load_half(outer + 16)};
  // Signed bytes: 128 more makes them unsigned.
  auto scale_of = [](u32 word, int index, float outer_scale) { return (byte_of(word ^ 0x80808080u, index) - 8388736.f) * outer_scale; };
#pragma unroll
  for (int index = 0; index < 8; ++index) {
    Sums parts;
    clear(parts);
    add_columns(parts, unit, index, low.numbers_of_six(index, 0), high.numbers_of_six(index, 0), low.numbers_of_six(index, 1), high.numbers_of_six(index, 1));
    add_scaled(sums, parts, scale_of(index < 4 ? first.x : first.y, index % 4, outer_scales[0]), scale_of(index < 4 ? second.x : second.y, index % 4, outer_scales[1]));
  }
}
#endif

#if WITH_FP8
// A byte of each of two words as e4m3: bits of a bfloat16 whose exponent is 120 too small.
__device__ __forceinline__ u32 fp8_pair(u32 low, u32 high, int byte) {
  const u32 twice = __byte_perm(low, high, (0x4400u + 0x1100u * byte) | (0x11u * byte));
  return times_plus(masked_or(twice >> 4, 0x07F007F0u, twice & 0x80008000u), 0x7B807B80u, 0x80008000u);
}
__device__ __forceinline__ void add_fp8(const Unit& unit, Sums& sums) {  // one scale a row
  Sums parts;
  clear(parts);
#pragma unroll
  for (int half = 0; half < 2; ++half) {      // of every 32 columns
    const uint4 low = load_16(unit.slot + half * PART_BYTES), high = load_16(unit.slot + half * PART_BYTES + THREADS * 16);
#pragma unroll
    for (int byte = 0; byte < 4; ++byte)
      add_columns(parts, unit, 2 * byte + half, fp8_pair(low.x, low.y, byte), fp8_pair(high.x, high.y, byte), fp8_pair(low.z, low.w, byte), fp8_pair(high.z, high.w, byte));
  }
  const u32 scales = unit.beside + (this_thread() & 28);
  add_scaled(sums, parts, __uint_as_float(load_4(scales)), __uint_as_float(load_4(scales + 32)));
}
#endif

__device__ __forceinline__ void add_unit(int format, const Unit& unit, Sums& sums) {
#if WITH_PLAIN
  if (format == PLAIN) add_plain(unit, sums);
#endif
#if WITH_INT4
  if (format == INT4) add_int4(unit, sums);
#endif
#if WITH_Q4_K
  if (format == Q4_K) add_q4_k(unit, sums);
#endif
#if WITH_Q6_K
  if (format == Q6_K) add_q6_k(unit, sums);
#endif
#if WITH_FP8
  if (format == FP8) add_fp8(unit, sums);
#endif
}
