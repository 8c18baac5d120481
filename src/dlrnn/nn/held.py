"""Kernels computed once for several micro-batches."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from dlrnn.nn.kernel_mixer import KernelMixer


@contextmanager
def held_kernels(model: nn.Module) -> Iterator[None]:
    """Within, every kernel of a `KernelMixer` is computed once, whatever the number of forwards.

    Backward passes within stop at the kernels; at the end their summed gradients go on, once, to
    the parameters. Parameters must not change within.

        with held_kernels(model):
            for part in parts:
                loss(model(part)).backward()
    """
    mixers = [module for module in model.modules() if isinstance(module, KernelMixer)]
    for mixer in mixers:
        mixer.held = {}
    try:
        yield
        for mixer in mixers:
            for kernel, leaf in (mixer.held or {}).values():
                if leaf.grad is not None:
                    kernel.backward(leaf.grad)
    finally:
        for mixer in mixers:
            mixer.held = None
