"""test.json: what a run's best checkpoint scores on the test split, as fractions."""

import json
from pathlib import Path

from dlrnn.common.files import write_whole
from dlrnn.common.untrusted import fit
from dlrnn.train.checkpoint import BEST, header
from dlrnn.train.folder import RunFolder

TEST = "test.json"


def best_step(folder: RunFolder) -> int | None:
    """The step of the best checkpoint so far; None if there is none."""
    if (result := folder.result) is not None:
        return int(result["best_step"])
    path = folder.path / BEST
    return int(header(path)["step"]) if path.exists() else None


def write_test(path: Path, step: int, metrics: dict[str, float]) -> None:
    """Of the best checkpoint, which is of this step."""
    content = {"step": step, **metrics}
    write_whole(path / TEST, (json.dumps(content, indent=1) + "\n").encode())


def read_test(folder: RunFolder) -> dict[str, float]:
    """{} if the best checkpoint was not tested: an older one may have been."""
    advice = f"`dlrnn eval {folder.path}` writes it again"
    found = folder.values(TEST, advice) or {}
    try:
        metrics: dict[str, float] = fit(found, dict[str, float], str(folder.path / TEST))
    except ValueError as error:
        raise ValueError(f"{error}: {advice}") from error
    return metrics if metrics and metrics.pop("step", None) == best_step(folder) else {}
