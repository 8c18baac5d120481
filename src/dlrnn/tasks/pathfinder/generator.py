"""Generate Pathfinder images: two long dashed paths among short ones; are both discs on one path?

An image is a function of (seed, split, index): that of the first attempt in which the main paths
have room. In Pathfinder-Segmentation every pixel has a class: 2 on the main path that connects both
discs, 1 on a main path that does not, 0 elsewhere. A pixel belongs to a path if a dash of the path,
drawn alone and reduced to the image's resolution, leaves ink on it, halo included. Discs belong to
no path: a pixel under a disc has a class only where a dash reaches it. Where halos of both main
paths overlap, the larger class counts. Much of a mask is faint halo: 56% of the pixels of a class
at resolution 128, and 26% at 512, have ink of at most 12 of 255.

Images have the statistics of those of the authors' program: tests/pathfinder_measures.py.
"""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from jaxtyping import Int64, UInt8

from dlrnn.tasks.base import Number, check_number
from dlrnn.tasks.pathfinder import paths, pixels
from dlrnn.tasks.pathfinder.stamps import Dash, Stamps, disc_of, stamps_of
from dlrnn.tasks.storage.specs import GeneratedSet, Sample, schema_of

VERSION = 2
"""Of the images: sets made with another version are refused. Version 1, until 2026-11-20, had fewer
distractors and thinner dashes than the authors' program."""

_ATTEMPTS = 2**18  # at main paths that have room, after which the settings are refused

_RESOLUTIONS = (32, 128, 256, 512)
_SCALED = ("seed_distance", "marker_radius", "paddle_thickness", "paddle_length")
_SETTINGS: dict[str, tuple[Any, ...]] = {
    "margins": ((1,), (2, 3), (4,), (7,)),
    "seed_distance": (7, 22, 27, 40),
    "marker_radius": (1.5, 2.1, 4.2, 9),
    "contour_length": (14, 14, 16, 12),
    "paddle_thickness": (0.5, 1.5, 2, 6),
    "paddle_length": (2, 5, 8, 22),
    "antialias_scale": (2, 2, 2, 3),
    "continuity": (1.0, 1.8, 2.2, 2.5),
    "distractors": (5, 16, 16, 18),
    "distractor_length": (4, 4, 5, 4),
    "contrast": (1.5, 0.9, 1.0, 1.0),
    "distractor_contrast": (2.0, 0.9, 1.0, 1.0),
}
"""Each setting at each of these resolutions."""
_LIMITS: dict[str, tuple[Any, Number, Number]] = {
    "resolution": (int, 32, 1024),
    "contour_length": (int, 2, 1000),
    "antialias_scale": (int, 1, 8),
    "distractors": (int, 0, 1000),
    "distractor_length": (int, 1, 1000),
    "seed": (int, -(2**63), 2**64 - 1),
    "shard_rows": (int, 1, 10**6),
    "seed_distance": (Number, 1, 1024),
    "marker_radius": (Number, 0.5, 1024),
    "paddle_thickness": (Number, 0.1, 1024),
    "paddle_length": (Number, 0, 1024),
    "continuity": (Number, 1, 100),  # with less, paths would turn by more than 90 degrees
    "contrast": (Number, 0.05, 10),
    "distractor_contrast": (Number, 0.05, 10),
    "padding": (int, 0, 1024),
}
"""The type and the range of each setting."""


def _level(contrast: Number) -> int:
    return round(contrast * (1 << pixels.LEVEL))


def sizes(resolution: int) -> dict[str, Any]:
    """Return the settings of a resolution; a shard has at most 1000 samples and 2^25 pixels.

    A resolution that is not in the table takes the settings of the nearest one (by ratio; of two
    equally near ones the larger), with lengths in pixels scaled and rounded to hundredths.
    """
    check_number("resolution", resolution, *_LIMITS["resolution"][1:])
    near = min(_RESOLUTIONS, key=lambda size: (max(size / resolution, resolution / size), -size))
    settings = {name: row[_RESOLUTIONS.index(near)] for name, row in _SETTINGS.items()}
    if near != resolution:
        margins = tuple(round(value * resolution / near, 2) for value in settings["margins"])
        lengths = {name: round(settings[name] * resolution / near, 2) for name in _SCALED}
        settings |= {"margins": margins, **lengths}
    shard_rows = min(1000, max(1, 2**25 // resolution**2))
    return {**settings, "resolution": resolution, "shard_rows": shard_rows}


class Scene(NamedTuple):
    """Where dashes and discs are, in whole pixels (y, x); y points down.

    Paths 0 and 1 are the main paths, the others distractors; the dashes of a path are in order. The
    first two discs belong to main paths.
    """

    dashes: Int64[np.ndarray, "D 3"]  # y and x of the anchor, and the stamp: see stamps.py
    paths: Int64[np.ndarray, " D"]  # the path of each dash
    discs: Int64[np.ndarray, "M 2"]
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
class PathfinderGenerator(GeneratedSet):
    """A data set of images; see `segmentation`, `lra` and `path_x`. Lengths are in pixels.

    - `margins`: each image has one of them with equal probability; it is half the gap between
      consecutive dashes (see paths.py).
    - `contrast` and `distractor_contrast`: the brightness of dashes; that of discs is 1. The
      brightest pixel of an image is 255.
    - `padding`: the width of the border, which blocks dashes.
    - `clipped`: the Lanczos filter overshoots; clipped ink has at most its full brightness. The
      authors' program keeps the overshoot, LRA's clips it.

    In a connected image the discs are at both ends of one main path, otherwise at the start of one
    and the far end of the other. The paths start close to each other, so that the distance of the
    discs says little: from it alone, 51% to 55% of the labels can be guessed, and 65% at 512, whose
    paths are straight. Discs are drawn over dashes and block nothing. Not all `distractors` have
    room: 1.1 of 5 at LRA's 32, 7.7 of 8 in Path-X, 14.2 of 16 at 128, 14.0 of 16 at 256, 16.0 of 18
    at 512. At LRA's 32 few orientations of a first dash are possible (see `_tap` in stamps.py).
    """

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
    distractor_contrast: Number
    padding: int = 1
    clipped: bool = False
    masks: bool = True  # whether the table has a column of masks

    writer: ClassVar = {"use_dictionary": False, "write_statistics": False}

    def __post_init__(self) -> None:
        try:
            self._check()
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    def _check(self) -> None:
        """Refuse settings out of range, and dashes or discs that are invisible or never fit."""
        for setting, (kind, least, most) in _LIMITS.items():
            check_number(setting, getattr(self, setting), least, most, kind)
        length, margins = self.paddle_length, cast("Any", self.margins)
        numbers = isinstance(margins, tuple) and all(isinstance(each, Number) for each in margins)
        if not margins or not numbers or not 0 <= min(margins) <= max(margins) <= 1024:
            raise ValueError(f"margins must be a tuple of numbers from 0 to 1024, not {margins!r}")
        here, margin = f"resolution {self.resolution} is too small for", min(margins)
        if length < 2 or margin < 1:
            seen = f"{length} pixels with gaps of {2 * margin}; at least 2 and 2 are needed"
            raise ValueError(f"{here} its dashes: {seen}")
        if self.resolution <= 4 * self.seed_distance:
            needed = f"more than 4 * {self.seed_distance} pixels are needed"
            raise ValueError(f"{here} its seed_distance: {needed}")
        thickness, scale = self.paddle_thickness, self.antialias_scale
        if thickness * scale < 1:
            needed = f"must be at least 1 / {scale}, 1 / antialias_scale, not {thickness}"
            raise ValueError(f"paddle_thickness {needed}")

    @property
    def parameters(self) -> dict[str, Any]:
        """The settings that determine the images, besides the seed."""
        others = ("name", "seed", "counts", "shard_rows")
        settings = {key: value for key, value in asdict(self).items() if key not in others}
        return {**settings, "margins": list(self.margins), "generator": VERSION}

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
        names = ("image", "mask") if self.masks else ("image",)
        others = schema_of(
            label=pa.uint8(),  # 1: connected
            margin=pa.float32(),
            distractors=pa.uint16(),
            attempt=pa.uint32(),
        )
        return pa.schema([*(pa.field(name, pa.binary(), False, shape) for name in names), *others])

    def scene(self, split: str, index: int, attempt: int = 0) -> Scene:
        """Return dashes and discs of an image: of the first successful attempt from `attempt`."""
        stream, counts = self.stream(split, index), (self.contour_length, self.distractors)
        margin = self.margins[paths.choose(*stream, len(self.margins))]
        distances = self.resolution, round(self.padding), float(self.seed_distance)
        rules = paths.Rules(*distances, *counts, self.distractor_length)
        attempts, stamps = (attempt, attempt + _ATTEMPTS), self._stamps(margin)
        found, connected, first, dashes, discs = paths.draw(*stream, attempts, rules, stamps)
        if found < 0:
            two = f"two paths of {self.contour_length} dashes of {self.paddle_length} pixels"
            where = f"resolution {self.resolution} in {_ATTEMPTS} attempts"
            raise ValueError(f"{self.name}: {two} found no room at {where}; ask for shorter ones")
        discs = discs if self.mark_distractors else discs[:2]
        marked = [first, first if connected else 1 - first, *range(2, len(discs))]
        shapes = dashes[:, :3].copy(), dashes[:, 3].copy(), discs
        return Scene(*shapes, np.array(marked), float(margin), found)

    def _stamps(self, margin: Number) -> Stamps:
        lengths = float(self.paddle_length), float(self.paddle_thickness), float(margin)
        turns = float(self.continuity), self.clipped
        return stamps_of(Dash(*lengths, self.antialias_scale, *turns))

    def paint(self, scene: Scene) -> Image:
        """Return the image of a scene, and its mask."""
        main = scene.paths < 2
        levels = np.where(main, _level(self.contrast), _level(self.distractor_contrast))
        joined = main & (scene.paths == scene.ends[0]) & scene.connected
        disc = disc_of(float(self.marker_radius), self.antialias_scale, self.clipped)
        shapes = scene.dashes, levels, main + joined.astype(np.int64), scene.discs
        stamps = self._stamps(scene.margin)
        image, mask = pixels.paint(*shapes, self.resolution, stamps, disc)
        label, distractors = int(scene.connected), scene.distractors
        return Image(image, mask, label, scene.margin, distractors, scene.attempt)

    def draw(self, split: str, index: int, attempt: int = 0) -> Image:
        """Return image `index` of a split, of the first successful attempt from `attempt` on."""
        return self.paint(self.scene(split, index, attempt))

    def sample(self, split: str, index: int, attempt: int = 0) -> Sample:
        """Return the columns of an image."""
        image = self.draw(split, index, attempt)
        return {**image._asdict(), "image": image.pixels.ravel(), "mask": image.mask.ravel()}


def segmentation(resolution: int = 128, **settings: Any) -> PathfinderGenerator:
    """Pathfinder-Segmentation with the paper's settings for 128, 256 and 512.

    Another resolution has those of the nearest one of these and LRA's 32, scaled.
    """
    counts = {"train": 96_000, "validation": 2_000, "test": 2_000}
    defaults = {"name": "pathfinder-segmentation", "mark_distractors": True, "counts": counts}
    return PathfinderGenerator(**{**defaults, **sizes(resolution), **settings})


def lra(**settings: Any) -> PathfinderGenerator:
    """Pathfinder of the Long Range Arena: 32 x 32, one label, discs on the main paths only.

    Main paths have a contrast of 1.5 and distractors of 2, as in LRA's program, which applies its
    dashes' contrast of 0.75 to main paths only.
    """
    return _one_label("pathfinder", {**sizes(32), **settings})


def path_x(**settings: Any) -> PathfinderGenerator:
    """Path-X of the Long Range Arena: 128 x 128, one label, discs on the main paths only."""
    defaults = {"seed_distance": 20, "marker_radius": 3, "distractors": 8}
    return _one_label("path-x", {**sizes(128), **defaults, **settings})


def _one_label(name: str, settings: dict[str, Any]) -> PathfinderGenerator:
    counts = {"train": 160_000, "validation": 20_000, "test": 20_000}
    defaults = {
        "name": name,
        "masks": False,
        "mark_distractors": False,
        "clipped": True,
        "counts": counts,
    }
    return PathfinderGenerator(**{**defaults, **settings})
