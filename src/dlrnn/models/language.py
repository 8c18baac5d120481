"""The language model of the paper's Table 5: DLR or attention, then experts, 16 times."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dlrnn.models.config import Norm, check_fields, mixer_names
from dlrnn.models.model import Block, SequenceModel, State
from dlrnn.nn.attention import Attention
from dlrnn.nn.captured import CapturedSteps
from dlrnn.nn.dlr import DLR
from dlrnn.nn.experts import Experts, Router
from dlrnn.nn.layers import SumNorm
from dlrnn.nn.tape import TapeDLR
from dlrnn.ops.checks import require, require_count, require_shape

LanguageMixer = Literal["dlr", "attention", "tape"]


@dataclass(frozen=True)
class LanguageConfig:
    """A language model; the defaults are the paper's.

        LanguageConfig(mixer="dlr", experts=16, norm="pre")

    Attributes:
        mixer: "dlr", linear (no activation, no linear map), "attention" or "tape"; or several,
            separated by commas, for the first blocks, repeated to the depth.
        experts: feed-forward experts of each block; 1 is an ordinary feed-forward layer.
        layers: blocks.
        d_model: channels, H.
        d_state: states of DLR, N.
        d_embedding: width of the embedding, projected to H and back.
        d_ff: inner width of an expert.
        vocabulary: tokens. T5's tokenizer has 32100, its embedding 32128, a multiple of 128.
        norm: LayerNorm before both sub-layers (and once after the last block), or after each sum.
        router: "top" (the paper's) is not causal; "threshold" is: see `Experts`.
        dt_min: with dt_max, the bounds of `-2 log |lambda|` of DLR at initialisation.
        dt_max: see dt_min.
        kernel_length: restricts DLR's kernels to this many entries; None is no limit.
        heads: heads of attention and tape.
        d_head: channels of a head; heads * d_head need not be H.
        dropout: probability, inside the experts.
        tape_length: places on a tape.
    """

    mixer: str = "dlr"
    experts: int = 16
    layers: int = 16
    d_model: int = 384
    d_state: int = 512
    d_embedding: int = 128
    d_ff: int = 4 * 384
    vocabulary: int = 32128
    norm: Norm = "pre"
    router: Router = "top"
    dt_min: float = 1e-3
    dt_max: float = 1e-1
    kernel_length: int | None = 4096
    heads: int = 8
    d_head: int = 64
    dropout: float = 0.0
    tape_length: int = 4096

    def __post_init__(self) -> None:
        counts = ("layers", "d_model", "d_embedding", "vocabulary")
        check_fields(self, counts, {"norm": Norm})
        names, known = mixer_names(str(self.mixer)), get_args(LanguageMixer)
        for name in names:
            require(name in known, f"mixer must be one of {', '.join(known)}, not {name!r}")
        enough = f"layers must be at least {len(names)}, the mixers of {self.mixer!r}"
        require(self.layers >= len(names), f"{enough}, not {self.layers}")
        with torch.device("meta"):  # the layers check their own arguments
            for block in range(len(names)):
                self.make_mixer(block)
            self.make_experts()

    def make_mixer(self, block: int = 0) -> nn.Module:
        """The mixer of a block, newly initialised."""
        names = mixer_names(self.mixer)
        name = names[block % len(names)]
        if name == "tape":
            d_model, length = self.d_model, self.tape_length
            return TapeDLR(d_model, length, heads=self.heads, d_head=self.d_head)
        if name == "attention":
            return HeadAttention(self.d_model, heads=self.heads, d_head=self.d_head)
        return DLR(
            self.d_model,
            self.d_state,
            kernel_length=self.kernel_length,
            dt_min=self.dt_min,
            dt_max=self.dt_max,
            project=False,
        )

    def with_lengths(self, change: Callable[[int], int]) -> "LanguageConfig":
        """With another length of every tape."""
        return replace(self, tape_length=change(self.tape_length))

    def make_experts(self) -> Experts:
        """The feed-forward half of a block, newly initialised."""
        return Experts(
            self.d_model, self.experts, self.d_ff, router=self.router, dropout=self.dropout
        )


class HeadAttention(Attention):
    """`y = merge(attn(u))`: causal attention whose heads may be wider than H together.

    `attn` is that of `Attention`, with rotary positions and a learned temperature; keys and values
    have heads * d_head channels. Nothing follows but the projection: no activation, no skip.

    Args:
        d_model: channels, H.
        heads: number of heads.
        d_head: channels of a head; even, for rotary positions.
    """

    def __init__(self, d_model: int, *, heads: int, d_head: int) -> None:
        nn.Module.__init__(self)  # the parameters of `Attention` have other sizes
        for name, value in (("d_model", d_model), ("heads", heads), ("d_head", d_head)):
            require_count(name, value)
        even = "d_head must be even (rotary positions rotate pairs of channels)"
        require(d_head % 2 == 0, f"{even}, not {d_head}")
        self.d_model, self.heads, self.d_head = d_model, heads, d_head
        self.bidirectional = False
        self.temperature = nn.Parameter(torch.empty(1))
        self.qkv = nn.Linear(d_model, 3 * heads * d_head)
        self.merge = nn.Linear(heads * d_head, d_model)
        self._reset_temperature()

    def options(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {name: getattr(self, name) for name in ("d_model", "heads", "d_head")}

    def extra_repr(self) -> str:
        """What `print(layer)` shows."""
        return f"d_model={self.d_model}, heads={self.heads}, d_head={self.d_head}"

    def _mix(self, u: Tensor, attended: Tensor) -> Tensor:
        del u
        return self._project(attended)

    def _kept_channels(self) -> int:
        return self.heads * self.d_head


class NarrowEmbedding(nn.Embedding):
    """`expand(sqrt(E) embedding)`, [B, L] to [B, L, H]; the embedding has E < H channels.

    It starts with N(0, 1 / E), so that as the tied output it gives logits of order 1.
    """

    def __init__(self, vocabulary: int, d_embedding: int, d_model: int) -> None:
        super().__init__(vocabulary, d_embedding)
        self.expand = nn.Linear(d_embedding, d_model, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the embedding; `expand` has its own initialisation."""
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, L] to [B, L, H]; the factor sqrt(E) makes the channels of order 1."""
        wide: Tensor = self.expand(math.sqrt(self.embedding_dim) * super().forward(tokens))
        return wide


class LanguageModel(SequenceModel):
    """`logits = embedding^T contract(norm(blocks(expand(embedding(token)))))`, tied.

    A block is a mixer and then `Experts`, each with its LayerNorm and its residual sum.

        model = LanguageModel(LanguageConfig(experts=16, router="threshold"))
        logits = model(tokens)                            # [B, L] to [B, L, V]
        token_losses = model(tokens, targets=next_tokens)    # -log p of each, [B, L]
        logits, state = model(tokens, return_state=True)  # router="threshold", or one expert
        logits, state = model.step(token, state)          # [B] to [B, V]

    With several experts and router="top" a position sees later ones, and `causal` is False.
    """

    def __init__(self, config: LanguageConfig) -> None:
        H, E = config.d_model, config.d_embedding
        layers = [
            Block(layer, H, config.norm)
            for block in range(config.layers)
            for layer in (config.make_mixer(block), config.make_experts())
        ]
        norm = SumNorm(H) if config.norm == "pre" else nn.Identity()
        embedding = NarrowEmbedding(config.vocabulary, E, H)
        super().__init__(embedding, layers, norm, nn.Linear(H, E, bias=False))
        self.config = config

    def codes(
        self, tokens: Tensor, lengths: Tensor | None = None, **stream: Any
    ) -> Tensor | tuple[Tensor, State]:
        """The input of `logits`, [B, L, E], which is 250 times smaller than the logits."""
        return super().forward(tokens, lengths, **stream)

    def logits(self, codes: Float[Tensor, "*B E"]) -> Float[Tensor, "*B V"]:
        """`<code, embedding>` for every token of the vocabulary."""
        return F.linear(codes, self.encoder.weight)

    def forward(
        self,
        x: Tensor,
        lengths: Tensor | None = None,
        *,
        targets: Int[Tensor, "B L"] | None = None,
        **stream: Any,
    ) -> Tensor | tuple[Tensor, State]:
        """Logits of the next token, [B, L, V], for tokens x [B, L]; `stream` as `SequenceModel`.

        With `targets`, `-log p` of each instead, [B, L] in fp32: all logits never exist at once.
        """
        if targets is not None:
            require(not any(stream.values()), "targets are for whole sequences")
            require_shape("targets", targets, tuple(x.shape))
            fraction = targets.is_floating_point() or targets.is_complex()
            whole = not fraction and targets.dtype != torch.bool
            require(whole, "targets must hold tokens, whole numbers")
            codes = cast("Tensor", self.codes(x, lengths))
            return token_losses(self, codes.flatten(0, 1), targets.flatten()).view(x.shape)
        answer = self.codes(x, lengths, **stream)
        if isinstance(answer, tuple):
            codes, state = answer
            return self.logits(codes), state
        return self.logits(answer)

    def step(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """One token of each sequence, x [B], to the logits of the next token, [B, V]."""
        codes, state = super().step(x, state)
        return self.logits(codes), state


def causal(model: LanguageModel) -> LanguageModel:
    """The same parameters behind the causal router, for a model trained with router="top".

    `Experts` learns the thresholds during training. The models share their tensors.
    """
    return _changed(model, router="threshold")


def _changed(model: LanguageModel, **options: Any) -> LanguageModel:
    """A model with other options that shares the tensors."""
    with torch.device("meta"):
        same = LanguageModel(replace(model.config, **options))
    same.load_state_dict(model.state_dict(), assign=True)
    return same.train(model.training)


def token_losses(
    model: LanguageModel,
    codes: Float[Tensor, "T E"],
    targets: Int[Tensor, " T"],
    positions_at_once: int | None = None,
) -> Float[Tensor, " T"]:
    """`-log p` of the targets, in fp32.

    Only the logits of `positions_at_once` positions exist at a time, also in backward: those of
    [8, 4096] tokens need 4 GB. The default is 2^26 logits, and 2^22 on a CPU, where the system
    takes back larger blocks of memory each time, which is slower than the products.
    """
    if positions_at_once is None:
        logits = 2**22 if codes.device.type == "cpu" else 2**26
        positions_at_once = max(1, logits // model.config.vocabulary)
    require_count("positions_at_once", positions_at_once)
    parts = (each.split(positions_at_once) for each in (codes, targets.long()))
    pieces = zip(*parts, strict=True)
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.cat([checkpoint(_token_losses, model, *piece, **how) for piece in pieces])


def _token_losses(model: LanguageModel, codes: Tensor, targets: Tensor) -> Tensor:
    logits = model.logits(codes)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), targets, reduction="none")


def generate(
    model: LanguageModel,
    prompt: Int[Tensor, " L"],
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    vocabulary: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Yield `count` tokens after a prompt, each in constant time with DLR.

    A token is drawn from `softmax(logits / temperature)`; temperature 0 takes the most likely one.
    `top_k` keeps the most likely tokens, `top_p` the fewest that together have this probability;
    `vocabulary` limits tokens to those of a tokenizer with fewer tokens than the model.
    Tokens depend only on the logits and the seed: they are drawn on the CPU on every device.
    """
    require(model.causal, "router='top' is not causal: generation needs `causal(model)`")
    require(not model.training, "a model in training mode cannot generate: call model.eval() first")
    require_shape("prompt", prompt, ("L",))
    require_count("count", count)
    fits = 0 <= temperature < math.inf
    require(fits, f"temperature must be finite and at least 0, not {temperature}")
    if top_k is not None:
        require_count("top_k", top_k)
    if vocabulary is not None:
        require_count("vocabulary", vocabulary)
    require(top_p is None or 0 < top_p <= 1, f"top_p must be above 0 and at most 1, not {top_p}")
    model._check(prompt[None], ("B", "L"))
    choose = partial(likely, temperature=temperature, top_k=top_k, top_p=top_p)
    if len(prompt) + count <= (model.config.kernel_length or 0):
        model = _changed(model, kernel_length=None)  # same output with a smaller state
    return _generate(model, prompt, count, lambda logits: choose(logits[:vocabulary]), seed)


@torch.no_grad()
def _generate(
    model: LanguageModel,
    prompt: Tensor,
    count: int,
    choose: Callable[[Tensor], tuple[Tensor, Tensor]],
    seed: int,
) -> Iterator[int]:
    random = torch.Generator().manual_seed(seed)
    codes, state = cast("tuple[Tensor, State]", model.codes(prompt[None], return_state=True))
    logits = model.logits(codes[:, -1])  # [1, V]
    step = CapturedSteps(model, state, count)
    for remaining in reversed(range(count)):
        tokens, probabilities = choose(logits[0].double().cpu())
        token = int(tokens[torch.multinomial(probabilities, 1, generator=random)])
        yield token
        if remaining:
            logits = step(torch.tensor([token], device=prompt.device))


def likely(
    logits: Float[Tensor, " V"],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> tuple[Int[Tensor, " C"], Float[Tensor, " C"]]:
    """The tokens that may be drawn, most likely first, and their probabilities.

    Both limits hold at once, top_k first; of equal tokens the smaller number comes first.
    """
    kept = 1 if temperature == 0 else min(top_k or len(logits), len(logits))
    candidates = torch.arange(len(logits))
    if kept < len(logits):  # sorting all of them takes longer
        candidates = (logits >= logits.topk(kept).values[-1]).nonzero()[:, 0]
    values, order = logits[candidates].sort(descending=True, stable=True)
    tokens = candidates[order]
    probabilities = F.softmax((values[:kept] - values[0]) / (temperature or 1.0), dim=0)
    if top_p is not None:
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities[before < top_p]  # the first one always
    return tokens[: len(probabilities)], probabilities / probabilities.sum()
