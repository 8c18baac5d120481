"""What kernels need to know about the device of a tensor."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def on_its_device(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make the device of the first tensor of the first argument current: Triton launches there.

    On a CPU, where Triton's interpreter runs, nothing changes.
    """

    @wraps(function)
    def there(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        first: Any = arguments[0]
        while isinstance(first, tuple):
            first = first[0]
        if not first.is_cuda:
            return function(*arguments, **options)
        with torch.cuda.device(first.device):
            return function(*arguments, **options)

    return there


@cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU, 1 for a CPU (Triton's interpreter)."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
