"""What DSS and S4D share: a continuous diagonal system, each channel sampled with its own step."""

import math
from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn

from dlrnn import ops
from dlrnn.nn.mixer import KernelMixer, KernelMixerOptions
from dlrnn.nn.streaming import Modes
from dlrnn.ops.checks import require_dtype, require_steps


class StateSpace(KernelMixer):
    """`dx/dt = Lambda x + u`, `y = c Re(W x) + D u`, the input held for a step `Delta_h`.

    With `Lambda = -exp(log_decay) + i frequency` and `Delta = exp(log_dt)` the kernel is

        K_hk = c Re(sum_n W_hn (exp(Delta_h Lambda_n) - 1) / Lambda_n exp(Delta_h Lambda_n k)) .

    A subclass gives the shape of Lambda, [N] or [H, N], and its initialisation. The two directions
    of a bidirectional layer share Lambda and Delta; W has 2 H rows.
    """

    kernel_parameters: ClassVar[tuple[str, ...]] = ("log_decay", "frequency", "log_dt", "W")

    option_names: ClassVar[tuple[str, ...]] = ("d_state", "dt_min", "dt_max")
    multiplicity: ClassVar[int]
    """c: 2 where a mode stands for itself and its conjugate, else 1."""

    def __init__(
        self,
        d_model: int,
        d_state: int,
        *,
        lambda_shape: tuple[int, ...],
        dt_min: float,
        dt_max: float,
        **options: Unpack[KernelMixerOptions],
    ) -> None:
        super().__init__(d_model, **options)
        require_steps(dt_min, dt_max)
        self.d_state, self.dt_min, self.dt_max = d_state, float(dt_min), float(dt_max)
        self.log_decay = nn.Parameter(torch.empty(lambda_shape))
        self.frequency = nn.Parameter(torch.empty(lambda_shape))
        self.log_dt = nn.Parameter(torch.empty(d_model))
        self.W = nn.Parameter(torch.empty(self.rows, lambda_shape[-1], 2))

    def _reset(self, frequency: Tensor, deviation: float) -> None:
        """`Re Lambda = -1/2`, steps log-uniform, W normal with this deviation of each part."""
        with torch.no_grad():
            self.log_decay.fill_(math.log(0.5))
            self.frequency.copy_(frequency)
            self.log_dt.uniform_(math.log(self.dt_min), math.log(self.dt_max))
            self.W.normal_(std=deviation)
        self.reset_skip_and_out()

    def modes(self) -> Modes:
        """The DLR with this kernel: W [H, N, 2] (2 H rows if bidirectional), log lambda [H, N, 2]
        (float64), D [H].
        """
        require_dtype("the parameters of a layer", self.W)
        Lambda = torch.stack((-self.log_decay.double().exp(), self.frequency.double()), dim=-1)
        log_lambda, gain = ops.zero_order_hold(Lambda, self.log_dt.double().exp())
        gain = (self.multiplicity * gain).to(self.W.dtype)
        W = ops.pair_product(self.W.unflatten(0, (-1, self.d_model)), gain)  # [1 or 2, H, N, 2]
        return Modes(W.flatten(0, 1), log_lambda, self.D)

    def _kernel(self, length: int) -> Tensor:
        W, log_lambda, _ = self.modes()
        W = W.unflatten(0, (-1, self.d_model))
        return ops.channel_vandermonde(W, log_lambda, length).flatten(0, 1)

    def _streaming_states(self) -> int:
        return self.W.shape[1]

    def _streaming_modes(self) -> Modes:
        return self.modes()
