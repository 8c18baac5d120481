// FFT columns: the first factor of an FFT of N = C S points, too long for one block (four-step FFT). A pass takes point
// i of each of the C = RADIX SECOND_RADIX pieces, which are S apart, and leaves C rows of S points, which are
// transformed on their own (fft_rows.cu). Signals are modulo X^N + i, as in convolution.cu:
//   Z[q][i] = w_4N^(i (4 q + 1)) sum_n w_C^(n q) w_4C^n z[i + S n],   w_M = exp(-2 pi i / M).
// With n = m + SECOND_RADIX r and q = p + RADIX o this is: radix 16 or 12 over r, twiddle factor w_4C^(m (4 p + 1)),
// radix SECOND_RADIX over m, twiddle factor w_4N^(i (4 p + 1)) w_N^(RADIX i o). If SECOND_RADIX is 1, m = o = 0.
//
// A sequence may be longer than N: a real x has 2 N entries in z_j = x_j - i x_(j+N) (FOLDED). It suffices that the
// entries that wrap around, as many as a kernel has, meet no entry of y.

constexpr int RADIX = COLUMN_RADIX, S = 1 << LOG2S, C = RADIX * SECOND_RADIX, N = C * S;
constexpr int POINTS = TILE_POINTS;                                     // points i of a block
constexpr int CHANNELS = THREADS / SECOND_RADIX / POINTS;               // channels of a block
constexpr int SECOND_DFTS = (RADIX + SECOND_RADIX - 1) / SECOND_RADIX;  // DFTs of SECOND_RADIX points in a thread

extern __shared__ float2 shared[];

struct ColumnTables {
  const float2* inner;   // [m, p]: w_4C^(m (4 p + 1))
  const float2* outer;   // [p, i]: w_4N^(i (4 p + 1)); if SECOND_RADIX is 1 only p = 0
  const float4* powers;  // [i]: w_N^(RADIX i) and its fourth power; if SECOND_RADIX is 1 w_N^i
};

__device__ inline float2 radix_root(int r) { return RADIX == 16 ? root64(r) : root48(r); }  // w_4RADIX^r

template <bool INVERSE>
__device__ inline void dft_radix(float2 (&v)[RADIX]) {
  if constexpr (RADIX == 12) dft12<INVERSE>(v);
  else dft<RADIX, INVERSE>(v);
}

// The twiddle factors between the two radices, and those after the second one.
template <bool INVERSE>
__device__ inline void twiddle_inner(float2 (&v)[RADIX], const ColumnTables& tables, int i, int m) {
  if constexpr (SECOND_RADIX == 1) {
    apply_twiddles<RADIX, INVERSE, true>(v, tables.powers[i], tables.outer[i]);
  } else {
#pragma unroll
    for (int p = 0; p < RADIX; ++p) {
      float2& value = v[INVERSE ? p : slot<RADIX>(p)];
      value = twiddle_mul<INVERSE>(value, __ldg(tables.inner + m * RADIX + p));
    }
  }
}
template <bool INVERSE>
__device__ inline void twiddle_outer(float2 (&w)[SECOND_RADIX], const ColumnTables& tables, int i, int p) {
  apply_twiddles<SECOND_RADIX, INVERSE, true>(w, tables.powers[i], tables.outer[p * S + i]);
}

// The channel c, point i and number m of a thread; adjacent threads have adjacent channels (channel_first), or adjacent
// points (point_first). `exchange` is the shared memory through which they change from one to the other.
struct Position {
  int c, i, m;
};
template <int CHANNELS, int POINTS>
__device__ inline Position channel_first(int first) {
  int t = threadIdx.x;
  return {t % CHANNELS, first + t / CHANNELS % POINTS, t / (CHANNELS * POINTS)};
}
template <int CHANNELS, int POINTS>
__device__ inline Position point_first(int first) {
  int t = threadIdx.x;
  return {t / POINTS % CHANNELS, first + t % POINTS, t / (CHANNELS * POINTS)};
}
template <int CHANNELS, int POINTS>
__device__ inline float2& exchange(const Position& at, int first, int p, int m) {
  return shared[((p * SECOND_RADIX + m) * CHANNELS + at.c) * (POINTS + 1) + at.i - first];
}

// read(at, v) loads v_r = w_4RADIX^r z_j, j = at.i + (at.m + SECOND_RADIX r) S, of channel at.c; result: Z [., C, S].
template <int CHANNELS, int POINTS, class Read>
__device__ inline void forward_columns(Read read, float2* Z, const ColumnTables& tables, int first,
                                       int channels) {
  Position at = channel_first<CHANNELS, POINTS>(first);
  float2 v[RADIX];
  read(at, v);
  dft_radix<false>(v);
  twiddle_inner<false>(v, tables, at.i, at.m);
#pragma unroll
  for (int p = 0; p < RADIX; ++p)
    exchange<CHANNELS, POINTS>(at, first, p, at.m) = v[slot<RADIX>(p)];
  __syncthreads();
  at = point_first<CHANNELS, POINTS>(first);
  if (at.c >= channels) return;
  float2* to = Z + (long long)at.c * N + at.i;
#pragma unroll
  for (int g = 0; g < SECOND_DFTS; ++g) {
    int p = at.m + SECOND_RADIX * g;
    if (RADIX % SECOND_RADIX && p >= RADIX) break;
    float2 w[SECOND_RADIX];
#pragma unroll
    for (int m = 0; m < SECOND_RADIX; ++m) w[m] = exchange<CHANNELS, POINTS>(at, first, p, m);
    if constexpr (SECOND_RADIX > 1) {
      dft<SECOND_RADIX, false>(w);
      twiddle_outer<false>(w, tables, at.i, p);
    }
#pragma unroll
    for (int o = 0; o < SECOND_RADIX; ++o) to[(p + RADIX * o) * S] = w[slot<SECOND_RADIX>(o)];
  }
}

// The inverse: from Z [., C, S]; write(at, v) stores v_slot(r) = w_4RADIX^r z_j.
template <int CHANNELS, int POINTS, class Write>
__device__ inline void inverse_columns(const float2* Z, Write write, const ColumnTables& tables, int first,
                                       int channels) {
  Position at = point_first<CHANNELS, POINTS>(first);
  const float2* from = Z + (long long)min(at.c, channels - 1) * N + at.i;
  float2 w[SECOND_DFTS][SECOND_RADIX];
#pragma unroll
  for (int g = 0; g < SECOND_DFTS; ++g) {
    int p = at.m + SECOND_RADIX * g;
    if (RADIX % SECOND_RADIX && p >= RADIX) break;
#pragma unroll
    for (int o = 0; o < SECOND_RADIX; ++o) w[g][o] = load_streaming(from + (p + RADIX * o) * S);
  }
#pragma unroll
  for (int g = 0; g < SECOND_DFTS; ++g) {
    int p = at.m + SECOND_RADIX * g;
    if (RADIX % SECOND_RADIX && p >= RADIX) break;
    if constexpr (SECOND_RADIX > 1) {
      twiddle_outer<true>(w[g], tables, at.i, p);
      dft<SECOND_RADIX, true>(w[g]);
    }
#pragma unroll
    for (int m = 0; m < SECOND_RADIX; ++m)
      exchange<CHANNELS, POINTS>(at, first, p, m) = w[g][slot<SECOND_RADIX>(m)];
  }
  __syncthreads();
  at = channel_first<CHANNELS, POINTS>(first);
  float2 v[RADIX];
#pragma unroll
  for (int p = 0; p < RADIX; ++p) v[p] = exchange<CHANNELS, POINTS>(at, first, p, at.m);
  twiddle_inner<true>(v, tables, at.i, at.m);
  dft_radix<true>(v);
  write(at, v);
}

// A block's tile: points from `first` on, channels from `channel` on, a sequence. If a tile has few channels, adjacent
// blocks have the next ones, so that together they use whole cache lines of u.
struct Tile {
  int channel, first, batch;
};
__device__ inline Tile tile_of_block() {
  int tile_along = SECOND_RADIX == 1 ? blockIdx.x : blockIdx.y;
  int tile_across = SECOND_RADIX == 1 ? blockIdx.y : blockIdx.x;
  return {tile_across * CHANNELS, tile_along * POINTS, (int)blockIdx.z};
}

// Returns x, hidden from the compiler, which would keep an address for each entry otherwise.
__device__ inline long long opaque(long long x) {
  asm("" : "+l"(x));
  return x;
}

// The entries x_j, x_(j + SECOND_RADIX S), ... of a thread, one after the other.
template <class T>
struct StridedEntries {
  T* entry;
  long long step;
  int left;  // entries until the end of the sequence; 0 for a channel beyond H

  __device__ StridedEntries(T* x, const Tile& tile, const Position& at, int L, int H) {
    int j = at.i + at.m * S, channel = tile.channel + at.c;
    entry = x + ((long long)tile.batch * L + j) * H + channel;
    left = channel < H ? L - j : 0;
    step = opaque((long long)SECOND_RADIX * S * H);
  }
  __device__ bool is_inside() const { return left > 0; }
  __device__ void next() { entry += step, left -= SECOND_RADIX * S; }
};

// ------------------------------------------------------------------------- kernels

constexpr int COUNT = FOLDED ? 2 * RADIX : RADIX;  // entries of a thread

// u [B, L, H] -> Z [B, H, C, S]
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    fft_columns(const Storage* u, float2* Z, const float2* inner, const float2* outer,
                const float4* powers, int L, int H) {
  Tile tile = tile_of_block();
  auto read = [&](const Position& at, float2 (&v)[RADIX]) {
    StridedEntries<const Storage> entries(u, tile, at, L, H);
    float x[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; ++k, entries.next())
      x[k] = entries.is_inside() ? to_fp32(*entries.entry) : 0.f;
#pragma unroll
    for (int r = 0; r < RADIX; ++r) {
      float2 w = radix_root(r);
      v[r] = FOLDED ? mul({x[r], -x[r + COUNT - RADIX]}, w) : float2{x[r] * w.x, x[r] * w.y};
    }
  };
  Z += ((long long)tile.batch * H + tile.channel) * N;
  forward_columns<CHANNELS, POINTS>(read, Z, {inner, outer, powers}, tile.first, H - tile.channel);
}

// Z [B, H, C, S] -> y [B, L, H]
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    inverse_fft_columns(const float2* Z, Storage* y, const float2* inner, const float2* outer,
                        const float4* powers, int L, int H) {
  Tile tile = tile_of_block();
  auto write = [&](const Position& at, const float2 (&v)[RADIX]) {
    StridedEntries<Storage> entries(y, tile, at, L, H);
#pragma unroll
    for (int k = 0; k < COUNT; ++k, entries.next()) {
      float2 z = mul_conj(v[slot<RADIX>(k % RADIX)], radix_root(k % RADIX));
      if (entries.is_inside()) *entries.entry = from_fp32(k < RADIX ? z.x : -z.y);
    }
  };
  Z += ((long long)tile.batch * H + tile.channel) * N;
  inverse_columns<CHANNELS, POINTS>(Z, write, {inner, outer, powers}, tile.first, H - tile.channel);
}

// right, left [H, K] -> Z [H, C, S]; a block has KERNEL_POINTS points of one channel
constexpr int KERNEL_POINTS = THREADS / SECOND_RADIX;

extern "C" __global__ void __launch_bounds__(THREADS)
    kernel_fft_columns(const float* right, const float* left, float2* Z, const float2* inner,
                       const float2* outer, const float4* powers, int K_right, int K_left) {
  int h = blockIdx.x / (S / KERNEL_POINTS), first = blockIdx.x % (S / KERNEL_POINTS) * KERNEL_POINTS;
  right += (long long)h * K_right, left += (long long)h * K_left;
  auto read = [&](const Position& at, float2 (&v)[RADIX]) {
#pragma unroll
    for (int r = 0; r < RADIX; ++r) {
      int j = at.i + (at.m + SECOND_RADIX * r) * S, back = N - 1 - j;
      v[r] = mul({j < K_right ? right[j] : 0.f, back < K_left ? left[back] : 0.f}, radix_root(r));
    }
  };
  forward_columns<1, KERNEL_POINTS>(read, Z + (long long)h * N, {inner, outer, powers}, first, 1);
}

// Z [H, C, S] -> d_right, d_left [H, K]
extern "C" __global__ void __launch_bounds__(THREADS)
    kernel_inverse_fft_columns(const float2* Z, float* d_right, float* d_left, const float2* inner,
                               const float2* outer, const float4* powers, int K_right, int K_left) {
  int h = blockIdx.x / (S / KERNEL_POINTS), first = blockIdx.x % (S / KERNEL_POINTS) * KERNEL_POINTS;
  d_right += (long long)h * K_right, d_left += (long long)h * K_left;
  auto write = [&](const Position& at, const float2 (&v)[RADIX]) {
#pragma unroll
    for (int r = 0; r < RADIX; ++r) {
      int j = at.i + (at.m + SECOND_RADIX * r) * S, back = N - 1 - j;
      float2 z = mul_conj(v[slot<RADIX>(r)], radix_root(r));
      if (j < K_right) d_right[j] = z.x;
      if (back < K_left) d_left[back] = z.y;
    }
  };
  inverse_columns<1, KERNEL_POINTS>(Z + (long long)h * N, write, {inner, outer, powers}, first, 1);
}
