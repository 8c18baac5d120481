// Transforms that are too long for one block: N = C S points. A column pass takes point i of each of
// the C = 16 PARTS pieces, S apart, and leaves C rows of S points; rows are then transforms of their
// own (rows.cu). What the complex signals mean: convolution.cu.
//   in:  Z[q][i] = w_4N^(i (4 q + 1)) sum_n w_C^(n q) w_4C^n z[i + S n],   w_M = exp(-2 pi i / M)
// With n = m + PARTS r and q = p + 16 o that is radix 16 over r, a turn by w_4C^(m (4 p + 1)), radix
// PARTS over m, and a turn by w_4N^(i (4 p + 1)) w_N^(16 i o). Of one part there is no m, and no o.

constexpr int C = 16 * PARTS;
constexpr int ALONG = PARTS <= 2 ? 16 : PARTS <= 8 ? 8 : 4;  // points i of a block,
constexpr int CHANNELS = THREADS / PARTS / ALONG;            // and channels

extern __shared__ float2 shared[];

struct ColumnTables {
  const float2* inner;   // [m, p]: w_4C^(m (4 p + 1))
  const float2* turns;   // [p, i]: w_4N^(i (4 p + 1)); of one part only p = 0
  const float4* powers;  // [i]: (w_N^16i, w_N^64i); of one part (w_N^i, w_N^4i)
};

// The turns between radix 16 and radix PARTS, and those at the end.
template <bool INVERSE>
__device__ inline void turn_inner(float2 (&v)[16], const ColumnTables& tables, int i, int m) {
  if constexpr (PARTS == 1) {
    twiddle<16, INVERSE, true>(v, tables.powers[i], tables.turns[i]);
  } else {
#pragma unroll
    for (int p = 0; p < 16; ++p) {
      float2& value = v[INVERSE ? p : slot<16>(p)];
      value = turn<INVERSE>(value, __ldg(tables.inner + m * 16 + p));
    }
  }
}
template <bool INVERSE>
__device__ inline void turn_outer(float2 (&w)[PARTS], const ColumnTables& tables, int i, int p,
                                  int S) {
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

// read(c, j, r) = w_64^r z_j of channel c  ->  Z [., C, S]
template <int CHANNELS, int ALONG, class Read>
__device__ inline void in(Read read, float2* Z, const ColumnTables& tables, int first, int channels,
                          int S) {
  Place at = channel_first<CHANNELS, ALONG>(first);
  float2 v[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) v[r] = read(at.c, at.i + (at.m + PARTS * r) * S, r);
  dft<16, false>(v);
  turn_inner<false>(v, tables, at.i, at.m);
#pragma unroll
  for (int p = 0; p < 16; ++p)
    between<CHANNELS, ALONG>(at, first, p, at.m) = v[slot<16>(p)];
  __syncthreads();
  at = point_first<CHANNELS, ALONG>(first);
  if (at.c >= channels) return;
  float2* to = Z + (long long)at.c * C * S + at.i;
#pragma unroll
  for (int g = 0; g < 16 / PARTS; ++g) {
    int p = at.m + PARTS * g;
    float2 w[PARTS];
#pragma unroll
    for (int m = 0; m < PARTS; ++m) w[m] = between<CHANNELS, ALONG>(at, first, p, m);
    if constexpr (PARTS > 1) {
      dft<PARTS, false>(w);
      turn_outer<false>(w, tables, at.i, p, S);
    }
#pragma unroll
    for (int o = 0; o < PARTS; ++o) to[(long long)(p + 16 * o) * S] = w[slot<PARTS>(o)];
  }
}

// Z [., C, S]  ->  write(c, j, r, w_64^r z_j)
template <int CHANNELS, int ALONG, class Write>
__device__ inline void out(const float2* Z, Write write, const ColumnTables& tables, int first,
                           int channels, int S) {
  Place at = point_first<CHANNELS, ALONG>(first);
  const float2* from = Z + (long long)min(at.c, channels - 1) * C * S + at.i;
  float2 v[16];
#pragma unroll
  for (int g = 0; g < 16 / PARTS; ++g)
#pragma unroll
    for (int o = 0; o < PARTS; ++o)
      v[g * PARTS + o] = streamed(from + (long long)(at.m + PARTS * g + 16 * o) * S);
#pragma unroll
  for (int g = 0; g < 16 / PARTS; ++g) {
    int p = at.m + PARTS * g;
    float2 w[PARTS];
#pragma unroll
    for (int o = 0; o < PARTS; ++o) w[o] = v[g * PARTS + o];
    if constexpr (PARTS > 1) {
      turn_outer<true>(w, tables, at.i, p, S);
      dft<PARTS, true>(w);
    }
#pragma unroll
    for (int m = 0; m < PARTS; ++m) between<CHANNELS, ALONG>(at, first, p, m) = w[slot<PARTS>(m)];
  }
  __syncthreads();
  at = channel_first<CHANNELS, ALONG>(first);
#pragma unroll
  for (int p = 0; p < 16; ++p) v[p] = between<CHANNELS, ALONG>(at, first, p, at.m);
  turn_inner<true>(v, tables, at.i, at.m);
  dft<16, true>(v);
#pragma unroll
  for (int r = 0; r < 16; ++r) write(at.c, at.i + (at.m + PARTS * r) * S, r, v[slot<16>(r)]);
}

// A block's tile: points from `first` on, channels from `channel` on, a sequence. Where a tile has few
// channels, its neighbours have the others: together they use whole lines of u.
struct Tile {
  int channel, first, batch;
};
__device__ inline Tile tile_of(int H, int S) {
  int across = (H + CHANNELS - 1) / CHANNELS, along = S / ALONG, block = blockIdx.x;
  int line = block / (PARTS == 1 ? along : across), batch = line / (PARTS == 1 ? across : along);
  if (PARTS == 1) return {(line - batch * across) * CHANNELS, (block - line * along) * ALONG, batch};
  return {(block - line * across) * CHANNELS, (line - batch * along) * ALONG, batch};
}

// ------------------------------------------------------------------------- kernels

// u [B, L, H] -> Z [B, H, C, S]
extern "C" __global__ void __launch_bounds__(THREADS)
    columns_in(const Stored* u, float2* Z, const float2* inner, const float2* turns, const float4* powers, int L, int H, int S) {
  Tile tile = tile_of(H, S);
  u += (long long)tile.batch * L * H + tile.channel;
  Z += ((long long)tile.batch * H + tile.channel) * C * S;
  auto read = [&](int c, int j, int r) -> float2 {
    int end = tile.channel + c < H ? L : 0;
    float x = j < end ? widened(u[(long long)j * H + c]) : 0.f;
    return {x * root64(r).x, x * root64(r).y};
  };
  in<CHANNELS, ALONG>(read, Z, {inner, turns, powers}, tile.first, H - tile.channel, S);
}

// Z [B, H, C, S] -> y [B, L, H]
extern "C" __global__ void __launch_bounds__(THREADS)
    columns_out(const float2* Z, Stored* y, const float2* inner, const float2* turns, const float4* powers, int L, int H, int S) {
  Tile tile = tile_of(H, S);
  y += (long long)tile.batch * L * H + tile.channel;
  Z += ((long long)tile.batch * H + tile.channel) * C * S;
  auto write = [&](int c, int j, int r, float2 z) {
    int end = tile.channel + c < H ? L : 0;
    if (j < end) y[(long long)j * H + c] = narrowed(mul_conj(z, root64(r)).x);
  };
  out<CHANNELS, ALONG>(Z, write, {inner, turns, powers}, tile.first, H - tile.channel, S);
}

// right, left [H, K] -> Z [H, C, S]; a block takes more points of one channel
constexpr int ALONE = THREADS / PARTS;

extern "C" __global__ void __launch_bounds__(THREADS)
    kernel_columns_in(const float* right, const float* left, float2* Z, const float2* inner, const float2* turns, const float4* powers, int K_right,
                      int K_left, int S) {
  int h = blockIdx.x / (S / ALONE), first = blockIdx.x % (S / ALONE) * ALONE;
  right += (long long)h * K_right, left += (long long)h * K_left;
  auto read = [&](int, int j, int r) {
    int back = C * S - 1 - j;
    return mul({j < K_right ? right[j] : 0.f, back < K_left ? left[back] : 0.f}, root64(r));
  };
  in<1, ALONE>(read, Z + (long long)h * C * S, {inner, turns, powers}, first, 1, S);
}

// Z [H, C, S] -> d_right, d_left [H, K]
extern "C" __global__ void __launch_bounds__(THREADS)
    kernel_columns_out(const float2* Z, float* d_right, float* d_left, const float2* inner, const float2* turns, const float4* powers, int K_right,
                       int K_left, int S) {
  int h = blockIdx.x / (S / ALONE), first = blockIdx.x % (S / ALONE) * ALONE;
  d_right += (long long)h * K_right, d_left += (long long)h * K_left;
  auto write = [&](int, int j, int r, float2 value) {
    float2 z = mul_conj(value, root64(r));
    int back = C * S - 1 - j;
    if (j < K_right) d_right[j] = z.x;
    if (back < K_left) d_left[back] = z.y;
  };
  out<1, ALONE>(Z + (long long)h * C * S, write, {inner, turns, powers}, first, 1, S);
}
