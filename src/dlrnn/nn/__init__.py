"""Layers: one mixer a file, all with the same contract (docs/architecture.md)."""

from dlrnn.nn.dlr import DLR, DLRState
from dlrnn.nn.optim import param_groups
from dlrnn.nn.streaming import RecurrentState

__all__ = ["DLR", "DLRState", "RecurrentState", "param_groups"]
