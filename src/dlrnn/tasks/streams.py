"""Counted randomness inside numba kernels: the same streams as `random.py`, one number at a time.

`no_type_check` keeps the tests' shape checks, which numba cannot compile, out of the kernels. A
kernel that is compiled stays cached until its own file changes: after an edit here, remove the
`__pycache__` of the folder.
"""

from collections.abc import Callable
from typing import Any, no_type_check

import numpy as np

from dlrnn.common.jit import numba


def compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once a machine, or once a process where no folder for the cache can be written.

    Without Python's lock: several threads draw at once. Of one signature: numba numbers the files
    of several as they come, and two processes that compile at once may give one number to two.
    """
    try:
        function: Callable[..., Any] = numba.njit(cache=True, nogil=True)(kernel)
    except RuntimeError:
        function = part(kernel)
    return function


def part(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A part of kernels, of any signature: kept with them, not by itself."""
    function: Callable[..., Any] = numba.njit(nogil=True)(kernel)
    return function


GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_KEY, _DRAWN, _LANES, _LEFT = 0, 1, 2, 3  # a stream: its key, numbers drawn, 16-bit lanes, how many
ZERO, ONE, _U16 = np.uint64(0), np.uint64(1), np.uint64(16)


@part
@no_type_check
def mix(x):
    """SplitMix64's finaliser, as in `random.py`."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@part
@no_type_check
def start(stream, seed, split, index, attempt):
    """The stream of `Random(seed, split, step=attempt, first=index, count=1)`."""
    key = mix(mix(mix(seed) ^ split) ^ np.uint64(attempt))
    stream[_KEY] = mix(key + index * GOLDEN)
    stream[_DRAWN] = stream[_LANES] = stream[_LEFT] = ZERO


@part
@no_type_check
def bits(stream):
    """The next 64 bits of a stream."""
    stream[_DRAWN] += ONE
    return mix(stream[_KEY] + stream[_DRAWN] * GOLDEN)


@part
@no_type_check
def below(stream, count):
    """Uniform in 0 .. count-1, exactly: 16 bits, drawn again where they would favour some."""
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
