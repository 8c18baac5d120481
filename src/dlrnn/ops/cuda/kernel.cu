// The kernels' side of a convolution: their spectrum, and their gradient from a spectrum.
// What the complex signals mean: convolution.cu.

extern __shared__ float2 shared[];

// spectrum = transform(right + i reversed left) / N
extern "C" __global__ void __launch_bounds__(THREADS)
    kernel_spectrum(const float* right, const float* left, float2* spectrum, const float4* powers,
                    const float2* twist, int K_right, int K_left, int H) {
  float4* middle = reinterpret_cast<float4*>(shared + WORK);
  Tables tables = tables_at(middle, powers, twist);
  int h0 = blockIdx.x * CHANNELS;
  each_group([&](int, int j0, int c) {
    int h = h0 + c;
    float2 v[16];
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      int j = j0 + r * FIRST, back = N - 1 - j;
      float2 z = {0.f, 0.f};
      if (h < H && j < K_right) z.x = right[(long long)h * K_right + j];
      if (h < H && back < K_left) z.y = left[(long long)h * K_left + back];
      v[r] = mul(z, root64(r));
    }
    first_pass(shared, v, tables.turns(j0), j0, c);
  });
  __syncthreads();
  middle_passes<false>({shared}, tables);
  each_group([&](int, int j0, int c) {
    float2 v[16];
    last_pass(shared, v, j0, c);
    if (h0 + c >= H) return;
    float2* to = spectrum + (long long)(h0 + c) * N + j0;
#pragma unroll
    for (int q = 0; q < 16; ++q) {
      float2 value = v[slot<16>(q)];
      to[q * FIRST] = {value.x * (1.f / N), value.y * (1.f / N)};
    }
  });
}

// d_right, d_left from the sum of the groups' spectra
extern "C" __global__ void __launch_bounds__(THREADS)
    kernel_gradient(const float2* partial, float* d_right, float* d_left, const float4* powers,
                    const float2* twist, int K_right, int K_left, int H, int groups) {
  float4* middle = reinterpret_cast<float4*>(shared + WORK);
  Tables tables = tables_at(middle, powers, twist);
  int h0 = blockIdx.x * CHANNELS;
  each_group([&](int, int j0, int c) {
    float2 v[16] = {};
    const float2* from = partial + (long long)min(h0 + c, H - 1) * N + j0;
    for (int group = 0; group < groups; ++group, from += (long long)H * N)
#pragma unroll
      for (int q = 0; q < 16; ++q) v[q] = add(v[q], streamed(from + q * FIRST));
    last_pass_back(shared, v, j0, c);
  });
  __syncthreads();
  middle_passes<true>({shared}, tables);
  each_group([&](int, int j0, int c) {
    int h = h0 + c;
    float2 v[16];
    first_pass_back(shared, v, tables.turns(j0), j0, c);
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      int j = j0 + r * FIRST, back = N - 1 - j;
      float2 z = mul_conj(v[slot<16>(r)], root64(r));
      if (h < H && j < K_right) d_right[(long long)h * K_right + j] = z.x * (1.f / N);
      if (h < H && back < K_left) d_left[(long long)h * K_left + back] = z.y * (1.f / N);
    }
  });
}
