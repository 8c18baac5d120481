// Transforms that are too long for one block: N = 16 S points. A column pass takes point i of each of
// the 16 parts, S apart, and leaves 16 rows of S points; rows are then transforms of their own
// (rows.cu), or are split once more. What the complex signals mean: convolution.cu.
//   in:  Z[q][i] = w_4N^(i (4 q + 1)) sum_r w_16^(r q) w_64^r z[i + S r]

constexpr int CHANNELS = 32, ALONG = THREADS / CHANNELS;  // channels, and points i, of a block
constexpr int PADDED = ALONG + 1;

extern __shared__ float2 shared[];

__device__ inline void in(float2 (&v)[16], const float4* powers, const float2* twist, int i) {
  dft<16, false>(v);
  twiddle<16, false, true>(v, powers[i], twist[i]);
}
__device__ inline void out(float2 (&v)[16], const float4* powers, const float2* twist, int i) {
  twiddle<16, true, true>(v, powers[i], twist[i]);
  dft<16, true>(v);
}

// A block's place: ALONG points from `first` on, CHANNELS channels from `channel` on, a sequence.
struct Place {
  int first, channel, batch;
};
__device__ inline Place place_of(int S, int H) {
  int along = S / ALONG, across = (H + CHANNELS - 1) / CHANNELS, block = blockIdx.x;
  return {block % along * ALONG, block / along % across * CHANNELS, block / along / across};
}

// u [B, L, H] -> Z [B, H, 16, S]
extern "C" __global__ void __launch_bounds__(THREADS)
    columns_in(const Stored* u, float2* Z, const float4* powers, const float2* twist, int L, int H,
               int S) {
  Place at = place_of(S, H);
  int c = threadIdx.x % CHANNELS, k = threadIdx.x / CHANNELS, i = at.first + k;
  float2 v[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    int j = i + r * S, h = at.channel + c;
    bool there = j < L && h < H;
    float x = there ? widened(u[((long long)at.batch * L + j) * H + h]) : 0.f;
    v[r] = {x * root64(r).x, x * root64(r).y};
  }
  in(v, powers, twist, i);
#pragma unroll
  for (int q = 0; q < 16; ++q) shared[(q * CHANNELS + c) * PADDED + k] = v[slot<16>(q)];
  __syncthreads();
  k = threadIdx.x % ALONG, c = threadIdx.x / ALONG;
  if (at.channel + c >= H) return;
  float2* to = Z + ((long long)at.batch * H + at.channel + c) * 16 * S + at.first + k;
#pragma unroll
  for (int q = 0; q < 16; ++q) to[(long long)q * S] = shared[(q * CHANNELS + c) * PADDED + k];
}

// Z [B, H, 16, S] -> y [B, L, H]
extern "C" __global__ void __launch_bounds__(THREADS)
    columns_out(const float2* Z, Stored* y, const float4* powers, const float2* twist, int L, int H,
                int S) {
  Place at = place_of(S, H);
  int k = threadIdx.x % ALONG, c = threadIdx.x / ALONG;
  const float2* from =
      Z + ((long long)at.batch * H + min(at.channel + c, H - 1)) * 16 * S + at.first + k;
#pragma unroll
  for (int q = 0; q < 16; ++q)
    shared[(q * CHANNELS + c) * PADDED + k] = streamed(from + (long long)q * S);
  __syncthreads();
  c = threadIdx.x % CHANNELS, k = threadIdx.x / CHANNELS;
  int i = at.first + k, h = at.channel + c;
  float2 v[16];
#pragma unroll
  for (int q = 0; q < 16; ++q) v[q] = shared[(q * CHANNELS + c) * PADDED + k];
  out(v, powers, twist, i);
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    int j = i + r * S;
    if (j < L && h < H)
      y[((long long)at.batch * L + j) * H + h] = narrowed(mul_conj(v[slot<16>(r)], root64(r)).x);
  }
}

// right, left [H, K] -> Z [H, 16, S]
extern "C" __global__ void __launch_bounds__(THREADS)
    kernel_columns_in(const float* right, const float* left, float2* Z, const float4* powers,
                      const float2* twist, int K_right, int K_left, int S) {
  int h = blockIdx.x / (S / THREADS), i = blockIdx.x % (S / THREADS) * THREADS + threadIdx.x;
  float2 v[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    int j = i + r * S, back = 16 * S - 1 - j;
    float2 z = {0.f, 0.f};
    if (j < K_right) z.x = right[(long long)h * K_right + j];
    if (back < K_left) z.y = left[(long long)h * K_left + back];
    v[r] = mul(z, root64(r));
  }
  in(v, powers, twist, i);
#pragma unroll
  for (int q = 0; q < 16; ++q) Z[((long long)h * 16 + q) * S + i] = v[slot<16>(q)];
}

// Z [H, 16, S] -> d_right, d_left [H, K]
extern "C" __global__ void __launch_bounds__(THREADS)
    kernel_columns_out(const float2* Z, float* d_right, float* d_left, const float4* powers,
                       const float2* twist, int K_right, int K_left, int S) {
  int h = blockIdx.x / (S / THREADS), i = blockIdx.x % (S / THREADS) * THREADS + threadIdx.x;
  float2 v[16];
#pragma unroll
  for (int q = 0; q < 16; ++q) v[q] = Z[((long long)h * 16 + q) * S + i];
  out(v, powers, twist, i);
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    int j = i + r * S, back = 16 * S - 1 - j;
    float2 z = mul_conj(v[slot<16>(r)], root64(r));
    if (j < K_right) d_right[(long long)h * K_right + j] = z.x;
    if (back < K_left) d_left[(long long)h * K_left + back] = z.y;
  }
}

// Rows of 16 S points -> 16 rows of S, and back, in place.
extern "C" __global__ void __launch_bounds__(THREADS)
    split_rows(float2* Z, const float4* powers, int S) {
  int i = blockIdx.x % (S / THREADS) * THREADS + threadIdx.x;
  float2* at = Z + (long long)(blockIdx.x / (S / THREADS)) * 16 * S + i;
  float2 v[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) v[r] = streamed(at + (long long)r * S);
  dft<16, false>(v);
  twiddle<16, false, false>(v, powers[i], float2{1.f, 0.f});
#pragma unroll
  for (int q = 0; q < 16; ++q) at[(long long)q * S] = v[slot<16>(q)];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    join_rows(float2* Z, const float4* powers, int S) {
  int i = blockIdx.x % (S / THREADS) * THREADS + threadIdx.x;
  float2* at = Z + (long long)(blockIdx.x / (S / THREADS)) * 16 * S + i;
  float2 v[16];
#pragma unroll
  for (int q = 0; q < 16; ++q) v[q] = streamed(at + (long long)q * S);
  twiddle<16, true, false>(v, powers[i], float2{1.f, 0.f});
  dft<16, true>(v);
#pragma unroll
  for (int r = 0; r < 16; ++r) at[(long long)r * S] = v[slot<16>(r)];
}
