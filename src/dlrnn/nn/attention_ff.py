"""Attention followed by feed-forward blocks, so that it has as many parameters as DLR."""

from typing import Any, Unpack

from torch import Tensor, nn

from dlrnn.nn.attention import Attention, AttentionOptions
from dlrnn.nn.layers import SumNorm
from dlrnn.ops.checks import require_count


class AttentionFF(Attention):
    """Attention + 2 FF: twice `o + FF(LayerNorm(o))` on the output o of the attention.

    `FF(o) = W_2 GELU(W_1 o + b_1) + b_2` with d_ff hidden channels; the rest is `Attention`.

    Args:
        d_model: channels, H; a multiple of 2 * heads.
        d_ff: width of the feed-forward blocks, 16 H if not given (2048 in the paper).
        options: heads, bidirectional, dropout and glu, as in `Attention`.
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_ff: int | None = None,
        **options: Unpack[AttentionOptions],
    ) -> None:
        super().__init__(d_model, **options)
        self.d_ff = 16 * d_model if d_ff is None else d_ff
        require_count("d_ff", self.d_ff)
        self.feed_forward = nn.ModuleList(_feed_forward(d_model, self.d_ff) for _ in range(2))

    def options(self) -> dict[str, Any]:
        """The arguments that make this layer again."""
        return super().options() | {"d_ff": self.d_ff}

    def _project(self, attended: Tensor) -> Tensor:
        o = super()._project(attended)
        for block in self.feed_forward:
            o = o + block(o)
        return o


def _feed_forward(d_model: int, d_ff: int) -> nn.Sequential:
    return nn.Sequential(
        SumNorm(d_model), nn.Linear(d_model, d_ff), nn.GELU(), nn.Linear(d_ff, d_model)
    )
