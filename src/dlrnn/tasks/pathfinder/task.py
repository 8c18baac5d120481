"""The Pathfinder tasks: a class for every pixel (segmentation), or one for the image (LRA)."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from dlrnn.common.figures import new_figure
from dlrnn.tasks.base import (
    Batch,
    ClassificationTask,
    ClassTask,
    balanced_cross_entropy,
    class_counts,
    macro_scores,
)
from dlrnn.tasks.pathfinder import generator
from dlrnn.tasks.storage import shards
from dlrnn.tasks.storage.sets import SetTask, labels_of
from dlrnn.tasks.storage.specs import Sample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# a numpy table: torch would start a team of threads in each of the threads that draw
_LEVELS = np.arange(256, dtype=np.float32) / 127.5 - 1


@dataclass(frozen=True)
class _Pathfinder(ClassTask, SetTask):
    """Inputs are pixels, row by row, mapped to [-1, 1]."""

    causal: ClassVar[bool] = False
    d_input: ClassVar[int] = 1  # the pixel
    required: ClassVar[tuple[str, ...]] = ("resolution",)
    generated: ClassVar[tuple[str, ...]] = ("generator",)

    @abstractmethod
    def spec(self) -> generator.PathfinderGenerator:
        """The data set with the paper's settings."""

    @property
    def input_length(self) -> int:
        """The pixels of an image."""
        return self.spec().resolution ** 2

    @property
    def generator_version(self) -> int | None:
        """The version of the drawn images, or of those in the data set; a release has none."""
        if self.folder is None:
            return generator.VERSION
        found = shards.load_manifest(self._existing())["parameters"].get("generator")
        return found if isinstance(found, int) else None

    def _pixels(self, samples: Sequence[Sample]) -> Tensor:
        pixels = np.stack([sample["image"] for sample in samples])
        return torch.from_numpy(_LEVELS[pixels][..., None])  # [B, R R, 1]

    def preview(self, *, split: str = "train", step: int = 0) -> "Figure":
        """Draw four images, black on white; below them their masks: 0 white, 1 gray, 2 black."""
        batch = self.sample(4, split=split, step=step)
        size, masks = (self.spec().resolution,) * 2, batch.targets.dim() > 1
        figure = new_figure(12, 7.5 if masks else 4.5)
        axes = figure.subplots(2 if masks else 1, 4, squeeze=False)
        for image, pixels, target in zip(axes.T, batch.inputs, batch.targets, strict=True):
            image[0].imshow(pixels.view(size).numpy(), cmap="gray_r", vmin=-1, vmax=1)
            connected = "connected" if target.max() == (2 if masks else 1) else "not connected"
            image[0].set_title(connected)
            if masks:
                image[1].imshow(target.view(size).numpy(), cmap="gray_r", vmin=0, vmax=2)
                image[1].set_title("target: 2 black, 1 gray, 0 white", fontsize=9)
            for each in image:
                each.set(xticks=[], yticks=[])
        return self.captioned(figure)


@dataclass(frozen=True)
class PathfinderSegmentation(_Pathfinder):
    """The input is the pixels, row by row, of an image with two long dashed paths among short ones.
    The output is a class for each pixel: 2 on a long path with a disc at both ends, 1 on any other
    long path, 0 elsewhere.

    The paper has the resolutions 128, 256 and 512; the settings of others are scaled.
    """

    resolution: int = 128

    name: ClassVar[str] = "pathfinder-segmentation"
    kind: ClassVar[str] = "tagging"
    metric: ClassVar[str] = "macro_f1"
    metric_names: ClassVar[tuple[str, ...]] = ("macro_f1", "macro_accuracy")
    probes: ClassVar[str] = "long-range spatial relations, at every pixel"
    columns: ClassVar[tuple[str, ...]] = ("image", "mask")
    d_output: ClassVar[int] = 3

    def spec(self) -> generator.PathfinderGenerator:
        """100000 images of this resolution."""
        return generator.segmentation(self.resolution, seed=self.seed)

    def _batch(self, samples: Sequence[Sample]) -> Batch:
        masks = np.stack([sample["mask"] for sample in samples], dtype=np.int64)
        return Batch(self._pixels(samples), torch.from_numpy(masks))

    def loss(self, output: Tensor, batch: Batch, totals: Tensor | None = None) -> Tensor:
        """Cross-entropy, each class weighted by the inverse of its count in the batch."""
        return balanced_cross_entropy(self.logits(output, batch), batch.targets, totals)

    def totals(self, batch: Batch) -> Tensor:
        """The number of pixels of each class."""
        return class_counts(batch.targets, self.d_output)

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Macro F1 and macro accuracy of one batch."""
        return macro_scores(self.logits(output, batch), batch.targets)


@dataclass(frozen=True)
class Pathfinder(_Pathfinder, ClassificationTask):
    """The input is the 32 x 32 pixels, row by row, of an image with two long dashed paths among
    short ones, and two discs. The output is 1 if one path connects the discs, else 0.
    """

    name: ClassVar[str] = "pathfinder"
    probes: ClassVar[str] = "long-range spatial relations"
    columns: ClassVar[tuple[str, ...]] = ("image", "label")
    d_output: ClassVar[int] = 2  # not connected, connected

    def spec(self) -> generator.PathfinderGenerator:
        """LRA's 32 x 32."""
        return generator.lra(seed=self.seed)

    def _batch(self, samples: Sequence[Sample]) -> Batch:
        return Batch(self._pixels(samples), labels_of(samples))


@dataclass(frozen=True)
class PathX(Pathfinder):
    """The input is the 128 x 128 pixels, row by row, of an image with two long dashed paths among
    short ones, and two discs. The output is 1 if one path connects the discs, else 0.
    """

    name: ClassVar[str] = "path-x"
    probes: ClassVar[str] = "long-range spatial relations over 16384 positions"

    def spec(self) -> generator.PathfinderGenerator:
        """LRA's 128 x 128."""
        return generator.path_x(seed=self.seed)
