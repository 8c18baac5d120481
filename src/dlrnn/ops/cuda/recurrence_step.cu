// One step of a diagonal recurrence, for compute capability 8.0 and later:
//
//     x' = lambda x + u - lambda^window leaving,    y = Re(sum_n W_n x'_n) + skip u .
//
// A row is a channel of a sequence: `states` complex numbers. TEAM threads have a row; each has UNROLL vectors of
// VECTOR states at a time, whose lambda stay in registers while the team goes over the block's rows. The rows of a
// group share their lambda: all rows, or those of a channel if each has its own. Within a group, row r is sequence
// r % batch of channel r / batch, so that a team seldom needs other weights.
//
// lambda is evaluated in float64, once for each block. lambda x + u is rounded once: it is computed in float64, or with
// TWO_FLOATS from unevaluated sums of two fp32 numbers, for GPUs whose float64 is slow. y is summed in a fixed order.
//
// Every number of the state is read by the thread that writes it, so that new_x may be x. Without blocks that copy the
// ring, new_past is past: its oldest entry is replaced, and new_oldest is not written.
//
// Constants: TEAM, UNROLL, THREADS (at most), PAIRS (fp32 states, an even number of them: vectors of two), WIDE
// (float64 states), WINDOW (an input leaves), PARAMETERS (log lambda as DLR's own parameters), TWO_FLOATS.

#if WIDE
typedef double Number;
#else
typedef float Number;
#endif
constexpr int VECTOR = PAIRS ? 2 : 1, CHUNK = TEAM * UNROLL * VECTOR, WARPS = TEAM < 32 ? 1 : TEAM / 32;
struct __align__(2 * VECTOR * sizeof(Number)) Vector { Number e[2 * VECTOR]; };
struct __align__(8 * VECTOR) Weights { float e[2 * VECTOR]; };

#if PARAMETERS
typedef float Exponent;  // the root of the decay; the phase is another array
#else
typedef double2 Exponent;
#endif

#if TWO_FLOATS
struct __align__(16) Power { float re, re_low, im, im_low; };
__device__ inline Power power_of(double re, double im) {
  return {(float)re, (float)(re - (float)re), (float)im, (float)(im - (float)im)};
}
struct Sum { float value, error; };
// a + b, and what its rounding lost.
__device__ inline Sum exact_sum(float a, float b) {
  float s = __fadd_rn(a, b), t = __fadd_rn(s, -a);
  return {s, __fadd_rn(__fadd_rn(a, -__fadd_rn(s, -t)), __fadd_rn(b, -t))};
}
// a x + b y + c, where a and b are sums of two numbers; rounded once.
__device__ inline float rounded_once(float a, float a_low, float x, float b, float b_low, float y, float c) {
  float ax = __fmul_rn(a, x), by = __fmul_rn(b, y);
  float low = __fadd_rn(__fmaf_rn(a, x, -ax), __fmaf_rn(b, y, -by));
  low = __fmaf_rn(a_low, x, __fmaf_rn(b_low, y, low));
  Sum product = exact_sum(ax, by), total = exact_sum(product.value, c);
  return __fadd_rn(total.value, __fadd_rn(low, __fadd_rn(product.error, total.error)));
}
#else
struct __align__(16) Power { double re, im; };
__device__ inline Power power_of(double re, double im) { return {re, im}; }
#endif

// lambda^exponent of state n.
__device__ inline Power power(const Exponent* log_lambda, const float* phase, long long n, int exponent) {
#if PARAMETERS
  double root = log_lambda[n], decay = -root * root, angle = phase[n];
#else
  double decay = log_lambda[n].x, angle = log_lambda[n].y;
#endif
  double sine, cosine, modulus = exp(exponent * decay);
  sincos(exponent * angle, &sine, &cosine);
  return power_of(modulus * cosine, modulus * sine);
}

// The ring of the last inputs with its oldest one, at `place`, replaced by u. Block `block` of `blocks`.
template <class Unit>
__device__ inline void copy_ring(const Unit* __restrict__ past, const Unit* __restrict__ u, Unit* __restrict__ new_past,
                                 int rows, int ring, int width, int place, int block, int blocks) {
  const unsigned units = (unsigned)rows * width, stride = blocks * blockDim.x;
#pragma unroll 4
  for (unsigned i = block * blockDim.x + threadIdx.x; i < units; i += stride) {
    unsigned row = i / width, sequence = row / ring;
    new_past[i] = row % ring == place ? u[sequence * width + i % width] : past[i];
  }
}

// What a team needs of a row.
struct Row {
  Vector x[UNROLL];
  float u, leaving;
};

extern "C" __global__ void __launch_bounds__(THREADS, THREADS > 256 ? 1 : 2)
recurrence_step(const float* __restrict__ u, const float* __restrict__ W, const Exponent* __restrict__ log_lambda,
                const float* __restrict__ phase, const float* __restrict__ skip, const Number* __restrict__ x,
                const float* __restrict__ past, const long long* __restrict__ oldest, float* __restrict__ y,
                Number* __restrict__ new_x, float* __restrict__ new_past, long long* __restrict__ new_oldest, int batch,
                int channels, int states, int groups, int parts, int share, int window, int ring) {
  extern __shared__ __align__(16) unsigned char memory[];
  Power* table = (Power*)memory;  // lambda, and lambda^window
  float* sums = (float*)(table + (WINDOW ? 2 : 1) * CHUNK);

  const int place = WINDOW && oldest ? (int)((unsigned long long)*oldest % ring) : 0;
  if (WINDOW && blockIdx.x >= groups * parts) {
    const int block = blockIdx.x - groups * parts, blocks = gridDim.x - groups * parts;
    if (channels % 4)
      copy_ring(past, u, new_past, batch * ring, ring, channels, place, block, blocks);
    else
      copy_ring((const float4*)past, (const float4*)u, (float4*)new_past, batch * ring, ring, channels / 4, place,
                block, blocks);
    if (block == 0 && threadIdx.x == 0) *new_oldest = (place + 1) % ring;
    return;
  }

  const int teams = blockDim.x / TEAM, team = threadIdx.x / TEAM, member = threadIdx.x % TEAM;
  const int group = blockIdx.x / parts, start = blockIdx.x % parts * share;
  const int end = min(start + share, groups > 1 ? batch : batch * channels);
  auto channel_of = [&](int row) { return groups > 1 ? group : row / batch; };
  auto sequence_of = [&](int row) { return groups > 1 ? row : row % batch; };

  for (int chunk = 0; chunk < states; chunk += CHUNK) {
    auto fetch = [&](Row& to, int row) {
      if (row >= end) return;
      const int channel = channel_of(row), sequence = sequence_of(row);
      const long long place_of_row = (long long)sequence * channels + channel;
      const Vector* from = (const Vector*)(x + 2 * (place_of_row * states + chunk));
#pragma unroll
      for (int k = 0; k < UNROLL; k++)
        if (chunk + (k * TEAM + member) * VECTOR < states) to.x[k] = from[k * TEAM + member];
      to.u = u[place_of_row];
      if (WINDOW) to.leaving = past[((long long)sequence * ring + place) * channels + channel];
    };
    Weights weights[UNROLL];
    auto fetch_weights = [&](int row) {
      if (row >= end) return;
      const Weights* from = (const Weights*)(W + 2 * ((long long)channel_of(row) * states + chunk));
#pragma unroll
      for (int k = 0; k < UNROLL; k++)
        if (chunk + (k * TEAM + member) * VECTOR < states) weights[k] = from[k * TEAM + member];
    };

    Row next;
    fetch(next, start + team);  // before the exponentials, which take about as long
    fetch_weights(start + team);

    __syncthreads();  // the table of the previous chunk is not needed any more
    for (int i = threadIdx.x; i < CHUNK && chunk + i < states; i += blockDim.x) {
      const long long n = (long long)group * states + chunk + i;
      table[i] = power(log_lambda, phase, n, 1);
      if (WINDOW) table[CHUNK + i] = power(log_lambda, phase, n, window);
    }
    __syncthreads();
    Power lambda[UNROLL][VECTOR], gone[UNROLL][VECTOR];
#pragma unroll
    for (int k = 0; k < UNROLL; k++)
#pragma unroll
      for (int j = 0; j < VECTOR; j++) {  // undefined beyond the states, and not used there
        lambda[k][j] = table[(k * TEAM + member) * VECTOR + j];
        if (WINDOW) gone[k][j] = table[CHUNK + (k * TEAM + member) * VECTOR + j];
      }

    for (int first = start; first < end; first += teams) {  // uniform, for the shuffles
      const int row = first + team;
      Row now = next;
      fetch(next, row + teams);
      float sum = 0;
      if (row < end) {
        const long long place_of_row = (long long)sequence_of(row) * channels + channel_of(row);
        Vector* to = (Vector*)(new_x + 2 * (place_of_row * states + chunk));
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
          if (chunk + (k * TEAM + member) * VECTOR >= states) continue;
          Vector result;
#pragma unroll
          for (int j = 0; j < VECTOR; j++) {
            const Number re = now.x[k].e[2 * j], im = now.x[k].e[2 * j + 1];
            const Power& l = lambda[k][j];
#if TWO_FLOATS
            result.e[2 * j] = rounded_once(l.re, l.re_low, re, -l.im, -l.im_low, im, now.u);
            result.e[2 * j + 1] = rounded_once(l.re, l.re_low, im, l.im, l.im_low, re, 0);
#else
            double next_re = now.u + l.re * re - l.im * im, next_im = l.re * im + l.im * re;
            if (WINDOW) next_re -= gone[k][j].re * now.leaving, next_im -= gone[k][j].im * now.leaving;
            result.e[2 * j] = (Number)next_re, result.e[2 * j + 1] = (Number)next_im;
#endif
            sum += weights[k].e[2 * j] * (float)result.e[2 * j];
            sum -= weights[k].e[2 * j + 1] * (float)result.e[2 * j + 1];
          }
          to[k * TEAM + member] = result;
        }
      }
      if (row + teams < end && channel_of(row + teams) != channel_of(row)) fetch_weights(row + teams);
#pragma unroll
      for (int far = (TEAM < 32 ? TEAM : 32) / 2; far; far /= 2) sum += __shfl_xor_sync(~0u, sum, far);
      if (row < end && member % 32 == 0) {
        float& at = sums[(row - start) * WARPS + member / 32];
        at = chunk ? at + sum : sum;
      }
    }
  }

  __syncthreads();
  for (int row = start + threadIdx.x; row < end; row += blockDim.x) {
    float sum = 0;
    for (int k = 0; k < WARPS; k++) sum += sums[(row - start) * WARPS + k];
    const int channel = channel_of(row), at = sequence_of(row) * channels + channel;
    y[at] = skip ? sum + skip[channel] * u[at] : sum;
    if (WINDOW && new_past && gridDim.x == groups * parts)  // the ring is not copied, but overwritten
      new_past[((long long)sequence_of(row) * ring + place) * channels + channel] = u[at];
  }
}
