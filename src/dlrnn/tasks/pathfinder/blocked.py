"""The neighbourhoods that dashes block while paths grow, in numba.

While main paths grow, their dashes wait in a queue, and a new dash is compared with those near it:
most attempts at an image fail early, and nothing of them is drawn. `blocked`, the pixels, then has
only the border. Once both main paths have room, it gets the neighbourhoods of their dashes, from 0
to 255, and distractors are compared with its pixels.
"""

from typing import no_type_check

import numpy as np

from dlrnn.tasks.numba_random import borrowing
from dlrnn.tasks.pathfinder.stamps import CORE, LEFT, TOP

Y, X, STAMP, PATH = 0, 1, 2, 3  # columns of `dashes`: anchor, stamp, path,
BOX = 4  # top, bottom, left and right of the neighbourhood,
QUEUE = 8  # and in row k, the k-th dash that blocks others,
NEAR = 9  # and the k-th of those near the next dash
COLUMNS = 10
LAST_DASH, LAST_PIVOT = 0, 1  # columns of `state`: dash, y and x
COUNTS, USED, QUEUED = 3, 0, 1  # its last row: numbers of dashes


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
def find_near(dashes, state, top, bottom, left, right):
    """Store the queued dashes whose boxes overlap a box in the column NEAR; return their number."""
    count = 0
    for k in range(state[COUNTS, QUEUED]):
        other = dashes[k, QUEUE]
        rows = bottom > dashes[other, BOX] and top < dashes[other, BOX + 1]
        if rows and right > dashes[other, BOX + 2] and left < dashes[other, BOX + 3]:
            dashes[count, NEAR] = other
            count += 1
    return count


@borrowing
@no_type_check
def _most_of_dash(room, nearby, dashes, k, size, y, x):
    """Return how much a dash blocks the pixels within `margin` of (y, x), at most."""
    reach, half, most = len(nearby) // 2, room.shape[1] // 2, np.uint8(0)
    top, bottom, left, right = dashes[k, BOX : BOX + 4]
    first, begin, stamp = dashes[k, Y] - half, dashes[k, X] - half, dashes[k, STAMP]
    for i in range(max(0, y - reach, top), min(size, y + reach + 1, bottom)):
        side = nearby[i - y + reach]
        for j in range(max(0, x - side, left), min(size, x + side + 1, right)):
            most = max(most, room[stamp, i - first, j - begin])
        if most == 255:
            break
    return most


@borrowing
@no_type_check
def _most_of_pixels(blocked, nearby, y, x):
    """Return how blocked the pixels within `margin` of (y, x) are, at most."""
    reach, most = len(nearby) // 2, np.uint8(0)
    for i in range(max(0, y - reach), min(len(blocked), y + reach + 1)):
        side = nearby[i - y + reach]
        for j in range(max(0, x - side), min(len(blocked), x + side + 1)):
            most = max(most, blocked[i, j])
        if most == 255:
            break
    return most


@borrowing
@no_type_check
def freedom(blocked, stamps, dashes, around, y, x):
    """Return how free a head at (y, x) is: 0 if a blocked pixel is within `margin`, else to 1.

    `around` is the number of queued dashes near it, and whether `blocked` has any pixels there.
    """
    (near, drawn), room, nearby = around, stamps.room, stamps.nearby
    most = _most_of_pixels(blocked, nearby, y, x) if drawn else np.uint8(0)
    for k in range(near):
        if most == 255:
            break
        other = dashes[k, NEAR]
        most = max(most, _most_of_dash(room, nearby, dashes, other, len(blocked), y, x))
    return (255.0 - most) / 255.0


@borrowing
@no_type_check
def _overlaps_dash(room, core, dashes, k, size, y, x, stamp):
    """Return whether the neighbourhoods of two dashes overlap inside the image."""
    wide, other = room.shape[1], dashes[k, STAMP]
    top, left = y - wide // 2, x - wide // 2
    down, along = y - dashes[k, Y], x - dashes[k, X]
    for i in range(max(0, -top, -down), min(wide, size - top, wide - down)):
        begin = max(core[stamp, i, 0], core[other, i + down, 0] - along, -left)
        end = min(core[stamp, i, 1], core[other, i + down, 1] - along, size - left)
        for j in range(begin, end):
            if np.int64(room[stamp, i, j]) + room[other, i + down, j + along] >= CORE + 255:
                return True
    return False


@borrowing
@no_type_check
def _overlaps_pixels(blocked, room, core, y, x, stamp):
    """Return whether the neighbourhood of a dash overlaps blocked pixels."""
    size = room.shape[1]
    top, left = y - size // 2, x - size // 2
    for i in range(max(0, -top), min(size, len(blocked) - top)):
        begin, end = max(core[stamp, i, 0], -left), min(core[stamp, i, 1], len(blocked) - left)
        for j in range(begin, end):
            if np.int64(blocked[top + i, left + j]) + room[stamp, i, j] >= CORE + 255:
                return True
    return False


@borrowing
@no_type_check
def overlaps(blocked, stamps, dashes, around, y, x, stamp):
    """Return whether the neighbourhood of a dash overlaps a blocked one; `around` as above."""
    (near, drawn), room, core = around, stamps.room, stamps.core
    if drawn and _overlaps_pixels(blocked, room, core, y, x, stamp):
        return True
    for k in range(near):
        if _overlaps_dash(room, core, dashes, dashes[k, NEAR], len(blocked), y, x, stamp):
            return True
    return False
