// What only a GPU has: 16-bit storage, and copies that go on while others compute.

#if STORAGE_BITS == 32
typedef float Stored;
struct __align__(16) Stored4 { float e[4]; };
__device__ inline float widened(float value) { return value; }
__device__ inline float narrowed(float value) { return value; }
#else
typedef unsigned short Stored;
struct __align__(8) Stored4 { unsigned short e[4]; };
#if STORAGE_IS_BF16
__device__ inline float widened(Stored value) { return __uint_as_float((unsigned)value << 16); }
__device__ inline Stored narrowed(float value) {
  Stored narrow;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow) : "f"(value));
  return narrow;
}
#else
__device__ inline float widened(Stored value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
  return wide;
}
__device__ inline Stored narrowed(float value) {
  Stored narrow;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow) : "f"(value));
  return narrow;
}
#endif
#endif

// What is read once must not drive the tables out of the first cache.
__device__ inline float2 streamed(const float2* from) {
  float2 v;
  asm volatile("ld.global.L1::no_allocate.v2.f32 {%0, %1}, [%2];"
               : "=f"(v.x), "=f"(v.y) : "l"(from));
  return v;
}

// Waits for `threads` threads, a multiple of 32, that share a number from 1 to 15.
__device__ inline void team_barrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Is counted there, but does not wait.
__device__ inline void team_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// ------------------------------------------------------------------------- copies

typedef unsigned long long Barrier;  // in shared memory: counts the bytes that have come

__device__ inline unsigned shared_address(const void* address) {
  return (unsigned)__cvta_generic_to_shared(address);
}
__device__ inline void barrier_start(Barrier* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;"
               ::"r"(shared_address(barrier)) : "memory");
}
// One that counts arrivals instead.
__device__ inline void barrier_start(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n\tfence.mbarrier_init.release.cluster;"
               ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ inline void barrier_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ inline void barrier_expect(Barrier* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ inline void barrier_wait(Barrier* barrier, int parity) {
  int done;
  do {
    asm volatile("{\n\t.reg .pred p;\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.b32 %0, 1, 0, p;\n\t}"
                 : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
  } while (!done);
}
// What this thread has done in shared memory is done before a copy into it, after the next barrier.
__device__ inline void before_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Addresses and bytes are multiples of 16.
__device__ inline void copy_to_shared(void* to, const void* from, int bytes, Barrier* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1], %2, [%3];"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
