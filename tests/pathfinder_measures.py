"""Measure Pathfinder images: numbers by which two programs that draw them are compared.

`pathfinder_statistics.json` has mean and standard deviation of each measure over images of the
authors' program (ag1988/dlr, src/dataloaders/prepare/pathfinder, with OpenCV 5.0 and Pillow 9.3,
its settings for 128, 256 and 512), and for `pathfinder` and `path-x` over images of the same
program with LRA's settings and with the 8-bit resizing of drewlinsley/pathfinder, from which both
descend. They were made on 2026-11-20, and the repository has none of them.

    python tests/pathfinder_measures.py 128 2000

compares 2000 of our images with them, which the test does with fewer.
"""

import json
import sys
from pathlib import Path

import numpy as np

from dlrnn.common.jit import numba
from dlrnn.tasks import pathfinder

SPECS = {
    "128": pathfinder.segmentation(),
    "256": pathfinder.segmentation(256),
    "512": pathfinder.segmentation(512),
    "pathfinder": pathfinder.lra(),
    "path-x": pathfinder.path_x(),
}


@numba.njit(cache=True)
def pieces(bright):
    """The number of 4-connected pieces of a picture of booleans, and the size of the largest."""
    size, count, largest = len(bright), 0, 0
    todo, seen = np.empty(size * size, np.int64), ~bright
    for start in range(size * size):
        if seen[start // size, start % size]:
            continue
        seen[start // size, start % size] = True
        todo[0], left, area = start, 1, 0
        count += 1
        while left:
            left, area = left - 1, area + 1
            y, x = todo[left] // size, todo[left] % size
            for i, j in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
                if 0 <= i < size and 0 <= j < size and not seen[i, j]:
                    seen[i, j] = True
                    todo[left] = i * size + j
                    left += 1
        largest = max(largest, area)
    return count, largest


def measures(pixels, mask, tips, distractors, dashes):
    """Numbers of one image: {name: value}.

    `tips` are the first tail and the last head (y, x) of both main paths, [path, end, 2]; `dashes`
    is the number of dashes of a main path. Shares are in percent of all pixels.
    """
    rows, columns = (np.flatnonzero((mask > 0).any(axis=axis)) for axis in (1, 0))
    inked, main = pixels.astype(float), mask > 0
    count, largest = pieces(pixels > 100)
    return {
        "mean gray": inked.mean(),
        "share > 0": 100 * (pixels > 0).mean(),
        "share > 40": 100 * (pixels > 40).mean(),
        "share > 128": 100 * (pixels > 128).mean(),
        "share > 200": 100 * (pixels > 200).mean(),
        "pieces > 100": count,
        "largest piece > 100": largest,
        "distractors": distractors,
        "pixels > 128 of a main dash": (pixels[main] > 128).sum() / (2 * dashes),
        "mean gray of masks": inked[main].mean(),
        "faint share of masks": 100 * (pixels[main] <= 12).mean(),
        "mask share": 100 * main.mean(),
        "mask top": rows[0],
        "mask left": columns[0],
        "mask height": rows[-1] - rows[0] + 1,
        "mask width": columns[-1] - columns[0] + 1,
        "end to end": np.linalg.norm(tips[:, 1] - tips[:, 0], axis=-1).mean(),
        "connected": float(mask.max() == 2),
    }


def statistics(name):
    """The authors' images: their number, and {measure: (mean, standard deviation)}."""
    path = Path(__file__).with_name("pathfinder_statistics.json")
    found = json.loads(path.read_text())[name]
    return found["images"], found["measures"]


def measured(spec, count):
    """The measures of our first `count` images: {name: array}."""
    rows = []
    for index in range(count):
        scene = spec.scene("train", index)
        image = spec.paint(scene)
        ends = [scene.dashes[scene.paths == path][[0, -1], :2] for path in (0, 1)]
        counts = scene.distractors, spec.contour_length
        rows.append(measures(image.pixels, image.mask, np.array(ends), *counts))
    return {name: np.array([row[name] for row in rows], dtype=float) for name in rows[0]}


def compare(name, count):
    """{measure: (their mean, our mean, difference in standard errors of both)}."""
    images, theirs = statistics(name)
    ours, found = measured(SPECS[name], count), {}
    for measure, (mean, deviation) in theirs.items():
        values = ours[measure]
        error = np.sqrt(deviation**2 / images + values.var(ddof=1) / count)
        found[measure] = mean, values.mean(), (values.mean() - mean) / error
    return found


if __name__ == "__main__":
    for measure, numbers in compare(sys.argv[1], int(sys.argv[2])).items():
        print("{:28} {:9.3f} {:9.3f} {:6.2f}".format(measure, *numbers))
