// Transforms that are too long for one block: N = C S points. A column pass takes point i of each of
// the C = RADIX PARTS pieces, S apart, and leaves C rows of S points; rows are then transforms of their
// own (rows.cu). What the complex signals mean: convolution.cu.
//   in:  Z[q][i] = w_4N^(i (4 q + 1)) sum_n w_C^(n q) w_4C^n z[i + S n],   w_M = exp(-2 pi i / M)
// With n = m + PARTS r and q = p + RADIX o that is radix 16 or 12 over r, a turn by w_4C^(m (4 p + 1)),
// radix PARTS over m, and a turn by w_4N^(i (4 p + 1)) w_N^(RADIX i o). Of one part there is no m, and
// no o.
//
// Sequences may be longer than N: a real x has 2 N entries in z_j = x_j - i x_(j+N). It is enough that
// what wraps around, as long as a kernel, meets no entry of y (FOLDED).

constexpr int RADIX = COLUMN_RADIX, S = 1 << LOG2S, C = RADIX * PARTS, N = C * S;
constexpr int ALONG = TILE_POINTS;                   // points i of a block,
constexpr int CHANNELS = THREADS / PARTS / ALONG;    // and channels
constexpr int GROUPS = (RADIX + PARTS - 1) / PARTS;  // transforms of PARTS points a thread

extern __shared__ float2 shared[];

struct ColumnTables {
  const float2* inner;   // [m, p]: w_4C^(m (4 p + 1))
  const float2* turns;   // [p, i]: w_4N^(i (4 p + 1)); of one part only p = 0
  const float4* powers;  // [i]: w_N^(RADIX i) and its fourth power; of one part w_N^i
};

__device__ inline float2 root(int r) { return RADIX == 16 ? root64(r) : root48(r); }  // w_4RADIX^r

template <bool INVERSE>
__device__ inline void dft_radix(float2 (&v)[RADIX]) {
  if constexpr (RADIX == 12) dft12<INVERSE>(v);
  else dft<RADIX, INVERSE>(v);
}

// The turns between radix RADIX and radix PARTS, and those at the end.
template <bool INVERSE>
__device__ inline void turn_inner(float2 (&v)[RADIX], const ColumnTables& tables, int i, int m) {
  if constexpr (PARTS == 1) {
    twiddle<RADIX, INVERSE, true>(v, tables.powers[i], tables.turns[i]);
  } else {
#pragma unroll
    for (int p = 0; p < RADIX; ++p) {
      float2& value = v[INVERSE ? p : slot<RADIX>(p)];
      value = turn<INVERSE>(value, __ldg(tables.inner + m * RADIX + p));
    }
  }
}
template <bool INVERSE>
__device__ inline void turn_outer(float2 (&w)[PARTS], const ColumnTables& tables, int i, int p) {
  twiddle<PARTS, INVERSE, true>(w, tables.powers[i], tables.turns[p * S + i]);
}

// Which channel, point i and number among the parts a thread has: channels first, or points first.
struct Place {
  int c, i, m;
};
template <int CHANNELS, int ALONG>
__device__ inline Place channel_first(int first) {
  int t = threadIdx.x;
  return {t % CHANNELS, first + t / CHANNELS % ALONG, t / (CHANNELS * ALONG)};
}
template <int CHANNELS, int ALONG>
__device__ inline Place point_first(int first) {
  int t = threadIdx.x;
  return {t / ALONG % CHANNELS, first + t % ALONG, t / (CHANNELS * ALONG)};
}
template <int CHANNELS, int ALONG>
__device__ inline float2& between(const Place& at, int first, int p, int m) {
  return shared[((p * PARTS + m) * CHANNELS + at.c) * (ALONG + 1) + at.i - first];
}

// read(at, v): v_r = w_4RADIX^r z_j, j = at.i + (at.m + PARTS r) S, of channel at.c  ->  Z [., C, S]
template <int CHANNELS, int ALONG, class Read>
__device__ inline void in(Read read, float2* Z, const ColumnTables& tables, int first,
                          int channels) {
  Place at = channel_first<CHANNELS, ALONG>(first);
  float2 v[RADIX];
  read(at, v);
  dft_radix<false>(v);
  turn_inner<false>(v, tables, at.i, at.m);
#pragma unroll
  for (int p = 0; p < RADIX; ++p)
    between<CHANNELS, ALONG>(at, first, p, at.m) = v[slot<RADIX>(p)];
  __syncthreads();
  at = point_first<CHANNELS, ALONG>(first);
  if (at.c >= channels) return;
  float2* to = Z + (long long)at.c * N + at.i;
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    int p = at.m + PARTS * g;
    if (RADIX % PARTS && p >= RADIX) break;
    float2 w[PARTS];
#pragma unroll
    for (int m = 0; m < PARTS; ++m) w[m] = between<CHANNELS, ALONG>(at, first, p, m);
    if constexpr (PARTS > 1) {
      dft<PARTS, false>(w);
      turn_outer<false>(w, tables, at.i, p);
    }
#pragma unroll
    for (int o = 0; o < PARTS; ++o) to[(p + RADIX * o) * S] = w[slot<PARTS>(o)];
  }
}

// Z [., C, S]  ->  write(at, v), v_slot(r) = w_4RADIX^r z_j
template <int CHANNELS, int ALONG, class Write>
__device__ inline void out(const float2* Z, Write write, const ColumnTables& tables, int first,
                           int channels) {
  Place at = point_first<CHANNELS, ALONG>(first);
  const float2* from = Z + (long long)min(at.c, channels - 1) * N + at.i;
  float2 w[GROUPS][PARTS];
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    int p = at.m + PARTS * g;
    if (RADIX % PARTS && p >= RADIX) break;
#pragma unroll
    for (int o = 0; o < PARTS; ++o) w[g][o] = streamed(from + (p + RADIX * o) * S);
  }
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    int p = at.m + PARTS * g;
    if (RADIX % PARTS && p >= RADIX) break;
    if constexpr (PARTS > 1) {
      turn_outer<true>(w[g], tables, at.i, p);
      dft<PARTS, true>(w[g]);
    }
#pragma unroll
    for (int m = 0; m < PARTS; ++m)
      between<CHANNELS, ALONG>(at, first, p, m) = w[g][slot<PARTS>(m)];
  }
  __syncthreads();
  at = channel_first<CHANNELS, ALONG>(first);
  float2 v[RADIX];
#pragma unroll
  for (int p = 0; p < RADIX; ++p) v[p] = between<CHANNELS, ALONG>(at, first, p, at.m);
  turn_inner<true>(v, tables, at.i, at.m);
  dft_radix<true>(v);
  write(at, v);
}

// A block's tile: points from `first` on, channels from `channel` on, a sequence. Where a tile has few
// channels, its neighbours have the others: together they use whole lines of u.
struct Tile {
  int channel, first, batch;
};
__device__ inline Tile tile_of_block() {
  int along = PARTS == 1 ? blockIdx.x : blockIdx.y, across = PARTS == 1 ? blockIdx.y : blockIdx.x;
  return {across * CHANNELS, along * ALONG, (int)blockIdx.z};
}

// The same number, of which the compiler knows nothing: else it keeps an address for each entry.
__device__ inline long long fresh(long long x) {
  asm("" : "+l"(x));
  return x;
}

// The entries x_j, x_(j + PARTS S), ... of a thread, one after the other.
template <class T>
struct Entries {
  T* here;
  long long step;
  int left;  // entries until the end of the sequence; none of a channel that does not exist

  __device__ Entries(T* x, const Tile& tile, const Place& at, int L, int H) {
    int j = at.i + at.m * S, channel = tile.channel + at.c;
    here = x + ((long long)tile.batch * L + j) * H + channel;
    left = channel < H ? L - j : 0;
    step = fresh((long long)PARTS * S * H);
  }
  __device__ bool is_there() const { return left > 0; }
  __device__ void next() { here += step, left -= PARTS * S; }
};

// ------------------------------------------------------------------------- kernels

constexpr int COUNT = FOLDED ? 2 * RADIX : RADIX;  // entries of a thread

// u [B, L, H] -> Z [B, H, C, S]
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    columns_in(const Stored* u, float2* Z, const float2* inner, const float2* turns,
               const float4* powers, int L, int H) {
  Tile tile = tile_of_block();
  auto read = [&](const Place& at, float2 (&v)[RADIX]) {
    Entries<const Stored> entries(u, tile, at, L, H);
    float x[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; ++k, entries.next())
      x[k] = entries.is_there() ? widened(*entries.here) : 0.f;
#pragma unroll
    for (int r = 0; r < RADIX; ++r) {
      float2 w = root(r);
      v[r] = FOLDED ? mul({x[r], -x[r + COUNT - RADIX]}, w) : float2{x[r] * w.x, x[r] * w.y};
    }
  };
  Z += ((long long)tile.batch * H + tile.channel) * N;
  in<CHANNELS, ALONG>(read, Z, {inner, turns, powers}, tile.first, H - tile.channel);
}

// Z [B, H, C, S] -> y [B, L, H]
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    columns_out(const float2* Z, Stored* y, const float2* inner, const float2* turns,
                const float4* powers, int L, int H) {
  Tile tile = tile_of_block();
  auto write = [&](const Place& at, const float2 (&v)[RADIX]) {
    Entries<Stored> entries(y, tile, at, L, H);
#pragma unroll
    for (int k = 0; k < COUNT; ++k, entries.next()) {
      float2 z = mul_conj(v[slot<RADIX>(k % RADIX)], root(k % RADIX));
      if (entries.is_there()) *entries.here = narrowed(k < RADIX ? z.x : -z.y);
    }
  };
  Z += ((long long)tile.batch * H + tile.channel) * N;
  out<CHANNELS, ALONG>(Z, write, {inner, turns, powers}, tile.first, H - tile.channel);
}

// right, left [H, K] -> Z [H, C, S]; a block takes more points of one channel
constexpr int ALONE = THREADS / PARTS;

extern "C" __global__ void __launch_bounds__(THREADS)
    kernel_columns_in(const float* right, const float* left, float2* Z, const float2* inner,
                      const float2* turns, const float4* powers, int K_right, int K_left) {
  int h = blockIdx.x / (S / ALONE), first = blockIdx.x % (S / ALONE) * ALONE;
  right += (long long)h * K_right, left += (long long)h * K_left;
  auto read = [&](const Place& at, float2 (&v)[RADIX]) {
#pragma unroll
    for (int r = 0; r < RADIX; ++r) {
      int j = at.i + (at.m + PARTS * r) * S, back = N - 1 - j;
      v[r] = mul({j < K_right ? right[j] : 0.f, back < K_left ? left[back] : 0.f}, root(r));
    }
  };
  in<1, ALONE>(read, Z + (long long)h * N, {inner, turns, powers}, first, 1);
}

// Z [H, C, S] -> d_right, d_left [H, K]
extern "C" __global__ void __launch_bounds__(THREADS)
    kernel_columns_out(const float2* Z, float* d_right, float* d_left, const float2* inner,
                       const float2* turns, const float4* powers, int K_right, int K_left) {
  int h = blockIdx.x / (S / ALONE), first = blockIdx.x % (S / ALONE) * ALONE;
  d_right += (long long)h * K_right, d_left += (long long)h * K_left;
  auto write = [&](const Place& at, const float2 (&v)[RADIX]) {
#pragma unroll
    for (int r = 0; r < RADIX; ++r) {
      int j = at.i + (at.m + PARTS * r) * S, back = N - 1 - j;
      float2 z = mul_conj(v[slot<RADIX>(r)], root(r));
      if (j < K_right) d_right[j] = z.x;
      if (back < K_left) d_left[back] = z.y;
    }
  };
  out<1, ALONE>(Z + (long long)h * N, write, {inner, turns, powers}, first, 1);
}
