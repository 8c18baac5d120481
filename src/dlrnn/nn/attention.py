"""Softmax attention instead of the convolution: the paper's baselines."""

from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dlrnn import ops
from dlrnn.nn.layers import SumNorm
from dlrnn.nn.mixer import Mixer
from dlrnn.ops.checks import (
    require,
    require_count,
    require_device,
    require_dtype,
    require_flags,
    require_probability,
    require_shape,
)


class AttentionOptions(TypedDict, total=False):
    """What every kind of attention takes by name; `Attention` says what each option means."""

    heads: int
    bidirectional: bool
    dropout: float
    glu: bool


class KeyValueState(NamedTuple):
    """Rotated keys and values of the positions read, the newest last, in the layer's dtype.

    `seen` is the number of positions read of each sequence; entries before its first are zeros.
    """

    keys: Float[Tensor, "B S H"]
    values: Float[Tensor, "B S H"]
    seen: Int[Tensor, " B"]


class KeyValueBuffer(NamedTuple):
    """The same with room for later positions, which steps fill; position 0 is at `first`."""

    keys: Float[Tensor, "B S H"]
    values: Float[Tensor, "B S H"]
    seen: Int[Tensor, " B"]
    first: Int[Tensor, " B"]


class Attention(Mixer[KeyValueState | KeyValueBuffer]):
    """`y = out(u + dropout(GELU(attn(u))))`, softmax attention with rotary positions.

    `attn(u)_t = merge(sum_s softmax_s(temperature <R_t q_t, R_s k_s>) v_s)` in each head, over
    s <= t (every s when bidirectional); R rotates by the position, the temperature is learned.
    PyTorch's fused kernels have no second derivative: ask for one in `torch.nn.attention`'s
    `sdpa_kernel(SDPBackend.MATH)`.

        layer = Attention(d_model=64, heads=4)
        y, state = layer(x, return_state=True)        # read a prefix [B, L, 64] ...
        y_t, state = layer.step(x_t, state)           # ... and go on

    The state keeps all keys and values, and the time of a step is linear in their number.

    Args:
        d_model: channels, H; a multiple of 2 * heads.
        heads: each attends on its own, with H / heads channels.
        bidirectional: every position sees every other; such a layer cannot stream.
        dropout: probability, after the activation.
        glu: the linear map makes 2 H channels and a GLU halves them.
    """

    def __init__(
        self,
        d_model: int,
        *,
        heads: int = 4,
        bidirectional: bool = False,
        dropout: float = 0.0,
        glu: bool = False,
    ) -> None:
        super().__init__()
        require_count("d_model", d_model)
        require_count("heads", heads)
        require_flags(bidirectional=bidirectional, glu=glu)
        require(
            d_model % (2 * heads) == 0,
            f"d_model must be a multiple of 2 * heads (each head turns pairs of channels), and"
            f" {d_model} is not one of 2 * {heads}",
        )
        require_probability("dropout", dropout)
        self.d_model, self.heads, self.bidirectional = d_model, heads, bidirectional
        self.glu, self.dropout_p = glu, float(dropout)
        self.temperature = nn.Parameter(torch.empty(1))
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.merge = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.out = nn.Linear(d_model, d_model * (2 if glu else 1))
        self._reset_temperature()

    def reset_parameters(self) -> None:
        """Temperature `1 / sqrt(channels of a head)`; PyTorch's initialisation of linear maps."""
        self._reset_temperature()
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module.reset_parameters()

    def _reset_temperature(self) -> None:
        nn.init.constant_(self.temperature, (self._kept_channels() // self.heads) ** -0.5)

    def options(self) -> dict[str, Any]:
        """The arguments that make this layer again: `type(layer)(**layer.options())`."""
        names = ("d_model", "heads", "bidirectional", "glu")
        return {name: getattr(self, name) for name in names} | {"dropout": self.dropout_p}

    def extra_repr(self) -> str:
        """What `print(layer)` shows."""
        flags = [name for name in ("bidirectional", "glu") if getattr(self, name)]
        return ", ".join((f"d_model={self.d_model}, heads={self.heads}", *flags))

    # ------------------------------------------------------------------------------ whole

    def _whole(self, u: Tensor, lengths: Tensor | None) -> Tensor:
        positions = torch.arange(u.shape[1], device=u.device)
        return self._mix(u, self._attend(*self._queries_keys_values(u, positions[None]), lengths))

    def _queries_keys_values(
        self, u: Float[Tensor, "B L H"], positions: Int[Tensor, "#B L"]
    ) -> tuple[Float[Tensor, "B L A"], Float[Tensor, "B L A"], Float[Tensor, "B L A"]]:
        """Queries with the temperature and keys, both rotated, and values."""
        parts = self.qkv(u).unflatten(-1, (3 * self.heads, self._kept_channels() // self.heads))
        turning, v = parts.split((2 * self.heads, self.heads), dim=2)  # [B, L, heads, d_head]
        q, k = ops.rotate(turning, positions).chunk(2, dim=2)
        q = (q * self.temperature).to(q.dtype)
        return q.flatten(2), k.flatten(2), v.flatten(2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        """Whole sequences. The padding comes last, so only bidirectional layers must mask it."""
        if not self.bidirectional:
            return attention(q, k, v, self.heads, causal=True)
        if lengths is None:
            return attention(q, k, v, self.heads)
        known = torch.arange(k.shape[1], device=k.device) < lengths.clamp(min=1)[:, None]
        return attention(q, k, v, self.heads, visible=known[:, None])

    def _project(self, attended: Tensor) -> Tensor:
        projected: Tensor = self.merge(attended)
        return projected

    def _mix(self, u: Tensor, attended: Tensor) -> Tensor:
        y: Tensor = self.out(u + self.dropout(F.gelu(self._project(attended))))
        return F.glu(y, dim=-1) if self.glu else y

    # ------------------------------------------------------------------------------ streaming

    def in_place(self, state: KeyValueState | KeyValueBuffer, steps: int) -> Any:
        """The keys and values with room for `steps` positions."""
        copied = super().in_place(state, steps)
        if self._kept_length() or not isinstance(state, KeyValueState):
            return copied
        batch, count, channels = state.keys.shape
        room = state.keys.new_zeros(batch, steps, channels)
        keys, values = (torch.cat((each, room), dim=1) for each in (state.keys, state.values))
        return KeyValueBuffer(keys, values, copied.seen, count - copied.seen)

    def _initial_state(self, batch_size: int) -> KeyValueState:
        empty = self.temperature.new_zeros(batch_size, self._kept_length(), self._kept_channels())
        seen = torch.zeros(batch_size, dtype=torch.int64, device=empty.device)
        return KeyValueState(empty, empty.clone(), seen)

    def _chunk(
        self, u: Tensor, state: KeyValueState | KeyValueBuffer | None, lengths: Tensor | None
    ) -> tuple[Tensor, KeyValueState]:
        require(not isinstance(state, KeyValueBuffer), "a state in place is for steps alone")
        state = self._initial_state(u.shape[0]) if state is None else state
        assert isinstance(state, KeyValueState)
        y, after = self._read(u, state, lengths)
        return self._mix(u, y), after

    def _step(
        self, u: Tensor, state: KeyValueState | KeyValueBuffer
    ) -> tuple[Tensor, KeyValueState | KeyValueBuffer]:
        if isinstance(state, KeyValueBuffer):
            return self._mix(u[:, None], self._attend_in_place(u[:, None], state))[:, 0], state
        y, after = self._chunk(u[:, None], state, None)
        return y[:, 0], after

    def _attend_in_place(self, u: Tensor, state: KeyValueBuffer) -> Tensor:
        """Writes key and value of a position [B, 1, H] into the buffer, and attends to it."""
        require(not torch.is_grad_enabled(), "steps in place record no gradients: use no_grad()")
        now = state.seen[:, None]
        q, k, v = self._queries_keys_values(u, now)
        place = (state.first + state.seen)[:, None, None].expand_as(k)
        for buffer, new in ((state.keys, k), (state.values, v)):
            buffer.scatter_(1, place, new.to(buffer.dtype))
        then = torch.arange(state.keys.shape[1], device=u.device) - state.first[:, None]  # [B, S]
        visible = self._sees(now[:, :, None], then[:, None])
        state.seen.add_(1)
        keys, values = (each.to(q.dtype) for each in (state.keys, state.values))
        return attention(q, keys, values, self.heads, visible=visible)

    def _read(
        self, u: Tensor, state: KeyValueState, lengths: Tensor | None
    ) -> tuple[Tensor, KeyValueState]:
        """A chunk after `state`: it attends to the kept entries and to itself."""
        length, before = u.shape[1], state.keys.shape[1]
        now = state.seen[:, None] + torch.arange(length, device=u.device)  # [B, L], positions
        q, k, v = self._queries_keys_values(u, now)
        keys = torch.cat((state.keys, k.to(state.keys.dtype)), dim=1)
        values = torch.cat((state.values, v.to(state.values.dtype)), dim=1)
        if before == 0:
            y = self._attend(q, k, v, lengths)
        else:
            then = state.seen[:, None] + torch.arange(-before, length, device=u.device)  # [B, S]
            visible = self._sees(now[:, :, None], then[:, None])
            y = attention(q, keys.to(q.dtype), values.to(q.dtype), self.heads, visible=visible)
        if lengths is not None:
            keys, values = (ops.align_right(t, lengths + before) for t in (keys, values))
        seen = state.seen + (length if lengths is None else lengths)
        return y, KeyValueState(self._kept(keys), self._kept(values), seen)

    def _sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether a position attends to another one; positions begin at 0."""
        return (key >= 0) & (key <= query)

    def _kept(self, entries: Tensor) -> Tensor:
        """The entries of [B, S, H] that a later position can attend to."""
        return entries

    def _kept_length(self) -> int:
        """Entries of the state before the first position."""
        return 0

    def _kept_channels(self) -> int:
        """Channels of a key, all heads together."""
        return self.d_model

    # ------------------------------------------------------------------------------ checks

    def _parameter(self) -> Tensor:
        return self.qkv.weight

    def _check_state(self, state: KeyValueState | KeyValueBuffer, batch: int) -> None:
        require(
            isinstance(state, KeyValueState | KeyValueBuffer),
            f"this layer's state is a KeyValueState, not a {type(state).__name__}",
        )
        for name in ("keys", "values"):
            part = getattr(state, name)
            shape = batch, self._kept_length() or "S", self._kept_channels()
            require_shape(f"state.{name}", part, shape)
            require_dtype(f"state.{name}", part, (self.temperature.dtype,))
            require_device(f"state.{name}", part, self.temperature.device)
        require_shape("state.seen", state.seen, (batch,))


class AttentionFF(Attention):
    """Attention + 2 FF, which has as many parameters as DLR.

    Twice `o + W_2 GELU(W_1 LayerNorm(o) + b_1) + b_2` on the output o of the attention.

    Args:
        d_model: channels, H; a multiple of 2 * heads.
        d_ff: width of the feed-forward blocks, 16 H if not given (2048 in the paper).
        options: heads, bidirectional, dropout and glu, as in `Attention`.
    """

    def __init__(
        self, d_model: int, *, d_ff: int | None = None, **options: Unpack[AttentionOptions]
    ) -> None:
        super().__init__(d_model, **options)
        self.d_ff = 16 * d_model if d_ff is None else d_ff
        require_count("d_ff", self.d_ff)
        self.feed_forward = nn.ModuleList(
            nn.Sequential(
                SumNorm(d_model),
                nn.Linear(d_model, self.d_ff),
                nn.GELU(),
                nn.Linear(self.d_ff, d_model),
            )
            for _ in range(2)
        )

    def options(self) -> dict[str, Any]:
        """The arguments that make this layer again."""
        return super().options() | {"d_ff": self.d_ff}

    def _project(self, attended: Tensor) -> Tensor:
        o = super()._project(attended)
        for block in self.feed_forward:
            o = o + block(o)
        return o


def attention(
    q: Float[Tensor, "B L H"],
    k: Float[Tensor, "B S H"],
    v: Float[Tensor, "B S H"],
    heads: int,
    *,
    visible: Tensor | None = None,
    causal: bool = False,
) -> Float[Tensor, "B L H"]:
    """`softmax(q k^T) v` in every head; `visible` [B, L, S] (or broadcast) is the mask."""
    d_head = q.shape[-1] // heads
    q, k, v = (t.unflatten(-1, (heads, d_head)).transpose(1, 2) for t in (q, k, v))
    mask = None if visible is None else visible[:, None]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=1.0)
    return y.transpose(1, 2).flatten(2)
