// Convolution of channel-major rows of up to 8192 entries, or 16384 with two residues: read u, transform, multiply,
// transform back, write y.
//
// A real signal x of 2 N entries modulo X^2N + 1 is the complex signal z_j = x_j - i x_(j+N) modulo X^N + i. Entries
// that wrap around change sign, and none of them reaches an entry of y. The pointwise product needs no untangling:
//   u (L entries)         z_j = u_j, if L <= N,               real input,
//   kernels               z_j = right_j + i left_(N-1-j),     two-sided at no cost,
//   y                     y_j = Re z_j, if L <= N,            real output.
// Spectra are [H, RESIDUES, 8, M / 16, 2]: points 2 k and 2 k + 1 of residue t of pass 3 are at [.., k, t, :].
//
// A block has a channel, and processes the sequences of a group one after the other. With one residue (rows of up to
// 4096 entries) each team transforms a whole row (ONE_TEAM_PER_ROW). With two, each of two teams transforms one of
// them, and they exchange their contributions to the row. Meanwhile a bulk copy loads the next row into a stage. For
// more residues see convolution_multi_residue.cu. Rows are stored in fp32, bf16 or fp16 (Storage); all else is fp32.
//
// GPUs with less shared memory than Hopper (STAGED = 0) have neither stages nor spectra in it, and one buffer: the next
// row is prefetched into L2, and threads read rows from there.

extern __shared__ __align__(16) float4 shared[];

constexpr bool ONE_TEAM_PER_ROW = RESIDUES == 1;
static_assert(ONE_TEAM_PER_ROW || (RESIDUES == 2 && TEAMS == 2), "teams of one row are two");

struct Sizes {
  int B, L, stride, H, groups;
};

// What a thread works on, and the block's shared memory: points (BUFFERS for each team), stages into which bulk copies
// load rows, SPECTRA spectra of kernels, tables (all of them if there are spectra), barriers.
constexpr int STAGES = !STAGED ? 0 : ONE_TEAM_PER_ROW ? TEAMS : 1;
constexpr int SPLIT_BARRIERS = 2;

template <int BUFFERS, int SPECTRA>
struct Task {
  float2* work;
  Storage* stages;
  float4 *shared_tables, *kernel_spectra;
  Tables tables;
  Mbarrier* barriers;  // mbarriers of rows: of each team, of both; of spectra: of each team; split barriers
  int t, h, group, parity;  // of rows' mbarrier

  __device__ Task(int H)
      : t(team_rank()), h(blockIdx.x % H), group(blockIdx.x / H), parity(0) {
    float2* works = reinterpret_cast<float2*>(shared);
    work = works + team() * BUFFERS * PADDED;
    stages = reinterpret_cast<Storage*>(works + TEAMS * BUFFERS * PADDED);
    kernel_spectra = reinterpret_cast<float4*>(stages + STAGES * SEGMENTS * M);
    shared_tables = kernel_spectra + SPECTRA * (M / 2);
    int tables_size = POSITION_TABLE + RESIDUES * RESIDUE_TABLE + (SPECTRA ? (1 + RESIDUES) * THREAD_TABLE : 0);
    barriers = reinterpret_cast<Mbarrier*>(shared_tables + tables_size);
    if (threadIdx.x == 0) {
      for (int k = 0; k < 2 * TEAMS + 1; ++k) mbarrier_init(barriers + k);
      for (int k = 0; k < SPLIT_BARRIERS * TEAMS; ++k)
        mbarrier_init(barriers + 2 * TEAMS + 1 + k, TEAM_SIZE < 32 ? 1 : TEAM_SIZE / 32);
      *finished_readers() = 0;
    }
    __syncthreads();
    wait_for_previous_launch();
  }
  __device__ SplitBarrier split_barrier(int k) { return {barriers + 2 * TEAMS + 1 + team() * SPLIT_BARRIERS + k, 0}; }
  __device__ unsigned* finished_readers() {
    return reinterpret_cast<unsigned*>(barriers + (2 + SPLIT_BARRIERS) * TEAMS + 1);
  }
  __device__ Storage* stage() {
    return stages + (ONE_TEAM_PER_ROW ? team() * SEGMENTS * M : 0);
  }
  __device__ Mbarrier* row_loaded() {
    return barriers + (ONE_TEAM_PER_ROW ? team() : TEAMS);
  }
  __device__ int residue() const {
    return ONE_TEAM_PER_ROW ? 0 : team();
  }
  __device__ long long row(int b, const Sizes& sizes) const {
    return ((long long)b * sizes.H + h) * sizes.stride;
  }
  __device__ int first_row(const Sizes& sizes) const {
    return group + (ONE_TEAM_PER_ROW ? team() * sizes.groups : 0);
  }
  __device__ int next_row(int b, const Sizes& sizes) const {
    return b + (ONE_TEAM_PER_ROW ? TEAMS : 1) * sizes.groups;
  }

  // Starts the copy of a row into the stage, when the team has read the stage; of two teams the last one starts it.
  __device__ void fetch(const Storage* row, int stride) {
    int bytes = sizeof(Storage) * stride;
#if STAGED
    if (t) return;
    if (!ONE_TEAM_PER_ROW) {
      __threadfence_block();
      if (atomicAdd(finished_readers(), 1u) % 2 == 0) return;
      __threadfence_block();
    }
    mbarrier_expect_bytes(row_loaded(), bytes);
    copy_to_shared(stage(), row, bytes, row_loaded());
#else
    prefetch_row(row, bytes, ONE_TEAM_PER_ROW ? t : threadIdx.x, ONE_TEAM_PER_ROW ? TEAM_SIZE : THREADS);
#endif
  }
  __device__ void wait() {
    if (!STAGED) return;
    mbarrier_wait(row_loaded(), parity);
    parity ^= 1;
  }

  __device__ const float4* spectrum_of(const float4* spectrum, int residue) const {
    return spectrum + ((long long)h * RESIDUES + residue) * (M / 2);
  }
  // Without spectra in shared memory: loads the thread's points to where it has read those of pass 3.
  __device__ void fetch_spectrum(const float4* spectrum) {
    if (SPECTRA) return;
    const float4* from = spectrum_of(spectrum, residue()) + t;
#pragma unroll
    for (int k = 0; k < 8; ++k) copy_own_16(work + t * 18 + 2 * k, from + k * TEAM_SIZE);
  }
  // The spectrum of the kernels of this team's residue: the thread's points 2 k and 2 k + 1 are at k SPECTRUM_STRIDE.
  static constexpr int SPECTRUM_STRIDE = SPECTRA ? TEAM_SIZE : 1;
  __device__ const float4* wait_for_spectrum(bool is_first) {
    if (!SPECTRA) {
      wait_for_own_copies();
      return reinterpret_cast<const float4*>(work + t * 18);
    }
    if (is_first) mbarrier_wait(barriers + TEAMS + 1 + residue(), 0);
    return kernel_spectra + residue() * (M / 2) + t;
  }

  // Loads tables and spectra into shared memory, and the first row.
  __device__ void start(const float4* all_tables, const Storage* u, const float4* spectrum, const Sizes& sizes) {
    int b = first_row(sizes);
    if (b < sizes.B) fetch(u + row(b, sizes), sizes.stride);
    if constexpr (SPECTRA > 0)
      if (t == 0 && team() < RESIDUES) {
        const float4* from = spectrum_of(spectrum, team());
        Mbarrier* loaded = barriers + TEAMS + 1 + team();
        mbarrier_expect_bytes(loaded, M * 8);
        copy_to_shared(kernel_spectra + team() * (M / 2), from, M * 8, loaded);
      }
    tables = copy_tables(shared_tables, all_tables, 0, RESIDUES, residue());
    if (SPECTRA)
      tables = copy_large_tables(shared_tables + POSITION_TABLE + RESIDUES * RESIDUE_TABLE, tables, RESIDUES,
                                 residue());
    __syncthreads();
  }
};

// Pass 1 of row b, which has been fetched, into `work`; it writes when ready() has returned.
template <class T, class Ready>
__device__ inline void read_row(T& task, const Storage* rows, int b, float2* work, const Sizes& sizes, Ready ready) {
  const Storage* from = (STAGED ? task.stage() : rows + task.row(b, sizes)) + task.t;
  int remaining = sizes.L - task.t;
  float2 v[16];
  task.wait();
  auto entry = [&](int k, int r) { return to_fp32(from[entry_index(k, r)]); };
  auto checked = [&](int k, int r) { return is_inside(k, r, remaining) ? entry(k, r) : 0.f; };
  if (sizes.L == SEGMENTS * M) fold_segments<0, SEGMENTS>(v, task.tables, entry);
  else fold_segments<0, SEGMENTS>(v, task.tables, checked);
  finish_pass1(v, task.tables);
  ready();
  store_pass1(work, v, task.t);
}

// Writes segments of a row: this residue's contributions plus the other team's, which are at `others`.
template <int RESIDUE, bool CHECKED>
__device__ inline void write_segments(Storage* y, const float2 (&v)[16], const float2* others, int remaining) {
  constexpr int COUNT = ONE_TEAM_PER_ROW ? SEGMENTS : SEGMENTS / 2, FIRST = RESIDUE * COUNT;
#pragma unroll
  for (int i = 0; i < 16 * COUNT; ++i) {
    int k = FIRST + i / 16, r = i % 16;
    float value = contribution<RESIDUE>(v, k, r);
    if constexpr (!ONE_TEAM_PER_ROW) {
      float2 two = others[i / 2 * padded(TEAM_SIZE)];
      value += i % 2 ? two.y : two.x;
    }
    if (CHECKED && !is_inside(k, r, remaining)) continue;
    y[entry_index(k, r)] = from_fp32(value);
  }
}

template <int BUFFERS, int RESIDUE>
__device__ inline void finish_row(Storage* y, const float2 (&v)[16], float2* work, int t, int L,
                                  int parity, bool has_next) {
  constexpr int OTHERS_FIRST = (1 - RESIDUE) * (SEGMENTS / 2);
  float2* at = work + padded(t);  // only this thread has read these points
  if constexpr (!ONE_TEAM_PER_ROW) {
#pragma unroll
    for (int i = 0; i < 4 * SEGMENTS; ++i) {
      int k = OTHERS_FIRST + i / 8, r = i % 8 * 2;
      at[i * padded(TEAM_SIZE)] = {contribution<RESIDUE>(v, k, r), contribution<RESIDUE>(v, k, r + 1)};
    }
    signal(WRITTEN + RESIDUE + 2 * parity);
    named_barrier(WRITTEN + 1 - RESIDUE + 2 * parity, THREADS);
    at += (1 - 2 * RESIDUE) * BUFFERS * PADDED;
  }
  if (L == SEGMENTS * M) write_segments<RESIDUE, false>(y + t, v, at, L - t);
  else write_segments<RESIDUE, true>(y + t, v, at, L - t);
  if constexpr (!ONE_TEAM_PER_ROW)
    if (has_next) signal(READ + 1 - RESIDUE + 2 * parity);
}

// The inverse of pass 1, and the row's entries. Two teams write half of the segments each; `parity` is that of the row.
// The team signals that it has read the other's contributions if `has_next` rows need their place.
template <int BUFFERS, class T>
__device__ inline void write_row(Storage* y, T& task, float2* work, Seeds thread_seeds, float2 twist,
                                 const Sizes& sizes, int parity, bool has_next) {
  float2 v[16];
  int t = task.t, L = sizes.L;
  inverse_pass1(work, v, thread_seeds, twist, t);
  if (task.residue() == 0) finish_row<BUFFERS, 0>(y, v, work, t, L, parity, has_next);
  else finish_row<BUFFERS, 1 % RESIDUES>(y, v, work, t, L, parity, has_next);
}

// ------------------------------------------------------------------------- kernels

// y = the convolution of u with the kernels of `spectrum`; y may be u. With KEPT the spectra of u are kept. If each
// team has two buffers for points, pass 1 of the next row precedes the inverse of pass 1 of this row, and threads
// seldom wait at a barrier.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convolve(const Storage* u, Storage* y, const float4* spectrum, uint4* kept, const float4* all_tables,
             const float2* twists, int B, int L, int stride, int H, int groups) {
  constexpr int BUFFERS = STAGED ? 2 : 1;
  Task<BUFFERS, 0> task(H);
  Sizes sizes = {B, L, stride, H, groups};
  task.start(all_tables, u, spectrum, sizes);
  const Tables& tables = task.tables;
  int residue = task.residue(), t = task.t;
  float2 twist = twists[residue * TEAM_SIZE + t], kernel[16];
  Seeds residue_seeds = tables.last(t), thread_seeds = tables.thread(t);
  const float4* from = task.spectrum_of(spectrum, residue) + t;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    float4 two = from[k * TEAM_SIZE];
    kernel[2 * k] = {two.x, two.y}, kernel[2 * k + 1] = {two.z, two.w};
  }
  SplitBarrier read_done = task.split_barrier(0), inverse_done = task.split_barrier(1);
  int first = task.first_row(sizes), parity = 0;
  if (BUFFERS == 2 && first < sizes.B) {
    read_row(task, u, first, task.work, sizes, [&] {});
    read_done.arrive();
  }
  for (int b = first; b < sizes.B; parity ^= BUFFERS - 1) {
    int next = task.next_row(b, sizes), after = task.next_row(next, sizes);
    float2 *work = task.work + parity * PADDED, *other = task.work + (parity ^ BUFFERS - 1) * PADDED;
    float2 v[16], product[16];
    auto others_have_read = [&] {
      if (!ONE_TEAM_PER_ROW && b != first) named_barrier(READ + team() + 2 * (parity ^ BUFFERS - 1), THREADS);
    };
    if constexpr (BUFFERS == 1) {
      read_row(task, u, b, other, sizes, others_have_read);
      team_sync();
    } else {
      read_done.wait();
    }
    if (next < sizes.B) task.fetch(u + task.row(next, sizes), sizes.stride);
    to_spectrum(work, v, tables, t, [&] { return residue_seeds; }, [&] {});
#if KEPT
    keep_spectrum(kept + kept_at((long long)b * H + task.h, residue, t), v);
#endif
#pragma unroll
    for (int q = 0; q < 16; ++q) product[q] = mul(v[bit_reversed<16>(q)], kernel[q]);
    from_spectrum(work, product, tables, t);
    if constexpr (BUFFERS == 1) {
      team_sync();
    } else {
      inverse_done.arrive();
      if (next < sizes.B) {
        read_row(task, u, next, other, sizes, others_have_read);
        read_done.arrive();
      }
      inverse_done.wait();
    }
    write_row<BUFFERS>(y + task.row(b, sizes), task, work, thread_seeds, twist, sizes, parity,
                       (BUFFERS == 1 ? next : after) < sizes.B);
    b = next;
  }
}

// du = the correlation of dy with the kernels. For each group of sequences also the spectrum of its part of the
// kernels' gradient: partial [groups, H, RESIDUES, 8, M / 16, 2] = sum conj(U) DY. du may be dy. The stage
// alternates between u and dy; with KEPT the spectra U are read instead of u.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convolve_backward(const Storage* dy, const Storage* u, Storage* du, const float4* spectrum,
                      float4* partial, const uint4* kept, const float4* all_tables, const float2* twists,
                      int B, int L, int stride, int H, int groups) {
  Task<1, STAGED ? RESIDUES : 0> task(H);
  Sizes sizes = {B, L, stride, H, groups};
  task.start(all_tables, KEPT ? dy : u, spectrum, sizes);
  const Tables& tables = task.tables;
  int residue = task.residue(), t = task.t;
  float2 twist = twists[residue * TEAM_SIZE + t], sum[16] = {};
  auto residue_seeds = [&] { return tables.last(t); };
  SplitBarrier read_done = task.split_barrier(0);
  int first = task.first_row(sizes);
  for (int b = first; b < sizes.B;) {
    int next = task.next_row(b, sizes);
    bool has_next = next < sizes.B;
    float2 v[16], product[16];
    auto others_have_read = [&] {
      if (!ONE_TEAM_PER_ROW && b != first) named_barrier(READ + team(), THREADS);
    };
#if KEPT
    KeptSpectrum U;
    U.load(kept + kept_at((long long)b * H + task.h, residue, t));
    read_row(task, dy, b, task.work, sizes, others_have_read);
    team_sync();
    if (has_next) task.fetch(dy + task.row(next, sizes), sizes.stride);
#else
    float2 U[16];
    read_row(task, u, b, task.work, sizes, others_have_read);
    team_sync();
    task.fetch(dy + task.row(b, sizes), sizes.stride);
    to_spectrum(task.work, U, tables, t, residue_seeds, [&] { read_done.arrive(); });
    read_row(task, dy, b, task.work, sizes, [&] { read_done.wait(); });
    team_sync();
    if (has_next) task.fetch(u + task.row(next, sizes), sizes.stride);
#endif
    to_spectrum(task.work, v, tables, t, residue_seeds, [&] { task.fetch_spectrum(spectrum); });
    const float4* kernel = task.wait_for_spectrum(b == first);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      float4 two = kernel[k * task.SPECTRUM_STRIDE];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int q = 2 * k + e;
#if KEPT
        float2 value = v[bit_reversed<16>(q)], other = U.point(q);
#else
        float2 value = v[bit_reversed<16>(q)], other = U[bit_reversed<16>(q)];
#endif
        sum[q] = add(sum[q], mul_conj(value, other));
        product[q] = mul_conj(value, e ? float2{two.z, two.w} : float2{two.x, two.y});
      }
    }
    from_spectrum(task.work, product, tables, t);
    team_sync();
    write_row<1>(du + task.row(b, sizes), task, task.work, tables.thread(t), twist, sizes, 0, has_next);
    b = next;
  }
  if constexpr (ONE_TEAM_PER_ROW && TEAMS > 1) {  // the teams' sums are of the same residue
    float2* at = task.work + padded(t);
#pragma unroll
    for (int q = 0; q < 16; ++q) at[q * padded(TEAM_SIZE)] = sum[q];
    __syncthreads();
    if (team()) return;
    for (int other = 1; other < TEAMS; ++other)
#pragma unroll
      for (int q = 0; q < 16; ++q) sum[q] = add(sum[q], at[other * PADDED + q * padded(TEAM_SIZE)]);
  }
  float4* to = partial + (((long long)task.group * sizes.H + task.h) * RESIDUES + residue) * (M / 2) + t;
#pragma unroll
  for (int k = 0; k < 8; ++k)
    to[k * TEAM_SIZE] = {sum[2 * k].x, sum[2 * k].y, sum[2 * k + 1].x, sum[2 * k + 1].y};
}
