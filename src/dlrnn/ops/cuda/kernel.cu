// The kernels' side of a convolution: their spectrum, and their gradient from a spectrum.
// What the complex signals mean: convolution.cu. As one real signal of 2 N entries the kernels are
// 2 RINGS parts: right from the start, and left with a minus backwards from the end.

extern __shared__ __align__(16) float4 shared[];

// What a thread works on: one ring of one channel. Shared memory has the teams' points, and the tables.
constexpr int N = RINGS * M;
constexpr int AHEAD = RINGS == 1 ? 4 : 1;  // groups whose spectra come at a time
constexpr bool TOGETHER = RINGS > 1 && TEAMS == RINGS;  // a block has a channel

struct Task {
  float2* work;
  Tables tables;
  int t, h, ring;

  __device__ Task() : t(member()) {
    int index = blockIdx.x * TEAMS + team();
    h = index / RINGS, ring = index % RINGS;
    work = reinterpret_cast<float2*>(shared) + team() * WORK;
  }
  __device__ void copy(const float4* all_tables) {
    float4* copied = shared + TEAMS * WORK / 2;
    if (TOGETHER) tables = copy_tables(copied, all_tables, 0, RINGS, ring);
    else tables = copy_tables(copied, all_tables, ring, 1, 0);
    __syncthreads();
  }
};

// spectrum = transform / N
extern "C" __global__ void __launch_bounds__(THREADS)
    kernel_spectrum(const float* right, const float* left, float4* spectrum, const float4* all_tables,
                    int K_right, int K_left, int H) {
  Task task;
  bool there = task.h < H;
  int t = task.t;
  right += (long long)task.h * K_right, left += (long long)task.h * K_left;
  auto is_zero = [&](int k) {
    return k < RINGS ? k * M >= K_right : (2 * RINGS - 1 - k) * M >= K_left;
  };
  auto read = [&](float (&x)[16], int k) {
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      int j = t + r * MEMBERS + k * M, back = 2 * N - 1 - j;
      x[r] = k < RINGS ? (j < K_right ? right[j] : 0.f) : (back < K_left ? left[back] : 0.f);
    }
  };
  task.copy(all_tables);
  previous_done();
  if (!there) return;
  float2 v[16] = {};
#pragma unroll
  for (int side = 0; side < 2; ++side) {  // right, then left: all parts of a side are on their way at once
    float x[RINGS][16];
#pragma unroll
    for (int k = 0; k < RINGS; ++k)
      if (!is_zero(side * RINGS + k)) read(x[k], side * RINGS + k);
#pragma unroll
    for (int k = 0; k < RINGS; ++k) {
      if (is_zero(side * RINGS + k)) continue;
      float2 w = task.tables.part(side * RINGS + k);
      if (side) w = {-w.x, -w.y};
#pragma unroll
      for (int r = 0; r < 16; ++r) v[r] = {fmaf(x[k][r], w.x, v[r].x), fmaf(x[k][r], w.y, v[r].y)};
    }
  }
  evaluate<16, false>(v, task.tables.first());
  put_first(task.work, v, t);
  team_wait();
  to_spectrum(task.work, v, task.tables, t, [&] { return task.tables.last(t); }, [&] {});
  float4* to = spectrum + ((long long)task.h * RINGS + task.ring) * (M / 2) + t;
  constexpr float scale = 1.f / N;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    float2 a = v[reversed<16>(2 * k)], b = v[reversed<16>(2 * k + 1)];
    to[k * MEMBERS] = {scale * a.x, scale * a.y, scale * b.x, scale * b.y};
  }
}

// d_right, d_left from the sum of the groups' spectra. Of several rings each team puts down its points,
// and each thread picks up some points of all rings, for all parts.
extern "C" __global__ void __launch_bounds__(THREADS)
    kernel_gradient(const float4* partial, float* d_right, float* d_left, const float4* all_tables,
                    const float2* starts, int K_right, int K_left, int H, int groups) {
  Task task;
  task.copy(all_tables);
  previous_done();
  if (task.h >= H) return;
  int t = task.t, ring = task.ring;
  d_right += (long long)task.h * K_right, d_left += (long long)task.h * K_left;
  float2 v[16] = {};
  const float4* from = partial + ((long long)task.h * RINGS + ring) * (M / 2) + t;
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
  from_spectrum(task.work, v, task.tables, t);
  team_wait();
  first_back(task.work, v, task.tables.thread(t), starts[ring * MEMBERS + t], t);
  auto write = [&](int entry, float value) {
    int back = 2 * N - 1 - entry;
    value *= 1.f / N;
    if (entry < K_right) d_right[entry] = value;
    if (back < K_left) d_left[back] = -value;
  };
  if constexpr (RINGS == 1) {
#pragma unroll
    for (int r = 0; r < 16; ++r)
      write(t + along(0, r), share<0>(v, 0, r)), write(t + along(1, r), share<0>(v, 1, r));
  } else if constexpr (TOGETHER) {
    turn_back(v, task.tables.first());
    float2* at = task.work + place(t);  // where only this thread has read
#pragma unroll
    for (int r = 0; r < 16; ++r) at[r * place(MEMBERS)] = v[reversed<16>(r)];
    __syncthreads();
    constexpr int EACH = (M + THREADS - 1) / THREADS;
    auto point = [](int i) { return int(threadIdx.x) + i * THREADS; };
    const float2* works = reinterpret_cast<float2*>(shared);
    float2 z[RINGS][EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i)
#pragma unroll
      for (int other = 0; other < RINGS; ++other)
        z[other][i] = works[other * WORK + place(min(point(i), M - 1))];
#pragma unroll 1
    for (int pair = 0; pair < RINGS; ++pair) {  // parts 2 pair, 2 pair + 1
      float2 two[EACH] = {};
#pragma unroll
      for (int other = 0; other < RINGS; ++other) {
        float4 w = task.tables.ring[(other - ring) * SHORT + pair];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
          float2 a = z[other][i];
          two[i] = {fmaf(a.x, w.x, fmaf(a.y, w.y, two[i].x)), fmaf(a.x, w.z, fmaf(a.y, w.w, two[i].y))};
        }
      }
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        int entry = 2 * pair * M + point(i);
        if (point(i) < M) write(entry, two[i].x), write(entry + M, two[i].y);
      }
    }
  }
}
