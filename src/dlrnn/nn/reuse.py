"""Kernel reuse across micro-batches."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from dlrnn.nn.mixer import KernelMixer
from dlrnn.ops.checks import require


@contextmanager
def reuse_kernels(model: nn.Module) -> Iterator[None]:
    """Inside, every kernel of a `KernelMixer` is computed once for all forwards with gradients.

    Backward passes inside stop at the kernels; at the end their summed gradients go on, once, to
    the parameters. Parameters must not change inside, and every backward pass must run inside. Of
    `torch.utils.checkpoint`, only `use_reentrant=True` works inside: the other kind saves the same
    tensors twice.

        with reuse_kernels(model):
            for part in parts:
                loss(model(part)).backward()
    """
    mixers = [module for module in model.modules() if isinstance(module, KernelMixer)]
    free = all(mixer.reused is None for mixer in mixers)
    require(free, "reuse_kernels is entered twice: one around all micro-batches is enough")
    for mixer in mixers:
        mixer.reused = {}
    done = False
    try:
        yield
        done = True
    finally:
        kernels = [each for mixer in mixers for each in (mixer.reused or {}).values()]
        for mixer in mixers:
            mixer.reused = None
        for each in kernels:
            each.release(backward=done)
