// The gradients of a convolution of rows by halves (split.cuh).

static_assert(CHANNELS == 1 && GROUPS == 1 && TEAMS == 1, "a row is a block");

// The last inverse pass of one half, and what it adds to du.
template <int P>
__device__ inline void write_half(float* du, const float2* work, const Tables& tables, int L) {
  int j0 = threadIdx.x;
  float2 v[16];
  first_pass_back(work, v, turns_at(tables, P / 2, j0), j0, 0);
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    float share[16], before[16];
    int j = j0 + k * N;
#pragma unroll
    for (int r = 0; r < 16; ++r)
      before[r] = P > 1 && j + r * FIRST < L ? du[j + r * FIRST] : 0.f;
    unfold<P>(share, v, k);
#pragma unroll
    for (int r = 0; r < 16; ++r)
      if (j + r * FIRST < L) du[j + r * FIRST] = before[r] + share[r];
  }
}

// The last pass of dy; sum += DY conj(U); DY <- DY conj(K) and back.
__device__ inline void correlate(float2* work, const float2* work_u, const float2* kernel,
                                 float2 (&sum)[16]) {
  int j0 = threadIdx.x;
  float2 v[16], product[16];
  const float2* U = work_u + place(16 * j0, 0);
  last_pass(work, v, j0, 0);
#pragma unroll
  for (int q = 0; q < 16; ++q) {
    float2 value = v[slot<16>(q)];
    sum[q] = add(sum[q], mul_conj(value, U[q]));
    product[q] = mul_conj(value, kernel[j0 + q * FIRST]);
  }
  last_pass_back(work, product, j0, 0);
}

// du = the correlation of dy with the kernels, and for each group of sequences the spectrum of what
// it adds to the kernels' gradient: partial [groups, H, 2, 16, N / 16] = sum conj(U) DY.
// dy comes into the box, u to where it is transformed, both while the half before goes back; the
// kernels' spectrum comes into the box in between.
extern "C" __global__ void __launch_bounds__(THREADS)
    convolve_halves_backward(const float* dy, const float* u, float* du, const float2* spectrum,
                             float2* partial, const float4* powers, const float2* twist, int B,
                             int L, int stride, int H, int groups) {
  float2 *work = shared, *work_u = shared + WORK;
  float *box = reinterpret_cast<float*>(shared + 2 * WORK), *row_u = &work_u->x;
  float4* middle = reinterpret_cast<float4*>(box + 2 * N);
  Barrier* barriers = reinterpret_cast<Barrier*>(middle + MIDDLE);
  Inbox rows(barriers), kernels(barriers + 1);
  __syncthreads();
  int j0 = threadIdx.x, h = blockIdx.x % H, group = blockIdx.x / H;
  auto start = [&](int b) { return ((long long)b * H + h) * stride; };
  auto fetch = [&](int b) {
    if (threadIdx.x || b >= B) return;
    barrier_expect(rows.came, 2 * stride * 4);
    copy_to_shared(row_u, u + start(b), stride * 4, rows.came);
    copy_to_shared(box, dy + start(b), stride * 4, rows.came);
  };
  fetch(group);
  Tables once = tables_at(middle, powers, twist);
  float2 sum[2][16] = {};
  for (int b = group; b < B; b += groups) {
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      Tables tables = once.again(b);
      float2 v[16];
      rows.wait();
      if (half == 0) fold<1>(v, row_u, j0, L);
      else fold<3>(v, row_u, j0, L);
      __syncthreads();
      first_pass(work_u, v, turns_at(tables, half, j0), j0, 0);
      if (half == 0) fold<1>(v, box, j0, L);
      else fold<3>(v, box, j0, L);
      first_pass(work, v, turns_at(once.again(b + 2), half, j0), j0, 0);
      __syncthreads();
      kernels.fetch(box, spectrum + ((long long)h * 2 + half) * N, N * 8);
      middle_passes<false>({work, work_u}, tables);
      last_pass(work_u, v, j0, 0);
#pragma unroll
      for (int q = 0; q < 16; ++q) work_u[place(16 * j0, 0) + q] = v[slot<16>(q)];
      kernels.wait();
      const float2* kernel = reinterpret_cast<const float2*>(box);
      if (half == 0) correlate(work, work_u, kernel, sum[0]);
      else correlate(work, work_u, kernel, sum[1]);
      before_copies();
      __syncthreads();
      fetch(half == 0 ? b : b + groups);
      tables = once.again(b + 1);
      middle_passes<true>({work}, tables);
      if (half == 0) write_half<1>(du + start(b), work, tables, L);
      else write_half<3>(du + start(b), work, tables, L);
    }
  }
  float2* into = partial + ((long long)group * H + h) * 2 * N + j0;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int q = 0; q < 16; ++q) into[half * N + q * FIRST] = sum[half][q];
}
