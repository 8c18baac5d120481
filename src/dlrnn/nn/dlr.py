"""The DLR layer: a diagonal linear RNN, trained as a convolution, run as a recurrence."""

import math
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from dlrnn import ops
from dlrnn.nn.mixer import Activation, KernelMixer, KernelState
from dlrnn.nn.streaming import Modes, RecurrentState, StepModes
from dlrnn.ops.checks import HALF, REAL, needs_autocast, require_count, require_dtype, require_steps
from dlrnn.ops.pairs import NO_FLOAT64

Cast = Literal["real", "prod"]

PROD_PAIRS_UP_TO = 16
"""Up to this N, DLR-prod streams over its N (N + 1) / 2 pairs of states, in constant memory. Above
it, online convolution, which keeps the inputs, is faster (docs/performance.md).
"""


class DLR(KernelMixer):
    """`y = conv(K, u) + D u`, then activation, dropout and a linear map of the channels.

    The kernel of channel h is `K_k = Re(sum_n W_hn lambda_n^k)` with one
    `lambda = exp(-log_lambda_re^2 + i log_lambda_im)` for all channels, hence |lambda| <= 1.

        layer = DLR(d_model=64, d_state=1024)
        y = layer(x)                                  # x, y [B, L, 64]
        y, state = layer(x, return_state=True)        # read a prefix ...
        y_t, state = layer.step(x_t, state)           # ... and go on step by step, x_t [B, 64]

    Args:
        d_model: channels, H.
        d_state: states, N: how long and how detailed a kernel can be.
        bidirectional: a second kernel reads from right to left; such a layer cannot stream.
        cast: "real" takes `Re(K)`, "prod" takes `Re(K) Im(K)` (DLR-prod).
        real: real lambda and W (DLR-R).
        kernel_length: restricts kernels to this many entries; None is no limit.
        dt_min: with dt_max, bounds of `-2 log |lambda|` at initialisation (log-uniform).
        dt_max: see dt_min; smaller is a longer memory.
        glu: the linear map makes 2 H channels and a GLU halves them.
        activation: "gelu", "silu", "relu" or "identity".
        dropout: probability, after the activation.
        project: False leaves out activation, dropout and linear map: a linear layer.
    """

    kernel_parameters: ClassVar[tuple[str, ...]] = ("log_lambda_re", "log_lambda_im", "W")
    option_names: ClassVar[tuple[str, ...]] = ("d_state", "cast", "real", "dt_min", "dt_max")
    shown_options: ClassVar[tuple[str, ...]] = ("d_state", "cast", "real")

    def __init__(
        self,
        d_model: int,
        d_state: int,
        *,
        bidirectional: bool = False,
        cast: Cast = "real",
        real: bool = False,
        kernel_length: int | None = None,
        dt_min: float = 5e-4,
        dt_max: float = 0.5,
        glu: bool = False,
        activation: Activation = "gelu",
        dropout: float = 0.0,
        project: bool = True,
    ) -> None:
        super().__init__(
            d_model,
            bidirectional=bidirectional,
            kernel_length=kernel_length,
            glu=glu,
            activation=activation,
            dropout=dropout,
            project=project,
        )
        require_count("d_state", d_state)
        require_steps(dt_min, dt_max)
        if cast not in get_args(Cast):
            raise ValueError(f"cast must be 'real' or 'prod', not {cast!r}")
        if not isinstance(real, bool):
            raise ValueError(f"real must be True or False, not {real!r}")
        if real and cast == "prod":
            raise ValueError(
                "real=True has no imaginary part, so cast='prod' would give a kernel of zeros"
            )
        self.d_state, self.cast, self.real = d_state, cast, real
        self.dt_min, self.dt_max = float(dt_min), float(dt_max)
        self.log_lambda_re = nn.Parameter(torch.empty(d_state))
        self.log_lambda_im = None if real else nn.Parameter(torch.empty(d_state))
        self.W = nn.Parameter(torch.empty(self.rows, d_state, 1 if real else 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The paper's initialisation: phases evenly around the circle, decays log-uniform."""
        if self.W.is_meta:  # there is nothing to fill, and PyTorch would load its compiler for it
            return
        with torch.no_grad():
            r = torch.empty_like(self.log_lambda_re)
            r.uniform_(math.log(self.dt_min), math.log(self.dt_max))
            self.log_lambda_re.copy_((r.exp() / 2).sqrt())
            if self.log_lambda_im is not None:
                n = torch.arange(self.d_state, dtype=torch.float64, device="cpu")
                self.log_lambda_im.copy_(2 * math.pi * n / self.d_state)
            self.W.normal_(std=1 / self.d_state)
        self.reset_skip_and_out()

    # ------------------------------------------------------------------------------ the layer

    def forward(
        self,
        x: Float[Tensor, "B L H"],
        state: KernelState | None = None,
        *,
        return_state: bool = False,
        lengths: Integer[Tensor, " B"] | None = None,
    ) -> Any:
        """Returns y [B, L, H], or (y, state) if `return_state`.

        `state` is that of the positions before x. `lengths` are the true lengths of a padded batch:
        positions beyond them are ignored, and the output there is 0. (`Mixer.forward` with
        `KernelMixer._whole` computes the same; it is written out here for readers.)
        """
        half = getattr(x, "dtype", None) in HALF and needs_autocast(x)
        if state is not None or return_state or half:  # chunks carry a state
            return super().forward(x, state, return_state=return_state, lengths=lengths)
        u, _, padding = self._checked(x, lengths)  # the padding is set to zero
        y = self._as_one_op(u) if u.is_cuda else None
        if y is None:
            # [H, L]; [2 H, L] if bidirectional
            K = self._kernel_on_gpu(u) if u.is_cuda else self.kernel(u.shape[1])
            right, left = (
                (K[: self.d_model], K[self.d_model :]) if self.bidirectional else (K, None)
            )
            y = self._mixed(u, right, left)  # conv(K, u) + D u, activation, linear map
        return y if padding is None else y.masked_fill(padding, 0)

    def _as_one_op(self, u: Tensor) -> Tensor | None:
        """The same output by `ops.dlr_layer` on a GPU; None where that might not be the same."""
        if self.cast == "prod" or self.log_lambda_im is None or self._is_changed():
            return None
        drops = isinstance(self.dropout, nn.Dropout) and self.dropout.training
        if drops or self.reused is not None or not self._has_plain_output_stage():
            return None
        out = cast("nn.Linear", self.out)
        parameters = self.log_lambda_re, self.log_lambda_im, self.W, self.D, out.weight, out.bias
        entries = min(u.shape[1], self.kernel_length or u.shape[1])
        if not ops.takes_dlr_layer(u, parameters, entries, self.activation):
            return None
        y = ops.dlr_layer(u, parameters, entries, self.activation)
        return F.glu(y, dim=-1) if self.glu else y

    def _kernel_on_gpu(self, u: Tensor) -> Tensor:
        """The kernel; under autocast with tf32's error, 3e-4, far below that of 16-bit numbers."""
        plain = self.cast == "real" and self.reused is None and not self._is_changed()
        if not (plain and torch.is_autocast_enabled("cuda")):
            return self.kernel(u.shape[1])
        W, log_lambda, _ = self.modes()
        entries = min(u.shape[1], self.kernel_length or u.shape[1])
        return ops.vandermonde(W, log_lambda, entries, tf32=True)

    def _is_changed(self) -> bool:
        """Whether a subclass or an instance may have a kernel or an output stage of its own."""
        names = "kernel", "_kernel", "modes", "_mixed", "_output"
        return type(self) is not DLR or any(name in vars(self) for name in names)

    def _kernel(self, length: int) -> Tensor:
        """`K_k = Re(sum_n W_hn lambda_n^k)`; DLR-prod multiplies by the imaginary part."""
        W, log_lambda, _ = self.modes()
        if self.cast == "real":
            return ops.vandermonde(W, log_lambda, length)
        kernel = ops.complex_vandermonde(W, log_lambda, length)
        return kernel[0] * kernel[1]

    def modes(self) -> Modes:
        """W [H, N, 2] (2 H rows if bidirectional), log lambda [N, 2] in float64, and D [H].

        `log lambda = -log_lambda_re^2 + i log_lambda_im`; complex numbers are real pairs.
        """
        if self.W.dtype not in REAL:
            require_dtype("the parameters of a DLR layer", self.W)
        where = "cpu" if self.W.device.type in NO_FLOAT64 else None
        log_modulus = -self.log_lambda_re.to(where, torch.float64).square()
        if self.log_lambda_im is None:
            W = torch.cat((self.W, torch.zeros_like(self.W)), dim=-1)
            log_lambda = torch.stack((log_modulus, torch.zeros_like(log_modulus)), dim=-1)
            return Modes(W, log_lambda, self.D)
        phase = self.log_lambda_im.to(log_modulus)
        return Modes(self.W, torch.stack((log_modulus, phase), dim=-1), self.D)

    # ------------------------------------------------------------------------------ streaming

    def _read_step(self, u: Tensor, state: KernelState) -> tuple[Tensor, KernelState]:
        """One position, [B, H]: `s' = lambda s + u`, `y = Re(sum_n W_n s'_n) + D u`."""
        if self.kernel_length or not isinstance(state, RecurrentState):
            return super()._read_step(u, state)  # a restricted kernel, or online convolution
        W, log_lambda, D = self._step_modes()
        y, s = ops.step(u, W, log_lambda, state.x, skip=D)
        return y, RecurrentState(s, state.past, state.oldest)

    def _step_modes(self) -> Modes | StepModes:
        """The modes, with the parameters themselves instead of log lambda if that is all."""
        if self.cast == "prod" or self.real:
            return self._streaming_modes()
        parameters = ops.DLRExponents(self.log_lambda_re, self.log_lambda_im)
        return StepModes(self.W, parameters, self.D)

    def _streaming_states(self) -> int | None:
        if self.cast == "real":
            return self.d_state
        pairs = self.d_state * (self.d_state + 1) // 2
        return pairs if self.d_state <= PROD_PAIRS_UP_TO else None

    def _streaming_modes(self) -> Modes:
        modes = self.modes()
        if self.cast == "real":
            return modes
        return Modes(*ops.prod_modes(modes.W, modes.log_lambda), modes.D)
