"""Tasks whose samples are made on the CPU: generated when they are needed, or read from disk.

The training split of a data set on disk is shuffled anew in each epoch, within windows of row
groups: every group is decoded once per epoch, and the order depends on (seed, epoch) alone.
"""

import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from dlrnn.tasks.base import Batch, Request, Task
from dlrnn.tasks.random import Random
from dlrnn.tasks.storage import shards
from dlrnn.tasks.storage.specs import GeneratedSet, ImportedSet, Sample

WINDOW = 64  # row groups whose samples are shuffled together


@dataclass(frozen=True)
class SetTask(Task):
    """A task over a data set in `folder` (see `dlrnn data`); None generates new samples."""

    folder: str | os.PathLike[str] | None = None

    columns: ClassVar[tuple[str, ...]]  # those that the task reads
    required: ClassVar[tuple[str, ...]] = ()  # parameters that a data set must share with `spec`
    generated: ClassVar[tuple[str, ...]] = ()  # others that it must share unless it is a release

    @abstractmethod
    def spec(self) -> GeneratedSet | ImportedSet:
        """The data set with the paper's settings."""

    @abstractmethod
    def _batch(self, samples: Sequence[Sample]) -> Batch:
        """Collate samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.folder is not None:
            if not isinstance(self.folder, str | os.PathLike):
                raise ValueError(f"{self.name}: folder must be a path, not {self.folder!r}")
            object.__setattr__(self, "folder", str(self.folder))
        self.spec()  # raises for invalid settings

    def count(self, split: str) -> int | None:
        """Return the samples of a split on disk; None without a data set."""
        return None if self.folder is None else len(self._split(split))

    def digest(self) -> str | None:
        """Return the SHA-256 of the data set's manifest; None without a data set."""
        if self.folder is None:
            return None
        return str(shards.load_manifest(self.folder)["sha256"])

    def make_batch(self, request: Request) -> Batch:
        """Epochs of the training split on disk are shuffled, the other splits are in file order."""
        batch_size, split, _, device, _, of = request
        step, first = int(request.step), int(request.first)  # 32-bit integers would overflow
        of = batch_size if of is None else of
        if of < first + batch_size:
            part = f"first + batch_size, {first} + {batch_size}"
            raise ValueError(f"of, the whole batch, must be at least {part}, not {of}")
        start = step * of + first
        numbers = range(start, start + batch_size)
        batch = self._batch((self._drawn if self.folder is None else self._read)(split, numbers))
        if torch.device(device).type == "cuda":
            batch = Batch(*(None if part is None else part.pin_memory() for part in batch))  # type: ignore[arg-type]
        return batch.to(device)

    def _drawn(self, split: str, numbers: Sequence[int]) -> list[Sample]:
        spec = self.spec()
        if isinstance(spec, ImportedSet):
            raise ValueError(
                f"{self.name} is real data and cannot be generated: import it once with "
                f"`dlrnn data import {self.name} PATH` and pass its folder to the task"
            )
        return [spec.sample(split, number) for number in numbers]

    def _read(self, split: str, numbers: Sequence[int]) -> list[Sample]:
        stored = self._split(split)
        indices = [number % len(stored) for number in numbers]
        if split == "train":
            sizes = len(stored), stored.shard_rows, stored.group_rows
            indices = [
                int(shuffled(self.seed, number // len(stored), *sizes)[index])
                for number, index in zip(numbers, indices, strict=True)
            ]
        return list(stored.batch(indices))

    def _existing(self) -> Path:
        """Return the folder of the data set, which must exist."""
        assert self.folder is not None
        folder, how = Path(self.folder).resolve(), "build" if self.drawable else "import"
        if not folder.exists():
            source = "" if self.drawable else " FOLDER_OR_ARCHIVE"
            make = f"create it with `dlrnn data {how} {self.name}{source}`"
            other = "set task.settings.folder (for an existing run: in config.json)"
            raise ValueError(f"there is no folder {folder}: {make}, or {other}")
        return folder

    def _split(self, split: str) -> shards.Split:
        folder = self._existing()
        try:
            status = (folder / shards.MANIFEST).stat()
            stamp = status.st_mtime_ns, status.st_size
        except OSError:
            stamp = None
        return _opened(self, folder, stamp, split)


@lru_cache(maxsize=8)
def _opened(task: SetTask, folder: Path, stamp: tuple[int, int] | None, split: str) -> shards.Split:
    """Return a reader, which is shared, with its cache, as long as the manifest has one stamp."""
    manifest = shards.load_manifest(folder)
    if manifest["task"] != task.name:
        found = f"{manifest['task']!r:.60}, not of {task.name!r}"
        raise ValueError(f"{task.folder} is a data set of {found}")
    expected, parameters = task.spec().parameters, manifest["parameters"]
    for key in task.required + (() if "release" in parameters else task.generated):
        if (found := parameters.get(key)) != expected[key]:
            raise ValueError(
                f"{task.folder} has {key} {found!r:.60}, not {expected[key]!r}: build another set"
            )
    stored = shards.Split(folder, split, columns=task.columns)
    if not len(stored):
        how = "build" if task.drawable else "import"
        raise ValueError(f"{task.folder} has no {split} samples; {how} a larger data set")
    return stored


def labels_of(samples: Sequence[Sample]) -> Int64[Tensor, " B"]:
    """Return the column `label`."""
    return torch.tensor([int(sample["label"]) for sample in samples])


@lru_cache(maxsize=4)
def shuffled(
    seed: int, epoch: int, count: int, shard_rows: int, group_rows: int
) -> Int64[np.ndarray, " count"]:
    """Return the order of an epoch: groups are shuffled, then samples within WINDOW groups."""
    shard, row = np.divmod(np.arange(count), shard_rows)
    group = shard * -(-shard_rows // group_rows) + row // group_rows  # of each sample
    random = Random(seed, "train", epoch, first=0, count=1, device="cpu")
    groups = random.bits(int(group[-1]) + 1)[0].numpy()
    rank = np.argsort(np.argsort(groups, kind="stable"), kind="stable")  # of each group
    samples = random.bits(count)[0].numpy()
    return np.lexsort((samples, rank[group] // WINDOW))
