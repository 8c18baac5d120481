"""Tasks whose samples a generator on the CPU makes: drawn on the spot, or read from a set on disk.

A split that is read is shuffled anew each epoch, in windows of row groups, so that every group is
decoded once an epoch and the order is a function of (seed, epoch) alone.
"""

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
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

    folder: str | os.PathLike[str] | None = None

    columns: ClassVar[tuple[str, ...]]  # what is read of a sample

    @abstractmethod
    def spec(self) -> shards.Spec:
        """The set, as the paper has it."""

    @abstractmethod
    def _drawn(self, split: str, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
        """Samples of a split, each its columns by their names."""

    @abstractmethod
    def _batch(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        """Samples put together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.folder is not None:
            if not isinstance(self.folder, str | os.PathLike):
                raise ValueError(f"{self.name}: folder must be a path, not {self.folder!r}")
            object.__setattr__(self, "folder", str(self.folder))
        self.spec()  # settings that cannot be are refused here

    def count(self, split: str) -> int | None:
        """What the set on disk holds; None without one."""
        return None if self.folder is None else len(self._split(split))

    def digest(self) -> str | None:
        """Of the set on disk; None without one."""
        if self.folder is None:
            return None
        folder = Path(self.folder).resolve()
        return str(_manifest(folder, _stamp(folder))["sha256"])

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
        self._check_request(batch_size, split, step, first)
        step, first = int(step), int(first)  # not of 32 bits, which wrap
        of = batch_size if of is None else of
        if of < first + batch_size:
            part = f"first + batch_size, {first} + {batch_size}"
            raise ValueError(f"of, the whole batch, must be at least {part}, not {of}")
        start = step * of + first
        numbers = range(start, start + batch_size)
        make = self._drawn if self.folder is None else self._read
        batch = self._batch(make(split, numbers))
        if torch.device(device).type == "cuda":
            batch = Batch(*(None if part is None else part.pin_memory() for part in batch))  # type: ignore[arg-type]
        return batch.to(device)

    def _read(self, split: str, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
        stored = self._split(split)
        indices = [number % len(stored) for number in numbers]
        if split == "train":
            sizes = len(stored), stored.shard_rows, stored.group_rows
            indices = [
                int(shuffled(self.seed, number // len(stored), *sizes)[index])
                for number, index in zip(numbers, indices, strict=True)
            ]
        columns = stored.batch(indices)
        return [
            {name: values[place] for name, values in columns.items()}
            for place in range(len(indices))
        ]

    def _split(self, split: str) -> shards.Split:
        assert self.folder is not None
        folder, how = Path(self.folder).resolve(), "build" if self.drawable else "import"
        if not folder.exists():
            where = f"make it with `dlrnn data {how} {self.name}`"
            other = "say another one, task.settings.folder (a run that has begun: in config.json)"
            raise ValueError(f"there is no folder {folder}: {where}, or {other}")
        stamp = _stamp(folder)
        made = _manifest(folder, stamp)
        if made["task"] != self.name:
            raise ValueError(
                f"{self.folder} is a set of {made['task']!r:.60}, not of {self.name!r}"
            )
        for key, value in self._fixed().items():
            if (was := made["parameters"].get(key)) != value:
                raise ValueError(f"{self.folder} has {key} {was!r:.60}, not {value!r}")
        stored = _opened(folder, stamp, split, self.columns)
        if not len(stored):
            raise ValueError(f"{self.folder} has no {split} samples; {how} a larger set")
        return stored

    @abstractmethod
    def _fixed(self) -> dict[str, Any]:
        """Parameters that a set on disk must share with this task."""


def _stamp(folder: Path) -> tuple[int, int] | None:
    """Another one when the set was built anew; None without a manifest."""
    try:
        status = (folder / shards.MANIFEST).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


@lru_cache(maxsize=8)
def _manifest(folder: Path, stamp: tuple[int, int] | None) -> dict[str, Any]:
    return shards.load_manifest(folder)


@lru_cache(maxsize=8)
def _opened(
    folder: Path, stamp: tuple[int, int] | None, split: str, columns: tuple[str, ...]
) -> shards.Split:
    """The same reader, with what it has decoded, as long as the set is the same."""
    return shards.read(folder, split, columns=columns)


@lru_cache(maxsize=4)
def shuffled(
    seed: int, epoch: int, count: int, shard_rows: int, group_rows: int
) -> Int64[np.ndarray, " count"]:
    """The order of an epoch: groups are shuffled, then samples within WINDOW groups."""
    shard, row = np.divmod(np.arange(count), shard_rows)
    group = shard * -(-shard_rows // group_rows) + row // group_rows  # of each sample
    random = Random(seed, "train", epoch, first=0, count=1, device="cpu")
    groups = random.bits(int(group[-1]) + 1)[0].numpy()
    rank = np.argsort(np.argsort(groups, kind="stable"), kind="stable")  # of each group
    samples = random.bits(count)[0].numpy()
    return np.lexsort((samples, rank[group] // WINDOW))
