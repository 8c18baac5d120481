"""S4D-Inv: a diagonal state space with S4D's inverse-law frequencies (Gu et al. 2022)."""

import math
from typing import ClassVar, Unpack

import torch

from dlrnn.nn.mixer import KernelMixerOptions
from dlrnn.nn.state_space import StateSpace
from dlrnn.ops.checks import require, require_count


class S4D(StateSpace):
    """S4D-Inv: every channel has its own Lambda, N / 2 numbers that stand for conjugate pairs.

        K_hk = 2 Re(sum_n W_hn (exp(Delta_h Lambda_hn) - 1) / Lambda_hn exp(Delta_h Lambda_hn k))

    with `Lambda = -exp(log_decay) + i frequency` and `Delta = exp(log_dt)`: zero-order hold, input
    weights of 1 (W can learn what they could); then `conv(K, u) + D u`, activation, dropout and a
    linear map. At initialisation `Lambda_n = -1/2 + i N/pi (N / (2 n + 1) - 1)`.

    Args:
        d_model: channels, H.
        d_state: the size of the real system, N, even: N / 2 complex states are kept.
        dt_min: with dt_max, bounds of Delta at initialisation (log-uniform).
        dt_max: see dt_min; smaller is a longer memory.
        options: bidirectional, kernel_length, glu, activation, dropout and project, as in
            `KernelMixer`.
    """

    multiplicity: ClassVar[int] = 2

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        *,
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        **options: Unpack[KernelMixerOptions],
    ) -> None:
        require_count("d_model", d_model)
        require_count("d_state", d_state)
        require(d_state % 2 == 0, f"d_state must be even (conjugate pairs), not {d_state}")
        super().__init__(
            d_model,
            d_state,
            lambda_shape=(d_model, d_state // 2),
            dt_min=dt_min,
            dt_max=dt_max,
            **options,
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """S4D's: the frequencies above, Delta log-uniform, W complex normal with `E |W|^2 = 1`."""
        N, n = self.d_state, torch.arange(self.d_state // 2).double()
        self._reset(N / math.pi * (N / (2 * n + 1) - 1), deviation=math.sqrt(0.5))
