"""Express a given long kernel by a DLR, then run it as an RNN, in one minute.

    python examples/fit_kernel.py

The kernel is a bell and its echo, 512 positions long. First, 512 states express it exactly,
because the paper's initialisation makes the Vandermonde matrix a discrete Fourier transform. Then
256 states learn it by gradient descent on lambda and W. Last, the learned layer reads a signal step
by step, and its output is compared with the convolution's. The script writes out/fit_kernel.png.
"""

import math
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.progress import track

from dlrnn import DLR, param_groups
from dlrnn.analysis import fit_kernel

LENGTH, STATES, STEPS = 512, 256, 1000
PICTURE = Path("out/fit_kernel.png")


def given_kernel() -> torch.Tensor:
    """Return 16 partials, each with a pitch and a decay, and their echo after half of the time."""
    generator = torch.Generator().manual_seed(3)
    pitch, decay, loudness = torch.rand(3, 16, 1, generator=generator, dtype=torch.float64)
    k = torch.arange(LENGTH, dtype=torch.float64)
    partials = torch.exp(-k / (40 + 160 * decay)) * torch.cos((0.06 + 2.6 * pitch**1.5) * k)
    bell = (loudness * partials).sum(0)
    echo = torch.cat((torch.zeros(LENGTH // 2, dtype=torch.float64), bell[: LENGTH // 2]))
    return (bell + 0.4 * echo) / bell.abs().max()


def learn(kernel: torch.Tensor) -> tuple[DLR, list[float]]:
    """Fit lambda and W to the kernel by the relative squared error; return layer and losses."""
    layer = DLR(1, STATES, project=False, dt_min=5e-3, dt_max=5e-2)
    layer.D.requires_grad_(False).zero_()
    optimizer = torch.optim.AdamW(param_groups(layer, lr=3e-3))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses = []
    for _ in track(range(STEPS), "Learning", transient=True, disable=not sys.stdout.isatty()):
        loss = (layer.kernel(LENGTH)[0] - kernel).square().sum() / kernel.square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return layer, losses


def streaming_difference(layer: DLR) -> float:
    """Return the relative difference between the outputs of `forward` and of `step`."""
    u = torch.randn(1, LENGTH, 1)
    with torch.no_grad():
        whole, state, outputs = layer(u), None, []
        for u_t in u.unbind(1):
            y_t, state = layer.step(u_t, state)
            outputs.append(y_t)
    return float((torch.stack(outputs, dim=1) - whole).norm() / whole.norm())


def draw(kernel: torch.Tensor, layer: DLR, losses: list[float]) -> None:
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    top, error, curve, circle = figure.subplot_mosaic(
        [["top", "top", "top"], ["error", "curve", "circle"]], height_ratios=(1.2, 1)
    ).values()
    with torch.no_grad():
        learned, W = layer.kernel(LENGTH)[0], layer.W[0].norm(dim=-1)
        modulus, phase = torch.exp(-(layer.log_lambda_re**2)), layer.log_lambda_im.detach()
    top.plot(kernel, color="#bbbbbb", linewidth=4, label="given")
    top.plot(learned, color="#0072b2", linewidth=1.2, label=f"DLR, {STATES} states")
    top.set(xlabel="position", title="The kernel")
    top.legend(frameon=False)
    error.plot(learned - kernel, color="#d55e00", linewidth=0.8)
    error.set(xlabel="position", title="Learned minus given")
    curve.semilogy(losses, color="#0072b2")
    curve.set(xlabel="step", title="Relative squared error")
    angle = torch.linspace(0, 2 * math.pi, 400)
    circle.plot(angle.cos(), angle.sin(), color="#bbbbbb", linewidth=0.8)
    circle.scatter(modulus * phase.cos(), modulus * phase.sin(), c=W.log10(), s=14, cmap="cividis")
    circle.set(aspect="equal", title="lambda, coloured by log |W|")
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # one kernel is too little work for more
    kernel = given_kernel()
    dft = torch.polar(
        torch.ones(LENGTH, dtype=torch.float64),
        2 * math.pi * torch.arange(LENGTH, dtype=torch.float64) / LENGTH,
    )
    exact = fit_kernel(kernel, dft)
    print(f"{LENGTH} states, weights solved for:    relative error {exact.residual:.0e}")
    layer, losses = learn(kernel.float())
    print(f"{STATES} states, learned in {STEPS} steps: relative error {losses[-1] ** 0.5:.0e}")
    print(f"the same, read step by step:       differs by     {streaming_difference(layer):.0e}")
    draw(kernel, layer, losses)
    print(f"the picture is in {PICTURE}")


if __name__ == "__main__":
    main()
