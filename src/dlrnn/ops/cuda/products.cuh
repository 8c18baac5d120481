// Products as in tensor_cores.cuh, in all widths, with either operand where it lies.

// Of an operand in shared memory, pieces of 8 x 8 numbers (128 bytes): bytes from one piece to the
// next along the sum, and along rows or columns.
__device__ inline unsigned long long pieces(const void* first, int along_sum, int across) {
  return shared_address(first) >> 4 | along_sum >> 4 << 16 |
         (unsigned long long)(across >> 4) << 32;
}
// The same, so many bytes further on: only the lower half changes.
__device__ inline unsigned long long further(unsigned long long pieces, int bytes) {
  return pieces >> 32 << 32 | (unsigned)pieces + (unsigned)(bytes >> 4);
}

#define NUMBERS8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define NUMBERS16 NUMBERS8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define NUMBERS32 NUMBERS16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NUMBERS64                                                                 \
  NUMBERS32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
            "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA(WIDTH, NUMBERS, KEEP)                            \
  "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " KEEP ", 0;\n\t"     \
  "wgmma.mma_async.sync.aligned.m64n" WIDTH "k16.f32.f16.f16 {" NUMBERS "}, "

// D += A B, A in registers. TRANSPOSED: numbers of B's rows follow each other, not its columns'.
#define FROM_REGISTERS(COUNT, WIDTH, NUMBERS, D, A, B, KEEP, FLAG)                            \
  template <int TRANSPOSED>                                                                   \
  __device__ inline void accumulate(float (&d)[COUNT], const unsigned (&a)[4],                \
                                    unsigned long long b, int keep) {                         \
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

// D += A B, both in shared memory, the numbers of A's rows and of B's columns following each other.
#define FROM_MEMORY(COUNT, WIDTH, NUMBERS, D, A, B, KEEP)                                     \
  __device__ inline void accumulate(float (&d)[COUNT], unsigned long long a,                  \
                                    unsigned long long b, int keep) {                         \
    asm volatile(WGMMA(WIDTH, NUMBERS, KEEP) A ", " B ", p, 1, 1, 0, 0;\n\t}"                 \
                 : D : "l"(a), "l"(b), "r"(keep));                                            \
  }
FROM_MEMORY(32, "64", NUMBERS32, D32(d), "%32", "%33", "%34")
FROM_MEMORY(64, "128", NUMBERS64, D64(d), "%64", "%65", "%66")

// A group of four warps takes registers that another has left.
template <int COUNT>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ inline void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ------------------------------------------------------------------------- small copies

// 16 bytes into shared memory; a thread arrives at the barrier when all of its own are there.
__device__ inline void copy_vector(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
               ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ inline void barrier_arrive_after_copies(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];"
               ::"r"(shared_address(barrier)) : "memory");
}
__device__ inline void prefetch(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

// The same number, of which the compiler knows nothing: what is made of it in a loop is made there,
// and not kept in registers that others need.
__device__ inline int fresh(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ inline float two_to_the(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
