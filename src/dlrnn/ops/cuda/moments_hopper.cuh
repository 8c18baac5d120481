// The moments of moments.cuh by wgmma. One producer warp runs bulk copies of v into the stages; mbarriers `full` and
// `empty` of each stage order it and the consumers.

#define MOMENTS_THREADS (CONSUMERS + 128)  // one warp of the last 128 threads is the producer
#define MOMENTS_STAGES 8

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
__device__ inline void add_products(float (&sum)[32], const Operand& x, const MomentsStage* stage) {
#if PRODUCTS == 3
#pragma unroll
  for (int q = 0; q < 4; q++) wgmma<0>(sum, x.low[q], b_descriptor(stage->values[0][q], 1024), q > 0);
#pragma unroll
  for (int q = 0; q < 4; q++) wgmma<0>(sum, x.high[q], b_descriptor(stage->values[1][q], 1024), 1);
#endif
#pragma unroll
  for (int q = 0; q < 4; q++)
    wgmma<0>(sum, x.high[q], b_descriptor(stage->values[0][q], 1024), PRODUCTS == 3 || q > 0);
  wgmma_commit();
}

__device__ inline void moments_consume(double2 first, double2 second, int steps, unsigned char* memory,
                                       float (&total_re)[32], float (&total_im)[32]) {
  Mbarrier *full = moments_barriers(memory), *empty = full + MOMENTS_STAGES;
  int lane = threadIdx.x % 32;
  increase_registers<232>();
  Operand powers_re, powers_im;
  double2 scale[2], step[2];
#pragma unroll
  for (int at = 0; at < 2; at++) {
    double2 lambda = power(at ? second : first, 1);
    make_powers(lambda, lane % 4, at, powers_re, powers_im, step[at]);
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
    add_products(re, powers_re, stage);
    add_products(im, powers_im, stage);
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

__device__ inline bool moments_of_tile(const char* values, double2 first, double2 second, int steps,
                                       unsigned char* memory, float (&re)[32], float (&im)[32]) {
  moments_init(memory);
  if (threadIdx.x >= CONSUMERS) {
    moments_produce(values, steps, memory);
    return false;
  }
  moments_consume(first, second, steps, memory, re, im);
  return true;
}
