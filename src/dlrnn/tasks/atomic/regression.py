"""Tasks whose inputs and targets are real numbers, generated on the training device."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from dlrnn.common.figures import new_figure
from dlrnn.tasks.atomic import pictures
from dlrnn.tasks.base import Batch, Number, Request, Task, element_count, r2
from dlrnn.tasks.random import Random

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class RegressionTask(Task):
    """A task that asks for real numbers; its metric is R2.

    A model maps [B, input_length, d_input] to [B, input_length, d_output]; its last
    `output_length` positions are the prediction. `length` is the paper's L.
    """

    length: int = 4096

    kind: ClassVar[str] = "regression"
    metric: ClassVar[str] = "R2"
    metric_names: ClassVar[tuple[str, ...]] = ("R2",)
    causal: ClassVar[bool] = True
    limits: ClassVar[Mapping[str, tuple[Number, Number]]] = {"length": (1, math.inf)}
    on_device: ClassVar[bool] = True
    heights: ClassVar[tuple[int, int]] = (1, 1)
    """The ratio of the heights of input and target in a picture."""

    @property
    def features(self) -> int:
        """Features of a position, without the two that encode the position itself."""
        return 1

    @property
    def d_input(self) -> int:
        """The task's features, and two that encode the position."""
        return self.features + 2

    @property
    def d_output(self) -> int:
        """One number."""
        return 1

    @property
    def input_length(self) -> int:
        """The length L."""
        return self.length

    # ---------------------------------------------------------------------------------- batches

    def make_batch(self, request: Request) -> Batch:
        """What `generate` returns, in fp32, with the encoded positions behind the features."""
        batch_size, split, step, device, first, _ = request
        random = Random(self.seed, split, step, first=first, count=batch_size, device=device)
        inputs, targets = self.generate(random)
        position = positions(self.input_length, device).expand(batch_size, -1, -1)
        return Batch(torch.cat((inputs, position), dim=-1).float(), targets.float())

    def generate(self, random: Random) -> tuple[Tensor, Tensor]:
        """Return inputs [B, T, features] and targets [B, T_out, d_output] in float64."""
        raise ValueError(f"{self.name}: its class must define generate, or else make_batch")

    def _constant(self, draw: Callable[[Random], Tensor], device: torch.device) -> Tensor:
        """Return numbers drawn from the seed alone, cached for each device.

        They are not cached while a CUDA graph is captured, because the graph owns their memory.
        """
        if device in self.constants:
            return self.constants[device]
        constant = draw(Random(self.seed, "constants", 0, first=0, count=1, device=device))
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not (torch.compiler.is_compiling() or capturing):
            self.constants[device] = constant
        return constant

    @cached_property
    def constants(self) -> dict[torch.device, Tensor]:
        """Numbers that are the same in every sample, on each device that has used them."""
        return {}

    # ---------------------------------------------------------------------------------- scores

    def prediction(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the last `output_length` positions of a model's output [B, T, d_output]."""
        found = output
        if output.dim() == 3 and output.shape[1] == self.input_length:
            found = output[:, -self.output_length :]
        if found.shape != batch.targets.shape:
            self.check_output(output, (len(batch.targets), self.input_length, self.d_output))
        return found

    def loss(self, output: Tensor, batch: Batch, totals: Tensor | None = None) -> Tensor:
        """Mean squared error of the prediction."""
        totals = self.totals(batch) if totals is None else totals
        summed = F.mse_loss(self.prediction(output, batch), batch.targets, reduction="sum")
        return summed / totals[0].to(summed.dtype)

    def totals(self, batch: Batch) -> Tensor:
        """The number of values to predict."""
        return element_count(batch.targets)

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """R2 of one batch."""
        return {"R2": r2(self.prediction(output.detach(), batch), batch.targets)}

    # ---------------------------------------------------------------------------------- picture

    def preview(self, *, split: str = "train", step: int = 0) -> "Figure":
        """Draw the input of one sample above its target."""
        batch = self.sample(1, split=split, step=step)
        figure = new_figure(10, 6.5)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=self.heights)
        self._draw(above, below, batch.inputs[0, :, : self.features], batch.targets[0])
        start = self.input_length - self.output_length
        pictures.frame(above, below, self.input_length, start)
        return self.captioned(figure)

    def _draw(self, above: "Axes", below: "Axes", inputs: Tensor, targets: Tensor) -> None:
        """Draw inputs [T, features] and targets [T_out, d_output]."""
        pictures.sequence(above, inputs)
        pictures.sequence(below, targets, self.input_length - self.output_length)


def positions(length: int, device: torch.device | str) -> Tensor:
    """Return `cos(2 pi i / T), sin(2 pi i / T)` of every position i, [T, 2] in float64."""
    angle = 2 * torch.pi * torch.arange(length, dtype=torch.float64, device=device) / length
    return torch.stack((angle.cos(), angle.sin()), dim=-1)
