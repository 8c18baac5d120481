"""Kernels in Triton. Nothing here is needed to import dlrnn; one file a kernel family."""
