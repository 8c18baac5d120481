"""S4-LegS: a state space with a diagonal-plus-low-rank matrix (Gu, Goel and Re 2021)."""

import math
from typing import ClassVar, Unpack, cast

import torch
from torch import Tensor, nn

from dlrnn import ops
from dlrnn.nn.mixer import KernelMixer, KernelMixerOptions, KernelState
from dlrnn.nn.streaming import RecurrentState
from dlrnn.ops.checks import require, require_count, require_dtype, require_steps
from dlrnn.ops.dplr import DPLR, dplr_kernel, legs
from dlrnn.ops.dplr_recurrence import dplr_advance, dplr_response, dplr_step
from dlrnn.ops.pairs import in_float64

FEW = 16  # chunks of up to this many positions are read step by step, in O(N) each


class S4(KernelMixer):
    """`x' = (Lambda - P P^*) x + B u`, `y = C x + D u`, bilinear with a step for each channel.

    With `A = Lambda - P P^*`, `Lambda = -exp(log_decay) + i frequency` and `Delta = exp(log_dt)`

        K_k = 2 Re(C Abar^k Bbar) ,   Abar = (I - Delta/2 A)^-1 (I + Delta/2 A) ,
                                      Bbar = (I - Delta/2 A)^-1 Delta B ;

    then activation, dropout and a linear map. All channels share Lambda, P and B, whose N / 2
    numbers stand for conjugate pairs; C and Delta are each channel's own, and the second direction
    of a bidirectional layer has its own C. At initialisation A and B are HiPPO-LegS. Whatever is
    learned, `A + A^*` stays negative: the system is stable. The kernel is a Cauchy product
    (`ops/dplr.py`), right for every length; streaming is the recurrence, in O(N) a step, and online
    convolution with a restricted kernel.

    Args:
        d_model: channels, H.
        d_state: the size of the real system, N, even: N / 2 complex states are kept.
        dt_min: with dt_max, bounds of Delta at initialisation (log-uniform).
        dt_max: see dt_min; smaller is a longer memory.
        options: bidirectional, kernel_length, glu, activation, dropout and project, as in
            `KernelMixer`.
    """

    kernel_parameters: ClassVar[tuple[str, ...]] = (
        "log_decay",
        "frequency",
        "log_dt",
        "P",
        "B",
        "C",
    )

    option_names: ClassVar[tuple[str, ...]] = ("d_state", "dt_min", "dt_max")

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        *,
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        **options: Unpack[KernelMixerOptions],
    ) -> None:
        super().__init__(d_model, **options)
        require_count("d_state", d_state)
        require(d_state % 2 == 0, f"d_state must be even (conjugate pairs), not {d_state}")
        require_steps(dt_min, dt_max)
        self.d_state, self.dt_min, self.dt_max = d_state, float(dt_min), float(dt_max)
        self.log_decay = nn.Parameter(torch.empty(d_state // 2))
        self.frequency = nn.Parameter(torch.empty(d_state // 2))
        self.P = nn.Parameter(torch.empty(d_state // 2, 2))
        self.B = nn.Parameter(torch.empty(d_state // 2, 2))
        self.C = nn.Parameter(torch.empty(self.rows, d_state // 2, 2))
        self.log_dt = nn.Parameter(torch.empty(d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """HiPPO-LegS; Delta log-uniform, C complex normal with `E |C|^2 = 1`."""
        Lambda, P, B = legs(self.d_state)
        with torch.no_grad():
            self.log_decay.copy_((-Lambda[:, 0]).log())
            self.frequency.copy_(Lambda[:, 1])
            self.P.copy_(P)
            self.B.copy_(B)
            self.C.normal_(std=math.sqrt(0.5))
            self.log_dt.uniform_(math.log(self.dt_min), math.log(self.dt_max))
        self.reset_skip_and_out()

    def system(self) -> DPLR:
        """The continuous system, float64 pairs; C [1, H, N/2, 2], or [2, ...] if bidirectional."""
        require_dtype("the parameters of a layer", self.C)
        parameters = self.log_decay, self.frequency, self.P, self.B, self.C, self.log_dt
        log_decay, frequency, P, B, C, log_dt = map(in_float64, parameters)
        Lambda = torch.stack((-log_decay.exp(), frequency), dim=-1)
        return DPLR(Lambda, P, B, C.unflatten(0, (-1, self.d_model)), log_dt.exp())

    def _kernel(self, length: int) -> Tensor:
        return dplr_kernel(self.system(), length).flatten(0, 1).to(self.C)

    # ------------------------------------------------------------------------------ streaming

    def _streaming_states(self) -> int | None:
        return None if self.kernel_length else self.d_state // 2

    def _initial_state(self, batch_size: int) -> KernelState:
        if self.kernel_length:
            return super()._initial_state(batch_size)
        return self._state(self.C.new_zeros(batch_size, *self.C.shape))

    def _state(self, x: Tensor) -> RecurrentState:
        """A state with x and no past inputs, which only a restricted kernel needs."""
        past = x.new_zeros(x.shape[0], 0, self.d_model)
        return RecurrentState(x, past, x.new_zeros(1, dtype=torch.int64))

    def _read_step(self, u: Tensor, state: KernelState) -> tuple[Tensor, KernelState]:
        if self.kernel_length:
            return super()._read_step(u, state)
        y, x = dplr_step(u, self.system(), cast("RecurrentState", state).x)
        return y + self.D * u, self._state(x)

    def _read_chunk(
        self, u: Tensor, state: KernelState | None, lengths: Tensor | None
    ) -> tuple[Tensor, KernelState]:
        if self.kernel_length:
            return super()._read_chunk(u, state, lengths)
        if state is not None and lengths is None and u.shape[1] <= FEW:
            outputs = []
            for u_t in u.unbind(1):
                y_t, state = self._read_step(u_t, state)
                outputs.append(y_t)
            return torch.stack(outputs, dim=1), state
        system, x = self.system(), None
        y = ops.convolution(u, self._skip_kernel(u.shape[1]))
        if state is not None:
            x = cast("RecurrentState", state).x
            y = y + dplr_response(system, x, u.shape[1])
        ends = u if lengths is None else ops.align_right(u, lengths)
        return y, self._state(dplr_advance(ends, system, x, lengths))
