"""Draw the head of the next dash of a Pathfinder path at random, in numba."""

from typing import no_type_check

import numpy as np

from dlrnn.tasks.numba_random import bits, borrowing
from dlrnn.tasks.pathfinder.blocked import freedom
from dlrnn.tasks.pathfinder.stamps import DEGREES, HEAD_X, HEAD_Y

_REFUSED = 4  # heads, after which the weights of all are computed
_LEAST = 1e-4  # sum of the weights of heads below which a path cannot go on


@borrowing
@no_type_check
def uniform(stream):
    """Return a number in [0, 1) with 53 random bits."""
    return np.float64(bits(stream) >> np.uint64(11)) * 2.0**-53


@borrowing
@no_type_check
def inside(size, y, x):
    """Return whether a pixel is in the image."""
    return min(y, x) >= 0 and max(y, x) < size


@borrowing
@no_type_check
def _pick(stream, sums, row):
    """Return a random index with the chances whose cumulative sums are a row."""
    low, high = 0, sums.shape[1] - 1
    at = uniform(stream) * sums[row, high]
    while low < high:
        middle = (low + high) // 2
        if sums[row, middle] > at:
            high = middle
        else:
            low = middle + 1
    return low


@borrowing
@no_type_check
def _weigh(stream, blocked, stamps, dashes, around, at):
    """Return a random head by the weights of all, chance times freedom; -1 if all are near 0.

    It goes through the heads twice, rather than store their weights.
    """
    (before, pivot_y, pivot_x), bound = at, 0.0
    tables, chances = stamps.tables, stamps.chances
    for turn in range(2):
        done = 0.0
        for k in range(chances.shape[1]):
            chance = chances[before, k] - (chances[before, k - 1] if k > 0 else 0.0)
            y, x = pivot_y + tables[DEGREES + k, HEAD_Y], pivot_x + tables[DEGREES + k, HEAD_X]
            if chance > 0.0 and inside(len(blocked), y, x):
                done += chance * freedom(blocked, stamps, dashes, around, y, x)
                if turn == 1 and done > bound:
                    return k
        if done < _LEAST:
            return -1
        bound = uniform(stream) * done
    return -1


@borrowing
@no_type_check
def draw_head(stream, blocked, stamps, dashes, around, at):
    """Return a random head of the dash after a stamp and a pivot, or -1 without room.

    Its weight is the product of chance and freedom. Heads are drawn by their chance, and accepted
    with the probability of their freedom; if many are refused, all weights are computed.
    """
    before, pivot_y, pivot_x = at
    tables = stamps.tables
    for _ in range(_REFUSED):
        k = _pick(stream, stamps.chances, before)
        y, x = pivot_y + tables[DEGREES + k, HEAD_Y], pivot_x + tables[DEGREES + k, HEAD_X]
        if not inside(len(blocked), y, x):
            continue
        free = freedom(blocked, stamps, dashes, around, y, x)
        if free == 1.0 or (free > 0.0 and uniform(stream) < free):
            return k
    return _weigh(stream, blocked, stamps, dashes, around, at)
