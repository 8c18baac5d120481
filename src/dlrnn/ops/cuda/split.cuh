// A row that is twice as long as a block's transform, N < L <= 2 N, by halves.
//
// A real signal of 4 N entries modulo X^4N + 1, x = (x_0, x_1, x_2, x_3) in parts of N, is a pair of
// complex ones, modulo X^N = w_8^P for P = 1 and P = 3, with products of their own:
//   there  z_P = sum_k w_8^(P k) x_k,      and back  x_k = Re sum_P conj(w_8^(P k)) z_P / 2.
// With w_8N^(P j) z_j in place of z_j each is a transform of N points. As in convolution.cu
//   u (L <= 2 N entries)  has x_0 and x_1,
//   kernels               have right in x_0, x_1, and left backwards, with a minus, in x_3, x_2,
//   y                     is x_0 and x_1 of the product: both halves have a share in all of it.
// Spectra are [H, 2, 16, N / 16]: those of convolution.cu for each half.

extern __shared__ __align__(16) float2 shared[];

// exp(-2 pi i k / 128), known at compile time wherever this is used
__device__ inline float2 root128(int k) {
  constexpr float cosine[33] = {1.f, .99879545620517239271f, .99518472667219688624f,
      .98917650996478097345f, .98078528040323044912f, .97003125319454399260f,
      .95694033573220886494f, .94154406518302077841f, .92387953251128675613f,
      .90398929312344333159f, .88192126434835502971f, .85772861000027206990f,
      .83146961230254523708f, .80320753148064490981f, .77301045336273696082f,
      .74095112535495909118f, .70710678118654752440f, .67155895484701840063f,
      .63439328416364549822f, .59569930449243334347f, .55557023301960222474f,
      .51410274419322172659f, .47139673682599764856f, .42755509343028209432f,
      .38268343236508977173f, .33688985339222005069f, .29028467725446236764f,
      .24298017990326388995f, .19509032201612826785f, .14673047445536175166f,
      .09801714032956060199f, .04906767432741801425f, 0.f};
  k %= 128;
  if (k <= 32) return {cosine[k], -cosine[32 - k]};
  if (k <= 64) return {-cosine[64 - k], -cosine[k - 32]};
  if (k <= 96) return {-cosine[k - 64], cosine[96 - k]};
  return {cosine[128 - k], cosine[k - 96]};
}

// What a thread's point r of part k is turned by, beside w_8N^(P j0).
template <int P>
__device__ inline float2 turn_of(int r, int k) {
  return root128(P * (r + 16 * k));
}
__device__ inline float2 add_scaled(float2 sum, float x, float2 turn) {
  return {sum.x + x * turn.x, sum.y + x * turn.y};
}
__device__ inline float unfolded(float2 z, float2 turn) { return z.x * turn.x + z.y * turn.y; }

// `twist` holds w_8N^j0 for P = 1 and then w_8N^(3 j0) for P = 3.
__device__ inline Turns turns_at(const Tables& tables, int half, int j0) {
  return {__ldg(tables.powers + j0), __ldg(tables.twist + half * FIRST + j0)};
}

// One half's points for pass 1, from a row.
template <int P>
__device__ inline void fold(float2 (&v)[16], const float* row, int j0, int L) {
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    int j = j0 + r * FIRST;
    v[r] = add_scaled({0.f, 0.f}, row[j], turn_of<P>(r, 0));
    v[r] = add_scaled(v[r], j + N < L ? row[j + N] : 0.f, turn_of<P>(r, 1));
  }
}

// A half's share of 16 entries of part k, N / 16 apart.
template <int P>
__device__ inline void unfold(float (&share)[16], const float2 (&v)[16], int k) {
#pragma unroll
  for (int r = 0; r < 16; ++r) share[r] = unfolded(v[slot<16>(r)], turn_of<P>(r, k));
}

// Rows that come in while others compute.
struct Inbox {
  Barrier* came;
  int parity;

  __device__ Inbox(Barrier* place) : came(place), parity(0) {
    if (threadIdx.x == 0) barrier_start(came);
  }
  __device__ void fetch(void* to, const void* from, int bytes) {
    if (threadIdx.x) return;
    barrier_expect(came, bytes);
    copy_to_shared(to, from, bytes, came);
  }
  __device__ void wait() {
    barrier_wait(came, parity);
    parity ^= 1;
  }
};
