"""Kernels computed once for several micro-batches."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from dlrnn.nn.kernel_mixer import KernelMixer
from dlrnn.ops.checks import require


@contextmanager
def held_kernels(model: nn.Module) -> Iterator[None]:
    """Within, every kernel of a `KernelMixer` is computed once for all forwards with gradients.

    Backward passes within stop at the kernels; at the end their summed gradients go on, once, to
    the parameters. Parameters must not change within, and every backward pass must be there. Of
    `torch.utils.checkpoint`, `use_reentrant=True` works within: the other kind wants to save the
    same tensors twice.

        with held_kernels(model):
            for part in parts:
                loss(model(part)).backward()
    """
    mixers = [module for module in model.modules() if isinstance(module, KernelMixer)]
    free = all(mixer.held is None for mixer in mixers)
    require(free, "held_kernels is entered twice: one around all micro-batches is enough")
    for mixer in mixers:
        mixer.held = {}
    done = False
    try:
        yield
        done = True
    finally:
        held = [each for mixer in mixers for each in (mixer.held or {}).values()]
        for mixer in mixers:
            mixer.held = None
        for each in held:
            each.release(backward=done)
