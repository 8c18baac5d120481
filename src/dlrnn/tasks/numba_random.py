"""The random numbers of `random.py` inside numba kernels, one number at a time.

`no_type_check` keeps the tests' shape checks, which numba cannot compile, out of the kernels. A
compiled kernel stays in numba's cache until its own file changes: after an edit here, remove the
`__pycache__` folders below `tasks/`.
"""

from collections.abc import Callable
from typing import Any, no_type_check

import numpy as np

from dlrnn.common.jit import numba


def compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel that Python calls, and cache it on disk if the cache can be written.

    It releases Python's lock, so that several threads draw at once. It must be called with one
    signature only: numba numbers the cache files of several signatures in the order in which they
    are compiled, and two processes could give one number to two of them.
    """
    try:
        function: Callable[..., Any] = numba.njit(cache=True, nogil=True)(kernel)
    except RuntimeError:
        function = inlined(kernel)
    return function


def inlined(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that kernels call, with any signature; it is cached with its callers."""
    function: Callable[..., Any] = numba.njit(nogil=True)(kernel)
    return function


def borrowing(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function like `inlined` does, which neither makes nor returns arrays.

    Numba then counts no references to its arguments, and the function is part of its callers' code:
    with a dozen arrays, counting them or passing them takes longer than a short function itself.
    """
    options: dict[str, Any] = {"nogil": True, "forceinline": True, "_nrt": False}
    function: Callable[..., Any] = numba.njit(**options)(kernel)
    return function


GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_KEY, _DRAWN = 0, 1  # entries of a stream: its key, the numbers drawn so far,
_LANES, _LEFT = 2, 3  # random 16-bit lanes that are not used yet, and their number
ZERO, ONE, _U16 = np.uint64(0), np.uint64(1), np.uint64(16)


@inlined
@no_type_check
def mix(x):
    """SplitMix64's finaliser, as in `random.py`."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@inlined
@no_type_check
def start(stream, seed, split, index, attempt):
    """Start the stream of `Random(seed, split, step=attempt, first=index, count=1)`."""
    key = mix(mix(mix(seed) ^ split) ^ np.uint64(attempt))
    stream[_KEY] = mix(key + index * GOLDEN)
    stream[_DRAWN] = stream[_LANES] = stream[_LEFT] = ZERO


@inlined
@no_type_check
def bits(stream):
    """Return the next 64 bits of a stream."""
    stream[_DRAWN] += ONE
    return mix(stream[_KEY] + stream[_DRAWN] * GOLDEN)


@inlined
@no_type_check
def below(stream, count):
    """Return an exactly uniform integer in 0 .. count-1, from 16 bits by rejection."""
    count = np.uint64(count)
    fair = np.uint64(65536) - np.uint64(65536) % count
    while True:
        if stream[_LEFT] == ZERO:
            stream[_LANES], stream[_LEFT] = bits(stream), np.uint64(4)
        lane = stream[_LANES] & np.uint64(0xFFFF)
        stream[_LANES] >>= _U16
        stream[_LEFT] -= ONE
        if lane < fair:
            return np.int64(lane % count)
