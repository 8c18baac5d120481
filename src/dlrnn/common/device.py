"""Triton launches on the current device, which need not be the one of the tensors."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def on_its_device(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Run where the first tensor of the first argument is; in the interpreter that is the CPU."""

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
