// The negacyclic FFT. A product of real sequences modulo X^2N + 1 (entries that wrap around change sign) is a product
// of complex polynomials modulo X^N + i (convolution.cu). With e(x) = exp(-2 pi i x) and N = RESIDUES M, such a
// polynomial is given by its residues modulo X^M - e((1/4 + p) / RESIDUES), p < RESIDUES. Each is transformed on its
// own.
//
// A residue modulo X^M - e(x) splits into one modulo X^(M/2) - e(x/2) and one modulo X^(M/2) - e((x+1)/2):
// z_j + e(x/2) z_(j+M/2), and the same with a minus. The twiddle factor does not depend on j, so that there is no table
// with an entry for each point, and a butterfly is six multiply-adds including its twiddle factor. Four such steps in
// registers are a pass of radix 16. Residues of one point are the spectrum, in bit-reversed order. The inverse,
// sum_q V_q conj(e((x + q) / R))^j, runs the same steps, where x is a position.
//
// A residue of M = 16 A 16 points is in the shared memory of a team of M / 16 threads, with two points of padding after
// 16, so that there are no bank conflicts. Thread t has, in pass 1, the points t + r M / 16, r < 16; in pass 2,
// 16 / A butterflies of residue t / A (of 16 A points); in pass 3, residue t (of 16 points). So the data that passes 2
// and 3 exchange stays within a warp.

constexpr int M = 1 << LOG2M;
constexpr int A = M / 256;
constexpr int TEAM_SIZE = M / 16;  // threads of a team
constexpr int PADDED = M + M / 8;  // complex numbers of shared memory of a team
constexpr int THREADS = TEAMS * TEAM_SIZE;

// Programmatic dependent launch (compute capability 9.0 and later): waits for the previous kernel; then the next one
// may start, and wait in its turn.
__device__ inline void wait_for_previous_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ inline int team() { return TEAMS == 1 ? 0 : threadIdx.x / TEAM_SIZE; }
__device__ inline int team_rank() { return TEAMS == 1 ? threadIdx.x : threadIdx.x % TEAM_SIZE; }
// Synchronises the threads of a team that are in one warp.
__device__ inline void team_warp_sync() {
  __syncwarp(TEAM_SIZE < 32 ? 0xffffu << threadIdx.x % 32 / 16 * 16 : 0xffffffffu);
}
__device__ inline void team_sync() {
  if constexpr (TEAM_SIZE <= 32) team_warp_sync();
  else if constexpr (TEAMS == 1) __syncthreads();
  else named_barrier(1 + team(), TEAM_SIZE);
}

__device__ constexpr int padded(int j) { return j + j / 16 * 2; }

// ------------------------------------------------------------------------- constant twiddle factors

template <int ORDER>
struct Cosines {
  float of[ORDER / 4 + 1];
};
template <int ORDER>
__device__ constexpr Cosines<ORDER> cosines() {
  Cosines<ORDER> table = {};
  for (int k = 0; k < ORDER / 4; ++k) {
    double x = 6.28318530717958647692 * k / ORDER, term = 1, sum = 1;
    for (int n = 1; n < 16; ++n) term *= -x * x / ((2 * n - 1) * (2 * n)), sum += term;
    table.of[k] = (float)sum;
  }
  return table;
}
// exp(-2 pi i k / ORDER): a constant at compile time, because all uses are unrolled
template <int ORDER>
__device__ inline float2 root(int k) {
  constexpr Cosines<ORDER> cosine = cosines<ORDER>();
  constexpr int Q = ORDER / 4;
  int rest = k % Q;
  float c = cosine.of[rest], s = cosine.of[Q - rest];
  switch (k / Q % 4) {
    case 0: return {c, -s};
    case 1: return {-s, -c};
    case 2: return {-c, s};
    default: return {s, c};
  }
}

// ------------------------------------------------------------------------- passes

// The twiddle factors of a residue modulo X^n - e(x) for a pass of radix 16: e(x / 2), e(x / 4), e((x + k) / 8),
// e((x + k) / 16). A pass of a smaller radix uses the first of them. The inverse uses their conjugates.
struct Twiddles {
  float2 half, quarter, eighth[2], sixteenth[4];
};

// The twiddle factors with k = 0, as a table stores them: first `low` of all entries, then `high`.
struct Seeds {
  float4 low, high;
};
__device__ inline Seeds load_seeds(const float4* table, int count, int i) {
  return {table[i], table[count + i]};
}
// All twiddle factors; those with k > 0 are rotated.
template <bool INVERSE>
__device__ inline float2 rotated(float2 w, int sixteenths) {
  return twiddle_mul<INVERSE>(w, root<16>(sixteenths));
}
template <bool INVERSE>
__device__ inline Twiddles twiddles_from(Seeds of) {
  float2 e = {of.high.x, of.high.y}, s = {of.high.z, of.high.w};
  return {{of.low.x, of.low.y}, {of.low.z, of.low.w}, {e, rotated<INVERSE>(e, 2)},
          {s, rotated<INVERSE>(s, 1), rotated<INVERSE>(s, 2), rotated<INVERSE>(s, 3)}};
}

// a, b <- a + w b, a - w b
__device__ inline void butterfly(float2& a, float2& b, float2 w) {
  float2 sum = {fmaf(w.x, b.x, a.x), fmaf(w.x, b.y, a.y)};
  sum = {fmaf(-w.y, b.y, sum.x), fmaf(w.y, b.x, sum.y)};
  b = {fmaf(2.f, a.x, -sum.x), fmaf(2.f, a.y, -sum.y)};
  a = sum;
}

// The index of output q of `evaluate`: its bits in reverse order.
template <int RADIX>
__device__ constexpr int bit_reversed(int q) {
  return ((q & 1) * 8 + (q & 2) * 2 + (q & 4) / 2 + (q & 8) / 8) * RADIX / 16;
}

// v <- sum_r v_r e((x + q) / RADIX)^r for all q, from step STEP on
template <int RADIX, bool INVERSE, int STEP = 0>
__device__ inline void evaluate(float2 (&v)[RADIX], const Twiddles& twiddles) {
  constexpr int SPAN = RADIX >> (STEP + 1);
#pragma unroll
  for (int i = 0; i < RADIX / 2; ++i) {
    int residue = i / SPAN;  // odd: its factor has e(1/4) more than that of the residue before
    int k = STEP == 2 ? residue / 2 : residue / 4 + residue / 2 % 2 * 2;
    float2 w = STEP == 0 ? twiddles.half : STEP == 1 ? twiddles.quarter
             : STEP == 2 ? twiddles.eighth[k % 2] : twiddles.sixteenth[k];
    float2 &a = v[i + SPAN * residue], &b = v[i + SPAN * residue + SPAN];
    if (residue % 2) b = mul_w4<INVERSE>(b);
    butterfly(a, b, w);
  }
  if constexpr (SPAN > 1) evaluate<RADIX, INVERSE, STEP + 1>(v, twiddles);
}

// Stores the results of pass 1 where the points t + r M / 16 were.
__device__ inline void store_pass1(float2* work, const float2 (&v)[16], int t) {
  float2* at = work + padded(t);
#pragma unroll
  for (int q = 0; q < 16; ++q) at[q * padded(TEAM_SIZE)] = v[bit_reversed<16>(q)];
}

// The inverse of pass 1: point t + r M / 16, times `twist`, becomes v[bit_reversed<16>(r)].
__device__ inline void inverse_pass1(const float2* work, float2 (&v)[16], Seeds thread_seeds, float2 twist,
                                     int t) {
  const float2* at = work + padded(t);
#pragma unroll
  for (int q = 0; q < 16; ++q) v[q] = at[q * padded(TEAM_SIZE)];
  Twiddles twiddles = twiddles_from<true>(thread_seeds);
  float2 half = mul(twist, twiddles.half);
#pragma unroll
  for (int q = 0; q < 8; ++q) v[q] = mul(twist, v[q]), butterfly(v[q], v[q + 8], half);
  evaluate<16, true, 1>(v, twiddles);
}

// Pass 2, in place. `table` has an entry for each residue, for the inverse one for each position in 16.
template <bool INVERSE>
__device__ inline void pass2(float2* work, const float4* table, int t) {
  float2* residue = work + t / A * padded(16 * A);
  if constexpr (A == 16) {
    float2 v[16], *at = residue + t % 16;
#pragma unroll
    for (int r = 0; r < 16; ++r) v[r] = at[r * 18];
    evaluate<16, INVERSE>(v, twiddles_from<INVERSE>(load_seeds(table, 16, INVERSE ? t % 16 : t / 16)));
#pragma unroll
    for (int q = 0; q < 16; ++q) at[q * 18] = v[bit_reversed<16>(q)];
  } else if constexpr (A > 1) {
    Twiddles twiddles = twiddles_from<INVERSE>(load_seeds(table, 16, t / A));
#pragma unroll
    for (int k = 0; k < 8 / A; ++k) {  // two adjacent points at a time
      int i = 2 * (t % A + k * A);
      float4* at = reinterpret_cast<float4*>(residue + i);
      float2 v[A], w[A];
#pragma unroll
      for (int r = 0; r < A; ++r) {
        float4 two = at[r * 9];
        v[r] = {two.x, two.y}, w[r] = {two.z, two.w};
      }
      evaluate<A, INVERSE>(v, INVERSE ? twiddles_from<INVERSE>(load_seeds(table, 16, i)) : twiddles);
      evaluate<A, INVERSE>(w, INVERSE ? twiddles_from<INVERSE>(load_seeds(table, 16, i + 1)) : twiddles);
#pragma unroll
      for (int q = 0; q < A; ++q) {
        float2 a = v[bit_reversed<A>(q)], b = w[bit_reversed<A>(q)];
        at[q * 9] = {a.x, a.y, b.x, b.y};
      }
    }
  }
}

// Pass 3: the spectrum of residue t, with point q in v[bit_reversed<16>(q)]; calls after_read() once the thread has
// read `work`.
template <class Read>
__device__ inline void pass3(const float2* work, float2 (&v)[16], Seeds residue_seeds, int t, Read after_read) {
  const float4* at = reinterpret_cast<const float4*>(work + t * 18);
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    float4 two = at[r];
    v[2 * r] = {two.x, two.y}, v[2 * r + 1] = {two.z, two.w};
  }
  after_read();
  evaluate<16, false>(v, twiddles_from<false>(residue_seeds));
}

// The inverse of pass 3, from the spectrum v[q].
__device__ inline void inverse_pass3(float2* work, float2 (&v)[16], int t) {
  dft<16, true>(v);
  float4* at = reinterpret_cast<float4*>(work + t * 18);
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    float2 a = v[slot<16>(2 * r)], b = v[slot<16>(2 * r + 1)];
    at[r] = {a.x, a.y, b.x, b.y};
  }
}

// ------------------------------------------------------------------------- tables

// Tables, in this order: seeds of the 16 positions (inverse of pass 2); for each residue the twiddle factors of its
// segments, its own seeds (pass 1) and those of its 16 residues (pass 2); seeds of the threads (inverse of pass 1); for
// each residue the seeds of its M / 16 residues (pass 3). All but the last two are copied to shared memory.
constexpr int POSITION_TABLE = 32, RESIDUE_TABLE = RESIDUES + 2 + 32, THREAD_TABLE = 2 * TEAM_SIZE;

struct Tables {
  const float4 *position_seeds, *residue, *thread_seeds, *pass3_seeds;

  __device__ Seeds thread(int t) const { return load_seeds(thread_seeds, TEAM_SIZE, t); }
  __device__ float2 segment(int k) const { return reinterpret_cast<const float2*>(residue)[k]; }
  __device__ Twiddles first() const { return twiddles_from<false>(load_seeds(residue + RESIDUES, 1, 0)); }
  __device__ const float4* sixteen() const { return residue + RESIDUES + 2; }
  __device__ Seeds last(int t) const { return load_seeds(pass3_seeds, TEAM_SIZE, t); }
};

__device__ inline void copy_table(float4* to, const float4* from, int count) {
  for (int i = threadIdx.x; i < count; i += THREADS) to[i] = from[i];
}
// Copies the tables of residues from `residue` to `residue` + count, by all threads; __syncthreads must follow. Returns
// the tables of one of them, residue + selected.
__device__ inline Tables copy_tables(float4* to, const float4* all, int residue, int count, int selected) {
  copy_table(to, all, POSITION_TABLE);
  copy_table(to + POSITION_TABLE, all + POSITION_TABLE + residue * RESIDUE_TABLE, count * RESIDUE_TABLE);
  const float4* threads = all + POSITION_TABLE + RESIDUES * RESIDUE_TABLE;
  return {to, to + POSITION_TABLE + selected * RESIDUE_TABLE, threads,
          threads + (1 + residue + selected) * THREAD_TABLE};
}
// Copies the last two tables, too.
__device__ inline Tables copy_large_tables(float4* to, Tables tables, int count, int selected) {
  copy_table(to, tables.thread_seeds, THREAD_TABLE);
  copy_table(to + THREAD_TABLE, tables.pass3_seeds - selected * THREAD_TABLE, count * THREAD_TABLE);
  return {tables.position_seeds, tables.residue, to, to + (1 + selected) * THREAD_TABLE};
}

// Passes 2 and 3 of a team's `work`; last() returns the seeds of residue t in pass 3.
template <class Last, class Read>
__device__ inline void to_spectrum(float2* work, float2 (&v)[16], const Tables& tables, int t,
                                   Last last, Read after_read) {
  pass2<false>(work, tables.sixteen(), t);
  if constexpr (A > 1) team_warp_sync();
  pass3(work, v, last(), t, after_read);
}
// Their inverses; before inverse_pass1 the team must synchronise.
__device__ inline void inverse_pass2(float2* work, const Tables& tables, int t) {
  if constexpr (A > 1) team_warp_sync();
  pass2<true>(work, tables.position_seeds, t);
}
__device__ inline void from_spectrum(float2* work, float2 (&v)[16], const Tables& tables, int t) {
  inverse_pass3(work, v, t);
  inverse_pass2(work, tables, t);
}

// ------------------------------------------------------------------------- segments

// Segment k of a row of real entries has the entries from M k on. Modulo X^N + i the row has RESIDUES residues. Residue
// p is modulo X^M - e((1/4 + p) / RESIDUES); its point j is the sum over k of entry j + M k times
// e((1/4 + p) k / RESIDUES).

// The contribution of a residue to entry t + r M / 16 of segment k.
template <int RESIDUE>
__device__ inline float contribution(const float2 (&v)[16], int k, int r) {
  float2 z = v[bit_reversed<16>(r)], w = root<64 * RESIDUES>((1 + 4 * RESIDUE) * (16 * k + r));
  return z.x * w.x + z.y * w.y;
}

// Multiplies point r of a residue modulo X^M - e(x) by conj(e(x r / 16)), by one factor for each bit of r.
__device__ inline void untwist(float2 (&v)[16], const Twiddles& by) {
#pragma unroll
  for (int r = 1; r < 16; ++r) {
    float2& z = v[bit_reversed<16>(r)];
    if (r & 8) z = mul_conj(z, by.half);
    if (r & 4) z = mul_conj(z, by.quarter);
    if (r & 2) z = mul_conj(z, by.eighth[0]);
    if (r & 1) z = mul_conj(z, by.sixteenth[0]);
  }
}

// The input of pass 1 from real entries: x(k, r) is entry t + r M / 16 of segment k. Segments FROM to TO are added to
// the points of a residue. With one residue this includes the first step of pass 1; finish_pass1 does the rest.
template <int FROM, int TO, class Entries>
__device__ inline void fold_segments(float2 (&v)[16], const Tables& tables, Entries x) {
  if constexpr (RESIDUES == 1) {
    constexpr float h = .70710678118654752440f;  // e(1/8) = h - i h
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      float a = x(0, r), b = x(0, r + 8), s = h * b;
      v[r] = {a + s, -s}, v[r + 8] = {a - s, s};
    }
  } else {
#pragma unroll
    for (int k = FROM; k < TO; ++k) {
      float2 w = tables.segment(k);
#pragma unroll
      for (int r = 0; r < 16; ++r) {
        float a = x(k, r);
        v[r] = k == 0   ? float2{a, 0.f}
               : k == 1 ? float2{fmaf(a, w.x, v[r].x), a * w.y}
                        : float2{fmaf(a, w.x, v[r].x), fmaf(a, w.y, v[r].y)};
      }
    }
  }
}
__device__ inline void finish_pass1(float2 (&v)[16], const Tables& tables) {
  if constexpr (RESIDUES == 1) {
    Twiddles twiddles = {root<64>(8), root<64>(4), {root<64>(2), root<64>(10)},
                   {root<64>(1), root<64>(5), root<64>(9), root<64>(13)}};
    evaluate<16, false, 1>(v, twiddles);
  } else {
    evaluate<16, false>(v, tables.first());
  }
}

// Entry r of a thread in segment k has index t + entry_index(k, r). It is inside the row if that index is below the
// length: `remaining` is the length less t. The first half of a row is always inside.
__device__ constexpr int entry_index(int k, int r) { return k * M + r * TEAM_SIZE; }
__device__ inline bool is_inside(int k, int r, int remaining) {
  return entry_index(k, r) + TEAM_SIZE <= SEGMENTS * M / 2 || entry_index(k, r) < remaining;
}

// ------------------------------------------------------------------------- teams

// A barrier of a team in two halves (an mbarrier): code between arrive() and wait() runs without waiting.
struct SplitBarrier {
  Mbarrier* at;
  int parity;

  __device__ void arrive() {
    if constexpr (TEAM_SIZE > 32) {
      team_warp_sync();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(at);
    }
  }
  __device__ void wait() {
    if constexpr (TEAM_SIZE > 32) {
      mbarrier_wait(at, parity);
      parity ^= 1;
    } else {
      team_warp_sync();
    }
  }
};

// Two teams share a row: one signals that it has written or read, the other waits. Added to these numbers of named
// barriers are the team that owns the points, and 2 for every other row.
__device__ inline void signal(int number) { named_barrier_arrive(number, THREADS); }
constexpr int WRITTEN = 3, READ = 7;

// ------------------------------------------------------------------------- spectra of u, kept for backward

// With KEPT the forward kernel writes the spectra of u in bf16, [B, H, RESIDUES, 4, M / 16, 4] pairs, and the backward
// kernel reads them instead of u. Points 4 k to 4 k + 3 of residue t of pass 3 are at [.., k, t, :].
#ifndef KEPT
#define KEPT 0
#endif
#if KEPT
__device__ inline long long kept_at(long long row, int residue, int t) {  // row: sequence H + channel
  return (row * RESIDUES + residue) * (M / 4) + t;
}
__device__ inline void keep_spectrum(uint4* to, const float2 (&v)[16]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    unsigned pairs[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float2 point = v[bit_reversed<16>(4 * k + e)];
      pairs[e] = narrow_pair(point.x, point.y);
    }
    to[k * TEAM_SIZE] = {pairs[0], pairs[1], pairs[2], pairs[3]};
  }
}
struct KeptSpectrum {
  uint4 pairs[4];

  __device__ void load(const uint4* from) {
#pragma unroll
    for (int k = 0; k < 4; ++k) pairs[k] = from[k * TEAM_SIZE];
  }
  __device__ float2 point(int q) const {
    uint4 four = pairs[q / 4];
    unsigned pair = q % 4 == 0 ? four.x : q % 4 == 1 ? four.y : q % 4 == 2 ? four.z : four.w;
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
};
#endif

// Copies 16 bytes into shared memory, where this thread finds them after wait_for_own_copies.
__device__ inline void copy_own_16(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// *sum += (a, b), to which no other thread adds: where possible a vector reduction in global memory without a result
__device__ inline void add_to(float4* sum, float2 a, float2 b) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               ::"l"(sum), "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y));
#else
  float4 old = *sum;
  *sum = {old.x + a.x, old.y + a.y, old.z + b.x, old.w + b.y};
#endif
}
