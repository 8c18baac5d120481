"""The tape: a DLR whose addresses come from the input."""

import math
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dlrnn import ops
from dlrnn.nn.mixer import Activation, Mixer, beyond
from dlrnn.ops.checks import (
    require,
    require_count,
    require_device,
    require_dtype,
    require_flags,
    require_probability,
    require_shape,
)
from dlrnn.ops.pairs import has_float64

Clock = Literal["fixed", "shared", "own"]


class TapeState(NamedTuple):
    """What a tape keeps of the positions read.

    `tape` are the harmonics of what was written. `clock`, modulo the length of the tape, is the
    time of the next position: one for all heads, or each head's own. `first` are the first `hold`
    inputs, and `seen` is the number of positions read.
    """

    tape: Float[Tensor, "B heads D N 2"]
    clock: Float[Tensor, "B clocks"]
    first: Float[Tensor, "B hold H"]
    seen: Int[Tensor, " B"]


class TapeDLR(Mixer[TapeState]):
    """Writes values at one angle of a circle and reads at another, `sum_j K(r_k - a_j) v_j`.

    The tape is a circle with P = `length` places. Position j writes `beta_j v_j` at the angle a_j,
    and position k reads at r_k what was written at j <= k, through a kernel of N = P // 2 + 1
    harmonics. In each head, with `omega = 2 pi / P`:

        t_k = sum_{j < k} delta_j                         the clock: delta = 1, or a linear map
        a_k = omega t_k                                   where position k writes
        r_k = omega t_k - arg z_k   or   r_k = -arg z_k   where it reads: a lag, or an address
        S_nk = S_n,k-1 + beta_k v_k e^(i n a_k)           the state, n = 0 .. N-1
        y_k = Re sum_n c_n e^(i n r_k) conj(S_nk)  =  sum_{j <= k} K(r_k - a_j) beta_j v_j
        K(t) = Re sum_n c_n e^(i n t)

    z is a unit complex number, the product of one or two normalised linear maps of the input to
    two numbers, without bias. A layer whose z is 1 and whose clock is fixed is a DLR with
    `lambda_n = e^(i omega n)`. The output is a linear map of the y of all heads.

        layer = TapeDLR(d_model=64, length=1024)
        y = layer(x)                                  # x, y [B, L, 64], of any L
        y, state = layer(x, return_state=True)        # read a prefix ...
        y_t, state = layer.step(x_t, state)           # ... and go on step by step, x_t [B, 64]
        layer.grow(2048)                              # the same addresses on a longer tape

    Clocks and heads are computed in float64: the N-th harmonic multiplies the error of an angle
    by N. The state has 2 N numbers for each value.

    Args:
        d_model: channels, H.
        length: places on the tape, P. Addresses that differ by P are the same.
        heads: each has a write and a read angle of its own.
        d_head: values that a head writes at a position.
        kernels: kernels of a head; each belongs to `d_head / kernels` of its values.
        lag_heads: how many of the heads read at a lag, the first ones; the others read at an
            address. Half of them if not given.
        factors: linear maps whose product is z, 1 or 2. The angle of one linear map of a point
            on a circle turns as fast as the point does; that of two also twice as fast.
        clock: "fixed" is `delta = 1`; "shared" and "own" learn delta, one for all heads or one
            for each.
        gate: learns the write gate `beta = sigmoid(linear map)`; without it beta is 1.
        hold: adds a linear map of the first so many inputs to every later one, before all else.
        bidirectional: a second set of kernels reads what was written at j >= k; such a layer
            cannot stream.
        glu: the linear map makes 2 H channels and a GLU halves them.
        activation: of y, before the linear map: "gelu", "silu", "relu" or "identity".
        dropout: probability, after the activation.
    """

    kernel_parameters: ClassVar[tuple[str, ...]] = ("c",)
    option_names: ClassVar[tuple[str, ...]] = (
        *("d_model", "length", "heads", "d_head", "kernels", "lag_heads", "factors", "clock"),
        *("gate", "hold", "bidirectional", "glu", "activation"),
    )

    def __init__(
        self,
        d_model: int,
        length: int,
        *,
        heads: int = 4,
        d_head: int = 16,
        kernels: int = 4,
        lag_heads: int | None = None,
        factors: int = 1,
        clock: Clock = "fixed",
        gate: bool = False,
        hold: int = 0,
        bidirectional: bool = False,
        glu: bool = False,
        activation: Activation = "identity",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        require_flags(gate=gate, bidirectional=bidirectional, glu=glu)
        require_probability("dropout", dropout)
        lag_heads = (heads + 1) // 2 if lag_heads is None else lag_heads
        _check_counts(d_model, length, heads, d_head, kernels, lag_heads, hold)
        require(factors in {1, 2}, f"factors must be 1 or 2, not {factors!r}")
        for name, choice, kind in (("clock", clock, Clock), ("activation", activation, Activation)):
            known = ", ".join(get_args(kind))
            require(choice in get_args(kind), f"{name} must be one of {known}, not {choice!r}")
        self.d_model, self.length, self.heads, self.d_head = d_model, length, heads, d_head
        self.kernels, self.lag_heads, self.factors = kernels, lag_heads, factors
        self.clock, self.gate, self.hold, self.bidirectional = clock, gate, hold, bidirectional
        self.glu, self.activation, self.dropout_p = glu, activation, float(dropout)
        clocks = {"fixed": 0, "shared": 1, "own": heads}[clock]
        self.c = nn.Parameter(torch.empty(self._kernel_rows(), kernels, self.harmonics, 2))
        self.value = nn.Linear(d_model, heads * d_head)
        self.z = nn.Linear(d_model, 2 * factors * heads, bias=False)
        self.delta = nn.Linear(d_model, clocks) if clocks else None
        self.beta = nn.Linear(d_model, heads) if gate else None
        self.held = nn.Linear(hold * d_model, d_model) if hold else None
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.out = nn.Linear(heads * d_head, d_model * (2 if glu else 1))
        self._reset_kernels()

    @property
    def harmonics(self) -> int:
        """N: those that a tape of `length` places can tell apart."""
        return self.length // 2 + 1

    def _kernel_rows(self) -> int:
        return self.heads * (2 if self.bidirectional else 1)

    def reset_parameters(self) -> None:
        """Low-pass filters as kernels; PyTorch's initialisation of linear maps."""
        self._reset_kernels()
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()

    def _reset_kernels(self) -> None:
        with torch.no_grad():
            self.c.copy_(low_pass(self.length, self.kernels)[None])

    def grow(self, length: int) -> None:
        """Make the tape longer, of `length` places; angles, as parts of the circle, stay.

        The widest kernel of a head, which tells neighbouring places apart, becomes the widest one
        of the new length, at the old one's gain. The others keep their harmonics. The parameter c
        is a new one, which an optimizer must be told; states of the shorter tape do not fit.
        """
        require_count("length", length)
        longer = f"a tape of {self.length} places can grow, not shrink to {length}"
        require(length >= self.length, longer)
        with torch.no_grad():
            old, before = self.c.detach(), low_pass(self.length, self.kernels).to(self.c)
            new = low_pass(length, self.kernels).to(self.c).expand(len(old), -1, -1, -1).clone()
            shared = old.shape[2]
            new[:, :-1, :shared] = old[:, :-1] * (self.length / length)
            gain = (old[:, -1] * before[-1]).sum((1, 2)) / before[-1].square().sum()
            new[:, -1] *= gain[:, None, None]
        self.length = length
        self.c = nn.Parameter(new, requires_grad=self.c.requires_grad)

    def options(self) -> dict[str, Any]:
        """The arguments that make this layer again: `type(layer)(**layer.options())`."""
        made = {name: getattr(self, name) for name in self.option_names}
        return made | {"dropout": self.dropout_p}

    def extra_repr(self) -> str:
        """What `print(layer)` shows."""
        flags = [name for name in ("bidirectional", "glu") if getattr(self, name)]
        shown = [f"{name}={getattr(self, name)!r}" for name in ("length", "d_head", "lag_heads")]
        return ", ".join((f"d_model={self.d_model}, heads={self.heads}", *flags, *shown))

    # ------------------------------------------------------------------------------ the layer

    def _whole(self, u: Tensor, lengths: Tensor | None) -> Tensor:
        return self._read(u, None, lengths)[0]

    def _read(
        self, u: Tensor, state: TapeState | None, lengths: Tensor | None
    ) -> tuple[Tensor, TapeState]:
        """The output for positions [B, L, H] after `state`, and the next state."""
        count = u.shape[1] if lengths is None else lengths
        begins, state = state is None, self._start(u.shape[0]) if state is None else state
        x, first = self._with_held(u.to(self.c.dtype), state, lengths)
        v = self.value(x).unflatten(-1, (self.heads, self.d_head)).to(self.c.dtype)
        if self.beta is not None:
            v = v * torch.sigmoid(self.beta(x)).to(v.dtype)[..., None]
        if lengths is not None:  # nothing is written beyond a sequence
            v = v.masked_fill(beyond(u, lengths)[..., None], 0)
        clock = state.clock[:1].new_zeros(1, 1) if begins else state.clock
        write, read, clock = self._angles(x, clock, lengths)
        clock = clock.expand_as(state.clock).contiguous()
        y, tape = ops.tape(v, write, read, self.c[: self.heads], state.tape)
        if self.bidirectional:  # the same from right to left
            v, write, read = (t.flip(1) for t in (v, write, read))
            y = y + ops.tape(v, write, read, self.c[self.heads :])[0].flip(1)
        return self._output(y.flatten(2)), TapeState(tape, clock, first, state.seen + count)

    def _with_held(
        self, u: Tensor, state: TapeState, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Every later input plus a linear map of the first ones, and the first ones."""
        if self.held is None:
            return u, state.first
        length, places = u.shape[1], torch.arange(self.hold, device=u.device)
        index = places - state.seen[:, None]  # [B, hold], where they are in this chunk
        known = index < (length if lengths is None else lengths[:, None])
        index = index.clamp(max=length - 1)
        found = u.gather(1, index.clamp(min=0)[..., None].expand(-1, -1, u.shape[2]))
        first = torch.where((known & (index >= 0))[..., None], found, state.first)
        now = state.seen[:, None] + torch.arange(length, device=u.device)
        added = self.held(first.flatten(1)).to(u.dtype)
        return u + added[:, None].masked_fill((now < self.hold)[..., None], 0), first

    def _angles(
        self, x: Tensor, clock: Tensor, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Where heads write [#B, L, #heads] and read, in turns, and the clock behind them."""
        require(
            has_float64(x.device),
            f"TapeDLR computes angles in float64, which {x.device.type} lacks: use the CPU or CUDA",
        )
        x = x.double()
        if self.delta is None:
            t = clock[:, None] + torch.arange(x.shape[1], device=x.device)[:, None]  # [B, L, 1]
            after = clock + (x.shape[1] if lengths is None else lengths[:, None])
        else:
            delta = F.linear(x, self.delta.weight.double(), self.delta.bias.double())
            if lengths is not None:
                delta = delta.masked_fill(beyond(x, lengths), 0)
            sums = clock[:, None] + running_sum(delta)
            t, after = sums - delta, sums[:, -1]
        write = t / self.length
        maps: Tensor = F.linear(x, self.z.weight.double())
        a, b = maps.unflatten(-1, (self.heads, self.factors, 2)).unbind(-1)
        a = torch.where((a == 0) & (b == 0), 1, a)  # the angle of 0 is 0, with finite gradients
        angle = torch.atan2(b, a).sum(-1) / (2 * math.pi)
        lags = torch.arange(self.heads, device=x.device) < self.lag_heads
        return write, write * lags - angle, after.remainder(self.length)

    def _output(self, y: Tensor) -> Tensor:
        """The output stage: activation, dropout, linear map, GLU."""
        y = y if self.activation == "identity" else getattr(F, self.activation)(y)
        y = self.out(self.dropout(y))
        return F.glu(y, dim=-1) if self.glu else y

    # ------------------------------------------------------------------------------ streaming

    def _start(self, batch: int) -> TapeState:
        c, clocks = self.c, self.heads if self.clock == "own" else 1
        return TapeState(
            c.new_zeros(batch, self.heads, self.d_head, self.harmonics, 2),
            c.new_zeros(batch, clocks, dtype=torch.float64),
            c.new_zeros(batch, self.hold, self.d_model),
            c.new_zeros(batch, dtype=torch.int64),
        )

    def _initial_state(self, batch_size: int) -> TapeState:
        return self._start(batch_size)

    def _chunk(
        self, u: Tensor, state: TapeState | None, lengths: Tensor | None
    ) -> tuple[Tensor, TapeState]:
        return self._read(u, state, lengths)

    def _step(self, u: Tensor, state: TapeState) -> tuple[Tensor, TapeState]:
        y, after = self._read(u[:, None], state, None)
        return y[:, 0], after

    def _parameter(self) -> Tensor:
        return self.c

    def _check_state(self, state: TapeState, batch: int) -> None:
        kind = type(state).__name__
        require(isinstance(state, TapeState), f"this layer's state is a TapeState, not a {kind}")
        every = zip(TapeState._fields, state, self._start(0), strict=True)
        for name, part, other in every:
            require_shape(f"state.{name}", part, (batch, *other.shape[1:]))
            require_dtype(f"state.{name}", part, (other.dtype,))
            require_device(f"state.{name}", part, other.device)


def _check_counts(  # noqa: PLR0917
    d_model: object,
    length: object,
    heads: int,
    d_head: int,
    kernels: int,
    lag_heads: object,
    hold: object,
) -> None:
    counts = {"d_model": d_model, "length": length, "heads": heads, "d_head": d_head}
    for name, value in (counts | {"kernels": kernels}).items():
        require_count(name, value)
    fits = d_head % kernels == 0
    require(fits, f"d_head must be a multiple of kernels, and {d_head} is not one of {kernels}")
    for name, value, most in (("lag_heads", lag_heads, heads), ("hold", hold, math.inf)):
        fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
        bound = "" if most == math.inf else f" and at most {most}"
        require(fits, f"{name} must be a whole number of at least 0{bound}, not {value!r}")


def low_pass(length: int, kernels: int) -> Float[Tensor, "kernels N 2"]:
    """Kernels of N = length // 2 + 1 harmonics, in float64, that pass the first 2, ..., N of them.

    The last one is 1 at place 0 and 0 at the other places. The narrow ones are the same angle wide
    for every length: they tell a reader far from its place where to go.
    """
    harmonics = length // 2 + 1
    narrowest = min(1.0, math.log2(harmonics))
    widest = math.log2(harmonics)
    passed = 2 ** torch.linspace(narrowest, widest, kernels, dtype=torch.float64, device="cpu")
    passed[-1] = harmonics
    n = torch.arange(harmonics, device="cpu")
    alone = (n == 0) | (2 * n == length)  # of the others there are two, n and -n
    weight = torch.where(alone, 1.0, 2.0).double() / length
    c = weight * (n <= passed[:, None])
    return torch.stack((c, torch.zeros_like(c)), dim=-1)


def running_sum(x: Float[Tensor, "B L M"]) -> Float[Tensor, "B L M"]:
    """The sums of x up to each position; PyTorch's cumsum is not deterministic on a GPU."""
    width = 1
    while width < x.shape[1]:
        x = x + F.pad(x[:, :-width], (0, 0, width, 0))
        width *= 2
    return x
