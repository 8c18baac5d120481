"""Layers: one mixer a file, all with the same contract (docs/architecture.md)."""

from dlrnn.nn.dlr import DLR
from dlrnn.nn.files import load_layers, save_model
from dlrnn.nn.kernel_mixer import KernelMixer
from dlrnn.nn.optim import param_groups
from dlrnn.nn.streaming import RecurrentState

__all__ = ["DLR", "KernelMixer", "RecurrentState", "load_layers", "param_groups", "save_model"]
