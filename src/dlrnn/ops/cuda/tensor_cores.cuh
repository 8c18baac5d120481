// Hopper's matrix product of a group of four warps: D [64, N] += A [64, 16] B [16, N], fp16 numbers
// and fp32 sums. A is in registers: thread (g, t) = (lane / 4, lane % 4) of warp w holds, of the
// rows 16 w + g and 16 w + g + 8, the columns 2 t, 2 t + 1 and 2 t + 8, 2 t + 9; of D the columns
// 8 j + 2 t, 8 j + 2 t + 1. B is in shared memory in pieces of 8 columns x 8 numbers (128 bytes):
// a column's eight follow each other, then the next column's; `next_half` bytes further are the
// other 8 of the 16.
//
// The sums are cut off, not rounded: after a few of them a result is added to an fp32 total.

__device__ inline unsigned long long operand(const void* piece, int next_half) {
  return (shared_address(piece) >> 4 & 0x3fff) | (unsigned long long)(next_half >> 4) << 16 |
         (unsigned long long)(128 >> 4) << 32;
}

#define D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(d, i) D4(d, i), D4(d, i + 4), D4(d, i + 8), D4(d, i + 12)

__device__ inline void multiply(float (&d)[64], const unsigned (&a)[4], unsigned long long b,
                                int keep) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %69, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
      "{%64,%65,%66,%67}, %68, p, 1, 1, 0;\n\t}"
      : D16(d, 0), D16(d, 16), D16(d, 32), D16(d, 48)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}
__device__ inline void multiply(float (&d)[32], const unsigned (&a)[4], unsigned long long b,
                                int keep) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %37, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "{%32,%33,%34,%35}, %36, p, 1, 1, 0;\n\t}"
      : D16(d, 0), D16(d, 16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}

// Registers are ready; what was issued is one group; all but so many groups are done.
__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_end() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ inline void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// The compiler must not move uses of a result, or of an operand, across this point.
template <int COUNT>
__device__ inline void settled(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// ------------------------------------------------------------------------- numbers

// Two numbers in fp16, and what is missing: x = high + low to 22 bits.
__device__ inline void halves(float x, float y, unsigned& high, unsigned& low) {
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(high) : "f"(y), "f"(x));
  float x_high, y_high;
  asm("{\n\t.reg .f16 a, b;\n\tmov.b32 {a, b}, %2;\n\tcvt.f32.f16 %0, a;\n\tcvt.f32.f16 %1, b;\n\t}"
      : "=f"(x_high), "=f"(y_high) : "r"(high));
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(low) : "f"(y - y_high), "f"(x - x_high));
}

__device__ inline double2 times(double2 a, double2 b) {
  return make_double2(a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x);
}
// lambda^k: the phase is formed and reduced in float64.
__device__ inline double2 power(double2 log_lambda, double k) {
  double sine, cosine, modulus = exp(k * log_lambda.x);
  sincos(k * log_lambda.y, &sine, &cosine);
  return make_double2(modulus * cosine, modulus * sine);
}

// ------------------------------------------------------------------------- barriers

// Templates: where device.cuh has the same, that is taken.
template <int = 0>
__device__ inline void barrier_start(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n\tfence.mbarrier_init.release.cluster;"
               ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
template <int = 0>
__device__ inline void barrier_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
               ::"r"(shared_address(barrier)) : "memory");
}

// Of 384 threads: a group that only copies leaves its registers to the two that multiply.
__device__ inline void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }
__device__ inline void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); }
