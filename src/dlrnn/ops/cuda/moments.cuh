// Moments M_n = sum_k v_k lambda_n^k on tensor cores, of 64 rows of v and 128 states, in a block:
//
//     M_n = sum_b lambda_n^(64 b) sum_a v[a + 64 b] lambda_n^a,   a < 64.
//
// The rows of the matrix product are states n, the columns rows of v, and the sum runs over a. The operand lambda^a
// stays in registers; lambda^(64 b) is advanced in float64. Hopper's kernels and the portable ones have a header each
// for the rest: MOMENTS_THREADS, and
//
//     bool moments_of_tile(const char* values, double2 first, double2 second, int steps, unsigned char* memory,
//                          float (&re)[32], float (&im)[32])
//
// which computes the moments, times UNIT, from so many stages at `values`. re[j], im[j] belong to row
// 8 (j / 4) + 2 t + j % 2 of v and to state 16 warp + g + 8 (j / 2 % 2), with (g, t) = (lane / 4, lane % 4); `first`
// and `second` are log lambda of the two states of a thread. It is false for threads that have no moments.

#define UNIT 16384.0f  // the tables' scale
#define CONSUMERS 256  // threads that multiply

struct MomentsStage {
  uint4 values[2][4][2][64];  // [high, low][16 positions][8 positions][row]: eight positions
};

// An operand A of the tensor cores in fp16 parts: 16 rows, 4 times 16 numbers of the sum.
struct Operand {
  unsigned high[4][4], low[4][4];
};

// The operands of one state: lambda^(16 q + 2 t + {0, 1, 8, 9}); also power_64 = lambda^64. `at` is the row in the
// registers, 0 or 1.
__device__ inline void make_powers(double2 one, int t, int at, Operand& re, Operand& im, double2& power_64) {
  double2 two = times(one, one), four = times(two, two), eight = times(four, four);
  double2 sixteen = times(eight, eight), first = make_double2(UNIT, 0);
  if (t & 1) first = times(first, two);
  if (t & 2) first = times(first, four);
#pragma unroll
  for (int q = 0; q < 4; q++) {
#pragma unroll
    for (int far = 0; far < 2; far++) {
      double2 x = far ? times(first, eight) : first, y = times(x, one);
      split_fp16(x.x, y.x, re.high[q][2 * far + at], re.low[q][2 * far + at]);
      split_fp16(x.y, y.y, im.high[q][2 * far + at], im.low[q][2 * far + at]);
    }
    first = times(first, sixteen);
  }
  double2 power_32 = times(sixteen, sixteen);
  power_64 = times(power_32, power_32);
}
