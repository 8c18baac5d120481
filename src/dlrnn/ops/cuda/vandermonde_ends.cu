// What goes before and after the products of vandermonde.cu: tables of powers, W and v scaled,
// halved and laid out as those products read them, and the moments of pieces put together.

#define STATES 32
#define HEIGHT 32
#define ROWS 64
#define PREPARE 512   // threads
#define SEGMENT 16384  // entries of a row whose largest one block finds
#define PIECES 64      // at most

// The power of two above |x|, as an exponent; no smaller than 2^-100.
__device__ inline int exponent_above(float x) {
  return (__float_as_int(fmaxf(x, 7.9e-31f)) >> 23 & 255) - 126;
}
__device__ inline float power_of_two(int exponent) {
  return __int_as_float((exponent + 127) << 23);
}
__device__ inline float largest_of_block(float x) {
  __shared__ float warps[32];
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  for (int i = 0; i < blockDim.x / 32; i++) x = fmaxf(x, warps[i]);
  return x;
}

// 32 states: lambda^a, a < 128, for the product; lambda^128, lambda^(512 i) and lambda^(32768 i).
__device__ void tables(const double2* log_lambda, uint4* table, double2* block, double2* tiles,
                       double2* leaps, int chunk, int known, int states, int tile_count,
                       int leap_count) {
  __shared__ double2 units[STATES][17], sixteens[STATES][9];
  int state = threadIdx.x % STATES, n = chunk * STATES + state;
  double2 log = log_lambda[min(n, known - 1)];
  for (int i = threadIdx.x / STATES; i < 25 + tile_count + leap_count; i += PREPARE / STATES) {
    int j = i - 16, tile = i - 25, leap = tile - tile_count;
    double k = j < 0 ? i : tile < 0 ? 16 * j : leap < 0 ? 512.0 * tile : 32768.0 * leap;
    double2 x = power(log, k);
    if (j < 0) units[state][i] = make_double2(UNIT * x.x, UNIT * x.y);
    else if (j < 8) sixteens[state][j] = x;
    else if (tile < 0) block[n] = x;
    else if (leap < 0) tiles[(long long)tile * states + n] = x;
    else leaps[(long long)leap * states + n] = x;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 8 * 128; i += PREPARE) {
    int a = i % 128, four = i / 128;
    unsigned high[4], low[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      double2 x = times(units[4 * four + j][a % 16], sixteens[4 * four + j][a / 16]);
      halves(x.x, x.y, high[j], low[j]);
    }
    uint4* to = table + ((long long)(chunk * 4 + four / 2) * 4 + four % 2) * 128 + a;
    to[0] = make_uint4(high[0], high[1], high[2], high[3]);
    to[256] = make_uint4(low[0], low[1], low[2], low[3]);
  }
}

// A row of W, at most 2^13; back[row] undoes that.
__device__ void weights(const float2* W, float2* arranged, float* back, int row, int rows,
                        int known, int states) {
  const float2* from = W + (long long)row * known;
  float largest = 0;
  if (row < rows)
#pragma unroll 4
    for (int n = threadIdx.x; n < known; n += PREPARE)
      largest = fmaxf(largest, fmaxf(fabsf(from[n].x), fabsf(from[n].y)));
  int exponent = exponent_above(largest_of_block(largest));
  float scale = power_of_two(13 - exponent);
  if (threadIdx.x == 0 && row < rows) back[row] = power_of_two(exponent - 13);
#pragma unroll 4
  for (int n = threadIdx.x; n < states; n += PREPARE) {
    float2 w = row < rows && n < known ? from[n] : make_float2(0, 0);
    long long at = (long long)(row / HEIGHT) * (states / STATES) + n / STATES;
    at = (at * 4 + n / 8 % 4) * 4 + row / 8 % 4;  // eight states, eight rows
    at = (at * 32 + row % 8 * 4 + n % 4) * 2 + n / 4 % 2;
    arranged[at] = make_float2(scale * w.x, scale * w.y);
  }
}

// Both: a block for each 32 states, then one for each row.
extern "C" __global__ void __launch_bounds__(PREPARE)
prepare(const double2* log_lambda, const float2* W, uint4* table, double2* block, double2* tiles,
        double2* leaps, float2* arranged, float* back, int rows, int known, int states,
        int tile_count, int leap_count) {
  int i = blockIdx.x, chunks = states / STATES;
  if (i < chunks)
    tables(log_lambda, table, block, tiles, leaps, i, known, states, tile_count, leap_count);
  else
    weights(W, arranged, back, i - chunks, rows, known, states);
}

// The sum of the product's parts, four entries a thread.
extern "C" __global__ void __launch_bounds__(256)
add(const float4* partial, float4* sum, int count, int parts) {
  int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= count) return;
  float4 x = partial[i];
#pragma unroll 4
  for (int p = 1; p < parts; p++) {
    float4 y = partial[(long long)p * count + i];
    x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
  }
  sum[i] = x;
}

// The largest of each segment of the rows of v.
extern "C" __global__ void __launch_bounds__(256)
largest(const float* v, float* found, int length, int segments) {
  int row = blockIdx.x / segments, segment = blockIdx.x % segments;
  const float* from = v + (long long)row * length;
  float x = 0;
  for (int k = segment * SEGMENT + threadIdx.x; k < min(length, (segment + 1) * SEGMENT); k += 256)
    x = fmaxf(x, fabsf(from[k]));
  x = largest_of_block(x);
  if (threadIdx.x == 0) found[blockIdx.x] = x;
}

// Rows of v, at most 2^13, and if wanted the rows of 2^-shift k v, k < 2^shift, cut into pieces: a
// piece of a row is a row of its own. With several channels, v is [rows / channels, channels] rows,
// and a channel has 64 rows for its pieces. Eight lanes write eight rows: rows of v, or of several
// channels pieces of one row. A block: 128 x 8 positions of each.
extern "C" __global__ void __launch_bounds__(256)
values(const float* v, const float* found, uint4* arranged, float* back, int rows, int channels,
       int length, int segments, int pieces, int steps, int shift, int with_slope) {
  int lane = threadIdx.x % 32, row_groups = channels > 1 ? rows : (rows + 7) / 8;
  int row = blockIdx.x % row_groups, group = blockIdx.x / row_groups;
  if (channels == 1) row = row * 8 + lane % 8;
  float most = 0;
  if (row < rows)
    for (int i = lane / 8; i < segments; i += 4)
      most = fmaxf(most, found[(long long)row * segments + i]);
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 8));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 16));
  if (row >= rows) return;
  int exponent = exponent_above(most);
  float scale = power_of_two(13 - exponent), unit = power_of_two(-shift);
  if (group == 0 && threadIdx.x / 8 == 0) back[row] = power_of_two(exponent - 13);
  const float* from = v + (long long)row * length;
  for (int i = 0; i < 4; i++) {
    int eight = (group * 4 + i) * 32 + threadIdx.x / 8;
    int piece = eight / (8 * steps), within = eight % (8 * steps);
    if (channels > 1) piece = piece * 8 + lane % 8;
    if (piece >= pieces) return;
    int k = 8 * (piece * 8 * steps + within);
    float x[8];
    if (length % 4 == 0 && k + 8 <= length) {  // v begins at a multiple of 16 bytes
      *(float4*)x = *(const float4*)(from + k), *(float4*)(x + 4) = *(const float4*)(from + k + 4);
    } else {
#pragma unroll
      for (int j = 0; j < 8; j++) x[j] = k + j < length ? from[k + j] : 0;
    }
    for (int slope = 0; slope <= with_slope; slope++) {
      long long to_row = piece * (1 + with_slope) + slope;
      to_row = row % channels * ROWS + to_row * (rows / channels) + row / channels;
      unsigned high[4], low[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float a = slope ? (k + 2 * j) * unit : 1, b = slope ? (k + 2 * j + 1) * unit : 1;
        halves(a * (scale * x[2 * j]), b * (scale * x[2 * j + 1]), high[j], low[j]);
      }
      uint4* to = arranged + (to_row / ROWS * steps + within / 8) * 1024 + within % 8 * ROWS +
                  to_row % ROWS;
      to[0] = make_uint4(high[0], high[1], high[2], high[3]);
      to[512] = make_uint4(low[0], low[1], low[2], low[3]);
    }
  }
}

// sum over pieces of lambda^(piece_length piece) times its moments; with a slope the conjugate, and
// sum over rows of (Re, -Im)(W slope). A block: 8 states.
extern "C" __global__ void __launch_bounds__(512)
finish(const float2* partial, const float* back, const double2* log_lambda, const float2* W,
       float2* result, double2* d_log_lambda, int rows, int states, int pieces, int piece_length,
       int shift, int with_slope) {
  __shared__ float2 power_of_piece[PIECES][8];
  __shared__ double2 sums[64][8];
  int x = threadIdx.x % 8, y = threadIdx.x / 8, n = blockIdx.x * 8 + x;
  bool inside = n < states;
  n = min(n, states - 1);
  for (int p = y; p < pieces; p += 64) {
    double2 z = p ? power(log_lambda[n], (double)p * piece_length) : make_double2(1, 0);
    power_of_piece[p][x] = make_float2(z.x, z.y);
  }
  __syncthreads();
  double2 sum = make_double2(0, 0);
#pragma unroll 2
  for (int row = y; row < rows; row += 64) {
    float unscale = back[row];
    float2 moment[2];
#pragma unroll
    for (int slope = 0; slope < 2; slope++) {
      moment[slope] = make_float2(0, 0);
      if (slope > with_slope) continue;
      for (int p = 0; p < pieces; p++) {
        long long from = (long long)p * (1 + with_slope) * rows + slope * rows + row;
        float2 part = partial[from * states + n], z = power_of_piece[p][x];
        moment[slope].x += part.x * z.x - part.y * z.y;
        moment[slope].y += part.x * z.y + part.y * z.x;
      }
      moment[slope].x *= unscale / (float)UNIT, moment[slope].y *= unscale / (float)UNIT;
    }
    long long at = (long long)row * states + n;
    if (inside) result[at] = make_float2(moment[0].x, with_slope ? -moment[0].y : moment[0].y);
    if (with_slope) {
      double2 z = times(make_double2(W[at].x, W[at].y), make_double2(moment[1].x, moment[1].y));
      sum.x += z.x, sum.y -= z.y;
    }
  }
  if (!with_slope) return;
  for (int count = 32; count > 0; count /= 2) {
    if (y >= count) sums[y][x] = sum;
    __syncthreads();
    if (y < count) sum.x += sums[y + count][x].x, sum.y += sums[y + count][x].y;
  }
  if (y > 0 || !inside) return;
  double unshift = (double)power_of_two(shift);
  d_log_lambda[n] = make_double2(sum.x * unshift, sum.y * unshift);
}
