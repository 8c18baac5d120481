// Transposes between sequences [B, L, H] and the channel-major layout [B, H, stride], which the FFTs read. Rows are in
// Storage, and sequences too, or in fp32 (SEQUENCES_IN_FP32).
// Entries of a channel-major row from L to stride are never read.

#ifdef SEQUENCES_IN_FP32
typedef float Sequence;
struct __align__(16) Sequence4 { float e[4]; };
#else
typedef Storage Sequence;
typedef Storage4 Sequence4;
#endif
// Numbers of either type from and to fp32.
template <class T>
__device__ inline float widened(T x) {
  if constexpr (sizeof(T) == 4) return x;
  else return to_fp32(x);
}
template <class T>
__device__ inline T narrowed(float x) {
  if constexpr (sizeof(T) == 4) return x;
  else return from_fp32(x);
}

constexpr int POSITIONS = 128, CHANNELS = 32, LANES = 32, WARPS = THREADS / LANES;
constexpr int STEPS = POSITIONS * CHANNELS / 4 / THREADS;  // of a thread, which handles four channels in each

// A tile of 128 positions and 32 channels; in each step a thread has four channels, from c() on, of position j(step).
struct Tile {
  int batch, position, channel, L, H, stride;
  bool whole;

  __device__ Tile(int block, int L, int H, int stride, int aligned) : L(L), H(H), stride(stride) {
    int tiles_along = (L + POSITIONS - 1) / POSITIONS, tiles_across = (H + CHANNELS - 1) / CHANNELS;
    batch = block / tiles_along / tiles_across;
    position = block % tiles_along * POSITIONS;
    channel = block / tiles_along % tiles_across * CHANNELS;
    whole = aligned && channel + CHANNELS <= H && position + POSITIONS <= L;
  }
  __device__ int j(int step) const { return step * (THREADS / 8) + threadIdx.x / 8; }
  __device__ int c() const { return threadIdx.x % 8 * 4; }
  __device__ long long sequence_at(int j, int c) const {
    return ((long long)batch * L + position + j) * H + channel + c;
  }
  __device__ long long channel_major_at(int j, int c) const {
    return ((long long)batch * H + channel + c) * stride + position + j;
  }
  __device__ bool is_inside(int j, int c) const { return position + j < L && channel + c < H; }
};

// Programmatic dependent launch (compute capability 9.0 and later). With `overlap` this kernel runs at the same time as
// the previous launch, of which it needs nothing: it waits for it at its end only. Without, it waits first. After
// griddepcontrol.launch_dependents the next kernel may start, and wait in its turn.
__device__ inline void wait_for_previous_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void begin_overlap(int overlap) {
#if __CUDA_ARCH__ >= 900
  if (!overlap) wait_for_previous_launch();
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ inline void end_overlap(int overlap) {
  if (overlap) wait_for_previous_launch();
}

extern "C" __global__ void __launch_bounds__(THREADS)
    to_channel_major(const Sequence* from, Storage* to, int L, int H, int stride, int aligned, int overlap) {
  __shared__ float tile[CHANNELS][POSITIONS + 1];
  Tile at(blockIdx.x, L, H, stride, aligned);
  Sequence4 four[STEPS];
  begin_overlap(overlap);
  if (at.whole) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
      four[s] = *reinterpret_cast<const Sequence4*>(from + at.sequence_at(at.j(s), at.c()));
  } else {
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        four[s].e[e] = from[at.is_inside(at.j(s), at.c() + e) ? at.sequence_at(at.j(s), at.c() + e) : 0];
  }
#pragma unroll
  for (int s = 0; s < STEPS; ++s)
#pragma unroll
    for (int e = 0; e < 4; ++e) tile[at.c() + e][at.j(s)] = widened(four[s].e[e]);
  __syncthreads();
  int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
#pragma unroll
  for (int c = warp; c < CHANNELS; c += WARPS)
#pragma unroll
    for (int j = lane; j < POSITIONS; j += LANES)
      if (at.whole || at.is_inside(j, c)) to[at.channel_major_at(j, c)] = from_fp32(tile[c][j]);
  end_overlap(overlap);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    from_channel_major(const Storage* rows, Sequence* y, int L, int H, int stride, int aligned, int overlap) {
  __shared__ float tile[CHANNELS][POSITIONS + 1];
  Tile at(blockIdx.x, L, H, stride, aligned);
  int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  begin_overlap(overlap);
#pragma unroll
  for (int c = warp; c < CHANNELS; c += WARPS)
#pragma unroll
    for (int j = lane; j < POSITIONS; j += LANES)
      if (at.whole || at.is_inside(j, c)) tile[c][j] = to_fp32(rows[at.channel_major_at(j, c)]);
  __syncthreads();
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    Sequence4 four;
#pragma unroll
    for (int e = 0; e < 4; ++e) four.e[e] = narrowed<Sequence>(tile[at.c() + e][at.j(s)]);
    Sequence* to = y + at.sequence_at(at.j(s), at.c());
    if (at.whole) {
      *reinterpret_cast<Sequence4*>(to) = four;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (at.is_inside(at.j(s), at.c() + e)) to[e] = four.e[e];
    }
  }
  end_overlap(overlap);
}
