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

  __device__ Task(const float4* all_tables) : t(member()) {
    int index = blockIdx.x * TEAMS + team();
    h = index / RINGS, ring = index % RINGS;
    work = reinterpret_cast<float2*>(shared) + team() * WORK;
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
  Task task(all_tables);
  if (task.h >= H) return;
  int t = task.t;
  right += (long long)task.h * K_right, left += (long long)task.h * K_left;
  float2 v[16] = {};
#pragma unroll
  for (int k = 0; k < 2 * RINGS; ++k) {
    float2 w = task.tables.part(k);
    if (k < RINGS ? k * M >= K_right : (2 * RINGS - 1 - k) * M >= K_left) continue;
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      int j = t + r * MEMBERS + k * M, back = 2 * N - 1 - j;
      float x = k < RINGS ? (j < K_right ? right[j] : 0.f) : (back < K_left ? -left[back] : 0.f);
      v[r] = {fmaf(x, w.x, v[r].x), fmaf(x, w.y, v[r].y)};
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

// A ring's shares in two parts of team `target`, where that one's points were.
template <int RING>
__device__ __forceinline__ void add_shares(float2* at, const float2 (&v)[16], int target, bool first) {
#pragma unroll
  for (int other = 0; other < RINGS; ++other)
    if (other == target)
#pragma unroll
      for (int r = 0; r < 16; ++r) {
        float2& two = at[r * place(MEMBERS)];
        float2 mine = {share<RING>(v, 2 * other, r), share<RING>(v, 2 * other + 1, r)};
        two = first ? mine : add(two, mine);
        if (r % 4 == 3) asm volatile("" ::: "memory");  // not all 16 at once: registers
      }
}

// d_right, d_left from the sum of the groups' spectra. Teams of a channel add their shares to two parts
// of one team after the other, where that one's points were.
extern "C" __global__ void __launch_bounds__(THREADS)
    kernel_gradient(const float4* partial, float* d_right, float* d_left, const float4* all_tables,
                    const float2* starts, int K_right, int K_left, int H, int groups) {
  Task task(all_tables);
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
  auto write = [&](int k, int r, float value) {
    int j = t + r * MEMBERS + k * M, back = 2 * N - 1 - j;
    value *= 1.f / N;
    if (j < K_right) d_right[j] = value;
    if (back < K_left) d_left[back] = -value;
  };
  if constexpr (RINGS == 1) {
#pragma unroll
    for (int r = 0; r < 16; ++r) write(0, r, share<0>(v, 0, r)), write(1, r, share<0>(v, 1, r));
  } else if constexpr (TOGETHER) {
#pragma unroll 1
    for (int turn = 0; turn < RINGS; ++turn) {
      int target = (ring + turn) % RINGS;
      float2* at = task.work + (target - ring) * WORK + place(t);
      if (ring == 0) add_shares<0>(at, v, target, turn == 0);
      else if (ring == 1) add_shares<1 % RINGS>(at, v, target, turn == 0);
      else if (ring == 2) add_shares<2 % RINGS>(at, v, target, turn == 0);
      else add_shares<3 % RINGS>(at, v, target, turn == 0);
      __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      float2 two = task.work[place(t) + r * place(MEMBERS)];
      write(2 * ring, r, two.x), write(2 * ring + 1, r, two.y);
    }
  }
}
