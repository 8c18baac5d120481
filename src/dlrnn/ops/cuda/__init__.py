"""Kernels in CUDA C++, compiled at first use by NVRTC, which PyTorch ships.

Nothing here is needed to import dlrnn, and no CUDA toolkit either. One file a kernel family; each
says with `supports` which tensors it takes.
"""
