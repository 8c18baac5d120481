"""Compose a Pathfinder image and its mask from stamps, in numba.

Where shapes overlap, the brighter one is kept. The brightest pixel of an image is 255: discs, and
ink where the filter overshoots. All arithmetic is in integers, the same on every machine.
"""

from typing import no_type_check

import numpy as np

from dlrnn.tasks.numba_random import compiled, inlined
from dlrnn.tasks.pathfinder.stamps import RIGHT

LEVEL = 12  # bits of a brightness: 2^12 is that of a disc


@inlined
@no_type_check
def _draw(total, window, top, left, level):
    """Draw a window of ink whose first pixel is at (top, left), with a brightness."""
    high, wide = window.shape
    for i in range(max(0, -top), min(high, len(total) - top)):
        for j in range(max(0, -left), min(wide, len(total) - left)):
            value = np.int32(window[i, j]) * level
            total[top + i, left + j] = max(total[top + i, left + j], value)


@inlined
@no_type_check
def _mark(mask, window, top, left, least, class_):
    """Give a class to all pixels of the mask with at least this much ink in a window."""
    high, wide = window.shape
    for i in range(max(0, -top), min(high, len(mask) - top)):
        for j in range(max(0, -left), min(wide, len(mask) - left)):
            if window[i, j] >= least:
                mask[top + i, left + j] = max(mask[top + i, left + j], class_)


@inlined
@no_type_check
def _window(stamps, place):
    """Return the ink in the box of a stamp, and the first row and column of that box."""
    y, x, stamp = place
    top, bottom, left, right = stamps.tables[stamp, : RIGHT + 1]
    half = stamps.ink.shape[1] // 2
    ink = stamps.ink[stamp, top + half : bottom + half, left + half : right + half]
    return ink, y + top, x + left


@compiled
@no_type_check
def paint(placed, levels, classes, discs, resolution, stamps, disc):
    """Return image and mask [R, R] of dashes [D, 3] and discs [M, 2].

    A dash is y, x and stamp, a disc y and x. Dashes have brightnesses [D] and classes [D]. A pixel
    has the largest class of the dashes that leave ink on it (at least half a gray value).
    """
    total = np.zeros((resolution, resolution), np.int32)
    mask = np.zeros((resolution, resolution), np.uint8)
    for k in range(len(placed)):
        _draw(total, *_window(stamps, placed[k]), np.int32(levels[k]))
    for k in range(len(discs)):
        top, left = discs[k, 0] - len(disc) // 2, discs[k, 1] - len(disc) // 2
        _draw(total, disc, top, left, np.int32(1 << LEVEL))
    most = max(np.int64(1), np.int64(total.max()))
    for k in range(len(placed)):
        if classes[k] > 0:
            least = max(1, -(-most // (510 * levels[k])))
            _mark(mask, *_window(stamps, placed[k]), least, classes[k])
    image = np.zeros((resolution, resolution), np.uint8)
    for y in range(resolution):
        for x in range(resolution):
            if total[y, x] > 0:
                image[y, x] = (np.int64(total[y, x]) * 510 + most) // (2 * most)
    return image, mask
