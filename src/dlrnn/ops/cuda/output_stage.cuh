// The output stage, out = act(y) weight^T + bias: what the forward and the backward kernel share.
//
// CHANNELS of y and COLUMNS of out are multiples of 16 up to 128. They may be a part of ALL_CHANNELS and ALL_COLUMNS;
// with ACCUMULATE the kernel adds to the result of other parts. y is channel-major [B, H, pitch] (CHANNEL_MAJOR) or
// [B, L, H]; out is [B, L, columns]. One block runs on each multiprocessor and processes tile after tile of POSITIONS.
//
// y, out and their gradients are stored in fp32, bf16 or fp16 (Storage), weight and bias and their gradients in fp32.
// A product of fp32 numbers is three products of fp16 numbers with fp32 sums: with x = high + low,
// x y ~ high high + high low + low high, relative error 2^-22. A power of two for each position (and one for the
// weight) scales the numbers into fp16's range. With 16-bit storage a product is one of numbers of that type (NARROW).

constexpr bool NARROW = STORAGE_BITS == 16;
constexpr int PARTS = NARROW ? 1 : 2;  // of an operand: high and low

#if CHANNEL_MAJOR
#define PITCH (POSITIONS + 256 / STORAGE_BITS)  // 32 bytes of padding keep a tile's rows in different banks
#define STAGE (CHANNELS * PITCH)                // numbers
#else
#define STAGE (POSITIONS * CHANNELS)
#endif

// How many numbers of y a sequence has.
__device__ inline long long sequence_size(int length, int y_pitch) {
  return (long long)ALL_CHANNELS * (CHANNEL_MAJOR ? y_pitch : length);
}

// Of 16 columns of a matrix product a thread has 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. They stand for four adjacent
// columns of the matrix, so that the thread accesses them as one vector.
__device__ inline int interleaved_column(int n) { return n / 16 * 16 + n % 8 / 2 * 4 + n % 16 / 8 * 2 + n % 2; }

// The power of two that scales `largest` into [2^13, 2^14), and its inverse, which is NaN if `largest` is not finite.
__device__ inline float power_of_two_scale(float largest, float& inverse_scale) {
  unsigned exponent = __float_as_uint(fmaxf(largest, 7.8886091e-31f)) >> 23;  // 2^-100
  inverse_scale = __uint_as_float(exponent < 255 ? exponent - 13 << 23 : 0x7fffffff);
  return __uint_as_float(267 - exponent << 23);
}

__device__ inline float warp_max(float x, int lanes) {
#pragma unroll
  for (int far = 1; far < 32; far *= 2)
    if (lanes & far) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, far));
  return x;
}

// The scale of an operand whose largest number (of the `lanes` that differ) this is, and its inverse.
__device__ inline float operand_scale(float largest, int lanes, float& inverse_scale) {
  if constexpr (NARROW) {
    inverse_scale = 1;
    return 1;
  } else {
    return power_of_two_scale(warp_max(largest, lanes), inverse_scale);
  }
}
// Two numbers as operands: their fp16 parts, or with 16-bit storage `high` alone.
__device__ inline void split_operand(float x, float y, unsigned& high, unsigned& low) {
  if constexpr (NARROW) high = narrow_pair(x, y), low = 0;
  else split_fp16(x, y, high, low);
}

// P(X < -|x|) of a standard normal X, with an error of 2e-8: bell r, where bell = exp(-x^2 / 2) and r is a polynomial
// in 1 / (1 + 5/16 |x|). gelu(x) = x P(X < x).
__device__ inline float gaussian_tail(float x, float& bell) {
  float t = reciprocal_approx(fmaf(fabsf(x), 0.3125f, 1.0f));
  bell = exp2_approx(x * x * -0.7213475204444817f);
  float r = fmaf(-0.138326362f, t, 0.56806768f);
  r = fmaf(r, t, -0.37587184f);
  r = fmaf(r, t, 0.385809403f);
  r = fmaf(r, t, 0.0519728224f);
  return bell * fmaf(r, t, 0.00834830917f);
}
__device__ inline float activation(float x) {
#if GELU
  float bell;
  return fmaf(-fabsf(x), gaussian_tail(x, bell), fmaxf(x, 0.0f));
#else
  return x;
#endif
}
// Replaces x by its activation and returns the derivative.
__device__ inline float activate_with_derivative(float& x) {
#if GELU
  float bell, tail = gaussian_tail(x, bell), cdf = x < 0 ? tail : 1 - tail;
  float derivative = fmaf(0.3989422804014327f * x, bell, cdf);
  x *= cdf;
  return derivative;
#else
  return 1;
#endif
}

// Returns lane 0's x, which tells the compiler that the value is the same in the whole warp.
__device__ inline int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// The weight as an operand in shared memory: in each round a thread has sixteen numbers of a column. All are read
// before any is used; they are scaled and stored when the largest is known. ADJACENT threads have different columns.
template <int THREADS, int WIDTH, int STEPS, int ADJACENT>
struct Weights {
  static constexpr int ROUNDS = (WIDTH * STEPS + THREADS - 1) / THREADS;
  float w[ROUNDS][16];

  __device__ inline int column(int round) {
    int i = threadIdx.x + round * THREADS;
    return i / ADJACENT / STEPS * ADJACENT + i % ADJACENT;
  }
  __device__ inline int step(int round) { return (threadIdx.x + round * THREADS) / ADJACENT % STEPS; }

  // read(n, q, w) loads the numbers from 16 q on of column n.
  template <class Read>
  __device__ inline void load(Read read) {
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
#pragma unroll
      for (int i = 0; i < 16; i++) w[round][i] = 0;
      if (column(round) < WIDTH) read(column(round), step(round), w[round]);
    }
  }
  __device__ inline float largest(float* scratch) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < ROUNDS * 16; i++) largest = fmaxf(largest, fabsf(w[i / 16][i % 16]));
    largest = warp_max(largest, 31);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = largest;
    __syncthreads();
    for (int i = 0; i < THREADS / 32; i++) largest = fmaxf(largest, scratch[i]);
    return largest;
  }
  __device__ inline void place(float scale, uint4 (&to)[PARTS][STEPS][2][WIDTH]) {
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
      int n = column(round), q = step(round);
#pragma unroll
      for (int far = 0; far < 2; far++) {
        unsigned high[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float* x = w[round] + 8 * far + 2 * i;
          split_operand(x[0] * scale, x[1] * scale, high[i], low[i]);
        }
        if (n >= WIDTH) continue;
        to[0][q][far][n] = make_uint4(high[0], high[1], high[2], high[3]);
        if constexpr (!NARROW) to[PARTS - 1][q][far][n] = make_uint4(low[0], low[1], low[2], low[3]);
      }
    }
    fence_async_proxy();  // wgmma reads through the async proxy
  }
};

// Four producer warps start the copies of a tile of y into a stage. If y is channel-major its rows in a tile are short:
// each thread copies vectors with cp.async, and arrives at the mbarrier when they are complete; else bulk copies are
// used. All threads arrive, also those that copy nothing, so that none can be one phase behind a barrier it waits for.
#define PRODUCERS 128  // threads
__device__ inline void copy_tile(Storage* stage, const Storage* y, int tile, int length, int y_pitch,
                                 Mbarrier* loaded) {
  int tiles_each = (length + POSITIONS - 1) / POSITIONS, k = tile % tiles_each * POSITIONS;
  y += tile / tiles_each * sequence_size(length, y_pitch);
  int thread = threadIdx.x % PRODUCERS;
#if CHANNEL_MAJOR
  const int vector = 128 / STORAGE_BITS, across = POSITIONS / vector, step = PRODUCERS / across;
  int p = vector * (thread % across), channel = thread / across;
  const Storage* from = y + (long long)channel * y_pitch + k + p;
  Storage* to = stage + channel * PITCH + p;
  if (k + p < y_pitch)
#pragma unroll 2
    for (; channel < CHANNELS; channel += step) {
      copy_async_16(to, from);
      from += (long long)step * y_pitch, to += step * PITCH;
    }
  mbarrier_arrive_after_copies(loaded);
#else
  int count = min(POSITIONS, length - k);
  const Storage* from = y + (long long)k * ALL_CHANNELS;
  const int bytes = CHANNELS * sizeof(Storage);  // of a position
  if (thread == 0) mbarrier_expect_bytes(loaded, bytes * count);
  else mbarrier_arrive(loaded);
  if (ALL_CHANNELS > CHANNELS) {
    for (int p = thread; p < count; p += PRODUCERS)
      copy_to_shared(stage + p * CHANNELS, from + (long long)p * ALL_CHANNELS, bytes, loaded);
  } else if (thread == 0) {
    copy_to_shared(stage, from, bytes * count, loaded);
  }
#endif
}
