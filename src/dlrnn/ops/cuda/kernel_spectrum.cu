// The convolution kernels of a layer (right and left): their spectrum, and their gradient from the spectrum of that
// gradient. The mathematics is that of convolution.cu. As one real signal of 2 N entries the kernels have 2 RESIDUES
// segments: right from the start, and -left backwards from the end.

extern __shared__ __align__(16) float4 shared[];

// What a thread works on: one residue of one channel. Shared memory has the points of the teams, and the tables.
constexpr int N = RESIDUES * M;
constexpr int PREFETCH = RESIDUES == 1 ? 4 : 2;  // groups whose spectra are loaded at a time

struct Task {
  float2* work;
  Tables tables;
  int t, h, residue;

  __device__ Task(const float4* all_tables) : t(team_rank()) {
    int index = blockIdx.x * TEAMS + team();
    h = index / RESIDUES, residue = index % RESIDUES;
    work = reinterpret_cast<float2*>(shared) + team() * PADDED;
    tables = copy_tables(shared + TEAMS * PADDED / 2, all_tables, residue, 1, 0);
    __syncthreads();
    wait_for_previous_launch();
  }
};

// Adds segments of the signal, whose entries are x(k, r), to the points of a residue. All loads are issued before the
// first is used; then the points are computed one by one, which frees their registers.
template <int FROM, int COUNT, class Entries>
__device__ inline void add_segments(float2 (&v)[16], const Tables& tables, Entries x) {
  float entries[COUNT][16];
  float2 twiddles[COUNT];
#pragma unroll
  for (int k = 0; k < COUNT; ++k)
#pragma unroll
    for (int r = 0; r < 16; ++r) entries[k][r] = x(FROM + k, r);
#pragma unroll
  for (int k = 0; k < COUNT; ++k) twiddles[k] = tables.segment(FROM + k);
#pragma unroll
  for (int r = 0; r < 16; ++r)
#pragma unroll
    for (int k = 0; k < COUNT; ++k)
      v[r] = {fmaf(entries[k][r], twiddles[k].x, v[r].x), fmaf(entries[k][r], twiddles[k].y, v[r].y)};
}

// spectrum = the negacyclic FFT of the kernels / N. skip (or null) is added to entry 0 of right.
extern "C" __global__ void __launch_bounds__(THREADS)
    kernel_spectrum(const float* right, const float* left, const float* skip, float4* spectrum,
                    const float4* all_tables, int K_right, int K_left, int H) {
  Task task(all_tables);
  if (task.h >= H) return;
  int t = task.t;
  right += (long long)task.h * K_right, left += (long long)task.h * K_left;
  float added = t == 0 && skip != nullptr ? skip[task.h] : 0.f;
  auto entry = [&](int k, int r) {
    int j = t + entry_index(k, r), back = 2 * N - 1 - j;
    float x = k < RESIDUES ? (j < K_right ? right[j] : 0.f) : (back < K_left ? -left[back] : 0.f);
    return entry_index(k, r) == 0 ? x + added : x;
  };
  float2 v[16] = {};
  if constexpr (RESIDUES == 1) {
    add_segments<0, 2>(v, task.tables, entry);
  } else {
    add_segments<0, RESIDUES>(v, task.tables, entry);
    if (K_left > 0) add_segments<2 * RESIDUES - 2, 2>(v, task.tables, entry);
    if constexpr (RESIDUES > 2)
      if (K_left > 2 * M) add_segments<RESIDUES, RESIDUES - 2>(v, task.tables, entry);
  }
  Seeds residue_seeds = task.tables.last(t);  // loaded during two passes
  evaluate<16, false>(v, task.tables.first());
  store_pass1(task.work, v, t);
  team_sync();
  to_spectrum(task.work, v, task.tables, t, [&] { return residue_seeds; }, [&] {});
  float4* to = spectrum + ((long long)task.h * RESIDUES + task.residue) * (M / 2) + t;
  constexpr float scale = 1.f / N;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    float2 a = v[bit_reversed<16>(2 * k)], b = v[bit_reversed<16>(2 * k + 1)];
    to[k * TEAM_SIZE] = {scale * a.x, scale * a.y, scale * b.x, scale * b.y};
  }
}

// The sum of the spectra of all groups of a residue, transformed back up to inverse_pass1.
__device__ inline void add_groups(const Task& task, const float4* partial, const float2* twists, int H,
                                  int groups, float2 (&v)[16]) {
  int t = task.t;
  const float4* from = partial + ((long long)task.h * RESIDUES + task.residue) * (M / 2) + t;
  for (int group = 0; group < groups; group += PREFETCH) {
    float4 two[PREFETCH][8];  // all are loaded before one is used; beyond the last group the last one again
#pragma unroll
    for (int a = 0; a < PREFETCH; ++a)
#pragma unroll
      for (int k = 0; k < 8; ++k)
        two[a][k] = from[(long long)min(group + a, groups - 1) * H * RESIDUES * (M / 2) + k * TEAM_SIZE];
#pragma unroll
    for (int a = 0; a < PREFETCH; ++a)
      if (group + a < groups)
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          v[2 * k] = add(v[2 * k], {two[a][k].x, two[a][k].y});
          v[2 * k + 1] = add(v[2 * k + 1], {two[a][k].z, two[a][k].w});
        }
  }
  inverse_pass3(task.work, v, t);
  Seeds thread_seeds = task.tables.thread(t);  // loaded during a pass
  float2 twist = twists[task.residue * TEAM_SIZE + t];
  inverse_pass2(task.work, task.tables, t);
  team_sync();
  inverse_pass1(task.work, v, thread_seeds, twist, t);
}

// The gradients of a channel's kernels, as one real signal.
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

#if RESIDUES == 1

extern "C" __global__ void __launch_bounds__(THREADS)
    kernel_gradient(const float4* partial, float* d_right, float* d_left, const float4* all_tables,
                    const float2* twists, int K_right, int K_left, int H, int groups) {
  Task task(all_tables);
  if (task.h >= H) return;
  float2 v[16] = {};
  add_groups(task, partial, twists, H, groups, v);
  Gradients gradients(d_right, d_left, K_right, K_left, task.h);
#pragma unroll
  for (int r = 0; r < 16; ++r)
#pragma unroll
    for (int k = 0; k < 2; ++k) gradients.write(task.t + entry_index(k, r), contribution<0>(v, k, r));
}

#else  // A block has one residue, so that few channels are many blocks; another kernel adds the residues up.

// The points of all residues of the kernels' gradient; they replace the spectra of the first group.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    kernel_gradient_points(float4* partial, const float4* all_tables, const float2* twists, int H, int groups) {
  Task task(all_tables);
  float2 v[16] = {};
  add_groups(task, partial, twists, H, groups, v);
  untwist(v, task.tables.first());
  float2* to = reinterpret_cast<float2*>(partial) + ((long long)task.h * RESIDUES + task.residue) * M + task.t;
#pragma unroll
  for (int r = 0; r < 16; ++r) to[r * TEAM_SIZE] = v[bit_reversed<16>(r)];
}

// The gradients: entry j + M k is the sum of the contributions of point j of all residues. A thread has two points.
extern "C" __global__ void __launch_bounds__(THREADS)
    kernel_gradient_entries(const float2* points, float* d_right, float* d_left, const float4* all_tables,
                            int K_right, int K_left) {
  constexpr int BLOCK = 2 * THREADS;
  int h = blockIdx.x / (M / BLOCK), j = blockIdx.x % (M / BLOCK) * BLOCK + threadIdx.x;
  Gradients gradients(d_right, d_left, K_right, K_left, h);
  points += (long long)h * N + j;
  float4 twiddles[RESIDUES][RESIDUES];  // of a residue's segments 2 k, 2 k + 1
#pragma unroll
  for (int residue = 0; residue < RESIDUES; ++residue)
#pragma unroll
    for (int k = 0; k < RESIDUES; ++k) twiddles[residue][k] = all_tables[POSITION_TABLE + residue * RESIDUE_TABLE + k];
  wait_for_previous_launch();
  float2 z[2][RESIDUES];
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int residue = 0; residue < RESIDUES; ++residue) z[i][residue] = points[residue * M + i * THREADS];
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int k = 0; k < RESIDUES; ++k) {
      if (2 * k * M >= K_right && 2 * (RESIDUES - 1 - k) * M >= K_left) continue;  // beyond both kernels
      float2 two = {};
#pragma unroll
      for (int residue = 0; residue < RESIDUES; ++residue) {
        float2 a = z[i][residue];
        float4 w = twiddles[residue][k];
        two = {fmaf(a.x, w.x, fmaf(a.y, w.y, two.x)), fmaf(a.x, w.z, fmaf(a.y, w.w, two.y))};
      }
      gradients.write(j + i * THREADS + 2 * k * M, two.x);
      gradients.write(j + i * THREADS + (2 * k + 1) * M, two.y);
    }
}

#endif
