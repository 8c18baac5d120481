// The Vandermonde product K = Re(W P), P_nk = lambda_n^k, and the moments M = v P^T, on tensor cores; P is never
// stored.
//
// A number is split into fp16 parts, x = high + low. With PRODUCTS 3, x y = low high + high low + high high (error
// 2^-22); with PRODUCTS 1, x y = high high (error 2^-11, as tf32). Everything is scaled to stay in fp16's range: rows
// of W and v to at most 2^13, lambda^a by 2^14; hence |lambda| <= 1.
//
// Warp specialisation: one producer warp runs bulk copies into the stages in shared memory, two consumer groups of
// four warps multiply. Each stage has two mbarriers: `full` (the copies are complete), `empty` (the consumers have
// read it). Global memory is arranged as wgmma reads it, so that a copy is one run of bytes.

#define STATES 32  // states of a chunk of the sum
#define HEIGHT 32  // rows of W in a tile
#define BLOCKS 4   // of 128 positions in a tile
#define ROWS 64    // rows of v in a tile

// ------------------------------------------------------------------------- product

// K[a + 128 b] = sum_n Re((W_n lambda_n^(128 b)) lambda_n^a): the rows of the matrix product are (b, row of W), the
// columns a, and the sum runs over n and (re, im). The scaled weights (re, -im) are computed in registers.

struct ProductStage {
  uint4 table[4][2][2][128];     // [8 states][high, low][4 states][a]: (re, im) of four states
  float4 weights[4][2][2][32];   // [8 states][16 rows][8 rows][lane]: states t and t + 4
  float2 scale[BLOCKS][STATES];  // lambda^(128 b)
};
#define PRODUCT_STAGES 4

__device__ inline void scaled_weight(float w_re, float w_im, float2 s, unsigned& high, unsigned& low) {
  split_fp16(w_re * s.x - w_im * s.y, -w_re * s.y - w_im * s.x, high, low);
}

// The scaled weights of a chunk, as the operand A of a warp.
struct Operands {
  unsigned high[4][4], low[4][4];

  __device__ inline void make(const ProductStage* stage, int warp, int lane) {
#pragma unroll
    for (int q = 0; q < 4; q++) {
      float4 upper = stage->weights[q][warp % 2][0][lane];
      float4 lower = stage->weights[q][warp % 2][1][lane];
      float2 s = stage->scale[warp / 2][8 * q + lane % 4];
      float2 s4 = stage->scale[warp / 2][8 * q + lane % 4 + 4];
      scaled_weight(upper.x, upper.y, s, high[q][0], low[q][0]);
      scaled_weight(lower.x, lower.y, s, high[q][1], low[q][1]);
      scaled_weight(upper.z, upper.w, s4, high[q][2], low[q][2]);
      scaled_weight(lower.z, lower.w, s4, high[q][3], low[q][3]);
    }
  }
};

// Issues the products of chunk i, computes the operands of the next chunk meanwhile, and adds the result to `total`.
__device__ inline void multiply_chunk(int i, int count, ProductStage* stages, Mbarrier* full,
                                      Mbarrier* empty, const Operands& current, Operands& next,
                                      float (&sum)[64], float (&total)[64]) {
  const ProductStage* stage = stages + i % PRODUCT_STAGES;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  pin_registers(sum);
  wgmma_fence();
#if PRODUCTS == 3
#pragma unroll
  for (int q = 0; q < 4; q++) wgmma<0>(sum, current.low[q], b_descriptor(stage->table[q][0], 2048), q > 0);
#pragma unroll
  for (int q = 0; q < 4; q++) wgmma<0>(sum, current.high[q], b_descriptor(stage->table[q][1], 2048), 1);
#endif
#pragma unroll
  for (int q = 0; q < 4; q++)
    wgmma<0>(sum, current.high[q], b_descriptor(stage->table[q][0], 2048), PRODUCTS == 3 || q > 0);
  wgmma_commit();
  if (i + 1 < count) {
    mbarrier_wait(full + (i + 1) % PRODUCT_STAGES, (i + 1) / PRODUCT_STAGES & 1);
    next.make(stages + (i + 1) % PRODUCT_STAGES, warp, lane);
  }
  wgmma_wait<0>();
  pin_registers(sum);
  if (lane == 0) mbarrier_arrive(empty + i % PRODUCT_STAGES);
#pragma unroll
  for (int j = 0; j < 64; j++) total[j] += sum[j];
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1)
product(const float4* weights, const float* inverse_scale, const uint4* table, const double2* block_power,
        const double2* tile_powers, const double2* coarse_powers, float* partial, int rows, int row_tiles,
        int position_tiles, int length, int states, int chunks_per_part) {
  extern __shared__ __align__(128) unsigned char memory[];
  ProductStage* stages = (ProductStage*)memory;
  Mbarrier* full = (Mbarrier*)(stages + PRODUCT_STAGES);
  Mbarrier* empty = full + PRODUCT_STAGES;
  int row_tile = blockIdx.x % row_tiles, tile = blockIdx.x / row_tiles % position_tiles;
  int part = blockIdx.x / row_tiles / position_tiles;
  int chunks = states / STATES, first = part * chunks_per_part, count = min(chunks_per_part, chunks - first);
  int thread = threadIdx.x, lane = thread % 32;
  if (thread == 0)
    for (int i = 0; i < PRODUCT_STAGES; i++) {
      mbarrier_init(full + i, 2);  // arrivals: the thread that copies, the warp that writes the scales
      mbarrier_init(empty + i, CONSUMERS / 32);
    }
  __syncthreads();
  if (thread >= CONSUMERS) {
    decrease_registers<40>();
    if (thread >= CONSUMERS + 32) return;
    const double2* at_tile = tile_powers + (long long)(tile % 64) * states + lane;
    const double2* at_coarse = coarse_powers + (long long)(tile / 64) * states + lane;
    int n = first * STATES;
    double2 of_tile = at_tile[n], of_coarse = at_coarse[n], step = block_power[n + lane];
    for (int i = 0; i < count; i++) {
      ProductStage* stage = stages + i % PRODUCT_STAGES;
      Mbarrier* loaded = full + i % PRODUCT_STAGES;
      if (i >= PRODUCT_STAGES) mbarrier_wait(empty + i % PRODUCT_STAGES, i / PRODUCT_STAGES - 1 & 1);
      if (lane == 0) {
        int chunk = first + i, bytes = sizeof(stage->table), w_bytes = sizeof(stage->weights);
        mbarrier_expect_bytes(loaded, bytes + w_bytes);
        copy_to_shared(stage->table, (char*)table + (long long)chunk * bytes, bytes, loaded);
        copy_to_shared(stage->weights,
                       (char*)weights + ((long long)row_tile * chunks + chunk) * w_bytes, w_bytes,
                       loaded);
      }
      double2 power = times(of_tile, of_coarse), of_block = step;
      n += i + 1 < count ? STATES : 0;
      of_tile = at_tile[n], of_coarse = at_coarse[n], step = block_power[n + lane];
      for (int b = 0; b < BLOCKS; b++) {
        stage->scale[b][lane] = make_float2(power.x, power.y);
        power = times(power, of_block);
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(loaded);
    }
    return;
  }
  increase_registers<232>();
  int warp = thread / 32, half = warp % 2, g = lane / 4, t = lane % 4;
  float total[64], sum[64];
#pragma unroll
  for (int i = 0; i < 64; i++) total[i] = 0;
  Operands even, odd;
  mbarrier_wait(full, 0);
  even.make(stages, warp, lane);
  for (int i = 0; i < count; i += 2) {
    multiply_chunk(i, count, stages, full, empty, even, odd, sum, total);
    if (i + 1 < count) multiply_chunk(i + 1, count, stages, full, empty, odd, even, sum, total);
  }
#pragma unroll
  for (int below = 0; below < 2; below++) {
    int row = row_tile * HEIGHT + half * 16 + below * 8 + g;
    if (row >= rows) break;
    float unscale = inverse_scale[row];
    int k = (tile * BLOCKS + warp / 2) * 128 + 2 * t;
    long long entries = ((long long)rows * length + 3) / 4 * 4;
    float* to = partial + part * entries + (long long)row * length;
#pragma unroll
    for (int j = 0; j < 16; j++, k += 8) {
      float2 x = make_float2(total[4 * j + 2 * below], total[4 * j + 2 * below + 1]);
      x.x *= unscale / UNIT, x.y *= unscale / UNIT;
      if (length % 2 == 0 && k < length) {
        *(float2*)(to + k) = x;
      } else {
        if (k < length) to[k] = x.x;
        if (k + 1 < length) to[k + 1] = x.y;
      }
    }
  }
}

// ------------------------------------------------------------------------- moments

extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1)
moments(const char* values, const double2* log_lambda, float2* partial, int rows, int states,
        int steps) {
  extern __shared__ __align__(128) unsigned char memory[];
  int row_tiles = (rows + ROWS - 1) / ROWS, row_tile = blockIdx.x % row_tiles;
  int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  int n = blockIdx.x / row_tiles * 128 + warp * 16 + g;
  moments_init(memory);
  if (threadIdx.x >= CONSUMERS) {
    moments_produce(values + (long long)row_tile * steps * sizeof(MomentsStage), steps, memory);
    return;
  }
  float re[32], im[32];
  moments_consume(log_lambda[min(n, states - 1)], log_lambda[min(n + 8, states - 1)], steps, memory, re,
                  im);
#pragma unroll
  for (int j = 0; j < 32; j++) {
    int row = row_tile * ROWS + j / 4 * 8 + 2 * t + j % 2, state = n + 8 * (j / 2 % 2);
    if (row < rows && state < states)
      partial[(long long)row * states + state] = make_float2(re[j], im[j]);
  }
}
