// Between sequences [B, L, H] and rows of fp32 [B, H, stride]: one sequence of one channel after the
// other, as transforms want them. What lies in a row beyond L is never read.

constexpr int POSITIONS = 128, CHANNELS = 32, LANES = 32, WARPS = THREADS / LANES;
constexpr int STEPS = POSITIONS * CHANNELS / 4 / THREADS;  // four channels at a time

// A tile of 128 positions and 32 channels, and which four channels at which position a thread takes.
struct Tile {
  int batch, position, channel, L, H, stride;
  bool whole;

  __device__ Tile(int block, int L, int H, int stride, int aligned) : L(L), H(H), stride(stride) {
    int along = (L + POSITIONS - 1) / POSITIONS, across = (H + CHANNELS - 1) / CHANNELS;
    batch = block / along / across;
    position = block % along * POSITIONS;
    channel = block / along % across * CHANNELS;
    whole = aligned && channel + CHANNELS <= H && position + POSITIONS <= L;
  }
  __device__ int j(int step) const { return step * (THREADS / 8) + threadIdx.x / 8; }
  __device__ int c() const { return threadIdx.x % 8 * 4; }
  __device__ long long sequence_at(int j, int c) const {
    return ((long long)batch * L + position + j) * H + channel + c;
  }
  __device__ long long row_at(int j, int c) const {
    return ((long long)batch * H + channel + c) * stride + position + j;
  }
  __device__ bool has(int j, int c) const { return position + j < L && channel + c < H; }
};

// Waits until the kernel before this one is done: at the start, and then the next one may start and wait in
// turn; or at the end, if this one runs `beside` it, of which it needs nothing but that it has started.
__device__ inline void previous_done() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void start(int beside) {
  if (!beside) previous_done();
  asm volatile("griddepcontrol.launch_dependents;");
}
__device__ inline void end(int beside) {
  if (beside) previous_done();
}

extern "C" __global__ void __launch_bounds__(THREADS)
    to_rows(const Stored* from, float* to, int L, int H, int stride, int aligned, int beside) {
  __shared__ float tile[CHANNELS][POSITIONS + 1];
  Tile at(blockIdx.x, L, H, stride, aligned);
  Stored4 four[STEPS];
  start(beside);
  if (at.whole) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
      four[s] = *reinterpret_cast<const Stored4*>(from + at.sequence_at(at.j(s), at.c()));
  } else {
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        four[s].e[e] = from[at.has(at.j(s), at.c() + e) ? at.sequence_at(at.j(s), at.c() + e) : 0];
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
      if (at.whole || at.has(j, c)) to[at.row_at(j, c)] = tile[c][j];
  end(beside);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    from_rows(const float* rows, Stored* y, int L, int H, int stride, int aligned, int beside) {
  __shared__ float tile[CHANNELS][POSITIONS + 1];
  Tile at(blockIdx.x, L, H, stride, aligned);
  int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  start(beside);
#pragma unroll
  for (int c = warp; c < CHANNELS; c += WARPS)
#pragma unroll
    for (int j = lane; j < POSITIONS; j += LANES)
      if (at.whole || at.has(j, c)) tile[c][j] = rows[at.row_at(j, c)];
  __syncthreads();
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    Stored4 four;
#pragma unroll
    for (int e = 0; e < 4; ++e) four.e[e] = narrowed(tile[at.c() + e][at.j(s)]);
    Stored* to = y + at.sequence_at(at.j(s), at.c());
    if (at.whole) {
      *reinterpret_cast<Stored4*>(to) = four;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (at.has(at.j(s), at.c() + e)) to[e] = four.e[e];
    }
  }
  end(beside);
}
