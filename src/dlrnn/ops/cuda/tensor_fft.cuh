// The negacyclic FFT of 4096 points (negacyclic_fft.cuh) on tensor cores, in fp16 with fp32 sums: three passes of radix
// 16, each a product with a DFT matrix of 16 x 16 complex numbers.
//
// With e(x) = exp(-2 pi i x), a residue modulo X^4096 - e(x) has the points j = 256 a + 16 p + q, and the frequencies
// f = A + 16 P + 256 Q, at the roots e((x + f) / 4096):
//   pass 1   over a, with the matrix e((x + A) a / 16), from real entries; rows of the result are A,
//            (twiddle factor e((x + A) (16 p + q) / 4096))
//   pass 2   over p, with the matrix e(P p / 16),
//            (twiddle factor e(P q / 256))
//   pass 3   over q, with the matrix e(Q q / 16).
// Points with the same A are a tile of 16 x 16. A warp has a tile in registers from pass 2 to its inverse: the sums of
// one product are in the layout of an operand of the next one. All matrices are divided by 4, so that each pass keeps
// the norm, and a row is scaled by a power of two such that its norm is at most 2^14 (2^15 for several residues). No
// number is larger than the norm, so that fp16 cannot overflow.
//
// Registers: with (g, t) = (lane / 4, lane % 4), a thread has of a matrix of 16 x 16 numbers, in pairs of adjacent
// columns, rows g and g + 8 at columns 2 t, then both rows at columns 2 t + 8. As operand A of mma it is used as it is;
// as operand B, transposed, registers 0 and 2 are its rows 0 to 7, registers 1 and 3 the others.

typedef unsigned Fragment[4];

struct Tile {  // complex numbers in fp16
  Fragment re, im;
};
struct Matrix {  // a constant Tile; `minus` is -im
  Fragment re, im, minus;
};
struct Sums {  // a Tile in fp32: columns 0 to 7, then 8 to 15; row g, then row g + 8
  float re[2][4], im[2][4];
};

// ------------------------------------------------------------------------- instructions

// D = A B + C; D has rows g and g + 8 at columns 2 t and 2 t + 1. A constant C needs no registers.
__device__ inline void mma_fp16(float (&d)[4], const Fragment& a, unsigned b0, unsigned b1, const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
// Four matrices of 8 x 8 numbers in 16 bits, transposed; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void load_transposed(Fragment& to, unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(row) : "memory");
}
__device__ inline void store_transposed(unsigned row, const Fragment& from) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%4], {%0, %1, %2, %3};"
               ::"r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]), "r"(row) : "memory");
}
__device__ inline void store_matrices(unsigned row, const Fragment& from) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%4], {%0, %1, %2, %3};"
               ::"r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]), "r"(row) : "memory");
}
__device__ inline uint4 load_shared(unsigned address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}
__device__ inline unsigned pack_half2(float x, float y) {  // x in the lower half
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  return pair;
}
__device__ inline unsigned mul_half2(unsigned a, unsigned b) {
  unsigned product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
__device__ inline unsigned fma_half2(unsigned a, unsigned b, unsigned c) {
  unsigned sum;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}
__device__ inline unsigned fma_minus_half2(unsigned a, unsigned b, unsigned c) {  // a b - c
  unsigned sum;
  asm("{\n\t.reg .b32 m;\n\tneg.f16x2 m, %3;\n\tfma.rn.f16x2 %0, %1, %2, m;\n\t}"
      : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}
__device__ inline unsigned max_pairs(unsigned a, unsigned b) {  // of unsigned integers of 16 bits
  unsigned most;
  asm("max.u16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}

// ------------------------------------------------------------------------- tiles

__device__ inline void as_registers(Fragment& to, uint4 v) { to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w; }
// Tables have 32 vectors, one for each lane, of real parts, then of imaginary parts.
__device__ inline void load_tile(Tile& to, const uint4* table, int lane) {
  as_registers(to.re, __ldg(table + lane));
  as_registers(to.im, __ldg(table + 32 + lane));
}
__device__ inline void load_matrix(Matrix& to, const uint4* table, int lane) {
  as_registers(to.re, __ldg(table + lane));
  as_registers(to.im, __ldg(table + 32 + lane));
#pragma unroll
  for (int i = 0; i < 4; ++i) to.minus[i] = to.im[i] ^ 0x80008000u;
}

__device__ inline void narrow(Tile& to, const Sums& from) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int half = i / 2, row = i % 2 * 2;
    to.re[i] = pack_half2(from.re[half][row], from.re[half][row + 1]);
    to.im[i] = pack_half2(from.im[half][row], from.im[half][row + 1]);
  }
}

// v <- v w, or v conj(w), for each number
template <bool CONJUGATE>
__device__ inline void multiply(Tile& v, const Tile& w) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unsigned re = mul_half2(v.im[i], w.im[i]), im = mul_half2(v.re[i], w.im[i]);
    re = CONJUGATE ? fma_half2(v.re[i], w.re[i], re) : fma_minus_half2(v.re[i], w.re[i], re);
    im = CONJUGATE ? fma_minus_half2(v.im[i], w.re[i], im) : fma_half2(v.im[i], w.re[i], im);
    v.re[i] = re, v.im[i] = im;
  }
}

// Row r of the result is the DFT, of index r, of the rows of v; its columns are the rows of v.
template <bool INVERSE>
__device__ inline void dft_to_rows(Sums& d, const Matrix& dft, const Tile& v) {
  const float zero[4] = {};
  const Fragment &im = INVERSE ? dft.minus : dft.im, &minus = INVERSE ? dft.im : dft.minus;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    mma_fp16(d.re[half], dft.re, v.re[half], v.re[half + 2], zero);
    mma_fp16(d.im[half], dft.re, v.im[half], v.im[half + 2], zero);
    mma_fp16(d.re[half], minus, v.im[half], v.im[half + 2], d.re[half]);
    mma_fp16(d.im[half], im, v.re[half], v.re[half + 2], d.im[half]);
  }
}
// The DFT of each row of v, in the same row. With AS_B `dft` has columns 0 to 7 of the matrix, then the others: operand
// B needs adjacent registers.
template <bool INVERSE, bool AS_B>
__device__ inline void dft_of_rows(Sums& d, const Tile& v, const Matrix& dft) {
  const float zero[4] = {};
  const Fragment &im = INVERSE ? dft.minus : dft.im, &minus = INVERSE ? dft.im : dft.minus;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int low = AS_B ? 2 * half : half, high = AS_B ? low + 1 : low + 2;
    mma_fp16(d.re[half], v.re, dft.re[low], dft.re[high], zero);
    mma_fp16(d.im[half], v.im, dft.re[low], dft.re[high], zero);
    mma_fp16(d.re[half], v.im, minus[low], minus[high], d.re[half]);
    mma_fp16(d.im[half], v.re, im[low], im[high], d.im[half]);
  }
}

// With TWO_MATRICES the DFT matrix is in registers as operands A and B; else it is moved for B.
template <bool TWO_MATRICES>
struct Passes {
  Matrix dft, dft_as_b;
  Tile twiddles;  // e(P q / 256), which is symmetric

  __device__ void load(const uint4* tables, int lane) {
    load_matrix(dft, tables, lane);
    if (TWO_MATRICES) load_matrix(dft_as_b, tables + 64, lane);
    load_tile(twiddles, tables + 128, lane);
  }
  // Passes 2 and 3 of a tile whose rows are q and whose columns are p; rows of the spectrum are P, columns Q.
  __device__ void to_spectrum(Sums& d, Tile& v, const Tile& residue_twiddles) const {
    multiply<false>(v, residue_twiddles);
    dft_to_rows<false>(d, dft, v);
    narrow(v, d);
    multiply<false>(v, twiddles);
    dft_of_rows<false, TWO_MATRICES>(d, v, TWO_MATRICES ? dft_as_b : dft);
  }
  // Their inverses.
  __device__ void from_spectrum(Tile& v, const Tile& residue_twiddles) const {
    Sums d;
    dft_to_rows<true>(d, dft, v);
    narrow(v, d);
    multiply<true>(v, twiddles);
    dft_of_rows<true, TWO_MATRICES>(d, v, TWO_MATRICES ? dft_as_b : dft);
    narrow(v, d);
    multiply<true>(v, residue_twiddles);
  }
};
