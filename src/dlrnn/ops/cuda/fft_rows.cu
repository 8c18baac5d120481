// FFTs of the rows of a long convolution and their pointwise products with a spectrum. fft_columns.cu has left
// Z [B, R, N]: R = H C rows of N complex points for each sequence. Spectra are [R, 16, N / 16].
//
// A block has one row number and processes that row of all sequences, one after the other; a bulk copy loads the
// next row while the current one is transformed. GPUs with less shared memory than Hopper (STAGED = 0) have no stage:
// the next row is prefetched into L2, and threads read it from there.
//
// Pass 1 leaves 16 pieces of FIRST points. RADIX_A threads of one warp do the rest of a piece, so that only pass 1
// and its inverse need a barrier of the block.

extern __shared__ __align__(16) float2 shared[];
static_assert(CHANNELS == 1 && BUTTERFLIES == 1, "a row is a block");
static_assert(RADIX_B == 1 && FIRST == 16 * RADIX_A, "a piece is two passes");

// Shared memory: points of WORKS rows, the stage into which a bulk copy loads a row, tables, and the mbarrier that
// counts the bytes of that copy.
template <int WORKS>
struct Memory {
  float2* stage;
  float4* middle;
  Mbarrier* loaded;
  int parity;

  __device__ Memory() {
    stage = shared + WORKS * PADDED;
    middle = reinterpret_cast<float4*>(stage + STAGED * N);
    loaded = reinterpret_cast<Mbarrier*>(middle + MIDDLE);
    parity = 0;
    if (threadIdx.x == 0) mbarrier_init(loaded);
    __syncthreads();
  }
  __device__ void fetch(const float2* row) {  // after a barrier: all threads have read the stage
#if STAGED
    if (threadIdx.x) return;
    mbarrier_expect_bytes(loaded, N * 8);
    copy_to_shared(stage, row, N * 8, loaded);
#else
    prefetch_row(row, N * 8, threadIdx.x, THREADS);
#endif
  }
  // Waits for a row, which has been fetched; returns where it is.
  __device__ const float2* wait(const float2* row) {
#if STAGED
    mbarrier_wait(loaded, parity);
    parity ^= 1;
    row = stage;
#endif
    return row;
  }
};

__device__ inline float4* middle_at(int works) {
  return reinterpret_cast<float4*>(shared + works * PADDED);
}

__device__ inline void read_row(float2* work, const float2* row, const Tables& tables) {
  float2 v[16];
  int j0 = threadIdx.x;
#pragma unroll
  for (int r = 0; r < 16; ++r) v[r] = row[j0 + r * FIRST];
  first_pass<false>(work, v, tables.twiddles(j0), j0, 0);
}

__device__ inline void write_row(float2* row, const float2* work, const Tables& tables) {
  float2 v[16];
  int j0 = threadIdx.x;
  inverse_first_pass<false>(work, v, tables.twiddles(j0), j0, 0);
#pragma unroll
  for (int r = 0; r < 16; ++r) row[j0 + r * FIRST] = v[slot<16>(r)];
}

// The middle pass of this thread's piece; it synchronises the warp with the last pass.
template <bool INVERSE>
__device__ inline void middle_pass_in_warp(float2* work, const float4* powers) {
  float2* piece = work + threadIdx.x / RADIX_A * padded_stride(FIRST);
  if (INVERSE) __syncwarp();
#pragma unroll
  for (int part = 0; part < 16 / RADIX_A; ++part) {
    int i = threadIdx.x % RADIX_A + part * RADIX_A;
    float2 v[RADIX_A];
#pragma unroll
    for (int r = 0; r < RADIX_A; ++r) v[r] = piece[i + r * padded_stride(16)];
    if (!INVERSE) dft<RADIX_A, false>(v);
    apply_twiddles<RADIX_A, INVERSE, false>(v, powers[i], float2{1.f, 0.f});
    if (INVERSE) dft<RADIX_A, true>(v);
#pragma unroll
    for (int q = 0; q < RADIX_A; ++q) piece[i + q * padded_stride(16)] = v[slot<RADIX_A>(q)];
  }
  if (!INVERSE) __syncwarp();
}

// Z <- Z spectrum
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    multiply_rows(float2* Z, const float2* spectrum, const float4* powers, const float2* twist,
                  int B, int R) {
  Memory<1> memory;
  auto row = [&](int b) { return Z + ((long long)b * R + blockIdx.x) * N; };
  memory.fetch(row(0));
  Tables tables = copy_tables(memory.middle, powers, twist);
  int j0 = threadIdx.x;
  float2 kernel[16];
#pragma unroll
  for (int q = 0; q < 16; ++q)
    kernel[q] = load_streaming(spectrum + (long long)blockIdx.x * N + q * FIRST + j0);
  for (int b = 0; b < B; ++b) {
    read_row(shared, memory.wait(row(b)), tables);
    __syncthreads();
    if (b + 1 < B) memory.fetch(row(b + 1));
    middle_pass_in_warp<false>(shared, tables.middle);
    float2 v[16], product[16];
    last_pass(shared, v, j0, 0);
#pragma unroll
    for (int q = 0; q < 16; ++q) product[q] = mul(v[slot<16>(q)], kernel[q]);
    inverse_last_pass(shared, product, j0, 0);
    middle_pass_in_warp<true>(shared, tables.middle);
    __syncthreads();
    write_row(row(b), shared, tables);
  }
}

// With U and DY the spectra of the rows of Z_u and Z_dy:  Z_dy <- Z_dy conj(spectrum),
// partial [R, 16, N / 16] = sum_b conj(U) DY.
// Bulk copies load dy into the stage and u into the place where it is transformed, both while the previous rows are
// transformed back. In between the stage holds the spectrum.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    correlate_rows(float2* Z_dy, const float2* Z_u, const float2* spectrum, float2* partial,
                   const float4* powers, const float2* twist, int B, int R) {
  Memory<2> memory;
  float2 *work = shared, *work_u = shared + PADDED;
  int j0 = threadIdx.x;
  auto start = [&](int b) { return ((long long)b * R + blockIdx.x) * N; };
  auto fetch = [&](int b) {
    if (b >= B) return;
#if STAGED
    if (threadIdx.x) return;
    mbarrier_expect_bytes(memory.loaded, 2 * N * 8);
    copy_to_shared(work_u, Z_u + start(b), N * 8, memory.loaded);
    copy_to_shared(memory.stage, Z_dy + start(b), N * 8, memory.loaded);
#else
    memory.fetch(Z_u + start(b));
    memory.fetch(Z_dy + start(b));
#endif
  };
  fetch(0);
  Tables tables = copy_tables(memory.middle, powers, twist);
  float2* U = work_u + padded(16 * j0, 0);
  float2 sum[16] = {};
  for (int b = 0; b < B; ++b) {
    float2 v[16], product[16];
    const float2* from_dy = memory.wait(Z_dy + start(b));
    const float2* from_u = STAGED ? work_u : Z_u + start(b);
#pragma unroll
    for (int r = 0; r < 16; ++r) v[r] = from_u[j0 + r * FIRST];
    if (STAGED) __syncthreads();  // work_u is overwritten
    first_pass<false>(work_u, v, tables.twiddles(j0), j0, 0);
    read_row(work, from_dy, tables);
    __syncthreads();
    if (STAGED || b == 0) memory.fetch(spectrum + (long long)blockIdx.x * N);
    middle_pass_in_warp<false>(work_u, tables.middle);
    last_pass(work_u, v, j0, 0);
#pragma unroll
    for (int q = 0; q < 16; ++q) U[q] = v[slot<16>(q)];
    middle_pass_in_warp<false>(work, tables.middle);
    last_pass(work, v, j0, 0);
    const float2* kernel = memory.wait(spectrum + (long long)blockIdx.x * N) + j0;
#pragma unroll
    for (int q = 0; q < 16; ++q) {
      float2 value = v[slot<16>(q)];
      sum[q] = add(sum[q], mul_conj(value, U[q]));
      product[q] = mul_conj(value, kernel[q * FIRST]);
    }
#if STAGED
    fence_async_proxy();
    // The warp that starts the copies waits until all warps have read; the other warps only arrive.
    if (threadIdx.x < 32) named_barrier(1, THREADS);
    else named_barrier_arrive(1, THREADS);
#endif
    fetch(b + 1);
    inverse_last_pass(work, product, j0, 0);
    middle_pass_in_warp<true>(work, tables.middle);
    __syncthreads();
    write_row(Z_dy + start(b), work, tables);
  }
#pragma unroll
  for (int q = 0; q < 16; ++q) partial[(long long)blockIdx.x * N + q * FIRST + j0] = sum[q];
}

// Rows -> spectra / `points`, in place.
extern "C" __global__ void __launch_bounds__(THREADS)
    transform_rows(float2* Z, const float4* powers, const float2* twist, int points) {
  Tables tables = copy_tables(middle_at(1), powers, twist);
  int j0 = threadIdx.x;
  Z += (long long)blockIdx.x * N;
  read_row(shared, Z, tables);
  __syncthreads();
  middle_passes<false>({shared}, tables);
  float2 v[16];
  last_pass(shared, v, j0, 0);
  float scale = 1.f / points;
#pragma unroll
  for (int q = 0; q < 16; ++q) {
    float2 value = v[slot<16>(q)];
    Z[q * FIRST + j0] = {scale * value.x, scale * value.y};
  }
}

// The sum of `parts` spectra, divided by `points` -> rows, which replace the first spectrum.
extern "C" __global__ void __launch_bounds__(THREADS)
    inverse_transform_rows(float2* partial, const float4* powers, const float2* twist, int points,
                           int parts, int R) {
  Tables tables = copy_tables(middle_at(1), powers, twist);
  int j0 = threadIdx.x;
  partial += (long long)blockIdx.x * N;
  float2 v[16] = {};
  float scale = 1.f / points;
  for (int part = 0; part < parts; ++part)
#pragma unroll
    for (int q = 0; q < 16; ++q)
      v[q] = add(v[q], load_streaming(partial + (long long)part * R * N + q * FIRST + j0));
#pragma unroll
  for (int q = 0; q < 16; ++q) v[q] = {scale * v[q].x, scale * v[q].y};
  inverse_last_pass(shared, v, j0, 0);
  __syncthreads();
  middle_passes<true>({shared}, tables);
  write_row(partial, shared, tables);
}
