// The moments of moments.cuh by mma.sync, and the matrix product that the portable kernels share. There are two pairs
// of stages in shared memory: cp.async fills one while the other is read.

#define MOMENTS_THREADS CONSUMERS

// Starts copies of adjacent bytes by all threads of a block.
template <int BYTES>
__device__ inline void copy_async(void* to, const void* from) {
#pragma unroll
  for (int i = 0; i < BYTES / 16; i += CONSUMERS) {
    int at = (i + threadIdx.x) * 16;
    copy_async_16((char*)to + at, (const char*)from + at);
  }
}

// sum[x][c] = operands[x] B[c], of 64 numbers, for two tiles of 8 columns of B in shared memory. `b` is this thread's
// first pair of the high parts; the strides, in pairs, lead to the next 16 and 8 numbers of the sum, to the low parts
// and to the next tile. Tensor cores truncate their sums, so that small terms come first.
template <int SIXTEEN, int EIGHT, int LOW, int TILE>
__device__ inline void multiply(float (&sum)[2][2][4], const Operand (&operands)[2], const unsigned* b) {
  unsigned high[2][4][2], low[2][4][2];
#pragma unroll
  for (int i = 0; i < 16; i++) {
    int c = i / 8, q = i / 2 % 4, half = i % 2, at = c * TILE + q * SIXTEEN + half * EIGHT;
    high[c][q][half] = b[at];
    if (PRODUCTS == 3) low[c][q][half] = b[at + LOW];
  }
#pragma unroll
  for (int i = 0; i < 16; i++) sum[i / 8][i / 4 % 2][i % 4] = 0;
#if PRODUCTS == 3
#pragma unroll
  for (int i = 0; i < 16; i++) mma(sum[i % 2][i / 2 % 2], operands[i % 2].low[i / 4], high[i / 2 % 2][i / 4]);
#pragma unroll
  for (int i = 0; i < 16; i++) mma(sum[i % 2][i / 2 % 2], operands[i % 2].high[i / 4], low[i / 2 % 2][i / 4]);
#endif
#pragma unroll
  for (int i = 0; i < 16; i++) mma(sum[i % 2][i / 2 % 2], operands[i % 2].high[i / 4], high[i / 2 % 2][i / 4]);
}

__device__ inline double2 from_lane(double2 x, int lane) {
  return make_double2(__shfl_sync(~0u, x.x, lane), __shfl_sync(~0u, x.y, lane));
}
__device__ inline float2 from_lane(float2 x, int lane) {
  return make_float2(__shfl_sync(~0u, x.x, lane), __shfl_sync(~0u, x.y, lane));
}

__device__ inline bool moments_of_tile(const char* values, double2 first, double2 second, int steps,
                                       unsigned char* memory, float (&re)[32], float (&im)[32]) {
  MomentsStage* stages = (MomentsStage*)memory;
  auto start_pair = [&](int i) {
    for (int end = min(i + 2, steps); i < end; i++)
      copy_async<sizeof(MomentsStage)>(stages + i % 4, values + i * (long long)sizeof(MomentsStage));
  };
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, even = lane & ~1;
  start_pair(0);
  // Of the two states, a thread computes exp and advances lambda^(64 b) for one: float64 is slow on many GPUs.
  double2 own = power(t % 2 ? second : first, 1), scale = make_double2(1, 0), steps_of[2];
  Operand powers[2];  // re, im
#pragma unroll
  for (int at = 0; at < 2; at++)
    make_powers(from_lane(own, even + at), t, at, powers[0], powers[1], steps_of[at]);
  double2 step = t % 2 ? steps_of[1] : steps_of[0];
#pragma unroll
  for (int j = 0; j < 32; j++) re[j] = im[j] = 0;
  for (int i = 0; i < steps; i++) {
    if (i % 2 == 0) {
      wait_for_own_copies();
      __syncthreads();  // the pair is complete, and all warps have read the other one
      start_pair(i + 2);
    }
    const unsigned* b = (const unsigned*)&stages[i % 4].values[0][0][0][g] + t;
    float2 now = make_float2(scale.x, scale.y), s[2] = {from_lane(now, even), from_lane(now, even + 1)};
    scale = times(scale, step);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float sum[2][2][4];
      multiply<512, 256, 2048, 32>(sum, powers, b + 64 * j);
#pragma unroll
      for (int k = 0; k < 8; k++) {
        float x = sum[0][k / 4][k % 4], y = sum[1][k / 4][k % 4];
        re[8 * j + k] += x * s[k / 2 % 2].x, im[8 * j + k] += x * s[k / 2 % 2].y;
        re[8 * j + k] -= y * s[k / 2 % 2].y, im[8 * j + k] += y * s[k / 2 % 2].x;
      }
    }
  }
  return true;
}
