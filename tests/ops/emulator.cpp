// Implements on a CPU what the CUDA sources of `ops.cuda` use on a GPU, including all functions with inline assembly.
// Every thread is a fibre with a stack of its own; blocks run one after the other. An asynchronous copy is performed as
// late as possible: when no thread can continue without it.

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

using std::max;
using std::min;
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) double2 { double x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static double2 make_double2(double x, double y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct Index { int x, y, z; };
static Index threadIdx, blockIdx, blockDim, gridDim;
static unsigned char* shared_memory;
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(...)

// ------------------------------------------------------------------------- threads

namespace emulator {
constexpr int STACK = 1 << 17, PAGE = 4096;
static ucontext_t beginnings[1024];
static jmp_buf scheduler, fibres[1024];  // setjmp switches without a system call, unlike swapcontext
static bool started[1024], finished[1024];
static long progress;  // if none happens in a whole round, the threads are deadlocked
static void (*body)();
static long long* arguments;
static sigjmp_buf escape;
static const char* wrong;
[[noreturn]] static void fail(const char* text) {
  wrong = text;
  siglongjmp(escape, 1);
}

static void pass_on() {
  if (!_setjmp(fibres[threadIdx.x])) _longjmp(scheduler, 1);
}
static void resume(int thread) {
  threadIdx.x = thread;
  if (_setjmp(scheduler)) return;
  if (started[thread]) _longjmp(fibres[thread], 1);
  started[thread] = true;
  setcontext(&beginnings[thread]);
}
struct Meeting {
  int arrived, round;
  bool arrive(int threads) {
    progress++;
    if (++arrived < threads) return false;
    arrived = 0, round++;
    return true;
  }
  void meet(int threads) {
    int now = round;
    if (!arrive(threads)) while (round == now) pass_on();
  }
};
static Meeting of_block, of_groups[8], of_warps[32], of_halves[64], numbered[16];
static void forget_meetings() {
  of_block = {};
  for (auto& m : of_groups) m = {};
  for (auto& m : of_warps) m = {};
  for (auto& m : of_halves) m = {};
  for (auto& m : numbered) m = {};
}
}  // namespace emulator

static void __syncthreads() { emulator::of_block.meet(blockDim.x); }
static void __syncwarp(unsigned lanes = ~0u) {
  if (lanes == ~0u) emulator::of_warps[threadIdx.x / 32].meet(32);
  else emulator::of_halves[threadIdx.x / 16].meet(16);
}
static void named_barrier(int number, int threads) { emulator::numbered[number].meet(threads); }
static void named_barrier_arrive(int number, int threads) { emulator::numbered[number].arrive(threads); }
static void __threadfence() {}
static void __threadfence_block() {}
static unsigned atomicAdd(unsigned* at, unsigned more) { return (*at += more) - more; }
template <class T> T from_lane(T x, int lane) {
  static T values[1024];
  values[threadIdx.x] = x;
  __syncwarp();
  T y = values[threadIdx.x / 32 * 32 + lane];
  __syncwarp();
  return y;
}
template <class T> T __shfl_xor_sync(unsigned, T x, int far) {
  return from_lane(x, threadIdx.x % 32 ^ far);
}
template <class T> T __shfl_sync(unsigned, T x, int lane) { return from_lane(x, lane); }
static void wait_for_previous_launch() {}
static void begin_overlap(int) {}

// ------------------------------------------------------------------------- copies

typedef unsigned long long Mbarrier;
namespace emulator {
struct Counts { int bytes; unsigned char all, phase; short missing; };
static void changed(Mbarrier* barrier, int arrivals, int bytes) {
  Counts* c = (Counts*)barrier;
  c->missing -= arrivals, c->bytes += bytes, progress++;
  if (c->missing < 0) fail("more threads arrive at a barrier than it counts");
  if (!c->missing && !c->bytes) c->missing = c->all, c->phase ^= 1;
}
// A copy, and what then happens to a barrier, if there is one.
struct Later { void* to; const void* from; int bytes; Mbarrier* barrier; int arrivals, arrived_bytes, thread; };
static std::vector<Later> later;
// Perform those of one thread (its copies of vectors), or all.
static void act(int thread = -1) {
  std::vector<Later> left;
  for (auto& each : later) {
    if (thread >= 0 && each.thread != thread) {
      left.push_back(each);
      continue;
    }
    if (((uintptr_t)each.to | (uintptr_t)each.from | each.bytes) & 15) fail("a copy is not of vectors");
    if (each.bytes) memcpy(each.to, each.from, each.bytes);
    if (each.barrier) changed(each.barrier, each.arrivals, -each.arrived_bytes);
    progress++;
  }
  later = left;
}
}  // namespace emulator

static long __cvta_generic_to_shared(const void* address) {
  return (unsigned char*)address - shared_memory;
}
static void mbarrier_init(Mbarrier* barrier, int arrivals = 1) {
  *(emulator::Counts*)barrier = {0, (unsigned char)arrivals, 0, (short)arrivals};
}
static void mbarrier_expect_bytes(Mbarrier* barrier, int bytes) { emulator::changed(barrier, 1, bytes); }
static void mbarrier_arrive(Mbarrier* barrier) { emulator::changed(barrier, 1, 0); }
static void mbarrier_wait(Mbarrier* barrier, int parity) {
  while (((emulator::Counts*)barrier)->phase == parity) emulator::pass_on();
}
static void fence_async_proxy() {}
static void copy_to_shared(void* to, const void* from, int bytes, Mbarrier* barrier) {
  emulator::later.push_back({to, from, bytes, barrier, 0, bytes, -1});
}
static void copy_to_shared_hinted(void* to, const void* from, int bytes, Mbarrier* barrier, bool) {
  copy_to_shared(to, from, bytes, barrier);
}
static void copy_async_16(void* to, const void* from) {
  emulator::later.push_back({to, from, 16, nullptr, 0, 0, threadIdx.x});
}
static void mbarrier_arrive_after_copies(Mbarrier* barrier) {
  emulator::later.push_back({nullptr, nullptr, 0, barrier, 1, 0, threadIdx.x});
}
static void copy_own_16(void* to, const void* from) { copy_async_16(to, from); }
static void wait_for_own_copies() { emulator::act(threadIdx.x); }
static void prefetch_l2(const void* line) { (void)*(volatile const char*)line; }
static void prefetch_l2_line(const void* line) { prefetch_l2(line); }
static float2 load_streaming(const float2* from) { return *from; }
static void add_to(float4* sum, float2 a, float2 b) {
  sum->x += a.x, sum->y += a.y, sum->z += b.x, sum->w += b.y;
}
template <class T> T __ldg(const T* from) { return *from; }

// ------------------------------------------------------------------------- numbers

template <class To, class From> To bits_of(From x) {
  To y;
  static_assert(sizeof x == sizeof y, "");
  memcpy(&y, &x, sizeof y);
  return y;
}
static unsigned __float_as_uint(float x) { return bits_of<unsigned>(x); }
static float __uint_as_float(unsigned x) { return bits_of<float>(x); }
static int __float_as_int(float x) { return bits_of<int>(x); }
static float __int_as_float(int x) { return bits_of<float>(x); }
static float __fadd_rn(float x, float y) { return x + y; }  // without -mfma g++ contracts nothing
static float __fmul_rn(float x, float y) { return x * y; }
static float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
static float exp2_approx(float x) { return exp2f(x); }
static float reciprocal_approx(float x) { return 1 / x; }
template <class T> T opaque(T x) { return x; }
static void split_fp16(float x, float y, unsigned& high, unsigned& low) {
  _Float16 h[2] = {(_Float16)x, (_Float16)y};
  _Float16 l[2] = {(_Float16)(x - (float)h[0]), (_Float16)(y - (float)h[1])};
  memcpy(&high, h, 4), memcpy(&low, l, 4);
}
#if STORAGE_BITS == 16 && STORAGE_IS_BF16
static unsigned short from_fp32(float x) {
  unsigned bits = __float_as_uint(x);
  return x != x ? 0x7fff : bits + 0x7fff + (bits >> 16 & 1) >> 16;
}
#elif STORAGE_BITS == 16
static float to_fp32(unsigned short x) { return bits_of<_Float16>(x); }
static unsigned short from_fp32(float x) { return bits_of<unsigned short>((_Float16)x); }
#endif

static unsigned narrow_pair(float x, float y) {
#if STORAGE_BITS == 16
  return from_fp32(x) | (unsigned)from_fp32(y) << 16;
#else
  return bits_of<unsigned short>((_Float16)x) | (unsigned)bits_of<unsigned short>((_Float16)y) << 16;
#endif
}

// ------------------------------------------------------------------------- tensor cores

static void wgmma_fence() {}
static void wgmma_commit() {}
template <int PENDING> void wgmma_wait() {}
template <int COUNT> void pin_registers(float (&)[COUNT]) {}
template <int COUNT> void increase_registers() {}
template <int COUNT> void decrease_registers() {}
namespace emulator {
// Number i of an operand.
static float operand(const void* from, int i) {
#if STORAGE_BITS == 16 && STORAGE_IS_BF16
  return __uint_as_float((unsigned)((const unsigned short*)from)[i] << 16);
#else
  return ((const _Float16*)from)[i];
#endif
}
// An operand in shared memory: number k along the sum of row or column n.
static float number(unsigned long long from, int k, int n, bool transposed) {
  int address = (from & 0x3fff) << 4, within = transposed ? k % 8 * 8 + n % 8 : n % 8 * 8 + k % 8;
  address += k / 8 * ((from >> 16 & 0x3fff) << 4) + n / 8 * ((from >> 32 & 0x3fff) << 4);
  return operand(shared_memory + address, within);
}
template <class A>
void add_product(float* d, int count, A a, unsigned long long b, int keep, bool transposed) {
  of_groups[threadIdx.x / 128].meet(128);
  int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float rows[2][16];
  for (int m = 0; m < 32; m++) rows[m / 16][m % 16] = a(16 * warp + g + m / 16 * 8, m % 16);
  for (int i = 0; i < count; i++) {
    float sum = 0;
    for (int k = 0; k < 16; k++)
      sum += rows[i / 2 % 2][k] * number(b, k, i / 4 * 8 + 2 * t + i % 2, transposed);
    d[i] = keep ? d[i] + sum : sum;
  }
  of_groups[threadIdx.x / 128].meet(128);
}
static unsigned operands[1024][4];
}  // namespace emulator
template <int TRANSPOSED, int COUNT>
void wgmma(float (&d)[COUNT], const unsigned (&a)[4], unsigned long long b, int keep) {
  memcpy(emulator::operands[threadIdx.x], a, 16);
  auto of_threads = [](int m, int k) {
    int owner = threadIdx.x / 128 * 128 + m / 16 * 32 + m % 8 * 4 + k % 8 / 2;
    return emulator::operand(&emulator::operands[owner][m / 8 % 2 + k / 8 * 2], k % 2);
  };
  emulator::add_product(d, COUNT, of_threads, b, keep, TRANSPOSED);
}
template <int COUNT>
void wgmma(float (&d)[COUNT], unsigned long long a, unsigned long long b, int keep) {
  auto of_memory = [a](int m, int k) { return emulator::number(a, k, m, false); };
  emulator::add_product(d, COUNT, of_memory, b, keep, false);
}
static void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  static unsigned of_a[1024][4], of_b[1024][2];
  memcpy(of_a[threadIdx.x], a, 16), memcpy(of_b[threadIdx.x], b, 8);
  __syncwarp();
  int warp = threadIdx.x / 32 * 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int i = 0; i < 4; i++) {
    int row = g + i / 2 * 8, column = 2 * t + i % 2;
    for (int k = 0; k < 16; k++)
      d[i] += emulator::operand(&of_a[warp + row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2) *
              emulator::operand(&of_b[warp + column * 4 + k % 8 / 2][k / 8], k % 2);
  }
  __syncwarp();
}
template <bool TRANSPOSED> void load_matrices(unsigned (&r)[4], const void* row) {
  static const unsigned short* rows[1024];
  if ((uintptr_t)row & 15) emulator::fail("a row of a matrix is not aligned to 16 bytes");
  rows[threadIdx.x] = (const unsigned short*)row;
  __syncwarp();
  int warp = threadIdx.x / 32 * 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int i = 0; i < 8; i++) {
    int across = 2 * t + i % 2;
    const unsigned short** of = rows + warp + i / 2 * 8;
    ((unsigned short*)r)[i] = TRANSPOSED ? of[across][g] : of[g][across];
  }
  __syncwarp();
}

// ------------------------------------------------------------------------- launch

namespace emulator {
static void out_of_bounds(int) { fail("it reads or writes beyond a tensor or its shared memory"); }

// Memory that ends at a protected page, the same until it is given back.
static unsigned char* guarded(long bytes, bool take = true) {
  static unsigned char* pages;
  static long size;
  if (pages && !take) munmap(pages, size), pages = nullptr;
  if (!take) return nullptr;
  if (!pages) {
    size = (bytes + PAGE - 1) / PAGE * PAGE + PAGE;
    pages = (unsigned char*)mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(pages + size - PAGE, PAGE, PROT_NONE);
  }
  return pages + (size - PAGE - bytes) / 128 * 128;
}
template <class... T, size_t... I>
void call(void (*kernel)(T...), std::index_sequence<I...>) { kernel((T)arguments[I]...); }
template <class... T> void call(void (*kernel)(T...)) {
  call(kernel, std::index_sequence_for<T...>());
}
static void fibre() {
  body();
  finished[threadIdx.x] = true, progress++;
  pass_on();
}
static void run_block(int threads, char* stacks) {
  forget_meetings(), later.clear();
  for (int i = 0; i < threads; i++) {
    started[i] = finished[i] = false;
    getcontext(&beginnings[i]);
    beginnings[i].uc_stack.ss_sp = stacks + (long)i * STACK;
    beginnings[i].uc_stack.ss_size = STACK;
    makecontext(&beginnings[i], fibre, 0);
  }
  for (int left = threads, round = 0; left; round++) {
    long before = progress;
    for (int k = 0; k < threads; k++) {
      int i = round % 2 ? k : threads - 1 - k;  // thread 0, which starts copies, runs last in every other round
      if (!finished[i]) resume(i), left -= finished[i];
    }
    if (progress == before && later.empty()) fail("its threads wait for each other");
    if (progress == before) act();
  }
}
static const char* launch(void (*kernel)(), const int* grid, int threads, int bytes,
                          long long* values) {
  body = kernel, arguments = values, blockDim.x = threads;
  gridDim = {grid[0], grid[1], grid[2]};
  long all = (long)threads * STACK;  // of which few pages are used
  char* stacks = (char*)mmap(0, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  std::vector<char> signal_stack(1 << 16);
  stack_t alternate = {}, previous;
  alternate.ss_sp = signal_stack.data(), alternate.ss_size = signal_stack.size();
  struct sigaction action = {}, before;
  action.sa_handler = out_of_bounds, action.sa_flags = SA_ONSTACK;
  sigaltstack(&alternate, &previous), sigaction(SIGSEGV, &action, &before);
  wrong = nullptr;
  if (!sigsetjmp(escape, 1))
    for (int i = 0; i < grid[0] * grid[1] * grid[2]; i++) {
      blockIdx = {i % grid[0], i / grid[0] % grid[1], i / grid[0] / grid[1]};
      shared_memory = guarded(bytes);
      memset(shared_memory, 0xff, bytes);  // NaN
      run_block(threads, stacks);
    }
  guarded(0, false), munmap(stacks, all);
  sigaction(SIGSEGV, &before, nullptr), sigaltstack(&previous, nullptr);
  return wrong;
}
}  // namespace emulator

#define ENTRY(kernel)                                                                       \
  extern "C" const char* run_##kernel(const int* grid, int threads, int bytes, long long* a) { \
    return emulator::launch([] { emulator::call(kernel); }, grid, threads, bytes, a);       \
  }
