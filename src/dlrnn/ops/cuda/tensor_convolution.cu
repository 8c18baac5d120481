// Convolution of channel-major rows of 2049 to 16384 entries in bf16 on tensor cores; the mathematics is that of
// convolution.cu, the transform that of tensor_fft.cuh.
//
// A block has a channel, and processes SLOTS rows of a group of sequences at a time:
//   bulk copies load the rows into stages, in lines of 256 entries; copies of the next rows start once they are read;
//   pass 1: a warp has columns (j modulo 256) of a row, finds the largest entry of the row together with the other
//     warps, scales, transforms, and writes tiles into shared memory;
//   passes 2 and 3, product, inverses: a warp has the same tiles of all rows, so that it keeps their twiddle factors
//     and the spectrum of the kernels in registers;
//   inverse of pass 1: a warp has columns of a row again; it gathers the entries in shared memory, and writes them.
// A row of several segments or residues is one product with a longer sum in both passes over columns.
// Backward processes pairs of rows, u and dy, in adjacent slots.

extern __shared__ __align__(16) float4 shared[];

constexpr int M = 4096, THREADS = 32 * WARPS;
constexpr int LINE_BYTES = 512 + 16, STAGE_BYTES = 16 * SEGMENTS * LINE_BYTES;  // of 256 entries; of a row
constexpr int PLANE_BYTES = 512, TILE_BYTES = 2 * PLANE_BYTES + 16;  // real parts, imaginary parts, padding
constexpr int SLOT_BYTES = 16 * RESIDUES * TILE_BYTES;
constexpr int TILES = 16 * RESIDUES / WARPS;  // of a warp
constexpr int LARGEST = RESIDUES == 1 ? 7 : 5;  // a row's largest entry is scaled to at least 2^LARGEST
static_assert(16 * RESIDUES % WARPS == 0 && WARPS % SLOTS == 0 && 16 % (WARPS / SLOTS) == 0, "work of warps");

struct Sizes {
  int B, L, stride, H, groups;
};

__device__ inline void wait_for_previous_launch() {
  asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
}

// 2^exponent, from -126 to 127
__device__ inline float power_of_two(int exponent) { return __uint_as_float((unsigned)(127 + exponent) << 23); }

// The scale of a row whose largest entry has these 15 bits: 2^k, as k.
__device__ inline int row_exponent(unsigned magnitude) { return LARGEST + 127 - max((int)(magnitude >> 7), 8); }

// Tables, as 64 vectors each: DFT matrix as operands A and B; its twiddle factors; for each residue and segment the
// matrix of pass 1, then for each that of the inverse; for each residue the twiddle factors of its tiles.
constexpr int PASS1_TABLES = 3, INVERSE_TABLES = PASS1_TABLES + RESIDUES * SEGMENTS;
constexpr int TILE_TABLES = INVERSE_TABLES + RESIDUES * SEGMENTS;

// Where the parts of a warp's work are; ROWS are processed at a time, in SLOTS.
template <bool BACKWARD>
struct Block {
  static constexpr int ROWS = BACKWARD ? SLOTS / 2 : SLOTS;
  static constexpr int SPAN = 16 * SLOTS / WARPS;         // pass 1: groups of 16 columns of a warp
  static constexpr int INVERSE_SPAN = 16 * ROWS / WARPS;  // its inverse
  static constexpr int CHUNK = INVERSE_SPAN < 2 ? INVERSE_SPAN : 2;  // of them at a time

  const uint4* tables;
  Sizes sizes;
  int lane, warp, h, group, count;
  unsigned points, stages;  // addresses in shared memory
  unsigned* largest;        // of the columns of each warp, for this iteration and the next
  float* kernel_largest;    // of each warp
  Mbarrier* loaded;

  __device__ Block(const uint4* tables, Sizes sizes)
      : tables(tables), sizes(sizes), lane(threadIdx.x % 32), warp(threadIdx.x / 32), h(blockIdx.x % sizes.H),
        group(blockIdx.x / sizes.H) {
    count = (sizes.B - group + sizes.groups - 1) / sizes.groups;
    char* memory = reinterpret_cast<char*>(shared);
    points = shared_address(memory), stages = points + SLOTS * SLOT_BYTES;
    largest = reinterpret_cast<unsigned*>(memory + SLOTS * (SLOT_BYTES + STAGE_BYTES));
    kernel_largest = reinterpret_cast<float*>(largest + 2 * WARPS);
    loaded = reinterpret_cast<Mbarrier*>(kernel_largest + WARPS);
    if (threadIdx.x == 0) mbarrier_init(loaded);
    __syncthreads();
    wait_for_previous_launch();
  }

  // Row `number` of the group.
  __device__ long long row(int number) const {
    return (((long long)group + (long long)number * sizes.groups) * sizes.H + h) * sizes.stride;
  }
  // The row of a slot, and whether it exists.
  __device__ int number_of(int slot, int first) const { return first + (BACKWARD ? slot / 2 : slot); }
  __device__ bool is_present(int slot, int first) const { return number_of(slot, first) < count; }

  // Starts to load the rows from number `first` on. A lane copies a line; all warps share the lines, because the lanes
  // of a warp copy one after the other.
  __device__ void fetch(const Storage* u, const Storage* dy, int first) const {
    if (first >= count) return;
    if (threadIdx.x == 0)
      mbarrier_expect_bytes(loaded, min(ROWS, count - first) * (SLOTS / ROWS) * sizes.stride * (int)sizeof(Storage));
    constexpr int LINES = 16 * SEGMENTS * SLOTS;
    int i = warp + WARPS * lane;
    if (i >= LINES) return;
    int slot = i / (16 * SEGMENTS), line = i % (16 * SEGMENTS), entries = min(256, sizes.stride - 256 * line);
    if (!is_present(slot, first) || entries <= 0) return;
    const Storage* from = (BACKWARD && slot % 2 ? dy : u) + row(number_of(slot, first)) + 256 * line;
    char* stage = reinterpret_cast<char*>(shared) + SLOTS * SLOT_BYTES;
    copy_to_shared(stage + i * LINE_BYTES, from, entries * sizeof(Storage), loaded);
  }

  // Addresses of the rows of ldmatrix and stmatrix. Of 16 lines of a stage, or of the same row of 16 tiles: matrices
  // are lines 0 to 7, lines 8 to 15, at columns 0 to 7 of a group, then both at columns 8 to 15. Within a tile:
  // matrices are rows 0 to 7 at columns 0 to 7, then at columns 8 to 15, then rows 8 to 15. In a plane both halves of
  // rows 4 to 7 and 12 to 15 are exchanged, against bank conflicts.
  __device__ int line() const { return lane / 8 % 2 * 8 + lane % 8; }
  __device__ unsigned stage_address(int slot, int segment, int columns) const {
    return stages + slot * STAGE_BYTES + (16 * segment + line()) * LINE_BYTES + columns * 32 + lane / 16 * 16;
  }
  __device__ unsigned column_address(int slot, int residue, int plane, int columns, bool exchanged) const {
    return points + slot * SLOT_BYTES + (16 * residue + line()) * TILE_BYTES + plane * PLANE_BYTES + columns * 32 +
           (lane / 16 ^ (exchanged ? columns / 4 % 2 : 0)) * 16;
  }
  __device__ unsigned tile_address(int slot, int tile) const {
    int row = lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
    return points + slot * SLOT_BYTES + tile * TILE_BYTES + row * 32 + (half ^ row / 4 % 2) * 16;
  }
  __device__ void load_points(Tile& v, int slot, int tile) const {
    unsigned at = tile_address(slot, tile);
    load_transposed(v.re, at), load_transposed(v.im, at + PLANE_BYTES);
  }
  __device__ void store_points(const Tile& v, int slot, int tile) const {
    unsigned at = tile_address(slot, tile);
    store_transposed(at, v.re), store_transposed(at + PLANE_BYTES, v.im);
  }

  // The largest magnitude in a slot, after all warps have stored theirs.
  __device__ int exponent_of(int slot, int parity) const {
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < WARPS / SLOTS; ++i) most = max(most, largest[parity * WARPS + slot * (WARPS / SLOTS) + i]);
    return row_exponent(most);
  }

  // ----------------------------------------------------------------------- passes over columns

  // Reads this warp's columns, as pairs of entries of lines 2 t and 2 t + 1; entries beyond the row are 0.
  __device__ void read_columns(unsigned (&x)[SEGMENTS][SPAN][4], int slot, int parity) {
    int g = lane / 4, first = warp % (WARPS / SLOTS) * SPAN;
    unsigned most = 0;
#pragma unroll
    for (int segment = 0; segment < SEGMENTS; ++segment)
#pragma unroll
      for (int c = 0; c < SPAN; ++c) {
        load_transposed(x[segment][c], stage_address(slot, segment, first + c));
        if (sizes.L < SEGMENTS * M) {
          int entry = segment * M + lane % 4 * 512 + (first + c) * 16 + g;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            int from = entry + i % 2 * 2048 + i / 2 * 8;
            unsigned mask = (from < sizes.L ? 0xffffu : 0u) | (from + 256 < sizes.L ? 0xffff0000u : 0u);
            x[segment][c][i] &= mask;
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) most = max_pairs(most, x[segment][c][i] & 0x7fff7fffu);
      }
    most = __reduce_max_sync(0xffffffffu, max(most >> 16, most & 0xffffu));
    if (lane == 0) largest[parity * WARPS + warp] = most;
  }

  __device__ void pass1(unsigned (&x)[SEGMENTS][SPAN][4], int slot, int parity) const {
    float scale = power_of_two(exponent_of(slot, parity));
    int first = warp % (WARPS / SLOTS) * SPAN;
#pragma unroll
    for (int segment = 0; segment < SEGMENTS; ++segment)
#pragma unroll
      for (int c = 0; c < SPAN; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          unsigned two = x[segment][c][i];
          x[segment][c][i] =
              pack_half2(scale * __uint_as_float(two << 16), scale * __uint_as_float(two & 0xffff0000u));
        }
#pragma unroll 1
    for (int residue = 0; residue < RESIDUES; ++residue) {
      const uint4* matrices = tables + 64 * (PASS1_TABLES + residue * SEGMENTS);
#pragma unroll
      for (int c = 0; c < SPAN; c += CHUNK) {
        Sums d[CHUNK] = {};
#pragma unroll
        for (int segment = 0; segment < SEGMENTS; ++segment) {
          Tile matrix;
          load_tile(matrix, matrices + 64 * segment, lane);
#pragma unroll
          for (int k = 0; k < CHUNK; ++k)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              unsigned low = x[segment][c + k][2 * half], high = x[segment][c + k][2 * half + 1];
              mma_fp16(d[k].re[half], matrix.re, low, high, d[k].re[half]);
              mma_fp16(d[k].im[half], matrix.im, low, high, d[k].im[half]);
            }
        }
#pragma unroll
        for (int k = 0; k < CHUNK; ++k) {
          Tile v;
          narrow(v, d[k]);
          store_matrices(column_address(slot, residue, 0, first + c + k, true), v.re);
          store_matrices(column_address(slot, residue, 1, first + c + k, true), v.im);
        }
      }
    }
  }

  // The inverse of pass 1 of a row; its entries replace the points of the same columns, and are written to y.
  __device__ void write_row(Storage* y, int slot, float scale) const {
    int first = warp % (WARPS / ROWS) * INVERSE_SPAN;
    const uint4* matrices = tables + 64 * INVERSE_TABLES;
#pragma unroll 1
    for (int c = first; c < first + INVERSE_SPAN; c += CHUNK) {
      Tile z[CHUNK][RESIDUES];
#pragma unroll
      for (int k = 0; k < CHUNK; ++k)
#pragma unroll
        for (int residue = 0; residue < RESIDUES; ++residue) {
          load_transposed(z[k][residue].re, column_address(slot, residue, 0, c + k, true));
          load_transposed(z[k][residue].im, column_address(slot, residue, 1, c + k, true));
        }
#pragma unroll(SEGMENTS > 2 ? 1 : SEGMENTS)
      for (int segment = 0; segment < SEGMENTS; ++segment) {
        float d[CHUNK][2][4] = {};
#pragma unroll
        for (int residue = 0; residue < RESIDUES; ++residue) {
          Tile matrix;
          load_tile(matrix, matrices + 64 * (residue * SEGMENTS + segment), lane);
#pragma unroll
          for (int k = 0; k < CHUNK; ++k)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const Tile& from = z[k][residue];
              mma_fp16(d[k][half], matrix.re, from.re[2 * half], from.re[2 * half + 1], d[k][half]);
              mma_fp16(d[k][half], matrix.im, from.im[2 * half], from.im[2 * half + 1], d[k][half]);
            }
        }
#pragma unroll
        for (int k = 0; k < CHUNK; ++k) {
          Fragment entries;
#pragma unroll
          for (int i = 0; i < 4; ++i)
            entries[i] = narrow_pair(scale * d[k][i / 2][i % 2 * 2], scale * d[k][i / 2][i % 2 * 2 + 1]);
          store_matrices(column_address(slot, segment / 2, segment % 2, c + k, false), entries);
        }
      }
    }
    __syncwarp();
    constexpr int VECTORS = 2 * INVERSE_SPAN;  // of a line
#pragma unroll 4
    for (int i = lane; i < 16 * SEGMENTS * VECTORS; i += 32) {
      int line = i / VECTORS, segment = line / 16, column = (2 * first + i % VECTORS) * 8;
      if (256 * line + column >= sizes.stride) continue;
      uint4 eight = load_shared(points + slot * SLOT_BYTES + (segment / 2 * 16 + line % 16) * TILE_BYTES +
                                segment % 2 * PLANE_BYTES + column * 2);
      *reinterpret_cast<uint4*>(y + 256 * line + column) = eight;
    }
  }

  // ----------------------------------------------------------------------- tiles of a warp

  __device__ int tile(int i) const { return warp * TILES + i; }
  __device__ const uint4* tile_table(int i) const { return tables + 64 * (TILE_TABLES + tile(i)); }
  // Where a spectrum has number 2 t of row g of a tile, as a pair with number 2 t + 1. Number 8 more is 4 QUARTER
  // further; row 8 more is 8 vectors further.
  static constexpr int QUARTER = M / 16;
  __device__ int spectrum_at(int i) const {
    return tile(i) / 16 * (M / 2) + lane % 4 * QUARTER + tile(i) % 16 * 16 + lane / 4;
  }
  __device__ static int pair_offset(int k) { return k / 2 * 4 * QUARTER + k % 2 * 8; }

  // The spectrum of the kernels in fp16, times a power of two such that the largest number is at least 1/2 and below 1;
  // returns its inverse.
  __device__ float load_kernels(Tile (&kernels)[TILES], const float4* spectrum) {
    spectrum += (long long)h * RESIDUES * (M / 2);
    float4 two[TILES][4];
    float most = 0;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float4 v = two[i][k] = spectrum[spectrum_at(i) + pair_offset(k)];
        most = max(most, max(max(fabsf(v.x), fabsf(v.y)), max(fabsf(v.z), fabsf(v.w))));
      }
    unsigned bits = __reduce_max_sync(0xffffffffu, __float_as_uint(most));
    if (lane == 0) kernel_largest[warp] = __uint_as_float(bits);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; ++i) most = max(most, kernel_largest[i]);
    int exponent = 126 - min(max((int)(__float_as_uint(most) >> 23), 1), 252);
    float scale = power_of_two(exponent);
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float4 v = two[i][k];
        kernels[i].re[k] = pack_half2(scale * v.x, scale * v.z);
        kernels[i].im[k] = pack_half2(scale * v.y, scale * v.w);
      }
    return power_of_two(-exponent);
  }
};

// ------------------------------------------------------------------------- kernels

// y = the convolution of u with the kernels of `spectrum`; y may be u.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convolve(const Storage* u, Storage* y, const float4* spectrum, const uint4* tables, int B, int L, int stride,
             int H, int groups) {
  Block<false> block(tables, {B, L, stride, H, groups});
  block.fetch(u, nullptr, 0);
  Tile kernels[TILES];
  float kernel_scale = block.load_kernels(kernels, spectrum);
  int slot = block.warp / (WARPS / SLOTS);
#pragma unroll 1
  for (int first = 0, parity = 0; first < block.count; first += SLOTS, parity ^= 1) {
    bool is_present = block.is_present(slot, first);
    {
      unsigned x[SEGMENTS][block.SPAN][4];
      mbarrier_wait(block.loaded, parity);
      if (is_present) block.read_columns(x, slot, parity);
      __syncthreads();
      block.fetch(u, nullptr, first + SLOTS);
      if (is_present) block.pass1(x, slot, parity);
    }
    Passes<true> passes;
    passes.load(tables, block.lane);
    __syncthreads();
    int rows = min(SLOTS, block.count - first);
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      Tile twiddles;
      load_tile(twiddles, block.tile_table(i), block.lane);
#pragma unroll 1
      for (int r = 0; r < rows; ++r) {
        Tile v;
        Sums d;
        block.load_points(v, r, block.tile(i));
        passes.to_spectrum(d, v, twiddles);
        narrow(v, d);
        multiply<false>(v, kernels[i]);
        passes.from_spectrum(v, twiddles);
        block.store_points(v, r, block.tile(i));
      }
    }
    __syncthreads();
    if (is_present) {
      float scale = M * power_of_two(-block.exponent_of(slot, parity)) * kernel_scale;
      block.write_row(y + block.row(first + slot), slot, scale);
    }
  }
}

// du = the correlation of dy with the kernels. For each group of sequences also the spectrum of its part of the
// kernels' gradient: partial [groups, H, RESIDUES, 8, M / 16, 2] = sum conj(U) DY. du may be dy.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convolve_backward(const Storage* dy, const Storage* u, Storage* du, const float4* spectrum, float4* partial,
                      const uint4* tables, int B, int L, int stride, int H, int groups) {
  Block<true> block(tables, {B, L, stride, H, groups});
  block.fetch(u, dy, 0);
  Tile kernels[TILES];
  float kernel_scale = block.load_kernels(kernels, spectrum);
  Sums sums[TILES] = {};
  int slot = block.warp / (WARPS / SLOTS), du_slot = block.warp / (WARPS / block.ROWS) * 2 + 1;
#pragma unroll 1
  for (int first = 0, parity = 0; first < block.count; first += block.ROWS, parity ^= 1) {
    {
      bool is_present = block.is_present(slot, first);
      unsigned x[SEGMENTS][block.SPAN][4];
      mbarrier_wait(block.loaded, parity);
      if (is_present) block.read_columns(x, slot, parity);
      __syncthreads();
      block.fetch(u, dy, first + block.ROWS);
      if (is_present) block.pass1(x, slot, parity);
    }
    Passes<false> passes;
    passes.load(tables, block.lane);
    __syncthreads();
    int rows = min(block.ROWS, block.count - first);
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      Tile twiddles;
      load_tile(twiddles, block.tile_table(i), block.lane);
#pragma unroll 1
      for (int r = 0; r < rows; ++r) {
        Tile v;
        Sums U, d;
        block.load_points(v, 2 * r, block.tile(i));
        passes.to_spectrum(U, v, twiddles);
        block.load_points(v, 2 * r + 1, block.tile(i));
        passes.to_spectrum(d, v, twiddles);
        float scale = M * power_of_two(-block.exponent_of(2 * r, parity)) *
                      power_of_two(-block.exponent_of(2 * r + 1, parity));
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            float re = scale * U.re[half][k], im = scale * U.im[half][k];
            float &sum_re = sums[i].re[half][k], &sum_im = sums[i].im[half][k];
            sum_re = fmaf(d.re[half][k], re, fmaf(d.im[half][k], im, sum_re));
            sum_im = fmaf(d.im[half][k], re, fmaf(-d.re[half][k], im, sum_im));
          }
        narrow(v, d);
        multiply<true>(v, kernels[i]);
        passes.from_spectrum(v, twiddles);
        block.store_points(v, 2 * r + 1, block.tile(i));
      }
    }
    __syncthreads();
    if (block.is_present(du_slot, first)) {
      float scale = M * power_of_two(-block.exponent_of(du_slot, parity)) * kernel_scale;
      block.write_row(du + block.row(block.number_of(du_slot, first)), du_slot, scale);
    }
  }
  partial += ((long long)block.group * H + block.h) * RESIDUES * (M / 2);
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      int half = k / 2, row = k % 2 * 2;
      partial[block.spectrum_at(i) + block.pair_offset(k)] = {
          sums[i].re[half][row], sums[i].im[half][row], sums[i].re[half][row + 1], sums[i].im[half][row + 1]};
    }
}
