"""Layers as mathematical objects: conversions, products, fits, compression, plots."""

from dlrnn.analysis.compress import Compression, compress
from dlrnn.analysis.fit import KernelFit, ShiftWeights, fit_kernel, shift_weight_norms
from dlrnn.analysis.plots import plot_kernel, plot_spectrum
from dlrnn.analysis.systems import (
    System,
    from_linear_rnn,
    kronecker,
    layer_of,
    prod_as_dlr,
    prod_as_dlr_full,
    system_of,
)

__all__ = [
    "Compression",
    "KernelFit",
    "ShiftWeights",
    "System",
    "compress",
    "fit_kernel",
    "from_linear_rnn",
    "kronecker",
    "layer_of",
    "plot_kernel",
    "plot_spectrum",
    "prod_as_dlr",
    "prod_as_dlr_full",
    "shift_weight_norms",
    "system_of",
]
