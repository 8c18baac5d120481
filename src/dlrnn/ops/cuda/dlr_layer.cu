// The parameters of a DLR layer before and after the kernels of the Vandermonde product.

// lambda = exp(-re^2 + i im): log lambda [N] in fp64
extern "C" __global__ void log_lambda(const float* re, const float* im, double2* result, int N) {
  int n = blockIdx.x * blockDim.x + threadIdx.x;
  if (n < N) result[n] = make_double2(-(double)re[n] * re[n], im[n]);
}

// The gradients of re, im [N] and of D [H], which is added to entry 0 of the first H rows of the kernel [rows, K].
extern "C" __global__ void parameter_gradients(const double2* d_log_lambda, const float* re, const float* d_kernel,
                                               float* d_re, float* d_im, float* d_D, int N, int H, int K) {
  int n = blockIdx.x * blockDim.x + threadIdx.x;
  if (n < N) {
    double2 d = d_log_lambda[n];
    d_re[n] = (float)(-2.0 * re[n] * d.x), d_im[n] = (float)d.y;
  }
  if (n < H) d_D[n] = d_kernel[(long long)n * K];
}
