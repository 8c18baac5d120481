// The Vandermonde product of vandermonde.cuh by wgmma.
//
// Warp specialisation: one producer warp runs bulk copies into the stages in shared memory, two consumer groups of
// four warps multiply. Each stage has two mbarriers: `full` (the copies are complete), `empty` (the consumers have
// read it). Global memory is arranged as wgmma reads it, so that a copy is one run of bytes.

struct ProductStage {
  Table table;
  Weights weights;
};
#define PRODUCT_STAGES 4

// Issues the products of chunk i, computes the operands of the next chunk meanwhile, and adds the result to `total`.
__device__ inline void multiply_chunk(int i, int count, ProductStage* stages, Mbarrier* full,
                                      Mbarrier* empty, const Operand& current, Operand& next,
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
    make_operand(stages[(i + 1) % PRODUCT_STAGES].weights, warp % 2, warp / 2, next);
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
        int chunk = first + i, bytes = sizeof(Table), w_bytes = sizeof(stage->weights.of_rows);
        mbarrier_expect_bytes(loaded, bytes + w_bytes);
        copy_to_shared(stage->table, (char*)table + (long long)chunk * bytes, bytes, loaded);
        copy_to_shared(stage->weights.of_rows,
                       (char*)weights + ((long long)row_tile * chunks + chunk) * w_bytes, w_bytes,
                       loaded);
      }
      double2 power = times(of_tile, of_coarse), of_block = step;
      n += i + 1 < count ? STATES : 0;
      of_tile = at_tile[n], of_coarse = at_coarse[n], step = block_power[n + lane];
      for (int b = 0; b < BLOCKS; b++) {
        stage->weights.scale[b][lane] = make_float2(power.x, power.y);
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
  Operand even, odd;
  mbarrier_wait(full, 0);
  make_operand(stages->weights, half, warp / 2, even);
  for (int i = 0; i < count; i += 2) {
    multiply_chunk(i, count, stages, full, empty, even, odd, sum, total);
    if (i + 1 < count) multiply_chunk(i + 1, count, stages, full, empty, odd, even, sum, total);
  }
#pragma unroll
  for (int below = 0; below < 2; below++) {
    int row = row_tile * HEIGHT + half * 16 + below * 8 + g;
    if (row >= rows) break;
    float scale = inverse_scale[row] / UNIT;
    int k = (tile * BLOCKS + warp / 2) * 128 + 2 * t;
    long long entries = ((long long)rows * length + 3) / 4 * 4;
    float* to = partial + part * entries + (long long)row * length;
#pragma unroll
    for (int j = 0; j < 16; j++)
      store_pair(to, k + 8 * j, length, scale * total[4 * j + 2 * below], scale * total[4 * j + 2 * below + 1]);
  }
}
