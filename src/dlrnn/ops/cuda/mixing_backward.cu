// dy = (dout weight) act'(y), d_weight = dout^T act(y), d_bias = sum dout.
//
// Rows of the products are channels. Four warps copy y ahead and bring dout, a power of two for
// each position, into shared memory as halves; two groups of four warps multiply: first the weight
// with dout, positions being columns, then act(y), whose registers are those of the first result,
// with the same dout, summed over positions. Wide ones share a tile, 64 channels each; narrow ones
// take a tile each. The sum of a tile is added to an fp32 total; a block's totals are a row of
// `partial`.

#define TEAM (CHANNELS > 64 ? 2 : 1)   // groups that share a tile
#define TEAMS (2 / TEAM)
#define LINES (CHANNELS > 32 ? 2 : 1)  // channels of a thread
#define STEPS (COLUMNS / 16)
#define TAKEN (IN_ROWS ? 192 : 184)    // registers: with these the fewest are spilled
#define AHEAD 1                        // tiles of dout that are on their way into L2
#define EIGHTS (POSITIONS / 32)        // eight positions that a copying warp has, times so many
#define BATCH (128 / COLUMNS < 1 ? 1 : 128 / COLUMNS < EIGHTS ? 128 / COLUMNS : EIGHTS)

struct Gradient {
  uint4 halves[2][COLUMNS / 8][POSITIONS];  // high or low; eight columns of a position
  float back[POSITIONS];
};
struct Memory {
  uint4 weights[2][STEPS][2][64 * TEAM];  // high or low; eight columns of a channel
  Gradient gradients[GRADIENTS];
  float stages[STAGES][STAGE];
  float sums[4][COLUMNS], scratch[32];
  Barrier full[STAGES], empty[STAGES], made[GRADIENTS], used[GRADIENTS];
};
static_assert(sizeof(Memory) <= SHARED_BYTES && STAGES % TEAMS == 0, "");

// Column n of the first product: in rows, a thread has four neighbours.
__device__ inline int position_of(int n) { return IN_ROWS ? woven(n) : n; }

// ------------------------------------------------------------------------- dout as halves

// BATCH times eight positions, in a warp: of the lanes two have eight columns, then eight positions
// follow, then eight more columns, so that no bank of shared memory is asked twice.
struct Batch {
  float4 at[BATCH][STEPS];

  __device__ inline int column(int i, int which) {  // of the first product
    return ((which * BATCH + i) * 4 + threadIdx.x / 32 % 4) * 8 + threadIdx.x % 32 / 2 % 8;
  }

  // From a sequence's position k on.
  __device__ inline void load(const float* dout, int k, int length, int which) {
    const float* from = dout + threadIdx.x % 32 / 16 * 8 + threadIdx.x % 2 * 4;
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      int p = k + position_of(column(i, which));
#pragma unroll
      for (int c = 0; c < STEPS; c++)
        at[i][c] = p < length ? *(const float4*)(from + (long long)p * ALL_COLUMNS + 16 * c)
                              : make_float4(0, 0, 0, 0);
    }
  }

  __device__ inline void store(Gradient* to, float4 (&sums)[STEPS], int which) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      int n = column(i, which);
      float largest = 0, back;
#pragma unroll
      for (int c = 0; c < STEPS; c++) {
        float4 d = at[i][c];
        largest = fmaxf(fmaxf(largest, fmaxf(fabsf(d.x), fabsf(d.y))),
                        fmaxf(fabsf(d.z), fabsf(d.w)));
        sums[c].x += d.x, sums[c].y += d.y, sums[c].z += d.z, sums[c].w += d.w;
      }
      float scale = scale_of(largest_in_warp(largest, 17), back);
      if (lane / 16 + lane % 2 == 0) to->back[n] = back;
#pragma unroll
      for (int c = 0; c < STEPS; c++) {
        float4 d = at[i][c];
        uint2 high, low;
        halves(d.x * scale, d.y * scale, high.x, low.x);
        halves(d.z * scale, d.w * scale, high.y, low.y);
        ((uint2*)&to->halves[0][2 * c + lane / 16][n])[lane % 2] = high;
        ((uint2*)&to->halves[1][2 * c + lane / 16][n])[lane % 2] = low;
      }
    }
  }
};

// Brings a tile of dout from device memory into L2.
__device__ inline void fetch_ahead(const float* dout, int tile, int tiles, int length) {
  const int lines = (COLUMNS + 31) / 32;  // of 128 bytes
  int tiles_each = (length + POSITIONS - 1) / POSITIONS, k = tile % tiles_each * POSITIONS;
  const float* from = dout + ((long long)(tile / tiles_each) * length + k) * ALL_COLUMNS;
  if (tile < tiles)
    for (int i = threadIdx.x % 128; i < POSITIONS * lines; i += 128)
      if (k + i / lines < length) prefetch(from + i / lines * ALL_COLUMNS + i % lines * 32);
}

__device__ inline void provide(const float* dout, const float* y, float* partial, int length,
                               int tiles, int y_pitch, Memory* memory) {
  int thread = threadIdx.x % 128, lane = thread % 32;
  int tiles_each = (length + POSITIONS - 1) / POSITIONS;
  float4 sums[STEPS];
#pragma unroll
  for (int c = 0; c < STEPS; c++) sums[c] = make_float4(0, 0, 0, 0);
  for (int i = 0; blockIdx.x + i * gridDim.x < tiles; i++) {
    int tile = blockIdx.x + i * gridDim.x, stage = i % STAGES, at = i % GRADIENTS;
    int sequence = tile / tiles_each, k = tile % tiles_each * POSITIONS;
    if (i >= STAGES) {  // the first ones were asked for before
      barrier_wait(memory->empty + stage, i / STAGES - 1 & 1);
      copy_tile(memory->stages[stage], y, tile, length, y_pitch, memory->full + stage);
    }
    const float* from = dout + (long long)sequence * length * ALL_COLUMNS;
    Batch batch;
    batch.load(from, k, length, 0);
    fetch_ahead(dout, tile + AHEAD * gridDim.x, tiles, length);
    if (i >= GRADIENTS) barrier_wait(memory->used + at, i / GRADIENTS - 1 & 1);
#pragma unroll
    for (int which = 0; which < EIGHTS / BATCH; which++) {
      if (which > 0) batch.load(from, k, length, which);
      batch.store(memory->gradients + at, sums, which);
      __syncwarp();  // no load before it: there are no registers for one
    }
    before_copies();  // products read as copies do
    __syncwarp();
    if (lane == 0) barrier_arrive(memory->made + at);
  }
#pragma unroll
  for (int c = 0; c < STEPS; c++) {
    float* s = (float*)(sums + c);
#pragma unroll
    for (int e = 0; e < 4; e++) {
#pragma unroll
      for (int far = 2; far < 16; far *= 2) s[e] += __shfl_xor_sync(0xffffffffu, s[e], far);
      if (lane / 2 % 8 == 0)
        memory->sums[thread / 32][16 * c + lane / 16 * 8 + lane % 2 * 4 + e] = s[e];
    }
  }
  team_barrier(1, 128);
  if (thread < COLUMNS)
    for (int team = 0; team < TEAMS; team++) {
      float* to = partial + (long long)(blockIdx.x * TEAMS + team) * COLUMNS * (CHANNELS + 1);
      float sum = 0;
      for (int warp = 0; warp < 4; warp++) sum += memory->sums[warp][thread];
      to[COLUMNS * CHANNELS + thread] = team ? 0 : sum;
    }
}

// ------------------------------------------------------------------------- products

// sum (+)= a dout, in products of 128, 64, 32 and 16 columns.
template <int FIRST>
__device__ inline void add_products(float (&sum)[COLUMNS / 2], const unsigned (&a)[4],
                                    unsigned long long gradient, int keep) {
  constexpr int left = COLUMNS - FIRST;
  constexpr int count = left >= 128 ? 128 : left >= 64 ? 64 : left >= 32 ? 32 : 16;
  accumulate<1>((float(&)[count / 2])sum[FIRST / 2], a, further(gradient, FIRST * POSITIONS * 2),
                keep);
  if constexpr (left > count) add_products<FIRST + count>(sum, a, gradient, keep);
}

// A thread's share of a tile of y or dy: [sixteen positions][channel][four of them].
typedef float Share[POSITIONS / 16][LINES][4];

__device__ inline void read_tile(Share& x, const float* stage, int channel, int t) {
#pragma unroll
  for (int j = 0; j < POSITIONS / 16; j++) {
#if IN_ROWS
#pragma unroll
    for (int r = 0; r < LINES; r++) {
      float4 v = *(const float4*)(stage + (channel + r) * (POSITIONS + 8) + 16 * j + 4 * t);
      x[j][r][0] = v.x, x[j][r][1] = v.y, x[j][r][2] = v.z, x[j][r][3] = v.w;
    }
#else
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float* from = stage + (16 * j + e / 2 * 8 + 2 * t + e % 2) * CHANNELS + channel;
      if (LINES == 2) {
        float2 v = *(const float2*)from;
        x[j][0][e] = v.x, x[j][LINES - 1][e] = v.y;
      } else {
        x[j][0][e] = *from;
      }
    }
#endif
  }
}

// Into dy at a sequence's position k and a channel.
__device__ inline void write_tile(Share& x, float* dy, int k, int length, int pitch, int t) {
#pragma unroll
  for (int j = 0; j < POSITIONS / 16; j++) {
#if IN_ROWS
    if (k + 16 * j + 4 * t < pitch)
#pragma unroll
      for (int r = 0; r < LINES; r++) {
        float4* to = (float4*)(dy + (long long)r * pitch + k + 16 * j + 4 * t);
        float4 v = make_float4(x[j][r][0], x[j][r][1], x[j][r][2], x[j][r][3]);
        if (ADDS) v.x += to->x, v.y += to->y, v.z += to->z, v.w += to->w;
        *to = v;
      }
#else
#pragma unroll
    for (int e = 0; e < 4; e++) {
      int p = k + 16 * j + e / 2 * 8 + 2 * t + e % 2;
      if (p >= length) continue;
      float* to = dy + (long long)p * ALL_CHANNELS;
      if (LINES == 2) {
        float2 v = make_float2(x[j][0][e], x[j][LINES - 1][e]);
        if (ADDS) v.x += to[0], v.y += to[1];
        *(float2*)to = v;
      } else {
        *to = ADDS ? *to + x[j][0][e] : x[j][0][e];
      }
    }
#endif
  }
}

__device__ inline void multiply_tiles(float* dy, float* partial, int length, int tiles,
                                      int y_pitch, float w_back, Memory* memory) {
  int thread = threadIdx.x, lane = thread % 32, g = lane / 4, t = lane % 4;
  int group = uniform(thread / 128), team = group / TEAM, part = group % TEAM;
  int channel = part * 64 + thread / 32 % 4 * 8 * LINES + LINES * g;
  bool known = CHANNELS % (32 * LINES) == 0 || channel < CHANNELS;  // the same in a warp
  int tiles_each = (length + POSITIONS - 1) / POSITIONS;
  float total[COLUMNS / 8][LINES][2];
#pragma unroll
  for (int i = 0; i < COLUMNS / 4 * LINES; i++) total[i / 2 / LINES][i / 2 % LINES][i % 2] = 0;
  for (int i = team; blockIdx.x + i * gridDim.x < tiles; i += TEAMS) {
    int tile = blockIdx.x + i * gridDim.x, k = tile % tiles_each * POSITIONS;
    Gradient* gradient = memory->gradients + i % GRADIENTS;
    const uint4* weights = memory->weights[0][0][0] + fresh(part) * 64;
    unsigned long long table = pieces(weights, TEAM * 1024, 128);
    unsigned long long positions = pieces(gradient, POSITIONS * 16, 128);
    unsigned long long columns = pieces(gradient, 128, POSITIONS * 16);
    barrier_wait(memory->made + i % GRADIENTS, i / GRADIENTS & 1);
    float dz[POSITIONS / 2];
    settled(dz);
    products_begin();
#pragma unroll
    for (int product = 0; product < 3; product++)  // low high, high low, high high
#pragma unroll
      for (int q = 0; q < STEPS; q++)
        accumulate(dz, further(table, ((product == 0) * STEPS + q) * 2048 * TEAM),
                   further(positions, ((product == 1) * STEPS + q) * 32 * POSITIONS),
                   product + q > 0);
    products_end();
    Share z, slope;
    barrier_wait(memory->full + i % STAGES, i / STAGES & 1);
    if (known) read_tile(z, memory->stages[i % STAGES], channel, t);
    __syncwarp();
    if (lane == 0) barrier_arrive(memory->empty + i % STAGES);
    if (!known || k + POSITIONS > length)  // nobody has written there
#pragma unroll
      for (int j = 0; j < POSITIONS / 4 * LINES; j++) {
        int e = j % 4, within = IN_ROWS ? 4 * t + e : e / 2 * 8 + 2 * t + e % 2;
        int p = k + j / 4 / LINES * 16 + within;
        if (!known || p >= length) z[j / 4 / LINES][j / 4 % LINES][e] = 0;
      }
#pragma unroll
    for (int j = 0; j < POSITIONS / 4 * LINES; j++)
      slope[j / 4 / LINES][j / 4 % LINES][j % 4] = slope_of(z[j / 4 / LINES][j / 4 % LINES][j % 4]);
    products_wait<0>();
    settled(dz);
    float largest[LINES], back[LINES];
#pragma unroll
    for (int r = 0; r < LINES; r++) largest[r] = 0;
#pragma unroll
    for (int j = 0; j < POSITIONS / 8; j++) {
      float2 backs = *(const float2*)(gradient->back + 8 * j + 2 * t);
#pragma unroll
      for (int r = 0; r < LINES; r++)
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
          int e = j % 2 * 2 + odd;
          float of_position = odd ? backs.y : backs.x, &x = z[j / 2][r][e];
          slope[j / 2][r][e] *= dz[4 * j + 2 * r + odd] * (of_position * w_back);
          x *= of_position;  // as the sum over positions weighs it
          largest[r] = fmaxf(largest[r], fabsf(x));
        }
    }
    long long first = tile / tiles_each * sequence_of(length, y_pitch);
    first += IN_ROWS ? (long long)channel * y_pitch : channel;
    if (known) write_tile(slope, dy + first, k, length, y_pitch, t);
    unsigned high[POSITIONS / 16][4], low[POSITIONS / 16][4];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float scale = 0;  // of rows that stand for no channel
      if (r < LINES) scale = scale_of(largest_in_warp(largest[r % LINES], 3), back[r % LINES]);
#pragma unroll
      for (int j = 0; j < POSITIONS / 16; j++)
#pragma unroll
        for (int far = 0; far < 2; far++) {
          const float* x = z[j][r % LINES] + 2 * far;
          if (r < LINES)
            halves(x[0] * scale, x[1] * scale, high[j][r + 2 * far], low[j][r + 2 * far]);
          else
            high[j][r + 2 * far] = low[j][r + 2 * far] = 0;
        }
    }
    float sum[COLUMNS / 2];
    settled(sum);
    products_begin();
#pragma unroll
    for (int j = 0; j < POSITIONS / 16; j++)
      add_products<0>(sum, low[j], further(columns, 256 * j), j > 0);
#pragma unroll
    for (int j = 0; j < POSITIONS / 16; j++)
      add_products<0>(sum, high[j], further(columns, 256 * j + COLUMNS * POSITIONS * 2), 1);
#pragma unroll
    for (int j = 0; j < POSITIONS / 16; j++)
      add_products<0>(sum, high[j], further(columns, 256 * j), 1);
    products_end();
    products_wait<0>();
    settled(sum);
    if (lane == 0) barrier_arrive(memory->used + i % GRADIENTS);
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
      for (int r = 0; r < LINES; r++)
#pragma unroll
        for (int odd = 0; odd < 2; odd++)
          total[j][r][odd] = fmaf(sum[4 * j + 2 * r + odd], back[r], total[j][r][odd]);
  }
  if (!known) return;
  float* to = partial + (long long)(blockIdx.x * TEAMS + team) * COLUMNS * (CHANNELS + 1) + channel;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
    for (int r = 0; r < LINES; r++)
#pragma unroll
      for (int odd = 0; odd < 2; odd++) to[(8 * j + 2 * t + odd) * CHANNELS + r] = total[j][r][odd];
}

extern "C" __global__ void __launch_bounds__(384, 1)
backward(const float* dout, const float* y, const float* weight, float* dy, float* partial,
         int length, int tiles, int y_pitch) {
  extern __shared__ __align__(128) unsigned char shared[];
  Memory* memory = (Memory*)shared;
  Weights<384, 64 * TEAM, STEPS, 64 * TEAM> weights;
  weights.load([=](int m, int q, float(&w)[16]) {
    int g = m % 8, r = m / 8 % 2;
    int channel = LINES == 2 ? m / 16 * 16 + 2 * g + r : r ? CHANNELS : m / 16 * 8 + g;
    if (channel < CHANNELS)
#pragma unroll
      for (int i = 0; i < 16; i++) w[i] = weight[(16 * q + i) * ALL_CHANNELS + channel];
  });
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_start(memory->full + i, COPYING);
      barrier_start(memory->empty + i, 4 * TEAM);
    }
    for (int i = 0; i < GRADIENTS; i++) {
      barrier_start(memory->made + i, 4);
      barrier_start(memory->used + i, 4 * TEAM);
    }
  }
  float w_back, w_scale = scale_of(weights.largest(memory->scratch), w_back);
  if (threadIdx.x >= 256)
    for (int i = 0; i < STAGES; i++) {
      int tile = blockIdx.x + i * gridDim.x;
      if (i < AHEAD) fetch_ahead(dout, tile, tiles, length);
      if (tile < tiles) copy_tile(memory->stages[i], y, tile, length, y_pitch, memory->full + i);
    }
  weights.place(w_scale, memory->weights);
  __syncthreads();
  if (threadIdx.x >= 256) {
    leave_registers<504 - 2 * TAKEN>();
    provide(dout, y, partial, length, tiles, y_pitch, memory);
  } else {
    take_registers<TAKEN>();
    multiply_tiles(dy, partial, length, tiles, y_pitch, w_back, memory);
  }
}

// The gradients of weight and bias: sums of all blocks' rows.
extern "C" __global__ void __launch_bounds__(256)
add_up(const float4* partial, float* d_weight, float* d_bias, int rows) {
  __shared__ float4 sums[8][32];
  const int weights = COLUMNS * CHANNELS, entries = weights + COLUMNS;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = blockIdx.x * 32 + lane;
  float4 sum = make_float4(0, 0, 0, 0);
  if (4 * i < entries)
#pragma unroll 4
    for (int row = warp; row < rows; row += 8) {
      float4 x = partial[(long long)row * (entries / 4) + i];
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || 4 * i >= entries) return;
  for (int other = 1; other < 8; other++) {
    float4 x = sums[other][lane];
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  float* to = 4 * i < weights ? d_weight + 4 * i / CHANNELS * ALL_CHANNELS + 4 * i % CHANNELS
                              : d_bias + 4 * i - weights;
  *(float4*)to = sum;
}
