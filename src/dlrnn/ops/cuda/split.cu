// Convolution of rows by halves (split.cuh), a team for each half.

static_assert(CHANNELS == 1 && GROUPS == 1 && TEAMS == 2, "a row is a block of two teams");

// y = the convolution of u with the kernels of `spectrum`; rows [B, H, stride], y may be u.
// Each team finishes one part of the row, with what the other one gives it.
extern "C" __global__ void __launch_bounds__(TEAMS* THREADS)
    convolve_halves(const float* u, float* y, const float2* spectrum, const float4* powers,
                    const float2* twist, int B, int L, int stride, int H, int groups) {
  float2 *work = shared + team() * WORK, *others = shared + (1 - team()) * WORK;
  float* box = reinterpret_cast<float*>(shared + 2 * WORK);
  float4* middle = reinterpret_cast<float4*>(box + 2 * N);
  Inbox inbox(reinterpret_cast<Barrier*>(middle + MIDDLE));
  __syncthreads();
  int j0 = member(), h = blockIdx.x % H, group = blockIdx.x / H;
  auto start = [&](int b) { return ((long long)b * H + h) * stride; };
  inbox.fetch(box, u + start(group), stride * 4);
  Tables once = tables_at(middle, powers, twist);
  const float2* kernel = spectrum + ((long long)h * 2 + team()) * N + j0;
  for (int b = group; b < B; b += groups) {
    Tables tables = once.again(b);
    float2 v[16], product[16];
    inbox.wait();
    if (team() == 0) fold<1>(v, box, j0, L);
    else fold<3>(v, box, j0, L);
    __syncthreads();
    if (b + groups < B) inbox.fetch(box, u + start(b + groups), stride * 4);
    first_pass(work, v, turns_at(tables, team(), j0), j0, 0);
    team_barrier();
    middle_passes<false>({work}, tables);
    last_pass(work, v, j0, 0);
#pragma unroll
    for (int q = 0; q < 16; ++q) product[q] = mul(v[slot<16>(q)], streamed(kernel + q * FIRST));
    last_pass_back(work, product, j0, 0);
    team_barrier();
    tables = once.again(b + 1);
    middle_passes<true>({work}, tables);
    first_pass_back(work, v, turns_at(tables, team(), j0), j0, 0);
    float mine[16], other[16];
    if (team() == 0) unfold<1>(mine, v, 0), unfold<1>(other, v, 1);
    else unfold<3>(mine, v, 1), unfold<3>(other, v, 0);
    int at = place(j0, 0);  // where only this thread has read
#pragma unroll
    for (int r = 0; r < 8; ++r) work[at + r * apart(FIRST)] = {other[2 * r], other[2 * r + 1]};
    __syncthreads();
    int j = team() * N + j0;
    float* to = y + start(b) + j;
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      float2 two = others[at + r / 2 * apart(FIRST)];
      if (j + r * FIRST < L) to[r * FIRST] = mine[r] + (r % 2 ? two.y : two.x);
    }
  }
}
