"""Encoder, blocks, decoder: a sequence to outputs at every position, or to one output."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from dlrnn.models.config import ModelConfig, Norm, Pooling, inherited_arguments, named_arguments
from dlrnn.nn.captured import state_in_place
from dlrnn.nn.layers import SumNorm, ThinLinear
from dlrnn.nn.mixer import beyond, check_input, checked_lengths
from dlrnn.ops.checks import may_read, require, require_count, require_device, require_shape

State = tuple[Any, ...]
"""The states of the mixers, one for each block."""
_POOLED = "a pooled model gives one output for a sequence: it has no state"


class Block(nn.Module):
    """`x + mixer(LayerNorm(x))` (pre-norm) or `LayerNorm(x + mixer(x))` (post-norm)."""

    def __init__(self, mixer: nn.Module, d_model: int, norm: Norm) -> None:
        super().__init__()
        self.mixer, self.norm, self.pre = mixer, SumNorm(d_model), norm == "pre"
        named = named_arguments(mixer.forward)
        inherited = inherited_arguments(type(mixer), "forward")
        self._takes = {each.name for each in (*named, *inherited)}
        for each in named[1:]:
            sentence = f"{type(mixer).__name__}.forward needs {each.name}, and may be given x alone"
            require(each.default is not each.empty, f"{sentence}: {self._advice(each.name)}")

    def forward(
        self, x: Tensor, state: Any = None, *, stream: bool = False, lengths: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """The output and the state after it; `stream` passes and returns a state.

        A mixer receives `lengths` only if padding can affect it (`sees_padding`): masks take time.
        """
        masks = lengths is not None and (stream or getattr(self.mixer, "sees_padding", True))
        arguments: dict[str, Any] = {"lengths": lengths} if masks else {}
        if stream:
            arguments |= {"state": state, "return_state": True}
        for name in arguments:
            require(name in self._takes, self._lacks(name))
        y = self.mixer(self.norm(x) if self.pre else x, **arguments)
        y, state = y if stream else (y, None)
        kind = type(self.mixer).__name__
        gives = f"the mixer {kind} must give a tensor, not a {type(y).__name__}"
        require(isinstance(y, Tensor), gives)
        if y.shape != x.shape:
            shapes = f"{list(x.shape)}, and gave {list(y.shape)}"
            raise ValueError(f"the mixer {kind} must give the shape of its input, {shapes}")
        return self._add(x, y), state

    def check_padding(self) -> None:
        """Raise if padding affects the mixer and it takes no `lengths`."""
        if getattr(self.mixer, "sees_padding", True):
            require("lengths" in self._takes, self._lacks("lengths"))

    def _lacks(self, name: str) -> str:
        kind = type(self.mixer).__name__
        why = " for sequences that are padded" if name == "lengths" else ""
        return f"the mixer {kind} cannot do this: it takes no {name}=; {self._advice(name)}{why}"

    def _advice(self, name: str) -> str:
        return f"make it {type(self.mixer).__name__}.forward(self, x, *, {name}=None)"

    def initial_state(self, batch_size: int) -> Any:
        """The state of the mixer before the first position."""
        return self._ability("initial_state")(batch_size)

    def in_place(self, state: Any, steps: int) -> Any:
        """The state for `CapturedSteps`."""
        return state_in_place(self.mixer, state, steps)

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One position, x [B, H]."""
        y, state = self._ability("step")(self.norm(x) if self.pre else x, state)
        return self._add(x, y), state

    def _ability(self, name: str) -> Any:
        kind = type(self.mixer).__name__
        require(hasattr(self.mixer, name), f"the mixer {kind} cannot do this: it has no {name}")
        return getattr(self.mixer, name)

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        total: Tensor = x + y if self.pre else self.norm(x, added=y)
        return total


class SequenceModel(nn.Module):
    """`decoder(norm(blocks(encoder(x))))`, at every position or, pooled, once.

        model = build_model(config, d_input=3, d_output=8)
        y = model(x)                                       # [B, L, 3] to [B, L, 8]
        y, state = model(x, return_state=True)             # a causal one streams
        y_t, state = model.step(x_t, state)

    Linear maps and embeddings are initialised as PyTorch does: embeddings N(0, 1).
    """

    def __init__(
        self,
        encoder: nn.Linear | nn.Embedding,
        blocks: list[Block],
        norm: nn.Module,
        decoder: nn.Module,
        pooling: Pooling | None = None,
    ) -> None:
        super().__init__()
        self.encoder, self.blocks = encoder, nn.ModuleList(blocks)
        self.norm, self.decoder, self.pooling = norm, decoder, pooling
        self._tail = (encoder.in_features,) if isinstance(encoder, nn.Linear) else ()
        self.built: tuple[ModelConfig, dict[str, Any]] | None = None
        """The arguments of `build_model`."""

    @property
    def causal(self) -> bool:
        """Whether no position sees a later one: no mixer is bidirectional."""
        return not any(getattr(module, "bidirectional", False) for module in self.modules())

    def forward(
        self,
        x: Tensor,
        lengths: Tensor | None = None,
        *,
        state: State | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, State]:
        """Outputs for x [B, L, d_input] or tokens [B, L]; a padded batch has `lengths` [B].

        Positions beyond a sequence's length are ignored, and their output is 0.
        """
        stream = return_state or state is not None
        require(not (stream and self.pooling), _POOLED)
        self._check(x, ("B", "L"))
        features, state, padding = self._features(x, lengths, state, stream=stream)
        if self.pooling:
            return cast("Tensor", self.decoder(pool(features, lengths, self.pooling)))
        y: Tensor = self.decoder(features)
        y = y if padding is None else y.masked_fill(padding, 0)
        return (y, state) if return_state else y

    def initial_state(self, batch_size: int) -> State:
        """The state before the first position."""
        require(not self.pooling, _POOLED)
        return tuple(cast("Block", block).initial_state(batch_size) for block in self.blocks)

    def in_place(self, state: State, steps: int) -> State:
        """The state for `CapturedSteps`, with room for `steps` positions where a mixer's grows."""
        pairs = zip(self.blocks, self._states(state), strict=True)
        return tuple(cast("Block", block).in_place(each, steps) for block, each in pairs)

    def step(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """One position, x [B, d_input] or tokens [B], to [B, d_output]."""
        require(not self.pooling, _POOLED)
        self._check(x, ("B",))
        h, states = self._encode(x), []
        for block, before in zip(self.blocks, self._states(state), strict=True):
            h, after = cast("Block", block).step(h, before)
            states.append(after)
        return self.decoder(self.norm(h)), tuple(states)

    def _features(
        self, x: Tensor, lengths: Tensor | None, state: State | None = None, *, stream: bool = False
    ) -> tuple[Tensor, State, Tensor | None]:
        """The decoder's input [B, L, H], the states after it, and the mask of the padding."""
        padding = None
        if lengths is not None:
            padding = beyond(x, checked_lengths(x, lengths))  # [B, L, 1]
            x = x.masked_fill(padding if self._tail else padding[..., 0], 0)
        h, states = self._encode(x), []
        for block, before in zip(self.blocks, self._states(state), strict=True):
            h, after = block(h, before, stream=stream, lengths=lengths)
            states.append(after)
        return self.norm(h), tuple(states), padding

    def _encode(self, x: Tensor) -> Tensor:
        if isinstance(self.encoder, nn.Embedding):
            _check_vocabulary(x, self.encoder.num_embeddings)
            x = x.long()
        encoded: Tensor = self.encoder(x)
        return encoded

    def _states(self, state: State | None) -> State:
        count = len(self.blocks)
        state = (None,) * count if state is None else state
        fits = f"this model has {count} states, one for each block, not {len(state)}"
        require(len(state) == count, fits)
        return state

    def _check(self, x: Tensor, shape: tuple[int | str, ...]) -> None:
        weight = self.encoder.weight
        if self._tail:
            check_input(x, (*shape, *self._tail), weight)
            return
        require_shape("x", x, shape)
        whole = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
        name = str(x.dtype).removeprefix("torch.")
        require(whole, f"x must hold tokens, whole numbers, not {name}")
        require_device("x", x, weight.device)
        require(x.dim() < 2 or x.shape[1] > 0, "x has length 0: give it at least one position")


class PairModel(SequenceModel):
    """`decoder([a, b, a * b, a - b])` of the pooled features of two documents, for LRA's Retrieval.

    x is [B, 2, L] (or [B, 2, L, d_input]), `lengths` [B, 2].
    """

    def forward(self, x: Tensor, lengths: Tensor | None = None, **stream: Any) -> Tensor:
        """One output for each pair, [B, d_output]; it cannot stream."""
        require(not stream, "a model of pairs gives one output: it has no state")
        require_shape("x", x, ("B", 2, "L", *self._tail))
        if lengths is not None:
            require_shape("lengths", lengths, (x.shape[0], 2))
            lengths = lengths.flatten()
        both = x.flatten(0, 1)  # [2 B, L]
        self._check(both, ("B", "L"))
        features, _, _ = self._features(both, lengths)
        pooled = pool(features, lengths, self.pooling or "max")
        a, b = pooled.unflatten(0, (x.shape[0], 2)).unbind(1)  # [B, H]
        answer: Tensor = self.decoder(torch.cat((a, b, a * b, a - b), dim=-1))
        return answer


def pool(x: Tensor, lengths: Tensor | None, how: Pooling) -> Tensor:
    """[B, L, H] to [B, H]: the largest, the mean or the last of the valid positions.

    A sequence of length 0 gives 0.
    """
    if lengths is None:
        lengths = torch.full(x.shape[:1], x.shape[1], device=x.device)
    lengths = checked_lengths(x, lengths)
    if how == "last":
        last = (lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, x.shape[2])
        pooled = x.gather(1, last)[:, 0]
    elif how == "mean":
        pooled = x.masked_fill(beyond(x, lengths), 0).sum(1) / lengths.clamp(min=1)[:, None]
    else:
        pooled = x.masked_fill(beyond(x, lengths), -torch.inf).amax(1)
    return pooled.masked_fill(lengths[:, None] == 0, 0)


def _check_vocabulary(x: Tensor, size: int) -> None:
    """Check tokens on the CPU; reading them from a GPU would wait for it."""
    if not may_read(x):
        return
    low, high = int(x.min()), int(x.max())
    fits = low >= 0 and high < size
    require(fits, f"tokens must lie between 0 and {size - 1}, not between {low} and {high}")


def build_model(
    config: ModelConfig,
    *,
    d_input: int | None = None,
    vocabulary: int | None = None,
    d_output: int,
    pooled: bool = False,
    pair: bool = False,
) -> SequenceModel:
    """A network for real inputs (`d_input`) or tokens (`vocabulary`): give one of the two.

    It has an output at every position, or one for a sequence (`pooled`) or for two (`pair`).
    """
    given = f"not d_input={d_input} and vocabulary={vocabulary}"
    one = (d_input is None) != (vocabulary is None)
    require(one, f"give either d_input or vocabulary, {given}")
    require_count("d_output", d_output)
    H = config.d_model
    encoder: nn.Linear | nn.Embedding
    if vocabulary is None:
        require_count("d_input", d_input)
        encoder = ThinLinear(cast("int", d_input), H)
    else:
        require_count("vocabulary", vocabulary)
        encoder = nn.Embedding(vocabulary, H)
    blocks = [Block(config.make_mixer(i), H, config.norm) for i in range(config.layers)]
    norm = SumNorm(H) if config.norm == "pre" else nn.Identity()
    model: SequenceModel
    if pair:
        decoder = nn.Sequential(nn.Linear(4 * H, H), nn.GELU(), nn.Linear(H, d_output))
        model = PairModel(encoder, blocks, norm, decoder, config.pooling)
    else:
        pooling = config.pooling if pooled else None
        model = SequenceModel(encoder, blocks, norm, ThinLinear(H, d_output), pooling)
    sizes = {"d_input": d_input, "vocabulary": vocabulary, "d_output": d_output}
    model.built = config, {**sizes, "pooled": pooled, "pair": pair}
    return model
