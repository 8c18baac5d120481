// out = act(y) weight^T + bias on every GPU since compute capability 8.0. The rows of the matrix product are positions:
// a warp has tiles of POSITIONS of them, act(y) as the operand in registers, and needs no other warp. The weight is in
// shared memory, stored as the threads read it. blockIdx.y is the part of the columns.

#define STEPS (CHANNELS / 16)
#define THREADS (32 * WARPS)
#define SETS (POSITIONS / 16)                  // of 16 positions
#define WIDTH (COLUMNS % 32 == 0 ? 32 : 16)    // columns that a warp computes at a time
#define ENTRIES (STEPS * COLUMNS / 8 * 32)     // of the table of the weight
#define ROUNDS ((ENTRIES + THREADS - 1) / THREADS)

// What a thread multiplies with: numbers 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of a column, for fp32 high and low.
struct __align__(8 * PARTS) Entry {
  unsigned parts[PARTS][2];
};
struct Memory {
  Entry weights[STEPS][COLUMNS / 8][32];
  float bias[COLUMNS], scratch[32];
};
static_assert(sizeof(Memory) <= SHARED_BYTES, "");

// The channel of number 2 t + 8 far + odd of the sum, chosen so that a thread reads y as vectors.
__device__ inline int channel_of(int t, int far, int odd) {
  return CHANNEL_MAJOR ? t + 8 * far + 4 * odd : 4 * t + 2 * far + odd;
}

// The position of row g (r = 0) or g + 8 (r = 1) of a set.
__device__ inline int position_of(int g, int set, int r) {
  return CHANNEL_MAJOR ? 2 * SETS * g + 2 * set + r : 16 * set + 8 * r + g;
}

__device__ inline void place_weights(const float* weight, Memory* memory, float& inverse_scale) {
  int thread = threadIdx.x, lane = thread % 32, g = lane / 4, t = lane % 4;
  float w[ROUNDS][4], largest = 0;
#pragma unroll
  for (int round = 0; round < ROUNDS; round++) {
    int entry = round * THREADS + thread, column = interleaved_column(entry / 32 % (COLUMNS / 8) * 8 + g);
    const float* from = weight + column * ALL_CHANNELS + entry / 32 / (COLUMNS / 8) * 16;
#pragma unroll
    for (int i = 0; i < 4; i++) w[round][i] = entry < ENTRIES ? from[channel_of(t, i / 2, i % 2)] : 0;
#pragma unroll
    for (int i = 0; i < 4; i++) largest = fmaxf(largest, fabsf(w[round][i]));
  }
  float scale = operand_scale(block_max(largest, memory->scratch, WARPS), 0, inverse_scale);
  Entry* table = memory->weights[0][0];
#pragma unroll
  for (int round = 0; round < ROUNDS; round++) {
    Entry entry;
    unsigned low[2];
#pragma unroll
    for (int far = 0; far < 2; far++)
      split_operand(w[round][2 * far] * scale, w[round][2 * far + 1] * scale, entry.parts[0][far], low[far]);
    if constexpr (!NARROW) entry.parts[PARTS - 1][0] = low[0], entry.parts[PARTS - 1][1] = low[1];
    int i = round * THREADS + thread;
    if (i < ENTRIES) table[i] = entry;
  }
}

// A thread's part of a tile of y: for each 16 channels 8 SETS numbers in vectors along positions or channels.
struct Tile {
#if CHANNEL_MAJOR
  static constexpr int VECTORS = 4, COUNT = 2 * SETS;
#else
  static constexpr int VECTORS = 2 * SETS, COUNT = 4;
#endif
  struct __align__(sizeof(Storage) * COUNT) Vector {
    Storage e[COUNT];
  } vectors[STEPS][VECTORS];

  // From position k of the sequence on; positions beyond the length are 0 or padding.
  __device__ inline void load(const Storage* y, int k, int length, int y_pitch) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int q = 0; q < STEPS; q++)
#pragma unroll
      for (int i = 0; i < VECTORS; i++) {
        int p = k + (CHANNEL_MAJOR ? position_of(g, 0, 0) : position_of(g, i / 2, i % 2));
        int channel = 16 * q + channel_of(t, CHANNEL_MAJOR ? i / 2 : 0, CHANNEL_MAJOR ? i % 2 : 0);
        const Storage* from = y + (CHANNEL_MAJOR ? (long long)channel * y_pitch + p
                                                 : (long long)p * ALL_CHANNELS + channel);
        vectors[q][i] = p < length ? *(const Vector*)from : Vector{};
      }
  }
  __device__ inline float number(int q, int set, int r, int far, int odd) {
    return to_fp32(CHANNEL_MAJOR ? vectors[q][2 * far + odd].e[2 * set + r]
                                 : vectors[q][2 * set + r].e[2 * far + odd]);
  }
};

// Prefetches a warp's tile of y into L2.
__device__ inline void prefetch_tile(const Storage* y, int k, int length, int y_pitch) {
  int lane = threadIdx.x % 32;
#if CHANNEL_MAJOR
  for (int channel = lane; channel < CHANNELS; channel += 32) prefetch_l2(y + (long long)channel * y_pitch + k);
#else
  const int line = 1024 / STORAGE_BITS, lines = (CHANNELS + line - 1) / line;  // of 128 bytes
  for (int i = lane; i < POSITIONS * lines; i += 32)
    if (k + i / lines < length) prefetch_l2(y + (long long)(k + i / lines) * ALL_CHANNELS + i % lines * line);
#endif
}

typedef unsigned Operand[STEPS][SETS][4];

// act(y) as the operand in registers, and the inverse of the scale of each position.
__device__ inline void activate(Tile& y, Operand& high, Operand& low, float (&inverse_scale)[SETS][2]) {
#pragma unroll
  for (int set = 0; set < SETS; set++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float z[STEPS][4], largest = 0;
#pragma unroll
      for (int i = 0; i < 4 * STEPS; i++) {
        z[i / 4][i % 4] = activation(y.number(i / 4, set, r, i % 4 / 2, i % 2));
        largest = fmaxf(largest, fabsf(z[i / 4][i % 4]));
      }
      float scale = operand_scale(largest, 3, inverse_scale[set][r]);
#pragma unroll
      for (int i = 0; i < 2 * STEPS; i++) {
        int q = i / 2, far = i % 2;
        split_operand(z[q][2 * far] * scale, z[q][2 * far + 1] * scale, high[q][set][r + 2 * far],
                      low[q][set][r + 2 * far]);
      }
    }
}

// The sums of a warp: of high high, and (for fp32) of the smaller products, which the tensor cores would truncate.
struct Sums {
  float large[SETS][WIDTH / 8][4], small[SETS][WIDTH / 8][4];

  __device__ inline void add_products(const Entry* weights, const Operand& high, const Operand& low) {
#pragma unroll
    for (int i = 0; i < SETS * WIDTH / 2; i++)
      large[i * 2 / WIDTH][i / 4 % (WIDTH / 8)][i % 4] = small[i * 2 / WIDTH][i / 4 % (WIDTH / 8)][i % 4] = 0;
#pragma unroll
    for (int q = 0; q < STEPS; q++) {
      Entry w[WIDTH / 8];
#pragma unroll
      for (int n = 0; n < WIDTH / 8; n++) w[n] = weights[(q * COLUMNS / 8 + n) * 32];
#pragma unroll
      for (int product = NARROW ? 2 : 0; product < 3; product++)
#pragma unroll
        for (int i = 0; i < SETS * WIDTH / 8; i++) {
          int set = i / (WIDTH / 8), n = i % (WIDTH / 8);
          mma(product < 2 ? small[set][n] : large[set][n], product == 0 ? low[q][set] : high[q][set],
              w[n].parts[product == 1 ? PARTS - 1 : 0]);
        }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
forward(const Storage* y, const float* weight, const float* bias, Storage* out, int length, int tiles, int y_pitch) {
  extern __shared__ __align__(128) unsigned char shared[];
  Memory* memory = (Memory*)shared;
  weight += blockIdx.y * COLUMNS * ALL_CHANNELS, bias += blockIdx.y * COLUMNS, out += blockIdx.y * COLUMNS;
  int thread = threadIdx.x, lane = thread % 32, g = lane / 4, t = lane % 4;
  int tiles_each = (length + POSITIONS - 1) / POSITIONS;
  float w_inverse_scale;
  place_weights(weight, memory, w_inverse_scale);
  for (int i = thread; i < COLUMNS; i += THREADS) memory->bias[i] = bias[i];
  __syncthreads();
  for (int i = uniform(thread / 32); blockIdx.x + i * gridDim.x < tiles; i += WARPS) {
    int tile = blockIdx.x + i * gridDim.x, sequence = tile / tiles_each, k = tile % tiles_each * POSITIONS;
    int next = tile + WARPS * gridDim.x;
    Tile from;
    from.load(y + sequence * sequence_size(length, y_pitch), k, length, y_pitch);
    if (next < tiles)
      prefetch_tile(y + next / tiles_each * sequence_size(length, y_pitch), next % tiles_each * POSITIONS, length,
                    y_pitch);
    Operand high, low;
    float inverse_scale[SETS][2];
    activate(from, high, low, inverse_scale);
#pragma unroll 1
    for (int o = 0; o < COLUMNS; o += WIDTH) {
      Sums sums;
      sums.add_products(memory->weights[0][o / 8] + lane, high, low);
#pragma unroll
      for (int row = 0; row < 2 * SETS; row++) {
        int set = row / 2, r = row % 2, p = k + position_of(g, set, r);
        if (p >= length) continue;
        Storage* to = out + ((long long)sequence * length + p) * ALL_COLUMNS + o + 4 * t;
#pragma unroll
        for (int n = 0; n < WIDTH / 16; n++) {
          float4 b = *(const float4*)(memory->bias + o + 16 * n + 4 * t);
          float x[4] = {b.x, b.y, b.z, b.w};
          if (ACCUMULATE) load_vector(x, to + 16 * n);
#pragma unroll
          for (int e = 0; e < 4; e++) {
            int at = 2 * n + e / 2, d = 2 * r + e % 2;
            x[e] = fmaf(sums.large[set][at][d] + sums.small[set][at][d], inverse_scale[set][r] * w_inverse_scale, x[e]);
          }
          store_vector(to + 16 * n, x);
        }
      }
    }
  }
}
