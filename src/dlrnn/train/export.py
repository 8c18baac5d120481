"""Export the best model of a run: a folder for `from_pretrained`, or an upload to the Hub."""

import json
from pathlib import Path
from typing import Any

import torch

from dlrnn.common.untrusted import read_bytes
from dlrnn.models import push_to_hub, save_pretrained
from dlrnn.models.pretrained import LARGEST_FILE
from dlrnn.train.evaluation import read_test
from dlrnn.train.model import load_best
from dlrnn.train.run_directory import RunDirectory


def export_run(
    run: str | Path, folder: str | Path, *, push: str | None = None, trust: bool = False
) -> str:
    """Write the best model with its card; returns the folder, or the address on the Hub."""
    model, _, config, _ = load_best(run, torch.device("cpu"), trust=trust)
    path = Path(run)
    tokenizer = path / "tokenizer.json"
    save_pretrained(
        model,
        folder,
        tokenizer=read_bytes(tokenizer, LARGEST_FILE) if tokenizer.is_file() else None,
        results=_results(path),
        run=json.loads(config.to_json()),
    )
    return str(folder) if push is None else push_to_hub(folder, push)


def _results(path: Path) -> dict[str, Any]:
    """The results for the model card: the best validation, and the test if there was one."""
    records = [each for each in RunDirectory.open(path).records() if each["split"] == "validation"]
    found = {"steps": records[-1]["step"]} if records else {}
    result = RunDirectory.open(path).result or {}
    names = ("task", "metric", "best", "best_step", "device", "seconds")
    found |= {name: result[name] for name in names if name in result}
    return found | {f"test {name}": value for name, value in read_test(RunDirectory(path)).items()}
