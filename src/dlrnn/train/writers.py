"""Who else keeps a run's scalars: TensorBoard, or Weights & Biases where it is installed."""

import contextlib
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dlrnn.common.files import naming, open_append, write_whole
from dlrnn.common.untrusted import read_bytes, read_json
from dlrnn.train.folder import CONFIG, check_links

WRITERS = ("tensorboard", "wandb", "none")


@runtime_checkable
class Writer(Protocol):
    """Anything that keeps scalars by step."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """One value."""

    def close(self) -> None:
        """No more."""


def check_writer(name: str) -> None:
    """Before a run's folder is made."""
    if name not in WRITERS:
        raise ValueError(f"writer must be one of {', '.join(WRITERS)}, not {name!r}")
    if name == "wandb":
        missing = "W&B was asked for and is not installed: pip install wandb"
        try:
            import wandb
        except ImportError as error:
            raise ValueError(f"{missing} ({error})") from error
        if wandb.__file__ is None:  # a folder of its files that lies here
            raise ValueError(missing)


def open_writer(name: str, folder: Path, start: int) -> Writer | None:
    """For a run that goes on from the step `start`."""
    if name == "tensorboard":
        return _TensorBoard(folder, start)
    return _WeightsAndBiases(folder) if name == "wandb" else None


class _TensorBoard:
    """Event files beside the records, written at once, so that an error names its file.

    Values after the step `start` that a killed run left in older files are not shown any more.
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
        """One value."""
        value = self._summary.Value(tag=tag, simple_value=scalar_value)
        self._write(step=global_step, summary=self._summary(value=[value]))

    def close(self) -> None:
        """Every value is in the file already; after an error the last one may be lost."""
        with contextlib.suppress(OSError):
            self._file.close()


class _WeightsAndBiases:
    """One run of theirs for one of ours, however often it goes on: its id there is kept here."""

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
        """What was sent before the run was killed stays there, and cannot be sent again."""
        if global_step >= self.run.step:
            self.run.log({tag: scalar_value}, step=global_step)

    def close(self) -> None:
        """All that was sent has arrived."""
        self.run.finish()
