"""Pathfinder: two long dashed paths among short ones; are both discs on the same path?

An image is a function of (seed, split, index, attempt): the first attempt whose main paths have
room. In Pathfinder-Segmentation every pixel has a class: 2 on the path that connects both discs,
1 on a main path that does not, else 0. A pixel is on a path if some dash of that path, reduced to
the image's resolution by itself, leaves ink on it, halo included. Discs are on no path: under them
a pixel has a class only where a dash reaches. Where halos of both main paths meet, the brighter
one decides. Much of a mask is faint halo: ink of at most 12 of 255 has 58% of the pixels of a
class at 128, 27% at 512.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from jaxtyping import Float64, Int64, UInt8

from dlrnn.common.figures import new_figure
from dlrnn.tasks import pathfinder_paths, pathfinder_pixels
from dlrnn.tasks.pathfinder_sizes import LRA, SMALL, Number, check, sizes
from dlrnn.tasks.random import SPLITS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ATTEMPTS = 2**18  # without room for the main paths: then there is hardly any


class Scene(NamedTuple):
    """Where dashes (tail x, y, head x, y) and discs (centre) lie; x to the right, y down.

    Paths 0 and 1 are the main ones, further numbers distractors; a path's dashes are in order. The
    first two discs are the main paths'.
    """

    dashes: Float64[np.ndarray, "D 4"]
    paths: Int64[np.ndarray, " D"]  # of each dash
    discs: Float64[np.ndarray, "M 2"]
    ends: Int64[np.ndarray, " M"]  # the path at whose end a disc is
    margin: float
    attempt: int

    @property
    def connected(self) -> bool:
        """Are both discs on the same main path?"""
        return bool(self.ends[0] == self.ends[1])

    @property
    def distractors(self) -> int:
        """How many had room."""
        return int(self.paths.max()) - 1


class Image(NamedTuple):
    """One image and what is to be said of it."""

    pixels: UInt8[np.ndarray, "R R"]  # 0 is empty
    mask: UInt8[np.ndarray, "R R"]  # 0, 1, 2
    label: int  # 1: connected
    margin: float
    distractors: int
    attempt: int


@dataclass(frozen=True, kw_only=True)
class Pathfinder:
    """A set of images; `segmentation`, `lra` and `path_x` know the settings. Lengths are in pixels.

    `margins`: each image has one of them, any as likely: half the gap of consecutive dashes (see
    pathfinder_paths). `contrast` times 255 is full ink, cut off at 255. `padding`: how far ink
    stays from the border, its halo aside. Connected: the discs are at both ends of one main path;
    else at the start of one and the far end of the other. The paths start close to each other, so
    that the distance of the discs tells little: by it alone, 48% to 54% of the labels are guessed;
    65% at 512, whose paths are straight. A disc is centred on a pivot, `margin` beyond a dash; no
    other path comes closer than `margin` to where one may be, whether one is drawn or not. Not all
    `distractors` find room: 2.1 of 5 at LRA's 32, 7.2 of 8 in Path-X, 11.8 of 16 at 128, 12.2 of 16
    at 256, 14.7 of 18 at 512.
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
    masks: bool = True  # are a column of the table
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
        """What decides the images, besides the seed."""
        others = ("name", "seed", "counts", "shard_rows")
        own = {key: value for key, value in asdict(self).items() if key not in others}
        return {**own, "margins": list(self.margins)}

    @property
    def bytes_per_sample(self) -> int:
        """On the disk, rounded up: a dash or disc takes less than half a byte a row of pixels."""
        longest = self.distractor_length + self.mark_distractors
        shapes = 2 * (self.contour_length + 1) + self.distractors * longest
        return 256 + self.resolution * min(shapes // 2, 2 * self.resolution)

    @property
    def group_rows(self) -> int:
        """Samples a row group, a quarter of a million pixels."""
        return max(1, 2**18 // self.resolution**2)

    @property
    def schema(self) -> pa.Schema:
        """Images and masks row by row from the top."""
        pixels = {"dtype": "uint8", "shape": f"{self.resolution} {self.resolution}"}
        masks = [pa.field("mask", pa.binary(), False, pixels)] if self.masks else []
        return pa.schema(
            [
                pa.field("image", pa.binary(), False, pixels),
                *masks,
                pa.field("label", pa.uint8(), False),  # 1: connected
                pa.field("margin", pa.float32(), False),
                pa.field("distractors", pa.uint16(), False),
                pa.field("attempt", pa.uint32(), False),
            ]
        )

    def scene(self, split: str, index: int, attempt: int = 0) -> Scene:
        """Dashes and discs of an image: of the first attempt, from that one on, that has room."""
        if split not in SPLITS[:3]:
            raise ValueError(f"split must be train, validation or test, not {split!r}")
        seed, number = np.uint64(self.seed % 2**64), np.uint64(SPLITS.index(split))
        drawn = pathfinder_paths.draw(
            seed,
            number,
            np.uint64(index),
            (attempt, attempt + _ATTEMPTS),
            (self._rules(), np.array(self.margins, dtype=np.float64)),
        )
        found, margin, connected, first, shapes, owners = drawn
        if found < 0:
            paths = f"two paths of {self.contour_length} dashes of {self.paddle_length} pixels"
            where = f"resolution {self.resolution} in {_ATTEMPTS} attempts"
            raise ValueError(f"{self.name}: {paths} found no room at {where}; ask for shorter ones")
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

    def _rules(self) -> pathfinder_paths.Rules:
        return pathfinder_paths.Rules(
            float(self.resolution),
            float(self.padding),
            float(self.paddle_length),
            float(self.paddle_thickness),
            float(self.marker_radius),
            float(self.seed_distance),
            float(self.continuity),
            self.contour_length,
            self.distractors,
            self.distractor_length,
            self.mark_distractors,
        )

    def paint(self, scene: Scene) -> Image:
        """The image of a scene, and its mask."""
        count = len(scene.paths)
        shapes = np.empty((count + len(scene.discs), 5))
        shapes[:count, :4], shapes[:count, 4] = scene.dashes, self.paddle_thickness / 2
        shapes[count:, :2] = shapes[count:, 2:4] = scene.discs
        shapes[count:, 4] = self.marker_radius
        classes = np.zeros(len(shapes), dtype=np.int64)
        classes[:count] = scene.paths < 2
        if scene.connected:
            classes[:count] += scene.paths == scene.ends[0]
        weights = pathfinder_pixels.lanczos(self.antialias_scale)
        pixels, mask = pathfinder_pixels.paint(
            shapes, classes, self.resolution, weights, float(self.contrast)
        )
        label, distractors = int(scene.connected), scene.distractors
        return Image(pixels, mask, label, scene.margin, distractors, scene.attempt)

    def draw(self, split: str, index: int, attempt: int = 0) -> Image:
        """Image `index` of a split: the first, from that attempt on, whose main paths have room."""
        return self.paint(self.scene(split, index, attempt))

    def table(self, split: str, rows: range, attempts: Mapping[int, int]) -> pa.Table:
        """Images of a split; `attempts` gives the first attempt of those that do not start at 0."""
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


def segmentation(resolution: int = SMALL, **settings: Any) -> Pathfinder:
    """Pathfinder-Segmentation with the paper's settings for 128, 256 and 512.

    Any other resolution has those of the nearest, or for small ones LRA's of 32, scaled.
    """
    counts = {"train": 96_000, "validation": 2_000, "test": 2_000}
    own = {"name": "pathfinder-segmentation", "mark_distractors": True, "counts": counts}
    return Pathfinder(**{**own, **sizes(resolution), **settings})


def lra(**settings: Any) -> Pathfinder:
    """Pathfinder of the Long Range Arena: 32 x 32, one label, discs on the main paths only.

    Its contrasts, 2 for a path and 0.75 for a dash, are one factor here: dashes thinner than a
    pixel seldom fill one.
    """
    return _one_label("pathfinder", {**sizes(LRA), **settings})


def path_x(**settings: Any) -> Pathfinder:
    """Path-X of the Long Range Arena: 128 x 128, one label, discs on the main paths only."""
    own = {"seed_distance": 20, "marker_radius": 3, "distractors": 8}
    return _one_label("path-x", {**sizes(SMALL), **own, **settings})


def _one_label(name: str, settings: dict[str, Any]) -> Pathfinder:
    counts = {"train": 160_000, "validation": 20_000, "test": 20_000}
    own = {"name": name, "masks": False, "mark_distractors": False, "counts": counts}
    return Pathfinder(**{**own, **settings})


def preview(images: Sequence[Image], *, masks: bool = True) -> "Figure":
    """Images above, black on white; masks below: 0 white, 1 gray, 2 black."""
    rows = 2 if masks else 1
    figure = new_figure(3 * len(images), 3 * rows + 0.3)
    axes = figure.subplots(rows, len(images), squeeze=False)
    for place, image in enumerate(images):
        for row, (picture, most) in enumerate(((image.pixels, 255), (image.mask, 2))[:rows]):
            axes[row, place].imshow(picture, cmap="gray_r", vmin=0, vmax=most)
            axes[row, place].set(xticks=[], yticks=[])
        axes[0, place].set_title("connected" if image.label else "not connected")
    return figure
