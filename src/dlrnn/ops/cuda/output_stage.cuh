// The output stage, out = act(y) weight^T + bias: what all its kernels share.
//
// CHANNELS of y and COLUMNS of out are multiples of 16 up to 128. They may be a part of ALL_CHANNELS and ALL_COLUMNS;
// with ACCUMULATE the kernel adds to the result of other parts; a launch may serve several parts, one for each
// blockIdx.y. y is channel-major [B, H, pitch] (CHANNEL_MAJOR) or
// [B, L, H]; out is [B, L, columns]. One block runs on each multiprocessor and processes tile after tile of POSITIONS.
//
// y, out and their gradients are stored in fp32, bf16 or fp16 (Storage), weight and bias and their gradients in fp32.
// A product of fp32 numbers is three products of fp16 numbers with fp32 sums: with x = high + low,
// x y ~ high high + high low + low high, relative error 2^-22. A power of two for each position (and one for the
// weight) scales the numbers into fp16's range. With 16-bit storage a product is one of numbers of that type (NARROW).

constexpr bool NARROW = STORAGE_BITS == 16;
constexpr int PARTS = NARROW ? 1 : 2;  // of an operand: high and low

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

// The largest x of a block, which has so many warps; `scratch` has a number for each.
__device__ inline float block_max(float x, float* scratch, int warps) {
  x = warp_max(x, 31);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  for (int i = 0; i < warps; i++) x = fmaxf(x, scratch[i]);
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

// Writes to `to`, or adds to it with ACCUMULATE.
template <int COUNT>
__device__ inline void add_or_store(Storage* to, float (&x)[COUNT]) {
  if (ACCUMULATE) {
    float before[COUNT];
    load_vector(before, to);
#pragma unroll
    for (int i = 0; i < COUNT; i++) x[i] += before[i];
  }
  store_vector(to, x);
}
