"""Tasks whose samples a generator on the CPU makes: drawn on the spot, or read from a set on disk.

A split that is read is shuffled anew each epoch, in windows of row groups, so that every group is
decoded once an epoch and the order is a function of (seed, epoch) alone.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int64

from dlrnn.tasks import shards
from dlrnn.tasks.random import Random
from dlrnn.tasks.task import Batch, Task

WINDOW = 64  # row groups that are shuffled together


@dataclass(frozen=True)
class SetTask(Task):
    """A task over a set: `folder` is where `dlrnn data build` wrote it, None draws new samples."""

    folder: str | None = None

    columns: ClassVar[tuple[str, ...]]  # what is read of a sample

    @abstractmethod
    def spec(self) -> shards.Spec:
        """The set, as the paper has it."""

    @abstractmethod
    def _drawn(self, split: str, index: int) -> Mapping[str, Any]:
        """Sample `index` of a split, its columns by their names."""

    @abstractmethod
    def _batch(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        """Samples put together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.folder is not None and not isinstance(self.folder, str):
            raise ValueError(f"{self.name}: folder must be a string, not {self.folder!r}")

    def count(self, split: str) -> int | None:
        """What the set on disk holds; None without one."""
        return None if self.folder is None else len(self._split(split))

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

        From a set on disk the training split comes shuffled, epoch after epoch, the others as they
        lie.
        """
        self._check_request(batch_size, split)
        start = step * (of or batch_size) + first
        numbers = range(start, start + batch_size)
        if self.folder is None:
            samples = [self._drawn(split, number) for number in numbers]
        else:
            samples = self._read(split, numbers)
        batch = self._batch(samples)
        if torch.device(device).type == "cuda":
            batch = Batch(*(None if part is None else part.pin_memory() for part in batch))  # type: ignore[arg-type]
        return batch.to(device)

    def _read(self, split: str, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
        stored = self._split(split)
        indices = [number % len(stored) for number in numbers]
        if split == "train":
            indices = [
                int(
                    shuffled(self.seed, number // len(stored), len(stored), stored.group_rows)[
                        index
                    ]
                )
                for number, index in zip(numbers, indices, strict=True)
            ]
        columns = stored.batch(indices)
        return [
            {name: values[place] for name, values in columns.items()}
            for place in range(len(indices))
        ]

    @lru_cache(maxsize=8)  # noqa: B019 (a task is a few settings)
    def _split(self, split: str) -> shards.Split:
        assert self.folder is not None
        made = shards.load_manifest(self.folder)
        if made["task"] != self.name:
            raise ValueError(f"{self.folder} is a set of {made['task']!r}, not of {self.name!r}")
        for key, value in self._fixed().items():
            if (was := made["parameters"].get(key)) != value:
                raise ValueError(f"{self.folder} has {key} {was!r}, not {value!r}")
        stored = shards.read(self.folder, split, columns=self.columns)
        if not len(stored):
            raise ValueError(f"{self.folder} has no {split} samples; build a larger set")
        return stored

    def _fixed(self) -> dict[str, Any]:
        """Parameters that a set on disk must share with this task."""
        return {}


@lru_cache(maxsize=4)
def shuffled(seed: int, epoch: int, count: int, group: int) -> Int64[np.ndarray, "count"]:
    """The order of an epoch: groups are shuffled, then samples within WINDOW groups."""
    of_group = Random(seed, "train", epoch, first=0, count=1, device="cpu")
    groups = of_group.bits(-(-count // group))[0].numpy()
    rank = np.argsort(np.argsort(groups, kind="stable"), kind="stable")  # of each group
    samples = of_group.bits(count)[0].numpy()
    return np.lexsort((samples, rank[np.arange(count) // group] // WINDOW))
