// Storage types (fp32, bf16, fp16), barriers, and asynchronous copies into shared memory.

#if STORAGE_BITS == 32
typedef float Storage;
struct __align__(16) Storage4 { float e[4]; };
__device__ inline float to_fp32(float value) { return value; }
__device__ inline float from_fp32(float value) { return value; }
#else
typedef unsigned short Storage;
struct __align__(8) Storage4 { unsigned short e[4]; };
#if STORAGE_IS_BF16
__device__ inline float to_fp32(Storage value) { return __uint_as_float((unsigned)value << 16); }
__device__ inline Storage from_fp32(float value) {
  Storage narrow;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow) : "f"(value));
  return narrow;
}
#else
__device__ inline float to_fp32(Storage value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
  return wide;
}
__device__ inline Storage from_fp32(float value) {
  Storage narrow;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow) : "f"(value));
  return narrow;
}
#endif
#endif

// A pair of numbers in 16 bits each, x in the lower half: bf16 if that is the storage type, else fp16.
__device__ inline unsigned narrow_pair(float x, float y) {
  unsigned pair;
#if STORAGE_BITS == 16 && STORAGE_IS_BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
#endif
  return pair;
}

// Loads and stores of 1, 2 or 4 adjacent numbers, aligned as a vector.
template <int COUNT>
__device__ inline void load_vector(float (&x)[COUNT], const Storage* from) {
  struct __align__(sizeof(Storage) * COUNT) Vector { Storage e[COUNT]; };
  Vector v = *reinterpret_cast<const Vector*>(from);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) x[i] = to_fp32(v.e[i]);
}
template <int COUNT>
__device__ inline void store_vector(Storage* to, const float (&x)[COUNT]) {
  if constexpr (sizeof(Storage) == 4 || COUNT == 1) {
    struct __align__(sizeof(Storage) * COUNT) Vector { Storage e[COUNT]; } v;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) v.e[i] = from_fp32(x[i]);
    *reinterpret_cast<Vector*>(to) = v;
  } else {
    struct __align__(sizeof(Storage) * COUNT) Vector { unsigned e[COUNT / 2]; } v;
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) v.e[i] = narrow_pair(x[2 * i], x[2 * i + 1]);
    *reinterpret_cast<Vector*>(to) = v;
  }
}

// Loads data that is read once without displacing the tables in the L1 cache.
__device__ inline float2 load_streaming(const float2* from) {
  float2 v;
  asm volatile("ld.global.L1::no_allocate.v2.f32 {%0, %1}, [%2];"
               : "=f"(v.x), "=f"(v.y) : "l"(from));
  return v;
}

// Named barrier `number` (1 to 15) of `threads` threads, a multiple of 32: arrives and waits.
__device__ inline void named_barrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Arrives at a named barrier without waiting.
__device__ inline void named_barrier_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// ------------------------------------------------------------------------- copies

// Starts to load a row of `bytes` into L2; `index` is that of a thread among `threads`, which load a line at a time.
__device__ inline void prefetch_l2_line(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }
__device__ inline void prefetch_row(const void* row, int bytes, int index, int threads) {
  constexpr int LINE = 128;
#pragma unroll 1
  for (int i = index * LINE; i < bytes; i += threads * LINE) prefetch_l2_line((const char*)row + i);
}

// Bulk copies and expect_bytes need compute capability 9.0; mbarriers that count arrivals only need 8.0.
typedef unsigned long long Mbarrier;  // in shared memory: counts arrivals, and the bytes of bulk copies

__device__ inline unsigned shared_address(const void* address) {
  return (unsigned)__cvta_generic_to_shared(address);
}
#if __CUDA_ARCH__ >= 900
#define FENCE_MBARRIER_INIT "\n\tfence.mbarrier_init.release.cluster;"
#define MBARRIER_TEST "mbarrier.try_wait"
#else
#define FENCE_MBARRIER_INIT
#define MBARRIER_TEST "mbarrier.test_wait"
#endif
__device__ inline void mbarrier_init(Mbarrier* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" FENCE_MBARRIER_INIT
               ::"r"(shared_address(barrier)) : "memory");
}
// An mbarrier for `arrivals` threads; the one above is for one.
__device__ inline void mbarrier_init(Mbarrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" FENCE_MBARRIER_INIT
               ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ inline void mbarrier_arrive(Mbarrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ inline void mbarrier_expect_bytes(Mbarrier* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ inline void mbarrier_wait(Mbarrier* barrier, int parity) {
  int done;
  do {
    asm volatile("{\n\t.reg .pred p;\n\t"
                 MBARRIER_TEST ".parity.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.b32 %0, 1, 0, p;\n\t}"
                 : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
  } while (!done);
}
// Orders this thread's accesses to shared memory before asynchronous ones (bulk copies, wgmma) that follow the
// next barrier.
__device__ inline void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Starts a bulk copy; `barrier` counts its bytes. Addresses and bytes are multiples of 16.
__device__ inline void copy_to_shared(void* to, const void* from, int bytes, Mbarrier* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1], %2, [%3];"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
// Waits until the copies by cp.async of this thread are complete.
__device__ inline void wait_for_own_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
