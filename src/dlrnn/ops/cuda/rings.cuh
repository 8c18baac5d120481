// Rings: what a convolution of N points is done in, without a table of turns for each point.
//
// A polynomial modulo X^M = e(x), e(x) = exp(-2 pi i x), is one modulo X^(M/2) = e(x/2) and one
// modulo X^(M/2) = e((x+1)/2): z_j + e(x/2) z_(j+M/2), and the same with a minus. A turn depends on
// the ring alone, and a butterfly is six multiply-adds with its turn in it. Four such steps at a time
// in registers are a pass of radix 16; the last ring's points are the spectrum, in the order in which
// it falls out. Back it is sum_q V_q conj(e((x + q) / R))^j, the same steps with x the place in a ring.
//
// M = 16 A 16 points lie in shared memory for a team of M / 16 threads, two entries of padding after
// 16: no two lanes meet in a bank. Thread t has, in pass 1, the points t + r M / 16, of q = 0 .. 15;
// in pass 2 ring t / A of 16 A points, in 16 / A butterflies; in pass 3 ring t of 16 points. So what is
// exchanged between 2 and 3 stays within a warp.

constexpr int M = 1 << LOG2M;
constexpr int A = M / 256;
constexpr int MEMBERS = M / 16;  // of a team
constexpr int WORK = M + M / 8;  // complex numbers of shared memory for a team
constexpr int THREADS = TEAMS * MEMBERS;

// Waits until the kernel before this one is done; then the next one may start, and wait in turn.
__device__ inline void previous_done() {
  asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
}

__device__ inline int team() { return TEAMS == 1 ? 0 : threadIdx.x / MEMBERS; }
__device__ inline int member() { return TEAMS == 1 ? threadIdx.x : threadIdx.x % MEMBERS; }
// Those of a team that are in one warp.
__device__ inline void near_wait() {
  __syncwarp(MEMBERS < 32 ? 0xffffu << threadIdx.x % 32 / 16 * 16 : 0xffffffffu);
}
__device__ inline void team_wait() {
  if constexpr (MEMBERS <= 32) near_wait();
  else if constexpr (TEAMS == 1) __syncthreads();
  else team_barrier(1 + team(), MEMBERS);
}

__device__ constexpr int place(int j) { return j + j / 16 * 2; }

// ------------------------------------------------------------------------- known turns

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
// exp(-2 pi i k / ORDER), known at compile time wherever this is used
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

// The turns of a ring modulo X^. = e(x) for a pass of radix 16: e(x / 2), e(x / 4), e((x + k) / 8),
// e((x + k) / 16); those of a smaller radix are the first of them. Back: their conjugates.
struct Roots {
  float2 half, quarter, eighth[2], sixteenth[4];
};

// Those with k = 0, as a table has them: all first halves, then all second ones.
struct Entry {
  float4 low, high;
};
__device__ inline Entry entry(const float4* table, int count, int i) {
  return {table[i], table[count + i]};
}
// The others follow from them.
template <bool INVERSE>
__device__ inline float2 turned(float2 w, int sixteenths) {
  return turn<INVERSE>(w, root<16>(sixteenths));
}
template <bool INVERSE>
__device__ inline Roots roots_of(Entry of) {
  float2 e = {of.high.x, of.high.y}, s = {of.high.z, of.high.w};
  return {{of.low.x, of.low.y}, {of.low.z, of.low.w}, {e, turned<INVERSE>(e, 2)},
          {s, turned<INVERSE>(s, 1), turned<INVERSE>(s, 2), turned<INVERSE>(s, 3)}};
}

// a, b <- a + w b, a - w b
__device__ inline void butterfly(float2& a, float2& b, float2 w) {
  float2 sum = {fmaf(w.x, b.x, a.x), fmaf(w.x, b.y, a.y)};
  sum = {fmaf(-w.y, b.y, sum.x), fmaf(w.y, b.x, sum.y)};
  b = {fmaf(2.f, a.x, -sum.x), fmaf(2.f, a.y, -sum.y)};
  a = sum;
}

// Where output q of `evaluate` lies: its bits backwards.
template <int RADIX>
__device__ constexpr int reversed(int q) {
  return ((q & 1) * 8 + (q & 2) * 2 + (q & 4) / 2 + (q & 8) / 8) * RADIX / 16;
}

// v <- its values sum_r v_r e((x + q) / RADIX)^r, from step STEP on
template <int RADIX, bool INVERSE, int STEP = 0>
__device__ inline void evaluate(float2 (&v)[RADIX], const Roots& roots) {
  constexpr int SPAN = RADIX >> (STEP + 1);
#pragma unroll
  for (int i = 0; i < RADIX / 2; ++i) {
    int ring = i / SPAN;  // its last bit: e(1/4) more than the ring before
    int k = STEP == 2 ? ring / 2 : ring / 4 + ring / 2 % 2 * 2;
    float2 w = STEP == 0 ? roots.half : STEP == 1 ? roots.quarter
             : STEP == 2 ? roots.eighth[k % 2] : roots.sixteenth[k];
    float2 &a = v[i + SPAN * ring], &b = v[i + SPAN * ring + SPAN];
    if (ring % 2) b = quarter<INVERSE>(b);
    butterfly(a, b, w);
  }
  if constexpr (SPAN > 1) evaluate<RADIX, INVERSE, STEP + 1>(v, roots);
}

// Pass 1's results, from where the points t + r M / 16 lay.
__device__ inline void put_first(float2* work, const float2 (&v)[16], int t) {
  float2* at = work + place(t);
#pragma unroll
  for (int q = 0; q < 16; ++q) at[q * place(MEMBERS)] = v[reversed<16>(q)];
}

// Back: point t + r M / 16, times `start`, is v[reversed<16>(r)].
__device__ inline void first_back(const float2* work, float2 (&v)[16], Entry of_thread, float2 start,
                                  int t) {
  const float2* at = work + place(t);
#pragma unroll
  for (int q = 0; q < 16; ++q) v[q] = at[q * place(MEMBERS)];
  Roots roots = roots_of<true>(of_thread);
  float2 half = mul(start, roots.half);
#pragma unroll
  for (int q = 0; q < 8; ++q) v[q] = mul(start, v[q]), butterfly(v[q], v[q + 8], half);
  evaluate<16, true, 1>(v, roots);
}

// Pass 2, in place. Forward `table` has an entry for each ring, back for each place in 16.
template <bool INVERSE>
__device__ inline void middle_pass(float2* work, const float4* table, int t) {
  float2* ring = work + t / A * place(16 * A);
  if constexpr (A == 16) {
    float2 v[16], *at = ring + t % 16;
#pragma unroll
    for (int r = 0; r < 16; ++r) v[r] = at[r * 18];
    evaluate<16, INVERSE>(v, roots_of<INVERSE>(entry(table, 16, INVERSE ? t % 16 : t / 16)));
#pragma unroll
    for (int q = 0; q < 16; ++q) at[q * 18] = v[reversed<16>(q)];
  } else if constexpr (A > 1) {
    Roots roots = roots_of<INVERSE>(entry(table, 16, t / A));
#pragma unroll
    for (int k = 0; k < 8 / A; ++k) {  // two neighbours at a time
      int i = 2 * (t % A + k * A);
      float4* at = reinterpret_cast<float4*>(ring + i);
      float2 v[A], w[A];
#pragma unroll
      for (int r = 0; r < A; ++r) {
        float4 two = at[r * 9];
        v[r] = {two.x, two.y}, w[r] = {two.z, two.w};
      }
      evaluate<A, INVERSE>(v, INVERSE ? roots_of<INVERSE>(entry(table, 16, i)) : roots);
      evaluate<A, INVERSE>(w, INVERSE ? roots_of<INVERSE>(entry(table, 16, i + 1)) : roots);
#pragma unroll
      for (int q = 0; q < A; ++q) {
        float2 a = v[reversed<A>(q)], b = w[reversed<A>(q)];
        at[q * 9] = {a.x, a.y, b.x, b.y};
      }
    }
  }
}

// Pass 3: the spectrum of ring t, point q in v[reversed<16>(q)]; read() is called when work is free.
template <class Read>
__device__ inline void last_pass(const float2* work, float2 (&v)[16], Entry of_ring, int t, Read read) {
  const float4* at = reinterpret_cast<const float4*>(work + t * 18);
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    float4 two = at[r];
    v[2 * r] = {two.x, two.y}, v[2 * r + 1] = {two.z, two.w};
  }
  read();
  evaluate<16, false>(v, roots_of<false>(of_ring));
}

// And back, from a spectrum in the order of q.
__device__ inline void last_back(float2* work, float2 (&v)[16], int t) {
  dft<16, true>(v);
  float4* at = reinterpret_cast<float4*>(work + t * 18);
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    float2 a = v[slot<16>(2 * r)], b = v[slot<16>(2 * r + 1)];
    at[r] = {a.x, a.y, b.x, b.y};
  }
}

// ------------------------------------------------------------------------- tables

// What the passes need beside the points, in this order: entries of places in 16; for each ring turns of
// its parts, entries of itself and of its 16 rings; entries of threads; for each ring those of its M / 16
// rings. All but the long ones are copied to shared memory.
constexpr int PLACES = 32, SHORT = RINGS + 2 + 32, LONG = 2 * MEMBERS;

struct Tables {
  const float4 *of_places, *ring, *of_threads, *of_rings;

  __device__ Entry thread(int t) const { return entry(of_threads, MEMBERS, t); }
  __device__ float2 part(int k) const { return reinterpret_cast<const float2*>(ring)[k]; }
  __device__ Roots first() const { return roots_of<false>(entry(ring + RINGS, 1, 0)); }
  __device__ const float4* sixteen() const { return ring + RINGS + 2; }
  __device__ Entry last(int t) const { return entry(of_rings, MEMBERS, t); }
};

__device__ inline void copy_table(float4* to, const float4* from, int count) {
  for (int i = threadIdx.x; i < count; i += THREADS) to[i] = from[i];
}
// Copies what rings from `ring` to `ring` + count need, all threads together, and __syncthreads is to
// follow; these are the tables of the one that is `own` on.
__device__ inline Tables copy_tables(float4* to, const float4* all, int ring, int count, int own) {
  copy_table(to, all, PLACES);
  copy_table(to + PLACES, all + PLACES + ring * SHORT, count * SHORT);
  const float4* threads = all + PLACES + RINGS * SHORT;
  return {to, to + PLACES + own * SHORT, threads, threads + (1 + ring + own) * LONG};
}
// And the long ones.
__device__ inline Tables copy_long_tables(float4* to, Tables tables, int count, int own) {
  copy_table(to, tables.of_threads, LONG);
  copy_table(to + LONG, tables.of_rings - own * LONG, count * LONG);
  return {tables.of_places, tables.ring, to, to + (1 + own) * LONG};
}

// The passes after the first, up to the spectrum; `work` is a team's, last() the entry of ring t.
template <class Last, class Read>
__device__ inline void to_spectrum(float2* work, float2 (&v)[16], const Tables& tables, int t,
                                   Last last, Read read) {
  middle_pass<false>(work, tables.sixteen(), t);
  if constexpr (A > 1) near_wait();
  last_pass(work, v, last(), t, read);
}
// And back, up to what `first_back` reads, after the team has waited.
__device__ inline void middle_back(float2* work, const Tables& tables, int t) {
  if constexpr (A > 1) near_wait();
  middle_pass<true>(work, tables.of_places, t);
}
__device__ inline void from_spectrum(float2* work, float2 (&v)[16], const Tables& tables, int t) {
  last_back(work, v, t);
  middle_back(work, tables, t);
}

// ------------------------------------------------------------------------- parts

// A row of real entries modulo X^N = -i, N = RINGS M, is RINGS rings: ring p has
// X^M = e((1/4 + p) / RINGS), and point j the sum of entries j + M k times e((1/4 + p) k / RINGS).

// A ring's share in entry t + r M / 16 of part k.
template <int RING>
__device__ inline float share(const float2 (&v)[16], int k, int r) {
  float2 z = v[reversed<16>(r)], w = root<64 * RINGS>((1 + 4 * RING) * (16 * k + r));
  return z.x * w.x + z.y * w.y;
}

// Point r of a ring X^M = e(x), which has lost conj(e(x r / 16)): one factor for each bit of r.
__device__ inline void turn_back(float2 (&v)[16], const Roots& by) {
#pragma unroll
  for (int r = 1; r < 16; ++r) {
    float2& z = v[reversed<16>(r)];
    if (r & 8) z = mul_conj(z, by.half);
    if (r & 4) z = mul_conj(z, by.quarter);
    if (r & 2) z = mul_conj(z, by.eighth[0]);
    if (r & 1) z = mul_conj(z, by.sixteenth[0]);
  }
}

// Pass 1 of real entries: x(k, r) is entry t + r M / 16 of part k. First parts FROM to TO are added to
// the ring's points, which are those of one ring after a step already; then the rest.
template <int FROM, int TO, class Entries>
__device__ inline void fold(float2 (&v)[16], const Tables& tables, Entries x) {
  if constexpr (RINGS == 1) {
    constexpr float h = .70710678118654752440f;  // e(1/8) = h - i h
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      float a = x(0, r), b = x(0, r + 8), s = h * b;
      v[r] = {a + s, -s}, v[r + 8] = {a - s, s};
    }
  } else {
#pragma unroll
    for (int k = FROM; k < TO; ++k) {
      float2 w = tables.part(k);
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
__device__ inline void after_fold(float2 (&v)[16], const Tables& tables) {
  if constexpr (RINGS == 1) {
    Roots roots = {root<64>(8), root<64>(4), {root<64>(2), root<64>(10)},
                   {root<64>(1), root<64>(5), root<64>(9), root<64>(13)}};
    evaluate<16, false, 1>(v, roots);
  } else {
    evaluate<16, false>(v, tables.first());
  }
}

// Where entry r of a thread in part k lies, beside its t; it is there if that is below `left`, the
// row's length less t, and the first half of a row always is.
__device__ constexpr int along(int k, int r) { return k * M + r * MEMBERS; }
__device__ inline bool inside(int k, int r, int left) {
  return along(k, r) + MEMBERS <= PARTS * M / 2 || along(k, r) < left;
}

// ------------------------------------------------------------------------- teams

// A team's barrier in two halves: what comes between them needs not wait.
struct Gate {
  Barrier* at;
  int parity;

  __device__ void arrive() {
    if constexpr (MEMBERS > 32) {
      near_wait();
      if (threadIdx.x % 32 == 0) barrier_arrive(at);
    }
  }
  __device__ void wait() {
    if constexpr (MEMBERS > 32) {
      barrier_wait(at, parity);
      parity ^= 1;
    } else {
      near_wait();
    }
  }
};

// Two teams of a row: one tells (that it has written, or read), the other waits. Numbers of barriers,
// to which the team whose points they are is added, and 2 for every other row.
__device__ inline void tell(int number) { team_arrive(number, THREADS); }
constexpr int WRITTEN = 3, READ = 7;

// A copy that takes no registers; what this thread has asked for is there after copies_wait().
__device__ inline void copy_async(float4* to, const float4* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ inline void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// *sum += (a, b); nobody waits for it
__device__ inline void add_to(float4* sum, float2 a, float2 b) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               ::"l"(sum), "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y));
}
