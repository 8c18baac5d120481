// Long convolution of rows in three or four rings. What the signals mean: convolution.cu.
//
// A block has a channel, and goes through the sequences of a group in steps: in one each of its two
// teams does a ring. Four rings are two steps of a row. Three are three steps of a pair of rows:
//   step 0   rings 0 and 1 of the first row,
//   step 1   ring 2 of both,
//   step 2   rings 0 and 1 of the second row.
// So a row is read while it is in shared memory, and what a team finds in one step it keeps, in `kept`,
// until the row is done: then teams tell each other their shares in it, and write half of it each.

extern __shared__ __align__(16) float4 shared[];

static_assert(TEAMS == 2 && (RINGS == 3 || RINGS == 4), "two teams");
constexpr bool PAIRS = RINGS == 3;

struct Sizes {
  int B, L, stride, H, groups;
};

// What a team does in a step: a ring of the block's row number `row`.
struct Unit {
  int row, ring;
};
__device__ inline int phase(int step) { return PAIRS ? step % 3 : step % 2; }
__device__ inline Unit unit(int step) {
  int p = phase(step);
  if (PAIRS) return {step / 3 * 2 + (p == 1 ? team() : p / 2), p == 1 ? 2 : team()};
  return {step / 2, 2 * p + team()};
}
// A row is done after it, the one it belongs to.
__device__ inline bool finishes(int step) { return phase(step) > 0; }
__device__ inline int finished_row(int step) {
  return PAIRS ? step / 3 * 2 + phase(step) - 1 : step / 2;
}

// A box in shared memory is filled with one row after the other; which filling that is, and by how many
// teams in how many steps it is read.
struct Filling {
  int box, number, uses;
};

// A copy of what is not needed again, or is, soon; it must not drive out what is.
__device__ inline void copy_once(void* to, const void* from, int bytes, Barrier* barrier, bool again) {
  unsigned long long policy;
  if (again) asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  else asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1], %2, [%3], %4;"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
               : "memory");
}
template <bool BACKWARD>
struct Task {
  const float *u, *dy;
  Sizes of;
  float2* work;
  float* boxes;
  float4* copied;
  Barrier *came, *gates;
  unsigned* uses;
  Tables tables;
  const float4 *bases, *turns;  // entries of a ring X^M = 1, and the turns that make them those of others
  int t, h, group, rows;

  __device__ Task(const float* u, const float* dy, const float4* all, Sizes of)
      : u(u), dy(dy), of(of), t(member()), h(blockIdx.x % of.H), group(blockIdx.x / of.H) {
    rows = (of.B - group + of.groups - 1) / of.groups;
    float2* works = reinterpret_cast<float2*>(shared);
    work = works + team() * WORK;
    boxes = reinterpret_cast<float*>(works + TEAMS * WORK);
    copied = reinterpret_cast<float4*>(boxes + 2 * PARTS * M);
    constexpr int SHORTS = PLACES + RINGS * SHORT, LONGS = BACKWARD ? 2 * LONG : 0;
    came = reinterpret_cast<Barrier*>(copied + SHORTS + 2 * RINGS + LONGS);
    gates = came + 2;
    uses = reinterpret_cast<unsigned*>(gates + TEAMS);
    if (threadIdx.x == 0) {
      for (int box = 0; box < 2; ++box) barrier_start(came + box), uses[box] = 0;
      for (int k = 0; k < TEAMS; ++k) barrier_start(gates + k, MEMBERS < 32 ? 1 : MEMBERS / 32);
    }
    __syncthreads();
    previous_done();
    if (t == 0) fill(team(), 0);
    tables = copy_tables(copied, all, 0, RINGS, 0);
    turns = copied + SHORTS, bases = tables.of_rings;
    copy_table(copied + SHORTS, all + SHORTS + (1 + RINGS) * LONG, 2 * RINGS);
    if (BACKWARD) {
      float4* longs = copied + SHORTS + 2 * RINGS;
      copy_table(longs, tables.of_threads, LONG), copy_table(longs + LONG, bases, LONG);
      tables.of_threads = longs, bases = longs + LONG;
    }
    __syncthreads();
  }

  __device__ long long row(int number) const {
    return ((long long)(group + number * of.groups) * of.H + h) * of.stride;
  }
  __device__ Tables of_ring(int ring) const {
    return {tables.of_places, tables.ring + ring * SHORT, tables.of_threads, nullptr};
  }
  __device__ Entry last(Entry base, int ring) const {
    Entry by = entry(turns + 2 * ring, 1, 0);
    auto product = [](float4 a, float4 b) {
      float2 low = mul({a.x, a.y}, {b.x, b.y}), high = mul({a.z, a.w}, {b.z, b.w});
      return float4{low.x, low.y, high.x, high.y};
    };
    return {product(base.low, by.low), product(base.high, by.high)};
  }

  // Where u, or dy, of a team's unit is. Forward, rows come in two boxes by turns; backward, u in one and
  // dy in the other, but for pairs of rows:
  //   box 0   u of the first row (steps 0, 1), its dy (1), u of the second row (2),
  //   box 1   dy of the first row (0), u of the second row (1), its dy (1, 2).
  __device__ Filling filling(bool is_dy, int step, int row) const {
    if (!BACKWARD) return {row % 2, row / 2, RINGS};
    if (!PAIRS) return {is_dy, row, RINGS};
    int first = step / 3 * 3, p = phase(step);
    if (p == 1 && is_dy == (team() == 0)) return {1 - is_dy, first + 1, 1};
    if (p == 0) return {is_dy, first, is_dy ? 2 : 3};
    if (p == 1) return {is_dy, first + 2 * is_dy, 3};
    return {is_dy, first + 2, is_dy ? 3 : 2};
  }
  __device__ void fill(int box, int number) {
    bool is_dy = box;
    int from = number;
    if (!BACKWARD) is_dy = false, from = 2 * number + box;
    else if (PAIRS) is_dy = box != (number % 3 == 1), from = number / 3 * 2 + (number % 3 + box > 1);
    if (from >= rows) return;
    bool again = BACKWARD && PAIRS && box && number % 3 < 2;
    barrier_expect(came + box, 4 * of.stride);
    copy_once(boxes + box * PARTS * M, (is_dy ? dy : u) + row(from), 4 * of.stride, came + box, again);
  }

  // Pass 1 of a unit into `work`, once ready() has returned; the last that has read a box fills it.
  template <class Ready>
  __device__ void read_row(bool is_dy, int step, Unit now, const Tables& tables, Ready ready) {
    Filling in = filling(is_dy, step, now.row);
    const float* box = boxes + in.box * PARTS * M + t;
    int left = of.L - t;
    float2 v[16];
    barrier_wait(came + in.box, in.number % 2);
    auto whole = [&](int k, int r) { return box[along(k, r)]; };
    auto checked = [&](int k, int r) { return inside(k, r, left) ? box[along(k, r)] : 0.f; };
    if (of.L == PARTS * M) fold<0, PARTS>(v, tables, whole);
    else fold<0, PARTS>(v, tables, checked);
    after_fold(v, tables);
    ready();
    put_first(work, v, t);
    team_wait();
    if (t) return;
    __threadfence_block();
    if ((int)atomicAdd(uses + in.box, 1u) + 1 < in.uses) return;
    __threadfence_block();
    uses[in.box] = 0;
    fill(in.box, in.number + 1);
  }
  // Nobody reads the other team's shares of the last step any more.
  __device__ void others_have_read(int step) {
    if (step && finishes(step - 1)) team_barrier(READ + team(), THREADS);
  }

  // Team TEAM's half of a row, from rings RING (v) and KEPT (w), if that is not negative, and what
  // the other team has in it, which gets the same.
  template <int TEAM, int RING, int KEPT>
  __device__ __forceinline__ void finish(float* y, const float2 (&v)[16], const float2 (&w)[16], bool more) {
    constexpr int OWN = PARTS / 2, FIRST = TEAM * OWN, THEIRS = OWN - FIRST;
    float2* at = work + place(t);  // where only this thread has read
    auto both = [&](int k, int r) {
      float value = share<RING>(v, k, r);
      if (KEPT >= 0) value += share<KEPT < 0 ? 0 : KEPT>(w, k, r);
      return value;
    };
#pragma unroll
    for (int i = 0; i < 8 * OWN; ++i) {
      int k = THEIRS + i / 8, r = i % 8 * 2;
      at[i * place(MEMBERS)] = {both(k, r), both(k, r + 1)};
    }
    tell(WRITTEN + TEAM);
    team_barrier(WRITTEN + 1 - TEAM, THREADS);
    at += (1 - 2 * TEAM) * WORK;
    int left = of.L - t;
#pragma unroll
    for (int i = 0; i < 8 * OWN; ++i) {
      int k = FIRST + i / 8, r = i % 8 * 2;
      float2 theirs = at[i * place(MEMBERS)];
      if (inside(k, r, left)) y[t + along(k, r)] = both(k, r) + theirs.x;
      if (inside(k, r + 1, left)) y[t + along(k, r + 1)] = both(k, r + 1) + theirs.y;
    }
    if (more) tell(READ + 1 - TEAM);
  }

  // The end of a step: v is kept, or a row is done with it, and with w, which was kept. In step 1 of three
  // the second team keeps v, which is of the second row, and gives w to the first.
  __device__ void take_kept(float2 (&w)[16], const float4* kept, int step) const {
#pragma unroll
    for (int q = 0; q < 16; ++q) w[q] = {};
    if (finishes(step) && !(PAIRS && phase(step) == 2 && team() == 0)) take(w, kept);
  }
  __device__ __forceinline__ void end(const float2 (&v)[16], const float2 (&w)[16], float* y, float4* kept,
                                      int step, bool more) {
    int p = phase(step);
    if (p == 0 || (PAIRS && p == 1 && team())) put(kept, v);
    if (p == 0) return;
    y += row(finished_row(step));
    if (!PAIRS) {
      if (team()) finish<1, RINGS - 1, 1>(y, v, w, more);
      else finish<0, 2, 0>(y, v, w, more);
    } else if (p == 1) {
      if (team()) finish<1, 1, -1>(y, w, w, more);
      else finish<0, 2, 0>(y, v, w, more);
    } else {
      if (team()) finish<1, 1, 2>(y, v, w, more);
      else finish<0, 0, -1>(y, v, v, more);
    }
  }
  __device__ int steps() const { return PAIRS ? rows / 2 * 3 + rows % 2 * 2 : 2 * rows; }

  // 16 points of each of so many threads.
  __device__ static void take(float2 (&v)[16], const float4* from, int threads = THREADS) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      float4 two = from[k * threads];
      v[2 * k] = {two.x, two.y}, v[2 * k + 1] = {two.z, two.w};
    }
  }
  __device__ static void put(float4* to, const float2 (&v)[16], int threads = THREADS) {
#pragma unroll
    for (int k = 0; k < 8; ++k)
      to[k * threads] = {v[2 * k].x, v[2 * k].y, v[2 * k + 1].x, v[2 * k + 1].y};
  }
};

// y = the convolution of u with the kernels of `spectrum`; y may be u. The next step's kernel is on its
// way while this one ends.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convolve(const float* u, float* y, const float4* spectrum, const float4* all_tables,
             const float2* starts, float4* kept, int B, int L, int stride, int H, int groups) {
  Task<false> task(u, nullptr, all_tables, {B, L, stride, H, groups});
  int t = task.t, steps = task.steps();
  kept += (long long)blockIdx.x * 8 * THREADS + threadIdx.x;
  Entry base = entry(task.bases, MEMBERS, t), of_thread = task.tables.thread(t);
  spectrum += (long long)task.h * RINGS * (M / 2) + t;
  float2 kernel[16];
  task.take(kernel, spectrum + team() * (M / 2), MEMBERS);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    Unit now = unit(step);
    float2 v[16], w[16], product[16];
    if (now.row < task.rows) {  // there is a second row of three rings
      Tables tables = task.of_ring(now.ring);
      float2 start = starts[now.ring * MEMBERS + t];
      task.read_row(false, step, now, tables, [&] { task.others_have_read(step); });
      to_spectrum(task.work, v, tables, t, [&] { return task.last(base, now.ring); }, [&] {});
#pragma unroll
      for (int q = 0; q < 16; ++q) product[q] = mul(v[reversed<16>(q)], kernel[q]);
      task.take(kernel, spectrum + unit(step + 1).ring * (M / 2), MEMBERS);
      from_spectrum(task.work, product, tables, t);
      team_wait();
      first_back(task.work, v, of_thread, start, t);
    }
    task.take_kept(w, kept, step);
    task.end(v, w, y, kept, step, step + 1 < steps);
  }
}

// du = the correlation of dy with the kernels, and for each group of sequences the spectrum of
// what it adds to the kernels' gradient: partial [groups, H, RINGS, 8, M / 16, 2] = sum conj(U) DY, where each
// number has one thread that adds to it. The second team's of ring 2 of three is beyond `kept`. du may be dy.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convolve_backward(const float* dy, const float* u, float* du, const float4* spectrum,
                      float4* partial, const float4* all_tables, const float2* starts, float4* kept,
                      int B, int L, int stride, int H, int groups) {
  Task<true> task(u, dy, all_tables, {B, L, stride, H, groups});
  int t = task.t, steps = task.steps();
  spectrum += (long long)task.h * RINGS * (M / 2) + t;
  partial += ((long long)task.group * H + task.h) * RINGS * (M / 2) + t;
  float4* seconds = kept + ((long long)gridDim.x + blockIdx.x) * 8 * THREADS + t;
  kept += (long long)blockIdx.x * 8 * THREADS + threadIdx.x;
  Gate read = {task.gates + team(), 0};
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    Unit now = unit(step);
    float2 U[16], v[16], w[16];
    if (now.row < task.rows) {  // there is a second row of three rings
      Tables tables = task.of_ring(now.ring);
      float2 product[16], kernel[16];
      auto last = [&] { return task.last(entry(task.bases, MEMBERS, t), now.ring); };
      task.read_row(false, step, now, tables, [&] { task.others_have_read(step); });
      to_spectrum(task.work, U, tables, t, last, [&] { read.arrive(); });
      task.take(kernel, spectrum + now.ring * (M / 2), MEMBERS);
      task.read_row(true, step, now, tables, [&] { read.wait(); });
      to_spectrum(task.work, v, tables, t, last, [&] {});
      float4* sum = PAIRS && now.ring == 2 && team() ? seconds : partial + now.ring * (M / 2);
#pragma unroll
      for (int q = 0; q < 16; ++q) U[q] = mul_conj(v[q], U[q]);
      if (now.row < (PAIRS && now.ring == 2 ? 2 : 1)) {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          float2 one = U[reversed<16>(2 * k)], two = U[reversed<16>(2 * k + 1)];
          sum[k * MEMBERS] = {one.x, one.y, two.x, two.y};
        }
      } else {
#pragma unroll
        for (int k = 0; k < 8; ++k)
          add_to(sum + k * MEMBERS, U[reversed<16>(2 * k)], U[reversed<16>(2 * k + 1)]);
      }
#pragma unroll
      for (int q = 0; q < 16; ++q) product[q] = mul_conj(v[reversed<16>(q)], kernel[q]);
      float2 start = starts[now.ring * MEMBERS + t];
      last_back(task.work, product, t);
      task.take_kept(w, kept, step);
      middle_back(task.work, tables, t);
      team_wait();
      first_back(task.work, v, tables.thread(t), start, t);
    } else {
      task.take_kept(w, kept, step);
    }
    task.end(v, w, du, kept, step, step + 1 < steps);
  }
  if (PAIRS && task.rows > 1) {
    __threadfence();
    __syncthreads();
    if (team()) return;
    float2 sum[16];
    task.take(sum, seconds, MEMBERS);
#pragma unroll
    for (int k = 0; k < 8; ++k)
      add_to(partial + 2 * (M / 2) + k * MEMBERS, sum[2 * k], sum[2 * k + 1]);
  }
}
