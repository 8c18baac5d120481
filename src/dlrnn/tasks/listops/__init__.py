"""ListOps: nested MIN, MAX, MED and SM over digits, as tasks and as a generator."""

from dlrnn.tasks.listops.generator import ListOpsGenerator, lra, subtrees
from dlrnn.tasks.listops.task import ListOps, ListOpsSubTrees
from dlrnn.tasks.listops.text import evaluate, from_text, sub_values, to_text

__all__ = [
    "ListOps",
    "ListOpsGenerator",
    "ListOpsSubTrees",
    "evaluate",
    "from_text",
    "lra",
    "sub_values",
    "subtrees",
    "to_text",
]
