// Moments M_n = sum_k v_k lambda_n^k on tensor cores, of 64 rows of v and 128 states, in a block of 384 threads:
//
//     M_n = sum_b lambda_n^(64 b) sum_a v[a + 64 b] lambda_n^a,   a < 64.
//
// The rows of the matrix product are states n, the columns rows of v, and the sum runs over a. The operand lambda^a
// stays in registers; lambda^(64 b) is advanced in float64. One producer warp runs bulk copies of v into the stages;
// mbarriers `full` and `empty` of each stage order it and the consumers.

#define UNIT 16384.0f  // the tables' scale
#define CONSUMERS 256  // threads; one warp of the 128 threads after them is the producer

struct MomentsStage {
  uint4 values[2][4][2][64];  // [high, low][16 positions][8 positions][row]: eight positions
};
#define MOMENTS_STAGES 8

// The operand A of one state: lambda^(16 q + 2 t + {0, 1, 8, 9}); also power_64 = lambda^64. `at` is the row in the
// registers, 0 or 1.
__device__ inline void make_powers(double2 one, int t, int at, unsigned (&re_high)[4][4],
                                   unsigned (&re_low)[4][4], unsigned (&im_high)[4][4],
                                   unsigned (&im_low)[4][4], double2& power_64) {
  double2 two = times(one, one), four = times(two, two), eight = times(four, four);
  double2 sixteen = times(eight, eight), first = make_double2(UNIT, 0);
  if (t & 1) first = times(first, two);
  if (t & 2) first = times(first, four);
#pragma unroll
  for (int q = 0; q < 4; q++) {
#pragma unroll
    for (int far = 0; far < 2; far++) {
      double2 x = far ? times(first, eight) : first, y = times(x, one);
      split_fp16(x.x, y.x, re_high[q][2 * far + at], re_low[q][2 * far + at]);
      split_fp16(x.y, y.y, im_high[q][2 * far + at], im_low[q][2 * far + at]);
    }
    first = times(first, sixteen);
  }
  double2 power_32 = times(sixteen, sixteen);
  power_64 = times(power_32, power_32);
}

__device__ inline Mbarrier* moments_barriers(unsigned char* memory) {
  return (Mbarrier*)(memory + MOMENTS_STAGES * sizeof(MomentsStage));  // `full` of all stages, then `empty`
}
__device__ inline void moments_init(unsigned char* memory) {
  Mbarrier* full = moments_barriers(memory);
  if (threadIdx.x == 0)
    for (int i = 0; i < MOMENTS_STAGES; i++) {
      mbarrier_init(full + i, 1);
      mbarrier_init(full + MOMENTS_STAGES + i, CONSUMERS / 32);
    }
  __syncthreads();
}

// The producer, for the threads from CONSUMERS on.
__device__ inline void moments_produce(const char* values, int steps, unsigned char* memory) {
  decrease_registers<40>();
  if (threadIdx.x > CONSUMERS) return;
  Mbarrier* full = moments_barriers(memory);
  for (int i = 0; i < steps; i++, values += sizeof(MomentsStage)) {
    int stage = i % MOMENTS_STAGES;
    if (i >= MOMENTS_STAGES)
      mbarrier_wait(full + MOMENTS_STAGES + stage, i / MOMENTS_STAGES - 1 & 1);
    mbarrier_expect_bytes(full + stage, sizeof(MomentsStage));
    copy_to_shared((MomentsStage*)memory + stage, values, sizeof(MomentsStage), full + stage);
  }
}

// sum = powers values, as PRODUCTS products of their fp16 parts
__device__ inline void add_products(float (&sum)[32], const unsigned (&high)[4][4],
                                    const unsigned (&low)[4][4], const MomentsStage* stage) {
#if PRODUCTS == 3
#pragma unroll
  for (int q = 0; q < 4; q++) wgmma<0>(sum, low[q], b_descriptor(stage->values[0][q], 1024), q > 0);
#pragma unroll
  for (int q = 0; q < 4; q++) wgmma<0>(sum, high[q], b_descriptor(stage->values[1][q], 1024), 1);
#endif
#pragma unroll
  for (int q = 0; q < 4; q++)
    wgmma<0>(sum, high[q], b_descriptor(stage->values[0][q], 1024), PRODUCTS == 3 || q > 0);
  wgmma_commit();
}

// The consumers: the moments, times UNIT. total[j] belongs to row 8 (j / 4) + 2 t + j % 2 of v and to state
// 16 warp + g + 8 (j / 2 % 2); `first` and `second` are log lambda of the two states of a thread.
__device__ inline void moments_consume(double2 first, double2 second, int steps, unsigned char* memory,
                                       float (&total_re)[32], float (&total_im)[32]) {
  Mbarrier *full = moments_barriers(memory), *empty = full + MOMENTS_STAGES;
  int lane = threadIdx.x % 32;
  increase_registers<232>();
  unsigned re_high[4][4], re_low[4][4], im_high[4][4], im_low[4][4];
  double2 scale[2], step[2];
#pragma unroll
  for (int at = 0; at < 2; at++) {
    double2 lambda = power(at ? second : first, 1);
    make_powers(lambda, lane % 4, at, re_high, re_low, im_high, im_low, step[at]);
    scale[at] = make_double2(1, 0);
  }
  float re[32], im[32];
#pragma unroll
  for (int i = 0; i < 32; i++) total_re[i] = total_im[i] = 0;
  for (int i = 0; i < steps; i++) {
    MomentsStage* stage = (MomentsStage*)memory + i % MOMENTS_STAGES;
    mbarrier_wait(full + i % MOMENTS_STAGES, i / MOMENTS_STAGES & 1);
    pin_registers(re), pin_registers(im);
    wgmma_fence();
    add_products(re, re_high, re_low, stage);
    add_products(im, im_high, im_low, stage);
    float2 s[2];
#pragma unroll
    for (int at = 0; at < 2; at++) {
      s[at] = make_float2(scale[at].x, scale[at].y);
      scale[at] = times(scale[at], step[at]);
    }
    wgmma_wait<1>();
    pin_registers(re);
#pragma unroll
    for (int j = 0; j < 32; j++) {
      total_re[j] += re[j] * s[j / 2 % 2].x;
      total_im[j] += re[j] * s[j / 2 % 2].y;
    }
    wgmma_wait<0>();
    pin_registers(im);
    if (lane == 0) mbarrier_arrive(empty + i % MOMENTS_STAGES);
#pragma unroll
    for (int j = 0; j < 32; j++) {
      total_re[j] -= im[j] * s[j / 2 % 2].y;
      total_im[j] += im[j] * s[j / 2 % 2].x;
    }
  }
}
