"""Feed-forward experts behind a router: the paper's Switch layer, and a causal one."""

import math
from typing import Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from dlrnn.nn.mixer import Mixer, beyond
from dlrnn.ops.checks import may_read, require, require_count, require_probability

Router = Literal["top", "threshold"]

THRESHOLD_RATE = 0.01
"""The most by which a training forward changes the log of a "threshold" router's threshold."""

THRESHOLD_MEMORY = 0.98
"""The decay of a "top" router's moving average of thresholds, in a training forward."""

DENSE_TOKENS = 512
"""Tokens of a block where every expert is computed for every token: this bounds the memory."""


class Experts(Mixer[tuple[()]]):
    """`y_t = sum_e p_te FF_e(x_t)` over the experts e that serve token t: none, one or several.

    `FF_e(x) = down_e GELU(up_e x)` without biases, `p_t = softmax(scores x_t)` over the experts.
    With one expert, p = 1 and every token is served: a plain feed-forward layer.

    The router decides which tokens expert e of N serves:

    - "top", the paper's: the ceil(n / N) tokens with the largest p_te of a sequence of n tokens; in
      evaluation ceil(2 n / N). Of equal ones the earlier is taken. It ranks whole sequences, so it
      *looks ahead*: whether a token is served depends on later tokens. It cannot stream.
    - "threshold", causal: the tokens with `log p_te > threshold_e`. Training learns the thresholds
      with a stochastic gradient step on the pinball loss, whose minimum is the threshold that a
      share of 1 / N of the tokens passes: after each forward pass,
      `threshold_e += rate min(N share_e - 1, 1)`. They are a buffer: no optimizer changes them.

    A "top" layer learns thresholds too, without using them: moving averages of the `log p` of the
    first token that an expert would not serve in evaluation. So its parameters, loaded into a
    "threshold" layer, serve about as many tokens, causally.

    Cost: "top", and "threshold" in training, gather the tokens of each expert into one matrix
    product for all experts. In training an expert of a "threshold" layer has ceil(2 n / N) places,
    which the first tokens take (this is still causal). In evaluation it has no limit, so that
    whole = chunks = steps, and every expert is computed for every token: N times the work.
    Positions beyond a sequence's length take no place.

    Args:
        d_model: channels, H.
        experts: N.
        d_ff: inner width of an expert.
        router: "top" or "threshold".
        dropout: probability, after the activation.
    """

    cannot_stream: ClassVar[str] = (
        "router='top' ranks a whole sequence and so reads the future: it cannot stream, and"
        " router='threshold' can"
    )

    threshold: Tensor

    def __init__(
        self,
        d_model: int,
        experts: int,
        d_ff: int,
        *,
        router: Router = "top",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        for name, value in (("d_model", d_model), ("experts", experts), ("d_ff", d_ff)):
            require_count(name, value)
        known = get_args(Router)
        require(router in known, f"router must be one of {', '.join(known)}, not {router!r}")
        require_probability("dropout", dropout)
        self.d_model, self.experts, self.d_ff, self.router = d_model, experts, d_ff, router
        self.bidirectional = experts > 1 and router == "top"
        self.up = nn.Parameter(torch.empty(experts, d_model, d_ff))
        self.down = nn.Parameter(torch.empty(experts, d_ff, d_model))
        self.scores = nn.Linear(d_model, experts, bias=False) if experts > 1 else None
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        if self.scores is not None:
            self.register_buffer("threshold", torch.empty(experts))
        self._reset_experts()

    def reset_parameters(self) -> None:
        """PyTorch's initialisation of linear maps for every matrix, `U(-1, 1) / sqrt(inputs)`."""
        if self.scores is not None:
            self.scores.reset_parameters()
        self._reset_experts()

    def _reset_experts(self) -> None:
        if self.scores is not None:
            nn.init.constant_(self.threshold, -math.log(self.experts))
        for weight in (self.up, self.down):
            bound = weight.shape[1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    @property
    def sees_padding(self) -> bool:
        """Whether padding can change the answer: a causal router counts tokens, too."""
        return self.experts > 1

    def _kept_in_fp32(self) -> list[Tensor]:
        """The router: in 16 bits many tokens would tie, and thresholds would not move."""
        return [] if self.scores is None else [self.threshold, *self.scores.parameters()]

    def extra_repr(self) -> str:
        """What `print(layer)` shows."""
        sizes = f"d_model={self.d_model}, experts={self.experts}, d_ff={self.d_ff}"
        return f"{sizes}, router={self.router!r}"

    # ------------------------------------------------------------------------------ whole

    def _whole(self, u: Tensor, lengths: Tensor | None) -> Tensor:
        if self.scores is None:
            y = self._feed_forward(u.flatten(0, 1)[None])[0].view(u.shape)
        else:
            y = self._routed(u, lengths)
        return y.to(u.dtype)

    def log_probabilities(self, x: Float[Tensor, "B L H"]) -> Float[Tensor, "B L N"]:
        """The router's `log p`, at least in fp32: in half precision many tokens would tie."""
        assert self.scores is not None
        with torch.autocast(x.device.type, enabled=False):
            return F.log_softmax(self.scores(x.to(self.scores.weight.dtype)), dim=-1)

    def _routed(self, u: Tensor, lengths: Tensor | None) -> Tensor:
        padding = None if lengths is None else beyond(u, lengths)  # [B, L, 1]
        log_p = self.log_probabilities(u)  # [B, L, N]
        gates = log_p.exp()
        if self.router == "top":
            rank = gates.detach() if padding is None else gates.detach().masked_fill(padding, -1)
            return self._gathered(u, gates, rank, lengths)
        passes = log_p.detach() > self.threshold
        passes = passes if padding is None else passes & ~padding
        gates = gates * passes
        if not self.training:
            return self._dense(u, gates)
        require(
            not _is_run_again(),
            "router='threshold' moves with every forward pass in training, and gradient"
            " checkpointing makes two, which would choose other experts: leave Experts out of it",
        )
        tokens = max(1, u.shape[0] * u.shape[1]) if lengths is None else lengths.sum().clamp(min=1)
        self._learn_thresholds(passes.sum((0, 1)) / tokens)
        return self._gathered(u, gates, passes.to(gates.dtype), lengths)

    def _capacity(self, length: Any) -> Any:
        """`ceil(n / N)`, twice the share in evaluation and behind a threshold; n or a tensor."""
        times = 1 if self.training and self.router == "top" else 2
        return (times * length + self.experts - 1) // self.experts

    def _gathered(
        self,
        u: Float[Tensor, "B L H"],
        gates: Float[Tensor, "B L N"],
        rank: Float[Tensor, "B L N"],
        lengths: Tensor | None,
    ) -> Tensor:
        """Applies every expert to its tokens of the highest rank; of equal ones to the earlier."""
        batch, length, _ = u.shape
        places = self._capacity(length)
        sorted_rank, order = rank.sort(dim=1, descending=True, stable=True)  # [B, L, N]
        if self.training and self.router == "top" and length and not _is_run_again():
            self._follow_first_left_out(sorted_rank, lengths)
        chosen = order[:, :places]  # [B, C, N]
        weights = gates.gather(1, chosen)
        if lengths is not None:
            own = self._capacity(lengths)[:, None]  # [B, 1]
            weights = weights * (torch.arange(places, device=u.device) < own)[..., None]
        rows = chosen + length * torch.arange(batch, device=u.device)[:, None, None]
        rows = rows.permute(2, 0, 1).flatten()  # [N B C], rows of [B L, H]
        tokens = u.flatten(0, 1).index_select(0, rows).view(self.experts, -1, self.d_model)
        outputs = self._feed_forward(tokens).flatten(0, 1)
        outputs = outputs * weights.permute(2, 0, 1).reshape(-1, 1)
        y = outputs.new_zeros(batch * length, self.d_model).index_add(0, rows, outputs)
        return y.view(batch, length, self.d_model)

    def _dense(self, u: Float[Tensor, "B L H"], gates: Float[Tensor, "B L N"]) -> Tensor:
        """Applies every expert to every token; on a CPU, only experts that serve one of them."""
        pieces = u.flatten(0, 1).split(DENSE_TOKENS), gates.flatten(0, 1).split(DENSE_TOKENS)
        may_look = may_read(u)
        outputs = []
        for tokens, every_gate in zip(*pieces, strict=True):
            at_work = every_gate.detach().any(0).nonzero()[:, 0] if may_look else None
            gate = every_gate if at_work is None else every_gate[:, at_work]
            answers = self._feed_forward(tokens.expand(gate.shape[1], -1, -1), at_work)
            outputs.append((answers * gate.T[..., None]).sum(0))
        return torch.cat(outputs).view(u.shape)

    def _feed_forward(
        self, tokens: Float[Tensor, "N T H"], at_work: Tensor | None = None
    ) -> Float[Tensor, "N T H"]:
        """Applies each expert to its tokens; `at_work` numbers the experts, by default all."""
        some = at_work is not None and len(at_work) < self.experts
        up, down = (w[at_work] if some else w for w in (self.up, self.down))
        return torch.bmm(self.dropout(F.gelu(torch.bmm(tokens, up))), down)

    @torch.no_grad()
    def _learn_thresholds(self, share: Float[Tensor, " N"]) -> None:
        self.threshold.add_(THRESHOLD_RATE * (self.experts * share - 1).clamp(max=1))

    @torch.no_grad()
    def _follow_first_left_out(self, p: Float[Tensor, "B L N"], lengths: Tensor | None) -> None:
        """The threshold that 2 n / N tokens of a sequence of n pass; p is sorted, largest first."""
        batch, length, _ = p.shape
        n = torch.full((batch,), length, device=p.device) if lengths is None else lengths
        place = torch.minimum((2 * n + self.experts - 1) // self.experts, n - 1).clamp(min=0)
        place = place[:, None, None].expand(-1, 1, self.experts)
        log_p = p.gather(1, place).clamp(min=torch.finfo(p.dtype).tiny).log()[:, 0]  # [B, N]
        counts = (n > 0)[:, None]
        mean = (log_p * counts).sum(0) / counts.sum().clamp(min=1)
        share = (1 - THRESHOLD_MEMORY) * counts.any()
        self.threshold.lerp_(mean.to(self.threshold.dtype), share.to(self.threshold.dtype))

    # ------------------------------------------------------------------------------ streaming

    def _initial_state(self, batch_size: int) -> tuple[()]:
        """An empty state: every token is computed by itself."""
        del batch_size
        return ()

    def _chunk(
        self, u: Tensor, state: tuple[()] | None, lengths: Tensor | None
    ) -> tuple[Tensor, tuple[()]]:
        del state
        return self._whole(u, lengths), ()

    def _step(self, u: Tensor, state: tuple[()]) -> tuple[Tensor, tuple[()]]:
        return self._whole(u[:, None], None)[:, 0], state

    def _check_state(self, state: object, batch: int) -> None:
        del batch
        kind = type(state).__name__
        require(isinstance(state, tuple) and not state, f"this layer's state is (), not a {kind}")

    def _parameter(self) -> Tensor:
        return self.up


def _is_run_again() -> bool:
    """Whether this is a backward pass, in which gradient checkpointing repeats a forward pass.

    A compiler cannot ask: compiled experts under checkpointing update their thresholds twice.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
