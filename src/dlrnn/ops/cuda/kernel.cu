// The kernels' side of a convolution: their spectrum, and their gradient from a spectrum.
// What the complex signals mean: convolution.cu. As one real signal of 2 N entries the kernels are
// 2 RINGS parts: right from the start, and left with a minus backwards from the end.

extern __shared__ __align__(16) float4 shared[];

// What a thread works on: one ring of one channel. Shared memory has the teams' points, and the tables.
constexpr int N = RINGS * M;
constexpr int AHEAD = RINGS == 1 ? 4 : 2;  // groups whose spectra come at a time

struct Task {
  float2* work;
  Tables tables;
  int t, h, ring;

  __device__ Task(const float4* all_tables) : t(member()) {
    int index = blockIdx.x * TEAMS + team();
    h = index / RINGS, ring = index % RINGS;
    work = reinterpret_cast<float2*>(shared) + team() * WORK;
    tables = copy_tables(shared + TEAMS * WORK / 2, all_tables, ring, 1, 0);
    __syncthreads();
    previous_done();
  }
};

// Adds parts of the signal, whose entries are x(k, r): all are on their way at once, and then points are
// done one by one, which frees their registers.
template <int FROM, int COUNT, class Entries>
__device__ inline void add_parts(float2 (&v)[16], const Tables& tables, Entries x) {
  float entries[COUNT][16];
  float2 turns[COUNT];
#pragma unroll
  for (int k = 0; k < COUNT; ++k)
#pragma unroll
    for (int r = 0; r < 16; ++r) entries[k][r] = x(FROM + k, r);
#pragma unroll
  for (int k = 0; k < COUNT; ++k) turns[k] = tables.part(FROM + k);
#pragma unroll
  for (int r = 0; r < 16; ++r)
#pragma unroll
    for (int k = 0; k < COUNT; ++k)
      v[r] = {fmaf(entries[k][r], turns[k].x, v[r].x), fmaf(entries[k][r], turns[k].y, v[r].y)};
}

// spectrum = transform / N
extern "C" __global__ void __launch_bounds__(THREADS)
    kernel_spectrum(const float* right, const float* left, float4* spectrum, const float4* all_tables,
                    int K_right, int K_left, int H) {
  Task task(all_tables);
  if (task.h >= H) return;
  int t = task.t;
  right += (long long)task.h * K_right, left += (long long)task.h * K_left;
  auto entry = [&](int k, int r) {
    int j = t + along(k, r), back = 2 * N - 1 - j;
    return k < RINGS ? (j < K_right ? right[j] : 0.f) : (back < K_left ? -left[back] : 0.f);
  };
  float2 v[16] = {};
  if constexpr (RINGS == 1) {
    add_parts<0, 2>(v, task.tables, entry);
  } else {
    add_parts<0, RINGS>(v, task.tables, entry);
    if (K_left > 0) add_parts<2 * RINGS - 2, 2>(v, task.tables, entry);
    if constexpr (RINGS > 2)
      if (K_left > 2 * M) add_parts<RINGS, RINGS - 2>(v, task.tables, entry);
  }
  Entry of_ring = task.tables.last(t);  // on its way during two passes
  evaluate<16, false>(v, task.tables.first());
  put_first(task.work, v, t);
  team_wait();
  to_spectrum(task.work, v, task.tables, t, [&] { return of_ring; }, [&] {});
  float4* to = spectrum + ((long long)task.h * RINGS + task.ring) * (M / 2) + t;
  constexpr float scale = 1.f / N;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    float2 a = v[reversed<16>(2 * k)], b = v[reversed<16>(2 * k + 1)];
    to[k * MEMBERS] = {scale * a.x, scale * a.y, scale * b.x, scale * b.y};
  }
}

// The sum of the groups' spectra of a ring, back up to what `first_back` gives.
__device__ inline void add_groups(const Task& task, const float4* partial, const float2* starts, int H,
                                  int groups, float2 (&v)[16]) {
  int t = task.t;
  const float4* from = partial + ((long long)task.h * RINGS + task.ring) * (M / 2) + t;
  for (int group = 0; group < groups; group += AHEAD) {
    float4 two[AHEAD][8];  // all on their way before one is used; the last one again, where none is left
#pragma unroll
    for (int a = 0; a < AHEAD; ++a)
#pragma unroll
      for (int k = 0; k < 8; ++k)
        two[a][k] = from[(long long)min(group + a, groups - 1) * H * RINGS * (M / 2) + k * MEMBERS];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a)
      if (group + a < groups)
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          v[2 * k] = add(v[2 * k], {two[a][k].x, two[a][k].y});
          v[2 * k + 1] = add(v[2 * k + 1], {two[a][k].z, two[a][k].w});
        }
  }
  last_back(task.work, v, t);
  Entry of_thread = task.tables.thread(t);  // on their way during a pass
  float2 start = starts[task.ring * MEMBERS + t];
  middle_back(task.work, task.tables, t);
  team_wait();
  first_back(task.work, v, of_thread, start, t);
}

// The kernels' gradients of a channel, as one real signal.
struct Gradients {
  float *right, *left;
  int K_right, K_left;

  __device__ Gradients(float* right, float* left, int K_right, int K_left, int h)
      : right(right + (long long)h * K_right), left(left + (long long)h * K_left), K_right(K_right),
        K_left(K_left) {}
  __device__ void write(int entry, float value) {
    int back = 2 * N - 1 - entry;
    value *= 1.f / N;
    if (entry < K_right) right[entry] = value;
    if (back < K_left) left[back] = -value;
  }
};

#if RINGS == 1

extern "C" __global__ void __launch_bounds__(THREADS)
    kernel_gradient(const float4* partial, float* d_right, float* d_left, const float4* all_tables,
                    const float2* starts, int K_right, int K_left, int H, int groups) {
  Task task(all_tables);
  if (task.h >= H) return;
  float2 v[16] = {};
  add_groups(task, partial, starts, H, groups, v);
  Gradients gradients(d_right, d_left, K_right, K_left, task.h);
#pragma unroll
  for (int r = 0; r < 16; ++r)
#pragma unroll
    for (int k = 0; k < 2; ++k) gradients.write(task.t + along(k, r), share<0>(v, k, r));
}

#else  // Every block has a ring, so that few channels are many blocks; what comes of all rings comes after.

// Points of all rings, in place of the first group's spectra.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    kernel_points(float4* partial, const float4* all_tables, const float2* starts, int H, int groups) {
  Task task(all_tables);
  float2 v[16] = {};
  add_groups(task, partial, starts, H, groups, v);
  turn_back(v, task.tables.first());
  float2* to = reinterpret_cast<float2*>(partial) + ((long long)task.h * RINGS + task.ring) * M + task.t;
#pragma unroll
  for (int r = 0; r < 16; ++r) to[r * MEMBERS] = v[reversed<16>(r)];
}

// Two points a thread: entry j + M k is the sum of what points j have of it.
extern "C" __global__ void __launch_bounds__(THREADS)
    kernel_entries(const float2* points, float* d_right, float* d_left, const float4* all_tables,
                   int K_right, int K_left) {
  constexpr int BLOCK = 2 * THREADS;
  int h = blockIdx.x / (M / BLOCK), j = blockIdx.x % (M / BLOCK) * BLOCK + threadIdx.x;
  Gradients gradients(d_right, d_left, K_right, K_left, h);
  points += (long long)h * N + j;
  float4 turns[RINGS][RINGS];  // of a ring's parts 2 k, 2 k + 1
#pragma unroll
  for (int ring = 0; ring < RINGS; ++ring)
#pragma unroll
    for (int k = 0; k < RINGS; ++k) turns[ring][k] = all_tables[PLACES + ring * SHORT + k];
  previous_done();
  float2 z[2][RINGS];
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int ring = 0; ring < RINGS; ++ring) z[i][ring] = points[ring * M + i * THREADS];
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int k = 0; k < RINGS; ++k) {
      if (2 * k * M >= K_right && 2 * (RINGS - 1 - k) * M >= K_left) continue;  // nobody asks for them
      float2 two = {};
#pragma unroll
      for (int ring = 0; ring < RINGS; ++ring) {
        float2 a = z[i][ring];
        float4 w = turns[ring][k];
        two = {fmaf(a.x, w.x, fmaf(a.y, w.y, two.x)), fmaf(a.x, w.z, fmaf(a.y, w.w, two.y))};
      }
      gradients.write(j + i * THREADS + 2 * k * M, two.x);
      gradients.write(j + i * THREADS + (2 * k + 1) * M, two.y);
    }
}

#endif
