"""Replay of launches: repeated calls of a function with the same sizes skip its Python code.

The second call with some sizes is recorded: which kernels it launches, with which numbers, and in
which tensor (an argument, a result or a temporary tensor) each address lies. Later calls allocate
the results and one tensor for all that is temporary, compute the addresses, and launch. This takes
about a fifth of the host time.

A function can be replayed if it only allocates, takes views, and launches kernels of
`nvrtc.load`, with numbers that depend on sizes, dtypes and the other arguments alone. Any other op
in it is detected, and the function then runs as it is, as it does for arguments that are not
contiguous or not aligned to 16 bytes. Launches of Triton kernels are not detected.
"""

import ctypes
from collections.abc import Callable, Sequence
from itertools import pairwise
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlrnn.ops.cuda import nvrtc

ATTEMPTS = 3
"""Calls with the same sizes until a function that could not be recorded runs as it is."""

MOST_PLANS = 1024
"""Sizes for which a function keeps its launches; with more, it starts again."""

MOST_BYTES = 2**30
"""Allocations of a call up to which it is replayed: a replay needs all of them at once."""

ALIGNMENT = 256

_EMPTY = tuple(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)


class Replayed:
    """A function of CUDA tensors and other hashable arguments, which returns one tensor or several.

    `settings` returns what else its launches depend on, or None to run the function as it is.
    """

    def __init__(self, function: Callable[..., Any], settings: Callable[[], Any]) -> None:
        self.function, self._settings = function, settings
        self._plans: dict[Any, _Plan | int] = {}

    def __call__(self, *arguments: Any) -> Any:
        """`function(*arguments)`."""
        key, is_part = self._key(arguments), nvrtc.recording.launches is not None
        if key is None or is_part:  # of a function that is recorded
            return self.function(*arguments)
        known = self._plans.get(key, 0)
        if isinstance(known, _Plan):
            return known(arguments)
        if known >= ATTEMPTS:
            return self.function(*arguments)
        if known == 0 and len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        self._plans[key] = known + 1  # also if this call fails
        if known == 0:  # the first call compiles kernels and makes tables that are kept
            return self.function(*arguments)
        result, plan = _record(self.function, arguments)
        if plan is not None:
            self._plans[key] = plan
        return result

    def _key(self, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """What decides the launches; None if an argument is not contiguous or not aligned."""
        if (settings := self._settings()) is None:
            return None
        key = [settings, arguments[0].get_device()]
        for x in arguments:
            if isinstance(x, Tensor):
                if not x.is_contiguous() or x.data_ptr() % 16:
                    return None
                key += (x.shape, x.dtype)
            else:
                key.append(x)
        return tuple(key)


class _Operations(TorchDispatchMode):
    """Notes the tensors that are allocated, and whether any other op than a view runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocated: list[Tensor] = []
        self.bytes, self.only_launches = 0, True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _EMPTY:
            self.allocated.append(result)
            self.bytes += result.numel() * result.element_size()
        if self.bytes > MOST_BYTES or not (func.overloadpacket in _EMPTY or func.is_view):
            self.only_launches = False
            self.allocated.clear()  # and let go of temporary tensors
            nvrtc.stop_recording()
        return result


def _record(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, "_Plan | None"]:
    with nvrtc.recorded() as launches, _Operations() as operations:
        result = function(*arguments)
    given = [x for x in arguments if isinstance(x, Tensor)]
    spans = sorted(_span(x) for x in given if x.numel())
    overlap = any(end > start for (_, end), (start, _) in pairwise(spans))
    results = (result,) if isinstance(result, Tensor) else result
    sources = [x for x in (*given, *operations.allocated) if x.is_contiguous()]
    known = all(y.numel() == 0 or any(_is_part(y, x) for x in sources) for y in results)
    if not operations.only_launches or overlap or not known:
        return result, None
    return result, _Plan(arguments, result, launches, operations.allocated)


def _span(x: Tensor) -> tuple[int, int]:
    """First and last address, plus one, of a tensor without gaps."""
    return x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()


class _Plan:
    """The launches of a call, for arguments of the same sizes at other addresses."""

    def __init__(
        self,
        arguments: tuple[Any, ...],
        result: Tensor | tuple[Tensor, ...],
        launches: Sequence[nvrtc.Launch],
        allocated: list[Tensor],
    ) -> None:
        self._lock = Lock()  # the buffers below serve one call at a time
        self._device, self._is_single = arguments[0].get_device(), isinstance(result, Tensor)
        self._tensors = [k for k, x in enumerate(arguments) if isinstance(x, Tensor)]
        results = (result,) if isinstance(result, Tensor) else result
        known = [arguments[k] for k in self._tensors]
        kept = [x for x in allocated if any(_is_part(y, x) for y in results)]
        temporary = [x for x in allocated if not any(x is y for y in kept)]
        self._allocate = [(tuple(x.shape), x.dtype, x.device) for x in kept]
        self._results = [self._view(y, known + kept) for y in results]

        # each address: an offset from an argument, from a result, or (the last) from the workspace
        bases: list[tuple[Tensor, int, int]] = [(x, k, 0) for k, x in enumerate(known + kept)]
        self._bytes = 0
        for x in temporary:
            bases.append((x, len(known) + len(kept), self._bytes))
            size = x.numel() * x.element_size()
            self._bytes += -(-size // ALIGNMENT) * ALIGNMENT
        values: list[int] = []
        places, origins, offsets = [], [], []
        self._constants: list[Tensor] = []  # tables, which must stay in memory
        for launch in launches:
            for argument in launch.arguments:
                if isinstance(argument, Tensor):
                    base = next((base for base in bases if _holds(base[0], argument)), None)
                    if base is None:
                        self._constants.append(argument)
                    else:
                        places.append(len(values))
                        origins.append(base[1])
                        offsets.append(argument.data_ptr() - base[0].data_ptr() + base[2])
                    values.append(argument.data_ptr())
                else:
                    values.append(argument)
        self._values = np.array(values, np.int64)
        self._places, self._origins, self._offsets = (
            np.array(x, np.int64) for x in (places, origins, offsets)
        )
        address, self._calls = self._values.ctypes.data, []
        for launch in launches:
            self._calls.append(launch.prepared(address))
            address += len(launch.arguments) * ctypes.sizeof(ctypes.c_int64)

    @staticmethod
    def _view(y: Tensor, sources: list[Tensor]) -> tuple[int, Any]:
        """The number of a result's source, and the arguments of `as_strided`, if it needs them.

        An empty result has the number -1, its shape and its dtype.
        """
        if y.numel() == 0:
            return -1, (tuple(y.shape), y.dtype)
        number = next(k for k, x in enumerate(sources) if _is_part(y, x))
        source = sources[number]
        if y.shape == source.shape and y.stride() == source.stride():
            return number, None
        offset = (y.data_ptr() - source.data_ptr()) // y.element_size()
        return number, (tuple(y.shape), y.stride(), offset)

    def __call__(self, arguments: tuple[Any, ...]) -> Any:
        """The results for these arguments."""
        empty = torch.empty
        sources = [arguments[k] for k in self._tensors]
        for shape, dtype, device in self._allocate:
            sources.append(empty(shape, dtype=dtype, device=device))
        addresses = [x.data_ptr() for x in sources]
        if self._bytes:
            workspace = empty(self._bytes, dtype=torch.uint8, device=sources[0].device)
            addresses.append(workspace.data_ptr())
        with self._lock:
            values = np.array(addresses, np.int64)[self._origins]
            values += self._offsets
            self._values[self._places] = values
            nvrtc.run(self._calls, self._device)
        results = tuple(
            sources[number] if view is None else self._viewed(number, sources, view)
            for number, view in self._results
        )
        return results[0] if self._is_single else results

    @staticmethod
    def _viewed(number: int, sources: list[Tensor], view: tuple[Any, ...]) -> Tensor:
        if number < 0:
            shape, dtype = view
            return sources[0].new_empty(shape, dtype=dtype)
        (shape, stride, offset), source = view, sources[number]
        return source.as_strided(shape, stride, source.storage_offset() + offset)


def _is_part(y: Tensor, x: Tensor) -> bool:
    """Whether y is a view of x."""
    return _holds(x, y) and x.dtype == y.dtype


def _holds(x: Tensor, y: Tensor) -> bool:
    """Whether y begins in the memory of x."""
    start, end = _span(x)
    return start <= y.data_ptr() < end
