// dy = (dout weight) act'(y),   d_weight = dout^T act(y),   d_bias = sum dout.
//
// The rows of the matrix products are channels. Four producer warps prefetch y into `stages`, scale dout (by a power of
// two for each position) and split it into fp16 parts in `gradients`. Two consumer groups of four warps multiply: first
// weight^T with dout^T, whose columns are positions; then act(y)^T, whose register layout is that of the first
// result, with the same dout, summed over positions. With more than 64 channels the two groups share a tile and have 64
// channels each; else each has its own tile. The sum of a tile is added to a total in fp32; the totals of a block are a
// row of `partial`. With 16-bit storage dout is not split, and the tensor cores add up the tiles. mbarriers: full and
// empty for each stage of y, gradient_full and gradient_empty for dout. blockIdx.y is the part of the channels.

#define GROUPS_PER_TILE (CHANNELS > 64 ? 2 : 1)         // consumer groups
#define TILES_AT_A_TIME (2 / GROUPS_PER_TILE)
#define PER_THREAD (CHANNELS > 32 ? 2 : 1)              // channels
#define STEPS (COLUMNS / 16)
#define CONSUMER_REGISTERS (CHANNEL_MAJOR ? 192 : 184)  // found by trial: the fewest spills
#define PREFETCH_TILES 1                                // tiles of dout that are prefetched into L2
#define EIGHTS (POSITIONS / 32)                         // sets of eight positions of a producer warp
#define FITTING (4096 / STORAGE_BITS / COLUMNS)         // of them in registers
#define BATCH (FITTING < 1 ? 1 : FITTING < EIGHTS ? FITTING : EIGHTS)

struct GradientStage {
  uint4 parts[PARTS][COLUMNS / 8][POSITIONS];  // [high, low][8 columns][position]: eight columns
  float inverse_scale[POSITIONS];
};
struct Memory {
  uint4 weights[PARTS][STEPS][2][64 * GROUPS_PER_TILE];  // [high, low][16 columns][8 columns][channel]: eight columns
  GradientStage gradients[GRADIENTS];
  Storage stages[STAGES][STAGE];
  float sums[4][COLUMNS], scratch[32];
  Mbarrier full[STAGES], empty[STAGES], gradient_full[GRADIENTS], gradient_empty[GRADIENTS];
};
static_assert(sizeof(Memory) <= SHARED_BYTES && STAGES % TILES_AT_A_TIME == 0, "");

// The position of column n of the first product: if y is channel-major, a thread has four adjacent positions.
__device__ inline int position_of(int n) { return CHANNEL_MAJOR ? interleaved_column(n) : n; }

// ------------------------------------------------------------------------- dout in fp16 parts

// BATCH sets of eight positions in a warp: two lanes have eight columns, the next bits of the lane are the position,
// the last one selects eight more columns, so that stores have no bank conflicts.
struct Sums {
  float e[4];
};
struct Batch {
  Storage4 at[BATCH][STEPS];

  __device__ inline int column(int i, int which) {  // column of the first product
    return ((which * BATCH + i) * 4 + threadIdx.x / 32 % 4) * 8 + threadIdx.x % 32 / 2 % 8;
  }

  // Loads from position k of the sequence on.
  __device__ inline void load(const Storage* dout, int k, int length, int which) {
    const Storage* from = dout + threadIdx.x % 32 / 16 * 8 + threadIdx.x % 2 * 4;
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      int p = k + position_of(column(i, which));
#pragma unroll
      for (int c = 0; c < STEPS; c++)
        at[i][c] = p < length ? *(const Storage4*)(from + (long long)p * ALL_COLUMNS + 16 * c) : Storage4{};
    }
  }

  __device__ inline void store(GradientStage* to, Sums (&sums)[STEPS], int which) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      int n = column(i, which);
      float largest = 0, inverse_scale;
#pragma unroll
      for (int c = 0; c < STEPS; c++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          float d = to_fp32(at[i][c].e[e]);
          largest = fmaxf(largest, fabsf(d));
          sums[c].e[e] += d;
        }
      float scale = operand_scale(largest, 17, inverse_scale);
      if (!NARROW && lane / 16 + lane % 2 == 0) to->inverse_scale[n] = inverse_scale;
#pragma unroll
      for (int c = 0; c < STEPS; c++) {
        Storage4 d = at[i][c];
        uint2* high = (uint2*)&to->parts[0][2 * c + lane / 16][n] + lane % 2;
        if constexpr (NARROW) {
          *(Storage4*)high = d;
        } else {
          uint2* low = (uint2*)&to->parts[PARTS - 1][2 * c + lane / 16][n] + lane % 2;
          split_fp16(d.e[0] * scale, d.e[1] * scale, high->x, low->x);
          split_fp16(d.e[2] * scale, d.e[3] * scale, high->y, low->y);
        }
      }
    }
  }
};

// Prefetches a tile of dout into L2.
__device__ inline void prefetch_dout(const Storage* dout, int tile, int tiles, int length) {
  const int line = 1024 / STORAGE_BITS, lines = (COLUMNS + line - 1) / line;  // of 128 bytes
  int tiles_each = (length + POSITIONS - 1) / POSITIONS, k = tile % tiles_each * POSITIONS;
  const Storage* from = dout + ((long long)(tile / tiles_each) * length + k) * ALL_COLUMNS;
  if (tile < tiles)
    for (int i = threadIdx.x % 128; i < POSITIONS * lines; i += 128)
      if (k + i / lines < length) prefetch_l2(from + i / lines * ALL_COLUMNS + i % lines * line);
}

__device__ inline void produce(const Storage* dout, const Storage* y, float* partial, int length,
                               int tiles, int y_pitch, Memory* memory) {
  int thread = threadIdx.x % 128, lane = thread % 32;
  int tiles_each = (length + POSITIONS - 1) / POSITIONS;
  Sums sums[STEPS] = {};
  for (int i = 0; blockIdx.x + i * gridDim.x < tiles; i++) {
    int tile = blockIdx.x + i * gridDim.x, stage = i % STAGES, at = i % GRADIENTS;
    int sequence = tile / tiles_each, k = tile % tiles_each * POSITIONS;
    if (i >= STAGES) {  // the copies of the first stages have been started before
      mbarrier_wait(memory->empty + stage, i / STAGES - 1 & 1);
      copy_tile(memory->stages[stage], y, tile, length, y_pitch, memory->full + stage);
    }
    const Storage* from = dout + (long long)sequence * length * ALL_COLUMNS;
    Batch batch;
    batch.load(from, k, length, 0);
    prefetch_dout(dout, tile + PREFETCH_TILES * gridDim.x, tiles, length);
    if (i >= GRADIENTS) mbarrier_wait(memory->gradient_empty + at, i / GRADIENTS - 1 & 1);
#pragma unroll
    for (int which = 0; which < EIGHTS / BATCH; which++) {
      if (which > 0) batch.load(from, k, length, which);
      batch.store(memory->gradients + at, sums, which);
      __syncwarp();  // keeps the loads of the next batch behind it: there are no registers for them
    }
    fence_async_proxy();  // wgmma reads through the async proxy
    __syncwarp();
    if (lane == 0) mbarrier_arrive(memory->gradient_full + at);
  }
#pragma unroll
  for (int c = 0; c < STEPS; c++) {
    float(&s)[4] = sums[c].e;
#pragma unroll
    for (int e = 0; e < 4; e++) {
#pragma unroll
      for (int far = 2; far < 16; far *= 2) s[e] += __shfl_xor_sync(0xffffffffu, s[e], far);
      if (lane / 2 % 8 == 0)
        memory->sums[thread / 32][16 * c + lane / 16 * 8 + lane % 2 * 4 + e] = s[e];
    }
  }
  named_barrier(1, 128);
  if (thread < COLUMNS)
    for (int team = 0; team < TILES_AT_A_TIME; team++) {
      float* to = partial + (long long)(blockIdx.x * TILES_AT_A_TIME + team) * COLUMNS * (CHANNELS + 1);
      float sum = 0;
      for (int warp = 0; warp < 4; warp++) sum += memory->sums[warp][thread];
      to[COLUMNS * CHANNELS + thread] = team ? 0 : sum;
    }
}

// ------------------------------------------------------------------------- products

// sum = a dout + (keep ? sum : 0), by instructions of 128, 64, 32 and 16 columns.
template <int FIRST>
__device__ inline void add_products(float (&sum)[COLUMNS / 2], const unsigned (&a)[4],
                                    unsigned long long gradient, int keep) {
  constexpr int left = COLUMNS - FIRST;
  constexpr int count = left >= 128 ? 128 : left >= 64 ? 64 : left >= 32 ? 32 : 16;
  wgmma<1>((float(&)[count / 2])sum[FIRST / 2], a, advance(gradient, FIRST * POSITIONS * 2),
           keep);
  if constexpr (left > count) add_products<FIRST + count>(sum, a, gradient, keep);
}

// A thread's part of a tile of y or dy: [16 positions][channel][four of the positions].
typedef float ThreadTile[POSITIONS / 16][PER_THREAD][4];

__device__ inline void read_tile(ThreadTile& x, const Storage* stage, int channel, int t) {
#pragma unroll
  for (int j = 0; j < POSITIONS / 16; j++) {
#if CHANNEL_MAJOR
#pragma unroll
    for (int r = 0; r < PER_THREAD; r++) load_vector(x[j][r], stage + (channel + r) * PITCH + 16 * j + 4 * t);
#else
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const Storage* from = stage + (16 * j + e / 2 * 8 + 2 * t + e % 2) * CHANNELS + channel;
      float v[PER_THREAD];
      load_vector(v, from);
      for (int r = 0; r < PER_THREAD; r++) x[j][r][e] = v[r];
    }
#endif
  }
}

// Writes or adds to dy, which points to a sequence and a channel, from position k on.
__device__ inline void write_tile(ThreadTile& x, Storage* dy, int k, int length, int pitch, int t) {
#pragma unroll
  for (int j = 0; j < POSITIONS / 16; j++) {
#if CHANNEL_MAJOR
    if (k + 16 * j + 4 * t < pitch)
#pragma unroll
      for (int r = 0; r < PER_THREAD; r++) {
        add_or_store(dy + (long long)r * pitch + k + 16 * j + 4 * t, x[j][r]);
      }
#else
#pragma unroll
    for (int e = 0; e < 4; e++) {
      int p = k + 16 * j + e / 2 * 8 + 2 * t + e % 2;
      if (p >= length) continue;
      float v[PER_THREAD];
      for (int r = 0; r < PER_THREAD; r++) v[r] = x[j][r][e];
      add_or_store(dy + (long long)p * ALL_CHANNELS, v);
    }
#endif
  }
}

__device__ inline void consume_tiles(Storage* dy, float* partial, int length, int tiles,
                                     int y_pitch, float w_inverse_scale, Memory* memory) {
  int thread = threadIdx.x, lane = thread % 32, g = lane / 4, t = lane % 4;
  int group = uniform(thread / 128), team = group / GROUPS_PER_TILE, part = group % GROUPS_PER_TILE;
  int channel = part * 64 + thread / 32 % 4 * 8 * PER_THREAD + PER_THREAD * g;
  bool valid = CHANNELS % (32 * PER_THREAD) == 0 || channel < CHANNELS;  // the same value in the whole warp
  int tiles_each = (length + POSITIONS - 1) / POSITIONS;
  float total[COLUMNS / 8][PER_THREAD][2];
#pragma unroll
  for (int i = 0; i < COLUMNS / 4 * PER_THREAD; i++)
    total[i / 2 / PER_THREAD][i / 2 % PER_THREAD][i % 2] = 0;
  float sum[COLUMNS / 2];
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i++) sum[i] = 0;
  for (int i = team; blockIdx.x + i * gridDim.x < tiles; i += TILES_AT_A_TIME) {
    int tile = blockIdx.x + i * gridDim.x, k = tile % tiles_each * POSITIONS;
    GradientStage* gradient = memory->gradients + i % GRADIENTS;
    const uint4* weights = memory->weights[0][0][0] + opaque(part) * 64;
    unsigned long long table = descriptor(weights, GROUPS_PER_TILE * 1024, 128);
    unsigned long long positions = descriptor(gradient, POSITIONS * 16, 128);
    unsigned long long columns = descriptor(gradient, 128, POSITIONS * 16);
    mbarrier_wait(memory->gradient_full + i % GRADIENTS, i / GRADIENTS & 1);
    float dz[POSITIONS / 2];
    pin_registers(dz);
    wgmma_fence();
#pragma unroll
    for (int product = NARROW ? 2 : 0; product < 3; product++)  // in this order: low high, high low, high high
#pragma unroll
      for (int q = 0; q < STEPS; q++)
        wgmma(dz, advance(table, ((product == 0) * STEPS + q) * 2048 * GROUPS_PER_TILE),
              advance(positions, ((product == 1) * STEPS + q) * 32 * POSITIONS),
              product > (NARROW ? 2 : 0) || q > 0);
    wgmma_commit();
    ThreadTile z, derivative;
    mbarrier_wait(memory->full + i % STAGES, i / STAGES & 1);
    if (valid) read_tile(z, memory->stages[i % STAGES], channel, t);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(memory->empty + i % STAGES);
    if (!valid || k + POSITIONS > length)  // the stage is not initialised there
#pragma unroll
      for (int j = 0; j < POSITIONS / 4 * PER_THREAD; j++) {
        int e = j % 4, within = CHANNEL_MAJOR ? 4 * t + e : e / 2 * 8 + 2 * t + e % 2;
        int p = k + j / 4 / PER_THREAD * 16 + within;
        if (!valid || p >= length) z[j / 4 / PER_THREAD][j / 4 % PER_THREAD][e] = 0;
      }
#pragma unroll
    for (int j = 0; j < POSITIONS / 4 * PER_THREAD; j++)
      derivative[j / 4 / PER_THREAD][j / 4 % PER_THREAD][j % 4] =
          activate_with_derivative(z[j / 4 / PER_THREAD][j / 4 % PER_THREAD][j % 4]);
    wgmma_wait<0>();
    pin_registers(dz);
    float largest[PER_THREAD], inverse_scale[PER_THREAD];
#pragma unroll
    for (int r = 0; r < PER_THREAD; r++) largest[r] = 0;
#pragma unroll
    for (int j = 0; j < POSITIONS / 8; j++) {
      float2 inverse_scales = {1, 1};
      if constexpr (!NARROW) inverse_scales = *(const float2*)(gradient->inverse_scale + 8 * j + 2 * t);
#pragma unroll
      for (int r = 0; r < PER_THREAD; r++)
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
          int e = j % 2 * 2 + odd;
          float position_inverse_scale = odd ? inverse_scales.y : inverse_scales.x, &x = z[j / 2][r][e];
          derivative[j / 2][r][e] *= dz[4 * j + 2 * r + odd] * (position_inverse_scale * w_inverse_scale);
          x *= position_inverse_scale;  // dout has been divided by it
          largest[r] = fmaxf(largest[r], fabsf(x));
        }
    }
    long long first = tile / tiles_each * sequence_size(length, y_pitch);
    first += CHANNEL_MAJOR ? (long long)channel * y_pitch : channel;
    if (valid) write_tile(derivative, dy + first, k, length, y_pitch, t);
    unsigned high[POSITIONS / 16][4], low[POSITIONS / 16][4];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float scale = 0;  // of rows without a channel
      if (r < PER_THREAD)
        scale = operand_scale(largest[r % PER_THREAD], 3, inverse_scale[r % PER_THREAD]);
#pragma unroll
      for (int j = 0; j < POSITIONS / 16; j++)
#pragma unroll
        for (int far = 0; far < 2; far++) {
          const float* x = z[j][r % PER_THREAD] + 2 * far;
          if (r < PER_THREAD)
            split_operand(x[0] * scale, x[1] * scale, high[j][r + 2 * far], low[j][r + 2 * far]);
          else
            high[j][r + 2 * far] = low[j][r + 2 * far] = 0;
        }
    }
    pin_registers(sum);
    wgmma_fence();
    if constexpr (!NARROW) {
#pragma unroll
      for (int j = 0; j < POSITIONS / 16; j++)
        add_products<0>(sum, low[j], advance(columns, 256 * j), j > 0);
#pragma unroll
      for (int j = 0; j < POSITIONS / 16; j++)
        add_products<0>(sum, high[j], advance(columns, 256 * j + COLUMNS * POSITIONS * 2), 1);
    }
#pragma unroll
    for (int j = 0; j < POSITIONS / 16; j++)
      add_products<0>(sum, high[j], advance(columns, 256 * j), 1);
    wgmma_commit();
    wgmma_wait<0>();
    pin_registers(sum);
    if (lane == 0) mbarrier_arrive(memory->gradient_empty + i % GRADIENTS);
    if constexpr (!NARROW)
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
        for (int r = 0; r < PER_THREAD; r++)
#pragma unroll
          for (int odd = 0; odd < 2; odd++)
            total[j][r][odd] = fmaf(sum[4 * j + 2 * r + odd], inverse_scale[r], total[j][r][odd]);
  }
  if (!valid) return;
  float* to = partial + (long long)(blockIdx.x * TILES_AT_A_TIME + team) * COLUMNS * (CHANNELS + 1) + channel;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
    for (int r = 0; r < PER_THREAD; r++)
#pragma unroll
      for (int odd = 0; odd < 2; odd++)
        to[(8 * j + 2 * t + odd) * CHANNELS + r] = NARROW ? sum[4 * j + 2 * r + odd] : total[j][r][odd];
}

extern "C" __global__ void __launch_bounds__(384, 1)
backward(const Storage* dout, const Storage* y, const float* weight, Storage* dy, float* partial,
         int length, int tiles, int y_pitch) {
  long long from = blockIdx.y * CHANNELS * (CHANNEL_MAJOR ? (long long)y_pitch : 1);
  y += from, dy += from, weight += blockIdx.y * CHANNELS;
  partial += (long long)blockIdx.y * gridDim.x * TILES_AT_A_TIME * COLUMNS * (CHANNELS + 1);
  extern __shared__ __align__(128) unsigned char shared[];
  Memory* memory = (Memory*)shared;
  Weights<384, 64 * GROUPS_PER_TILE, STEPS, 64 * GROUPS_PER_TILE> weights;
  weights.load([=](int m, int q, float(&w)[16]) {
    int g = m % 8, r = m / 8 % 2;
    int channel = PER_THREAD == 2 ? m / 16 * 16 + 2 * g + r : r ? CHANNELS : m / 16 * 8 + g;
    if (channel < CHANNELS)
#pragma unroll
      for (int i = 0; i < 16; i++) w[i] = weight[(16 * q + i) * ALL_CHANNELS + channel];
  });
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(memory->full + i, PRODUCERS);
      mbarrier_init(memory->empty + i, 4 * GROUPS_PER_TILE);
    }
    for (int i = 0; i < GRADIENTS; i++) {
      mbarrier_init(memory->gradient_full + i, 4);
      mbarrier_init(memory->gradient_empty + i, 4 * GROUPS_PER_TILE);
    }
  }
  float w_inverse_scale, w_scale = operand_scale(weights.largest(memory->scratch), 0, w_inverse_scale);
  if (threadIdx.x >= 256)
    for (int i = 0; i < STAGES; i++) {
      int tile = blockIdx.x + i * gridDim.x;
      if (i < PREFETCH_TILES) prefetch_dout(dout, tile, tiles, length);
      if (tile < tiles) copy_tile(memory->stages[i], y, tile, length, y_pitch, memory->full + i);
    }
  weights.place(w_scale, memory->weights);
  __syncthreads();
  if (threadIdx.x >= 256) {
    decrease_registers<504 - 2 * CONSUMER_REGISTERS>();
    produce(dout, y, partial, length, tiles, y_pitch, memory);
  } else {
    increase_registers<CONSUMER_REGISTERS>();
    consume_tiles(dy, partial, length, tiles, y_pitch, w_inverse_scale, memory);
  }
}
