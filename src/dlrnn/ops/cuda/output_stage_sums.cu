// The gradients of weight [columns, all_channels] and bias: the sums of the rows of `partial`. Part blockIdx.y of the
// channels has `rows` rows, each with its `channels` of the weight's gradient and then that of the bias.
extern "C" __global__ void __launch_bounds__(256)
sum_partials(const float4* partial, float* d_weight, float* d_bias, int rows, int channels, int columns,
             int all_channels) {
  __shared__ float4 sums[8][32];
  int weights = columns * channels, entries = weights + columns;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = blockIdx.x * 32 + lane;
  partial += (long long)blockIdx.y * rows * (entries / 4);
  float4 sum = make_float4(0, 0, 0, 0);
  if (4 * i < entries)
#pragma unroll 4
    for (int row = warp; row < rows; row += 8) {
      float4 x = partial[(long long)row * (entries / 4) + i];
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || 4 * i >= (blockIdx.y > 0 ? weights : entries)) return;  // the parts have the same d_bias
  for (int other = 1; other < 8; other++) {
    float4 x = sums[other][lane];
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  float* to = 4 * i < weights ? d_weight + 4 * i / channels * all_channels + blockIdx.y * channels + 4 * i % channels
                              : d_bias + 4 * i - weights;
  *(float4*)to = sum;
}
