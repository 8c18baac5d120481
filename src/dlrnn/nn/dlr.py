"""The DLR layer: a diagonal linear RNN, trained as a convolution, run as a recurrence."""

import math
from typing import Any, ClassVar, Literal, cast, get_args, overload

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from dlrnn import ops
from dlrnn.nn.inputs import beyond, check_input, checked_lengths
from dlrnn.nn.streaming import (
    Modes,
    RecurrentState,
    attached,
    initial_state,
    read_chunk,
    read_chunk_online,
    read_step,
)
from dlrnn.ops import OnlineState
from dlrnn.ops.checks import (
    require,
    require_count,
    require_device,
    require_dtype,
    require_finite,
    require_shape,
)

Cast = Literal["real", "prod"]
Activation = Literal["gelu", "silu", "relu", "identity"]
DLRState = RecurrentState | OnlineState

PROD_PAIRS_UP_TO = 16
"""DLR-prod streams over N (N + 1) / 2 pairs of states up to this N: constant memory, 136 states at
most. Above it, online convolution is faster (docs/performance.md), and its memory is the inputs.
"""


class DLR(nn.Module):
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
        kernel_length: kernels are cut to this many entries.
        dt_min: with dt_max, bounds of `-2 log |lambda|` at initialisation (log-uniform).
        dt_max: see dt_min; smaller is a longer memory.
        glu: the linear map makes 2 H channels and a GLU halves them.
        activation: "gelu", "silu", "relu" or "identity".
        dropout: probability, after the activation.
        project: False leaves out activation, dropout and linear map: a linear layer.
    """

    kernel_parameters: ClassVar[tuple[str, ...]] = ("log_lambda_re", "log_lambda_im", "W")
    """The parameters that make the kernel: no weight decay, see `param_groups`."""

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
        super().__init__()
        require_count("d_model", d_model)
        require_count("d_state", d_state)
        require(cast in get_args(Cast), f"cast must be 'real' or 'prod', not {cast!r}")
        if kernel_length is not None:
            require_count("kernel_length (None is no limit)", kernel_length)
        bounded = 0 < dt_min <= dt_max < math.inf
        require(bounded, f"0 < dt_min <= dt_max must hold, not {dt_min} and {dt_max}")
        require(
            activation in get_args(Activation),
            f"activation must be one of {', '.join(get_args(Activation))}, not {activation!r}",
        )
        require(0 <= dropout < 1, f"dropout must be at least 0 and below 1, not {dropout}")
        require(
            not (real and cast == "prod"),
            "real=True has no imaginary part, so cast='prod' would give a kernel of zeros",
        )
        require(
            project or not (glu or dropout),
            "project=False is a linear layer: it takes neither glu nor dropout",
        )
        require(
            project or activation in ("gelu", "identity"),
            f"project=False is a linear layer: activation={activation!r} would not be used",
        )
        self.d_model, self.d_state = d_model, d_state
        self.bidirectional, self.cast, self.real = bidirectional, cast, real
        self.kernel_length, self.dt_min, self.dt_max = kernel_length, dt_min, dt_max
        self.glu, self.activation, self.project = glu, activation, project
        self.dropout_p = dropout

        rows, parts = d_model * (2 if bidirectional else 1), 1 if real else 2
        self.log_lambda_re = nn.Parameter(torch.empty(d_state))
        self.log_lambda_im = None if real else nn.Parameter(torch.empty(d_state))
        self.W = nn.Parameter(torch.empty(rows, d_state, parts))
        self.D = nn.Parameter(torch.empty(d_model))
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()  # p = 0 would still copy
        self.out = nn.Linear(d_model, d_model * (2 if glu else 1)) if project else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The paper's initialisation: phases evenly around the circle, decays log-uniform."""
        with torch.no_grad():
            r = torch.empty_like(self.log_lambda_re)
            r.uniform_(math.log(self.dt_min), math.log(self.dt_max))
            self.log_lambda_re.copy_((r.exp() / 2).sqrt())
            if self.log_lambda_im is not None:
                self.log_lambda_im.copy_(
                    2 * math.pi * torch.arange(self.d_state).double() / self.d_state
                )
            self.W.normal_(std=1 / self.d_state)
            self.D.normal_()
        if self.out is not None:
            self.out.reset_parameters()

    def options(self) -> dict[str, Any]:
        """The arguments that make this layer again: `DLR(**layer.options())`."""
        names = (
            *("d_model", "d_state", "bidirectional", "cast", "real", "kernel_length"),
            *("dt_min", "dt_max", "glu", "activation", "project"),
        )
        return {name: getattr(self, name) for name in names} | {"dropout": self.dropout_p}

    def extra_repr(self) -> str:
        """What `print(layer)` shows."""
        shown = f"d_model={self.d_model}, d_state={self.d_state}, cast={self.cast!r}"
        flags = [name for name in ("bidirectional", "real", "glu") if getattr(self, name)]
        limit = [f"kernel_length={self.kernel_length}"] if self.kernel_length else []
        return ", ".join((shown, *flags, *limit))

    # ------------------------------------------------------------------------------ the kernel

    def modes(self) -> Modes:
        """W [H, N, 2] and log lambda [N, 2] (float64) as pairs, whatever the cast, and D [H]; W has
        2 H rows if bidirectional.
        """
        require_dtype("the parameters of a DLR layer", self.W)
        log_modulus = -self.log_lambda_re.double().square()
        if self.log_lambda_im is None:
            W = torch.cat((self.W, torch.zeros_like(self.W)), dim=-1)
            log_lambda = torch.stack((log_modulus, torch.zeros_like(log_modulus)), dim=-1)
            return Modes(W, log_lambda, self.D)
        phase = self.log_lambda_im.double()
        return Modes(self.W, torch.stack((log_modulus, phase), dim=-1), self.D)

    def kernel(self, length: int) -> Float[Tensor, "rows K"]:
        """The first `min(length, kernel_length)` entries, [H, K]; 2 H rows if bidirectional."""
        if length < 1:
            raise ValueError(f"a kernel needs a length of at least 1, not {length}")
        for name in self.kernel_parameters:
            if (parameter := getattr(self, name)) is not None:
                require_finite(name, parameter)
        length = min(length, self.kernel_length or length)
        W, log_lambda, _ = self.modes()
        if self.cast == "real":
            return ops.vandermonde(W, log_lambda, length)
        kernel = ops.complex_vandermonde(W, log_lambda, length)
        return kernel[0] * kernel[1]

    def _with_skip(self, kernel: Tensor) -> Tensor:
        """`conv(K, u) + D u = conv(K + D at entry 0, u)`."""
        require_finite("D", self.D)
        return kernel + F.pad(self.D[:, None], (0, kernel.shape[1] - 1))

    # ------------------------------------------------------------------------------ whole

    @overload
    def forward(
        self, x: Tensor, state: DLRState | None = ..., *, lengths: Tensor | None = ...
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        x: Tensor,
        state: DLRState | None = ...,
        *,
        return_state: Literal[True],
        lengths: Tensor | None = ...,
    ) -> tuple[Tensor, DLRState]: ...
    @overload
    def forward(
        self,
        x: Tensor,
        state: DLRState | None = ...,
        *,
        return_state: bool,
        lengths: Tensor | None = ...,
    ) -> Tensor | tuple[Tensor, DLRState]: ...
    def forward(
        self,
        x: Float[Tensor, "B L H"],
        state: DLRState | None = None,
        *,
        return_state: bool = False,
        lengths: Integer[Tensor, " B"] | None = None,
    ) -> Float[Tensor, "B L H"] | tuple[Float[Tensor, "B L H"], DLRState]:
        """Read x after `state`; `lengths` are the true lengths of a padded batch.

        What lies beyond a sequence's length is ignored, and the output there is 0.
        """
        check_input(x, ("B", "L", self.d_model), self.W)
        padding = None
        if lengths is not None:
            lengths = checked_lengths(x, lengths)
            padding = beyond(x, lengths)
        u = x if padding is None else x.masked_fill(padding, 0)
        require_finite("x", u)
        if return_state or state is not None:
            y, state = self._read_chunk(u.to(self.W.dtype), state, lengths)
        else:
            kernel = self.kernel(x.shape[1])
            right, left = kernel[: self.d_model], kernel[self.d_model :]
            y = ops.convolution(u, self._with_skip(right), left if self.bidirectional else None)
        y = self._mix(y.to(x.dtype))
        if padding is not None:
            y = y.masked_fill(padding, 0)
        return (y, cast("DLRState", state)) if return_state else y

    def _mix(self, y: Tensor) -> Tensor:
        if self.out is None:
            return y
        y = y if self.activation == "identity" else getattr(F, self.activation)(y)
        y = self.out(self.dropout(y))
        return F.glu(y, dim=-1) if self.glu else y

    # ------------------------------------------------------------------------------ streaming

    @property
    def _online(self) -> bool:
        return self.cast == "prod" and self.d_state > PROD_PAIRS_UP_TO

    def _streaming_modes(self) -> Modes:
        modes = self.modes()
        if self.cast == "real":
            return modes
        return Modes(*ops.prod_modes(modes.W, modes.log_lambda), modes.D)

    def _skip_kernel(self, length: int) -> Tensor:
        return self._with_skip(self.kernel(length))

    def initial_state(self, batch_size: int) -> DLRState:
        """The state before the first position."""
        self._check_streams()
        if isinstance(batch_size, float | str) or batch_size < 0:
            raise ValueError(f"batch_size must be a whole number of at least 0, not {batch_size!r}")
        if self._online:
            nothing = self.W.new_zeros(batch_size, 0, self.d_model)
            return ops.online_start(nothing, self._skip_kernel, self.kernel_length)
        return initial_state(self._streaming_modes(), batch_size, self.kernel_length)

    def step(
        self, x: Float[Tensor, "B H"], state: DLRState | None = None
    ) -> tuple[Float[Tensor, "B H"], DLRState]:
        """One position: `y_t, state = layer.step(x_t, state)`.

        Constant time and memory, wherever in the sequence; for cast="prod" with more than
        PROD_PAIRS_UP_TO states logarithmic time on average, and the inputs are kept.
        """
        check_input(x, ("B", self.d_model), self.W)
        require_finite("x", x)
        state = self.initial_state(x.shape[0]) if state is None else state
        self._check_state(state, x.shape[0])
        state = self._attached(state)
        u = x.to(self.W.dtype)
        if isinstance(state, OnlineState):
            y, state = ops.online_step(u, state, self._skip_kernel, self.kernel_length)
            return self._mix(y.to(x.dtype)), state
        y, state = read_step(u, self._streaming_modes(), state)
        return self._mix(y.to(x.dtype)), state

    def _read_chunk(
        self, u: Tensor, state: DLRState | None, lengths: Tensor | None
    ) -> tuple[Tensor, DLRState]:
        self._check_streams()
        if state is not None:
            self._check_state(state, u.shape[0])
            state = self._attached(state)
        window = self.kernel_length
        if self._online:
            before = cast("OnlineState | None", state)
            return read_chunk_online(u, self._skip_kernel, before, lengths=lengths, window=window)
        known = cast("RecurrentState | None", state)
        return read_chunk(
            u, self._streaming_modes(), self._skip_kernel, known, lengths=lengths, window=window
        )

    def _attached(self, state: DLRState) -> DLRState:
        """A state made without gradients (or detached) gets them, where the inputs are known."""
        if not torch.is_grad_enabled() or torch.compiler.is_exporting():
            return state
        lambdas = self.log_lambda_re.requires_grad or (
            self.log_lambda_im is not None and self.log_lambda_im.requires_grad
        )
        if isinstance(state, OnlineState):
            wanted = lambdas or self.W.requires_grad or self.D.requires_grad
            if wanted and not state.kernel.requires_grad:
                history = state.history() if state.blocks else self.W.new_zeros(0, 0, self.d_model)
                return ops.online_start(history, self._skip_kernel, self.kernel_length)
        elif self.kernel_length and lambdas and not state.x.requires_grad:
            return attached(state, self._streaming_modes())
        return state

    # ------------------------------------------------------------------------------ checks

    def _check_streams(self) -> None:
        require(
            not self.bidirectional,
            "a bidirectional layer reads the future: it has no state and cannot stream",
        )

    def _check_state(self, state: DLRState, batch: int) -> None:
        kind = OnlineState if self._online else RecurrentState
        require(
            isinstance(state, kind),
            f"this layer's state is a {kind.__name__}, not a {type(state).__name__}",
        )
        if isinstance(state, RecurrentState):
            pairs = self.d_state * (self.d_state + 1) // 2
            states = self.d_state if self.cast == "real" else pairs
            dtype = torch.float64 if self.kernel_length else self.W.dtype
            past = (batch, self.kernel_length or 0, self.d_model)
            require_shape("state.x", state.x, (batch, self.d_model, states, 2))
            require_shape("state.past", state.past, past)
            require_dtype("state.x", state.x, (dtype,))
            require_dtype("state.past", state.past, (self.W.dtype,))
            for name, part in zip(state._fields, state, strict=True):
                require_device(f"state.{name}", part, self.W.device)
        else:
            require_dtype("state.kernel", state.kernel, (self.W.dtype,))
            require_device("state.kernel", state.kernel, self.W.device)
            for block in state.blocks[:1]:
                require_shape("a block of the state", block.inputs, (batch, "p", self.d_model))
