"""One direction of imports, and a package that is light until it is used."""

import ast
from pathlib import Path

import pytest
from support import run_python

import dlrnn

SOURCE, TESTS = Path(dlrnn.__file__).parent, Path(__file__).parent
ORDER = (
    *("common", "ops", "nn", "models", "tasks", "analysis", "train"),
    *("paper", "bench", "report", "cli", "__main__"),
)
"""A folder imports only from the folders before it."""
NOT = {"models": {"tasks"}, "tasks": {"ops", "nn", "models"}, "paper": {"analysis"}}
"""And not from these: a task knows nothing of networks, nor a network of tasks."""
SINGLE = {"_version", "__version__"}
OURS = {"dlrnn", *(path.stem for path in TESTS.rglob("*.py"))}


def imported(path: Path) -> list[list[str]]:
    """What a file imports from us, wherever in the file it does: `dlrnn.nn.DLR`, split at dots."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    split = [name.split(".") for name in names]
    return [parts for parts in split if parts[0] in OURS and not SINGLE & set(parts)]


def folders(path: Path) -> set[str]:
    """The folders of dlrnn that a file imports from."""
    return {parts[1] for parts in imported(path) if parts[0] == "dlrnn" and len(parts) > 1}


def private(path: Path) -> set[str]:
    """The names with a leading underscore that a file imports from other modules of ours."""
    return {part for parts in imported(path) for part in parts if part[0] == "_"}


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE))
)
def test_a_folder_imports_only_from_folders_before_it(path):
    part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if part in ("__init__", "_version"):
        return
    assert part in ORDER, f"{part} is new: give it a place in ORDER"
    allowed = {part, *ORDER[: ORDER.index(part)]} - NOT.get(part, set())
    wrong = folders(path) - allowed
    assert not wrong, f"{path.name} imports {sorted(wrong)}, against the direction"


def test_no_module_imports_a_private_name():
    """From src and from tests alike; a private name that is needed elsewhere becomes public."""
    paths = [*SOURCE.rglob("*.py"), *TESTS.rglob("*.py")]
    assert not {str(path): names for path in paths if (names := private(path))}


def test_imports_are_found_wherever_they_are(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text(
        "from dlrnn.ops import _a, b\nimport dlrnn._c\n"
        "def f():\n    from support import _d\n    from dlrnn import nn\n"
        "from dlrnn._version import __version__\nfrom os import _exit\n"
    )
    assert private(bad) == {"_a", "_c", "_d"}
    assert folders(bad) == {"ops", "_c", "nn"}


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
