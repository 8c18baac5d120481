"""What a run keeps on disk: a directory, which no other run can overwrite, with these files.

config.json        the complete configuration
environment.json   versions, device, git revision; `then`: those of later resumes, if they differ
records.jsonl      losses and metrics by step: the same bytes however often the run was killed
timing.jsonl       seconds and memory by step: different each time
snapshots.jsonl    eigenvalues and kernels at a few steps
step-*.safetensors the last two checkpoints; best.safetensors holds the best model
tokenizer.json     the tokenizer of a language model
result.json        written last, when the run is complete
tensorboard, wandb scalars of the writer that was asked for
"""

import contextlib
import hashlib
import json
import os
import platform
import secrets
import socket
import subprocess
import time
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
from dlrnn.common.untrusted import MOST_LINES, fit_fields, parse_json, read_bytes, read_json
from dlrnn.models.pretrained import WEIGHTS
from dlrnn.train.config import RunConfig, from_json, in_json

WRITERS = ("tensorboard", "wandb", "none")
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
    """Another process is training this run."""


class RunDirectory:
    """One run on disk."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def create(
        cls, path: str | Path, config: RunConfig, files: dict[str, bytes] | None = None
    ) -> "RunDirectory":
        """Write a new run; a directory that holds a trained run, or anything else, is refused.

        `files` are those of the task, such as a tokenizer. The caller holds the lock (`locked`).
        """
        folder = cls(path)
        check_links(folder.path)
        files = {ENVIRONMENT: in_json(environment()).encode(), **(files or {})}
        if not folder._is_bare(files):
            if (folder.path / RESULT).exists():
                raise ValueError(f"{path} holds a run that is complete; choose another folder")
            if (folder.path / CONFIG).exists():
                advice = f"continue it with `dlrnn train --resume {path}`, or choose another folder"
                raise ValueError(f"{path} holds a run that was stopped; {advice}")
            raise ValueError(f"{path} is not empty; choose another folder")
        for name, content in files.items():
            write_whole(folder.path / name, content)
        write_whole(folder.path / CONFIG, config.to_json().encode())
        return folder

    def check_foreign(self, files: Iterable[str]) -> None:
        """Refuse a directory with other files, before anything is written into it, even a lock."""
        foreign = self.path.is_dir() and not any((self.path / n).exists() for n in (CONFIG, LOCK))
        if foreign and not self._is_bare([ENVIRONMENT, *files]):
            raise ValueError(f"{self.path} is not empty; choose another folder")

    def _is_bare(self, files: Iterable[str]) -> bool:
        """Whether the directory is empty, or the run stopped before anything was trained."""
        known = {CONFIG, *files}
        known |= {f"{name}.part" for name in known}
        known |= {LOCK, RECORDS, TIMING, SNAPSHOTS, "tensorboard", "wandb"}
        records = self.path / RECORDS
        untouched = not records.exists() or records.stat().st_size == 0
        return untouched and {path.name for path in self.path.iterdir()} <= known

    @classmethod
    def open(cls, path: str | Path) -> "RunDirectory":
        """An existing run."""
        path = Path(path)
        if not (path / CONFIG).is_file():
            near = sorted(each.parent.name for each in path.parent.glob(f"{path.name}-*/{CONFIG}"))
            hint = f"; beside it there is {', '.join(near)}" if near else ""
            if not path.exists():
                raise ValueError(f"there is no folder {path}{hint}")
            below = [str(each.parent) for each in islice(path.rglob(CONFIG), 3)]
            there = f"; below it there is {', '.join(below)}" if below else ""
            lacks = f"it has no {CONFIG}{there or hint}"
            raise ValueError(f"{path} is not the folder of a run: {lacks}")
        if (path / WEIGHTS).is_file():
            raise ValueError(f"{path} is an exported model; name the run that it was made from")
        check_links(path)
        return cls(path)

    def note_environment(self, *, anew: bool) -> int | None:
        """Add the environment to environment.json if it has changed; `anew` replaces all.

        Returns the number of threads that the run had before, if it was another one.
        """
        path = self.path / ENVIRONMENT
        if anew:
            write_whole(path, in_json(environment()).encode())
            return None
        try:
            content = parse_json(read_bytes(path), str(path))
            schema = {**_ENVIRONMENT, "then": list[dict[str, Any]]}
            first = fit_fields(content, schema, str(path), needed=())
        except (ValueError, FileNotFoundError):  # it is damaged, but no run needs it
            return None
        then: list[dict[str, Any]] = first.pop("then", [])
        now, before = environment(), (then or [first])[-1]
        if now != before:
            write_whole(path, in_json({**first, "then": [*then, now]}).encode())
        threads = before.get("threads")
        return threads if isinstance(threads, int) and threads != now["threads"] else None

    @property
    def config(self) -> RunConfig:
        """The configuration of the run."""
        path = self.path / CONFIG
        return from_json(read_bytes(path), str(path))

    @property
    def result(self) -> dict[str, Any] | None:
        """The content of result.json; None while the run is not complete."""
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
        """The content of a JSON file of the run; None if the file does not exist."""
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
        known = {"step": int, "split": Literal["train", "stage", "validation", "test"]}
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            try:
                each = parse_json(line, where, nan=True)
                schema = dict.fromkeys(each, float) if isinstance(each, dict) else {}
                record = fit_fields(each, schema | known, where, needed=known)
                if record["split"] == "train" and "loss" not in record:
                    raise ValueError("it has no loss")
                found.append(record)
            except ValueError as error:
                raise ValueError(f"{where}, is not a record of a run: {error}") from error
        return found

    def evaluations(self, metric: str) -> list[dict[str, Any]]:
        """The records of the validation split; each must have this metric."""
        found = [each for each in self.records() if each["split"] == "validation"]
        for each in found:
            if metric not in each:
                where = f"{self.path / RECORDS}, step {each['step']}"
                raise ValueError(f"{where}: the validation has no {metric}")
        return found

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the run, which the system releases when the process ends."""
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
    """Refuse a folder that contains links or special files: writing to one writes elsewhere."""
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.is_symlink() or not path.is_dir():
                require_regular(path)


def environment() -> dict[str, Any]:
    """What a result may depend on besides its configuration: versions, device, threads, commit."""
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
    """The commit of a source file, and whether tracked files differ from that commit.

    The commit is None for a file that git does not track, as in a virtual environment.
    """
    if _git(source, "ls-files", "--error-unmatch", source.name) is None:
        return {"git": None, "changed": False}
    changed = _git(source, "status", "--porcelain", "--untracked-files=no")
    return {"git": _git(source, "rev-parse", "HEAD"), "changed": bool(changed)}


def _git(source: Path, *arguments: str) -> str | None:
    """The output of a git command in the folder of a file; None if the command fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(source.parent), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()
    return None


class JsonLines:
    """A file of JSON lines that is only appended to.

    Args:
        length: on resume, the bytes that the file had at the checkpoint; later ones are removed.
            None keeps all of it, and ends a truncated last line.
        sha256: the digest that these bytes must have.
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
                self._file.write(b"\n")  # after a line that a full disk truncated
        if sha256 not in (None, self.sha256):
            self._file.close()
            raise ValueError(f"{path} is not as it was at the checkpoint: begin a new run")

    def append(self, values: dict[str, Any], **style: Any) -> None:
        """Add a line, in this style of `json.dumps`; it is in the file when this returns."""
        line = json.dumps(values, **style).encode() + b"\n"
        self._digest.update(line)
        with naming(self.path):
            self._file.write(line)
            self._file.flush()

    @property
    def sha256(self) -> str:
        """The digest of all lines so far."""
        return self._digest.hexdigest()

    def length(self) -> int:
        """The bytes of the file, all of which are on the disk."""
        with naming(self.path):
            os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Close the file. After an error the buffer may hold lines, which are lost."""
        with contextlib.suppress(OSError):
            self._file.close()


# ---------------------------------------------------------------------------------- writers


def check_writer(name: str) -> None:
    """Refuse an unknown writer, and W&B where it is not installed."""
    if name not in WRITERS:
        raise ValueError(f"writer must be one of {', '.join(WRITERS)}, not {name!r}")
    if name == "wandb":
        missing = "W&B was asked for and is not installed: pip install wandb"
        try:
            import wandb
        except ImportError as error:
            raise ValueError(f"{missing} ({error})") from error
        if wandb.__file__ is None:  # a folder `wandb` in the current folder imports, too
            raise ValueError(missing)


def open_writer(name: str, folder: Path, start: int) -> "Writer | None":
    """The writer of a run that continues from the step `start`; None for "none"."""
    if name == "tensorboard":
        return _TensorBoard(folder, start)
    return _WeightsAndBiases(folder) if name == "wandb" else None


class _TensorBoard:
    """Event files beside the records, written at once, so that an error names its file.

    TensorBoard hides values after the step `start` that a killed run left in older files.
    """

    def __init__(self, folder: Path, start: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        folder = folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        check_links(folder)
        place = f"{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self.path = folder / f"events.out.tfevents.{int(time.time()):010d}.{place}"
        self._file = open_append(self.path)
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        self._write(step=start + 1, session_log=SessionLog(status=SessionLog.START))

    def _write(self, **content: Any) -> None:
        event = self._event(wall_time=time.time(), **content)
        with naming(self.path):
            self._records.write(event.SerializeToString())
            self._file.flush()

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Keep one value."""
        value = self._summary.Value(tag=tag, simple_value=scalar_value)
        self._write(step=global_step, summary=self._summary(value=[value]))

    def close(self) -> None:
        """Close the file, which holds every value; after an error the last one may be lost."""
        with contextlib.suppress(OSError):
            self._file.close()


class _WeightsAndBiases:
    """One W&B run for each of our runs, however often it is resumed: its id is kept on disk."""

    def __init__(self, folder: Path) -> None:
        import wandb

        kept = folder / "wandb" / "id"
        there = read_bytes(kept, 256).decode() if kept.is_file() else ""
        name = there or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        config = read_json(folder / CONFIG)
        about = {"dir": str(folder), "name": str(folder), "config": config}
        try:
            self.run = wandb.init(id=name, resume="allow", **about)
        except Exception as error:
            raise ValueError(f"W&B: {error}") from error
        kept.parent.mkdir(exist_ok=True)
        write_whole(kept, name.encode())

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Send one value; those that were sent before the run was killed cannot be sent again."""
        if global_step >= self.run.step:
            self.run.log({tag: scalar_value}, step=global_step)

    def close(self) -> None:
        """Wait until all values have arrived."""
        self.run.finish()


Writer = _TensorBoard | _WeightsAndBiases
