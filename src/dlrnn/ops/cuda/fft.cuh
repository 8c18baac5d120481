// A complex FFT of N = 2^LOG2N points, in place in shared memory: radix 16 first and last, RADIX_A and RADIX_B
// between them. The spectrum stays in digit-reversed order: a convolution multiplies two spectra pointwise, and
// the inverse runs the passes backwards.
//
// A pass splits blocks of M points into RADIX parts, S = M / RADIX apart:
//   v_q <- w_M^(i q) sum_r v_r w_RADIX^(r q),   v_r at  block M + i + S r,   w_M = exp(-2 pi i / M).
// It needs one barrier, because a thread writes the points that it has read. Channels are interleaved, and one
// point of padding follows 16: no two lanes of a warp use the same bank.

constexpr int N = 1 << LOG2N;
constexpr int FIRST = N / 16;  // butterflies of radix 16 in one channel
constexpr int BUTTERFLIES = CHANNELS * FIRST / THREADS;  // of them in a thread
constexpr int PADDED = (N + N / 16) * CHANNELS;  // complex numbers of shared memory
static_assert(BUTTERFLIES * THREADS == CHANNELS * FIRST, "threads share the butterflies evenly");

// A team of THREADS threads computes one transform; a block may have several teams.
#ifndef TEAMS
#define TEAMS 1
#endif
__device__ inline int team() { return TEAMS == 1 ? 0 : threadIdx.x / THREADS; }
__device__ inline int team_rank() { return TEAMS == 1 ? threadIdx.x : threadIdx.x % THREADS; }
__device__ inline void team_sync() {
  if constexpr (TEAMS == 1) __syncthreads();
  else named_barrier(1 + team(), THREADS);
}

// ------------------------------------------------------------------------- passes

// The index of point j of channel c in shared memory.
__device__ inline int padded(int j, int c) { return (j + j / 16) * CHANNELS + c; }
// The distance in shared memory of points that differ by `stride`, a multiple of 16.
__device__ constexpr int padded_stride(int stride) { return (stride + stride / 16) * CHANNELS; }

// The twiddle factors of a thread in pass 1: (w_N^j0, w_N^4j0) and w_4N^j0.
struct FirstTwiddles {
  float4 powers;
  float2 twist;
};

// Pass 1 of the points j0 + FIRST r. TWISTED: they have been multiplied by w_4N^(FIRST r), and the rest of the
// factor w_4N^j is applied here.
template <bool TWISTED = true>
__device__ inline void first_pass(float2* work, float2 (&v)[16], FirstTwiddles twiddles, int j0, int c) {
  dft<16, false>(v);
  apply_twiddles<16, false, TWISTED>(v, twiddles.powers, twiddles.twist);
  float2* at = work + padded(j0, c);
#pragma unroll
  for (int q = 0; q < 16; ++q) at[q * padded_stride(FIRST)] = v[slot<16>(q)];
}

// The inverse: point j0 + FIRST r becomes v[slot<16>(r)]; TWISTED: it still has the factor w_4N^(FIRST r).
template <bool TWISTED = true>
__device__ inline void inverse_first_pass(const float2* work, float2 (&v)[16], FirstTwiddles twiddles, int j0,
                                          int c) {
  const float2* at = work + padded(j0, c);
#pragma unroll
  for (int q = 0; q < 16; ++q) v[q] = at[q * padded_stride(FIRST)];
  apply_twiddles<16, true, TWISTED>(v, twiddles.powers, twiddles.twist);
  dft<16, true>(v);
}

template <int RADIX, int STRIDE, bool INVERSE>
__device__ inline void middle_pass(float2* work, const float4* powers, int j0, int c) {
#pragma unroll
  for (int part = 0; part < 16 / RADIX; ++part) {
    int butterfly = j0 + part * FIRST, i = butterfly % STRIDE;
    float2* at = work + padded(butterfly / STRIDE * (STRIDE * RADIX) + i, c);
    float2 v[RADIX];
#pragma unroll
    for (int r = 0; r < RADIX; ++r) v[r] = at[r * padded_stride(STRIDE)];
    if (!INVERSE) dft<RADIX, false>(v);
    apply_twiddles<RADIX, INVERSE, false>(v, powers[i], float2{1.f, 0.f});
    if (INVERSE) dft<RADIX, true>(v);
#pragma unroll
    for (int q = 0; q < RADIX; ++q) at[q * padded_stride(STRIDE)] = v[slot<RADIX>(q)];
  }
}

// The last pass of 16 adjacent points, whose spectrum becomes v[slot<16>(q)].
__device__ inline void last_pass(const float2* work, float2 (&v)[16], int j0, int c) {
  const float2* at = work + padded(16 * j0, c);
#pragma unroll
  for (int r = 0; r < 16; ++r) v[r] = at[r * CHANNELS];
  dft<16, false>(v);
}

// The inverse, from the spectrum v[q].
__device__ inline void inverse_last_pass(float2* work, float2 (&v)[16], int j0, int c) {
  dft<16, true>(v);
  float2* at = work + padded(16 * j0, c);
#pragma unroll
  for (int r = 0; r < 16; ++r) at[r * CHANNELS] = v[slot<16>(r)];
}

// Calls body(part, j0, c) for each butterfly of this thread: its number j0 in channel c.
template <class Body>
__device__ inline void each_butterfly(Body body) {
#pragma unroll
  for (int part = 0; part < BUTTERFLIES; ++part) {
    int butterfly = team_rank() + part * THREADS;
    body(part, butterfly / CHANNELS, butterfly % CHANNELS);
  }
}

// The radices of the middle passes: N = 16 RADIX_A RADIX_B 16.
constexpr int RADIX_A = LOG2N >= 12 ? (LOG2N == 12 ? 16 : 8) : 1 << (LOG2N - 8);
constexpr int RADIX_B = N / 256 / RADIX_A;
constexpr int STRIDE_A = N / 16 / RADIX_A, STRIDE_B = 16;

// Tables: (w_M^i, w_M^4i), i < S, of pass 1 (in global memory) and of the middle passes (copied to shared memory);
// and w_4N^i, i < N / 16.
constexpr int MIDDLE = STRIDE_A + STRIDE_B;
struct Tables {
  const float4 *powers, *middle;
  const float2* twist;

  __device__ FirstTwiddles twiddles(int j0) const { return {__ldg(powers + j0), __ldg(twist + j0)}; }
};

__device__ inline Tables copy_tables(float4* middle, const float4* powers, const float2* twist) {
  for (int i = threadIdx.x; i < MIDDLE; i += THREADS) middle[i] = powers[FIRST + i];
  return {powers, middle, twist};
}

// The middle passes of several transforms, with a barrier of the team after each.
template <bool INVERSE, int COUNT>
__device__ inline void middle_passes(float2* const (&works)[COUNT], const Tables& tables) {
  auto pass_a = [&] {
    if constexpr (RADIX_A > 1) {
#pragma unroll
      for (int k = 0; k < COUNT; ++k)
        each_butterfly([&](int, int j0, int c) {
          middle_pass<RADIX_A, STRIDE_A, INVERSE>(works[k], tables.middle, j0, c);
        });
      team_sync();
    }
  };
  auto pass_b = [&] {
    if constexpr (RADIX_B > 1) {
#pragma unroll
      for (int k = 0; k < COUNT; ++k)
        each_butterfly([&](int, int j0, int c) {
          middle_pass<RADIX_B, STRIDE_B, INVERSE>(works[k], tables.middle + STRIDE_A, j0, c);
        });
      team_sync();
    }
  };
  if constexpr (INVERSE) pass_b(), pass_a();
  else pass_a(), pass_b();
}
