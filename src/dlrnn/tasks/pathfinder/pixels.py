"""Draw the pixels of a Pathfinder image, in numba.

A dash (a rectangle) or a disc is drawn alone on a grid `scale` times as fine, in a window of its
size: a fine pixel is ink if its centre is inside the shape. The window is reduced with a Lanczos
filter of three lobes, scaled to 8 bits and clipped to 0..255. Where shapes overlap, the brighter
one is kept. After the drawing all arithmetic is in integers, the same on every machine. A shape is
a segment (x, y, x, y) and half its width; a disc is a segment of length 0.
"""

import math
from functools import cache
from typing import no_type_check

import numpy as np
from jaxtyping import Int64

from dlrnn.tasks.numba_random import compiled, inlined

_LOBES = 3
_TAPS = 2 * _LOBES + 1  # pixels that a fine pixel contributes to
_ONE = 14  # bits of a weight's fraction
_CONTRAST = 8  # bits of the contrast's fraction


@cache
def lanczos(scale: int) -> Int64[np.ndarray, "scale taps"]:
    """Return the weight of each fine pixel of a pixel for the pixels -3 .. 3 around it.

    sinc(x) sinc(x / 3) of the distance x < 3 between the centres, normalised over all fine pixels;
    2^14 stands for 1.
    """
    fine = (np.arange(scale)[:, None] + 0.5) / scale - 0.5
    x = fine - np.arange(-_LOBES, _LOBES + 1)
    weights = np.where(abs(x) < _LOBES, np.sinc(x) * np.sinc(x / _LOBES), 0.0)
    units: Int64[np.ndarray, "scale taps"] = np.round(weights / weights.sum() * 2**_ONE).astype(
        np.int64
    )
    units.setflags(write=False)
    return units


@inlined
@no_type_check
def _is_ink(x, y, shape):
    """Return whether a point is in the rectangle around a segment, or in the disc."""
    dx, dy = shape[2] - shape[0], shape[3] - shape[1]
    x, y, radius = x - shape[0], y - shape[1], shape[4]
    length = math.sqrt(dx * dx + dy * dy)
    if length == 0.0:
        return x * x + y * y <= radius * radius
    along, across = (x * dx + y * dy) / length, (x * dy - y * dx) / length
    return 0.0 <= along <= length and abs(across) <= radius


@inlined
@no_type_check
def _reduced(shape, weights, row, total):
    """Write a shape's reduced window to `total`; return its first row and column, and its size.

    A fine pixel is added to the pixels around it: along x into `row`, a fine row of the window,
    and then the row along y.
    """
    scale, radius = len(weights), shape[4]
    left = math.floor(min(shape[0], shape[2]) - radius)
    top = math.floor(min(shape[1], shape[3]) - radius)
    wide = math.ceil(max(shape[0], shape[2]) + radius) - left
    high = math.ceil(max(shape[1], shape[3]) + radius) - top
    across, down = wide + 2 * _LOBES, high + 2 * _LOBES
    total[:down, :across] = 0
    for i in range(high * scale):
        inked = False
        row[:across] = 0
        for j in range(wide * scale):
            if _is_ink(left + (j + 0.5) / scale, top + (i + 0.5) / scale, shape):
                inked = True
                for tap in range(_TAPS):
                    row[j // scale + tap] += weights[j % scale, tap]
        if inked:
            for tap in range(_TAPS):
                weight, below = weights[i % scale, tap], total[i // scale + tap]
                for q in range(across):
                    below[q] += weight * row[q]
    return top - _LOBES, left - _LOBES, down, across


@compiled
@no_type_check
def paint(shapes, classes, resolution, weights, contrast):
    """Return image and mask [R, R] of shapes [S, 5], whose pixels have the given classes [S].

    A pixel has the class of the main path (1 or 2) whose ink on it is brightest, 0 without ink.
    """
    image = np.zeros((resolution, resolution), np.uint8)
    mask = np.zeros((resolution, resolution), np.uint8)
    brightest = np.zeros((resolution, resolution), np.uint8)  # ink of a shape that has a class
    units = round(255.0 * contrast * 2**_CONTRAST)
    shift, reach = 2 * _ONE + _CONTRAST, 0
    for k in range(len(shapes)):
        size = max(abs(shapes[k, 0] - shapes[k, 2]), abs(shapes[k, 1] - shapes[k, 3]))
        reach = max(reach, math.ceil(size + 2.0 * shapes[k, 4]) + 2 + 2 * _LOBES)
    row, total = np.empty(reach, np.int64), np.empty((reach, reach), np.int64)
    for k in range(len(shapes)):
        top, left, down, across = _reduced(shapes[k], weights, row, total)
        for y in range(max(top, 0), min(top + down, resolution)):
            for x in range(max(left, 0), min(left + across, resolution)):
                ink = (total[y - top, x - left] * units + (1 << (shift - 1))) >> shift
                if ink < 1:
                    continue
                ink = min(ink, 255)
                image[y, x] = max(image[y, x], ink)
                class_ = classes[k]
                if class_ == 0 or ink < brightest[y, x]:
                    continue
                if ink > brightest[y, x] or class_ > mask[y, x]:
                    brightest[y, x], mask[y, x] = ink, class_
    return image, mask
