"""Pathfinder as tasks: a class for every pixel (segmentation), or one for the image (LRA)."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dlrnn.tasks import pathfinder
from dlrnn.tasks.classes import (
    OneClass,
    balanced_cross_entropy,
    class_counts,
    logits_of,
    macro_scores,
)
from dlrnn.tasks.sets import SetTask
from dlrnn.tasks.task import Batch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# numpy here: torch would give each of the threads that draw a team of threads of its own
_LEVELS = np.arange(256, dtype=np.float32) / 127.5 - 1


@dataclass(frozen=True)
class _Pathfinder(SetTask):
    """Pixels in, row by row, mapped to [-1, 1]."""

    causal: ClassVar[bool] = False

    @abstractmethod
    def spec(self) -> pathfinder.Pathfinder:
        """The set, as the paper has it."""

    def _fixed(self) -> dict[str, Any]:
        return {"resolution": self.spec().resolution}

    @property
    def d_input(self) -> int:
        """The pixel."""
        return 1

    @property
    def input_length(self) -> int:
        """The pixels of an image."""
        return self.spec().resolution ** 2

    def _drawn(self, split: str, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
        spec = self.spec()
        return [self._columns(spec.draw(split, number)) for number in numbers]

    def _columns(self, image: pathfinder.Image) -> Mapping[str, Any]:
        columns = {"image": image.pixels.ravel(), "mask": image.mask.ravel(), "label": image.label}
        return {name: columns[name] for name in self.columns}

    def _pixels(self, samples: Sequence[Mapping[str, Any]]) -> Tensor:
        pixels = np.stack([sample["image"] for sample in samples])
        return torch.from_numpy(_LEVELS[pixels][..., None])  # [B, R R, 1]

    def preview(self, *, split: str = "train", step: int = 0) -> "Figure":
        """Four images above, their masks, if it has any, below."""
        self._check_request(4, split, step, 0)
        spec, numbers = self.spec(), range(4 * step, 4 * step + 4)
        if self.folder is None:
            images = [spec.draw(split, number) for number in numbers]
        else:
            images = [_stored(sample, spec.resolution) for sample in self._read(split, numbers)]
        return pathfinder.preview(images, masks=spec.masks)


def _stored(sample: Mapping[str, Any], resolution: int) -> pathfinder.Image:
    """What a preview shows of a sample of a set; the rest is not read."""
    pixels = sample["image"].reshape(resolution, resolution)
    mask = sample["mask"].reshape(pixels.shape) if "mask" in sample else np.zeros_like(pixels)
    label = int(sample["label"]) if "label" in sample else int(mask.max() == 2)
    return pathfinder.Image(pixels, mask, label, margin=0.0, distractors=0, attempt=0)


@dataclass(frozen=True)
class PathfinderSegmentation(_Pathfinder):
    """A class for each pixel: 2 on the path that joins both discs, 1 on a main path that does not
    join them, else 0. `resolution` 128, 256 and 512 are the paper's; others are scaled from them.

    In, an image of two long dashed paths among short ones; out, a mask of the same size.
    """

    resolution: int = 128

    name: ClassVar[str] = "pathfinder-segmentation"
    kind: ClassVar[str] = "tagging"
    metric: ClassVar[str] = "macro_f1"
    metric_names: ClassVar[tuple[str, ...]] = ("macro_f1", "macro_accuracy")
    probes: ClassVar[str] = "long-range spatial relations, at every pixel"
    columns: ClassVar[tuple[str, ...]] = ("image", "mask")

    def spec(self) -> pathfinder.Pathfinder:
        """100000 images of this resolution."""
        return pathfinder.segmentation(self.resolution, seed=self.seed)

    @property
    def d_output(self) -> int:
        """0, 1 and 2."""
        return 3

    @property
    def output_length(self) -> int:
        """Every pixel."""
        return self.input_length

    def _batch(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        masks = np.stack([sample["mask"] for sample in samples], dtype=np.int64)
        return Batch(self._pixels(samples), torch.from_numpy(masks))

    def loss(self, output: Tensor, batch: Batch, totals: Tensor | None = None) -> Tensor:
        """Cross-entropy, each class weighted by the inverse of its count in the batch."""
        return balanced_cross_entropy(logits_of(self, output, batch), batch.targets, totals)

    def totals(self, batch: Batch) -> Tensor:
        """Pixels of each class."""
        return class_counts(batch.targets, self.d_output)

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Macro F1 and macro accuracy of one batch; average over batches."""
        return macro_scores(logits_of(self, output, batch), batch.targets)


@dataclass(frozen=True)
class _OneLabel(OneClass, _Pathfinder):
    """Are the two discs on one path?"""

    columns: ClassVar[tuple[str, ...]] = ("image", "label")

    @property
    def d_output(self) -> int:
        """No and yes."""
        return 2

    def _batch(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        labels = torch.tensor([int(sample["label"]) for sample in samples])
        return Batch(self._pixels(samples), labels)


@dataclass(frozen=True)
class Pathfinder(_OneLabel):
    """Are the two discs on one path? 32 x 32 pixels (Long Range Arena).

    In, 1024 pixels; out, 1 if a dashed path joins the discs, else 0.
    """

    name: ClassVar[str] = "pathfinder"
    probes: ClassVar[str] = "long-range spatial relations"

    def spec(self) -> pathfinder.Pathfinder:
        """LRA's 32 x 32."""
        return pathfinder.lra(seed=self.seed)


@dataclass(frozen=True)
class PathX(_OneLabel):
    """Are the two discs on one path? 128 x 128 pixels (Long Range Arena's Path-X).

    In, 16384 pixels; out, 1 if a dashed path joins the discs, else 0.
    """

    name: ClassVar[str] = "path-x"
    probes: ClassVar[str] = "the same over 16384 positions"

    def spec(self) -> pathfinder.Pathfinder:
        """LRA's 128 x 128."""
        return pathfinder.path_x(seed=self.seed)
