"""A run's folder, which no other run can overwrite.

config.json        the complete configuration
environment.json   versions, device, git revision; `then`: what it went on with, if it differs
records.jsonl      losses and metrics by step: the same bytes however often the run was killed
timing.jsonl       seconds and memory by step: never the same twice
snapshots.jsonl    eigenvalues and kernels at a few steps
step-*.safetensors the last two checkpoints; best.safetensors the best model
tokenizer.json     of a language model
result.json        written last: the run is complete
"""

import contextlib
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from dlrnn._version import __version__
from dlrnn.analysis.snapshot import SNAPSHOTS
from dlrnn.common.files import (
    lock,
    naming,
    open_append,
    require_regular,
    require_single,
    write_whole,
)
from dlrnn.common.untrusted import MOST_LINES, fit_fields, parse_json, read_bytes
from dlrnn.models.pretrained import WEIGHTS
from dlrnn.train.config import RunConfig, from_json

CONFIG, ENVIRONMENT, RESULT = "config.json", "environment.json", "result.json"
RECORDS, TIMING, LOCK = "records.jsonl", "timing.jsonl", "lock"
_ENVIRONMENT = {
    **{"dlrnn": str, "git": str | None, "changed": bool, "python": str, "torch": str},
    **{"device": str, "threads": int},
}
_RESULT = {
    **{"task": str, "metric": str, "value": float, "best": float, "best_step": int},
    **{"steps": int, "stopped": str, "seed": int, "parameters": int, "seconds": float},
    **{"seconds_from_step": int, "device": str},
}


APPENDED = (RECORDS, TIMING, SNAPSHOTS)


class InUseError(ValueError):
    """Another process trains the run."""


class RunFolder:
    """One run on disk."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def create(
        cls, path: str | Path, config: RunConfig, files: dict[str, bytes] | None = None
    ) -> "RunFolder":
        """A new folder; one that holds a run, or anything else, is refused.

        `files` of the task are kept with it. A folder in which nothing was trained yet may be begun
        again. Call it `locked`.
        """
        folder = cls(path)
        check_links(folder.path)
        files = {ENVIRONMENT: json.dumps(environment(), indent=1).encode(), **(files or {})}
        if not folder._is_bare(files):
            if (folder.path / RESULT).exists():
                raise ValueError(f"{path} holds a run that is complete; choose another --out")
            if (folder.path / CONFIG).exists():
                go_on = f"go on with `dlrnn train --resume {path}`, or choose another --out"
                raise ValueError(f"{path} holds a run that was stopped; {go_on}")
            raise ValueError(f"{path} is not empty; choose another --out")
        for name, content in files.items():
            write_whole(folder.path / name, content)
        write_whole(folder.path / CONFIG, config.to_json().encode())
        return folder

    def check_foreign(self, files: Iterable[str]) -> None:
        """Before anything is written, even a lock: a folder that does not look like a run's."""
        there = self.path.is_dir() and not any((self.path / n).exists() for n in (CONFIG, LOCK))
        if there and not self._is_bare([ENVIRONMENT, *files]):
            raise ValueError(f"{self.path} is not empty; choose another --out")

    def _is_bare(self, files: Iterable[str]) -> bool:
        """Empty, or stopped before anything was trained."""
        first = {CONFIG, *files}
        first |= {f"{name}.part" for name in first}
        first |= {LOCK, RECORDS, TIMING, SNAPSHOTS, "tensorboard", "wandb"}
        records = self.path / RECORDS
        untouched = not records.exists() or records.stat().st_size == 0
        return untouched and {path.name for path in self.path.iterdir()} <= first

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """One that is there."""
        path = Path(path)
        if not (path / CONFIG).is_file():
            near = sorted(
                other.parent.name for other in path.parent.glob(f"{path.name}-*/{CONFIG}")
            )
            beside = f"; beside it there is {', '.join(near)}" if near else ""
            if not path.exists():
                raise ValueError(f"there is no folder {path}{beside}")
            below = [str(each.parent) for each in islice(path.rglob(CONFIG), 3)]
            there = f"; below it there is {', '.join(below)}" if below else ""
            raise ValueError(
                f"{path} is not the folder of a run: it has no {CONFIG}{there or beside}"
            )
        if (path / WEIGHTS).is_file():
            raise ValueError(f"{path} is an exported model; name the run that it was made from")
        check_links(path)
        return cls(path)

    def note_environment(self, *, anew: bool) -> None:
        """Where a run goes on, or begins anew, if that is elsewhere, or with another version."""
        path = self.path / ENVIRONMENT
        if anew:
            write_whole(path, json.dumps(environment(), indent=1).encode())
            return
        try:
            content = parse_json(read_bytes(path), str(path))
            schema = {**_ENVIRONMENT, "then": list[dict[str, Any]]}
            first = fit_fields(content, schema, str(path), needed=())
        except (ValueError, FileNotFoundError):  # damaged, and no run needs it
            return
        then: list[dict[str, Any]] = first.pop("then", [])
        if (now := environment()) != (then or [first])[-1]:
            content = {**first, "then": [*then, now]}
            write_whole(path, json.dumps(content, indent=1).encode())

    @property
    def config(self) -> RunConfig:
        """As it was begun with."""
        path = self.path / CONFIG
        return from_json(read_bytes(path), str(path))

    @property
    def result(self) -> dict[str, Any] | None:
        """None while the run is not complete."""
        advice = f"remove it and `dlrnn train --resume {self.path}`"
        found = self.values(RESULT, advice)
        if found is None:
            return None
        try:
            needed = ("steps", "best", "metric", "value", "best_step")
            return fit_fields(found, _RESULT, str(self.path / RESULT), needed=needed)
        except ValueError as error:
            raise ValueError(f"{self.path / RESULT} is damaged: {advice}") from error

    def values(self, name: str, advice: str = "") -> dict[str, Any] | None:
        """The values in a file of JSON, by name; None if there is none."""
        path = self.path / name
        with contextlib.suppress(FileNotFoundError):
            with contextlib.suppress(ValueError):
                found = parse_json(read_bytes(path), str(path), nan=True)
                if isinstance(found, dict):
                    return found
            raise ValueError(f"{path} is damaged{': ' if advice else ''}{advice}")
        return None

    def records(self) -> list[dict[str, Any]]:
        """Every line of records.jsonl; a truncated last line is ignored."""
        path, found = self.path / RECORDS, []
        lines = read_bytes(path, MOST_LINES).split(b"\n")[:-1] if path.exists() else []
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            try:
                each = parse_json(line, where, nan=True)
                known = {"step": int, "split": Literal["train", "validation", "test"]}
                names = each if isinstance(each, dict) else ()
                schema = {**{str(name): float for name in names}, **known}
                record = fit_fields(each, schema, where, needed=known)
                if record["split"] == "train" and "loss" not in record:
                    raise ValueError("it has no loss")
                found.append(record)
            except ValueError as error:
                raise ValueError(f"{where}, is not a record of a run: {error}") from error
        return found

    def evaluations(self, metric: str) -> list[dict[str, Any]]:
        """The records of the validation split, which all have this metric."""
        found = [each for each in self.records() if each["split"] == "validation"]
        for each in found:
            if metric not in each:
                where = f"{self.path / RECORDS}, step {each['step']}"
                raise ValueError(f"{where}: a validation has {metric}, and this one has not")
        return found

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One process a run, from before it is made; the lock goes with the process."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; a folder was expected")
        self.path.mkdir(parents=True, exist_ok=True)
        check_links(self.path)
        for name in APPENDED:
            require_single(self.path / name)
        with open_append(self.path / LOCK) as file:
            try:
                lock(file.fileno(), wait=False)
            except BlockingIOError:
                raise InUseError(f"{self.path} is in use by another process") from None
            yield


def check_links(folder: Path) -> None:
    """Refuse a folder with links or special files in it: writing to one would write elsewhere."""
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.is_symlink() or not path.is_dir():
                require_regular(path)


class Lines:
    """A file of JSON lines that is only appended to.

    On resume it is cut back to the `length` that it had at the checkpoint; without one, a last line
    that was cut becomes a line of its own.
    """

    def __init__(self, path: Path, length: int | None, sha256: str | None = None) -> None:
        self.path = path
        there = path.lstat().st_size if path.exists() else 0
        if max(there, length or 0) > MOST_LINES:
            raise ValueError(f"{path} has more than {MOST_LINES} bytes, which no run writes")
        if length is not None and there < length:
            has = f"is shorter ({there} bytes) than" if path.exists() else "is gone, which has"
            raise ValueError(f"{path} {has} {length} bytes of its checkpoint: begin a new run")
        self._digest = hashlib.sha256()
        self._file = open_append(path)
        with naming(path):
            if length is not None:
                self._file.truncate(length)
            self._file.seek(0)
            before = self._file.read()
            self._digest.update(before)
            if before and not before.endswith(b"\n"):
                self._file.write(b"\n")  # after a line that a full disk has cut
        if sha256 not in (None, self.sha256):
            self._file.close()
            raise ValueError(f"{path} is not as it was at the checkpoint: begin a new run")

    def append(self, values: dict[str, Any]) -> None:
        """Add a line; it is in the file when this returns."""
        line = json.dumps(values, separators=self.separators).encode() + b"\n"
        self._digest.update(line)
        with naming(self.path):
            self._file.write(line)
            self._file.flush()

    separators: tuple[str, str] | None = None

    @property
    def sha256(self) -> str:
        """Of all lines so far."""
        return self._digest.hexdigest()

    def length(self) -> int:
        """Bytes that are safe on the disk."""
        with naming(self.path):
            os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """No more lines. After an error the buffer may still hold some, which are lost."""
        with contextlib.suppress(OSError):
            self._file.close()


def environment() -> dict[str, Any]:
    """What a result may depend on, besides its configuration."""
    cuda = torch.cuda.is_available()
    return {
        "dlrnn": __version__,
        **checkout(Path(__file__)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "threads": torch.get_num_threads(),
    }


def checkout(source: Path) -> dict[str, Any]:
    """The commit of a source file, and whether its checkout differs from it.

    None outside of one, and for a copy that only lies in one: in a virtual environment, say.
    """
    if _git(source, "ls-files", "--error-unmatch", source.name) is None:
        return {"git": None, "changed": False}
    changed = _git(source, "status", "--porcelain", "--untracked-files=no")
    return {"git": _git(source, "rev-parse", "HEAD"), "changed": bool(changed)}


def _git(source: Path, *arguments: str) -> str | None:
    """What git says where the file lies; None if it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(source.parent), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()
    return None
