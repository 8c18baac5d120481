"""`dlrnn export`: a run's best model as a folder that `from_pretrained` reads, or on the Hub."""

import json
from pathlib import Path
from typing import Any

import torch

from dlrnn.common.untrusted import read_bytes
from dlrnn.models import push_to_hub, save_pretrained
from dlrnn.models.pretrained import LARGEST_FILE
from dlrnn.train import RunFolder, load_best
from dlrnn.train.tested import read_test


def export_run(
    run: str | Path, folder: str | Path, *, push: str | None = None, trust: bool = False
) -> str:
    """Write the best model with its card; where it is now, the folder or the Hub's address."""
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
    """What the run's files say: its best validation, and its test where there was one."""
    records = [each for each in RunFolder.open(path).records() if each["split"] == "validation"]
    found = {"steps": records[-1]["step"]} if records else {}
    result = RunFolder.open(path).result or {}
    names = ("task", "metric", "best", "best_step", "device", "seconds")
    found |= {name: result[name] for name in names if name in result}
    return found | {f"test {name}": value for name, value in read_test(RunFolder(path)).items()}
