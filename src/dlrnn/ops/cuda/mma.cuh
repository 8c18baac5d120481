// Tensor-core instructions of every GPU since compute capability 8.0, by single warps.
//
// Registers: with (g, t) = (lane / 4, lane % 4), a thread has of A [16, 16], in pairs of adjacent columns,
// rows g and g + 8 at columns 2 t, then both rows at columns 2 t + 8; of B [16, 8] rows 2 t and 2 t + 1, then
// 2 t + 8 and 2 t + 9, of column g; of D [16, 8] row g at columns 2 t and 2 t + 1, then row g + 8.

// D = A B + D with fp16 operands (bf16, if that is the storage type) and fp32 sums.
__device__ inline void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#if STORAGE_BITS == 16 && STORAGE_IS_BF16
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four matrices of 8 x 8 numbers of 16 bits from shared memory: lane i has the address of row i % 8 of matrix i / 8.
// A thread gets of each matrix row g at columns 2 t and 2 t + 1; TRANSPOSED, column g at rows 2 t and 2 t + 1.
template <bool TRANSPOSED>
__device__ inline void load_matrices(unsigned (&r)[4], const void* row) {
  if constexpr (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
