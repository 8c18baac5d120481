// out = act(y) weight^T + bias. The rows of the matrix product are positions, 64 for a consumer group of four warps.
// act(y) is the operand in registers; the weight is the operand in shared memory and stays there. Four producer warps
// prefetch tiles of y into the stages; mbarriers `full` and `empty` of each stage order them and the consumers.
// blockIdx.y is the part of the columns.

#define GROUPS_PER_TILE (POSITIONS / 64)  // consumer groups
#define TILES_AT_A_TIME (GROUPS / GROUPS_PER_TILE)
#define THREADS (128 * GROUPS + PRODUCERS)
#define STEPS (CHANNELS / 16)

struct Memory {
  uint4 weights[PARTS][STEPS][2][COLUMNS];  // [high, low][16 channels][8 channels][column]: eight channels
  Storage stages[STAGES][STAGE];
  float bias[COLUMNS], scratch[32];
  Mbarrier full[STAGES], empty[STAGES];
};
static_assert(sizeof(Memory) <= SHARED_BYTES && STAGES % TILES_AT_A_TIME == 0, "");

// Of 16 numbers of the sum a thread has 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. The channel that each of them stands for
// is chosen so that the thread reads y as vectors.
__device__ inline int channel_of(int t, int far, int odd) {
  return CHANNEL_MAJOR ? t + 8 * far + 4 * odd : 4 * t + 2 * far + odd;
}

// sum = a weight + (keep ? sum : 0), by instructions of 128, 64, 32 and 16 columns.
template <int FIRST>
__device__ inline void add_products(float (&sum)[COLUMNS / 2], const unsigned (&a)[4],
                                    unsigned long long weights, int keep) {
  constexpr int left = COLUMNS - FIRST;
  constexpr int count = left >= 128 ? 128 : left >= 64 ? 64 : left >= 32 ? 32 : 16;
  wgmma<0>((float(&)[count / 2])sum[FIRST / 2], a, advance(weights, FIRST * 16), keep);
  if constexpr (left > count) add_products<FIRST + count>(sum, a, weights, keep);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
forward(const Storage* y, const float* weight, const float* bias, Storage* out, int length, int tiles,
        int y_pitch) {
  weight += blockIdx.y * COLUMNS * ALL_CHANNELS, bias += blockIdx.y * COLUMNS, out += blockIdx.y * COLUMNS;
  extern __shared__ __align__(128) unsigned char shared[];
  Memory* memory = (Memory*)shared;
  int thread = threadIdx.x, lane = thread % 32, tiles_each = (length + POSITIONS - 1) / POSITIONS;
  Weights<THREADS, COLUMNS, STEPS, 8> weights;
  weights.load([=](int n, int q, float(&w)[16]) {
    const float4* from = (const float4*)(weight + interleaved_column(n) * ALL_CHANNELS + 16 * q);
    float x[16];
#pragma unroll
    for (int i = 0; i < 4; i++) *(float4*)(x + 4 * i) = from[i];
#pragma unroll
    for (int i = 0; i < 16; i++) w[i] = x[channel_of(i % 8 / 2, i / 8, i % 2)];
  });
  if (thread == 0)
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(memory->full + i, PRODUCERS);
      mbarrier_init(memory->empty + i, 4 * GROUPS_PER_TILE);
    }
  for (int i = thread; i < COLUMNS; i += THREADS) memory->bias[i] = bias[i];
  float w_inverse_scale, w_scale = operand_scale(weights.largest(memory->scratch), 0, w_inverse_scale);
  int tiles_copied = 0;  // by the producers
  auto copy_up_to = [&](int end) {
    for (; tiles_copied < end; tiles_copied++) {
      int tile = blockIdx.x + tiles_copied * gridDim.x, stage = tiles_copied % STAGES;
      if (tile >= tiles) break;
      if (tiles_copied >= STAGES) mbarrier_wait(memory->empty + stage, tiles_copied / STAGES - 1 & 1);
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
  unsigned long long table = descriptor(memory->weights, COLUMNS * 16, 128);
  const int step = COLUMNS * 32, low_table = STEPS * step;  // bytes
  int team = thread / 128 / GROUPS_PER_TILE, g = lane / 4, t = lane % 4;
  int first = thread / 128 % GROUPS_PER_TILE * 64 + thread / 32 % 4 * 16;  // position of this warp
  for (int i = team; blockIdx.x + i * gridDim.x < tiles; i += TILES_AT_A_TIME) {
    int tile = blockIdx.x + i * gridDim.x;
    const Storage* from = memory->stages[i % STAGES];
    mbarrier_wait(memory->full + i % STAGES, i / STAGES & 1);
    float z[STEPS][2][2][2];  // [16 channels][position][far][odd]
#pragma unroll
    for (int q = 0; q < STEPS; q++) {
#if CHANNEL_MAJOR
#pragma unroll
      for (int c = 0; c < 4; c++) {
        int channel = 16 * q + channel_of(t, c / 2, c % 2);
        float x[2];
        load_vector(x, from + channel * PITCH + first + 2 * g);
        z[q][0][c / 2][c % 2] = x[0], z[q][1][c / 2][c % 2] = x[1];
      }
#else
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float x[4];
        load_vector(x, from + (first + g + 8 * r) * CHANNELS + 16 * q + 4 * t);
        z[q][r][0][0] = x[0], z[q][r][0][1] = x[1], z[q][r][1][0] = x[2], z[q][r][1][1] = x[3];
      }
#endif
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(memory->empty + i % STAGES);
    float largest[2] = {0, 0}, inverse_scale[2];
#pragma unroll
    for (int j = 0; j < 8 * STEPS; j++) {
      float& x = z[j / 8][j / 4 % 2][j / 2 % 2][j % 2];
      x = activation(x);
      largest[j / 4 % 2] = fmaxf(largest[j / 4 % 2], fabsf(x));
    }
    unsigned high[STEPS][4], low[STEPS][4];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float scale = operand_scale(largest[r], 3, inverse_scale[r]);
#pragma unroll
      for (int q = 0; q < STEPS; q++)
#pragma unroll
        for (int far = 0; far < 2; far++)
          split_operand(z[q][r][far][0] * scale, z[q][r][far][1] * scale, high[q][r + 2 * far],
                        low[q][r + 2 * far]);
      inverse_scale[r] *= w_inverse_scale;
    }
    float sum[COLUMNS / 2];
    pin_registers(sum);
    wgmma_fence();
    if constexpr (!NARROW) {
#pragma unroll
      for (int q = 0; q < STEPS; q++) add_products<0>(sum, low[q], advance(table, q * step), q > 0);
#pragma unroll
      for (int q = 0; q < STEPS; q++)
        add_products<0>(sum, high[q], advance(table, low_table + q * step), 1);
    }
#pragma unroll
    for (int q = 0; q < STEPS; q++)
      add_products<0>(sum, high[q], advance(table, q * step), !NARROW || q > 0);
    wgmma_commit();
    wgmma_wait<0>();
    pin_registers(sum);
    int k = tile % tiles_each * POSITIONS + first;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int p = k + (CHANNEL_MAJOR ? 2 * g + r : g + 8 * r);
      if (p >= length) continue;
      Storage* to = out + ((long long)(tile / tiles_each) * length + p) * ALL_COLUMNS + 4 * t;
#pragma unroll
      for (int j = 0; j < COLUMNS / 16; j++) {
        const float* s = sum + 8 * j + 2 * r;
        float4 b = *(const float4*)(memory->bias + 16 * j + 4 * t);
        float x[4] = {b.x, b.y, b.z, b.w};
        if (ACCUMULATE) load_vector(x, to + 16 * j);
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] = fmaf(s[e / 2 * 4 + e % 2], inverse_scale[r], x[e]);
        store_vector(to + 16 * j, x);
      }
    }
  }
}
