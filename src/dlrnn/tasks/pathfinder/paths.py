"""Place the dashes and discs of a Pathfinder image, in numba; coordinates are pixels, y is down.

The algorithm is that of the authors' program, with what it leaves unchecked. A path grows from
pivot to pivot; pivots, tails of first dashes and heads of further ones are whole pixels:

    pivot  --margin-->  tail  --length-->  head  --margin-->  next pivot, where the path may turn

A new dash has room if its neighbourhood overlaps neither those of other dashes (see stamps.py) nor
the border. A dash blocks others only when its path has its next one, so that it never blocks that
one; the last dash of the first main path never does. The first dashes of both main paths, and
discs, are placed without looking at what is there, and discs block nothing.
"""

import math
from typing import NamedTuple, no_type_check

import numpy as np

from dlrnn.tasks.numba_random import below, borrowing, compiled, inlined, start
from dlrnn.tasks.pathfinder.blocked import (
    BOX,
    COLUMNS,
    COUNTS,
    LAST_DASH,
    LAST_PIVOT,
    PATH,
    QUEUE,
    QUEUED,
    STAMP,
    USED,
    X,
    Y,
    block,
    block_border,
    copy,
    find_near,
    overlaps,
)
from dlrnn.tasks.pathfinder.heads import draw_head, inside, uniform
from dlrnn.tasks.pathfinder.stamps import (
    AHEAD,
    BOTTOM,
    DEGREES,
    FIRST_X,
    FIRST_Y,
    HEAD,
    HEAD_X,
    HEAD_Y,
    LAST_X,
    LAST_Y,
    LEFT,
    PIVOT,
    RIGHT,
    TAPS,
    TOP,
)

_TRIALS = 3  # for each dash
_PLACES = 5  # for each distractor
_POSITIONS = 256  # tried at random for a first dash, before all free ones are counted
_FREE = 76  # of 255: a pixel is free for a first dash up to this
_NO_ATTEMPT = 2**32  # the random stream that all attempts at an image share


class Rules(NamedTuple):
    """The settings of `PathfinderGenerator` that determine where shapes lie."""

    resolution: int
    padding: int
    seed_distance: float
    contour_length: int
    distractors: int
    distractor_length: int


# ---------------------------------------------------------------------------------- a path


@borrowing
@no_type_check
def _add(dashes, state, tables, path, y, x, stamp, pivot_y, pivot_x):
    """Place a dash, and store the pivot before it."""
    k, slot = state[COUNTS, USED], min(path, 2)
    dashes[k, Y], dashes[k, X], dashes[k, STAMP], dashes[k, PATH] = y, x, stamp, path
    dashes[k, BOX], dashes[k, BOX + 1] = y + tables[stamp, TOP], y + tables[stamp, BOTTOM]
    dashes[k, BOX + 2], dashes[k, BOX + 3] = x + tables[stamp, LEFT], x + tables[stamp, RIGHT]
    state[slot, LAST_DASH], state[slot, LAST_PIVOT], state[slot, LAST_PIVOT + 1] = (
        k,
        pivot_y,
        pivot_x,
    )
    state[COUNTS, USED] = k + 1


@borrowing
@no_type_check
def _moved(moves, stamp, move, y, x):
    """Return the pixel after a move from (y, x): coordinates are rounded up."""
    return math.ceil(y + moves[stamp, move]), math.ceil(x + moves[stamp, move + 1])


@borrowing
@no_type_check
def _first(dashes, state, tables, moves, size, path, y, x, stamp):
    """Place the first dash of a path, tail at (y, x), unless its head or pivot is outside."""
    head_y, head_x = _moved(moves, stamp, HEAD, y, x)
    pivot_y, pivot_x = _moved(moves, stamp, PIVOT, head_y, head_x)
    if inside(size, head_y, head_x) and inside(size, pivot_y, pivot_x):
        _add(dashes, state, tables, path, y, x, stamp, pivot_y, pivot_x)
        return True
    return False


@borrowing
@no_type_check
def _around(blocked, ahead, dashes, state, path, padding, at):
    """Return the number of queued dashes near the next dash, and whether to look at pixels."""
    if path >= 2:
        return 0, True
    before, y, x = at
    top, bottom, left, right = ahead[before]
    top, bottom, left, right = y + top, y + bottom, x + left, x + right
    border = min(top, left) < padding or max(bottom, right) > len(blocked) - padding
    return find_near(dashes, state, top, bottom, left, right), border


@borrowing
@no_type_check
def _further(stream, blocked, stamps, dashes, state, path, padding):
    """Place the next dash of a path; return False without room."""
    tables, slot = stamps.tables, min(path, 2)
    before = dashes[state[slot, LAST_DASH], STAMP]
    last_y, last_x = state[slot, LAST_PIVOT], state[slot, LAST_PIVOT + 1]
    pivot_y, pivot_x = _moved(stamps.moves, before, AHEAD, last_y, last_x)
    at = before, pivot_y, pivot_x
    around = _around(blocked, stamps.ahead, dashes, state, path, padding, at)
    for _ in range(_TRIALS):
        k = draw_head(stream, blocked, stamps, dashes, around, at)
        if k < 0:
            return False
        stamp = DEGREES + k
        y, x = pivot_y + tables[stamp, HEAD_Y], pivot_x + tables[stamp, HEAD_X]
        if not overlaps(blocked, stamps, dashes, around, y, x, stamp):
            _add(dashes, state, tables, path, y, x, stamp, pivot_y, pivot_x)
            return True
    return False


# ---------------------------------------------------------------------------------- main paths


@borrowing
@no_type_check
def _main_starts(stream, stamps, dashes, state, rules):
    """Place the first dashes of both main paths; return False if one fails.

    The first one is in the middle of the image, `2 * seed_distance` from the border or more, the
    second one `seed_distance` from its tail.
    """
    tables, moves, firsts = stamps.tables, stamps.moves, stamps.firsts
    seed, size = rules.seed_distance, rules.resolution
    band, y, x = round(2.0 * seed), 0, 0
    for _ in range(_TRIALS):
        stamp = below(stream, DEGREES)
        low_y, low_x = band - firsts[stamp, FIRST_Y], band - firsts[stamp, FIRST_X]
        high_y, high_x = size - band - firsts[stamp, LAST_Y], size - band - firsts[stamp, LAST_X]
        if firsts[stamp, TAPS] == 0 or low_y >= high_y or low_x >= high_x:
            return False
        y, x = low_y + below(stream, high_y - low_y), low_x + below(stream, high_x - low_x)
        if _first(dashes, state, tables, moves, size, 0, y, x, stamp):
            break
    else:
        return False
    for _ in range(_TRIALS):
        stamp, angle = below(stream, DEGREES), below(stream, 360) * math.pi / 180.0
        there_y, there_x = round(y + seed * math.sin(angle)), round(x + seed * math.cos(angle))
        if _first(dashes, state, tables, moves, size, 1, there_y, there_x, stamp):
            return True
    return False


@borrowing
@no_type_check
def _queue(dashes, state, k):
    """Let a dash of a main path block others."""
    dashes[state[COUNTS, QUEUED], QUEUE] = k
    state[COUNTS, QUEUED] += 1


@borrowing
@no_type_check
def _main_paths(stream, blocked, stamps, dashes, state, rules):
    """Place both main paths, one dash each in turn; return False as soon as one has no room."""
    if not _main_starts(stream, stamps, dashes, state, rules):
        return False
    for _ in range(1, rules.contour_length):
        for path in range(2):
            last = state[path, LAST_DASH]
            if not _further(stream, blocked, stamps, dashes, state, path, rules.padding):
                return False
            _queue(dashes, state, last)
    _queue(dashes, state, state[1, LAST_DASH])
    for k in range(state[COUNTS, QUEUED]):
        block(blocked, stamps.room, stamps.tables, dashes, dashes[k, QUEUE])
    return True


# ---------------------------------------------------------------------------------- distractors


@borrowing
@no_type_check
def _is_free(blocked, taps, stamp, count, y, x):
    """Return whether a first dash may have its tail at (y, x)."""
    size = len(blocked)
    for k in range(count):
        i, j = y + taps[stamp, k, 0], x + taps[stamp, k, 1]
        if not inside(size, i, j):
            continue
        if blocked[i, j] > _FREE or min(i, j) == 0 or max(i, j) == size - 1:
            return False
    return True


@borrowing
@no_type_check
def _free_pixel(stream, blocked, taps, stamp, count):
    """Return a uniformly random pixel where a first dash may have its tail; y is -1 without one."""
    size, free = len(blocked), 0
    for _ in range(_POSITIONS):
        y, x = below(stream, size), below(stream, size)
        if _is_free(blocked, taps, stamp, count, y, x):
            return y, x
    for at in range(size * size):
        free += _is_free(blocked, taps, stamp, count, at // size, at % size)
    chosen = int(uniform(stream) * free)
    for at in range(size * size if free > 0 else 0):
        if _is_free(blocked, taps, stamp, count, at // size, at % size):
            if chosen == 0:
                return at // size, at % size
            chosen -= 1
    return -1, -1


@borrowing
@no_type_check
def _distractor_start(stream, blocked, stamps, dashes, state, path):
    """Place the first dash of a distractor; return False if there is no free pixel."""
    firsts, size = stamps.firsts, len(blocked)
    for _ in range(_TRIALS):
        stamp = below(stream, DEGREES)
        count = firsts[stamp, TAPS]
        if count == 0:
            return False
        y, x = _free_pixel(stream, blocked, stamps.taps, stamp, count)
        if y < 0:
            return False
        if _first(dashes, state, stamps.tables, stamps.moves, size, path, y, x, stamp):
            return True
    return False


@borrowing
@no_type_check
def _distractor(stream, blocked, stamps, dashes, state, path, rules, saved):
    """Place a short path somewhere; without room, remove it and return False."""
    before = state[COUNTS, USED]
    if not _distractor_start(stream, blocked, stamps, dashes, state, path):
        return False
    for n in range(rules.distractor_length - 1):
        if not _further(stream, blocked, stamps, dashes, state, path, rules.padding):
            for k in range(n - 1, -1, -1):
                copy(blocked, dashes, before + k, saved[k], True)
            state[COUNTS, USED] = before
            return False
        copy(blocked, dashes, before + n, saved[n], False)
        block(blocked, stamps.room, stamps.tables, dashes, before + n)
    block(blocked, stamps.room, stamps.tables, dashes, state[2, LAST_DASH])
    return True


@inlined
@no_type_check
def _distractors(stream, blocked, stamps, dashes, state, rules, pivots):
    """Place short paths, and store their first pivots; return the number of those with room."""
    size, placed = stamps.room.shape[1], 0
    saved = np.empty((rules.distractor_length, size, size), np.uint8)
    for _ in range(rules.distractors):
        for _ in range(_PLACES):
            first = state[COUNTS, USED]
            if _distractor(stream, blocked, stamps, dashes, state, 2 + placed, rules, saved):
                moves, stamp = stamps.moves, dashes[first, STAMP]
                head = _moved(moves, stamp, HEAD, dashes[first, Y], dashes[first, X])
                pivots[placed] = _moved(moves, stamp, PIVOT, *head)
                placed += 1
                break
    return placed


@compiled
@no_type_check
def choose(seed, split, index, count):
    """Return which of the margins an image has: all attempts at it share one.

    Drawn anew for each attempt, narrow margins would succeed more often.
    """
    stream = np.empty(4, np.uint64)
    start(stream, seed, split, index, _NO_ATTEMPT)
    return below(stream, count)


@compiled
@no_type_check
def draw(seed, split, index, attempts, rules, stamps):
    """Return the first attempt whose main paths have room, and its shapes; attempt -1 if none.

    The result is the attempt, whether both discs are on one path, the path of the first disc,
    dashes [D, 4] (y, x, stamp and path), and discs [M, 2] (y and x). Paths 0 and 1 are the main
    paths. The first disc is at the tail of a main path, the second at the head of one, the others
    at the first pivots of distractors.
    """
    size, padding, length = rules.resolution, rules.padding, rules.contour_length
    stream, state = np.empty(4, np.uint64), np.zeros((4, 3), np.int64)
    blocked = np.empty((size, size), np.uint8)
    most = 2 * length + rules.distractors * rules.distractor_length
    dashes = np.empty((most, COLUMNS), np.int64)
    discs = np.empty((2 + rules.distractors, 2), np.int64)
    blocked[:] = 0
    block_border(blocked, padding)
    for attempt in range(attempts[0], attempts[1]):
        start(stream, seed, split, index, attempt)
        state[COUNTS] = 0
        connected, first = below(stream, 2), below(stream, 2)
        if not _main_paths(stream, blocked, stamps, dashes, state, rules):
            continue
        other = first if connected else 1 - first
        discs[0], discs[1] = dashes[first, :2], dashes[2 * length - 2 + other, :2]
        placed = _distractors(stream, blocked, stamps, dashes, state, rules, discs[2:])
        used = dashes[: state[COUNTS, USED], :4].copy()
        return attempt, connected, first, used, discs[: 2 + placed].copy()
    return -1, 0, 0, dashes[:0, :4].copy(), discs[:0].copy()
