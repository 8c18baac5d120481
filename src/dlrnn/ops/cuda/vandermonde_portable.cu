// The Vandermonde product of vandermonde.cuh by mma.sync: two warps have a block of 128 positions, 64 of them each.

// What a thread has loaded to compute the scale of one state in one of the four blocks.
struct Scale {
  double2 of_tile, of_coarse, step;
};

// Starts to copy a chunk of states into a stage.
__device__ inline void start_chunk(ProductStage* stage, const uint4* table, const float4* weights, int chunk,
                                   int row_tile, int chunks) {
  copy_async<sizeof(stage->table)>(stage->table, table + (long long)chunk * (sizeof(stage->table) / 16));
  copy_async<sizeof(stage->weights)>(
      stage->weights, weights + ((long long)row_tile * chunks + chunk) * (sizeof(stage->weights) / 16));
}

extern "C" __global__ void __launch_bounds__(CONSUMERS, 1)
product(const float4* weights, const float* inverse_scale, const uint4* table, const double2* block_power,
        const double2* tile_powers, const double2* coarse_powers, float* partial, int rows, int row_tiles,
        int position_tiles, int length, int states, int chunks_per_part) {
  extern __shared__ __align__(128) unsigned char memory[];
  ProductStage* stages = (ProductStage*)memory;
  int row_tile = blockIdx.x % row_tiles, tile = blockIdx.x / row_tiles % position_tiles;
  int part = blockIdx.x / row_tiles / position_tiles;
  int chunks = states / STATES, first = part * chunks_per_part, end = min(chunks, first + chunks_per_part);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, b = warp / 2, half = warp % 2;
  tile_powers += (long long)(tile % 64) * states, coarse_powers += (long long)(tile / 64) * states;
  auto load = [&](int chunk) -> Scale {
    int n = min(chunk, end - 1) * STATES + lane;
    return {tile_powers[n], coarse_powers[n], block_power[n]};
  };
  // The first four warps write the scales of a chunk, from numbers that were loaded a chunk before.
  Scale loaded = load(first);
  auto write_scale = [&](ProductStage* stage, int chunk) {
    if (warp >= BLOCKS) return;
    double2 power = times(loaded.of_tile, loaded.of_coarse);
    for (int i = 0; i < warp; i++) power = times(power, loaded.step);
    stage->scale[warp][lane] = make_float2(power.x, power.y);
    loaded = load(chunk + 1);
  };
  start_chunk(stages, table, weights, first, row_tile, chunks);
  write_scale(stages, first);
  float total[2][8][4] = {};
  for (int chunk = first; chunk < end; chunk++) {
    const ProductStage* stage = stages + (chunk - first) % 2;
    wait_for_copies();
    __syncthreads();  // the stage is complete, and all warps have read the other one
    if (chunk + 1 < end) {
      ProductStage* next = stages + (chunk - first + 1) % 2;
      start_chunk(next, table, weights, chunk + 1, row_tile, chunks);
      write_scale(next, chunk + 1);
    }
    Operand scaled[2];
    make_weights(stage, 0, b, scaled[0]);
    make_weights(stage, 1, b, scaled[1]);
    const unsigned* powers = (const unsigned*)&stage->table[0][0][0][half * 64 + g] + t;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      float sum[2][2][4];
      multiply<2048, 512, 1024, 32>(sum, scaled, powers + 32 * j);
#pragma unroll
      for (int i = 0; i < 16; i++) total[i / 8][j + i / 4 % 2][i % 4] += sum[i / 8][i / 4 % 2][i % 4];
    }
  }
  long long entries = ((long long)rows * length + 3) / 4 * 4;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int row = row_tile * HEIGHT + i * 8 + g, k = (tile * BLOCKS + b) * 128 + half * 64 + 2 * t;
    if (row >= rows) break;
    float scale = inverse_scale[row] / UNIT;
    float* to = partial + part * entries + (long long)row * length;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float* x = total[i / 2][j] + i % 2 * 2;
      store_pair(to, k + 8 * j, length, scale * x[0], scale * x[1]);
    }
  }
}
