// Convolution of channel-major rows of 8193 to 16384 entries in three or four residues of 4096 points; the mathematics
// is that of convolution.cu.
//
// A block has a channel, and processes the sequences of a group in steps: in each step each of its two teams transforms
// one residue. Four residues are two steps of a row. Three are three steps of a pair of rows:
//   step 0   residues 0 and 1 of the first row,
//   step 1   residue 2 of both rows,
//   step 2   residues 0 and 1 of the second row.
// So a row is loaded once and read while it is in shared memory. The points that a team finds in one step are saved in
// global memory (`saved`) until the row is complete; then the teams exchange their contributions, and write half of the
// row each.
//
// GPUs with less shared memory than Hopper (STAGED = 0) have no stages: rows are prefetched into L2 and read there.

extern __shared__ __align__(16) float4 shared[];

static_assert(TEAMS == 2 && (RESIDUES == 3 || RESIDUES == 4), "two teams");
constexpr bool ROW_PAIRS = RESIDUES == 3;

struct Sizes {
  int B, L, stride, H, groups;
};

// What a team does in a step: a residue of the block's row number `row`.
struct Assignment {
  int row, residue;
};
__device__ inline int phase(int step) { return ROW_PAIRS ? step % 3 : step % 2; }
__device__ inline Assignment assignment(int step) {
  int p = phase(step);
  if (ROW_PAIRS) return {step / 3 * 2 + (p == 1 ? team() : p / 2), p == 1 ? 2 : team()};
  return {step / 2, 2 * p + team()};
}
// Whether a row is complete after this step, and which one.
__device__ inline bool finishes_row(int step) { return phase(step) > 0; }
__device__ inline int finished_row(int step) {
  return ROW_PAIRS ? step / 3 * 2 + phase(step) - 1 : step / 2;
}

// A stage in shared memory holds one row after the other: `number` counts them, and the stage is free after so many
// reads by a team.
struct StageUse {
  int stage, number, reads;
};

// A bulk copy with an L2 policy: evict data first that is not reused, so that it does not displace data that is.
__device__ inline void copy_to_shared_hinted(void* to, const void* from, int bytes, Mbarrier* barrier, bool reused) {
  unsigned long long policy;
  if (reused) asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  else asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1], %2, [%3], %4;"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
               : "memory");
}
template <bool BACKWARD>
struct Task {
  const Storage *u, *dy;
  Sizes sizes;
  float2* work;
  Storage* stages;
  float4* shared_tables;
  Mbarrier *loaded, *split_barriers;
  unsigned* reads;
  Tables tables;
  const float4 *unit_seeds, *residue_twiddles;  // of a residue modulo X^M - 1, and the factors for the others
  int t, h, group, rows;

  __device__ Task(const Storage* u, const Storage* dy, const float4* all, Sizes sizes)
      : u(u), dy(dy), sizes(sizes), t(team_rank()), h(blockIdx.x % sizes.H), group(blockIdx.x / sizes.H) {
    rows = (sizes.B - group + sizes.groups - 1) / sizes.groups;
    float2* works = reinterpret_cast<float2*>(shared);
    work = works + team() * PADDED;
    stages = reinterpret_cast<Storage*>(works + TEAMS * PADDED);
    shared_tables = reinterpret_cast<float4*>(stages + STAGED * 2 * SEGMENTS * M);
    constexpr int SMALL_TABLES = POSITION_TABLE + RESIDUES * RESIDUE_TABLE;
    constexpr int LARGE_TABLES = BACKWARD ? 2 * THREAD_TABLE : 0;
    loaded = reinterpret_cast<Mbarrier*>(shared_tables + SMALL_TABLES + 2 * RESIDUES + LARGE_TABLES);
    split_barriers = loaded + 2;
    reads = reinterpret_cast<unsigned*>(split_barriers + TEAMS);
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < 2; ++stage) mbarrier_init(loaded + stage), reads[stage] = 0;
      for (int k = 0; k < TEAMS; ++k) mbarrier_init(split_barriers + k, TEAM_SIZE < 32 ? 1 : TEAM_SIZE / 32);
    }
    __syncthreads();
    wait_for_previous_launch();
#if STAGED
    if (t == 0) fetch(team(), 0);
#endif
    tables = copy_tables(shared_tables, all, 0, RESIDUES, 0);
    residue_twiddles = shared_tables + SMALL_TABLES, unit_seeds = tables.pass3_seeds;
    copy_table(shared_tables + SMALL_TABLES, all + SMALL_TABLES + (1 + RESIDUES) * THREAD_TABLE, 2 * RESIDUES);
    if (BACKWARD) {
      float4* large_tables = shared_tables + SMALL_TABLES + 2 * RESIDUES;
      copy_table(large_tables, tables.thread_seeds, THREAD_TABLE);
      copy_table(large_tables + THREAD_TABLE, unit_seeds, THREAD_TABLE);
      tables.thread_seeds = large_tables, unit_seeds = large_tables + THREAD_TABLE;
    }
    __syncthreads();
  }

  __device__ long long sequence(int number) const { return group + number * sizes.groups; }
  __device__ long long row(int number) const { return (sequence(number) * sizes.H + h) * sizes.stride; }
  __device__ Tables tables_of(int residue) const {
    return {tables.position_seeds, tables.residue + residue * RESIDUE_TABLE, tables.thread_seeds, nullptr};
  }
  __device__ Seeds last(Seeds unit, int residue) const {
    Seeds twiddle = load_seeds(residue_twiddles + 2 * residue, 1, 0);
    auto product = [](float4 a, float4 b) {
      float2 low = mul({a.x, a.y}, {b.x, b.y}), high = mul({a.z, a.w}, {b.z, b.w});
      return float4{low.x, low.y, high.x, high.y};
    };
    return {product(unit.low, twiddle.low), product(unit.high, twiddle.high)};
  }

#if STAGED
  // The stage that holds u or dy of a team's assignment. If only one of them is read, forward or with KEPT, rows
  // alternate between the two stages; else u is in one and dy in the other, except with pairs of rows:
  //   stage 0   u of the first row (steps 0, 1), its dy (1), u of the second row (2),
  //   stage 1   dy of the first row (0), u of the second row (1), its dy (1, 2).
  __device__ StageUse stage_use(bool is_dy, int step, int row) const {
    if (!BACKWARD || KEPT) return {row % 2, row / 2, RESIDUES};
    if (!ROW_PAIRS) return {is_dy, row, RESIDUES};
    int first = step / 3 * 3, p = phase(step);
    if (p == 1 && is_dy == (team() == 0)) return {1 - is_dy, first + 1, 1};
    if (p == 0) return {is_dy, first, is_dy ? 2 : 3};
    if (p == 1) return {is_dy, first + 2 * is_dy, 3};
    return {is_dy, first + 2, is_dy ? 3 : 2};
  }
  __device__ void fetch(int stage, int number) {
    bool is_dy = stage;
    int from = number;
    if (!BACKWARD || KEPT) is_dy = BACKWARD, from = 2 * number + stage;
    else if (ROW_PAIRS) is_dy = stage != (number % 3 == 1), from = number / 3 * 2 + (number % 3 + stage > 1);
    if (from >= rows) return;
    bool reused = BACKWARD && !KEPT && ROW_PAIRS && stage && number % 3 < 2;
    int bytes = sizeof(Storage) * sizes.stride;
    mbarrier_expect_bytes(loaded + stage, bytes);
    copy_to_shared_hinted(stages + stage * SEGMENTS * M, (is_dy ? dy : u) + row(from), bytes, loaded + stage, reused);
  }
#endif

  // Pass 1 of an assignment into `work`; it writes when ready() has returned. The last team that has read the stage
  // starts the next copy into it; without stages each team prefetches the next row.
  template <class Ready>
  __device__ void read_row(bool is_dy, int step, Assignment current, const Tables& tables, Ready ready) {
#if STAGED
    StageUse use = stage_use(is_dy, step, current.row);
    const Storage* from = stages + use.stage * SEGMENTS * M + t;
#else
    const Storage *tensor = is_dy ? dy : u, *from = tensor + row(current.row) + t;
#endif
    int remaining = sizes.L - t;
    float2 v[16];
#if STAGED
    mbarrier_wait(loaded + use.stage, use.number % 2);
#endif
    auto whole = [&](int k, int r) { return to_fp32(from[entry_index(k, r)]); };
    auto checked = [&](int k, int r) { return is_inside(k, r, remaining) ? whole(k, r) : 0.f; };
    if (sizes.L == SEGMENTS * M) fold_segments<0, SEGMENTS>(v, tables, whole);
    else fold_segments<0, SEGMENTS>(v, tables, checked);
    finish_pass1(v, tables);
    ready();
    store_pass1(work, v, t);
    team_sync();
#if STAGED
    if (t) return;
    __threadfence_block();
    if ((int)atomicAdd(reads + use.stage, 1u) + 1 < use.reads) return;
    __threadfence_block();
    reads[use.stage] = 0;
    fetch(use.stage, use.number + 1);
#else
    if (current.row + 1 < rows)
      prefetch_row(tensor + row(current.row + 1), sizeof(Storage) * sizes.stride, t, TEAM_SIZE);
#endif
  }
  // Waits until the other team has read this team's contributions to the row of the step before.
  __device__ void wait_until_read(int step) {
    if (step && finishes_row(step - 1)) named_barrier(READ + team(), THREADS);
  }

  // Writes team TEAM's half of a row: its contributions of residues RESIDUE (v) and SAVED (w), if that is not negative,
  // plus the other team's; the other team gets this team's contributions to the other half.
  template <int TEAM, int RESIDUE, int SAVED>
  __device__ __forceinline__ void finish_row(Storage* y, const float2 (&v)[16], const float2 (&w)[16], bool has_next) {
    constexpr int COUNT = SEGMENTS / 2, FIRST = TEAM * COUNT, OTHERS_FIRST = COUNT - FIRST;
    float2* at = work + padded(t);  // only this thread has read these points
    auto both = [&](int k, int r) {
      float value = contribution<RESIDUE>(v, k, r);
      if (SAVED >= 0) value += contribution<SAVED < 0 ? 0 : SAVED>(w, k, r);
      return value;
    };
#pragma unroll
    for (int i = 0; i < 8 * COUNT; ++i) {
      int k = OTHERS_FIRST + i / 8, r = i % 8 * 2;
      at[i * padded(TEAM_SIZE)] = {both(k, r), both(k, r + 1)};
    }
    signal(WRITTEN + TEAM);
    named_barrier(WRITTEN + 1 - TEAM, THREADS);
    at += (1 - 2 * TEAM) * PADDED;
    int remaining = sizes.L - t;
#pragma unroll
    for (int i = 0; i < 8 * COUNT; ++i) {
      int k = FIRST + i / 8, r = i % 8 * 2;
      float2 others = at[i * padded(TEAM_SIZE)];
      if (is_inside(k, r, remaining)) y[t + entry_index(k, r)] = from_fp32(both(k, r) + others.x);
      if (is_inside(k, r + 1, remaining))
        y[t + entry_index(k, r + 1)] = from_fp32(both(k, r + 1) + others.y);
    }
    if (has_next) signal(READ + 1 - TEAM);
  }

  // w <- the points that have been saved, if this step completes a row with them; else 0.
  __device__ void load_saved(float2 (&w)[16], const float4* saved, int step) const {
#pragma unroll
    for (int q = 0; q < 16; ++q) w[q] = {};
    if (finishes_row(step) && !(ROW_PAIRS && phase(step) == 2 && team() == 0)) load_points(w, saved);
  }
  // The end of a step: saves v, or completes a row with v and with w, which had been saved. In step 1 of three the
  // second team saves v, which belongs to the second row, and uses w for the first row.
  __device__ __forceinline__ void finish_step(const float2 (&v)[16], const float2 (&w)[16], Storage* y, float4* saved,
                                              int step, bool has_next) {
    int p = phase(step);
    if (p == 0 || (ROW_PAIRS && p == 1 && team())) store_points(saved, v);
    if (p == 0) return;
    y += row(finished_row(step));
    if (!ROW_PAIRS) {
      if (team()) finish_row<1, RESIDUES - 1, 1>(y, v, w, has_next);
      else finish_row<0, 2, 0>(y, v, w, has_next);
    } else if (p == 1) {
      if (team()) finish_row<1, 1, -1>(y, w, w, has_next);
      else finish_row<0, 2, 0>(y, v, w, has_next);
    } else {
      if (team()) finish_row<1, 1, 2>(y, v, w, has_next);
      else finish_row<0, 0, -1>(y, v, v, has_next);
    }
  }
  __device__ int steps() const { return ROW_PAIRS ? rows / 2 * 3 + rows % 2 * 2 : 2 * rows; }

  // Load and store 16 points of each of `threads` threads.
  __device__ static void load_points(float2 (&v)[16], const float4* from, int threads = THREADS) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      float4 two = from[k * threads];
      v[2 * k] = {two.x, two.y}, v[2 * k + 1] = {two.z, two.w};
    }
  }
  __device__ static void store_points(float4* to, const float2 (&v)[16], int threads = THREADS) {
#pragma unroll
    for (int k = 0; k < 8; ++k)
      to[k * threads] = {v[2 * k].x, v[2 * k].y, v[2 * k + 1].x, v[2 * k + 1].y};
  }
};

// y = the convolution of u with the kernels of `spectrum`; y may be u. With KEPT the spectra of u are kept. While a
// step ends, the spectrum for the next step's residue is loaded.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convolve(const Storage* u, Storage* y, const float4* spectrum, uint4* kept, const float4* all_tables,
             const float2* twists, float4* saved, int B, int L, int stride, int H, int groups) {
  Task<false> task(u, nullptr, all_tables, {B, L, stride, H, groups});
  int t = task.t, steps = task.steps();
  saved += (long long)blockIdx.x * 8 * THREADS + threadIdx.x;
  Seeds unit = load_seeds(task.unit_seeds, TEAM_SIZE, t), thread_seeds = task.tables.thread(t);
  spectrum += (long long)task.h * RESIDUES * (M / 2) + t;
  float2 kernel[16];
  task.load_points(kernel, spectrum + team() * (M / 2), TEAM_SIZE);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    Assignment current = assignment(step);
    float2 v[16], w[16], product[16];
    if (current.row < task.rows) {  // else a pair of rows has no second row
      Tables tables = task.tables_of(current.residue);
      float2 twist = twists[current.residue * TEAM_SIZE + t];
      task.read_row(false, step, current, tables, [&] { task.wait_until_read(step); });
      to_spectrum(task.work, v, tables, t, [&] { return task.last(unit, current.residue); }, [&] {});
#if KEPT
      keep_spectrum(kept + kept_at(task.sequence(current.row) * H + task.h, current.residue, t), v);
#endif
#pragma unroll
      for (int q = 0; q < 16; ++q) product[q] = mul(v[bit_reversed<16>(q)], kernel[q]);
      task.load_points(kernel, spectrum + assignment(step + 1).residue * (M / 2), TEAM_SIZE);
      from_spectrum(task.work, product, tables, t);
      team_sync();
      inverse_pass1(task.work, v, thread_seeds, twist, t);
    }
    task.load_saved(w, saved, step);
    task.finish_step(v, w, y, saved, step, step + 1 < steps);
  }
}

// du = the correlation of dy with the kernels. For each group of sequences also the spectrum of its part of the
// kernels' gradient: partial [groups, H, RESIDUES, 8, M / 16, 2] = sum conj(U) DY. One thread adds to
// each number of it. With three residues the second team's sum of residue 2 is stored behind `saved` and added at the
// end. du may be dy.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convolve_backward(const Storage* dy, const Storage* u, Storage* du, const float4* spectrum,
                      float4* partial, const uint4* kept, const float4* all_tables, const float2* twists,
                      float4* saved, int B, int L, int stride, int H, int groups) {
  Task<true> task(u, dy, all_tables, {B, L, stride, H, groups});
  int t = task.t, steps = task.steps();
  spectrum += (long long)task.h * RESIDUES * (M / 2) + t;
  partial += ((long long)task.group * H + task.h) * RESIDUES * (M / 2) + t;
  float4* second_sums = saved + ((long long)gridDim.x + blockIdx.x) * 8 * THREADS + t;
  saved += (long long)blockIdx.x * 8 * THREADS + threadIdx.x;
  SplitBarrier read_done = {task.split_barriers + team(), 0};
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    Assignment current = assignment(step);
    float2 U[16], v[16], w[16];
    if (current.row < task.rows) {  // else a pair of rows has no second row
      Tables tables = task.tables_of(current.residue);
      float2 product[16], kernel[16];
      auto last = [&] { return task.last(load_seeds(task.unit_seeds, TEAM_SIZE, t), current.residue); };
#if KEPT
      KeptSpectrum pairs;
      pairs.load(kept + kept_at(task.sequence(current.row) * H + task.h, current.residue, t));
      task.load_points(kernel, spectrum + current.residue * (M / 2), TEAM_SIZE);
      task.read_row(true, step, current, tables, [&] { task.wait_until_read(step); });
      to_spectrum(task.work, v, tables, t, last, [&] {});
#pragma unroll
      for (int q = 0; q < 16; ++q) U[bit_reversed<16>(q)] = pairs.point(q);
#else
      task.read_row(false, step, current, tables, [&] { task.wait_until_read(step); });
      to_spectrum(task.work, U, tables, t, last, [&] { read_done.arrive(); });
      task.load_points(kernel, spectrum + current.residue * (M / 2), TEAM_SIZE);
      task.read_row(true, step, current, tables, [&] { read_done.wait(); });
      to_spectrum(task.work, v, tables, t, last, [&] {});
#endif
      float4* sum = ROW_PAIRS && current.residue == 2 && team() ? second_sums : partial + current.residue * (M / 2);
#pragma unroll
      for (int q = 0; q < 16; ++q) U[q] = mul_conj(v[q], U[q]);
      if (current.row < (ROW_PAIRS && current.residue == 2 ? 2 : 1)) {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          float2 one = U[bit_reversed<16>(2 * k)], two = U[bit_reversed<16>(2 * k + 1)];
          sum[k * TEAM_SIZE] = {one.x, one.y, two.x, two.y};
        }
      } else {
#pragma unroll
        for (int k = 0; k < 8; ++k)
          add_to(sum + k * TEAM_SIZE, U[bit_reversed<16>(2 * k)], U[bit_reversed<16>(2 * k + 1)]);
      }
#pragma unroll
      for (int q = 0; q < 16; ++q) product[q] = mul_conj(v[bit_reversed<16>(q)], kernel[q]);
      float2 twist = twists[current.residue * TEAM_SIZE + t];
      inverse_pass3(task.work, product, t);
      task.load_saved(w, saved, step);
      inverse_pass2(task.work, tables, t);
      team_sync();
      inverse_pass1(task.work, v, tables.thread(t), twist, t);
    } else {
      task.load_saved(w, saved, step);
    }
    task.finish_step(v, w, du, saved, step, step + 1 < steps);
  }
  if (ROW_PAIRS && task.rows > 1) {
    __threadfence();
    __syncthreads();
    if (team()) return;
    float2 sum[16];
    task.load_points(sum, second_sums, TEAM_SIZE);
#pragma unroll
    for (int k = 0; k < 8; ++k)
      add_to(partial + 2 * (M / 2) + k * TEAM_SIZE, sum[2 * k], sum[2 * k + 1]);
  }
}
