"""DSS and S4D: continuous diagonal systems, each channel sampled with its own step."""

import math
from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn

from dlrnn import ops
from dlrnn.nn.mixer import KernelMixer, KernelMixerOptions
from dlrnn.nn.streaming import Modes
from dlrnn.ops.checks import require, require_count, require_dtype, require_positive, require_steps
from dlrnn.ops.pairs import in_float64


class StateSpace(KernelMixer):
    """`dx/dt = Lambda x + u`, `y = c Re(W x) + D u`, the input held for a step `Delta_h`.

    With `Lambda = -exp(log_decay) + i frequency` and `Delta = exp(log_dt)` the kernel is

        K_hk = c Re(sum_n W_hn (exp(Delta_h Lambda_n) - 1) / Lambda_n exp(Delta_h Lambda_n k)) ;

    then activation, dropout and a linear map. Each channel uses its own powers of lambda; it
    streams as a DLR does. The two directions of a bidirectional layer share Lambda and Delta; W has
    2 H rows.
    """

    kernel_parameters: ClassVar[tuple[str, ...]] = ("log_decay", "frequency", "log_dt", "W")

    option_names: ClassVar[tuple[str, ...]] = ("d_state", "dt_min", "dt_max")
    multiplicity: ClassVar[int]
    """c: 2 where a mode stands for itself and its conjugate, else 1."""
    own_lambda: ClassVar[bool]
    """Whether each channel has its own Lambda, [H, N / c], or all have the same, [N / c]."""

    def __init__(
        self,
        d_model: int,
        d_state: int,
        *,
        dt_min: float,
        dt_max: float,
        **options: Unpack[KernelMixerOptions],
    ) -> None:
        super().__init__(d_model, **options)
        require_count("d_state", d_state)
        even = d_state % self.multiplicity == 0
        require(even, f"d_state must be even (conjugate pairs), not {d_state}")
        require_steps(dt_min, dt_max)
        self.d_state, self.dt_min, self.dt_max = d_state, float(dt_min), float(dt_max)
        modes = d_state // self.multiplicity
        lambda_shape = (d_model, modes) if self.own_lambda else (modes,)
        self.log_decay = nn.Parameter(torch.empty(lambda_shape))
        self.frequency = nn.Parameter(torch.empty(lambda_shape))
        self.log_dt = nn.Parameter(torch.empty(d_model))
        self.W = nn.Parameter(torch.empty(self.rows, modes, 2))

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
        log_decay, frequency, log_dt = map(
            in_float64, (self.log_decay, self.frequency, self.log_dt)
        )
        Lambda = torch.stack((-log_decay.exp(), frequency), dim=-1)
        log_lambda, gain = ops.zero_order_hold(Lambda, log_dt.exp())
        gain = (self.multiplicity * gain).to(self.W)
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


class DSS(StateSpace):
    """DSS-exp: a `StateSpace` with one Lambda for all channels, and c = 1.

    Args:
        d_model: channels, H.
        d_state: states, N.
        dt_min: with dt_max, bounds of Delta at initialisation (log-uniform).
        dt_max: see dt_min; smaller is a longer memory.
        frequency_step: `Im Lambda_n = frequency_step n` at initialisation. It is pi in the authors'
            program and 2 pi in the paper's text.
        options: bidirectional, kernel_length, glu, activation, dropout and project, as in
            `KernelMixer`.
    """

    option_names: ClassVar[tuple[str, ...]] = (*StateSpace.option_names, "frequency_step")
    multiplicity: ClassVar[int] = 1
    own_lambda: ClassVar[bool] = False

    def __init__(
        self,
        d_model: int,
        d_state: int,
        *,
        dt_min: float = 1e-4,
        dt_max: float = 1e-2,
        frequency_step: float = math.pi,
        **options: Unpack[KernelMixerOptions],
    ) -> None:
        super().__init__(d_model, d_state, dt_min=dt_min, dt_max=dt_max, **options)
        require_positive("frequency_step", frequency_step)
        self.frequency_step = float(frequency_step)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """`Lambda_n = -1/2 + i frequency_step n`, Delta log-uniform, `W ~ N(0, 1)` in each part."""
        n = torch.arange(self.d_state, dtype=torch.float64, device="cpu")
        self._reset(self.frequency_step * n, deviation=1.0)


class S4D(StateSpace):
    """S4D-Inv: a `StateSpace` whose channels have their own Lambda, in conjugate pairs (c = 2).

    The input weights are 1, because W can learn what they could. At initialisation
    `Lambda_n = -1/2 + i N/pi (N / (2 n + 1) - 1)`, the inverse law (Gu et al. 2022).

    Args:
        d_model: channels, H.
        d_state: the size of the real system, N, even: N / 2 complex states are kept.
        dt_min: with dt_max, bounds of Delta at initialisation (log-uniform).
        dt_max: see dt_min; smaller is a longer memory.
        options: bidirectional, kernel_length, glu, activation, dropout and project, as in
            `KernelMixer`.
    """

    multiplicity: ClassVar[int] = 2
    own_lambda: ClassVar[bool] = True

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        *,
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        **options: Unpack[KernelMixerOptions],
    ) -> None:
        super().__init__(d_model, d_state, dt_min=dt_min, dt_max=dt_max, **options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The frequencies above, Delta log-uniform, W complex normal with `E |W|^2 = 1`."""
        N, n = self.d_state, torch.arange(self.d_state // 2, dtype=torch.float64, device="cpu")
        self._reset(N / math.pi * (N / (2 * n + 1) - 1), deviation=math.sqrt(0.5))
