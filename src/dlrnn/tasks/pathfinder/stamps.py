"""The dashes and discs of Pathfinder images as rasters, in numba: one stamp for each orientation.

Dashes lie between whole pixels, so that their orientations are few: whole degrees for the first
dash of a path, and for a further dash one direction from a pivot to a pixel of the circle on which
heads lie. A stamp is a window around its anchor, which is the tail of a first dash and the head of
a further one. It has the ink and the neighbourhood of the dash; the neighbourhood is the dash
dilated by the margin, 255 inside and less where it ends.

A dash is drawn as the Python Imaging Library draws a thick line, on a grid `scale` times as fine,
end points included, and reduced with a Lanczos filter of three lobes. All arithmetic on pixels is
in integers, the same on every machine. Coordinates are (y, x), y points down.
"""

import math
from functools import lru_cache
from typing import NamedTuple, no_type_check

import numpy as np
from jaxtyping import Float64, Int16, Int64, UInt8, UInt16

from dlrnn.tasks.numba_random import compiled, inlined

FULL = 32 * 255  # full ink
DEGREES = 360  # stamps of first dashes, from -180 degrees on; those of further dashes follow
CORE = 204  # of 255: two neighbourhoods overlap where they add up to CORE + 255
_LOBES = 3
_ONE = 22  # bits of a filter weight


class Dash(NamedTuple):
    """The geometry of a dash. Lengths are in pixels."""

    length: float
    thickness: float
    margin: float
    scale: int
    continuity: float
    clipped: bool  # whether ink above full ink, where the filter overshoots, is cut off


class Stamps(NamedTuple):
    """All stamps of a dash, and the tables with which paths grow: S stamps in windows of N pixels.

    The first 360 stamps are those of first dashes. H others have their heads around a pivot.
    """

    ink: UInt16[np.ndarray, "S N N"]
    room: UInt8[np.ndarray, "S N N"]  # the neighbourhood
    core: Int16[np.ndarray, "S N 2"]  # left and right of `room` >= CORE in each row
    tables: Int64[np.ndarray, "S 6"]  # see TOP to HEAD_X
    moves: Float64[np.ndarray, "S 6"]  # see HEAD to PIVOT
    chances: Float64[np.ndarray, "S H"]  # of each head after a dash with this stamp, cumulative
    firsts: Int64[np.ndarray, "360 5"]  # see TAPS to LAST_X
    taps: Int16[np.ndarray, "360 T 2"]  # pixels that must be free for a first dash, from its tail
    nearby: Int64[np.ndarray, " M"]  # half the width of each row of a disc of radius `margin`
    ahead: Int64[np.ndarray, "S 4"]  # box of all dashes that may follow a stamp, from the pivot


TOP, BOTTOM, LEFT, RIGHT = 0, 1, 2, 3  # box of what is not 0, from the anchor; last ones exclusive
HEAD_Y, HEAD_X = 4, 5  # the head of a further dash, from its pivot
AHEAD = 0  # y and x from a pivot to the next one, before rounding
HEAD = 2  # for first dashes, from the tail to the head,
PIVOT = 4  # and from there to the first pivot
TAPS = 0  # the number of taps; 0 if a path never starts with this orientation
FIRST_Y, LAST_Y, FIRST_X, LAST_X = 1, 2, 3, 4  # the range of the taps


@inlined
@no_type_check
def _half_up(x):
    """Round to the nearest integer, halves away from 0."""
    return math.floor(x + 0.5) if x >= 0.0 else -math.floor(0.5 - x)


@inlined
@no_type_check
def _half_down(x):
    """Round to the nearest integer, halves towards 0."""
    return math.ceil(x - 0.5) if x >= 0.0 else -math.ceil(-x - 0.5)


@inlined
@no_type_check
def _widen(spans, y, left, right):
    spans[y, 0], spans[y, 1] = min(spans[y, 0], left), max(spans[y, 1], right)


@inlined
@no_type_check
def _thin_line(spans, centre, down, along):
    """Add a line of one fine pixel in width, from the centre."""
    steps = max(abs(down), abs(along))
    for k in range(steps + 1):
        y = (2 * k * abs(down) + steps) // (2 * steps) * (1 if down >= 0 else -1)
        x = (2 * k * abs(along) + steps) // (2 * steps) * (1 if along >= 0 else -1)
        _widen(spans, centre + y, centre + x, centre + x)


@inlined
@no_type_check
def _thick_line(spans, centre, down, along, width):
    """Add a line of a width in fine pixels: a polygon with whole corners, its edges included."""
    length, half = math.hypot(down, along), (width - 1) / 2.0
    less, more = _half_down(half) / length, _half_up(half) / length
    corners = np.empty((5, 2), np.int64)
    corners[0] = centre + _half_up(more * along), centre - _half_down(less * down)
    corners[1] = corners[0, 0] + down, corners[0, 1] + along
    corners[3] = centre - _half_up(less * along), centre + _half_down(more * down)
    corners[2] = corners[3, 0] + down, corners[3, 1] + along
    corners[4] = corners[0]
    for y in range(corners[:, 0].min(), corners[:, 0].max() + 1):
        left, right = math.inf, -math.inf
        for k in range(4):
            (top, x), (bottom, end) = corners[k], corners[k + 1]
            if top == bottom == y:
                _widen(spans, y, min(x, end), max(x, end))
            elif top != bottom and min(top, bottom) <= y <= max(top, bottom):
                at = x + (y - top) * ((end - x) / (bottom - top))
                left, right = min(left, at), max(right, at)
        if left <= right and _half_up(left) <= _half_down(right):
            _widen(spans, y, _half_up(left), _half_down(right))


@inlined
@no_type_check
def _dilated(spans, radius):
    """Return the spans of a shape dilated by a disc; each row of the shape is one span."""
    size, reach = len(spans), math.floor(radius)
    wide = np.empty_like(spans)
    for y in range(size):
        wide[y] = size, -1
        for k in range(max(0, y - reach), min(size, y + reach + 1)):
            if spans[k, 0] <= spans[k, 1]:
                side = math.floor(math.sqrt(radius * radius - (k - y) ** 2))
                left, right = max(0, spans[k, 0] - side), min(size - 1, spans[k, 1] + side)
                _widen(wide, y, left, right)
    return wide


@inlined
@no_type_check
def _filter(fine, coarse):
    """Return sums of Lanczos weights [coarse, fine + 1]: of all fine pixels before each."""
    scale, one = fine / coarse, float(1 << _ONE)
    sums = np.zeros((coarse, fine + 1), np.int64)
    for i in range(coarse):
        centre, weights = (i + 0.5) * scale, np.zeros(fine)
        low = max(0, int(centre - _LOBES * scale + 0.5))
        high = min(fine, int(centre + _LOBES * scale + 0.5))
        for j in range(low, high):
            x = (j - centre + 0.5) / scale
            if x == 0.0:
                weights[j] = 1.0
            elif abs(x) < _LOBES:
                a = math.pi * x
                weights[j] = math.sin(a) / a * math.sin(a / _LOBES) / (a / _LOBES)
        total = weights.sum()
        for j in range(fine):
            sums[i, j + 1] = sums[i, j] + round(weights[j] / total * one)
    return sums


@inlined
@no_type_check
def _reduced(spans, sums, in_bytes, out):
    """Write the reduced window of a shape to `out`: in bytes, or in units of ink."""
    fine, coarse, half = len(spans), len(out), 1 << (_ONE - 1)
    rows = np.zeros((fine, coarse), np.int64)
    top, bottom = fine, 0
    for y in range(fine):
        left, right = spans[y, 0], spans[y, 1]
        if left > right:
            continue
        top, bottom = min(top, y), y + 1
        for i in range(coarse):
            weight = sums[i, right + 1] - sums[i, left]
            rows[y, i] = min(max((255 * weight + half) >> _ONE, 0), 255) if in_bytes else weight
    shift, most = _ONE if in_bytes else 2 * _ONE, 255 if in_bytes else 65535
    unit = 1 if in_bytes else FULL
    total = np.empty(coarse, np.int64)
    for q in range(coarse):
        total[:] = 1 << (shift - 1)
        for y in range(top, bottom):
            weight = (sums[q, y + 1] - sums[q, y]) * unit
            if weight != 0:
                for i in range(coarse):
                    total[i] += weight * rows[y, i]
        for i in range(coarse):
            out[q, i] = min(max(total[i] >> shift, 0), most)


@inlined
@no_type_check
def _paint_ink(spans, sums, clipped, out, bytes_):
    """Write ink to `out`; clipped ink has 255 levels."""
    if not clipped:
        _reduced(spans, sums, False, out)
        return
    _reduced(spans, sums, True, bytes_)
    for y in range(len(out)):
        for x in range(len(out)):
            out[y, x] = np.int64(bytes_[y, x]) * (FULL // 255)


@inlined
@no_type_check
def _heads(radius):
    """Return the pixels (y, x) of the circle on which heads lie, in order; the centre is (0, 0)."""
    count, step = math.ceil(2.0 * math.pi * radius), 1.0 / radius
    reach = math.ceil(radius) + 1
    found = np.zeros((2 * reach + 1, 2 * reach + 1), np.bool_)
    for k in range(count):
        y = math.floor(radius * math.sin(k * step))
        x = math.floor(radius * math.cos(k * step))
        found[reach + y, reach + x] = True
    heads = np.empty((found.sum(), 2), np.int64)
    used = 0
    for y in range(-reach, reach + 1):
        for x in range(-reach, reach + 1):
            if found[reach + y, reach + x]:
                heads[used] = y, x
                used += 1
    return heads


@inlined
@no_type_check
def _box_and_core(ink, room, table, core):
    """Fill the box and the core of a stamp."""
    size, half = len(ink), len(ink) // 2
    table[TOP], table[BOTTOM], table[LEFT], table[RIGHT] = half, -half, half, -half
    for y in range(size):
        core[y] = size, 0
        for x in range(size):
            if ink[y, x] or room[y, x]:
                table[TOP], table[BOTTOM] = min(table[TOP], y - half), y - half + 1
                table[LEFT] = min(table[LEFT], x - half)
                table[RIGHT] = max(table[RIGHT], x - half + 1)
            if room[y, x] >= CORE:
                core[y, 0], core[y, 1] = min(core[y, 0], x), x + 1


@inlined
@no_type_check
def _tap(room, reach, taps):
    """Fill the pixels that must be free for a first dash, one pixel off it; return their number.

    They lie in a square of twice `reach` around the tail. Where they leave out one of the four
    directions, no path starts: the authors' program then finds no free pixel.
    """
    half, used = len(room) // 2, 0
    seen = np.zeros(4, np.bool_)
    for y in range(-reach, reach + 1):
        for x in range(-reach, reach + 1):
            row, column = y - 1 + half, x - 1 + half
            if not (0 <= row < len(room) and 0 <= column < len(room)):
                continue
            if room[row, column] == 255:
                taps[used] = y, x
                used += 1
                seen[0] |= y >= 0 and x >= 0
                seen[1] |= y >= 0 and x <= 0
                seen[2] |= y <= 0 and x >= 0
                seen[3] |= y <= 0 and x <= 0
    return used if seen.all() else 0


@inlined
@no_type_check
def _chances(angles, heads, continuity):
    """Return cumulative weights [S, H]: cos(min(continuity * turn, pi / 2))^2 of each turn."""
    chances = np.zeros((len(angles), heads))
    for k in range(len(angles)):
        total = 0.0
        for h in range(heads):
            turn = abs(angles[DEGREES + h] - angles[k])
            bend = continuity * min(turn, 2.0 * math.pi - turn)
            if bend < math.pi / 2.0:
                total += math.cos(bend) ** 2
            chances[k, h] = total
    return chances


@inlined
@no_type_check
def _boxes_ahead(tables, chances, reach):
    """Return the box [S, 4] of all that may follow each stamp, and of what makes its head free."""
    boxes = np.zeros((len(tables), 4), np.int64)
    for k in range(len(tables)):
        for h in range(chances.shape[1]):
            stamp = DEGREES + h
            if chances[k, h] > (chances[k, h - 1] if h > 0 else 0.0):
                for side, head in ((TOP, HEAD_Y), (LEFT, HEAD_X)):
                    least = tables[stamp, head] + min(tables[stamp, side], -reach)
                    most = tables[stamp, head] + max(tables[stamp, side + 1], reach + 1)
                    boxes[k, side] = min(boxes[k, side], least)
                    boxes[k, side + 1] = max(boxes[k, side + 1], most)
    return boxes


@compiled
@no_type_check
def _all_stamps(length, thickness, margin, scale, continuity, clipped):
    """Return the fields of `Stamps`."""
    radius = length + margin
    heads, reach = _heads(radius), math.ceil(radius)
    count, half = DEGREES + len(heads), reach + math.ceil(thickness)
    size, fine = 2 * half + 1, 2 * half * scale + 1
    width, sums = max(1, round(thickness * scale)), _filter(fine, size)
    ink, room = np.zeros((count, size, size), np.uint16), np.zeros((count, size, size), np.uint8)
    core, tables = np.zeros((count, size, 2), np.int16), np.zeros((count, 6), np.int64)
    moves, firsts = np.empty((count, 6)), np.zeros((DEGREES, 5), np.int64)
    taps = np.zeros((DEGREES, (2 * reach + 1) ** 2, 2), np.int16)
    angles, spans = np.empty(count), np.empty((fine, 2), np.int64)
    bytes_ = np.empty((size, size), np.uint8)
    for k in range(count):
        first, centre = k < DEGREES, half * scale
        angle = (k - 180) * math.pi / 180.0
        if not first:
            tables[k, HEAD_Y], tables[k, HEAD_X] = heads[k - DEGREES]
            angle = math.atan2(tables[k, HEAD_Y], tables[k, HEAD_X])
        back = angle + math.pi if angle < 0.0 else angle - math.pi
        angles[k], drawn = angle, angle if first else back
        end_y = math.ceil(centre + length * scale * math.sin(drawn)) - centre
        end_x = math.ceil(centre + length * scale * math.cos(drawn)) - centre
        spans[:, 0], spans[:, 1] = fine, -1
        if width == 1:
            _thin_line(spans, centre, end_y, end_x)
        else:
            _thick_line(spans, centre, end_y, end_x, width)
        _paint_ink(spans, sums, clipped, ink[k], bytes_)
        _reduced(_dilated(spans, margin * scale), sums, True, room[k])
        _box_and_core(ink[k], room[k], tables[k], core[k])
        for at, size_, turn in (
            (AHEAD, radius + margin, angle),
            (HEAD, length, angle),
            (PIVOT, radius, back),
        ):
            moves[k, at], moves[k, at + 1] = size_ * math.sin(turn), size_ * math.cos(turn)
        if first:
            used = _tap(room[k], reach, taps[k])
            firsts[k, TAPS] = used
            if used > 0:
                firsts[k, FIRST_Y], firsts[k, LAST_Y] = taps[k, 0, 0], taps[k, used - 1, 0]
                firsts[k, FIRST_X] = taps[k, :used, 1].min()
                firsts[k, LAST_X] = taps[k, :used, 1].max()
    taps = taps[:, : max(1, firsts[:, TAPS].max())].copy()
    reach = math.floor(margin)
    nearby = np.empty(2 * reach + 1, np.int64)
    for y in range(-reach, reach + 1):
        nearby[reach + y] = math.floor(math.sqrt(margin * margin - y * y))
    chances = _chances(angles, len(heads), continuity)
    ahead = _boxes_ahead(tables, chances, reach)
    return ink, room, core, tables, moves, chances, firsts, taps, nearby, ahead


@lru_cache(maxsize=8)
def stamps_of(dash: Dash) -> Stamps:
    """Return the stamps of a dash, which are shared: they must not be changed."""
    numbers = float(dash.length), float(dash.thickness), float(dash.margin)
    made = _all_stamps(*numbers, dash.scale, float(dash.continuity), dash.clipped)
    return Stamps(*made)


@compiled
@no_type_check
def _disc(radius, scale, clipped):
    half = math.ceil(radius) + 1 + _LOBES
    size, fine = 2 * half + 1, (2 * half + 1) * scale
    spans = np.empty((fine, 2), np.int64)
    for y in range(fine):
        spans[y] = fine, -1
        left = (radius * scale) ** 2 - (y - half * scale) ** 2
        if left >= 0.0:
            side = math.floor(math.sqrt(left))
            spans[y] = half * scale - side, half * scale + side
    ink, bytes_ = np.zeros((size, size), np.uint16), np.empty((size, size), np.uint8)
    _paint_ink(spans, _filter(fine, size), clipped, ink, bytes_)
    return ink


@lru_cache(maxsize=8)
def disc_of(radius: float, scale: int, clipped: bool) -> UInt16[np.ndarray, "N N"]:
    """Return the ink of a disc around the middle pixel of a window, which must not be changed.

    Its centre is that of the pixel's first fine pixel: with `scale` 2, a quarter of a pixel up and
    to the left of the pixel's own.
    """
    made: UInt16[np.ndarray, "N N"] = _disc(float(radius), scale, clipped)
    return made
