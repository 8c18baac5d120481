"""Diagonal linear RNNs: `from dlrnn import DLR`.

Names are imported when they are first used, so that `dlrnn --help` need not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dlrnn._version import __version__

if TYPE_CHECKING:
    from dlrnn import analysis, models, nn, ops, paper, tasks, train
    from dlrnn.nn import DLR, check_optimizer, param_groups

__all__ = [
    "DLR",
    "__version__",
    "analysis",
    "check_optimizer",
    "models",
    "nn",
    "ops",
    "paper",
    "param_groups",
    "tasks",
    "train",
]

_HOME = dict.fromkeys(("DLR", "check_optimizer", "param_groups"), "dlrnn.nn")


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in __all__:
        return import_module(f"dlrnn.{name}")
    raise AttributeError(f"module 'dlrnn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
