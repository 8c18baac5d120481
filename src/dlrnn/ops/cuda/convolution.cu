// Long convolution of rows: read u, transform, multiply, transform back, write y.
//
// A real signal x of 2 N entries modulo X^2N + 1 (a wrap-around changes the sign, and nothing wraps
// around here) is the complex signal z_j = x_j - i x_(j+N) modulo X^N + i. With w_4N^j z_j in place
// of z_j its ring becomes that of a transform of N points, and products need no untangling:
//   u (L <= N entries)    z_j = u_j,                          real in,
//   kernels               z_j = right_j + i left_(N-1-j),     two-sided at no cost,
//   y                     y_j = Re z_j,                       real out.
// Spectra are [H, 16, N / 16]: output q of butterfly j0 of the last pass at [h, q, j0].
//
// A block keeps its channels and goes through the sequences of a group; while it computes, the next
// rows come in. Blocks are few enough to be there all at once.

extern __shared__ __align__(16) float2 shared[];
static_assert(GROUPS == 1, "a thread keeps 16 points of the spectrum");

constexpr int BOX_ROW = N + 32 / CHANNELS;  // a box of rows that come in: x_j of channel c
constexpr int BOX = BOX_ROW * CHANNELS;

__device__ inline float2 twisted(float x, int r) { return {x * root64(r).x, x * root64(r).y}; }

// Shared memory for COUNT signals: transforms, boxes, tables, a barrier.
template <int COUNT>
struct Memory {
  float2* works;
  float* boxes;
  float4* middle;
  Barrier* came;
  int parity;

  __device__ Memory() {
    works = shared;
    boxes = reinterpret_cast<float*>(shared + COUNT * WORK);
    middle = reinterpret_cast<float4*>(boxes + COUNT * BOX);
    came = reinterpret_cast<Barrier*>(middle + MIDDLE);
    parity = 0;
    if (threadIdx.x == 0) barrier_start(came);
    __syncthreads();
  }
  __device__ float2* work(int k) { return works + k * WORK; }
  __device__ float* box(int k) { return boxes + k * BOX; }
  __device__ void wait() {
    barrier_wait(came, parity);
    parity ^= 1;
  }
};

struct Rows {  // which rows of a batch [B, H, stride] a block works on
  int first, count, H, stride;

  __device__ long long start(int batch, int c) const {
    return ((long long)batch * H + first + c) * stride;
  }
  // Thread 0 asks for them; so many bytes come for each signal.
  __device__ int bytes() const { return count * stride * 4; }
  __device__ void fetch(float* box, const float* x, int batch, Barrier* came) const {
    for (int c = 0; c < count; ++c)
      copy_to_shared(box + c * BOX_ROW, x + start(batch, c), stride * 4, came);
  }
};

__device__ inline Rows rows_of(int block, int H, int stride) {
  int spans = (H + CHANNELS - 1) / CHANNELS, first = block % spans * CHANNELS;
  return {first, min(CHANNELS, H - first), H, stride};
}

// Pass 1, from a box.
__device__ inline void read_signal(float2* work, const float* box, int L, const Tables& tables) {
  each_group([&](int, int j0, int c) {
    float2 v[16];
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      int j = j0 + r * FIRST;
      v[r] = twisted(j < L ? box[c * BOX_ROW + j] : 0.f, r);
    }
    first_pass(work, v, tables.turns(j0), j0, c);
  });
}

// The last inverse pass; y is the real part.
__device__ inline void write_signal(float* y, float2* work, const Rows& rows, int batch, int L,
                                    const Tables& tables) {
  each_group([&](int, int j0, int c) {
    float2 v[16];
    first_pass_back(work, v, tables.turns(j0), j0, c);
    float* to = y + rows.start(batch, c) + j0;
#pragma unroll
    for (int r = 0; r < 16; ++r)
      if (c < rows.count && j0 + r * FIRST < L)
        to[r * FIRST] = mul_conj(v[slot<16>(r)], root64(r)).x;
  });
}

// ------------------------------------------------------------------------- kernels

// y = the convolution of u with the kernels of `spectrum`; y may be u
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convolve(const float* u, float* y, const float2* spectrum, const float4* powers,
             const float2* twist, int B, int L, int stride, int H, int groups) {
  Memory<1> memory;
  float2* work = memory.work(0);
  Rows rows = rows_of(blockIdx.x, H, stride);
  int group = blockIdx.x / ((H + CHANNELS - 1) / CHANNELS);
  auto fetch = [&](int batch) {
    if (threadIdx.x || batch >= B) return;
    barrier_expect(memory.came, rows.bytes());
    rows.fetch(memory.box(0), u, batch, memory.came);
  };
  fetch(group);
  Tables tables = tables_at(memory.middle, powers, twist);
  float2 kernel[16];
  each_group([&](int, int j0, int c) {
    const float2* from = spectrum + (long long)min(rows.first + c, H - 1) * N + j0;
#pragma unroll
    for (int q = 0; q < 16; ++q) kernel[q] = streamed(from + q * FIRST);
  });
  for (int b = group; b < B; b += groups) {
    memory.wait();
    read_signal(work, memory.box(0), L, tables);
    __syncthreads();
    fetch(b + groups);
    middle_passes<false>({work}, tables);
    each_group([&](int, int j0, int c) {
      float2 v[16], product[16];
      last_pass(work, v, j0, c);
#pragma unroll
      for (int q = 0; q < 16; ++q) product[q] = mul(v[slot<16>(q)], kernel[q]);
      last_pass_back(work, product, j0, c);
    });
    __syncthreads();
    middle_passes<true>({work}, tables);
    write_signal(y, work, rows, b, L, tables);
  }
}

// The last pass of u; its spectrum stays in place.
__device__ inline void keep_spectrum(float2* work) {
  each_group([&](int, int j0, int c) {
    float2 v[16];
    last_pass(work, v, j0, c);
#pragma unroll
    for (int q = 0; q < 16; ++q) work[place(16 * j0, c) + q * CHANNELS] = v[slot<16>(q)];
  });
}

// The last pass of dy; sum += DY conj(U); DY <- DY conj(K) and back.
__device__ inline void correlate(float2* work, const float2* work_u, const float2* kernels,
                                 float2 (&sum)[16]) {
  each_group([&](int, int j0, int c) {
    float2 v[16], product[16];
    last_pass(work, v, j0, c);
    const float2 *U = work_u + place(16 * j0, c), *kernel = kernels + c * N + j0;
#pragma unroll
    for (int q = 0; q < 16; ++q) {
      float2 value = v[slot<16>(q)];
      sum[q] = add(sum[q], mul_conj(value, U[q * CHANNELS]));
      product[q] = mul_conj(value, kernel[q * FIRST]);
    }
    last_pass_back(work, product, j0, c);
  });
}

// dy <- the correlation of dy with the kernels, and for each group of sequences the spectrum of
// what it adds to the kernels' gradient: partial [groups, H, 16, N / 16] = sum conj(U) DY.
// u and dy are transformed together, and the kernels' spectrum comes into their boxes meanwhile.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convolve_backward(float* dy, const float* u, const float2* spectrum, float2* partial,
                      const float4* powers, const float2* twist, int B, int L, int stride, int H,
                      int groups) {
  Memory<2> memory;
  float2 *work = memory.work(0), *work_u = memory.work(1);
  Rows rows = rows_of(blockIdx.x, H, stride);
  int group = blockIdx.x / ((H + CHANNELS - 1) / CHANNELS);
  spectrum += (long long)rows.first * N;
  auto fetch = [&](int batch) {
    if (threadIdx.x || batch >= B) return;
    barrier_expect(memory.came, 2 * rows.bytes());
    rows.fetch(memory.box(0), dy, batch, memory.came);
    rows.fetch(memory.box(1), u, batch, memory.came);
  };
  fetch(group);
  Tables tables = tables_at(memory.middle, powers, twist);
  float2 sum[16] = {};
  for (int b = group; b < B; b += groups) {
    memory.wait();
    read_signal(work_u, memory.box(1), L, tables);
    read_signal(work, memory.box(0), L, tables);
    __syncthreads();
    if (threadIdx.x == 0) {
      barrier_expect(memory.came, rows.count * N * 8);
      copy_to_shared(memory.boxes, spectrum, rows.count * N * 8, memory.came);
    }
    middle_passes<false>({work, work_u}, tables);
    keep_spectrum(work_u);
    memory.wait();
    correlate(work, work_u, reinterpret_cast<float2*>(memory.boxes), sum);
    __syncthreads();
    fetch(b + groups);
    middle_passes<true>({work}, tables);
    write_signal(dy, work, rows, b, L, tables);
  }
  each_group([&](int, int j0, int c) {
    if (c >= rows.count) return;
    float2* to = partial + ((long long)group * H + rows.first + c) * N + j0;
#pragma unroll
    for (int q = 0; q < 16; ++q) to[q * FIRST] = sum[q];
  });
}
