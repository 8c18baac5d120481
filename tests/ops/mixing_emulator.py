"""The CUDA sources of `ops.cuda.mixing` on a CPU: every thread a fibre, one block after the other.

It says whether a kernel's numbers, addresses and barriers are right, and nothing about its speed.
Tensor cores are emulated by their definition: where a thread's operands and results lie, and what
the address of an operand in shared memory means.
"""

import ctypes
import subprocess
from functools import cache
from pathlib import Path

import torch

from dlrnn.ops.cuda import mixing, nvrtc

DEVICE = r"""
#include <ucontext.h>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>
using std::min;
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
float2 make_float2(float x, float y) { return {x, y}; }
float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct Index { int x; };
static Index threadIdx, blockIdx, blockDim, gridDim;
static unsigned char* shared_memory;
#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)

// ------------------------------------------------------------------------- fibres
static ucontext_t scheduler, fibres[1024];
static bool finished[1024];
static void pass_on() { swapcontext(&fibres[threadIdx.x], &scheduler); }
struct Meeting { int arrived, round; };
static Meeting of_block, of_groups[8], of_warps[32], of_team;
static void meet(Meeting& m, int threads) {
  int round = m.round;
  if (++m.arrived == threads) m.arrived = 0, m.round++;
  else while (m.round == round) pass_on();
}
static void __syncthreads() { meet(of_block, blockDim.x); }
static void __syncwarp() { meet(of_warps[threadIdx.x / 32], 32); }
static void meet_group() { meet(of_groups[threadIdx.x / 128], 128); }
static void team_barrier(int, int threads) { meet(of_team, threads); }
static float told[1024];
template <class T> T from_lane(T x, int lane) {
  told[threadIdx.x] = x; __syncwarp();
  T y = told[threadIdx.x / 32 * 32 + lane]; __syncwarp();
  return y;
}
static float __shfl_xor_sync(unsigned, float x, int far) {
  return from_lane(x, threadIdx.x % 32 ^ far);
}
static int __shfl_sync(unsigned, int x, int lane) { return from_lane(x, lane); }

// ------------------------------------------------------------------------- copies
typedef unsigned long long Barrier;
struct Counts { int bytes; unsigned char all, phase; short missing; };
static void changed(Counts* c) {
  if (c->missing < 0) abort();
  if (!c->missing && !c->bytes) c->missing = c->all, c->phase ^= 1;
}
static void barrier_start(Barrier* b, int arrivals) {
  *(Counts*)b = {0, (unsigned char)arrivals, 0, (short)arrivals};
}
static void barrier_expect(Barrier* b, int bytes) {
  Counts* c = (Counts*)b; c->bytes += bytes, c->missing--, changed(c);
}
static void barrier_arrive(Barrier* b) { barrier_expect(b, 0); }
static void barrier_arrive_after_copies(Barrier* b) { barrier_expect(b, 0); }
static void barrier_wait(Barrier* b, int parity) {
  while (((Counts*)b)->phase == parity) pass_on();
}
static void copy_vectors(void* to, const void* from, int bytes) {
  if (((uintptr_t)to | (uintptr_t)from | bytes) & 15) abort();
  memcpy(to, from, bytes);
}
static void copy_vector(void* to, const void* from) { copy_vectors(to, from, 16); }
static void copy_to_shared(void* to, const void* from, int bytes, Barrier* b) {
  copy_vectors(to, from, bytes);
  Counts* c = (Counts*)b; c->bytes -= bytes, changed(c);
}
static void prefetch(const void* line) { (void)*(volatile const char*)line; }
static void before_copies() {}

// ------------------------------------------------------------------------- numbers
static unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
static float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
static float two_to_the(float x) { return exp2f(x); }
static float inverse(float x) { return 1 / x; }
static int fresh(int x) { return x; }
static void halves(float x, float y, unsigned& high, unsigned& low) {
  _Float16 h[2] = {(_Float16)x, (_Float16)y};
  _Float16 l[2] = {(_Float16)(x - (float)h[0]), (_Float16)(y - (float)h[1])};
  memcpy(&high, h, 4), memcpy(&low, l, 4);
}

// ------------------------------------------------------------------------- tensor cores
static void products_begin() {}
static void products_end() {}
template <int PENDING> void products_wait() {}
template <int COUNT> void settled(float (&)[COUNT]) {}
template <int COUNT> void take_registers() {}
template <int COUNT> void leave_registers() {}
static unsigned long long pieces(const void* first, int along_sum, int across) {
  long address = (unsigned char*)first - shared_memory;
  if (address & 15 || address < 0 || address >= 1 << 18) abort();
  return address >> 4 | (long long)(along_sum >> 4) << 16 | (long long)(across >> 4) << 32;
}
static unsigned long long further(unsigned long long pieces, int bytes) {
  return pieces + (bytes >> 4);
}
static float number(unsigned long long from, int k, int n, bool transposed) {
  int address = (from & 0x3fff) << 4, within = transposed ? k % 8 * 8 + n % 8 : n % 8 * 8 + k % 8;
  address += k / 8 * ((from >> 16 & 0x3fff) << 4) + n / 8 * ((from >> 32 & 0x3fff) << 4);
  return ((_Float16*)(shared_memory + address))[within];
}
static unsigned operands[1024][4];
template <class A> void add_product(float* d, int count, A a, unsigned long long b, int keep,
                                    bool transposed) {
  meet_group();
  int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int i = 0; i < count; i++) {
    float sum = 0;
    for (int k = 0; k < 16; k++)
      sum += a(16 * warp + g + i / 2 % 2 * 8, k) *
             number(b, k, i / 4 * 8 + 2 * t + i % 2, transposed);
    d[i] = keep ? d[i] + sum : sum;
  }
  meet_group();
}
template <int TRANSPOSED, int COUNT>
void accumulate(float (&d)[COUNT], const unsigned (&a)[4], unsigned long long b, int keep) {
  memcpy(operands[threadIdx.x], a, 16);
  auto of_threads = [](int m, int k) {
    int owner = threadIdx.x / 128 * 128 + m / 16 * 32 + m % 8 * 4 + k % 8 / 2;
    return (float)((_Float16*)&operands[owner][m / 8 % 2 + k / 8 * 2])[k % 2];
  };
  add_product(d, COUNT, of_threads, b, keep, TRANSPOSED);
}
template <int COUNT>
void accumulate(float (&d)[COUNT], unsigned long long a, unsigned long long b, int keep) {
  add_product(d, COUNT, [a](int m, int k) { return number(a, k, m, false); }, b, keep, false);
}
"""

LAUNCH = r"""
static long long* values;
template <class... T, size_t... I>
void call(void (*kernel)(T...), std::index_sequence<I...>) { kernel((T)values[I]...); }
template <class... T> void call(void (*kernel)(T...)) {
  call(kernel, std::index_sequence_for<T...>());
}
static void (*body)();
static void fibre() {
  body();
  finished[threadIdx.x] = true;
  pass_on();
}
static void launch(void (*kernel)(), int blocks, int threads, int bytes, long long* arguments) {
  body = kernel, values = arguments, blockDim.x = threads, gridDim.x = blocks;
  std::vector<char> stacks(threads * 65536l);
  shared_memory = (unsigned char*)aligned_alloc(128, bytes / 128 * 128 + 128);
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
    memset(shared_memory, 0xff, bytes);  // NaN
    for (int i = 0; i < threads; i++) {
      finished[i] = false;
      getcontext(&fibres[i]);
      fibres[i].uc_stack.ss_sp = stacks.data() + i * 65536l, fibres[i].uc_stack.ss_size = 65536;
      makecontext(&fibres[i], fibre, 0);
    }
    for (int left = threads; left;) {
      left = 0;
      for (int i = 0; i < threads; i++)
        if (!finished[i]) threadIdx.x = i, left++, swapcontext(&scheduler, &fibres[i]);
    }
  }
  free(shared_memory);
}
"""


def emulate(monkeypatch, folder: Path) -> None:
    """From now on `ops.cuda.mixing` launches its kernels here, three blocks at most."""
    monkeypatch.setattr(mixing, "_processors", lambda _: 3)
    monkeypatch.setattr(
        mixing, "_kernel", cache(lambda *arguments: _Kernel(*arguments[:-1], folder))
    )


class _Kernel:
    def __init__(self, name: str, file: str, part, plan, folder: Path) -> None:
        source = "".join((nvrtc.SOURCES / f).read_text() for f in ("mixing.cuh", file))
        source = source.replace("extern __shared__ __align__(128) unsigned char shared[];", "")
        source = source.replace("(Memory*)shared", "(Memory*)shared_memory")
        entry = f"""extern "C" void run(int blocks, int threads, long long* arguments) {{
            launch([] {{ call({name}); }}, blocks, threads, {plan.bytes}, arguments); }}"""
        path = folder / f"{abs(hash((name, part, plan)))}"
        path.with_suffix(".cpp").write_text(DEVICE + source + LAUNCH + entry)
        defines = mixing.defines(part, plan).items()
        options = ["-std=c++20", "-O0", "-w", "-shared", "-fPIC", "-mf16c"]
        options += [f"-D{define}={value}" for define, value in defines]
        library = path.with_suffix(".so")
        subprocess.run(["g++", *options, path.with_suffix(".cpp"), "-o", library], check=True)
        self._run = ctypes.CDLL(str(library)).run

    def __call__(self, blocks: int, threads: int, *arguments) -> None:
        values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
        self._run(blocks, threads, (ctypes.c_longlong * len(values))(*values))
