// out = act(y) weight^T + bias. Rows of the products are positions, 64 for a group of four warps;
// act(y) goes from registers into the product, the weight stays in shared memory. Four more warps
// copy ahead.

#define TEAM (POSITIONS / 64)    // groups that share a tile
#define TEAMS (GROUPS / TEAM)
#define THREADS (128 * GROUPS + COPYING)
#define STEPS (CHANNELS / 16)

struct Memory {
  uint4 weights[2][STEPS][2][COLUMNS];  // high or low; eight channels of a column
  float stages[STAGES][STAGE];
  float bias[COLUMNS], scratch[32];
  Barrier full[STAGES], empty[STAGES];
};
static_assert(sizeof(Memory) <= SHARED_BYTES && STAGES % TEAMS == 0, "");

// Of 16 numbers of the sum a thread has 2 t, 2 t + 1, 2 t + 8, 2 t + 9; which channel each stands
// for is a matter of how a thread can read y.
__device__ inline int channel_of(int t, int far, int odd) {
  return IN_ROWS ? t + 8 * far + 4 * odd : 4 * t + 2 * far + odd;
}

// sum (+)= a weight, in products of 128, 64, 32 and 16 columns.
template <int FIRST>
__device__ inline void add_products(float (&sum)[COLUMNS / 2], const unsigned (&a)[4],
                                    unsigned long long weights, int keep) {
  constexpr int left = COLUMNS - FIRST;
  constexpr int count = left >= 128 ? 128 : left >= 64 ? 64 : left >= 32 ? 32 : 16;
  accumulate<0>((float(&)[count / 2])sum[FIRST / 2], a, further(weights, FIRST * 16), keep);
  if constexpr (left > count) add_products<FIRST + count>(sum, a, weights, keep);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
forward(const float* y, const float* weight, const float* bias, float* out, int length, int tiles,
        int y_pitch) {
  extern __shared__ __align__(128) unsigned char shared[];
  Memory* memory = (Memory*)shared;
  int thread = threadIdx.x, lane = thread % 32, tiles_each = (length + POSITIONS - 1) / POSITIONS;
  Weights<THREADS, COLUMNS, STEPS, 8> weights;
  weights.load([=](int n, int q, float(&w)[16]) {
    const float4* from = (const float4*)(weight + woven(n) * ALL_CHANNELS + 16 * q);
    float x[16];
#pragma unroll
    for (int i = 0; i < 4; i++) *(float4*)(x + 4 * i) = from[i];
#pragma unroll
    for (int i = 0; i < 16; i++) w[i] = x[channel_of(i % 8 / 2, i / 8, i % 2)];
  });
  if (thread == 0)
    for (int i = 0; i < STAGES; i++) {
      barrier_start(memory->full + i, COPYING);
      barrier_start(memory->empty + i, 4 * TEAM);
    }
  for (int i = thread; i < COLUMNS; i += THREADS) memory->bias[i] = bias[i];
  float w_back, w_scale = scale_of(weights.largest(memory->scratch), w_back);
  int copied = 0;  // tiles, by the last warps
  auto copy_up_to = [&](int end) {
    for (; copied < end; copied++) {
      int tile = blockIdx.x + copied * gridDim.x, stage = copied % STAGES;
      if (tile >= tiles) break;
      if (copied >= STAGES) barrier_wait(memory->empty + stage, copied / STAGES - 1 & 1);
      copy_tile(memory->stages[stage], y, tile, length, y_pitch, memory->full + stage);
    }
  };
  if (thread >= 128 * GROUPS) copy_up_to(STAGES);
  weights.place(w_scale, memory->weights);
  __syncthreads();
  if (thread >= 128 * GROUPS) {
    copy_up_to(tiles);
    return;
  }
  unsigned long long table = pieces(memory->weights, COLUMNS * 16, 128);
  const int step = COLUMNS * 32, low_table = STEPS * step;  // bytes
  int team = thread / 128 / TEAM, g = lane / 4, t = lane % 4;
  int first = thread / 128 % TEAM * 64 + thread / 32 % 4 * 16;  // position of the warp
  for (int i = team; blockIdx.x + i * gridDim.x < tiles; i += TEAMS) {
    int tile = blockIdx.x + i * gridDim.x;
    const float* from = memory->stages[i % STAGES];
    barrier_wait(memory->full + i % STAGES, i / STAGES & 1);
    float z[STEPS][2][2][2];  // sixteen channels; position; far; odd
#pragma unroll
    for (int q = 0; q < STEPS; q++) {
#if IN_ROWS
#pragma unroll
      for (int c = 0; c < 4; c++) {
        int channel = 16 * q + channel_of(t, c / 2, c % 2);
        float2 x = *(const float2*)(from + channel * (POSITIONS + 8) + first + 2 * g);
        z[q][0][c / 2][c % 2] = x.x, z[q][1][c / 2][c % 2] = x.y;
      }
#else
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float4 x = *(const float4*)(from + (first + g + 8 * r) * CHANNELS + 16 * q + 4 * t);
        z[q][r][0][0] = x.x, z[q][r][0][1] = x.y, z[q][r][1][0] = x.z, z[q][r][1][1] = x.w;
      }
#endif
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(memory->empty + i % STAGES);
    float largest[2] = {0, 0}, back[2];
#pragma unroll
    for (int j = 0; j < 8 * STEPS; j++) {
      float& x = z[j / 8][j / 4 % 2][j / 2 % 2][j % 2];
      x = activated(x);
      largest[j / 4 % 2] = fmaxf(largest[j / 4 % 2], fabsf(x));
    }
    unsigned high[STEPS][4], low[STEPS][4];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float scale = scale_of(largest_in_warp(largest[r], 3), back[r]);
#pragma unroll
      for (int q = 0; q < STEPS; q++)
#pragma unroll
        for (int far = 0; far < 2; far++)
          halves(z[q][r][far][0] * scale, z[q][r][far][1] * scale, high[q][r + 2 * far],
                 low[q][r + 2 * far]);
      back[r] *= w_back;
    }
    float sum[COLUMNS / 2];
    settled(sum);
    products_begin();
#pragma unroll
    for (int q = 0; q < STEPS; q++) add_products<0>(sum, low[q], further(table, q * step), q > 0);
#pragma unroll
    for (int q = 0; q < STEPS; q++)
      add_products<0>(sum, high[q], further(table, low_table + q * step), 1);
#pragma unroll
    for (int q = 0; q < STEPS; q++) add_products<0>(sum, high[q], further(table, q * step), 1);
    products_end();
    products_wait<0>();
    settled(sum);
    int k = tile % tiles_each * POSITIONS + first;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int p = k + (IN_ROWS ? 2 * g + r : g + 8 * r);
      if (p >= length) continue;
      float* to = out + ((long long)(tile / tiles_each) * length + p) * ALL_COLUMNS + 4 * t;
#pragma unroll
      for (int j = 0; j < COLUMNS / 16; j++) {
        const float* s = sum + 8 * j + 2 * r;
        float4 x = *(const float4*)(memory->bias + 16 * j + 4 * t);
        if (ADDS) x = *(const float4*)(to + 16 * j);
        x.x = fmaf(s[0], back[r], x.x), x.y = fmaf(s[1], back[r], x.y);
        x.z = fmaf(s[4], back[r], x.z), x.w = fmaf(s[5], back[r], x.w);
        *(float4*)(to + 16 * j) = x;
      }
    }
  }
}
