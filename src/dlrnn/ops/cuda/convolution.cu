// Long convolution of rows: read u, transform, multiply, transform back, write y.
//
// A real signal x of 2 N entries modulo X^2N + 1 (a wrap-around changes the sign, and nothing wraps
// around into a row here) is the complex signal z_j = x_j - i x_(j+N) modulo X^N + i, and products need
// no untangling:
//   u (L entries)         z_j = u_j, if L <= N,               real in,
//   kernels               z_j = right_j + i left_(N-1-j),     two-sided at no cost,
//   y                     y_j = Re z_j, if L <= N,            real out.
// Spectra are [H, RINGS, 8, M / 16, 2]: points 2 k and 2 k + 1 of ring t of pass 3 at [.., k, t, :].
//
// A block has a channel, and goes through the sequences of a group. A row of up to 4096 points is one
// ring, and each team is ALONE with a row. A longer one has more rings: two teams do two of them, of the
// same row, and tell each other their shares in it. Another round over all rows does two more, or a last
// one, each team alone; what it finds is added. While teams compute, the next row comes in.

extern __shared__ __align__(16) float4 shared[];

constexpr int ROUNDS = (RINGS + 1) / 2;
static_assert(RINGS == 1 || TEAMS == 2, "teams of one row are two");

struct Sizes {
  int B, L, stride, H, groups;
};

// A team that is alone with a row of several parts gets it in two pieces.
template <bool ALONE>
constexpr int PIECES = ALONE && PARTS > 1 ? 2 : 1;
template <bool ALONE>
constexpr int IN_PIECE = PARTS / PIECES<ALONE>;

// A team's barrier in two halves: what comes between them needs not wait.
struct Gate {
  Barrier* at;
  int parity;

  __device__ void arrive() {
    if constexpr (MEMBERS > 32) {
      near_wait();
      if (threadIdx.x % 32 == 0) barrier_arrive(at);
    }
  }
  __device__ void wait() {
    if constexpr (MEMBERS > 32) {
      barrier_wait(at, parity);
      parity ^= 1;
    } else {
      near_wait();
    }
  }
};

// What a thread works on, and the block's shared memory: points (BUFFERS for each team), boxes for rows
// that come in, spectra of KERNELS, tables (with the long ones, if there are kernels), barriers.
constexpr int BOXES = RINGS == 1 ? TEAMS : 1, AT_ONCE = RINGS == 1 ? 1 : TEAMS;  // rings
constexpr int GATES = 2;

template <int BUFFERS, int KERNELS>
struct Task {
  float2* work;
  float* boxes;
  float4 *copied, *kernels;
  Tables tables;
  Barrier* barriers;  // of rows: for each team, for both; of kernels: for each team; gates of each team
  int t, h, group, parity, kept;  // the parity of rows, and of gates between rounds

  __device__ Task(int H)
      : t(member()), h(blockIdx.x % H), group(blockIdx.x / H), parity(0), kept(0) {
    float2* works = reinterpret_cast<float2*>(shared);
    work = works + team() * BUFFERS * WORK;
    boxes = reinterpret_cast<float*>(works + TEAMS * BUFFERS * WORK);
    kernels = reinterpret_cast<float4*>(boxes + BOXES * PARTS * M);
    copied = kernels + KERNELS * (M / 2);
    int tables_size = PLACES + AT_ONCE * SHORT + (KERNELS ? (1 + AT_ONCE) * LONG : 0);
    barriers = reinterpret_cast<Barrier*>(copied + tables_size);
    if (threadIdx.x == 0) {
      for (int k = 0; k < 2 * TEAMS + 1; ++k) barrier_start(barriers + k);
      for (int k = 0; k < GATES * TEAMS; ++k) barrier_start(barriers + 2 * TEAMS + 1 + k, MEMBERS < 32 ? 1 : MEMBERS / 32);
      *leaders() = 0;
    }
    __syncthreads();
  }
  __device__ Gate gate(int k) { return {barriers + 2 * TEAMS + 1 + team() * GATES + k, 0}; }
  __device__ unsigned* leaders() {
    return reinterpret_cast<unsigned*>(barriers + (2 + GATES) * TEAMS + 1);
  }
  template <bool ALONE>
  __device__ float* box() {
    return boxes + (ALONE ? team() * IN_PIECE<ALONE> * M : 0);
  }
  template <bool ALONE>
  __device__ Barrier* row_came() {
    return barriers + (ALONE ? team() : TEAMS);
  }
  template <bool ALONE>
  __device__ int ring(int round) const {
    return 2 * round + (ALONE ? 0 : team());
  }
  __device__ long long row(int b, const Sizes& of) const {
    return ((long long)b * of.H + h) * of.stride;
  }
  template <bool ALONE>
  __device__ int first_row(const Sizes& of) const {
    return group + (ALONE ? team() * of.groups : 0);
  }
  template <bool ALONE>
  __device__ int next_row(int b, const Sizes& of) const {
    return b + (ALONE ? TEAMS : 1) * of.groups;
  }

  // Asks for a row, or a piece of it, when the team has read what was there; of two the second asks.
  template <bool ALONE>
  __device__ void fetch(const float* row, int stride, int piece = 0) {
    if (t) return;
    if (!ALONE) {
      __threadfence_block();
      if (atomicAdd(leaders(), 1u) % 2 == 0) return;
      __threadfence_block();
    }
    constexpr int LENGTH = IN_PIECE<ALONE> * M;
    int bytes = 4 * (PIECES<ALONE> == 1 ? stride : piece ? stride - LENGTH : LENGTH);
    barrier_expect(row_came<ALONE>(), bytes);
    copy_to_shared(box<ALONE>(), row + piece * LENGTH, bytes, row_came<ALONE>());
  }
  template <bool ALONE>
  __device__ void wait() {
    barrier_wait(row_came<ALONE>(), parity);
    parity ^= 1;
  }

  // Each round, with what the block needs for it in shared memory.
  template <class Together, class Alone>
  __device__ void each_round(const float4* all_tables, const float* u, const float4* spectrum,
                             const Sizes& of, Together together, Alone alone) {
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
      bool last_alone = RINGS % 2 && round == ROUNDS - 1;
      if (round) __syncthreads();
      if (last_alone) {
        parity = 0;
        int b = first_row<true>(of);
        if (b < of.B) fetch<true>(u + row(b, of), of.stride);
      } else {
        fetch<false>(u + row(group, of), of.stride);
      }
      if (KERNELS && t == 0 && !(last_alone && team())) {
        const float4* from = spectrum + ((long long)h * RINGS + 2 * round + team()) * (M / 2);
        Barrier* came = barriers + TEAMS + 1 + team();
        barrier_expect(came, M * 8);
        copy_to_shared(kernels + team() * (M / 2), from, M * 8, came);
      }
      int rings = last_alone ? 1 : TEAMS, own = last_alone ? 0 : team();
      tables = copy_tables(copied, all_tables, 2 * round, rings, own);
      if (KERNELS) tables = copy_long_tables(copied + PLACES + AT_ONCE * SHORT, tables, rings, own);
      __syncthreads();
      if (last_alone) alone(round);
      else together(round);
    }
  }
};

// Where entry r of a thread in part k lies, beside its t; it is there if that is below `left`, the
// row's length less t, and the first half of a row always is.
__device__ constexpr int along(int k, int r) { return k * M + r * MEMBERS; }
__device__ inline bool inside(int k, int r, int left) {
  return along(k, r) + MEMBERS <= PARTS * M / 2 || along(k, r) < left;
}

// Two teams of a row: one tells (that it has written, or read), the other waits. Numbers of barriers,
// to which the team whose points they are is added, and 2 for every other row.
__device__ inline void tell(int number) { team_arrive(number, THREADS); }
constexpr int WRITTEN = 3, READ = 7;

__device__ inline void add_to(float* sum, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(sum), "f"(value) : "memory");
}

// A piece of a row, from the box, into the points of pass 1.
template <bool ALONE, int PIECE, class T>
__device__ inline void fold_piece(float2 (&v)[16], T& task, const Tables& tables, int L) {
  constexpr int FIRST = PIECE * IN_PIECE<ALONE>, LAST = FIRST + IN_PIECE<ALONE>;
  const float* box = task.template box<ALONE>() + task.t;
  int left = L - task.t;
  task.template wait<ALONE>();
  auto entry = [&](int k, int r) { return box[along(k - FIRST, r)]; };
  auto checked = [&](int k, int r) { return inside(k, r, left) ? box[along(k - FIRST, r)] : 0.f; };
  if (L == PARTS * M) fold<FIRST, LAST>(v, tables, entry);
  else fold<FIRST, LAST>(v, tables, checked);
}

// Pass 1, from the box into `work`, once ready() has returned.
template <bool ALONE, class T, class Ready>
__device__ inline void read_row(T& task, float2* work, const float* row, const Tables& tables,
                                const Sizes& of, Ready ready) {
  float2 v[16];
  fold_piece<ALONE, 0>(v, task, tables, of.L);
  if constexpr (PIECES<ALONE> == 2) {
    team_wait();
    task.template fetch<ALONE>(row, of.stride, 1);
    fold_piece<ALONE, 1>(v, task, tables, of.L);
  }
  after_fold(v, tables);
  ready();
  put_first(work, v, task.t);
}

// A ring's share in parts of a row, with the other team's, which are at `theirs`. A second round's are
// added, to one other number: the same in any order.
template <bool ALONE, int RING, bool CHECKED>
__device__ inline void write_parts(float* y, const float2 (&v)[16], const float2* theirs, int left) {
  constexpr int OWN = ALONE ? PARTS : PARTS / 2, FIRST = ALONE ? 0 : RING % 2 * OWN;
#pragma unroll
  for (int i = 0; i < 16 * OWN; ++i) {
    int k = FIRST + i / 16, r = i % 16;
    float value = share<RING>(v, k, r);
    if constexpr (!ALONE) {
      float2 two = theirs[i / 2 * place(MEMBERS)];
      value += i % 2 ? two.y : two.x;
    }
    if (CHECKED && !inside(k, r, left)) continue;
    if (RING < 2) y[along(k, r)] = value;
    else add_to(y + along(k, r), value);
  }
}

template <bool ALONE, int BUFFERS, int RING>
__device__ inline void finish_row(float* y, const float2 (&v)[16], float2* work, int t, int L,
                                  int parity, bool more) {
  constexpr int TEAM = RING % 2, THEIRS = (1 - TEAM) * (PARTS / 2);
  float2* at = work + place(t);  // where only this thread has read
  if constexpr (!ALONE) {
#pragma unroll
    for (int i = 0; i < 4 * PARTS; ++i) {
      int k = THEIRS + i / 8, r = i % 8 * 2;
      at[i * place(MEMBERS)] = {share<RING>(v, k, r), share<RING>(v, k, r + 1)};
    }
    tell(WRITTEN + TEAM + 2 * parity);
    team_barrier(WRITTEN + 1 - TEAM + 2 * parity, THREADS);
    at += (1 - 2 * TEAM) * BUFFERS * WORK;
  }
  if (L == PARTS * M) write_parts<ALONE, RING, false>(y + t, v, at, L - t);
  else write_parts<ALONE, RING, true>(y + t, v, at, L - t);
  if constexpr (!ALONE)
    if (more) tell(READ + 1 - TEAM + 2 * parity);
}

// The last pass back. Two teams finish half of the row's parts each; `parity` is that of the row, and
// that the other's shares have been read is told if `more` rows need the place.
template <bool ALONE, int BUFFERS, class T>
__device__ inline void write_row(float* y, T& task, float2* work, Entry of_thread, float2 start,
                                 const Sizes& of, int round, int parity, bool more) {
  float2 v[16];
  int t = task.t, L = of.L, ring = task.template ring<ALONE>(round);
  first_back(work, v, of_thread, start, t);
  if constexpr (ALONE) {
    finish_row<true, BUFFERS, RINGS - 1>(y, v, work, t, L, parity, more);
  } else {
    if (ring == 0) finish_row<false, BUFFERS, 0>(y, v, work, t, L, parity, more);
    else if (ring == 1) finish_row<false, BUFFERS, 1>(y, v, work, t, L, parity, more);
    else if (ring == 2) finish_row<false, BUFFERS, 2>(y, v, work, t, L, parity, more);
    else finish_row<false, BUFFERS, 3>(y, v, work, t, L, parity, more);
  }
}

// ------------------------------------------------------------------------- kernels

// With two places for points: the next row's first pass comes before this one's last, and nobody
// waits for others.
template <bool ALONE>
__device__ inline void convolve_rows(Task<2, 0>& task, const float* u, float* y,
                                     const float4* spectrum, const float2* starts, const Sizes& of,
                                     int round) {
  const Tables& tables = task.tables;
  int ring = task.ring<ALONE>(round), t = task.t;
  float2 start = starts[ring * MEMBERS + t], kernel[16];
  Entry of_ring = tables.last(t), of_thread = tables.thread(t);
  const float4* from = spectrum + ((long long)task.h * RINGS + ring) * (M / 2) + t;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    float4 two = from[k * MEMBERS];
    kernel[2 * k] = {two.x, two.y}, kernel[2 * k + 1] = {two.z, two.w};
  }
  Gate in = task.gate(0), out = task.gate(1);
  in.parity = out.parity = task.kept;
  int first = task.first_row<ALONE>(of), parity = 0;
  if (first < of.B) {
    read_row<ALONE>(task, task.work, u + task.row(first, of), tables, of, [&] {});
    in.arrive();
  }
  for (int b = first; b < of.B; parity ^= 1) {
    int next = task.next_row<ALONE>(b, of), after = task.next_row<ALONE>(next, of);
    float2 *work = task.work + parity * WORK, *other = task.work + (parity ^ 1) * WORK;
    float2 v[16], product[16];
    in.wait();
    if (next < of.B) task.fetch<ALONE>(u + task.row(next, of), of.stride);
    to_spectrum(work, v, tables, t, [&] { return of_ring; }, [&] {});
#pragma unroll
    for (int q = 0; q < 16; ++q) product[q] = mul(v[reversed<16>(q)], kernel[q]);
    from_spectrum(work, product, tables, t);
    out.arrive();
    if (next < of.B) {
      read_row<ALONE>(task, other, u + task.row(next, of), tables, of, [&] {
        if (!ALONE && b != first) team_barrier(READ + team() + 2 * (parity ^ 1), THREADS);
      });
      in.arrive();
    }
    out.wait();
    write_row<ALONE, 2>(y + task.row(b, of), task, work, of_thread, start, of, round, parity,
                        after < of.B);
    b = next;
  }
  task.kept = in.parity;
}

// y = the convolution of u with the kernels of `spectrum`; y may be u, if there is one round
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convolve(const float* u, float* y, const float4* spectrum, const float4* all_tables,
             const float2* starts, int B, int L, int stride, int H, int groups) {
  Task<2, 0> task(H);
  Sizes of = {B, L, stride, H, groups};
  task.each_round(
      all_tables, u, spectrum, of,
      [&](int round) { convolve_rows<false>(task, u, y, spectrum, starts, of, round); },
      [&](int round) { convolve_rows<true>(task, u, y, spectrum, starts, of, round); });
}

constexpr int OWN_KERNELS = RINGS == 1 ? 1 : TEAMS;

template <bool ALONE>
__device__ inline void correlate_rows(Task<1, OWN_KERNELS>& task, const float* dy, const float* u,
                                      float* du, float4* partial, const float2* starts,
                                      const Sizes& of, int round) {
  const Tables& tables = task.tables;
  int ring = task.ring<ALONE>(round), t = task.t, box = ALONE ? 0 : team();
  float2 start = starts[ring * MEMBERS + t], sum[16] = {};
  auto of_ring = [&] { return tables.last(t); };
  Gate read = task.gate(0);
  read.parity = task.kept;
  int first = task.first_row<ALONE>(of);
  for (int b = first; b < of.B;) {
    int next = task.next_row<ALONE>(b, of);
    bool more = next < of.B;
    float2 U[16], v[16], product[16];
    read_row<ALONE>(task, task.work, u + task.row(b, of), tables, of, [&] {
      if (!ALONE && b != first) team_barrier(READ + team(), THREADS);
    });
    team_wait();
    task.fetch<ALONE>(dy + task.row(b, of), of.stride);
    to_spectrum(task.work, U, tables, t, of_ring, [&] { read.arrive(); });
    read_row<ALONE>(task, task.work, dy + task.row(b, of), tables, of, [&] { read.wait(); });
    team_wait();
    if (more) task.fetch<ALONE>(u + task.row(next, of), of.stride);
    to_spectrum(task.work, v, tables, t, of_ring, [&] {});
    if (b == first) barrier_wait(task.barriers + TEAMS + 1 + box, round);
    const float4* kernel = task.kernels + box * (M / 2) + t;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      float4 two = kernel[k * MEMBERS];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int q = 2 * k + e;
        float2 value = v[reversed<16>(q)], other = U[reversed<16>(q)];
        sum[q] = add(sum[q], mul_conj(value, other));
        product[q] = mul_conj(value, e ? float2{two.z, two.w} : float2{two.x, two.y});
      }
    }
    from_spectrum(task.work, product, tables, t);
    team_wait();
    write_row<ALONE, 1>(du + task.row(b, of), task, task.work, tables.thread(t), start, of, round, 0,
                        more);
    b = next;
  }
  task.kept = read.parity;
  if constexpr (ALONE && TEAMS > 1) {  // all have a sum of the same ring
    float2* at = task.work + place(t);
#pragma unroll
    for (int q = 0; q < 16; ++q) at[q * place(MEMBERS)] = sum[q];
    __syncthreads();
    if (team()) return;
    for (int other = 1; other < TEAMS; ++other)
#pragma unroll
      for (int q = 0; q < 16; ++q) sum[q] = add(sum[q], at[other * WORK + q * place(MEMBERS)]);
  }
  float4* to = partial + (((long long)task.group * of.H + task.h) * RINGS + ring) * (M / 2) + t;
#pragma unroll
  for (int k = 0; k < 8; ++k)
    to[k * MEMBERS] = {sum[2 * k].x, sum[2 * k].y, sum[2 * k + 1].x, sum[2 * k + 1].y};
}

// du = the correlation of dy with the kernels, and for each group of sequences the spectrum of
// what it adds to the kernels' gradient: partial [groups, H, RINGS, 8, M / 16, 2] = sum conj(U) DY.
// du may be dy, if there is one round. u comes in and then dy, in turn.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convolve_backward(const float* dy, const float* u, float* du, const float4* spectrum,
                      float4* partial, const float4* all_tables, const float2* starts, int B, int L,
                      int stride, int H, int groups) {
  Task<1, OWN_KERNELS> task(H);
  Sizes of = {B, L, stride, H, groups};
  task.each_round(
      all_tables, u, spectrum, of,
      [&](int round) { correlate_rows<false>(task, dy, u, du, partial, starts, of, round); },
      [&](int round) { correlate_rows<true>(task, dy, u, du, partial, starts, of, round); });
}
