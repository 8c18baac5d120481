"""One direction of imports, and a package that is light until it is used."""

import ast
from pathlib import Path

import pytest
from support import run_python

import dlrnn

SOURCE = Path(dlrnn.__file__).parent

# What each part may import from, itself aside. `tasks` knows nothing of `models`.
ALLOWED = {
    "ops": set(),
    "nn": {"ops"},
    "analysis": {"ops", "nn"},
    "models": {"ops", "nn"},
    "tasks": set(),
    "train": {"ops", "nn", "analysis", "models", "tasks"},
    "recipes": {"ops", "nn", "models", "tasks", "train"},
    "bench": {"ops", "nn", "models", "tasks", "train", "recipes"},
    "doctor": {"ops", "nn"},
    "check": {"ops", "nn"},
    "report": {"recipes", "train"},
    "examine": {"analysis", "models", "tasks", "train"},
    "export": {"models", "train"},
    "generation": {"models", "tasks", "train"},
    "cli": {
        *("ops", "nn", "analysis", "models", "tasks", "train", "recipes"),
        *("bench", "doctor", "check", "examine", "export", "generation", "report"),
    },
    "__main__": {"cli"},
    "_device": set(),
    "_disk": set(),
    "_numba": set(),
    "_untrusted": set(),
    "_figures": set(),
    "_version": set(),
    "__init__": {"ops", "nn", "analysis", "models", "tasks", "train", "recipes"},
}


def imported(path: Path) -> set[str]:
    """The parts of dlrnn that a file imports, wherever in the file it does."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        parts |= {name.split(".")[1] for name in names if name.startswith("dlrnn.")}
    return parts - {
        "_device",
        "_disk",
        "_figures",
        "_numba",
        "_untrusted",
        "_version",
        "__version__",
    }


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE))
)
def test_a_folder_imports_only_from_its_left(path):
    part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    assert part in ALLOWED, f"{part} is new: say in ALLOWED what it may import"
    wrong = imported(path) - ALLOWED[part] - {part}
    if part == "__init__":
        wrong -= {"DLR", "param_groups"}
    assert not wrong, f"{path.name} imports {sorted(wrong)}, against the direction"


def test_the_test_can_fail(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from dlrnn import nn\n    import dlrnn.analysis.fit\n")
    assert imported(bad) == {"nn", "analysis"}


def test_importing_the_package_does_not_load_torch():
    assert run_python("import dlrnn, sys; print('torch' in sys.modules)").strip() == "False"


def test_commands_that_train_nothing_do_not_wait_for_what_trains():
    """Three seconds: `dlrnn recipes`, or a wrong name."""
    heavy = "{'lightning_fabric', 'matplotlib', 'torch._dynamo', 'torch.distributed.tensor'}"
    code = f"import sys; from dlrnn import recipes; print({heavy} & set(sys.modules))"
    assert run_python(code).strip() == "set()"


def test_public_names():
    for name in dlrnn.__all__:
        assert getattr(dlrnn, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'DLRR'"):
        dlrnn.DLRR  # noqa: B018
    assert set(dlrnn.__all__) <= set(dir(dlrnn))
