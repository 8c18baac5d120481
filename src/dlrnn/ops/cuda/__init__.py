"""Kernels in CUDA C++, which NVRTC compiles at first use; PyTorch ships that library.

Importing dlrnn needs none of it, and no CUDA toolkit is needed. `supports` of each module says
which tensors its kernels take. docs/kernels.md describes the kernel families.
"""
