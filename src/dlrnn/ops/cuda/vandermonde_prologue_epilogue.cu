// Kernels before and after those on tensor cores. Prologue: tables of powers; W and v scaled, split into fp16 parts and
// arranged as tensor cores read them. Epilogue: sums of partial products, and of the moments of pieces.

#define ROWS 64
#define PREPARE 512   // threads
#define SEGMENT 16384  // entries of a row of which one block finds the largest
#define PIECES 64      // at most

// The exponent e with 2^(e - 1) <= |x| < 2^e; no smaller than that of 2^-100.
__device__ inline int exponent_above(float x) {
  return (__float_as_int(fmaxf(x, 7.9e-31f)) >> 23 & 255) - 126;
}
__device__ inline float power_of_two(int exponent) {
  return __int_as_float((exponent + 127) << 23);
}
__device__ inline float block_max(float x) {
  __shared__ float warps[32];
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  for (int i = 0; i < blockDim.x / 32; i++) x = fmaxf(x, warps[i]);
  return x;
}

// A chunk of 32 states: lambda^a, a < 128, as the operand of the product (table), lambda^128 (block_power),
// lambda^(512 i) (tile_powers) and lambda^(32768 i) (coarse_powers).
__device__ void make_tables(const double2* log_lambda, uint4* table, double2* block_power, double2* tile_powers,
                            double2* coarse_powers, int chunk, int given_states, int states, int tile_count,
                            int coarse_count) {
  __shared__ double2 units[STATES][17], sixteens[STATES][9];
  int state = threadIdx.x % STATES, n = chunk * STATES + state;
  double2 log = log_lambda[min(n, given_states - 1)];
  if (threadIdx.x < STATES) {
    double2 one = power(log, 1), x = make_double2(1, 0), sixteen;
    for (int j = 0; j < 16; j++, x = times(x, one)) units[state][j] = make_double2(UNIT * x.x, UNIT * x.y);
    sixteen = x, x = make_double2(1, 0);
    for (int j = 0; j < 8; j++, x = times(x, sixteen)) sixteens[state][j] = x;
    block_power[n] = x;
  } else {
    for (int i = threadIdx.x / STATES - 1; i < tile_count + coarse_count; i += PREPARE / STATES - 1) {
      int coarse = i - tile_count;
      if (coarse < 0) tile_powers[(long long)i * states + n] = power(log, 512.0 * i);
      else coarse_powers[(long long)coarse * states + n] = power(log, 32768.0 * coarse);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 8 * 128; i += PREPARE) {
    int a = i % 128, four = i / 128;
    unsigned high[4], low[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      double2 x = times(units[4 * four + j][a % 16], sixteens[4 * four + j][a / 16]);
      split_fp16(x.x, x.y, high[j], low[j]);
    }
    uint4* to = table + ((long long)(chunk * 4 + four / 2) * 4 + four % 2) * 128 + a;
    to[0] = make_uint4(high[0], high[1], high[2], high[3]);
    to[256] = make_uint4(low[0], low[1], low[2], low[3]);
  }
}

// A row of W, scaled to at most 2^13; inverse_scale[row] undoes the scale.
__device__ void scale_weights(const float2* W, float2* operands, float* inverse_scale, int row, int rows,
                              int given_states, int states) {
  const float2* from = W + (long long)row * given_states;
  float largest = 0;
  if (row < rows)
#pragma unroll 4
    for (int n = threadIdx.x; n < given_states; n += PREPARE)
      largest = fmaxf(largest, fmaxf(fabsf(from[n].x), fabsf(from[n].y)));
  int exponent = exponent_above(block_max(largest));
  float scale = power_of_two(13 - exponent);
  if (threadIdx.x == 0 && row < rows) inverse_scale[row] = power_of_two(exponent - 13);
#pragma unroll 4
  for (int n = threadIdx.x; n < states; n += PREPARE) {
    float2 w = row < rows && n < given_states ? from[n] : make_float2(0, 0);
    long long at = (long long)(row / HEIGHT) * (states / STATES) + n / STATES;
    at = (at * 4 + n / 8 % 4) * 4 + row / 8 % 4;  // [8 states][8 rows]
    at = (at * 32 + row % 8 * 4 + n % 4) * 2 + n / 4 % 2;
    operands[at] = make_float2(scale * w.x, scale * w.y);
  }
}

// A block for each chunk of 32 states makes tables; a block for each row of W scales it.
extern "C" __global__ void __launch_bounds__(PREPARE)
prepare(const double2* log_lambda, const float2* W, uint4* table, double2* block_power, double2* tile_powers,
        double2* coarse_powers, float2* operands, float* inverse_scale, int rows, int given_states, int states,
        int tile_count, int coarse_count) {
  int i = blockIdx.x, chunks = states / STATES;
  if (i < chunks)
    make_tables(log_lambda, table, block_power, tile_powers, coarse_powers, i, given_states, states,
                tile_count, coarse_count);
  else
    scale_weights(W, operands, inverse_scale, i - chunks, rows, given_states, states);
}

// The sum of the parts of a product; a thread has four entries.
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

// The largest absolute value of each segment of the rows of v.
extern "C" __global__ void __launch_bounds__(256)
largest(const float* v, float* maxima, int length, int segments) {
  int row = blockIdx.x / segments, segment = blockIdx.x % segments;
  const float* from = v + (long long)row * length;
  float x = 0;
  for (int k = segment * SEGMENT + threadIdx.x; k < min(length, (segment + 1) * SEGMENT); k += 256)
    x = fmaxf(x, fabsf(from[k]));
  x = block_max(x);
  if (threadIdx.x == 0) maxima[blockIdx.x] = x;
}

// The operand of the moments: rows of v, scaled to at most 2^13, and with_derivative also the rows of 2^-shift k v,
// k < 2^shift. A row is cut into pieces; each piece is a row of the operand. With several channels, v has
// [rows / channels, channels] rows, and 64 rows of the operand hold the pieces of one channel. Eight lanes write eight
// rows of the operand: eight rows of v, or with several channels eight pieces of one row. A block has 128 x 8
// positions of each.
extern "C" __global__ void __launch_bounds__(256)
values(const float* v, const float* maxima, uint4* operands, float* inverse_scale, int rows, int channels,
       int length, int segments, int pieces, int steps, int shift, int with_derivative) {
  int lane = threadIdx.x % 32, row_groups = channels > 1 ? rows : (rows + 7) / 8;
  int row = blockIdx.x % row_groups, group = blockIdx.x / row_groups;
  if (channels == 1) row = row * 8 + lane % 8;
  float largest_of_row = 0;
  if (row < rows)
    for (int i = lane / 8; i < segments; i += 4)
      largest_of_row = fmaxf(largest_of_row, maxima[(long long)row * segments + i]);
  largest_of_row = fmaxf(largest_of_row, __shfl_xor_sync(~0u, largest_of_row, 8));
  largest_of_row = fmaxf(largest_of_row, __shfl_xor_sync(~0u, largest_of_row, 16));
  if (row >= rows) return;
  int exponent = exponent_above(largest_of_row);
  float scale = power_of_two(13 - exponent), unit = power_of_two(-shift);
  if (group == 0 && threadIdx.x / 8 == 0) inverse_scale[row] = power_of_two(exponent - 13);
  const float* from = v + (long long)row * length;
  for (int i = 0; i < 4; i++) {
    int eight = (group * 4 + i) * 32 + threadIdx.x / 8;
    int piece = eight / (8 * steps), within = eight % (8 * steps);
    if (channels > 1) piece = piece * 8 + lane % 8;
    if (piece >= pieces) return;
    int k = 8 * (piece * 8 * steps + within);
    float x[8];
    if (length % 4 == 0 && k + 8 <= length) {  // v is aligned to 16 bytes
      *(float4*)x = *(const float4*)(from + k), *(float4*)(x + 4) = *(const float4*)(from + k + 4);
    } else {
#pragma unroll
      for (int j = 0; j < 8; j++) x[j] = k + j < length ? from[k + j] : 0;
    }
    for (int derivative = 0; derivative <= with_derivative; derivative++) {
      long long to_row = piece * (1 + with_derivative) + derivative;
      to_row = row % channels * ROWS + to_row * (rows / channels) + row / channels;
      unsigned high[4], low[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float a = derivative ? (k + 2 * j) * unit : 1, b = derivative ? (k + 2 * j + 1) * unit : 1;
        split_fp16(a * (scale * x[2 * j]), b * (scale * x[2 * j + 1]), high[j], low[j]);
      }
      uint4* to = operands + (to_row / ROWS * steps + within / 8) * 1024 + within % 8 * ROWS +
                  to_row % ROWS;
      to[0] = make_uint4(high[0], high[1], high[2], high[3]);
      to[512] = make_uint4(low[0], low[1], low[2], low[3]);
    }
  }
}

// result = sum over pieces of lambda^(piece_length piece) times the moments of the piece. with_derivative: result is
// conjugated, and d_log_lambda = sum over rows of (Re, -Im)(W derivative), where derivative are the moments of k v.
// A block has 8 states.
extern "C" __global__ void __launch_bounds__(512)
finish(const float2* partial, const float* inverse_scale, const double2* log_lambda, const float2* W,
       float2* result, double2* d_log_lambda, int rows, int states, int pieces, int piece_length,
       int shift, int with_derivative) {
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
    float unscale = inverse_scale[row];
    float2 moment[2];
#pragma unroll
    for (int derivative = 0; derivative < 2; derivative++) {
      moment[derivative] = make_float2(0, 0);
      if (derivative > with_derivative) continue;
      for (int p = 0; p < pieces; p++) {
        long long from = (long long)p * (1 + with_derivative) * rows + derivative * rows + row;
        float2 part = partial[from * states + n], z = power_of_piece[p][x];
        moment[derivative].x += part.x * z.x - part.y * z.y;
        moment[derivative].y += part.x * z.y + part.y * z.x;
      }
      moment[derivative].x *= unscale / (float)UNIT, moment[derivative].y *= unscale / (float)UNIT;
    }
    long long at = (long long)row * states + n;
    if (inside) result[at] = make_float2(moment[0].x, with_derivative ? -moment[0].y : moment[0].y);
    if (with_derivative) {
      double2 z = times(make_double2(W[at].x, W[at].y), make_double2(moment[1].x, moment[1].y));
      sum.x += z.x, sum.y -= z.y;
    }
  }
  if (!with_derivative) return;
  for (int count = 32; count > 0; count /= 2) {
    if (y >= count) sums[y][x] = sum;
    __syncthreads();
    if (y < count) sum.x += sums[y + count][x].x, sum.y += sums[y + count][x].y;
  }
  if (y > 0 || !inside) return;
  double unshift = (double)power_of_two(shift);
  d_log_lambda[n] = make_double2(sum.x * unshift, sum.y * unshift);
}
