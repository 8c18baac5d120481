// Products of complex rows of N points, [B, R, N], with spectra [R, 16, N / 16]: the inner part of a
// long convolution (columns.cu). One row a block, for all sequences of a batch.

extern __shared__ float2 shared[];
static_assert(CHANNELS == 1 && GROUPS == 1, "a row is a block");

__device__ inline float4* middle_at(int works) {
  return reinterpret_cast<float4*>(shared + works * WORK);
}

__device__ inline void read_row(float2* work, const float2* row, const Tables& tables) {
  float2 v[16];
  int j0 = threadIdx.x;
#pragma unroll
  for (int r = 0; r < 16; ++r) v[r] = streamed(row + j0 + r * FIRST);
  first_pass<false>(work, v, tables.turns(j0), j0, 0);
}

__device__ inline void write_row(float2* row, const float2* work, const Tables& tables) {
  float2 v[16];
  int j0 = threadIdx.x;
  first_pass_back<false>(work, v, tables.turns(j0), j0, 0);
#pragma unroll
  for (int r = 0; r < 16; ++r) row[j0 + r * FIRST] = v[slot<16>(r)];
}

// Z <- Z times the spectrum
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    multiply_rows(float2* Z, const float2* spectrum, const float4* powers, const float2* twist,
                  int B, int R) {
  Tables tables = tables_at(middle_at(1), powers, twist);
  int j0 = threadIdx.x;
  float2 kernel[16];
#pragma unroll
  for (int q = 0; q < 16; ++q)
    kernel[q] = streamed(spectrum + (long long)blockIdx.x * N + q * FIRST + j0);
  for (int b = 0; b < B; ++b) {
    float2* row = Z + ((long long)b * R + blockIdx.x) * N;
    read_row(shared, row, tables);
    __syncthreads();
    middle_passes<false>({shared}, tables);
    float2 v[16], product[16];
    last_pass(shared, v, j0, 0);
#pragma unroll
    for (int q = 0; q < 16; ++q) product[q] = mul(v[slot<16>(q)], kernel[q]);
    last_pass_back(shared, product, j0, 0);
    __syncthreads();
    middle_passes<true>({shared}, tables);
    write_row(row, shared, tables);
  }
}

// Z_dy <- Z_dy conj(spectrum), and partial [R, 16, N / 16] = sum_b conj(U) DY
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    correlate_rows(float2* Z_dy, const float2* Z_u, const float2* spectrum, float2* partial,
                   const float4* powers, const float2* twist, int B, int R) {
  Tables tables = tables_at(middle_at(2), powers, twist);
  float2 *work = shared, *work_u = shared + WORK;
  int j0 = threadIdx.x;
  const float2* kernel = spectrum + (long long)blockIdx.x * N + j0;
  float2 sum[16] = {};
  for (int b = 0; b < B; ++b) {
    long long start = ((long long)b * R + blockIdx.x) * N;
    read_row(work, Z_dy + start, tables);
    read_row(work_u, Z_u + start, tables);
    __syncthreads();
    middle_passes<false>({work, work_u}, tables);
    float2 v[16], product[16];
    last_pass(work_u, v, j0, 0);
#pragma unroll
    for (int q = 0; q < 16; ++q) work_u[place(16 * j0 + q, 0)] = v[slot<16>(q)];
    last_pass(work, v, j0, 0);
#pragma unroll
    for (int q = 0; q < 16; ++q) {
      float2 value = v[slot<16>(q)];
      sum[q] = add(sum[q], mul_conj(value, work_u[place(16 * j0 + q, 0)]));
      product[q] = mul_conj(value, streamed(kernel + q * FIRST));
    }
    last_pass_back(work, product, j0, 0);
    __syncthreads();
    middle_passes<true>({work}, tables);
    write_row(Z_dy + start, work, tables);
  }
#pragma unroll
  for (int q = 0; q < 16; ++q) partial[(long long)blockIdx.x * N + q * FIRST + j0] = sum[q];
}

// Rows -> spectra / `points`
extern "C" __global__ void __launch_bounds__(THREADS)
    transform_rows(const float2* Z, float2* spectrum, const float4* powers, const float2* twist,
                   int points) {
  Tables tables = tables_at(middle_at(1), powers, twist);
  int j0 = threadIdx.x;
  read_row(shared, Z + (long long)blockIdx.x * N, tables);
  __syncthreads();
  middle_passes<false>({shared}, tables);
  float2 v[16];
  last_pass(shared, v, j0, 0);
  float scale = 1.f / points;
#pragma unroll
  for (int q = 0; q < 16; ++q) {
    float2 value = v[slot<16>(q)];
    spectrum[(long long)blockIdx.x * N + q * FIRST + j0] = {scale * value.x, scale * value.y};
  }
}

// The sum of `parts` spectra / `points` -> rows
extern "C" __global__ void __launch_bounds__(THREADS)
    transform_rows_back(const float2* partial, float2* Z, const float4* powers, const float2* twist,
                        int points, int parts, int R) {
  Tables tables = tables_at(middle_at(1), powers, twist);
  int j0 = threadIdx.x;
  float2 v[16];
  float scale = 1.f / points;
#pragma unroll
  for (int q = 0; q < 16; ++q) {
    v[q] = {0.f, 0.f};
    for (int part = 0; part < parts; ++part)
      v[q] = add(v[q], partial[((long long)part * R + blockIdx.x) * N + q * FIRST + j0]);
    v[q] = {scale * v[q].x, scale * v[q].y};
  }
  last_pass_back(shared, v, j0, 0);
  __syncthreads();
  middle_passes<true>({shared}, tables);
  write_row(Z + (long long)blockIdx.x * N, shared, tables);
}
