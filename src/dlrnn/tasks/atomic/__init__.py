"""The 11 atomic tasks of the paper's section "Atomic Tasks"."""

from dlrnn.tasks.atomic.regression import RegressionTask
from dlrnn.tasks.atomic.tasks import (
    ATOMIC,
    MIPS,
    ContextShift,
    CumMax,
    CumSum,
    Reverse,
    Select,
    SelectFixed,
    Shift,
    Solve,
    SolveFixed,
    Sort,
)

__all__ = [
    "ATOMIC",
    "MIPS",
    "ContextShift",
    "CumMax",
    "CumSum",
    "RegressionTask",
    "Reverse",
    "Select",
    "SelectFixed",
    "Shift",
    "Solve",
    "SolveFixed",
    "Sort",
]
