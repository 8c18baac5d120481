"""Run Triton kernels on the device of their tensors: it launches on the current device."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU, 1 for a CPU (Triton's interpreter)."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def on_its_device(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Run a function with the device of its first tensor as the current device.

    On the CPU, where Triton's interpreter runs, nothing changes.
    """

    @wraps(function)
    def wrapped(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        first: Any = arguments[0]
        while isinstance(first, tuple):
            first = first[0]
        if not first.is_cuda:
            return function(*arguments, **options)
        with torch.cuda.device(first.device):
            return function(*arguments, **options)

    return wrapped
