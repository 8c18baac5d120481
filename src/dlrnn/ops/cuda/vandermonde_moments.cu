// The kernel of the moments of moments.cuh, for any number of rows and states.

extern "C" __global__ void __launch_bounds__(MOMENTS_THREADS, 1)
moments(const char* values, const double2* log_lambda, float2* partial, int rows, int states,
        int steps) {
  extern __shared__ __align__(128) unsigned char memory[];
  int row_tiles = (rows + 63) / 64, row_tile = blockIdx.x % row_tiles;
  int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  int n = blockIdx.x / row_tiles * 128 + warp * 16 + g;
  values += (long long)row_tile * steps * sizeof(MomentsStage);
  double2 first = log_lambda[min(n, states - 1)], second = log_lambda[min(n + 8, states - 1)];
  float re[32], im[32];
  if (!moments_of_tile(values, first, second, steps, memory, re, im)) return;
#pragma unroll
  for (int j = 0; j < 32; j++) {
    int row = row_tile * 64 + j / 4 * 8 + 2 * t + j % 2, state = n + 8 * (j / 2 % 2);
    if (row < rows && state < states)
      partial[(long long)row * states + state] = make_float2(re[j], im[j]);
  }
}
