"""Layers: all mixers keep the same contract (docs/architecture.md)."""

from dlrnn.nn.attention import Attention, AttentionFF, KeyValueState
from dlrnn.nn.captured import CapturedSteps
from dlrnn.nn.dlr import DLR
from dlrnn.nn.experts import Experts
from dlrnn.nn.files import load_layers, save_model
from dlrnn.nn.gated import GatedDLR
from dlrnn.nn.local_attention import LocalAttention
from dlrnn.nn.mixer import KernelMixer, Mixer
from dlrnn.nn.optim import KERNEL_LR, check_optimizer, param_groups
from dlrnn.nn.reuse import reuse_kernels
from dlrnn.nn.s4 import S4
from dlrnn.nn.sgconv import SGConv
from dlrnn.nn.state_space import DSS, S4D
from dlrnn.nn.streaming import RecurrentState
from dlrnn.nn.tape import TapeDLR, TapeState

__all__ = [
    "DLR",
    "DSS",
    "KERNEL_LR",
    "S4",
    "S4D",
    "Attention",
    "AttentionFF",
    "CapturedSteps",
    "Experts",
    "GatedDLR",
    "KernelMixer",
    "KeyValueState",
    "LocalAttention",
    "Mixer",
    "RecurrentState",
    "SGConv",
    "TapeDLR",
    "TapeState",
    "check_optimizer",
    "load_layers",
    "param_groups",
    "reuse_kernels",
    "save_model",
]
