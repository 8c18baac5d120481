// Complex arithmetic and small DFTs in registers. INVERSE uses the conjugate twiddle factors.

__device__ inline float2 add(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
__device__ inline float2 sub(float2 a, float2 b) { return {a.x - b.x, a.y - b.y}; }
__device__ inline float2 mul(float2 a, float2 b) {
  return {a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x};
}
__device__ inline float2 mul_conj(float2 a, float2 b) {  // a conj(b)
  return {a.x * b.x + a.y * b.y, a.y * b.x - a.x * b.y};
}
template <bool INVERSE>
__device__ inline float2 twiddle_mul(float2 a, float2 w) {
  return INVERSE ? mul_conj(a, w) : mul(a, w);
}
template <bool INVERSE>
__device__ inline float2 mul_w4(float2 a) {  // a w_4, w_4 = -i
  return INVERSE ? float2{-a.y, a.x} : float2{a.y, -a.x};
}

// ------------------------------------------------------------------------- butterflies

// exp(-2 pi i k / 64), k <= 48: a constant at compile time, because all uses are unrolled.
__device__ inline float2 root64(int k) {
  constexpr float cosine[17] = {1.f, .99518472667219688624f, .98078528040323044912f,
      .95694033573220886494f, .92387953251128675613f, .88192126434835502971f,
      .83146961230254523708f, .77301045336273696082f, .70710678118654752440f,
      .63439328416364549822f, .55557023301960222474f, .47139673682599764856f,
      .38268343236508977173f, .29028467725446236764f, .19509032201612826785f,
      .09801714032956060199f, 0.f};
  if (k <= 16) return {cosine[k], -cosine[16 - k]};
  if (k <= 32) return {-cosine[32 - k], -cosine[k - 16]};
  return {-cosine[k - 32], cosine[48 - k]};
}

template <bool INVERSE>
__device__ inline void dft2(float2& a, float2& b) {
  float2 difference = sub(a, b);
  a = add(a, b), b = difference;
}

template <bool INVERSE>
__device__ inline void dft4(float2& a, float2& b, float2& c, float2& d) {
  float2 sum_ac = add(a, c), diff_ac = sub(a, c), sum_bd = add(b, d);
  float2 diff_bd = mul_w4<INVERSE>(sub(b, d));
  a = add(sum_ac, sum_bd), c = sub(sum_ac, sum_bd);
  b = add(diff_ac, diff_bd), d = sub(diff_ac, diff_bd);
}

// v <- its DFT; output q is v[slot<RADIX>(q)]. RADIX = 4 A: A DFTs of 4 points, then 4 DFTs of A points.
template <int RADIX>
__device__ constexpr int slot(int q) {
  return RADIX <= 4 ? q : RADIX / 4 * (q % 4) + q / 4;
}

template <int RADIX, bool INVERSE>
__device__ inline void dft(float2 (&v)[RADIX]) {
  if constexpr (RADIX == 2) {
    dft2<INVERSE>(v[0], v[1]);
  } else if constexpr (RADIX == 4) {
    dft4<INVERSE>(v[0], v[1], v[2], v[3]);
  } else {
    constexpr int A = RADIX / 4;
#pragma unroll
    for (int n = 0; n < A; ++n) dft4<INVERSE>(v[n], v[n + A], v[n + 2 * A], v[n + 3 * A]);
#pragma unroll
    for (int k = 1; k < 4; ++k)
#pragma unroll
      for (int n = 1; n < A; ++n) {
        float2& value = v[n + A * k];
        int eighths = 8 * n * k / RADIX;
        if (8 * n * k % RADIX) {
          value = twiddle_mul<INVERSE>(value, root64(64 / RADIX * n * k));
        } else if (eighths == 2) {
          value = mul_w4<INVERSE>(value);
        } else {  // an odd number of eighths: (1 - i) / sqrt 2, or that times -i
          constexpr float half = .70710678118654752440f;
          float2 r = INVERSE ? float2{value.x - value.y, value.x + value.y}
                             : float2{value.x + value.y, value.y - value.x};
          if (eighths == 3) r = mul_w4<INVERSE>(r);
          value = {half * r.x, half * r.y};
        }
      }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (A == 2) dft2<INVERSE>(v[2 * k], v[2 * k + 1]);
      else dft4<INVERSE>(v[4 * k], v[4 * k + 1], v[4 * k + 2], v[4 * k + 3]);
    }
  }
}

// Multiplies output q of a forward butterfly, or input q of an inverse one, by `shift w^q` (INVERSE: by its
// conjugate); `powers` holds w and w^4. Without SHIFTED, shift is 1.
template <int RADIX, bool INVERSE, bool SHIFTED>
__device__ inline void apply_twiddles(float2 (&v)[RADIX], float4 powers, float2 shift) {
  float2 w = {powers.x, powers.y}, w4 = {powers.z, powers.w}, base = shift;
  float2 small[4] = {{1.f, 0.f}, w, mul(w, w), {}};
  small[3] = mul(small[2], w);
#pragma unroll
  for (int a = 0; a < (RADIX + 3) / 4; ++a) {
    bool one = !SHIFTED && a == 0;
#pragma unroll
    for (int b = 0; b < 4 && b < RADIX; ++b) {
      if (one && b == 0) continue;
      float2 factor = one ? small[b] : b == 0 ? base : mul(base, small[b]);
      float2& value = v[INVERSE ? 4 * a + b : slot<RADIX>(4 * a + b)];
      value = twiddle_mul<INVERSE>(value, factor);
    }
    base = one ? w4 : mul(base, w4);
  }
}

