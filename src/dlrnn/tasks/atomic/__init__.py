"""The 11 atomic tasks of the paper's section "Atomic Tasks"."""

from dlrnn.tasks.atomic.regression import RegressionTask
from dlrnn.tasks.atomic.tasks import ATOMIC

__all__ = ["ATOMIC", "RegressionTask"]
