"""Who else keeps a run's scalars: TensorBoard, or Weights & Biases where it is installed."""

import json
import os
import secrets
from pathlib import Path
from typing import Protocol, runtime_checkable

from dlrnn._disk import write_whole
from dlrnn.train.folder import CONFIG

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
        return _tensorboard(folder, start)
    return _WeightsAndBiases(folder) if name == "wandb" else None


def _tensorboard(folder: Path, start: int) -> Writer:
    """Event files beside the records; what a killed run wrote after `start` is shown no more."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)
    return writer


class _WeightsAndBiases:
    """One run of theirs for one of ours, however often it goes on: its id there is kept here."""

    def __init__(self, folder: Path) -> None:
        import wandb

        kept = folder / "wandb" / "id"
        there = kept.read_text() if kept.is_file() else ""
        name = there or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        config = json.loads((folder / CONFIG).read_text())
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
