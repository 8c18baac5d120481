"""Tasks with real inputs and targets, made on the device that trains."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from dlrnn.common.figures import new_figure
from dlrnn.tasks.random import Random
from dlrnn.tasks.task import Batch, Task, wrong_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class RegressionTask(Task):
    """A task with real inputs and targets, judged by R2.

    A model of any kind fits that maps [B, input_length, d_input] to [B, input_length, d_output].
    Settings are fields: `length` is the paper's L, `seed` decides everything that is random.
    """

    length: int = 4096

    kind: ClassVar[str] = "regression"
    metric: ClassVar[str] = "R2"
    metric_names: ClassVar[tuple[str, ...]] = ("R2",)
    causal: ClassVar[bool] = True
    shortest: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < self.shortest:
            least = f"the length must be at least {self.shortest}, not {self.length}"
            raise ValueError(f"{self.name}: {least}")

    # ------------------------------------------------------------------------------ what it asks

    @property
    def d_input(self) -> int:
        """Features of a position: the task's own and two that say where it is."""
        return self._features() + 2

    @property
    def input_length(self) -> int:
        """T, the positions that a model reads."""
        return self.length

    @property
    def output_length(self) -> int:
        """The prediction is the model's output at so many last positions."""
        return self.length

    # ------------------------------------------------------------------------------ batches

    @property
    def on_device(self) -> bool:
        """Yes."""
        return True

    def sample(
        self,
        batch_size: int,
        *,
        split: str = "train",
        step: int | Tensor = 0,
        device: torch.device | str = "cpu",
        first: int = 0,
        of: int | None = None,
    ) -> Batch:
        """The samples `first .. first + batch_size - 1` of a step: always the same ones."""
        self._check_request(batch_size, split, step, first)
        random = Random(self.seed, split, step, first=first, count=batch_size, device=device)
        inputs, targets = self._draw(random)
        where = positions(self.input_length, device).expand(batch_size, -1, -1)
        return Batch(torch.cat((inputs, where), dim=-1).float(), targets.float())

    @abstractmethod
    def _features(self) -> int:
        """Features of the input, without the position."""

    @abstractmethod
    def _draw(self, random: Random) -> tuple[Tensor, Tensor]:
        """Inputs [B, T, features] and targets [B, T_out, d_output], float64."""

    def _fixed(self, draw: Callable[[Random], Tensor], device: torch.device) -> Tensor:
        """What is drawn once, from the seed alone, and kept (unless a graph is being captured,
        whose memory is not ours).
        """
        if device in self._kept:
            return self._kept[device]
        constant = draw(Random(self.seed, "constants", 0, first=0, count=1, device=device))
        if not torch.compiler.is_compiling() and not _captures(device):
            self._kept[device] = constant
        return constant

    @cached_property
    def _kept(self) -> dict[torch.device, Tensor]:
        return {}

    # ------------------------------------------------------------------------------ judging

    def prediction(self, output: Tensor, batch: Batch) -> Tensor:
        """The positions of a model's output [B, T, d_output] that count."""
        lengths = self.input_length, self.output_length
        fits = output.dim() == 3 and output.shape[1] in lengths
        found = output[:, -self.output_length :] if fits else output
        if not fits or found.shape != batch.targets.shape:
            shape = [len(batch.targets), self.input_length, self.d_output]
            raise wrong_output(self.name, output, shape)
        return found

    def loss(self, output: Tensor, batch: Batch, totals: Tensor | None = None) -> Tensor:
        """The mean squared error of the prediction."""
        totals = self.totals(batch) if totals is None else totals
        summed = F.mse_loss(self.prediction(output, batch), batch.targets, reduction="sum")
        return summed / totals[0].to(summed.dtype)

    def totals(self, batch: Batch) -> Tensor:
        """Numbers to predict."""
        size = batch.targets.numel()
        return torch.full((1,), size, dtype=torch.float64, device=batch.targets.device)

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """R2 of one batch; average over batches."""
        return {"R2": r2(self.prediction(output.detach(), batch), batch.targets)}

    # ------------------------------------------------------------------------------ a picture

    def preview(self, *, split: str = "train", step: int = 0) -> "Figure":
        """One sample: what goes in above, what should come out below."""
        batch = self.sample(1, split=split, step=step)
        inputs, targets = batch.inputs[0], batch.targets[0]
        figure = new_figure(9, 5)
        above, below = figure.subplots(2, 1, sharex=True)
        _trace(above, inputs[:, :-2], 0)
        _trace(below, targets, self.input_length - self.output_length)
        above.set_title(f"{self.name}: input (the two features of the position are not shown)")
        below.set_title(f"target: the last {self.output_length} positions")
        below.set(xlabel="position", xlim=(-0.5, self.input_length - 0.5))
        return figure


def _captures(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _trace(axes: "Axes", values: Tensor, start: int) -> None:
    """Up to two numbers a position as lines, more as an image."""
    stop = start + len(values)
    axes.spines[["top", "right"]].set_visible(False)
    if values.shape[1] > 2:
        extent = (start - 0.5, stop - 0.5, values.shape[1] - 0.5, -0.5)
        look: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "cmap": "RdBu_r"}
        axes.imshow(values.T.numpy(), extent=extent, vmin=-1, vmax=1, **look)
        axes.set_ylabel("feature")
        return
    look = {"linewidth": 0.9} if len(values) > 80 else {"marker": "o", "markersize": 3}
    for values_of_one, colour in zip(values.T, ("#0072b2", "#d55e00"), strict=False):
        axes.plot(range(start, stop), values_of_one, color=colour, **look)


def positions(length: int, device: torch.device | str) -> Tensor:
    """`cos(2 pi i / T), sin(2 pi i / T)`, [T, 2], float64."""
    angle = 2 * torch.pi * torch.arange(length, dtype=torch.float64, device=device) / length
    return torch.stack((angle.cos(), angle.sin()), dim=-1)


def r2(prediction: Tensor, targets: Tensor) -> Tensor:
    """`1 - MSE / variance`, the variance over every element of the batch, at least 1e-5."""
    variance = targets.var(correction=0).clamp(min=1e-5)
    return 1 - F.mse_loss(prediction, targets) / variance
