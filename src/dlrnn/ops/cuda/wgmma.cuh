// Hopper's tensor-core instruction wgmma: a group of four warps computes D [64, N] += A [64, 16] B [16, N]
// with fp16 operands (bf16, if that is the storage type) and fp32 sums.
//
// Registers: with (g, t) = (lane / 4, lane % 4), a thread of warp w has rows 16 w + g and 16 w + g + 8: of A
// (if A is in registers) columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, of D columns 8 j + 2 t and 8 j + 2 t + 1.
// Shared memory: B (and A, if it is there) is stored as core matrices of 8 x 8 fp16 numbers, 128 bytes each;
// a descriptor holds the address of the first one and the distances between them.
//
// Tensor cores truncate their sums instead of rounding them: after a few instructions the kernels add a result
// to a total in fp32.

// The descriptor of an operand: `along_sum` bytes from a core matrix to the next along the sum, `across` bytes
// along rows of A or columns of B.
__device__ inline unsigned long long descriptor(const void* first, int along_sum, int across) {
  return shared_address(first) >> 4 | along_sum >> 4 << 16 |
         (unsigned long long)(across >> 4) << 32;
}
// The descriptor, advanced by `bytes`: only its lower half changes.
__device__ inline unsigned long long advance(unsigned long long descriptor, int bytes) {
  return descriptor >> 32 << 32 | (unsigned)descriptor + (unsigned)(bytes >> 4);
}

// The descriptor of an operand whose core matrices follow each other along columns; `next_half` bytes lead to
// the other 8 of the 16 numbers of the sum.
__device__ inline unsigned long long b_descriptor(const void* piece, int next_half) {
  return (shared_address(piece) >> 4 & 0x3fff) | (unsigned long long)(next_half >> 4) << 16 |
         (unsigned long long)(128 >> 4) << 32;
}

#define D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(d, i) D4(d, i), D4(d, i + 4), D4(d, i + 8), D4(d, i + 12)
#define NUMBERS8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define NUMBERS16 NUMBERS8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define NUMBERS32 NUMBERS16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NUMBERS64                                                                 \
  NUMBERS32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
            "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#if STORAGE_BITS == 16 && STORAGE_IS_BF16
#define OPERANDS "bf16.bf16"
#else
#define OPERANDS "f16.f16"
#endif
#define WGMMA(WIDTH, NUMBERS, KEEP)                            \
  "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " KEEP ", 0;\n\t"     \
  "wgmma.mma_async.sync.aligned.m64n" WIDTH "k16.f32." OPERANDS " {" NUMBERS "}, "

// D = A B + (keep ? D : 0), A in registers. TRANSPOSED: B is stored row by row instead of column by column.
#define FROM_REGISTERS(COUNT, WIDTH, NUMBERS, D, A, B, KEEP, FLAG)                            \
  template <int TRANSPOSED>                                                                   \
  __device__ inline void wgmma(float (&d)[COUNT], const unsigned (&a)[4],                     \
                               unsigned long long b, int keep) {                              \
    asm volatile(WGMMA(WIDTH, NUMBERS, KEEP) "{" A "}, " B ", p, 1, 1, " FLAG ";\n\t}"        \
                 : D                                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep),             \
                   "n"(TRANSPOSED));                                                          \
  }
#define D8(d) D4(d, 0), D4(d, 4)
#define D32(d) D16(d, 0), D16(d, 16)
#define D64(d) D32(d), D16(d, 32), D16(d, 48)
FROM_REGISTERS(8, "16", NUMBERS8, D8(d), "%8,%9,%10,%11", "%12", "%13", "%14")
FROM_REGISTERS(16, "32", NUMBERS16, D16(d, 0), "%16,%17,%18,%19", "%20", "%21", "%22")
FROM_REGISTERS(32, "64", NUMBERS32, D32(d), "%32,%33,%34,%35", "%36", "%37", "%38")
FROM_REGISTERS(64, "128", NUMBERS64, D64(d), "%64,%65,%66,%67", "%68", "%69", "%70")

// D = A B + (keep ? D : 0), both in shared memory: A is stored row by row, B column by column.
#define FROM_MEMORY(COUNT, WIDTH, NUMBERS, D, A, B, KEEP)                                     \
  __device__ inline void wgmma(float (&d)[COUNT], unsigned long long a,                       \
                               unsigned long long b, int keep) {                              \
    asm volatile(WGMMA(WIDTH, NUMBERS, KEEP) A ", " B ", p, 1, 1, 0, 0;\n\t}"                 \
                 : D : "l"(a), "l"(b), "r"(keep));                                            \
  }
FROM_MEMORY(32, "64", NUMBERS32, D32(d), "%32", "%33", "%34")
FROM_MEMORY(64, "128", NUMBERS64, D64(d), "%64", "%65", "%66")

// wgmma_fence: required before the first instruction, orders earlier writes of the registers. wgmma_commit: the
// instructions issued so far form a group. wgmma_wait: waits until at most PENDING groups are unfinished.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving a use of the accumulators d across this point.
template <int COUNT>
__device__ inline void pin_registers(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// Moves registers between warp groups: one of them frees some (decrease), another one takes them (increase).
template <int COUNT>
__device__ inline void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ inline void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ------------------------------------------------------------------------- copies

// Copies 16 bytes into shared memory; the thread arrives at the mbarrier when all its copies are complete.
__device__ inline void copy_async_16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
               ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ inline void mbarrier_arrive_after_copies(Mbarrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];"
               ::"r"(shared_address(barrier)) : "memory");
}
__device__ inline void prefetch_l2(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

// Returns x, hidden from the compiler: what a loop computes from x is computed in each iteration instead of
// being hoisted into registers.
__device__ inline int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ------------------------------------------------------------------------- numbers

// Splits two numbers into fp16 pairs: x = high + low to 22 bits.
__device__ inline void split_fp16(float x, float y, unsigned& high, unsigned& low) {
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(high) : "f"(y), "f"(x));
  float x_high, y_high;
  asm("{\n\t.reg .f16 a, b;\n\tmov.b32 {a, b}, %2;\n\tcvt.f32.f16 %0, a;\n\tcvt.f32.f16 %1, b;\n\t}"
      : "=f"(x_high), "=f"(y_high) : "r"(high));
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(low) : "f"(y - y_high), "f"(x - x_high));
}

__device__ inline double2 times(double2 a, double2 b) {
  return make_double2(a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x);
}
// lambda^k from log lambda; the phase is computed and reduced in float64.
__device__ inline double2 power(double2 log_lambda, double k) {
  double sine, cosine, modulus = exp(k * log_lambda.x);
  sincos(k * log_lambda.y, &sine, &cosine);
  return make_double2(modulus * cosine, modulus * sine);
}
