// The Vandermonde product and its moments where every channel has its own lambda.

// ------------------------------------------------------------------------- product

// K[base + a + 64 b] = Re sum_n (W_n lambda_n^(base + 64 b)) lambda_n^a,   a, b < 64: a matrix product in fp32.
// A thread computes 32 powers of its state in float64; entries of the tables are products of two of them.

#define BATCH 256  // states whose powers are computed at a time, one in each thread
#define GROUP 32   // states whose tables are in shared memory at a time
#define TILE 4096  // positions of a block of 256 threads with 4 x 4 each

struct ChannelMemory {
  // lambda^j, lambda^(8 j), lambda^(64 j), W lambda^(base + 512 j), j < 8
  float2 powers[BATCH][33];
  float fine[2][GROUP][64];    // lambda^a, re and im
  float scaled[2][GROUP][64];  // W lambda^(base + 64 b), re and -im
};

// Writes x, x y, ..., x y^7, and returns x y^8.
__device__ inline double2 write_eight_powers(double2 x, double2 y, float2* to) {
  for (int j = 0; j < 8; j++) {
    to[j] = make_float2(x.x, x.y);
    x = times(x, y);
  }
  return x;
}

extern "C" __global__ void __launch_bounds__(256, 2)
channel_product(const float2* W, const double2* log_lambda, float* partial, int rows, int channels,
                int states, int length, int tiles, int states_per_part) {
  extern __shared__ __align__(128) unsigned char memory[];
  ChannelMemory& shared = *(ChannelMemory*)memory;
  int thread = threadIdx.x, row = blockIdx.x % rows, tile = blockIdx.x / rows % tiles;
  int part = blockIdx.x / rows / tiles, end = min(states, (part + 1) * states_per_part);
  const double2* logs = log_lambda + (long long)(row % channels) * states;
  float total[4][4] = {};
  for (int n = part * states_per_part; n < end; n += BATCH) {
    __syncthreads();
    if (n + thread / GROUP * GROUP < end) {  // float64 is slow on many GPUs
      int state = min(n + thread, end - 1);
      double2 log = logs[state], one = make_double2(1, 0), first = tile ? power(log, (double)TILE * tile) : one;
      float2 w = n + thread < end ? W[(long long)row * states + state] : make_float2(0, 0);
      float2* to = shared.powers[thread];
      double2 of_8 = write_eight_powers(one, power(log, 1), to), of_64 = write_eight_powers(one, of_8, to + 8);
      double2 of_512 = write_eight_powers(one, of_64, to + 16);
      write_eight_powers(times(first, make_double2(w.x, w.y)), of_512, to + 24);
    }
    for (int group = 0; group < BATCH && n + group < end; group += GROUP) {
      __syncthreads();
      for (int i = thread; i < GROUP * 128; i += 256) {
        int a = i % 64, of_b = i / 64 % 2, s = i / 128;
        float2 x = shared.powers[group + s][16 * of_b + a % 8];
        float2 y = shared.powers[group + s][16 * of_b + 8 + a / 8];
        float re = x.x * y.x - x.y * y.y, im = x.x * y.y + x.y * y.x;
        (of_b ? shared.scaled : shared.fine)[0][s][a] = re;
        (of_b ? shared.scaled : shared.fine)[1][s][a] = of_b ? -im : im;
      }
      __syncthreads();
      float sum[4][4] = {};
#pragma unroll 4
      for (int s = 0; s < GROUP; s++)
#pragma unroll
        for (int part = 0; part < 2; part++) {
          float4 x = *(float4*)&shared.scaled[part][s][thread / 16 * 4];
          float4 y = *(float4*)&shared.fine[part][s][thread % 16 * 4];
          float xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
          for (int i = 0; i < 16; i++) sum[i / 4][i % 4] += xs[i / 4] * ys[i % 4];
        }
#pragma unroll
      for (int i = 0; i < 16; i++) total[i / 4][i % 4] += sum[i / 4][i % 4];
    }
  }
  long long entries = ((long long)rows * length + 3) / 4 * 4;
  float* to = partial + part * entries + (long long)row * length;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    int k = tile * TILE + (thread / 16 * 4 + i / 4) * 64 + thread % 16 * 4 + i % 4;
    if (k < length) to[k] = total[i / 4][i % 4];
  }
}

// ------------------------------------------------------------------------- moments

// The 64 rows of moments.cuh are the pieces of a channel's rows. At the end their moments, times lambda^(first position
// of the piece), are added. with_derivative: the moments are conjugated, and d_log_lambda = sum over rows of
// (Re, -Im)(W derivative), where derivative are the moments of k v.

__device__ inline void consumers_sync() { named_barrier(1, CONSUMERS); }

extern "C" __global__ void __launch_bounds__(MOMENTS_THREADS, 1)
channel_moments(const char* values, const float* inverse_scale, const double2* log_lambda, const float2* W,
                float2* result, double2* d_log_lambda, int rows, int channels, int states,
                int pieces, int steps, int shift, int with_derivative) {
  extern __shared__ __align__(128) unsigned char memory[];
  int tiles = (states + 127) / 128, channel = blockIdx.x / tiles, tile = blockIdx.x % tiles * 128;
  int thread = threadIdx.x, local = thread / 32 * 16 + thread % 32 / 4, t = thread % 4;
  const double2* logs = log_lambda + (long long)channel * states;
  double2 first = logs[min(tile + local, states - 1)], second = logs[min(tile + local + 8, states - 1)];
  values += (long long)channel * steps * sizeof(MomentsStage);
  float re[32], im[32];
  if (!moments_of_tile(values, first, second, steps, memory, re, im)) return;
  float2(*moment)[128] = (float2(*)[128])memory, (*of_piece)[128] = moment + 64;
  consumers_sync();  // all consumers have read the stages, whose memory is reused
#pragma unroll
  for (int j = 0; j < 32; j++)
    moment[j / 4 * 8 + 2 * t + j % 2][local + 8 * (j / 2 % 2)] = make_float2(re[j], im[j]);
  int n = tile + thread % 128, half = (pieces + 1) / 2, piece = thread / 128 * half;
  if (n < states && piece < pieces) {
    double2 step = power(logs[n], 64.0 * steps);
    double2 z = piece ? power(logs[n], 64.0 * steps * piece) : make_double2(1, 0);
    for (int p = piece; p < min(pieces, piece + half); p++, z = times(z, step))
      of_piece[p][thread % 128] = make_float2(z.x, z.y);
  }
  consumers_sync();
  if (thread >= 128 || n >= states) return;
  double2 d_log = make_double2(0, 0);
  for (int row = 0; row < rows; row++) {
    float unscale = inverse_scale[row * channels + channel] / UNIT;
    long long at = ((long long)row * channels + channel) * states + n;
    for (int derivative = 0; derivative <= with_derivative; derivative++) {
      float2 sum = make_float2(0, 0);
      for (int p = 0; p < pieces; p++) {
        float2 x = moment[(p * (1 + with_derivative) + derivative) * rows + row][thread];
        float2 y = of_piece[p][thread];
        sum.x += x.x * y.x - x.y * y.y, sum.y += x.x * y.y + x.y * y.x;
      }
      sum.x *= unscale, sum.y *= unscale;
      if (derivative) {
        double2 x = times(make_double2(W[at].x, W[at].y), make_double2(sum.x, sum.y));
        d_log.x += x.x, d_log.y -= x.y;
      } else {
        result[at] = make_float2(sum.x, with_derivative ? -sum.y : sum.y);
      }
    }
  }
  double unshift = 1ll << shift;
  if (with_derivative)
    d_log_lambda[(long long)channel * states + n] =
        make_double2(d_log.x * unshift, d_log.y * unshift);
}
