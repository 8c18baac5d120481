"""What a task is: it makes batches, says what a model must take and give, and judges it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from dlrnn.tasks.random import SPLITS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IGNORED = -1
"""The target of a position that does not count."""


class Batch(NamedTuple):
    """A model maps inputs to an output that `loss` and `metrics` judge by the targets.

    inputs are real, [B, T, d_input], or tokens, [B, T] int64; targets real, [B, T_out, d_output],
    or classes, [B, T] (IGNORED where nothing is asked) or [B]. `lengths` [B] where sequences are
    padded and a model must not look at the padding.
    """

    inputs: Tensor
    targets: Tensor
    lengths: Tensor | None = None

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch there; copies from pinned memory to a GPU do not wait."""
        ahead = torch.device(device).type == "cuda"
        inputs, targets, lengths = (
            None if part is None else part.to(device, non_blocking=ahead) for part in self
        )
        assert inputs is not None
        assert targets is not None
        return Batch(inputs, targets, lengths)


def _is_whole(value: object) -> bool:
    return isinstance(value, int | Integral | torch.SymInt) and not isinstance(value, bool)


def wrong_output(name: str, output: Tensor, shape: Sequence[int]) -> ValueError:
    """Of a model that was not made for the task."""
    have = list(output.shape)
    return ValueError(f"{name}: the output must have the shape {list(shape)}, not {have}")


@dataclass(frozen=True)
class Task(ABC):
    """One question to a sequence model. Settings are fields; `seed` decides all that is random."""

    seed: int = 0

    name: ClassVar[str]
    kind: ClassVar[str]  # regression, tagging, classification or language
    metric: ClassVar[str]  # the entry of `metrics` that counts, or "loss"
    less_is_better: ClassVar[bool] = False  # of that metric
    probes: ClassVar[str]
    metric_names: ClassVar[tuple[str, ...]]  # the entries of `metrics`
    causal: ClassVar[bool]  # made for models that read from left to right
    pair: ClassVar[bool] = False  # a sample is two sequences, [B, 2, T]
    drawable: ClassVar[bool] = True  # samples can be made without a set on disk
    pooled: ClassVar[bool] = False  # one answer a sequence instead of one a position
    gives_targets: ClassVar[bool] = False  # a model gets them, too: it answers with -log p of each

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.type in (int, "int") and (
                not isinstance(value, int) or isinstance(value, bool)
            ):
                whole = f"{setting.name} must be a whole number, not {value!r}"
                raise ValueError(f"{self.name}: {whole}")

    # ------------------------------------------------------------------------------ what it asks

    @property
    def d_input(self) -> int | None:
        """Features of a position, None if it is a token."""
        return None

    @property
    def vocabulary(self) -> int | None:
        """Number of tokens, None if a position has features."""
        return None

    @property
    @abstractmethod
    def d_output(self) -> int:
        """Numbers to predict, or classes, of a position (of a sequence, if pooled)."""

    @property
    @abstractmethod
    def input_length(self) -> int:
        """T, the positions that a model reads."""

    @property
    @abstractmethod
    def output_length(self) -> int:
        """The prediction is the model's output at so many last positions; 1 if pooled."""

    def digest(self) -> str | None:
        """Of the set on disk; None where samples are drawn."""
        return None

    def files(self) -> dict[str, bytes]:
        """What must be kept with a model of it, by name: a tokenizer."""
        return {}

    # ------------------------------------------------------------------------------ batches

    @property
    def on_device(self) -> bool:
        """Are batches made on the device itself, from a step that may be a tensor there?"""
        return False

    def count(self, split: str) -> int | None:
        """Samples of a split; None if every step has new ones."""
        return None

    @abstractmethod
    def sample(
        self,
        batch_size: int,
        *,
        split: str = "train",
        step: int = 0,
        device: torch.device | str = "cpu",
        first: int = 0,
        of: int | None = None,
    ) -> Batch:
        """The samples `first .. first + batch_size - 1` of a step's `of`: always the same ones.

        `of` is the whole batch of which this may be a part; by default this is the whole.
        """

    def _check_request(self, batch_size: int, split: str, step: int | Tensor, first: int) -> None:
        if not _is_whole(batch_size) or batch_size < 1:
            raise ValueError(f"batch_size must be a whole number of at least 1, not {batch_size!r}")
        if split not in SPLITS[:3]:
            raise ValueError(f"split must be train, validation or test, not {split!r}")
        for name, value in (("step", step), ("first", first)):
            if isinstance(value, Tensor):  # of a GPU: what it holds is not read
                if value.dim() or value.dtype != torch.int64:
                    raise ValueError(f"{name}, if it is a tensor, must be one number of int64")
            elif not _is_whole(value) or value < 0:
                raise ValueError(f"{name} must be a whole number of at least 0, not {value!r}")

    # ------------------------------------------------------------------------------ judging

    @abstractmethod
    def loss(self, output: Tensor, batch: Batch, totals: Tensor | None = None) -> Tensor:
        """What training makes small.

        With the `totals` of a whole batch, the losses of its parts add up to the whole's.
        """

    @abstractmethod
    def totals(self, batch: Batch) -> Tensor:
        """What the loss divides by; those of the parts of a batch add up, too."""

    @abstractmethod
    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Of one batch; average over batches."""

    def weight(self, batch: Batch) -> int:
        """Of a batch in that average: its sequences, so that a smaller last one counts less."""
        return batch.inputs.shape[0]

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        """Averages of loss and metrics, and what follows from them."""
        return means

    @abstractmethod
    def preview(self, *, split: str = "train", step: int = 0) -> "Figure":
        """One sample as a picture."""
