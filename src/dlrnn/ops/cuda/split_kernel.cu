// The kernels' side of a convolution by halves (split.cuh).

static_assert(CHANNELS == 1 && GROUPS == 1 && TEAMS == 1, "a row is a block");

template <int P>
__device__ inline void read_kernel(float2* work, const float* right, const float* left, int K_right,
                                   int K_left, const Tables& tables) {
  int j0 = threadIdx.x;
  float2 v[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    v[r] = {0.f, 0.f};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      int j = j0 + r * FIRST + k * N, back = 4 * N - 1 - j;
      float x = k < 2 ? (j < K_right ? right[j] : 0.f) : (back < K_left ? -left[back] : 0.f);
      v[r] = add_scaled(v[r], x, turn_of<P>(r, k));
    }
  }
  first_pass(work, v, turns_at(tables, P / 2, j0), j0, 0);
}

// spectrum = both halves of the kernels / 2 N; a block a half
extern "C" __global__ void __launch_bounds__(THREADS)
    kernel_halves(const float* right, const float* left, float2* spectrum, const float4* powers,
                  const float2* twist, int K_right, int K_left) {
  Tables tables = tables_at(reinterpret_cast<float4*>(shared + WORK), powers, twist);
  int j0 = threadIdx.x, h = blockIdx.x / 2;
  right += (long long)h * K_right, left += (long long)h * K_left;
  if (blockIdx.x % 2 == 0) read_kernel<1>(shared, right, left, K_right, K_left, tables);
  else read_kernel<3>(shared, right, left, K_right, K_left, tables);
  __syncthreads();
  middle_passes<false>({shared}, tables);
  float2 v[16];
  last_pass(shared, v, j0, 0);
  float2* to = spectrum + (long long)blockIdx.x * N + j0;
#pragma unroll
  for (int q = 0; q < 16; ++q) {
    float2 value = v[slot<16>(q)];
    to[q * FIRST] = {value.x * (.5f / N), value.y * (.5f / N)};
  }
}

// d_right, d_left from the sum of the groups' spectra
extern "C" __global__ void __launch_bounds__(THREADS)
    kernel_halves_gradient(const float2* partial, float* d_right, float* d_left,
                           const float4* powers, const float2* twist, int K_right, int K_left,
                           int H, int groups) {
  float* shares = reinterpret_cast<float*>(shared + WORK);
  Tables tables = tables_at(reinterpret_cast<float4*>(shares + 4 * N), powers, twist);
  int j0 = threadIdx.x, h = blockIdx.x;
  d_right += (long long)h * K_right, d_left += (long long)h * K_left;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    float2 v[16] = {};
    for (int group = 0; group < groups; ++group) {
      const float2* from = partial + (((long long)group * H + h) * 2 + half) * N + j0;
#pragma unroll
      for (int q = 0; q < 16; ++q) v[q] = add(v[q], streamed(from + q * FIRST));
    }
    __syncthreads();
    last_pass_back(shared, v, j0, 0);
    __syncthreads();
    middle_passes<true>({shared}, tables);
    first_pass_back(shared, v, turns_at(tables, half, j0), j0, 0);
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      float share[16];
      if (half == 0) unfold<1>(share, v, part);
      else unfold<3>(share, v, part);
#pragma unroll
      for (int r = 0; r < 16; ++r) {
        int j = j0 + r * FIRST + part * N, back = 4 * N - 1 - j;
        if (half == 0) {
          shares[j] = share[r];  // each thread's for itself
          continue;
        }
        float sum = (shares[j] + share[r]) * (.5f / N);
        if (j < K_right) d_right[j] = sum;
        if (back < K_left) d_left[back] = -sum;
      }
    }
  }
}
