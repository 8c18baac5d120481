"""Plots of a layer's eigenvalues and kernels, without pyplot and its global state."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dlrnn.analysis.systems import system_of
from dlrnn.common.figures import new_figure
from dlrnn.nn import DLR
from dlrnn.ops.checks import require, require_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE = "#0072B2"
GREY = "#767676"
LONGEST = 1e9  # a longer or infinite memory is drawn here


def plot_spectrum(layer: DLR) -> "Figure":
    """Left: lambda in the unit circle. Right: the memory `1 / -log |lambda|` against the phase.

    The colour of a state is the norm of its weights over the channels.
    """
    from matplotlib.colors import LogNorm

    system = system_of(layer)
    lam, size = system.lam, torch.linalg.norm(system.w, dim=0)
    order = size.argsort()  # states of large weight are drawn last
    lam, size = lam[order], size[order]
    memory = 1 / lam.abs().log().neg().clamp(min=1 / LONGEST, max=100)

    figure = new_figure(10.5, 4.5)
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1.25))
    largest = size[-1].item() or 1.0
    smallest = max(size[0].item(), largest * 1e-4)
    norm = LogNorm(smallest if smallest < largest else largest / 10, largest, clip=True)
    area = min(42.0, max(7.0, 9000 / len(lam)))

    circle = torch.linspace(0, 2 * math.pi, 361)
    left.plot(circle.cos(), circle.sin(), color=GREY, linewidth=0.8, zorder=0)
    for line in (left.axhline, left.axvline):
        line(0, color=GREY, linewidth=0.4, zorder=0)
    look = {"c": size, "s": area, "norm": norm, "cmap": "viridis_r", "linewidths": 0}
    points = left.scatter(lam.real, lam.imag, **look)
    left.set(xlim=(-1.08, 1.08), ylim=(-1.08, 1.08), aspect="equal")
    left.set(xticks=(-1, -0.5, 0, 0.5, 1), yticks=(-1, -0.5, 0, 0.5, 1))
    left.set(xlabel="Re λ", ylabel="Im λ", title=_count(len(lam), "eigenvalue"))

    right.scatter(lam.angle(), memory, **look)
    ticks = {-1.0: "−π", -0.5: "−π/2", 0.0: "0", 0.5: "π/2", 1.0: "π"}
    right.set_xticks([math.pi * tick for tick in ticks], list(ticks.values()))
    right.set(xlim=(-1.04 * math.pi, 1.04 * math.pi), yscale="log")
    right.set(xlabel="phase of λ", ylabel="memory  1 / −log |λ|  (positions)", title="Memory")
    right.grid(axis="y", color="#dddddd", linewidth=0.6)
    right.set(axisbelow=True)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.colorbar(points, ax=right, label="norm of the weights, all channels", pad=0.02)
    return figure


def plot_kernel(layer: DLR, length: int) -> "Figure":
    """Above: the kernels of up to four channels. Below: those of all channels as an image.

    The right-to-left kernels of a bidirectional layer are drawn at negative positions, which they
    read: entry k lies at -1 - k.
    """
    from matplotlib.ticker import MaxNLocator

    require(isinstance(layer, DLR), f"plot_kernel takes a DLR layer, not a {type(layer).__name__}")
    require_count("length", length)
    position, kernel = _two_sided(layer, length)
    channels = layer.d_model
    shown = sorted({round(i * (channels - 1) / 3) for i in range(4)})
    limit = kernel.abs().max().item() or 1.0

    figure = new_figure(9.0, 2.8 + 0.8 * len(shown))
    *strips, below = figure.subplots(
        len(shown) + 1, 1, sharex=True, height_ratios=(*(1.0 for _ in shown), 2.6)
    )
    marker = "o" if len(position) <= 40 else ""
    for channel, strip in zip(shown, strips, strict=True):
        strip.axhline(0, color=GREY, linewidth=0.5, zorder=0)
        look = {"color": BLUE, "linewidth": 0.9, "marker": marker, "markersize": 3.5}
        strip.plot(position, kernel[channel], **look)
        strip.set_ylim(-1.1 * limit, 1.1 * limit)
        name = strip.text(1.015, 0.5, f"channel {channel}", transform=strip.transAxes)
        name.set(in_layout=False, va="center", fontsize="small")  # above the colour bar
        strip.tick_params(axis="x", bottom=False)
        strip.spines[["top", "right", "bottom"]].set_visible(False)
    cast = "Re(K)" if layer.cast == "real" else "Re(K) Im(K)"
    sizes = f"{_count(layer.d_model, 'channel')}, {_count(layer.d_state, 'state')}"
    strips[0].set_title(f"{cast}:  {sizes}")

    image = below.imshow(
        kernel.numpy(),
        aspect="auto",
        interpolation="nearest" if len(position) <= 700 else "auto",  # auto averages
        cmap="RdBu_r",
        vmin=-limit,
        vmax=limit,
        extent=(position[0].item() - 0.5, position[-1].item() + 0.5, channels - 0.5, -0.5),
    )
    below.set(xlabel="position  (output − input)", ylabel="channel")
    for axis in (below.xaxis, below.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=(1, 2, 5, 10)))
    figure.colorbar(image, ax=below, label="kernel", pad=0.02)
    return figure


def _two_sided(layer: DLR, length: int) -> tuple[Tensor, Tensor]:
    """Positions [P] and kernels [H, P]."""
    with torch.no_grad():
        kernel = layer.kernel(length).cpu().double()
    right, left = kernel[: layer.d_model], kernel[layer.d_model :]
    if not layer.bidirectional:
        left = right[:, :0]
    both = torch.cat((left.flip(1), right), dim=1)
    return torch.arange(-left.shape[1], right.shape[1]), both


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
