"""Place the dashes and discs of a Pathfinder image, in numba; coordinates are pixels, y is down.

Placed shapes are stored as a short list of neighbourhoods, not as a raster: a segment, and the
distance around it within which nothing else may lie. A new dash has room if it is far enough from
each segment; most pairs are decided by their bounding boxes. The neighbourhood of a dash is the
dash dilated by `margin`, that of a disc is the disc: the ink of two dashes is at least 2 `margin`
apart (less for consecutive dashes of a path that turns), that of a dash and a disc `margin`. A path
grows from pivot to pivot:

    pivot  --margin-->  tail  --length-->  head  --margin-->  next pivot, where the path may turn
"""

import math
from typing import NamedTuple, no_type_check

import numpy as np

from dlrnn.tasks.numba_random import below, bits, compiled, inlined, start

_TRIALS = 3  # for each dash
_PLACES = 5  # for each distractor
_POSITIONS = 1000  # tried to find a free one, after which the image counts as full
_NO_ATTEMPT = 2**32  # the random stream that all attempts at an image share


class Rules(NamedTuple):
    """The settings of `PathfinderGenerator` that determine where shapes lie."""

    resolution: float
    padding: float
    length: float
    thickness: float
    radius: float
    seed_distance: float
    continuity: float
    contour_length: int
    distractors: int
    distractor_length: int
    mark_distractors: bool


class _Canvas(NamedTuple):
    """Random stream and margin of an image, the shapes placed so far, and the ends of its paths."""

    stream: np.ndarray
    margin: float
    shapes: np.ndarray  # [capacity, 5]: both ends of a segment (x, y, x, y), its radius
    owners: np.ndarray  # [capacity]: p for a dash of path p, ~p for a disc at one of its ends
    used: np.ndarray  # [1]
    tips: np.ndarray  # [3, 3]: last pivot and orientation of both main paths and of a distractor
    lasts: np.ndarray  # [3]: their last dashes
    turns: np.ndarray  # [candidates, 3]: weight, cosine and sine of each turn that a dash may make
    heads: np.ndarray  # [candidates, 3]: x and y of the head after each turn, and its weight


@inlined
@no_type_check
def uniform(stream):
    """Return a number in [0, 1) with 53 random bits."""
    return np.float64(bits(stream) >> np.uint64(11)) * 2.0**-53


@inlined
@no_type_check
def _from_point(px, py, segment):
    """Return the squared distance of a point and a segment."""
    ax, ay = segment[0], segment[1]
    dx, dy = segment[2] - ax, segment[3] - ay
    along, size = (px - ax) * dx + (py - ay) * dy, dx * dx + dy * dy
    t = 0.0 if along <= 0.0 else (1.0 if along >= size else along / size)
    return (px - ax - t * dx) ** 2 + (py - ay - t * dy) ** 2


@inlined
@no_type_check
def distance(a, b):
    """Return the distance of the segments (a[0], a[1]) .. (a[2], a[3]) and b."""
    to_b0 = (a[2] - a[0]) * (b[1] - a[1]) - (a[3] - a[1]) * (b[0] - a[0])
    to_b1 = (a[2] - a[0]) * (b[3] - a[1]) - (a[3] - a[1]) * (b[2] - a[0])
    to_a0 = (b[2] - b[0]) * (a[1] - b[1]) - (b[3] - b[1]) * (a[0] - b[0])
    to_a1 = (b[2] - b[0]) * (a[3] - b[1]) - (b[3] - b[1]) * (a[2] - b[0])
    if to_b0 * to_b1 < 0.0 and to_a0 * to_a1 < 0.0:
        return 0.0  # they cross
    least = min(
        _from_point(a[0], a[1], b),
        _from_point(a[2], a[3], b),
        _from_point(b[0], b[1], a),
        _from_point(b[2], b[3], a),
    )
    return math.sqrt(least)


@inlined
@no_type_check
def _boxes_are_apart(shapes, i, box, apart):
    """Return whether a box (left, top, right, bottom) is further than `apart` from shape `i`'s."""
    if box[0] - apart > max(shapes[i, 0], shapes[i, 2]):
        return True
    if box[2] + apart < min(shapes[i, 0], shapes[i, 2]):
        return True
    if box[1] - apart > max(shapes[i, 1], shapes[i, 3]):
        return True
    return box[3] + apart < min(shapes[i, 1], shapes[i, 3])


@inlined
@no_type_check
def _has_room(shapes, count, shape, except_):
    """Return whether a shape's neighbourhood overlaps none of the first `count`, except one."""
    left, right = min(shape[0], shape[2]), max(shape[0], shape[2])
    top, bottom = min(shape[1], shape[3]), max(shape[1], shape[3])
    for i in range(count):
        apart = shape[4] + shapes[i, 4]
        if i == except_ or _boxes_are_apart(shapes, i, (left, top, right, bottom), apart):
            continue
        if distance(shape, shapes[i]) < apart:
            return False
    return True


@inlined
@no_type_check
def _inside(rules, x, y, radius):
    """Return whether a disc of this radius stays `padding` away from the border."""
    least = rules.padding + radius
    return least <= min(x, y) and max(x, y) <= rules.resolution - least


@inlined
@no_type_check
def _add(canvas, shape, owner):
    i = canvas.used[0]
    for k in range(5):
        canvas.shapes[i, k] = shape[k]
    canvas.owners[i] = owner
    canvas.used[0] = i + 1


@inlined
@no_type_check
def _store_tip(canvas, path, x, y, orientation):
    """Store the last pivot, orientation and dash of a path."""
    slot = min(path, 2)
    canvas.tips[slot, 0], canvas.tips[slot, 1] = x, y
    canvas.tips[slot, 2] = orientation
    canvas.lasts[slot] = canvas.used[0] - 1


@inlined
@no_type_check
def _first(rules, canvas, path, x, y):
    """Place the first dash of a path, tail at (x, y), and its disc; return False without room."""
    margin, orientation = canvas.margin, below(canvas.stream, 360) * (math.pi / 180.0)
    along, down = math.cos(orientation), math.sin(orientation)
    head_x, head_y = x + rules.length * along, y + rules.length * down
    pivot_x, pivot_y = x - margin * along, y - margin * down
    half, marked = rules.thickness / 2.0, path < 2 or rules.mark_distractors
    dash = (x, y, head_x, head_y, half + margin)
    disc = (pivot_x, pivot_y, pivot_x, pivot_y, rules.radius)
    if not (_inside(rules, x, y, half) and _inside(rules, head_x, head_y, half)):
        return False
    if not _has_room(canvas.shapes, canvas.used[0], dash, -1):
        return False
    if marked:
        if not _inside(rules, pivot_x, pivot_y, rules.radius):
            return False
        if not _has_room(canvas.shapes, canvas.used[0], disc, -1):
            return False
        _add(canvas, disc, ~path)
    _add(canvas, dash, path)
    _store_tip(canvas, path, pivot_x, pivot_y, orientation)
    return True


@inlined
@no_type_check
def _weigh_heads(rules, canvas, pivot, ahead, closing):
    """Fill `heads` for a dash from this pivot, with weight 0 where it has no room.

    Return the sum of the weights, and the last index whose weight is not 0, or -1. Heads are turned
    by the angle sum formula, without new sines and cosines: the last digit may differ from that of
    the dash that is placed.
    """
    margin, half, heads, turns = canvas.margin, rules.thickness / 2.0, canvas.heads, canvas.turns
    (x, y), reach = pivot, rules.length + margin
    left, top, right, bottom = math.inf, math.inf, -math.inf, -math.inf  # of the heads
    for k in range(len(turns)):
        heads[k, 2] = 0.0
        if turns[k, 0] == 0.0:
            continue
        along = ahead[0] * turns[k, 1] - ahead[1] * turns[k, 2]
        down = ahead[1] * turns[k, 1] + ahead[0] * turns[k, 2]
        head_x, head_y = x + reach * along, y + reach * down
        if not _inside(rules, head_x, head_y, half):
            continue
        if not _inside(rules, x + margin * along, y + margin * down, half):
            continue
        end_x, end_y = head_x + margin * along, head_y + margin * down
        if closing and not _inside(rules, end_x, end_y, rules.radius):
            continue
        heads[k, 0], heads[k, 1], heads[k, 2] = head_x, head_y, turns[k, 0]
        left, right = min(left, head_x), max(right, head_x)
        top, bottom = min(top, head_y), max(bottom, head_y)
    shapes = canvas.shapes
    for i in range(canvas.used[0]):
        if _boxes_are_apart(shapes, i, (left, top, right, bottom), shapes[i, 4]):
            continue
        for k in range(len(heads)):
            point = (heads[k, 0], heads[k, 1], heads[k, 0], heads[k, 1])
            if heads[k, 2] > 0.0 and distance(point, shapes[i]) < shapes[i, 4]:
                heads[k, 2] = 0.0
    total, last = 0.0, -1
    for k in range(len(heads)):
        if heads[k, 2] > 0.0:
            total += heads[k, 2]
            last = k
    return total, last


@inlined
@no_type_check
def _further(rules, canvas, path, closing):
    """Place the next dash of a path, with `closing` also a disc; return False without room."""
    slot, margin, half = min(path, 2), canvas.margin, rules.thickness / 2.0
    before, count = canvas.tips[slot, 2], len(canvas.turns)
    ahead = math.cos(before), math.sin(before)
    x = canvas.tips[slot, 0] + (rules.length + 2.0 * margin) * ahead[0]
    y = canvas.tips[slot, 1] + (rules.length + 2.0 * margin) * ahead[1]
    reach = rules.length + margin
    total, last = _weigh_heads(rules, canvas, (x, y), ahead, closing)
    for _ in range(_TRIALS if last >= 0 else 0):
        left, k = uniform(canvas.stream) * total, 0
        while left >= canvas.heads[k, 2] and k < last:
            left -= canvas.heads[k, 2]
            k += 1
        orientation = before + (k - count // 2) * (2.0 * math.pi / count)
        along, down = math.cos(orientation), math.sin(orientation)
        head_x, head_y = x + reach * along, y + reach * down
        dash = (x + margin * along, y + margin * down, head_x, head_y, half + margin)
        if not _has_room(canvas.shapes, canvas.used[0], dash, canvas.lasts[slot]):
            continue
        if closing:
            end_x, end_y = head_x + margin * along, head_y + margin * down
            disc = (end_x, end_y, end_x, end_y, rules.radius)
            if not _has_room(canvas.shapes, canvas.used[0], disc, -1):
                continue
            _add(canvas, disc, ~path)
        _add(canvas, dash, path)
        _store_tip(canvas, path, x, y, orientation)
        return True
    return False


@inlined
@no_type_check
def _turns(rules, margin):
    """Return weight (0 if too sharp), cosine, sine of one turn for each pixel of a head's arc."""
    count = math.ceil(2.0 * math.pi * (rules.length + margin))
    turns = np.zeros((count, 3), np.float64)
    for k in range(count):
        turn = (k - count // 2) * (2.0 * math.pi / count)
        bend = rules.continuity * abs(turn)
        if bend < math.pi / 2.0:
            turns[k, 0] = math.cos(bend) ** 2
            turns[k, 1], turns[k, 2] = math.cos(turn), math.sin(turn)
    return turns


@inlined
@no_type_check
def _main_paths(rules, canvas):
    """Place both main paths, one dash each in turn; return False as soon as one has no room."""
    seed = rules.seed_distance
    width = rules.resolution - 4.0 * seed
    x = 2.0 * seed + width * uniform(canvas.stream)
    y = 2.0 * seed + width * uniform(canvas.stream)
    if not _first(rules, canvas, 0, x, y):
        return False
    for _ in range(_TRIALS):
        angle = 2.0 * math.pi * uniform(canvas.stream)
        there = x + seed * math.cos(angle), y + seed * math.sin(angle)
        if _first(rules, canvas, 1, there[0], there[1]):
            break
    else:
        return False
    for n in range(2, rules.contour_length + 1):
        for path in range(2):
            if not _further(rules, canvas, path, n == rules.contour_length):
                return False
    return True


@inlined
@no_type_check
def _distractor(rules, canvas, path):
    """Place a short path somewhere; without room, remove it and return False."""
    before, half = canvas.used[0], rules.thickness / 2.0
    least = rules.padding + half
    width = rules.resolution - 2.0 * least
    for _ in range(_TRIALS):
        for _ in range(_POSITIONS):
            x = least + width * uniform(canvas.stream)
            y = least + width * uniform(canvas.stream)
            if _has_room(canvas.shapes, canvas.used[0], (x, y, x, y, 0.0), -1):
                break
        else:
            return False
        if _first(rules, canvas, path, x, y):
            break
    else:
        return False
    for _ in range(1, rules.distractor_length):
        if not _further(rules, canvas, path, False):
            canvas.used[0] = before
            return False
    return True


@compiled
@no_type_check
def draw(seed, split, index, attempts, settings):
    """Return the first attempt whose main paths have room, and its shapes; attempt -1 if none.

    The result is the attempt, the margin, whether both discs are on one path, the path of the first
    disc, shapes [S, 5] and owners [S]. Paths 0 and 1 are the main paths; all four of their ends
    have a disc here, so that the label does not influence where paths lie. All attempts share a
    margin: drawn anew for each, narrow margins would succeed more often.
    """
    rules, margins = settings
    stream = np.empty(4, np.uint64)
    start(stream, seed, split, index, _NO_ATTEMPT)
    margin = margins[below(stream, len(margins))]
    most = 2 * (rules.contour_length + 2) + rules.distractors * (rules.distractor_length + 1)
    turns = _turns(rules, margin)
    canvas = _Canvas(
        stream,
        margin,
        np.empty((most, 5), np.float64),
        np.empty(most, np.int64),
        np.empty(1, np.int64),
        np.empty((3, 3), np.float64),
        np.empty(3, np.int64),
        turns,
        np.empty((len(turns), 3), np.float64),
    )
    for attempt in range(attempts[0], attempts[1]):
        start(stream, seed, split, index, attempt)
        canvas.used[0] = 0
        connected, first = below(stream, 2), below(stream, 2)
        if not _main_paths(rules, canvas):
            continue
        placed = 0
        for _ in range(rules.distractors):
            for _ in range(_PLACES):
                if _distractor(rules, canvas, 2 + placed):
                    placed += 1
                    break
        used = canvas.used[0]
        shapes, owners = canvas.shapes[:used].copy(), canvas.owners[:used].copy()
        return attempt, margin, connected, first, shapes, owners
    return -1, 0.0, 0, 0, canvas.shapes[:0].copy(), canvas.owners[:0].copy()
