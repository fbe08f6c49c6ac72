// Product of 1 to 16 rows with a packed weight: codes become operands of the tensor cores in registers.
//
// Compile-time constants (see packed_mma.py): KIND (0: int4 with a scale a step, 1: fp8 with a scale a row of the
// weight), ROWS (rows of x that shared memory holds: 1, 2, 4, 8, 16), TILES, WARPS_M, WARPS_K, STAGES, SPLITS, GATE,
// BIAS, RESIDUAL.
//
// A warp takes TILES tiles of 16 output features and every WARPS_K-th step of its block. A lane loads 16 bytes of a row
// at a time: in the layout of packed_layout.py these are four neighbours of every 16 input features, which is what the
// lane holds of an operand of m16n8k16 once the features are counted in another order; x is put into shared memory in
// that order. Each lane reads only words that it has asked for itself, so the loop has no barrier.
//
// Every sum runs in an order that depends on the weight alone: a row's numbers are the same bits among any others.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;
typedef long long i64;

constexpr bool INT4 = KIND == 0;
constexpr int ROW_TILES = (ROWS + 7) / 8;             // tiles of eight rows of x
constexpr int CHUNKS = INT4 ? 1 : 2;                  // 16-byte pieces of a lane's row and step
constexpr int ROW_BYTES = 64 * CHUNKS;                // of a row of the weight and step
constexpr int WEIGHT_BYTES = TILES * 2 * CHUNKS * 512;
constexpr int SLOT_BYTES = WEIGHT_BYTES + (INT4 ? TILES * 32 : 0);
constexpr int RING_BYTES = STAGES * SLOT_BYTES;       // of a warp
constexpr int THREADS = 32 * WARPS_M * WARPS_K;
constexpr int STEP = 128;                             // input features
constexpr int LOADS = 4;                              // pieces of x that a thread has under way
static_assert(TILES * ROW_TILES * 512 <= RING_BYTES, "the ring also holds the sums of a warp");
static_assert(!GATE || TILES == 2, "a warp takes a tile of gate and one of up");

// --- instructions ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }
__device__ __forceinline__ void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copy4(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int YOUNGER>
__device__ __forceinline__ void wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(YOUNGER) : "memory");
}
__device__ __forceinline__ void wait_for_kernel_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
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
__device__ __forceinline__ u16 narrow(float value) {
  u16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
  return result;
}
// sums [16 output features, 8 rows] += weights [16, 16] · x [16, 8]
__device__ __forceinline__ void multiply(float4& sums, const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums.x), "+f"(sums.y), "+f"(sums.z), "+f"(sums.w)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- numbers ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float wide(u16 value) { return __uint_as_float((u32)value << 16); }

// Two int4 codes, 16 bits apart, as bfloat16: the code is written into the mantissa of 128, then 136 is taken away.
__device__ __forceinline__ u32 int4_pair(u32 codes) {
  return times_plus(masked_or(codes, 0x000F000Fu, 0x43004300u), 0x3F803F80u, 0xC308C308u);
}
// A byte of each of two words as e4m3: bits of a bfloat16 whose exponent is 120 too small.
__device__ __forceinline__ u32 fp8_pair(u32 low, u32 high, int byte) {
  const u32 twice = __byte_perm(low, high, (0x4400u + 0x1100u * byte) | (0x11u * byte));
  return times_plus(masked_or(twice >> 4, 0x07F007F0u, twice & 0x80008000u), 0x7B807B80u, 0x80008000u);
}

// --- the product -----------------------------------------------------------------------------------------------------

struct Place {  // of a thread
  int lane, group, quarter, warp_m, warp_k;
};

__device__ __forceinline__ Place place_of(int thread) {
  const int lane = thread & 31, warp = thread >> 5;
  return {lane, lane >> 2, lane & 3, warp % WARPS_M, warp / WARPS_M};
}

// First output feature of a tile; the last tile stands in for those behind the end.
__device__ __forceinline__ int feature_of(int unit, int tile, int out_features) {
  const int units = out_features / (16 * TILES);
  const int inside = unit < units ? unit : units - 1;
  return GATE ? 16 * inside + tile * (out_features / 2) : 16 * (TILES * inside + tile);
}

// x in the order of the operands: [step, pair of multiplications, row, quarter] of 2 · 4 features. Lanes of a warp read 64
// bytes of each row together and write one run of shared memory.
__device__ __forceinline__ void stage_x(uint2* staged, const u16* x, int rows, int in_features, int steps) {
  const int pieces = steps * (STEP / 8) * ROWS;
  for (int start = threadIdx.x; start < pieces; start += LOADS * THREADS) {
    uint4 values[LOADS];
#pragma unroll
    for (int load = 0; load < LOADS; load++) {
      const int index = start + load * THREADS, row = (index >> 2) % ROWS;
      const int feature = (index >> 2) / ROWS * 32 + (index & 3) * 8;
      values[load] = {0u, 0u, 0u, 0u};
      if (index < pieces && row < rows) values[load] = __ldcg((const uint4*)(x + (i64)row * in_features + feature));
    }
#pragma unroll
    for (int load = 0; load < LOADS; load++) {
      const int index = start + load * THREADS, at = (index >> 2) * 8 + (index & 1) * 4 + ((index >> 1) & 1);
      if (index >= pieces) continue;
      staged[at] = {values[load].x, values[load].y};
      staged[at + 2] = {values[load].z, values[load].w};
    }
  }
}

struct Source {  // where a warp's weights are
  const u8* words[TILES];
  const u16* scales;
  i64 step_bytes;
  int out_features;
};

__device__ __forceinline__ void ask(u8* slot, const Source& source, int step, int lane) {
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    const u8* from = source.words[tile] + step * source.step_bytes;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++)
        copy16(slot + ((tile * 2 + half) * CHUNKS + chunk) * 512 + lane * 16, from + half * 8 * ROW_BYTES + chunk * 64);
  }
  if (INT4 && lane < 8 * TILES) copy4(slot + WEIGHT_BYTES + lane * 4, source.scales + (i64)step * source.out_features);
}

// One step of a warp: 8 multiplications a tile. x: of this step, in the order of `stage_x`.
__device__ __forceinline__ void multiply_step(float4 (&total)[TILES][ROW_TILES], const u8* slot, const uint4* x,
                                              const Place& place) {
  uint4 words[TILES][2][CHUNKS];
  float4 part[TILES][ROW_TILES];
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++) {
        const uint4 read = *(const uint4*)(slot + ((tile * 2 + half) * CHUNKS + chunk) * 512 + place.lane * 16);
        if (INT4)  // lower halves of neighbouring words together, then upper halves
          words[tile][half][chunk] = {__byte_perm(read.x, read.y, 0x5410), __byte_perm(read.z, read.w, 0x5410),
                                      __byte_perm(read.x, read.y, 0x7632), __byte_perm(read.z, read.w, 0x7632)};
        else
          words[tile][half][chunk] = read;
      }
#pragma unroll
    for (int rows = 0; rows < ROW_TILES; rows++) part[tile][rows] = INT4 ? float4{0.f, 0.f, 0.f, 0.f} : total[tile][rows];
  }
#pragma unroll
  for (int pair = 0; pair < 4; pair++) {
    uint4 inputs[ROW_TILES];
#pragma unroll
    for (int rows = 0; rows < ROW_TILES; rows++) {
      inputs[rows] = {0u, 0u, 0u, 0u};
      if (ROWS >= 8 || place.group < ROWS)
        inputs[rows] = x[(pair * ROWS + rows * 8 + place.group) * 4 + place.quarter];
    }
#pragma unroll
    for (int second = 0; second < 2; second++)
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        u32 a[4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          if (INT4) {
            const uint4 codes = words[tile][half][0];
            const int shift = 4 * ((2 * pair + second) & 3);
            a[half] = int4_pair((pair < 2 ? codes.x : codes.z) >> shift);
            a[half + 2] = int4_pair((pair < 2 ? codes.y : codes.w) >> shift);
          } else {
            const uint4 codes = words[tile][half][second < CHUNKS ? second : 0];
            a[half] = fp8_pair(codes.x, codes.y, pair);
            a[half + 2] = fp8_pair(codes.z, codes.w, pair);
          }
        }
#pragma unroll
        for (int rows = 0; rows < ROW_TILES; rows++)
          multiply(part[tile][rows], a, second ? inputs[rows].z : inputs[rows].x,
                   second ? inputs[rows].w : inputs[rows].y);
      }
  }
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    float upper = 1.f, lower = 1.f;
    if (INT4) {
      const u16* scales = (const u16*)(slot + WEIGHT_BYTES) + tile * 16 + place.group;
      upper = wide(scales[0]);
      lower = wide(scales[8]);
    }
#pragma unroll
    for (int rows = 0; rows < ROW_TILES; rows++) {
      float4& sums = total[tile][rows];
      const float4& more = part[tile][rows];
      if (INT4)
        sums = {fmaf(more.x, upper, sums.x), fmaf(more.y, upper, sums.y), fmaf(more.z, lower, sums.z),
                fmaf(more.w, lower, sums.w)};
      else
        sums = more;
    }
  }
}

__device__ __forceinline__ void add(float4& sums, const float4& more) {
  sums = {sums.x + more.x, sums.y + more.y, sums.z + more.z, sums.w + more.w};
}

// Sums of the warps of one tile, first to last, in the warps with warp_k = 0.
__device__ __forceinline__ void join_warps(float4 (&total)[TILES][ROW_TILES], u8* rings, const Place& place) {
  float4* own = (float4*)(rings + (place.warp_k * WARPS_M + place.warp_m) * RING_BYTES);
#pragma unroll
  for (int tile = 0; tile < TILES; tile++)
#pragma unroll
    for (int rows = 0; rows < ROW_TILES; rows++) own[(tile * ROW_TILES + rows) * 32 + place.lane] = total[tile][rows];
  __syncthreads();
  if (place.warp_k) return;
  for (int other = 1; other < WARPS_K; other++) {
    const float4* theirs = (const float4*)(rings + (other * WARPS_M + place.warp_m) * RING_BYTES);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int rows = 0; rows < ROW_TILES; rows++)
        add(total[tile][rows], theirs[(tile * ROW_TILES + rows) * 32 + place.lane]);
  }
}

// Sums of the blocks of one tile, first to last, in the block that ends last. Returns whether this is that block.
__device__ __forceinline__ bool join_blocks(float4 (&total)[TILES][ROW_TILES], float4* sums, int* blocks_done, int* is_last,
                                            const Place& place) {
  const i64 per_split = (i64)gridDim.x * WARPS_M * TILES * ROW_TILES * 32;
  float4* own = sums + ((i64)blockIdx.x * WARPS_M + place.warp_m) * TILES * ROW_TILES * 32 + place.lane;
  if (place.warp_k == 0)
#pragma unroll
    for (int part = 0; part < TILES * ROW_TILES; part++)
      __stcg(own + blockIdx.y * per_split + part * 32, total[part / ROW_TILES][part % ROW_TILES]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) *is_last = atomicAdd(blocks_done + blockIdx.x, 1) == SPLITS - 1;
  __syncthreads();
  if (!*is_last) return false;
  __threadfence();
  if (threadIdx.x == 0) blocks_done[blockIdx.x] = 0;
  if (place.warp_k) return true;
#pragma unroll
  for (int part = 0; part < TILES * ROW_TILES; part++) {
    float4 joined = {0.f, 0.f, 0.f, 0.f};
    for (int split = 0; split < SPLITS; split++) add(joined, __ldcg(own + split * per_split + part * 32));
    total[part / ROW_TILES][part % ROW_TILES] = joined;
  }
  return true;
}

struct Output {
  const float* row_scales;  // fp8: of each output feature
  const u16 *bias, *residual;
  u16* out;
  int rows, stride;
};

__device__ __forceinline__ void store(const Output& output, float value, int row, int column) {
  if (row >= output.rows) return;
  const i64 at = (i64)row * output.stride + column;
  if (BIAS) value += wide(output.bias[column]);
  if (RESIDUAL) value += wide(output.residual[at]);
  output.out[at] = narrow(value);
}

__device__ __forceinline__ void finish(const float4 (&total)[TILES][ROW_TILES], const Output& output, int unit,
                                       int out_features, const Place& place) {
#pragma unroll
  for (int tile = 0; tile < (GATE ? 1 : TILES); tile++) {
    const int feature = feature_of(unit, tile, out_features) + place.group;
#pragma unroll
    for (int rows = 0; rows < ROW_TILES; rows++)
#pragma unroll
      for (int part = 0; part < 4; part++) {
        const int column = feature + 8 * (part >> 1), row = rows * 8 + 2 * place.quarter + (part & 1);
        const float4 &sums = total[tile][rows], &ups = total[TILES - 1][rows];
        float value = part == 0 ? sums.x : part == 1 ? sums.y : part == 2 ? sums.z : sums.w;
        if (!INT4) value *= output.row_scales[column];
        if (GATE) {
          float up = part == 0 ? ups.x : part == 1 ? ups.y : part == 2 ? ups.z : ups.w;
          if (!INT4) up *= output.row_scales[column + out_features / 2];
          value = value / (1.f + __expf(-value)) * up;
        }
        store(output, value, row, column);
      }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) packed_product(
    const u16* x, const u8* words, const void* scales, const u16* bias, const u16* residual, u16* out, float4* sums,
    int* blocks_done, int rows, int in_features, int out_features, int steps, int steps_per_split, int out_stride) {
  extern __shared__ uint4 memory[];
  __shared__ int is_last;
  const Place place = place_of(threadIdx.x);
  const int first = blockIdx.y * steps_per_split;
  const int block_steps = steps - first < steps_per_split ? steps - first : steps_per_split;
  const int unit = blockIdx.x * WARPS_M + place.warp_m;
  u8* rings = (u8*)memory + steps_per_split * 2 * STEP * ROWS;
  u8* ring = rings + (place.warp_k * WARPS_M + place.warp_m) * RING_BYTES;
  const int count = (block_steps - place.warp_k + WARPS_K - 1) / WARPS_K;  // steps of this warp

  Source source;
  source.step_bytes = (i64)out_features * ROW_BYTES;
  source.out_features = out_features;
#pragma unroll
  for (int tile = 0; tile < TILES; tile++)
    source.words[tile] = words + (i64)(feature_of(unit, tile, out_features) + place.group) * ROW_BYTES + place.quarter * 16;
  const int scale_tile = place.lane / 8 < TILES ? place.lane / 8 : 0;
  source.scales = (const u16*)scales + feature_of(unit, scale_tile, out_features) + 2 * (place.lane & 7);

#pragma unroll
  for (int stage = 0; stage < STAGES - 1; stage++) {
    if (stage < count) ask(ring + stage * SLOT_BYTES, source, first + place.warp_k + stage * WARPS_K, place.lane);
    end_group();
  }
  wait_for_kernel_before();
  stage_x((uint2*)memory, x + first * STEP, rows, in_features, block_steps);
  __syncthreads();

  float4 total[TILES][ROW_TILES];
#pragma unroll
  for (int tile = 0; tile < TILES; tile++)
#pragma unroll
    for (int part = 0; part < ROW_TILES; part++) total[tile][part] = {0.f, 0.f, 0.f, 0.f};
  int read = 0, written = STAGES - 1;  // slots
  for (int number = 0; number < count; number++) {
    wait_group<STAGES - 2>();
    __syncwarp();
    const int step = place.warp_k + number * WARPS_K;
    if (number + STAGES - 1 < count)
      ask(ring + written * SLOT_BYTES, source, first + step + (STAGES - 1) * WARPS_K, place.lane);
    end_group();
    multiply_step(total, ring + read * SLOT_BYTES, memory + step * 16 * ROWS, place);
    read = read + 1 == STAGES ? 0 : read + 1;
    written = written + 1 == STAGES ? 0 : written + 1;
  }
  wait_group<0>();
  if (WARPS_K > 1) join_warps(total, rings, place);
  if (SPLITS > 1 && !join_blocks(total, sums, blocks_done, &is_last, place)) return;
  const int units = out_features / (16 * TILES);
  if (place.warp_k == 0 && unit < units)
    finish(total, {(const float*)scales, bias, residual, out, rows, out_stride}, unit, out_features, place);
}
