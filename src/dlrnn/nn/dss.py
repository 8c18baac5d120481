"""DSS-exp: a diagonal state space whose step is learned for each channel."""

import math
from typing import ClassVar, Unpack

import torch

from dlrnn.nn.mixer import KernelMixerOptions
from dlrnn.nn.state_space import StateSpace
from dlrnn.ops.checks import require_count, require_positive


class DSS(StateSpace):
    """DSS-exp: one `Lambda = -exp(log_decay) + i frequency` for all channels, a step for each.

        K_hk = Re(sum_n W_hn (exp(Delta_h Lambda_n) - 1) / Lambda_n exp(Delta_h Lambda_n k))

    with `Delta = exp(log_dt)`; then `conv(K, u) + D u`, activation, dropout and a linear map.
    Each channel uses its own powers of one set of lambda; it streams as a DLR does.

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
        require_count("d_state", d_state)
        super().__init__(
            d_model,
            d_state,
            lambda_shape=(d_state,),
            dt_min=dt_min,
            dt_max=dt_max,
            **options,
        )
        require_positive("frequency_step", frequency_step)
        self.frequency_step = float(frequency_step)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """`Lambda_n = -1/2 + i frequency_step n`, Delta log-uniform, `W ~ N(0, 1)` in each part."""
        self._reset(self.frequency_step * torch.arange(self.d_state).double(), deviation=1.0)
