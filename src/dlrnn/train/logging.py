"""What a run records while it trains: JSON lines, progress on the terminal, TensorBoard or W&B."""

import contextlib
import hashlib
import json
import os
import secrets
import socket
import sys
import time
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from dlrnn.common.files import naming, open_append, write_whole
from dlrnn.common.progress import Progress
from dlrnn.common.untrusted import MOST_LINES, printable, read_bytes, read_json
from dlrnn.train.run_directory import CONFIG, check_links

WRITERS = ("tensorboard", "wandb", "none")


class JsonLines:
    """A file of JSON lines that is only appended to.

    Args:
        length: on resume, the bytes that the file had at the checkpoint; later ones are removed.
            None keeps all of it, and ends a truncated last line.
        sha256: the digest that these bytes must have.
        separators: those of `json.dumps`.
    """

    def __init__(
        self,
        path: Path,
        length: int | None,
        sha256: str | None = None,
        separators: tuple[str, str] | None = None,
    ) -> None:
        self.path, self.separators = path, separators
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

    def append(self, values: dict[str, Any]) -> None:
        """Add a line; it is in the file when this returns."""
        line = json.dumps(values, separators=self.separators).encode() + b"\n"
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


class RunProgress:
    """Loss, metric, steps a second and device memory of a run; silent unless `show`."""

    def __init__(
        self, name: str, start: int, steps: int, device: torch.device, *, show: bool
    ) -> None:
        self.device = device
        self.progress = Progress(name, "steps", steps, start) if show else None
        self.values: dict[str, str] = {}

    def __enter__(self) -> "RunProgress":
        if self.progress is not None:
            self.progress.begin()
        return self

    def __exit__(self, *error: object) -> None:
        if self.progress is not None:
            self.progress.__exit__(*error)

    def show(self, step: int, values: dict[str, Any]) -> None:
        """Show the loss or the metrics of a step, beside the other values that were shown last."""
        if self.progress is None:
            return
        self.values |= {k: f"{v:.4g}" for k, v in values.items() if isinstance(v, float)}
        words = [f"{name} {value}" for name, value in self.values.items()]
        if self.device.type == "cuda":
            words.append(f"{torch.cuda.max_memory_allocated(self.device) / 2**30:.2g} GiB")
        self.progress.update(step, text="  ".join(words))

    def say(self, text: str) -> None:
        """Print a line."""
        if self.progress is not None:
            self.progress.say(text)

    def warn(self, text: str) -> None:
        """Print a line even if the run is silent."""
        if self.progress is not None:
            self.progress.say(text)
        else:
            print(printable(text), file=sys.stderr)


# ---------------------------------------------------------------------------------- writers


@runtime_checkable
class Writer(Protocol):
    """Anything that keeps scalars by step."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Keep one value."""

    def close(self) -> None:
        """Accept no more values."""


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


def open_writer(name: str, folder: Path, start: int) -> Writer | None:
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
