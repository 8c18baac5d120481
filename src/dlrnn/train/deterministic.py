"""The same bits twice, from PyTorch's own kernels too."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic as _memory

memory: Any = _memory  # whose one attribute has no type


@contextmanager
def deterministic(*, wanted: bool) -> Iterator[None]:
    """PyTorch's deterministic mode, but for its filling of new memory, which takes time.

    The strict one: where PyTorch only warns, attention's gradients are added as before.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if not wanted or (enabled and not warns):
        yield
        return
    os.environ.setdefault(_CUBLAS, ":4096:8")  # else cuBLAS is refused
    fills = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    except RuntimeError as error:
        if _CUBLAS in str(error):  # PyTorch looks for it when cuBLAS is first used
            advice = f"set {_CUBLAS}=:4096:8 before its process starts, or train in a new one"
            raise ValueError(
                f"this process used cuBLAS before a deterministic run: {advice}"
            ) from error
        if _REFUSED not in str(error):
            raise
        operation = str(error).partition(_REFUSED)[0]
        raise ValueError(f"{operation}{_REFUSED}: train without --deterministic") from error
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        memory.fill_uninitialized_memory = fills


_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_REFUSED = " does not have a deterministic implementation"
