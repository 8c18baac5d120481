"""S4D-Inv: a diagonal state space with S4D's inverse-law frequencies (Gu et al. 2022)."""

import math
from typing import ClassVar

import torch

from dlrnn.nn.kernel_mixer import Activation
from dlrnn.nn.state_space import StateSpace
from dlrnn.ops.checks import require, require_count


class S4D(StateSpace):
    """S4D-Inv: every channel has its own Lambda, N / 2 numbers that stand for conjugate pairs.

        K_hk = 2 Re(sum_n W_hn (exp(Delta_h Lambda_hn) - 1) / Lambda_hn exp(Delta_h Lambda_hn k))

    with `Lambda = -exp(log_decay) + i frequency` and `Delta = exp(log_dt)`: zero-order hold, input
    weights of 1 (what they could learn, W can); then `conv(K, u) + D u`, activation, dropout and a
    linear map. At initialisation `Lambda_n = -1/2 + i N/pi (N / (2 n + 1) - 1)`.

    Args:
        d_model: channels, H.
        d_state: the size of the real system, N, even: N / 2 complex states are kept.
        bidirectional: a second kernel reads from right to left; such a layer cannot stream. It has
            its own W and the same Lambda and Delta.
        kernel_length: kernels are cut to this many entries.
        dt_min: with dt_max, bounds of Delta at initialisation (log-uniform).
        dt_max: see dt_min; smaller is a longer memory.
        glu: the linear map makes 2 H channels and a GLU halves them.
        activation: "gelu", "silu", "relu" or "identity".
        dropout: probability, after the activation.
        project: False leaves out activation, dropout and linear map: a linear layer.
    """

    multiplicity: ClassVar[int] = 2

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        *,
        bidirectional: bool = False,
        kernel_length: int | None = None,
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        glu: bool = False,
        activation: Activation = "gelu",
        dropout: float = 0.0,
        project: bool = True,
    ) -> None:
        require_count("d_model", d_model)
        require_count("d_state", d_state)
        require(d_state % 2 == 0, f"d_state must be even (conjugate pairs), not {d_state}")
        super().__init__(
            d_model,
            d_state,
            lambda_shape=(d_model, d_state // 2),
            bidirectional=bidirectional,
            kernel_length=kernel_length,
            dt_min=dt_min,
            dt_max=dt_max,
            glu=glu,
            activation=activation,
            dropout=dropout,
            project=project,
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """S4D's: the frequencies above, Delta log-uniform, W complex normal with `E |W|^2 = 1`."""
        N, n = self.d_state, torch.arange(self.d_state // 2).double()
        self._reset(N / math.pi * (N / (2 * n + 1) - 1), deviation=math.sqrt(0.5))
