// The Vandermonde product of vandermonde.cuh by mma.sync: two warps have a block of 128 positions, 64 of them each.
//
// While one warp of a scheduler computes operands (scaled weights), the other one multiplies: warps 0 to 3 compute
// those of the next chunk after they have multiplied, warps 4 to 7 those of this chunk before. Weights are copied two
// chunks ahead, tables one.

struct ProductMemory {
  Table tables[2];
  Weights weights[3];
};

extern "C" __global__ void __launch_bounds__(CONSUMERS, 1)
product(const float4* weights, const float* inverse_scale, const uint4* table, const double2* block_power,
        const double2* tile_powers, const double2* coarse_powers, float* partial, int rows, int row_tiles,
        int position_tiles, int length, int states, int chunks_per_part) {
  extern __shared__ __align__(128) unsigned char memory[];
  ProductMemory& shared = *(ProductMemory*)memory;
  int row_tile = blockIdx.x % row_tiles, tile = blockIdx.x / row_tiles % position_tiles;
  int part = blockIdx.x / row_tiles / position_tiles;
  int chunks = states / STATES, first = part * chunks_per_part, count = min(chunks_per_part, chunks - first);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, b = warp / 2, half = warp % 2;
  table += (long long)first * (sizeof(Table) / 16);
  weights += ((long long)row_tile * chunks + first) * (sizeof(shared.weights->of_rows) / 16);
  int n = first * STATES + lane;
  tile_powers += (long long)(tile % 64) * states + n, coarse_powers += (long long)(tile / 64) * states + n;
  block_power += n;

  // Warps 4 to 7 write the scales of a block of positions each, from factors that are loaded a chunk before.
  double2 of_tile = *tile_powers, of_coarse = *coarse_powers, step = *block_power;
  auto start_weights = [&](int i) {
    if (i >= count) return;
    Weights& to = shared.weights[i % 3];
    copy_async<sizeof(to.of_rows)>(to.of_rows, weights + i * (long long)(sizeof(to.of_rows) / 16));
    if (warp < 4) return;
    double2 power = times(of_tile, of_coarse);
    for (int block = 4; block < warp; block++) power = times(power, step);
    to.scale[warp - 4][lane] = make_float2(power.x, power.y);
    int next = min(i + 1, count - 1) * STATES;
    of_tile = tile_powers[next], of_coarse = coarse_powers[next], step = block_power[next];
  };
  auto start_table = [&](int i) {
    if (i < count) copy_async<sizeof(Table)>(shared.tables[i % 2], table + i * (long long)(sizeof(Table) / 16));
  };

  float total[2][8][4] = {};
  Operand scaled[2];
  auto make_operands = [&](int i) {
    make_operand(shared.weights[i % 3], 0, b, scaled[0]);
    make_operand(shared.weights[i % 3], 1, b, scaled[1]);
  };
  start_weights(0);
  start_weights(1);
  start_table(0);
  for (int i = 0; i < count; i++) {
    wait_for_own_copies();
    __syncthreads();  // what was copied is complete, and all warps have read what is replaced
    start_weights(i + 2);
    start_table(i + 1);
    if (warp >= 4 || i == 0) make_operands(i);
    const unsigned* powers = (const unsigned*)&shared.tables[i % 2][0][0][0][half * 64 + g] + t;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      float sum[2][2][4];
      multiply<2048, 512, 1024, 32>(sum, scaled, powers + 32 * j);
#pragma unroll
      for (int k = 0; k < 16; k++) total[k / 8][j + k / 4 % 2][k % 4] += sum[k / 8][k / 4 % 2][k % 4];
    }
    if (warp < 4 && i + 1 < count) make_operands(i + 1);
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
