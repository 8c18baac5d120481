// Activation and linear map of the channels: what forward and backward share.
//
// Widths, CHANNELS of y and COLUMNS of out, are multiples of 16 up to 128: a part of ALL_CHANNELS
// and ALL_COLUMNS, which ADDS to what other parts gave. y lies in rows [B, H, pitch] or as
// [B, L, H], out as [B, L, columns]. One block a multiprocessor takes tile after tile of POSITIONS.
//
// Products of fp32 numbers are three of fp16 numbers, x = high + low: x y ~ high high + high low +
// low high, with sums in fp32, relative error 2^-22. A power of two for each position (and one for
// the weight) brings them into fp16's range.

#if IN_ROWS
#define STAGE (CHANNELS * (POSITIONS + 8))  // floats: rows of a tile, apart in memory's banks
#else
#define STAGE (POSITIONS * CHANNELS)
#endif

// Numbers of a sequence of y.
__device__ inline long long sequence_of(int length, int y_pitch) {
  return (long long)ALL_CHANNELS * (IN_ROWS ? y_pitch : length);
}

// Of 16 columns of a product a thread has 2 t, 2 t + 1, 2 t + 8, 2 t + 9: they stand for four
// neighbours, which are a vector in memory.
__device__ inline int woven(int n) { return n / 16 * 16 + n % 8 / 2 * 4 + n % 16 / 8 * 2 + n % 2; }

// The power of two that brings `largest` into [2^13, 2^14), and its inverse, which is NaN if that
// is not finite.
__device__ inline float scale_of(float largest, float& back) {
  unsigned exponent = __float_as_uint(fmaxf(largest, 7.8886091e-31f)) >> 23;  // 2^-100
  back = __uint_as_float(exponent < 255 ? exponent - 13 << 23 : 0x7fffffff);
  return __uint_as_float(267 - exponent << 23);
}

// P(X < -|x|) of a normal X to 2e-8: bell r, where bell = exp(-x^2 / 2) and r is a polynomial in
// 1 / (1 + 5/16 |x|). gelu(x) = x P(X < x).
__device__ inline float tail_of(float x, float& bell) {
  float t = inverse(fmaf(fabsf(x), 0.3125f, 1.0f));
  bell = two_to_the(x * x * -0.7213475204444817f);
  float r = fmaf(-0.138326362f, t, 0.56806768f);
  r = fmaf(r, t, -0.37587184f);
  r = fmaf(r, t, 0.385809403f);
  r = fmaf(r, t, 0.0519728224f);
  return bell * fmaf(r, t, 0.00834830917f);
}
__device__ inline float activated(float x) {
#if GELU
  float bell;
  return fmaf(-fabsf(x), tail_of(x, bell), fmaxf(x, 0.0f));
#else
  return x;
#endif
}
// The slope; x becomes its activation.
__device__ inline float slope_of(float& x) {
#if GELU
  float bell, tail = tail_of(x, bell), share = x < 0 ? tail : 1 - tail;
  float slope = fmaf(0.3989422804014327f * x, bell, share);
  x *= share;
  return slope;
#else
  return 1;
#endif
}

// The same number for the whole warp, and known to be.
__device__ inline int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

__device__ inline float largest_in_warp(float x, int lanes) {
#pragma unroll
  for (int far = 1; far < 32; far *= 2)
    if (lanes & far) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, far));
  return x;
}

// Sixteen numbers of a column of the weight for each thread, as often as it takes: all are read at
// once, and placed when the largest is known. So many threads side by side have different columns.
template <int THREADS, int WIDTH, int STEPS, int TOGETHER>
struct Weights {
  static constexpr int JOBS = (WIDTH * STEPS + THREADS - 1) / THREADS;
  float w[JOBS][16];

  __device__ inline int column(int job) {
    int i = threadIdx.x + job * THREADS;
    return i / TOGETHER / STEPS * TOGETHER + i % TOGETHER;
  }
  __device__ inline int step(int job) { return (threadIdx.x + job * THREADS) / TOGETHER % STEPS; }

  // `read(n, q, w)` finds the numbers from 16 q on of column n.
  template <class Read>
  __device__ inline void load(Read read) {
#pragma unroll
    for (int job = 0; job < JOBS; job++) {
#pragma unroll
      for (int i = 0; i < 16; i++) w[job][i] = 0;
      if (column(job) < WIDTH) read(column(job), step(job), w[job]);
    }
  }
  __device__ inline float largest(float* scratch) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < JOBS * 16; i++) largest = fmaxf(largest, fabsf(w[i / 16][i % 16]));
    largest = largest_in_warp(largest, 31);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = largest;
    __syncthreads();
    for (int i = 0; i < THREADS / 32; i++) largest = fmaxf(largest, scratch[i]);
    return largest;
  }
  __device__ inline void place(float scale, uint4 (&to)[2][STEPS][2][WIDTH]) {
#pragma unroll
    for (int job = 0; job < JOBS; job++) {
      int n = column(job), q = step(job);
#pragma unroll
      for (int far = 0; far < 2; far++) {
        unsigned high[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float* x = w[job] + 8 * far + 2 * i;
          halves(x[0] * scale, x[1] * scale, high[i], low[i]);
        }
        if (n >= WIDTH) continue;
        to[0][q][far][n] = make_uint4(high[0], high[1], high[2], high[3]);
        to[1][q][far][n] = make_uint4(low[0], low[1], low[2], low[3]);
      }
    }
    before_copies();  // products read as copies do
  }
};

// Four warps begin to copy the tile from position k of a sequence on. Rows are short: each thread
// copies vectors, and arrives when they are there; else runs of bytes. All threads arrive, also those
// that copy nothing: none can fall a round behind a barrier that it waits for.
#define COPYING 128  // threads
__device__ inline void copy_tile(float* stage, const float* y, int tile, int length, int y_pitch,
                                 Barrier* arrived) {
  int tiles_each = (length + POSITIONS - 1) / POSITIONS, k = tile % tiles_each * POSITIONS;
  y += tile / tiles_each * sequence_of(length, y_pitch);
  int thread = threadIdx.x % COPYING;
#if IN_ROWS
  int p = 4 * (thread % (POSITIONS / 4)), channel = thread / (POSITIONS / 4);
  const float* from = y + (long long)channel * y_pitch + k + p;
  float* to = stage + channel * (POSITIONS + 8) + p;
  const int step = COPYING / (POSITIONS / 4);
  if (k + p < y_pitch)
#pragma unroll 2
    for (; channel < CHANNELS; channel += step) {
      copy_vector(to, from);
      from += (long long)step * y_pitch, to += step * (POSITIONS + 8);
    }
  barrier_arrive_after_copies(arrived);
#else
  int count = min(POSITIONS, length - k);
  const float* from = y + (long long)k * ALL_CHANNELS;
  if (thread == 0) barrier_expect(arrived, CHANNELS * count * 4);
  else barrier_arrive(arrived);
  if (ALL_CHANNELS > CHANNELS) {
    for (int p = thread; p < count; p += COPYING)
      copy_to_shared(stage + p * CHANNELS, from + (long long)p * ALL_CHANNELS, CHANNELS * 4,
                     arrived);
  } else if (thread == 0) {
    copy_to_shared(stage, from, CHANNELS * count * 4, arrived);
  }
#endif
}
