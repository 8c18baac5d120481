// DFTs of 3 and 12 points in registers; butterflies.cuh has those of powers of two.

// exp(-2 pi i k / 48), k <= 12: a constant at compile time, because all uses are unrolled.
__device__ inline float2 root48(int k) {
  constexpr float cosine[13] = {1.f, .99144486137381041114f, .96592582628906828675f,
      .92387953251128675613f, .86602540378443864676f, .79335334029123516458f,
      .70710678118654752440f, .60876142900872063942f, .5f, .38268343236508977173f,
      .25881904510252076235f, .13052619222005159155f, 0.f};
  return {cosine[k], -cosine[12 - k]};
}

template <bool INVERSE>
__device__ inline void dft3(float2& a, float2& b, float2& c) {
  constexpr float sine = .86602540378443864676f;
  float2 sum = add(b, c), rotated = mul_w4<INVERSE>(sub(b, c));
  float2 middle = {a.x - .5f * sum.x, a.y - .5f * sum.y};
  a = add(a, sum);
  b = {middle.x + sine * rotated.x, middle.y + sine * rotated.y};
  c = {middle.x - sine * rotated.x, middle.y - sine * rotated.y};
}

// Three DFTs of 4 points, then four of 3; output q is v[slot<12>(q)].
template <bool INVERSE>
__device__ inline void dft12(float2 (&v)[12]) {
#pragma unroll
  for (int n = 0; n < 3; ++n) dft4<INVERSE>(v[n], v[n + 3], v[n + 6], v[n + 9]);
  v[4] = twiddle_mul<INVERSE>(v[4], root48(4)), v[5] = twiddle_mul<INVERSE>(v[5], root48(8));
  v[7] = twiddle_mul<INVERSE>(v[7], root48(8));
  v[8] = mul_w4<INVERSE>(twiddle_mul<INVERSE>(v[8], root48(4)));
  v[10] = mul_w4<INVERSE>(v[10]), v[11] = {-v[11].x, -v[11].y};
#pragma unroll
  for (int k = 0; k < 4; ++k) dft3<INVERSE>(v[3 * k], v[3 * k + 1], v[3 * k + 2]);
}
