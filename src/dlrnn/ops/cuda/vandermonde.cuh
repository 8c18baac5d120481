// What the kernels of the Vandermonde product K = Re(W P), P_nk = lambda_n^k, on tensor cores share. P is never stored:
//
//     K[a + 128 b] = sum_n Re((W_n lambda_n^(128 b)) lambda_n^a),   a < 128:
//
// the rows of the matrix product are (b, row of W), the columns a, and the sum runs over n and (re, im). The scaled
// weights (re, -im) are computed in registers.
//
// A number is split into fp16 parts, x = high + low. With PRODUCTS 3, x y = low high + high low + high high (error
// 2^-22); with PRODUCTS 1, x y = high high (error 2^-11, as tf32). Everything is scaled to stay in fp16's range: rows
// of W and v to at most 2^13, lambda^a by 2^14; hence |lambda| <= 1.

#define STATES 32  // states of a chunk of the sum
#define HEIGHT 32  // rows of W in a tile
#define BLOCKS 4   // of 128 positions in a tile

// A chunk in shared memory.
typedef uint4 Table[4][2][2][128];  // lambda^a, [8 states][high, low][4 states][a]: (re, im) of four states
struct Weights {
  float4 of_rows[4][2][2][32];   // [8 states][16 rows][8 rows][lane]: states t and t + 4
  float2 scale[BLOCKS][STATES];  // lambda^(128 b)
};

__device__ inline void scaled_weight(float w_re, float w_im, float2 s, unsigned& high, unsigned& low) {
  split_fp16(w_re * s.x - w_im * s.y, -w_re * s.y - w_im * s.x, high, low);
}

// The operand A of a chunk: the scaled weights of 16 rows of W at block b of positions.
__device__ inline void make_operand(const Weights& weights, int sixteen, int b, Operand& x) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int q = 0; q < 4; q++) {
    float4 upper = weights.of_rows[q][sixteen][0][lane];
    float4 lower = weights.of_rows[q][sixteen][1][lane];
    float2 s = weights.scale[b][8 * q + lane % 4];
    float2 s4 = weights.scale[b][8 * q + lane % 4 + 4];
    scaled_weight(upper.x, upper.y, s, x.high[q][0], x.low[q][0]);
    scaled_weight(lower.x, lower.y, s, x.high[q][1], x.low[q][1]);
    scaled_weight(upper.z, upper.w, s4, x.high[q][2], x.low[q][2]);
    scaled_weight(lower.z, lower.w, s4, x.high[q][3], x.low[q][3]);
  }
}

// Stores K of two adjacent positions of a row.
__device__ inline void store_pair(float* to, int k, int length, float x, float y) {
  if (length % 2 == 0 && k < length) {
    *(float2*)(to + k) = make_float2(x, y);
  } else {
    if (k < length) to[k] = x;
    if (k + 1 < length) to[k + 1] = y;
  }
}
