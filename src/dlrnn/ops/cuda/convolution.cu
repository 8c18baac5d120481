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
// ring, and each team is ALONE with a row. Of a row of two rings two teams do one each, and tell each
// other their shares in it. While teams compute, the next row comes in. More rings: many_rings.cu.

extern __shared__ __align__(16) float4 shared[];

constexpr bool ALONE = RINGS == 1;
static_assert(ALONE || (RINGS == 2 && TEAMS == 2), "teams of one row are two");

struct Sizes {
  int B, L, stride, H, groups;
};

// What a thread works on, and the block's shared memory: points (BUFFERS for each team), boxes for rows
// that come in, spectra of KERNELS, tables (with the long ones, if there are kernels), barriers.
constexpr int BOXES = ALONE ? TEAMS : 1;
constexpr int GATES = 2;

template <int BUFFERS, int KERNELS>
struct Task {
  float2* work;
  float* boxes;
  float4 *copied, *kernels;
  Tables tables;
  Barrier* barriers;  // of rows: for each team, for both; of kernels: for each team; gates of each team
  int t, h, group, parity;  // of rows

  __device__ Task(int H)
      : t(member()), h(blockIdx.x % H), group(blockIdx.x / H), parity(0) {
    float2* works = reinterpret_cast<float2*>(shared);
    work = works + team() * BUFFERS * WORK;
    boxes = reinterpret_cast<float*>(works + TEAMS * BUFFERS * WORK);
    kernels = reinterpret_cast<float4*>(boxes + BOXES * PARTS * M);
    copied = kernels + KERNELS * (M / 2);
    int tables_size = PLACES + RINGS * SHORT + (KERNELS ? (1 + RINGS) * LONG : 0);
    barriers = reinterpret_cast<Barrier*>(copied + tables_size);
    if (threadIdx.x == 0) {
      for (int k = 0; k < 2 * TEAMS + 1; ++k) barrier_start(barriers + k);
      for (int k = 0; k < GATES * TEAMS; ++k) barrier_start(barriers + 2 * TEAMS + 1 + k, MEMBERS < 32 ? 1 : MEMBERS / 32);
      *leaders() = 0;
    }
    __syncthreads();
    previous_done();
  }
  __device__ Gate gate(int k) { return {barriers + 2 * TEAMS + 1 + team() * GATES + k, 0}; }
  __device__ unsigned* leaders() {
    return reinterpret_cast<unsigned*>(barriers + (2 + GATES) * TEAMS + 1);
  }
  __device__ float* box() {
    return boxes + (ALONE ? team() * PARTS * M : 0);
  }
  __device__ Barrier* row_came() {
    return barriers + (ALONE ? team() : TEAMS);
  }
  __device__ int ring() const {
    return ALONE ? 0 : team();
  }
  __device__ long long row(int b, const Sizes& of) const {
    return ((long long)b * of.H + h) * of.stride;
  }
  __device__ int first_row(const Sizes& of) const {
    return group + (ALONE ? team() * of.groups : 0);
  }
  __device__ int next_row(int b, const Sizes& of) const {
    return b + (ALONE ? TEAMS : 1) * of.groups;
  }

  // Asks for a row, when the team has read what was there; of two the second asks.
  __device__ void fetch(const float* row, int stride) {
    if (t) return;
    if (!ALONE) {
      __threadfence_block();
      if (atomicAdd(leaders(), 1u) % 2 == 0) return;
      __threadfence_block();
    }
    barrier_expect(row_came(), 4 * stride);
    copy_to_shared(box(), row, 4 * stride, row_came());
  }
  __device__ void wait() {
    barrier_wait(row_came(), parity);
    parity ^= 1;
  }

  // What the block needs in shared memory, and the first row.
  __device__ void start(const float4* all_tables, const float* u, const float4* spectrum, const Sizes& of) {
    int b = first_row(of);
    if (b < of.B) fetch(u + row(b, of), of.stride);
    if (KERNELS && t == 0 && team() < RINGS) {
      const float4* from = spectrum + ((long long)h * RINGS + team()) * (M / 2);
      Barrier* came = barriers + TEAMS + 1 + team();
      barrier_expect(came, M * 8);
      copy_to_shared(kernels + team() * (M / 2), from, M * 8, came);
    }
    tables = copy_tables(copied, all_tables, 0, RINGS, ring());
    if (KERNELS) tables = copy_long_tables(copied + PLACES + RINGS * SHORT, tables, RINGS, ring());
    __syncthreads();
  }
};

// Pass 1, from the box into `work`, once ready() has returned.
template <class T, class Ready>
__device__ inline void read_row(T& task, float2* work, const Sizes& of, Ready ready) {
  const float* box = task.box() + task.t;
  int left = of.L - task.t;
  float2 v[16];
  task.wait();
  auto entry = [&](int k, int r) { return box[along(k, r)]; };
  auto checked = [&](int k, int r) { return inside(k, r, left) ? box[along(k, r)] : 0.f; };
  if (of.L == PARTS * M) fold<0, PARTS>(v, task.tables, entry);
  else fold<0, PARTS>(v, task.tables, checked);
  after_fold(v, task.tables);
  ready();
  put_first(work, v, task.t);
}

// A ring's share in parts of a row, with the other team's, which are at `theirs`.
template <int RING, bool CHECKED>
__device__ inline void write_parts(float* y, const float2 (&v)[16], const float2* theirs, int left) {
  constexpr int OWN = ALONE ? PARTS : PARTS / 2, FIRST = RING * OWN;
#pragma unroll
  for (int i = 0; i < 16 * OWN; ++i) {
    int k = FIRST + i / 16, r = i % 16;
    float value = share<RING>(v, k, r);
    if constexpr (!ALONE) {
      float2 two = theirs[i / 2 * place(MEMBERS)];
      value += i % 2 ? two.y : two.x;
    }
    if (CHECKED && !inside(k, r, left)) continue;
    y[along(k, r)] = value;
  }
}

template <int BUFFERS, int RING>
__device__ inline void finish_row(float* y, const float2 (&v)[16], float2* work, int t, int L,
                                  int parity, bool more) {
  constexpr int THEIRS = (1 - RING) * (PARTS / 2);
  float2* at = work + place(t);  // where only this thread has read
  if constexpr (!ALONE) {
#pragma unroll
    for (int i = 0; i < 4 * PARTS; ++i) {
      int k = THEIRS + i / 8, r = i % 8 * 2;
      at[i * place(MEMBERS)] = {share<RING>(v, k, r), share<RING>(v, k, r + 1)};
    }
    tell(WRITTEN + RING + 2 * parity);
    team_barrier(WRITTEN + 1 - RING + 2 * parity, THREADS);
    at += (1 - 2 * RING) * BUFFERS * WORK;
  }
  if (L == PARTS * M) write_parts<RING, false>(y + t, v, at, L - t);
  else write_parts<RING, true>(y + t, v, at, L - t);
  if constexpr (!ALONE)
    if (more) tell(READ + 1 - RING + 2 * parity);
}

// The last pass back. Two teams finish half of the row's parts each; `parity` is that of the row, and
// that the other's shares have been read is told if `more` rows need the place.
template <int BUFFERS, class T>
__device__ inline void write_row(float* y, T& task, float2* work, Entry of_thread, float2 start,
                                 const Sizes& of, int parity, bool more) {
  float2 v[16];
  int t = task.t, L = of.L;
  first_back(work, v, of_thread, start, t);
  if (task.ring() == 0) finish_row<BUFFERS, 0>(y, v, work, t, L, parity, more);
  else finish_row<BUFFERS, 1 % RINGS>(y, v, work, t, L, parity, more);
}

// ------------------------------------------------------------------------- kernels

// y = the convolution of u with the kernels of `spectrum`; y may be u. With two places for points:
// the next row's first pass comes before this one's last, and nobody waits for others.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convolve(const float* u, float* y, const float4* spectrum, const float4* all_tables,
             const float2* starts, int B, int L, int stride, int H, int groups) {
  Task<2, 0> task(H);
  Sizes of = {B, L, stride, H, groups};
  task.start(all_tables, u, spectrum, of);
  const Tables& tables = task.tables;
  int ring = task.ring(), t = task.t;
  float2 start = starts[ring * MEMBERS + t], kernel[16];
  Entry of_ring = tables.last(t), of_thread = tables.thread(t);
  const float4* from = spectrum + ((long long)task.h * RINGS + ring) * (M / 2) + t;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    float4 two = from[k * MEMBERS];
    kernel[2 * k] = {two.x, two.y}, kernel[2 * k + 1] = {two.z, two.w};
  }
  Gate in = task.gate(0), out = task.gate(1);
  int first = task.first_row(of), parity = 0;
  if (first < of.B) {
    read_row(task, task.work, of, [&] {});
    in.arrive();
  }
  for (int b = first; b < of.B; parity ^= 1) {
    int next = task.next_row(b, of), after = task.next_row(next, of);
    float2 *work = task.work + parity * WORK, *other = task.work + (parity ^ 1) * WORK;
    float2 v[16], product[16];
    in.wait();
    if (next < of.B) task.fetch(u + task.row(next, of), of.stride);
    to_spectrum(work, v, tables, t, [&] { return of_ring; }, [&] {});
#pragma unroll
    for (int q = 0; q < 16; ++q) product[q] = mul(v[reversed<16>(q)], kernel[q]);
    from_spectrum(work, product, tables, t);
    out.arrive();
    if (next < of.B) {
      read_row(task, other, of, [&] {
        if (!ALONE && b != first) team_barrier(READ + team() + 2 * (parity ^ 1), THREADS);
      });
      in.arrive();
    }
    out.wait();
    write_row<2>(y + task.row(b, of), task, work, of_thread, start, of, parity, after < of.B);
    b = next;
  }
}

// du = the correlation of dy with the kernels, and for each group of sequences the spectrum of
// what it adds to the kernels' gradient: partial [groups, H, RINGS, 8, M / 16, 2] = sum conj(U) DY.
// du may be dy. u comes in and then dy, in turn.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convolve_backward(const float* dy, const float* u, float* du, const float4* spectrum,
                      float4* partial, const float4* all_tables, const float2* starts, int B, int L,
                      int stride, int H, int groups) {
  Task<1, RINGS> task(H);
  Sizes of = {B, L, stride, H, groups};
  task.start(all_tables, u, spectrum, of);
  const Tables& tables = task.tables;
  int ring = task.ring(), t = task.t;
  float2 start = starts[ring * MEMBERS + t], sum[16] = {};
  auto of_ring = [&] { return tables.last(t); };
  Gate read = task.gate(0);
  int first = task.first_row(of);
  for (int b = first; b < of.B;) {
    int next = task.next_row(b, of);
    bool more = next < of.B;
    float2 U[16], v[16], product[16];
    read_row(task, task.work, of, [&] {
      if (!ALONE && b != first) team_barrier(READ + team(), THREADS);
    });
    team_wait();
    task.fetch(dy + task.row(b, of), of.stride);
    to_spectrum(task.work, U, tables, t, of_ring, [&] { read.arrive(); });
    read_row(task, task.work, of, [&] { read.wait(); });
    team_wait();
    if (more) task.fetch(u + task.row(next, of), of.stride);
    to_spectrum(task.work, v, tables, t, of_ring, [&] {});
    if (b == first) barrier_wait(task.barriers + TEAMS + 1 + ring, 0);
    const float4* kernel = task.kernels + ring * (M / 2) + t;
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
    write_row<1>(du + task.row(b, of), task, task.work, tables.thread(t), start, of, 0, more);
    b = next;
  }
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
