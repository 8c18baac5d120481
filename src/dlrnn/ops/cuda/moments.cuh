// Moments sum_k v_k lambda_n^k on tensor cores, of 64 rows of v and 128 states, in a block of 384
// threads:
//
//     M_n = sum_b lambda_n^(64 b) sum_a v[a + 64 b] lambda_n^a .
//
// Rows of the products are n, columns rows of v, and the sum runs over a; lambda^a stays in
// registers, and lambda^(64 b) goes on in float64.

#define UNIT 16384.0f  // stands for 1 in tables
#define CONSUMERS 256  // threads; a warp of the 128 after them copies

struct MomentsStage {
  uint4 values[2][4][2][64];  // high or low, 16 positions each, which eight, row: eight positions
};
#define MOMENTS_STAGES 8

// Of one state: lambda^(2 t + {0, 1, 8, 9}) times lambda^(16 q), as the operand's registers.
__device__ inline void powers_of(double2 one, int t, int at, unsigned (&re_high)[4][4],
                                 unsigned (&re_low)[4][4], unsigned (&im_high)[4][4],
                                 unsigned (&im_low)[4][4], double2& of_64) {
  double2 two = times(one, one), four = times(two, two), eight = times(four, four);
  double2 sixteen = times(eight, eight), first = make_double2(UNIT, 0);
  if (t & 1) first = times(first, two);
  if (t & 2) first = times(first, four);
#pragma unroll
  for (int q = 0; q < 4; q++) {
#pragma unroll
    for (int far = 0; far < 2; far++) {
      double2 x = far ? times(first, eight) : first, y = times(x, one);
      halves(x.x, y.x, re_high[q][2 * far + at], re_low[q][2 * far + at]);
      halves(x.y, y.y, im_high[q][2 * far + at], im_low[q][2 * far + at]);
    }
    first = times(first, sixteen);
  }
  double2 of_32 = times(sixteen, sixteen);
  of_64 = times(of_32, of_32);
}

__device__ inline Barrier* moments_barriers(unsigned char* memory) {
  return (Barrier*)(memory + MOMENTS_STAGES * sizeof(MomentsStage));  // full ones, empty ones
}
__device__ inline void moments_start(unsigned char* memory) {
  Barrier* full = moments_barriers(memory);
  if (threadIdx.x == 0)
    for (int i = 0; i < MOMENTS_STAGES; i++) {
      barrier_start(full + i, 1);
      barrier_start(full + MOMENTS_STAGES + i, CONSUMERS / 32);
    }
  __syncthreads();
}

// For the threads from CONSUMERS on.
__device__ inline void moments_copy(const char* values, int steps, unsigned char* memory) {
  fewer_registers();
  if (threadIdx.x > CONSUMERS) return;
  Barrier* full = moments_barriers(memory);
  for (int i = 0; i < steps; i++, values += sizeof(MomentsStage)) {
    int stage = i % MOMENTS_STAGES;
    if (i >= MOMENTS_STAGES)
      barrier_wait(full + MOMENTS_STAGES + stage, i / MOMENTS_STAGES - 1 & 1);
    barrier_expect(full + stage, sizeof(MomentsStage));
    copy_to_shared((MomentsStage*)memory + stage, values, sizeof(MomentsStage), full + stage);
  }
}

// sum = powers values, of PRODUCTS of their halves
__device__ inline void add_products(float (&sum)[32], const unsigned (&high)[4][4],
                                    const unsigned (&low)[4][4], const MomentsStage* stage) {
#if PRODUCTS == 3
#pragma unroll
  for (int q = 0; q < 4; q++) multiply(sum, low[q], operand(stage->values[0][q], 1024), q > 0);
#pragma unroll
  for (int q = 0; q < 4; q++) multiply(sum, high[q], operand(stage->values[1][q], 1024), 1);
#endif
#pragma unroll
  for (int q = 0; q < 4; q++)
    multiply(sum, high[q], operand(stage->values[0][q], 1024), PRODUCTS == 3 || q > 0);
  products_end();
}

// For the others: the sums, times UNIT. total[j] is of row 8 (j / 4) + 2 t + j % 2 of v and of
// state 16 warp + g + 8 (j / 2 % 2); `first` and `second` are the logarithms of a thread's lambdas.
__device__ inline void moments_of(double2 first, double2 second, int steps, unsigned char* memory,
                                  float (&total_re)[32], float (&total_im)[32]) {
  Barrier *full = moments_barriers(memory), *empty = full + MOMENTS_STAGES;
  int lane = threadIdx.x % 32;
  more_registers();
  unsigned re_high[4][4], re_low[4][4], im_high[4][4], im_low[4][4];
  double2 scale[2], step[2];
#pragma unroll
  for (int at = 0; at < 2; at++) {
    double2 lambda = power(at ? second : first, 1);
    powers_of(lambda, lane % 4, at, re_high, re_low, im_high, im_low, step[at]);
    scale[at] = make_double2(1, 0);
  }
  float re[32], im[32];
#pragma unroll
  for (int i = 0; i < 32; i++) total_re[i] = total_im[i] = 0;
  for (int i = 0; i < steps; i++) {
    MomentsStage* stage = (MomentsStage*)memory + i % MOMENTS_STAGES;
    barrier_wait(full + i % MOMENTS_STAGES, i / MOMENTS_STAGES & 1);
    settled(re), settled(im);
    products_begin();
    add_products(re, re_high, re_low, stage);
    add_products(im, im_high, im_low, stage);
    float2 s[2];
#pragma unroll
    for (int at = 0; at < 2; at++) {
      s[at] = make_float2(scale[at].x, scale[at].y);
      scale[at] = times(scale[at], step[at]);
    }
    products_wait<1>();
    settled(re);
#pragma unroll
    for (int j = 0; j < 32; j++) {
      total_re[j] += re[j] * s[j / 2 % 2].x;
      total_im[j] += re[j] * s[j / 2 % 2].y;
    }
    products_wait<0>();
    settled(im);
    if (lane == 0) barrier_arrive(empty + i % MOMENTS_STAGES);
#pragma unroll
    for (int j = 0; j < 32; j++) {
      total_re[j] -= im[j] * s[j / 2 % 2].y;
      total_im[j] += im[j] * s[j / 2 % 2].x;
    }
  }
}
