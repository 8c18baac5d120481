// The output stage on Hopper: the weight in shared memory, and tiles of y that producer warps prefetch.

#if CHANNEL_MAJOR
#define PITCH (POSITIONS + 256 / STORAGE_BITS)  // 32 bytes of padding keep a tile's rows in different banks
#define STAGE (CHANNELS * PITCH)                // numbers
#else
#define STAGE (POSITIONS * CHANNELS)
#endif

// The weight as an operand in shared memory: in each round a thread has sixteen numbers of a column. All are read
// before any is used; they are scaled and stored when the largest is known. ADJACENT threads have different columns.
template <int THREADS, int WIDTH, int STEPS, int ADJACENT>
struct Weights {
  static constexpr int ROUNDS = (WIDTH * STEPS + THREADS - 1) / THREADS;
  float w[ROUNDS][16];

  __device__ inline int column(int round) {
    int i = threadIdx.x + round * THREADS;
    return i / ADJACENT / STEPS * ADJACENT + i % ADJACENT;
  }
  __device__ inline int step(int round) { return (threadIdx.x + round * THREADS) / ADJACENT % STEPS; }

  // read(n, q, w) loads the numbers from 16 q on of column n.
  template <class Read>
  __device__ inline void load(Read read) {
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
#pragma unroll
      for (int i = 0; i < 16; i++) w[round][i] = 0;
      if (column(round) < WIDTH) read(column(round), step(round), w[round]);
    }
  }
  __device__ inline float largest(float* scratch) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < ROUNDS * 16; i++) largest = fmaxf(largest, fabsf(w[i / 16][i % 16]));
    return block_max(largest, scratch, THREADS / 32);
  }
  __device__ inline void place(float scale, uint4 (&to)[PARTS][STEPS][2][WIDTH]) {
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
      int n = column(round), q = step(round);
#pragma unroll
      for (int far = 0; far < 2; far++) {
        unsigned high[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float* x = w[round] + 8 * far + 2 * i;
          split_operand(x[0] * scale, x[1] * scale, high[i], low[i]);
        }
        if (n >= WIDTH) continue;
        to[0][q][far][n] = make_uint4(high[0], high[1], high[2], high[3]);
        if constexpr (!NARROW) to[PARTS - 1][q][far][n] = make_uint4(low[0], low[1], low[2], low[3]);
      }
    }
    fence_async_proxy();  // wgmma reads through the async proxy
  }
};

// Four producer warps start the copies of a tile of y into a stage. If y is channel-major its rows in a tile are short:
// each thread copies vectors with cp.async, and arrives at the mbarrier when they are complete; else bulk copies are
// used. All threads arrive, also those that copy nothing, so that none can be one phase behind a barrier it waits for.
#define PRODUCERS 128  // threads
__device__ inline void copy_tile(Storage* stage, const Storage* y, int tile, int length, int y_pitch,
                                 Mbarrier* loaded) {
  int tiles_each = (length + POSITIONS - 1) / POSITIONS, k = tile % tiles_each * POSITIONS;
  y += tile / tiles_each * sequence_size(length, y_pitch);
  int thread = threadIdx.x % PRODUCERS;
#if CHANNEL_MAJOR
  const int vector = 128 / STORAGE_BITS, across = POSITIONS / vector, step = PRODUCERS / across;
  int p = vector * (thread % across), channel = thread / across;
  const Storage* from = y + (long long)channel * y_pitch + k + p;
  Storage* to = stage + channel * PITCH + p;
  if (k + p < y_pitch)
#pragma unroll 2
    for (; channel < CHANNELS; channel += step) {
      copy_async_16(to, from);
      from += (long long)step * y_pitch, to += step * PITCH;
    }
  mbarrier_arrive_after_copies(loaded);
#else
  int count = min(POSITIONS, length - k);
  const Storage* from = y + (long long)k * ALL_CHANNELS;
  const int bytes = CHANNELS * sizeof(Storage);  // of a position
  if (thread == 0) mbarrier_expect_bytes(loaded, bytes * count);
  else mbarrier_arrive(loaded);
  if (ALL_CHANNELS > CHANNELS) {
    for (int p = thread; p < count; p += PRODUCERS)
      copy_to_shared(stage + p * CHANNELS, from + (long long)p * ALL_CHANNELS, bytes, loaded);
  } else if (thread == 0) {
    copy_to_shared(stage, from, bytes * count, loaded);
  }
#endif
}
