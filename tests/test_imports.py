"""One direction of imports, and a package that is light until it is used."""

import ast
from pathlib import Path

import pytest
from support import run_python

import dlrnn

SOURCE = Path(dlrnn.__file__).parent

ORDER = (
    *("common", "ops", "nn", "models", "tasks", "analysis", "train"),
    *("paper", "bench", "report", "cli", "__main__"),
)
"""A folder imports only from the folders before it."""
NOT = {"models": {"tasks"}, "tasks": {"ops", "nn", "models"}, "paper": {"analysis"}}
"""And not from these: a task knows nothing of networks, nor a network of tasks."""
SINGLE = {"_version", "__version__"}


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
    return parts - SINGLE


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE))
)
def test_a_folder_imports_only_from_folders_before_it(path):
    part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if part in ("__init__", "_version"):
        return
    assert part in ORDER, f"{part} is new: give it a place in ORDER"
    allowed = {part, *ORDER[: ORDER.index(part)]} - NOT.get(part, set())
    wrong = imported(path) - allowed
    assert not wrong, f"{path.name} imports {sorted(wrong)}, against the direction"


def test_imports_inside_functions_count(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from dlrnn import nn\n    import dlrnn.analysis.fit\n")
    assert imported(bad) == {"nn", "analysis"}


TESTS = Path(__file__).parent
OURS = {"dlrnn", *(path.stem for path in TESTS.rglob("*.py"))}


def private_imports(path: Path) -> set[str]:
    """The names with a leading underscore that a file imports from other modules of ours."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in OURS:
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            every = [alias.name.split(".") for alias in node.names]
            parts = [part for each in every if each[0] in OURS for part in each]
        else:
            continue
        names |= {part for part in parts if part[0] == "_" and part not in SINGLE}
    return names


def test_no_module_imports_a_private_name():
    """From src and from tests alike; a private name that is needed elsewhere becomes public."""
    found = {}
    for root, name in ((SOURCE, "src"), (TESTS, "tests")):
        for path in root.rglob("*.py"):
            if names := private_imports(path):
                found[f"{name}/{path.relative_to(root).as_posix()}"] = names
    assert not found


def test_private_imports_are_found(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text(
        "from dlrnn.ops import _a, b\nimport dlrnn._c\ndef f():\n    from support import _d\n"
        "from dlrnn._version import __version__\nfrom os import _exit\n"
    )
    assert private_imports(bad) == {"_a", "_c", "_d"}


def test_importing_the_package_does_not_load_torch():
    assert run_python("import dlrnn, sys; print('torch' in sys.modules)").strip() == "False"


def test_commands_that_train_nothing_do_not_wait_for_what_trains():
    """Three seconds: `dlrnn recipes`, or a wrong name."""
    heavy = "{'lightning_fabric', 'matplotlib', 'torch._dynamo', 'torch.distributed.tensor'}"
    code = f"import sys; from dlrnn.paper import recipes; print({heavy} & set(sys.modules))"
    assert run_python(code).strip() == "set()"


def test_public_names():
    for name in dlrnn.__all__:
        assert getattr(dlrnn, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'DLRR'"):
        dlrnn.DLRR  # noqa: B018
    assert set(dlrnn.__all__) <= set(dir(dlrnn))
