"""The baseline: a DLR layer that computes as in the paper's listing (Figure "Core implementation").

`ListingDLR` has the parameters and the output stage of our layer. It materialises P (N x L,
complex), multiplies complex matrices and leaves backward to autograd. `RoundedPhasesDLR` has the
listing's phases in fp32, which are wrong by k eps |log lambda| at position k, without its memory.
"""

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dlrnn.nn import DLR


def listing_kernel(layer: DLR, start: int, end: int) -> Tensor:
    """Positions `start` to `end` of the complex kernel [H, L], as the listing computes them."""
    assert layer.log_lambda_im is not None
    log_lambda = -(layer.log_lambda_re**2) + 1j * layer.log_lambda_im  # [N]
    position = torch.arange(start, end, device=log_lambda.device)
    P = (log_lambda[:, None] * position).exp()  # [N, L]
    K: Tensor = (layer.W[..., 0] + 1j * layer.W[..., 1]) @ P  # [H or 2 H, L]
    return K


class ListingDLR(DLR):
    """A DLR whose forward is the paper's listing: cast="real", whole sequences only."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """X [B, L, H] -> [B, L, H]."""
        u = x.transpose(1, 2)  # [B, H, L]
        length = u.shape[-1]
        K = listing_kernel(self, 0, length).real
        if self.bidirectional:
            K = torch.cat((K[: self.d_model], K[self.d_model :].flip(-1)), dim=-1)
        K_f = torch.fft.rfft(K, n=2 * length)
        u_f = torch.fft.rfft(u, n=2 * length)
        y = torch.fft.irfft(K_f * u_f, n=2 * length)[..., :length]
        y = F.gelu(y + self.D[:, None] * u).transpose(1, 2)
        assert self.out is not None
        out: Tensor = self.out(y)
        return out


class RoundedPhasesDLR(DLR):
    """A DLR with the kernel of the listing, computed `positions` positions at a time.

    It shows the effect of exact phases on training: `dlrnn train table2/262144/dlr --model.mixer
    dlrnn.bench.listing.RoundedPhasesDLR --model.mixer_options '{"d_state": 4096, ...}'`.
    """

    positions = 4096

    def _kernel(self, length: int) -> Tensor:
        bounds = (*range(0, length, self.positions), length)
        piece = partial(checkpoint, listing_kernel, self, use_reentrant=False)
        pieces = [piece(*ends, preserve_rng_state=False) for ends in pairwise(bounds)]
        kernel = torch.cat(pieces, dim=1)
        return kernel.real if self.cast == "real" else kernel.real * kernel.imag
