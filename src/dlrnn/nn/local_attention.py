"""Attention within chunks and their neighbours: memory linear in the length."""

from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from dlrnn.nn.attention import Attention, AttentionOptions, KeyValueState, attention
from dlrnn.ops.checks import require_count


class LocalAttention(Attention):
    """`Attention` that sees its own chunk and the one before (and after, when bidirectional).

    Position t is in chunk `t // chunk`; the length need not be a multiple of the chunk. A state
    holds the last two chunks.

    Args:
        d_model: channels, H; a multiple of 2 * heads.
        chunk: positions in a chunk.
        options: heads, bidirectional, dropout and glu, as in `Attention`.
    """

    def __init__(
        self,
        d_model: int,
        *,
        chunk: int = 1024,
        **options: Unpack[AttentionOptions],
    ) -> None:
        super().__init__(d_model, **options)
        require_count("chunk", chunk)
        self.chunk = chunk

    def options(self) -> dict[str, Any]:
        """The arguments that make this layer again."""
        return super().options() | {"chunk": self.chunk}

    def extra_repr(self) -> str:
        """What `print(layer)` shows."""
        return f"{super().extra_repr()}, chunk={self.chunk}"

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        length, chunk = q.shape[1], self.chunk
        if length <= chunk:
            return super()._attend(q, k, v, lengths)
        if self.bidirectional and lengths is None:
            if not torch.compiler.is_compiling():
                return self._both_sides(q, k, v)
            lengths = torch.full(q.shape[:1], length, device=q.device)  # one graph for all lengths
        if missing := -length % chunk:
            q, k, v = (F.pad(t, (0, 0, 0, missing)) for t in (q, k, v))
        if lengths is not None and self.bidirectional:
            return self._both_sides_padded(q, k, v, lengths)[:, :length]
        return self._past(q, k, v)[:, :length]

    def _past(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Windows of two chunks, of which the second counts, and both of the first window.

        The outputs of the first chunk of a window are discarded: with a mask instead, PyTorch's
        fastest kernels would not run.
        """
        batch, count = q.shape[0], q.shape[1] // self.chunk - 1
        q, k, v = (_windows(t, self.chunk, 2) for t in (q, k, v))
        y = attention(q, k, v, self.heads, causal=True).unflatten(0, (batch, count))
        return torch.cat((y[:, 0, : self.chunk], y[:, :, self.chunk :].flatten(1, 2)), dim=1)

    def _both_sides(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Windows of three chunks; the shorter windows at both ends are computed one by one."""
        length, chunk = q.shape[1], self.chunk
        last = max(length // chunk - 1, 1) * chunk  # start of the last chunk that has three chunks

        def of(start: int) -> Tensor:
            seen = slice(max(start - chunk, 0), start + 2 * chunk)
            return attention(q[:, start : start + chunk], k[:, seen], v[:, seen], self.heads)

        ends = [of(start) for start in (0, *range(last, length, chunk))]
        if last > chunk:
            keys, values = (_windows(t[:, : last + chunk], chunk, 3) for t in (k, v))
            queries = q[:, chunk:last]
            y = attention(queries.reshape(-1, chunk, q.shape[2]), keys, values, self.heads)
            ends.insert(1, y.reshape(queries.shape))
        return torch.cat(ends, dim=1)

    def _both_sides_padded(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        """Every chunk with its neighbours; positions beyond either end are masked."""
        chunk = self.chunk
        known = torch.arange(q.shape[1], device=q.device) < lengths[:, None]  # [B, L]
        known = F.pad(known, (chunk, chunk))
        visible = known.unfold(1, 3 * chunk, chunk).flatten(0, 1)[:, None]  # [B n, 1, 3 chunk]
        visible = visible | ~visible.any(
            dim=-1, keepdim=True
        )  # a row without any key would be NaN; its output is not used
        keys, values = (_windows(F.pad(t, (0, 0, chunk, chunk)), chunk, 3) for t in (k, v))
        queries = q.reshape(-1, chunk, q.shape[2])
        y = attention(queries, keys, values, self.heads, visible=visible)
        return y.reshape(q.shape)

    def _read(
        self, u: Tensor, state: KeyValueState, lengths: Tensor | None
    ) -> tuple[Tensor, KeyValueState]:
        outputs = []
        for start in range(0, u.shape[1], self.chunk):
            piece = u[:, start : start + self.chunk]
            here = None if lengths is None else (lengths - start).clamp(0, piece.shape[1])
            y, state = super()._read(piece, state, here)
            outputs.append(y)
        return torch.cat(outputs, dim=1), state

    def _sees(self, query: Tensor, key: Tensor) -> Tensor:
        return super()._sees(query, key) & (key // self.chunk >= query // self.chunk - 1)

    def _kept(self, entries: Tensor) -> Tensor:
        return entries[:, -self._kept_length() :].clone()

    def _kept_length(self) -> int:
        return 2 * self.chunk


def _windows(t: Tensor, chunk: int, chunks: int) -> Tensor:
    """[B, L, H] to [B n, chunks * chunk, H]: every window of so many chunks of each sequence."""
    t = t.unflatten(1, (-1, chunk))
    count = t.shape[1] - chunks + 1
    return torch.cat([t[:, i : i + count] for i in range(chunks)], dim=2).flatten(0, 1)
