// dy = (dout weight) act'(y),   d_weight = dout^T act(y),   d_bias = sum dout, on GPUs since compute capability 8.0.
//
// The rows of the matrix products are channels: a warp has 16, a team of warps all CHANNELS, and each of the TEAMS of a
// block 32 positions of a tile. All threads scale dout (by a power of two for each position), split it into fp16 parts
// and store it in shared memory. A warp multiplies weight^T, which stays in registers, with dout^T, whose columns are
// positions; then act(y)^T, whose register layout is that of the first result, with the same dout, summed over
// positions. The sums of the tiles are added in fp32 (with 16-bit storage by the tensor cores); the totals of a team
// are a row of `partial`. The next tile is loaded into registers while a tile is computed; with two STAGES a warp stores
// it without waiting for the others. blockIdx.y is the part of the channels.

#define TEAM_POSITIONS 32
#define TEAMS (POSITIONS / TEAM_POSITIONS)
#define TEAM_WARPS (CHANNELS / 16)
#define WARPS (TEAMS * TEAM_WARPS)
#define THREADS (32 * WARPS)
#define STEPS (COLUMNS / 16)
#define LANES (COLUMNS > 64 ? 32 : COLUMNS > 32 ? 16 : COLUMNS / 4)  // with four columns of a position each
#define AT_A_TIME (32 / LANES * WARPS)                               // positions of dout that a block loads
#define ROUNDS ((POSITIONS + AT_A_TIME - 1) / AT_A_TIME)
#define PREFETCHED (ROUNDS < 8 ? ROUNDS : 8)                         // rounds in registers
#define VECTOR (16 / (int)sizeof(Storage))                           // adjacent positions that a thread has

struct Gradient {
  unsigned short parts[PARTS][POSITIONS][COLUMNS + 8];  // 16 bytes of padding keep rows in different banks
  float inverse_scale[POSITIONS];
};
struct Memory {
  Gradient stages[STAGES];
  float sums[WARPS][COLUMNS], scratch[32];
};
static_assert(sizeof(Memory) <= SHARED_BYTES, "");

// The position of column n of the first product: if y is channel-major, a thread has VECTOR adjacent positions.
__device__ inline int position_of(int n) {
  return CHANNEL_MAJOR ? n / (4 * VECTOR) * (4 * VECTOR) + n % 8 / 2 * VECTOR + n / 8 % (VECTOR / 2) * 2 + n % 2 : n;
}

// Where a tile is.
struct Place {
  int sequence, k;
  __device__ inline Place(int tile, int length) {
    int tiles_each = (length + POSITIONS - 1) / POSITIONS;
    sequence = tile / tiles_each, k = tile % tiles_each * POSITIONS;
  }
};

// ------------------------------------------------------------------------- dout in fp16 parts

// A thread's numbers of a tile of dout: four columns of a position in each round.
struct Dout {
  Storage4 numbers[PREFETCHED];

  __device__ inline static int row(int round) {
    return round * AT_A_TIME + threadIdx.x / 32 * (32 / LANES) + threadIdx.x % 32 / LANES;
  }
  __device__ inline static int column() { return threadIdx.x % LANES * 4; }

  __device__ inline static Storage4 number(const Storage* dout, Place place, int length, int round) {
    int n = row(round), p = place.k + n / TEAM_POSITIONS * TEAM_POSITIONS + position_of(n % TEAM_POSITIONS);
    if (n >= POSITIONS || p >= length || column() >= COLUMNS) return Storage4{};
    return *(const Storage4*)(dout + ((long long)place.sequence * length + p) * ALL_COLUMNS + column());
  }
  __device__ inline void load(const Storage* dout, Place place, int length) {
#pragma unroll
    for (int i = 0; i < PREFETCHED; i++) numbers[i] = number(dout, place, length, i);
  }
  __device__ inline static void store(Gradient* to, float (&sums)[4], Storage4 d, int round) {
    int n = row(round);
    float x[4], largest = 0, inverse_scale;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      x[e] = to_fp32(d.e[e]);
      largest = fmaxf(largest, fabsf(x[e]));
      sums[e] += x[e];
    }
    float scale = operand_scale(largest, LANES - 1, inverse_scale);
    if (n >= POSITIONS || column() >= COLUMNS) return;
    if constexpr (NARROW) {
      *(Storage4*)(to->parts[0][n] + column()) = d;
    } else {
      uint2 high, low;
      split_fp16(x[0] * scale, x[1] * scale, high.x, low.x);
      split_fp16(x[2] * scale, x[3] * scale, high.y, low.y);
      *(uint2*)(to->parts[0][n] + column()) = high;
      *(uint2*)(to->parts[PARTS - 1][n] + column()) = low;
      if (column() == 0) to->inverse_scale[n] = inverse_scale;
    }
  }
  __device__ inline void store(Gradient* to, float (&sums)[4], const Storage* dout, Place place, int length) {
#pragma unroll
    for (int i = 0; i < PREFETCHED; i++) store(to, sums, numbers[i], i);
#pragma unroll 4
    for (int i = PREFETCHED; i < ROUNDS; i++) store(to, sums, number(dout, place, length, i), i);
  }
};

// d_bias: the sums of all threads for a column.
__device__ inline void write_bias(float (&sums)[4], float* partial, Memory* memory) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int e = 0; e < 4; e++) {
#pragma unroll
    for (int far = LANES; far < 32; far *= 2) sums[e] += __shfl_xor_sync(0xffffffffu, sums[e], far);
    if (lane < LANES && 4 * lane < COLUMNS) memory->sums[warp][4 * lane + e] = sums[e];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < TEAMS * COLUMNS; i += THREADS) {
    int team = i / COLUMNS, column = i % COLUMNS;
    float sum = 0;
    for (int other = 0; other < WARPS; other++) sum += memory->sums[other][column];
    partial[(long long)team * COLUMNS * (CHANNELS + 1) + COLUMNS * CHANNELS + column] = team ? 0 : sum;
  }
}

// ------------------------------------------------------------------------- y and dy

// A thread's part of 16 channels and 32 positions: [8 columns of the first product][2 row + odd].
typedef float Numbers[4][4];

#if CHANNEL_MAJOR
#define VECTORS (8 / VECTOR * 2)  // each of VECTOR positions of a channel
#define PER_VECTOR VECTOR
#else
#define VECTORS 8  // each of two channels of a position
#define PER_VECTOR 2
#endif
// The place of number e of vector i.
__device__ inline float& number(Numbers& x, int i, int e) {
#if CHANNEL_MAJOR
  return x[i / 2 * (VECTOR / 2) + e / 2][i % 2 * 2 + e % 2];
#else
  return x[i / 2][e * 2 + i % 2];
#endif
}
// Of vector i: the first position, from that of the team on, and the first channel, from that of the thread on.
__device__ inline int position_of_vector(int i, int t) {
  return CHANNEL_MAJOR ? i / 2 * (4 * VECTOR) + t * VECTOR : i / 2 * 8 + 2 * t + i % 2;
}
__device__ inline int channel_of_vector(int i) { return CHANNEL_MAJOR ? i % 2 : 0; }

// Where vector i at position p lies, from the thread's first channel on.
__device__ inline long long offset_of_vector(int i, int p, int y_pitch) {
  return CHANNEL_MAJOR ? (long long)channel_of_vector(i) * y_pitch + p : (long long)p * ALL_CHANNELS;
}

struct __align__(sizeof(Storage) * PER_VECTOR) Vector {
  Storage e[PER_VECTOR];
};
__device__ inline void load_y(Vector (&to)[VECTORS], const Storage* y, int k, int length, int y_pitch) {
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    int p = k + position_of_vector(i, threadIdx.x % 4);
    to[i] = p < length ? *(const Vector*)(y + offset_of_vector(i, p, y_pitch)) : Vector{};
  }
}
// Positions beyond the length get zero.
__device__ inline void widen(Numbers& to, const Vector (&from)[VECTORS], int k, int length) {
#pragma unroll
  for (int i = 0; i < VECTORS; i++)
#pragma unroll
    for (int e = 0; e < PER_VECTOR; e++) {
      int p = k + position_of_vector(i, threadIdx.x % 4) + (CHANNEL_MAJOR ? e : 0);
      number(to, i, e) = p < length ? to_fp32(from[i].e[e]) : 0;
    }
}
__device__ inline void write_dy(Numbers& x, Storage* dy, int k, int length, int y_pitch) {
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    int p = k + position_of_vector(i, threadIdx.x % 4);
    float v[PER_VECTOR];
#pragma unroll
    for (int e = 0; e < PER_VECTOR; e++) v[e] = number(x, i, e);
    if (p < (CHANNEL_MAJOR ? y_pitch : length)) add_or_store(dy + offset_of_vector(i, p, y_pitch), v);
  }
}

// ------------------------------------------------------------------------- products

typedef unsigned Weight[STEPS][4];

// The weight of a warp's channels as an operand in registers. `weight` points to the thread's first channel.
__device__ inline void load_weight(const float* weight, Weight& high, Weight& low, float* scratch,
                                   float& inverse_scale) {
  int t = threadIdx.x % 4;
  float w[STEPS][4][2], largest = 0;  // [16 columns][2 far + odd][row]
#pragma unroll
  for (int i = 0; i < 4 * STEPS; i++) {
    const float* from = weight + (long long)(i / 4 * 16 + i % 4 / 2 * 8 + 2 * t + i % 2) * ALL_CHANNELS;
#pragma unroll
    for (int r = 0; r < 2; r++) largest = fmaxf(largest, fabsf(w[i / 4][i % 4][r] = from[r]));
  }
  float scale = operand_scale(block_max(largest, scratch, WARPS), 0, inverse_scale);
#pragma unroll
  for (int i = 0; i < 4 * STEPS; i++) {
    int q = i / 4, far = i % 4 / 2, r = i % 2;
    split_operand(w[q][2 * far][r] * scale, w[q][2 * far + 1][r] * scale, high[q][r + 2 * far], low[q][r + 2 * far]);
  }
}

// dz = weight^T dout^T of a team's positions, divided by the scales. `first` is the team's first position.
__device__ inline void multiply_weight(Numbers& dz, const Weight& high, const Weight& low, const Gradient* gradient,
                                       int first) {
  int lane = threadIdx.x % 32;
  Numbers small;
#pragma unroll
  for (int i = 0; i < 16; i++) dz[i / 4][i % 4] = small[i / 4][i % 4] = 0;
#pragma unroll
  for (int q = 0; q < STEPS; q++) {
    unsigned d[PARTS][2][4];  // [16 positions][2 (8 positions) + far]
#pragma unroll
    for (int i = 0; i < 2 * PARTS; i++)
      load_matrices<false>(d[i / 2][i % 2], gradient->parts[i / 2][first + i % 2 * 16 + lane / 16 * 8 + lane % 8] +
                                                16 * q + lane / 8 % 2 * 8);
#pragma unroll
    for (int product = NARROW ? 2 : 0; product < 3; product++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const unsigned* of = d[product == 1 ? PARTS - 1 : 0][j / 2] + j % 2 * 2;
        unsigned b[2] = {of[0], of[1]};
        mma(product < 2 ? small[j] : dz[j], product == 0 ? low[q] : high[q], b);
      }
  }
#pragma unroll
  for (int i = 0; i < 16; i++) dz[i / 4][i % 4] += NARROW ? 0 : small[i / 4][i % 4];
}

typedef float Totals[COLUMNS / 8][4];  // [8 columns][2 row + odd]

// total += act(y)^T dout, where x = act(y) divided by the scales of dout.
__device__ inline void add_outer_products(Totals& total, Numbers& x, const Gradient* gradient, int first) {
  int lane = threadIdx.x % 32;
  unsigned high[2][4], low[2][4];  // [16 positions]
  float inverse_scale[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(x[i / 2][2 * r + i % 2]));
    float scale = operand_scale(largest, 3, inverse_scale[r]);
#pragma unroll
    for (int j = 0; j < 4; j++)
      split_operand(x[j][2 * r] * scale, x[j][2 * r + 1] * scale, high[j / 2][r + j % 2 * 2],
                    low[j / 2][r + j % 2 * 2]);
  }
#pragma unroll
  for (int c = 0; c < COLUMNS / 16; c++) {
    unsigned d[PARTS][2][4];  // [16 positions][2 (8 columns) + far]
#pragma unroll
    for (int i = 0; i < 2 * PARTS; i++)
      load_matrices<true>(d[i / 2][i % 2], gradient->parts[i / 2][first + i % 2 * 16 + lane % 16] +
                                               16 * c + lane / 16 * 8);
    float large[2][4] = {}, small[2][4] = {};
#pragma unroll
    for (int product = NARROW ? 2 : 0; product < 3; product++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int half = i / 2, n = i % 2;
        const unsigned* of = d[product == 1 ? PARTS - 1 : 0][half] + 2 * n;
        unsigned b[2] = {of[0], of[1]};
        float(&sum)[4] = NARROW ? total[2 * c + n] : product < 2 ? small[n] : large[n];
        mma(sum, product == 0 ? low[half] : high[half], b);
      }
    if constexpr (!NARROW)
#pragma unroll
      for (int i = 0; i < 8; i++) {
        float sum = large[i / 4][i % 4] + small[i / 4][i % 4];
        total[2 * c + i / 4][i % 4] = fmaf(sum, inverse_scale[i % 4 / 2], total[2 * c + i / 4][i % 4]);
      }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
backward(const Storage* dout, const Storage* y, const float* weight, Storage* dy, float* partial, int length, int tiles,
         int y_pitch) {
  extern __shared__ __align__(128) unsigned char shared[];
  Memory* memory = (Memory*)shared;
  int warp = uniform(threadIdx.x / 32), team = warp / TEAM_WARPS, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  int first = team * TEAM_POSITIONS, channel = blockIdx.y * CHANNELS + warp % TEAM_WARPS * 16 + 2 * g;
  partial += ((long long)blockIdx.y * gridDim.x + blockIdx.x) * TEAMS * COLUMNS * (CHANNELS + 1);
  long long from = CHANNEL_MAJOR ? (long long)channel * y_pitch : channel, size = sequence_size(length, y_pitch);
  y += from, dy += from;

  Place place(blockIdx.x, length);
  Dout prefetched;
  Vector y_here[VECTORS], y_next[VECTORS];
  prefetched.load(dout, place, length);
  load_y(y_here, y + place.sequence * size, place.k + first, length, y_pitch);
  Weight high, low;
  float w_inverse_scale;
  load_weight(weight + channel, high, low, memory->scratch, w_inverse_scale);

  float sums[4] = {};
  Totals total;
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i++) total[i / 4][i % 4] = 0;
  prefetched.store(memory->stages, sums, dout, place, length);
  __syncthreads();
  for (int tile = blockIdx.x, i = 0; tile < tiles; tile += gridDim.x, i++) {
    bool is_last = tile + gridDim.x >= tiles;
    Place next(is_last ? tile : tile + gridDim.x, length);
    if (!is_last) {
      prefetched.load(dout, next, length);
      load_y(y_next, y + next.sequence * size, next.k + first, length, y_pitch);
    }
    const Gradient* gradient = memory->stages + i % STAGES;
    Numbers dz, z;
    multiply_weight(dz, high, low, gradient, first);
    widen(z, y_here, place.k + first, length);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float2 scales = {1, 1};
      if constexpr (!NARROW) scales = *(const float2*)(gradient->inverse_scale + first + 8 * j + 2 * t);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float inverse_scale = e % 2 ? scales.y : scales.x, derivative = activate_with_derivative(z[j][e]);
        dz[j][e] *= derivative * (inverse_scale * w_inverse_scale);
        z[j][e] *= inverse_scale;  // dout has been divided by it
      }
    }
    write_dy(dz, dy + place.sequence * size, place.k + first, length, y_pitch);
    add_outer_products(total, z, gradient, first);
    if (STAGES == 1) __syncthreads();
    if (!is_last) prefetched.store(memory->stages + (i + 1) % STAGES, sums, dout, next, length);
    place = next;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) y_here[v] = y_next[v];
    __syncthreads();
  }
  write_bias(sums, partial, memory);
  float* to = partial + (long long)team * COLUMNS * (CHANNELS + 1) + warp % TEAM_WARPS * 16 + 2 * g;
#pragma unroll
  for (int i = 0; i < COLUMNS / 4; i++) {
    int column = i / 2 * 8 + 2 * t + i % 2;
    *(float2*)(to + column * CHANNELS) = make_float2(total[i / 2][i % 2], total[i / 2][2 + i % 2]);
  }
}
