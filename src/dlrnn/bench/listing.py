"""The baseline: a DLR layer whose mixing is the paper's own listing (its Figure "Core
implementation"), with the same parameters and the same ends as ours.

It materialises P (N x L, complex), multiplies complex matrices and leaves backward to autograd.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from dlrnn.nn import DLR


class ListingDLR(DLR):
    """A DLR whose forward is the paper's listing: causal or bidirectional, Re cast, whole only."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """X [B, L, H] -> [B, L, H]."""
        u = x.transpose(1, 2)  # [B, H, L]
        length = u.shape[-1]
        assert self.log_lambda_im is not None
        log_lambda = -(self.log_lambda_re**2) + 1j * self.log_lambda_im  # [N]
        position = torch.arange(length, device=u.device)
        P = (log_lambda[:, None] * position).exp()  # [N, L]
        K = ((self.W[..., 0] + 1j * self.W[..., 1]) @ P).real  # [H or 2 H, L]
        if self.bidirectional:
            K = torch.cat((K[: self.d_model], K[self.d_model :].flip(-1)), dim=-1)
        K_f = torch.fft.rfft(K, n=2 * length)
        u_f = torch.fft.rfft(u, n=2 * length)
        y = torch.fft.irfft(K_f * u_f, n=2 * length)[..., :length]
        y = F.gelu(y + self.D[:, None] * u).transpose(1, 2)
        assert self.out is not None
        out: Tensor = self.out(y)
        return out
