"""Many runs: what is complete is left alone, one that breaks does not stop the others."""

import pytest

from dlrnn.recipes import run_path
from dlrnn.recipes.catalogue import get
from dlrnn.recipes.sweep import chosen, sweep
from dlrnn.train import RunFolder


@pytest.fixture
def small(monkeypatch):
    """Three steps a run: given to its process, and to what its folder is compared with."""
    import importlib

    module = importlib.import_module("dlrnn.recipes.sweep")
    own, scaled = module._job, module.run_config

    def few_steps(recipe, scale, seed):
        from dataclasses import replace

        return replace(scaled(recipe, scale, seed), steps=3)

    def job(*arguments):
        made = own(*arguments)
        if made is None or "--resume" in made.command:
            return made
        return made._replace(command=[*made.command, "--steps", "3", "--writer", "none"])

    outcome = importlib.import_module("dlrnn.recipes.outcome")
    monkeypatch.setattr(module, "_job", job)
    monkeypatch.setattr(module, "run_config", few_steps)
    monkeypatch.setattr(outcome, "run_config", few_steps)


def test_patterns():
    names = [recipe.name for recipe in chosen(["table1/cum*/dlr-1", "table1/cumsum/dlr-1"])]
    assert sorted(names) == ["table1/cummax/dlr-1", "table1/cumsum/dlr-1"]
    with pytest.raises(ValueError, match="there is no recipe"):
        chosen(["table9/*"])


def test_a_sweep(small, tmp_path):
    options = {"scale": "tiny", "out": tmp_path, "seeds": [0], "jobs": 2}
    broken = run_path(get("table1/cummax/dlr-1"), tmp_path, "tiny", 0)
    broken.mkdir(parents=True)
    (broken / "something").write_text("of somebody else")
    rows = sweep(["table1/cum*/dlr-1"], **options)
    by_name = {row["recipe"]: row for row in rows}
    assert by_name["table1/cumsum/dlr-1"]["status"] == "done"
    assert by_name["table1/cummax/dlr-1"]["status"] == "broken"
    assert "is not empty" in by_name["table1/cummax/dlr-1"]["said"]
    (broken / "something").unlink()
    done = run_path(get("table1/cumsum/dlr-1"), tmp_path, "tiny", 0)
    written = (done / "result.json").stat().st_mtime_ns
    assert all(row["status"] == "done" for row in sweep(["table1/cum*/dlr-1"], **options))
    assert (done / "result.json").stat().st_mtime_ns == written, "not run again"
    assert RunFolder.open(broken).result["steps"] == 3
