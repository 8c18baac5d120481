"""Pure tensor functions: the Vandermonde product, long convolution, recurrence, online convolution.

No modules, no configuration, no randomness. `reference` holds the slow definition of each.
"""

from dlrnn.ops.channel_vandermonde import channel_adjoint, channel_vandermonde
from dlrnn.ops.convolution import convolution, fast_length, with_skip
from dlrnn.ops.dispatch import use_backend
from dlrnn.ops.dlr_layer import dlr_layer, takes_dlr_layer
from dlrnn.ops.layer_norm import layer_norm
from dlrnn.ops.mixing import mix
from dlrnn.ops.online import KernelOf, OnlineState, online_start, online_step
from dlrnn.ops.pairs import DLRExponents, conjugate, pair_product, powers, prod_modes
from dlrnn.ops.recurrence import (
    advance,
    align_right,
    response,
    step,
    step_in_place,
    windowed_step,
)
from dlrnn.ops.rotary import rotate
from dlrnn.ops.tape import tape
from dlrnn.ops.thin_linear import linear
from dlrnn.ops.vandermonde import complex_vandermonde, vandermonde, vandermonde_adjoint
from dlrnn.ops.zero_order_hold import zero_order_hold

__all__ = [
    "DLRExponents",
    "KernelOf",
    "OnlineState",
    "advance",
    "align_right",
    "channel_adjoint",
    "channel_vandermonde",
    "complex_vandermonde",
    "conjugate",
    "convolution",
    "dlr_layer",
    "fast_length",
    "layer_norm",
    "linear",
    "mix",
    "online_start",
    "online_step",
    "pair_product",
    "powers",
    "prod_modes",
    "response",
    "rotate",
    "step",
    "step_in_place",
    "takes_dlr_layer",
    "tape",
    "use_backend",
    "vandermonde",
    "vandermonde_adjoint",
    "windowed_step",
    "with_skip",
    "zero_order_hold",
]
