// A complex transform of N = 2^LOG2N points in shared memory: radix 16 first and last, the rest
// between. The spectrum stays in the order in which it falls out (digits reversed): convolution
// multiplies two spectra point by point and goes back.
//
// A pass splits blocks of M points into RADIX parts, S = M / RADIX apart:
//   v_q <- w_M^(i q) sum_r v_r w_RADIX^(r q),   v_r at  block M + i + S r,   w_M = exp(-2 pi i / M),
// in place, so one barrier a pass is enough. The inverse runs the passes backwards.
// Channels are interleaved, and one row of padding follows 16: no two lanes meet in a bank.

constexpr int N = 1 << LOG2N;
constexpr int FIRST = N / 16;  // butterflies of radix 16 in one channel
constexpr int GROUPS = CHANNELS * FIRST / THREADS;  // of them for one thread
constexpr int WORK = (N + N / 16) * CHANNELS;  // complex numbers of shared memory
static_assert(GROUPS * THREADS == CHANNELS * FIRST, "threads share the butterflies evenly");

// THREADS threads are a team, and transform together; a block may have several.
#ifndef TEAMS
#define TEAMS 1
#endif
__device__ inline int team() { return TEAMS == 1 ? 0 : threadIdx.x / THREADS; }
__device__ inline int member() { return TEAMS == 1 ? threadIdx.x : threadIdx.x % THREADS; }
__device__ inline void team_barrier() {
  if constexpr (TEAMS == 1) __syncthreads();
  else team_barrier(1 + team(), THREADS);
}

// ------------------------------------------------------------------------- passes

// Where point j of channel c lies.
__device__ inline int place(int j, int c) { return (j + j / 16) * CHANNELS + c; }
// How far apart points are that differ by `stride`, a multiple of 16.
__device__ constexpr int apart(int stride) { return (stride + stride / 16) * CHANNELS; }

// What a thread needs for the first pass: (w_N^j0, w_N^4j0) and w_4N^j0.
struct Turns {
  float4 powers;
  float2 twist;
};

// Pass 1 of the points j0 + FIRST r; if TWISTED, already times w_4N^(FIRST r).
template <bool TWISTED = true>
__device__ inline void first_pass(float2* work, float2 (&v)[16], Turns turns, int j0, int c) {
  dft<16, false>(v);
  twiddle<16, false, TWISTED>(v, turns.powers, turns.twist);
  float2* at = work + place(j0, c);
#pragma unroll
  for (int q = 0; q < 16; ++q) at[q * apart(FIRST)] = v[slot<16>(q)];
}

// And back: point j0 + FIRST r is v[slot<16>(r)], if TWISTED times conj(w_4N^(FIRST r)).
template <bool TWISTED = true>
__device__ inline void first_pass_back(const float2* work, float2 (&v)[16], Turns turns, int j0,
                                       int c) {
  const float2* at = work + place(j0, c);
#pragma unroll
  for (int q = 0; q < 16; ++q) v[q] = at[q * apart(FIRST)];
  twiddle<16, true, TWISTED>(v, turns.powers, turns.twist);
  dft<16, true>(v);
}

template <int RADIX, int STRIDE, bool INVERSE>
__device__ inline void middle_pass(float2* work, const float4* powers, int j0, int c) {
#pragma unroll
  for (int part = 0; part < 16 / RADIX; ++part) {
    int butterfly = j0 + part * FIRST, i = butterfly % STRIDE;
    float2* at = work + place(butterfly / STRIDE * (STRIDE * RADIX) + i, c);
    float2 v[RADIX];
#pragma unroll
    for (int r = 0; r < RADIX; ++r) v[r] = at[r * apart(STRIDE)];
    if (!INVERSE) dft<RADIX, false>(v);
    twiddle<RADIX, INVERSE, false>(v, powers[i], float2{1.f, 0.f});
    if (INVERSE) dft<RADIX, true>(v);
#pragma unroll
    for (int q = 0; q < RADIX; ++q) at[q * apart(STRIDE)] = v[slot<RADIX>(q)];
  }
}

// The last pass: 16 neighbours, whose spectrum is v[slot<16>(q)].
__device__ inline void last_pass(const float2* work, float2 (&v)[16], int j0, int c) {
  const float2* at = work + place(16 * j0, c);
#pragma unroll
  for (int r = 0; r < 16; ++r) v[r] = at[r * CHANNELS];
  dft<16, false>(v);
}

// And back, from a spectrum in the order of q.
__device__ inline void last_pass_back(float2* work, float2 (&v)[16], int j0, int c) {
  dft<16, true>(v);
  float2* at = work + place(16 * j0, c);
#pragma unroll
  for (int r = 0; r < 16; ++r) at[r * CHANNELS] = v[slot<16>(r)];
}

// For each of this thread's butterflies: its number in the channel, and the channel.
template <class Body>
__device__ inline void each_group(Body body) {
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) {
    int butterfly = member() + group * THREADS;
    body(group, butterfly / CHANNELS, butterfly % CHANNELS);
  }
}

// The radices between the first and the last: N = 16 RADIX_A RADIX_B 16.
constexpr int RADIX_A = LOG2N >= 12 ? (LOG2N == 12 ? 16 : 8) : 1 << (LOG2N - 8);
constexpr int RADIX_B = N / 256 / RADIX_A;
constexpr int STRIDE_A = N / 16 / RADIX_A, STRIDE_B = 16;

// The tables: (w_M^i, w_M^4i), i < S, for the first pass (in global memory) and the two between
// (copied to shared memory); and w_4N^i, i < N / 16.
constexpr int MIDDLE = STRIDE_A + STRIDE_B;
struct Tables {
  const float4 *powers, *middle;
  const float2* twist;

  __device__ Turns turns(int j0) const { return {__ldg(powers + j0), __ldg(twist + j0)}; }
  // The same, but not known to be: for a `step` of a loop below 2^30. Else the compiler keeps what it
  // has computed from the tables, for the next step and for the way back, in more registers than are.
  __device__ Tables again(int step) const {
    int zero = step >> 30;
    return {powers + zero, middle + zero, twist + zero};
  }
};

__device__ inline Tables tables_at(float4* middle, const float4* powers, const float2* twist) {
  for (int i = threadIdx.x; i < MIDDLE; i += THREADS) middle[i] = powers[FIRST + i];
  return {powers, middle, twist};
}

// The passes between, of several transforms at once; a barrier after each is here.
template <bool INVERSE, int COUNT>
__device__ inline void middle_passes(float2* const (&works)[COUNT], const Tables& tables) {
  auto pass_a = [&] {
    if constexpr (RADIX_A > 1) {
#pragma unroll
      for (int k = 0; k < COUNT; ++k)
        each_group([&](int, int j0, int c) {
          middle_pass<RADIX_A, STRIDE_A, INVERSE>(works[k], tables.middle, j0, c);
        });
      team_barrier();
    }
  };
  auto pass_b = [&] {
    if constexpr (RADIX_B > 1) {
#pragma unroll
      for (int k = 0; k < COUNT; ++k)
        each_group([&](int, int j0, int c) {
          middle_pass<RADIX_B, STRIDE_B, INVERSE>(works[k], tables.middle + STRIDE_A, j0, c);
        });
      team_barrier();
    }
  };
  if constexpr (INVERSE) pass_b(), pass_a();
  else pass_a(), pass_b();
}
