"""Kernels in Triton, one file for each kernel family. Importing dlrnn does not need them."""
