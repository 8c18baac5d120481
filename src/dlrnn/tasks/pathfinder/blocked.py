"""The pixels that dashes block while paths grow, in numba.

`blocked` has the neighbourhoods of dashes, from 0 to 255, and the border. Dashes of main paths wait
in a queue until another one comes near: most attempts at an image fail early, and their dashes
are never drawn.
"""

from typing import no_type_check

import numpy as np

from dlrnn.tasks.numba_random import borrowing
from dlrnn.tasks.pathfinder.stamps import CORE, LEFT, TOP

Y, X, STAMP, PATH = 0, 1, 2, 3  # columns of `dashes`: anchor, stamp, path,
BOX = 4  # top, bottom, left and right of the neighbourhood,
QUEUE = 8  # and in row k, the k-th dash that blocks others
LAST_DASH, LAST_PIVOT = (
    0,
    1,
)  # columns of `state`, for both main paths and a distractor: dash, y and x
COUNTS, USED, QUEUED, RASTERISED = 3, 0, 1, 2  # its last row: numbers of dashes


@borrowing
@no_type_check
def block_border(blocked, padding):
    """Block the border only."""
    size = len(blocked)
    for k in range(padding):
        blocked[k], blocked[size - 1 - k] = 255, 255
        blocked[:, k], blocked[:, size - 1 - k] = 255, 255


@borrowing
@no_type_check
def window(blocked, dashes, k):
    """Return the pixels of a dash's box, and where they begin in it."""
    top, bottom, left, right = dashes[k, BOX : BOX + 4]
    first, begin, size = max(0, top), max(0, left), len(blocked)
    return blocked[first : min(size, bottom), begin : min(size, right)], first - top, begin - left


@borrowing
@no_type_check
def clear(blocked, dashes, state):
    """Remove all dashes that were rasterised."""
    for k in range(state[COUNTS, RASTERISED]):
        pixels, _, _ = window(blocked, dashes, dashes[k, QUEUE])
        for y in range(pixels.shape[0]):
            pixels[y] = 0


@borrowing
@no_type_check
def block(blocked, room, tables, dashes, k):
    """Add the neighbourhood of a dash to `blocked`."""
    pixels, top, left = window(blocked, dashes, k)
    stamp, half = dashes[k, STAMP], room.shape[1] // 2
    top, left = top + half + tables[stamp, TOP], left + half + tables[stamp, LEFT]
    wide = pixels.shape[1]
    for y in range(pixels.shape[0]):
        row, new = pixels[y], room[stamp, top + y, left : left + wide]
        for x in range(wide):
            row[x] = max(row[x], new[x])


@borrowing
@no_type_check
def copy(blocked, dashes, k, saved, back):
    """Copy `blocked` below a dash to `saved`, or back."""
    pixels, _, _ = window(blocked, dashes, k)
    high, wide = pixels.shape
    for y in range(high):
        for x in range(wide):
            if back:
                pixels[y, x] = saved[y, x]
            else:
                saved[y, x] = pixels[y, x]


@borrowing
@no_type_check
def rasterise(blocked, room, tables, dashes, state):
    """Add all queued dashes to `blocked`."""
    for k in range(state[COUNTS, RASTERISED], state[COUNTS, QUEUED]):
        block(blocked, room, tables, dashes, dashes[k, QUEUE])
    state[COUNTS, RASTERISED] = state[COUNTS, QUEUED]


@borrowing
@no_type_check
def is_near(blocked, room, tables, dashes, state, padding, top, bottom, left, right):
    """Return whether a box touches the border or those of queued dashes, which are rasterised."""
    for k in range(state[COUNTS, QUEUED]):
        other = dashes[k, QUEUE]
        if bottom <= dashes[other, BOX] or top >= dashes[other, BOX + 1]:
            continue
        if right > dashes[other, BOX + 2] and left < dashes[other, BOX + 3]:
            rasterise(blocked, room, tables, dashes, state)
            return True
    return min(top, left) < padding or max(bottom, right) > len(blocked) - padding


@borrowing
@no_type_check
def freedom(blocked, nearby, y, x):
    """Return how free a head at (y, x) is: 0 if a blocked pixel is within `margin`, else to 1."""
    reach, most = len(nearby) // 2, np.uint8(0)
    for i in range(max(0, y - reach), min(len(blocked), y + reach + 1)):
        side = nearby[i - y + reach]
        for j in range(max(0, x - side), min(len(blocked), x + side + 1)):
            most = max(most, blocked[i, j])
        if most == 255:
            return 0.0
    return (255.0 - most) / 255.0


@borrowing
@no_type_check
def overlaps(blocked, room, core, y, x, stamp):
    """Return whether the neighbourhood of a dash overlaps a blocked one."""
    size = room.shape[1]
    top, left = y - size // 2, x - size // 2
    for i in range(max(0, -top), min(size, len(blocked) - top)):
        begin, end = max(core[stamp, i, 0], -left), min(core[stamp, i, 1], len(blocked) - left)
        for j in range(begin, end):
            if np.int64(blocked[top + i, left + j]) + room[stamp, i, j] >= CORE + 255:
                return True
    return False
