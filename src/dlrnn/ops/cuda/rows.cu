// Products of complex rows of N points, [B, R, N], with spectra [R, 16, N / 16]: the inner part of a
// long convolution (columns.cu). One row a block, for all sequences of a batch; the next row comes in
// while this one is transformed.
//
// The first pass leaves 16 pieces of FIRST points. RADIX_A threads of one warp do the rest of a piece:
// only the first pass, and the last one back, need a barrier of the block.

extern __shared__ __align__(16) float2 shared[];
static_assert(CHANNELS == 1 && GROUPS == 1, "a row is a block");
static_assert(RADIX_B == 1 && FIRST == 16 * RADIX_A, "a piece is two passes");

// Shared memory: transforms, a box for the row that comes in, tables, a barrier.
template <int WORKS>
struct Memory {
  float2* box;
  float4* middle;
  Barrier* came;
  int parity;

  __device__ Memory() {
    box = shared + WORKS * WORK;
    middle = reinterpret_cast<float4*>(box + N);
    came = reinterpret_cast<Barrier*>(middle + MIDDLE);
    parity = 0;
    if (threadIdx.x == 0) barrier_start(came);
    __syncthreads();
  }
  __device__ void fetch(const float2* row) {  // once nobody reads the box any more
    if (threadIdx.x) return;
    barrier_expect(came, N * 8);
    copy_to_shared(box, row, N * 8, came);
  }
  __device__ const float2* wait() {
    barrier_wait(came, parity);
    parity ^= 1;
    return box;
  }
};

__device__ inline float4* middle_at(int works) {
  return reinterpret_cast<float4*>(shared + works * WORK);
}

__device__ inline void read_row(float2* work, const float2* row, const Tables& tables) {
  float2 v[16];
  int j0 = threadIdx.x;
#pragma unroll
  for (int r = 0; r < 16; ++r) v[r] = row[j0 + r * FIRST];
  first_pass<false>(work, v, tables.turns(j0), j0, 0);
}

__device__ inline void write_row(float2* row, const float2* work, const Tables& tables) {
  float2 v[16];
  int j0 = threadIdx.x;
  first_pass_back<false>(work, v, tables.turns(j0), j0, 0);
#pragma unroll
  for (int r = 0; r < 16; ++r) row[j0 + r * FIRST] = v[slot<16>(r)];
}

// The pass between, of this thread's piece.
template <bool INVERSE>
__device__ inline void middle_in_warp(float2* work, const float4* powers) {
  float2* piece = work + threadIdx.x / RADIX_A * apart(FIRST);
  if (INVERSE) __syncwarp();
#pragma unroll
  for (int part = 0; part < 16 / RADIX_A; ++part) {
    int i = threadIdx.x % RADIX_A + part * RADIX_A;
    float2 v[RADIX_A];
#pragma unroll
    for (int r = 0; r < RADIX_A; ++r) v[r] = piece[i + r * apart(16)];
    if (!INVERSE) dft<RADIX_A, false>(v);
    twiddle<RADIX_A, INVERSE, false>(v, powers[i], float2{1.f, 0.f});
    if (INVERSE) dft<RADIX_A, true>(v);
#pragma unroll
    for (int q = 0; q < RADIX_A; ++q) piece[i + q * apart(16)] = v[slot<RADIX_A>(q)];
  }
  if (!INVERSE) __syncwarp();
}

// Z <- Z times the spectrum
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    multiply_rows(float2* Z, const float2* spectrum, const float4* powers, const float2* twist,
                  int B, int R) {
  Memory<1> memory;
  auto row = [&](int b) { return Z + ((long long)b * R + blockIdx.x) * N; };
  memory.fetch(row(0));
  Tables tables = tables_at(memory.middle, powers, twist);
  int j0 = threadIdx.x;
  float2 kernel[16];
#pragma unroll
  for (int q = 0; q < 16; ++q)
    kernel[q] = streamed(spectrum + (long long)blockIdx.x * N + q * FIRST + j0);
  for (int b = 0; b < B; ++b) {
    read_row(shared, memory.wait(), tables);
    __syncthreads();
    if (b + 1 < B) memory.fetch(row(b + 1));
    middle_in_warp<false>(shared, tables.middle);
    float2 v[16], product[16];
    last_pass(shared, v, j0, 0);
#pragma unroll
    for (int q = 0; q < 16; ++q) product[q] = mul(v[slot<16>(q)], kernel[q]);
    last_pass_back(shared, product, j0, 0);
    middle_in_warp<true>(shared, tables.middle);
    __syncthreads();
    write_row(row(b), shared, tables);
  }
}

// Z_dy <- Z_dy conj(spectrum), and partial [R, 16, N / 16] = sum_b conj(U) DY
// dy comes into the box, u to where it is transformed, both while the rows before go back; the
// spectrum comes into the box in between.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    correlate_rows(float2* Z_dy, const float2* Z_u, const float2* spectrum, float2* partial,
                   const float4* powers, const float2* twist, int B, int R) {
  Memory<2> memory;
  float2 *work = shared, *work_u = shared + WORK;
  int j0 = threadIdx.x;
  auto start = [&](int b) { return ((long long)b * R + blockIdx.x) * N; };
  auto fetch = [&](int b) {
    if (threadIdx.x || b >= B) return;
    barrier_expect(memory.came, 2 * N * 8);
    copy_to_shared(work_u, Z_u + start(b), N * 8, memory.came);
    copy_to_shared(memory.box, Z_dy + start(b), N * 8, memory.came);
  };
  fetch(0);
  Tables tables = tables_at(memory.middle, powers, twist);
  float2* U = work_u + place(16 * j0, 0);
  float2 sum[16] = {};
  for (int b = 0; b < B; ++b) {
    float2 v[16], product[16];
    memory.wait();
#pragma unroll
    for (int r = 0; r < 16; ++r) v[r] = work_u[j0 + r * FIRST];
    __syncthreads();
    first_pass<false>(work_u, v, tables.turns(j0), j0, 0);
    read_row(work, memory.box, tables);
    __syncthreads();
    memory.fetch(spectrum + (long long)blockIdx.x * N);
    middle_in_warp<false>(work_u, tables.middle);
    last_pass(work_u, v, j0, 0);
#pragma unroll
    for (int q = 0; q < 16; ++q) U[q] = v[slot<16>(q)];
    middle_in_warp<false>(work, tables.middle);
    last_pass(work, v, j0, 0);
    const float2* kernel = memory.wait() + j0;
#pragma unroll
    for (int q = 0; q < 16; ++q) {
      float2 value = v[slot<16>(q)];
      sum[q] = add(sum[q], mul_conj(value, U[q]));
      product[q] = mul_conj(value, kernel[q * FIRST]);
    }
    before_copies();
    if (threadIdx.x < 32) team_barrier(1, THREADS);  // the copies wait for all, the others do not
    else team_arrive(1, THREADS);
    fetch(b + 1);
    last_pass_back(work, product, j0, 0);
    middle_in_warp<true>(work, tables.middle);
    __syncthreads();
    write_row(Z_dy + start(b), work, tables);
  }
#pragma unroll
  for (int q = 0; q < 16; ++q) partial[(long long)blockIdx.x * N + q * FIRST + j0] = sum[q];
}

// Rows -> spectra / `points`, in place
extern "C" __global__ void __launch_bounds__(THREADS)
    transform_rows(float2* Z, const float4* powers, const float2* twist, int points) {
  Tables tables = tables_at(middle_at(1), powers, twist);
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

// The sum of `parts` spectra / `points` -> rows, where the first of them was
extern "C" __global__ void __launch_bounds__(THREADS)
    transform_rows_back(float2* partial, const float4* powers, const float2* twist, int points,
                        int parts, int R) {
  Tables tables = tables_at(middle_at(1), powers, twist);
  int j0 = threadIdx.x;
  partial += (long long)blockIdx.x * N;
  float2 v[16] = {};
  float scale = 1.f / points;
  for (int part = 0; part < parts; ++part)
#pragma unroll
    for (int q = 0; q < 16; ++q)
      v[q] = add(v[q], streamed(partial + (long long)part * R * N + q * FIRST + j0));
#pragma unroll
  for (int q = 0; q < 16; ++q) v[q] = {scale * v[q].x, scale * v[q].y};
  last_pass_back(shared, v, j0, 0);
  __syncthreads();
  middle_passes<true>({shared}, tables);
  write_row(partial, shared, tables);
}
