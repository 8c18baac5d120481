"""Generate Pathfinder images: two long dashed paths among short ones; are both discs on one path?

An image is a function of (seed, split, index): that of the first attempt in which the main paths
have room. In Pathfinder-Segmentation every pixel has a class: 2 on the main path that connects both
discs, 1 on a main path that does not, 0 elsewhere. A pixel belongs to a path if a dash of the path,
drawn alone and reduced to the image's resolution, leaves ink on it, halo included. Discs belong to
no path: a pixel under a disc has a class only where a dash reaches it. Where halos of both main
paths overlap, the brighter one decides. Much of a mask is faint halo: 58% of the pixels of a class
at resolution 128, and 27% at 512, have ink of at most 12 of 255.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from jaxtyping import Float64, Int64, UInt8

from dlrnn.tasks.pathfinder import paths, pixels
from dlrnn.tasks.pathfinder.sizes import LRA, SMALL, Number, check, sizes
from dlrnn.tasks.random import SPLITS

_ATTEMPTS = 2**18  # at main paths that have room, after which the settings are refused


class Scene(NamedTuple):
    """Coordinates of dashes (tail x, y, head x, y) and discs (centre); y points down.

    Paths 0 and 1 are the main paths, the others distractors; the dashes of a path are in order. The
    first two discs belong to main paths.
    """

    dashes: Float64[np.ndarray, "D 4"]
    paths: Int64[np.ndarray, " D"]  # the path of each dash
    discs: Float64[np.ndarray, "M 2"]
    ends: Int64[np.ndarray, " M"]  # the path at whose end each disc is
    margin: float
    attempt: int

    @property
    def connected(self) -> bool:
        """Whether both discs are on the same main path."""
        return bool(self.ends[0] == self.ends[1])

    @property
    def distractors(self) -> int:
        """The number of distractors that had room."""
        return int(self.paths.max()) - 1


class Image(NamedTuple):
    """An image, its mask and its label."""

    pixels: UInt8[np.ndarray, "R R"]  # 0 is empty
    mask: UInt8[np.ndarray, "R R"]  # 0, 1, 2
    label: int  # 1: connected
    margin: float
    distractors: int
    attempt: int


@dataclass(frozen=True, kw_only=True)
class PathfinderGenerator:
    """A data set of images; see `segmentation`, `lra` and `path_x`. Lengths are in pixels.

    - `margins`: each image has one of them with equal probability; it is half the gap between
      consecutive dashes (see paths.py).
    - `contrast` times 255 is full ink, clipped at 255.
    - `padding`: the distance of ink, without its halo, from the border.

    In a connected image the discs are at both ends of one main path, otherwise at the start of one
    and the far end of the other. The paths start close to each other, so that the distance of the
    discs says little: from it alone, 48% to 54% of the labels can be guessed, and 65% at 512, whose
    paths are straight. A disc is centred on a pivot, `margin` beyond a dash; no other path comes
    closer than `margin` to a possible disc, whether the disc is drawn or not. Not all `distractors`
    have room: 2.1 of 5 at LRA's 32, 7.2 of 8 in Path-X, 11.8 of 16 at 128, 12.2 of 16 at 256, 14.7
    of 18 at 512.
    """

    name: str
    resolution: int
    margins: tuple[Number, ...]
    seed_distance: Number
    marker_radius: Number
    contour_length: int  # dashes of a main path
    paddle_thickness: Number
    paddle_length: Number
    antialias_scale: int
    continuity: Number
    distractors: int
    distractor_length: int
    mark_distractors: bool
    contrast: Number
    padding: Number = 1
    masks: bool = True  # whether the table has a column of masks
    seed: int = 0
    counts: Mapping[str, int]
    shard_rows: int

    unique: ClassVar[str | None] = None
    writer: ClassVar = {"use_dictionary": False, "write_statistics": False}

    def __post_init__(self) -> None:
        try:
            check(self.__dict__)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    @property
    def parameters(self) -> dict[str, Any]:
        """The settings that determine the images, besides the seed."""
        others = ("name", "seed", "counts", "shard_rows")
        settings = {key: value for key, value in asdict(self).items() if key not in others}
        return {**settings, "margins": list(self.margins)}

    @property
    def bytes_per_sample(self) -> int:
        """An upper estimate of the size on disk: half a byte for each shape and row of pixels."""
        longest = self.distractor_length + self.mark_distractors
        shapes = 2 * (self.contour_length + 1) + self.distractors * longest
        return 256 + self.resolution * min(shapes // 2, 2 * self.resolution)

    @property
    def group_rows(self) -> int:
        """Samples of a row group: a quarter of a million pixels."""
        return max(1, 2**18 // self.resolution**2)

    @property
    def schema(self) -> pa.Schema:
        """The columns; images and masks have their pixels row by row from the top."""
        shape = {"dtype": "uint8", "shape": f"{self.resolution} {self.resolution}"}
        masks = [pa.field("mask", pa.binary(), False, shape)] if self.masks else []
        return pa.schema(
            [
                pa.field("image", pa.binary(), False, shape),
                *masks,
                pa.field("label", pa.uint8(), False),  # 1: connected
                pa.field("margin", pa.float32(), False),
                pa.field("distractors", pa.uint16(), False),
                pa.field("attempt", pa.uint32(), False),
            ]
        )

    def scene(self, split: str, index: int, attempt: int = 0) -> Scene:
        """Return dashes and discs of an image: of the first successful attempt from `attempt`."""
        if split not in SPLITS[:3]:
            raise ValueError(f"split must be train, validation or test, not {split!r}")
        seed, number = np.uint64(self.seed % 2**64), np.uint64(SPLITS.index(split))
        drawn = paths.draw(
            seed,
            number,
            np.uint64(index),
            (attempt, attempt + _ATTEMPTS),
            (self._rules(), np.array(self.margins, dtype=np.float64)),
        )
        found, margin, connected, first, shapes, owners = drawn
        if found < 0:
            two = f"two paths of {self.contour_length} dashes of {self.paddle_length} pixels"
            where = f"resolution {self.resolution} in {_ATTEMPTS} attempts"
            raise ValueError(f"{self.name}: {two} found no room at {where}; ask for shorter ones")
        starts_and_ends = [np.flatnonzero(owners == ~path) for path in (0, 1)]
        marked = [starts_and_ends[first][0], starts_and_ends[first if connected else 1 - first][1]]
        marked.extend(np.flatnonzero(owners < ~1))
        return Scene(
            shapes[owners >= 0, :4],
            owners[owners >= 0],
            shapes[marked, :2],
            ~owners[marked],
            margin,
            found,
        )

    def _rules(self) -> paths.Rules:
        lengths = (self.resolution, self.padding, self.paddle_length, self.paddle_thickness)
        numbers = (*lengths, self.marker_radius, self.seed_distance, self.continuity)
        counts = (self.contour_length, self.distractors, self.distractor_length)
        rules: Any = (*map(float, numbers), *counts, self.mark_distractors)
        return paths.Rules(*rules)

    def paint(self, scene: Scene) -> Image:
        """Return the image of a scene, and its mask."""
        count = len(scene.paths)
        shapes = np.empty((count + len(scene.discs), 5))
        shapes[:count, :4], shapes[:count, 4] = scene.dashes, self.paddle_thickness / 2
        shapes[count:, :2] = shapes[count:, 2:4] = scene.discs
        shapes[count:, 4] = self.marker_radius
        classes = np.zeros(len(shapes), dtype=np.int64)
        classes[:count] = scene.paths < 2
        if scene.connected:
            classes[:count] += scene.paths == scene.ends[0]
        weights = pixels.lanczos(self.antialias_scale)
        image, mask = pixels.paint(shapes, classes, self.resolution, weights, float(self.contrast))
        label, distractors = int(scene.connected), scene.distractors
        return Image(image, mask, label, scene.margin, distractors, scene.attempt)

    def draw(self, split: str, index: int, attempt: int = 0) -> Image:
        """Return image `index` of a split, of the first successful attempt from `attempt` on."""
        return self.paint(self.scene(split, index, attempt))

    def table(self, split: str, rows: range, attempts: Mapping[int, int]) -> pa.Table:
        """Return images of a split; `attempts` has the first attempt of some, 0 for the others."""
        images = [self.draw(split, index, attempts.get(index, 0)) for index in rows]
        columns = [pa.array([image.pixels.tobytes() for image in images], pa.binary())]
        if self.masks:
            columns.append(pa.array([image.mask.tobytes() for image in images], pa.binary()))
        columns += [
            pa.array([image.label for image in images], pa.uint8()),
            pa.array([image.margin for image in images], pa.float32()),
            pa.array([image.distractors for image in images], pa.uint16()),
            pa.array([image.attempt for image in images], pa.uint32()),
        ]
        return pa.Table.from_arrays(columns, schema=self.schema)


def segmentation(resolution: int = SMALL, **settings: Any) -> PathfinderGenerator:
    """Pathfinder-Segmentation with the paper's settings for 128, 256 and 512.

    Another resolution has those of the nearest one of these and LRA's 32, scaled.
    """
    counts = {"train": 96_000, "validation": 2_000, "test": 2_000}
    defaults = {"name": "pathfinder-segmentation", "mark_distractors": True, "counts": counts}
    return PathfinderGenerator(**{**defaults, **sizes(resolution), **settings})


def lra(**settings: Any) -> PathfinderGenerator:
    """Pathfinder of the Long Range Arena: 32 x 32, one label, discs on the main paths only.

    LRA's contrasts, 2 for a path and 0.75 for a dash, are one factor here, because dashes thinner
    than a pixel rarely reach full ink.
    """
    return _one_label("pathfinder", {**sizes(LRA), **settings})


def path_x(**settings: Any) -> PathfinderGenerator:
    """Path-X of the Long Range Arena: 128 x 128, one label, discs on the main paths only."""
    defaults = {"seed_distance": 20, "marker_radius": 3, "distractors": 8}
    return _one_label("path-x", {**sizes(SMALL), **defaults, **settings})


def _one_label(name: str, settings: dict[str, Any]) -> PathfinderGenerator:
    counts = {"train": 160_000, "validation": 20_000, "test": 20_000}
    defaults = {"name": name, "masks": False, "mark_distractors": False, "counts": counts}
    return PathfinderGenerator(**{**defaults, **settings})
