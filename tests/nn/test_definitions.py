"""Every mixer equals its definition from the raw parameters, and fp32 is close to float64."""

import copy
import math
from functools import partial

import pytest
import torch
from mixers import EVERY
from support import DEVICE, assert_agree, assert_close, in_chunks, in_steps
from torch.nn import functional as F

from dlrnn import nn as layers
from dlrnn.ops import reference

# ---------------------------------------------------------------------------------- kernels


def exact(parameter):
    return parameter.double().cpu()


def complex_(pairs):
    return torch.complex(exact(pairs[..., 0]), exact(pairs[..., 1]))


def with_conjugates(half):
    return torch.cat((half, half.conj()), dim=-1)


def dlr_kernel(layer, length):
    """The paper's equations."""
    re, W = exact(layer.log_lambda_re), exact(layer.W)
    im = torch.zeros_like(re) if layer.real else exact(layer.log_lambda_im)
    W = torch.complex(W[..., 0], torch.zeros_like(W[..., 0]) if layer.real else W[..., 1])
    lam = torch.exp(torch.complex(-(re**2), im))
    K = torch.stack([(W * lam**k).sum(-1) for k in range(length)], dim=-1)
    return K.real * K.imag if layer.cast == "prod" else K.real


def series(dt, Lambda):
    """`(exp(dt Lambda) - 1) / Lambda` as its series, whose derivatives lose no digits."""
    return dt * sum((dt * Lambda) ** j / float(math.factorial(j + 1)) for j in range(40))


def state_space_kernel(layer, length):
    """DSS, and the full system of S4D (each Lambda and its conjugate), run step by step."""
    dt = exact(layer.log_dt).exp()[:, None]
    Lambda = torch.complex(-exact(layer.log_decay).exp(), exact(layer.frequency))
    W = complex_(layer.W)
    if isinstance(layer, layers.S4D):
        Lambda, W = with_conjugates(Lambda), with_conjugates(W)
    A = torch.exp(dt * Lambda)  # [H, N]
    state, entries = series(dt, Lambda), []
    for _ in range(length):
        entries.append((W * state.repeat(len(W) // len(dt), 1)).sum(-1).real)
        state = A * state
    return torch.stack(entries, dim=-1)


def discretised(A, B, dt):
    """The bilinear rule, by dense inverses."""
    identity = torch.eye(len(A), dtype=A.dtype)
    inverse = torch.linalg.inv(identity - dt / 2 * A)
    return inverse @ (identity + dt / 2 * A), dt * (inverse @ B)


def iterated(A, B, C, dt, length):
    """The kernel of a dense system."""
    A_bar, x = discretised(A, B, dt)
    entries = []
    for _ in range(length):
        entries.append(C @ x)
        x = A_bar @ x
    return torch.stack(entries)


def s4_kernel(layer, length):
    """The dense complex system of all N states, iterated: nothing diagonal, nothing transformed."""
    Lambda = torch.complex(-exact(layer.log_decay).exp(), exact(layer.frequency))
    halves = Lambda, complex_(layer.P), complex_(layer.B), complex_(layer.C)
    Lambda, P, B, C = map(with_conjugates, halves)
    A = torch.diag(Lambda) - torch.outer(P, P.conj())
    dt = exact(layer.log_dt).exp().repeat(len(C) // layer.d_model)
    rows = zip(C, dt, strict=True)
    kernel = torch.stack([iterated(A, B, row, step, length) for row, step in rows])
    assert kernel.imag.abs().max() < 1e-10
    return kernel.real


def interpolated(values, factor):
    """Entry by entry: the straight line between the two nearest old entries."""
    entries = []
    for j in range(factor * len(values)):
        place = (j + 0.5) / factor - 0.5
        left = math.floor(place)
        ends = [values[min(max(k, 0), len(values) - 1)] for k in (left, left + 1)]
        entries.append(ends[0] * (left + 1 - place) + ends[1] * (place - left))
    return torch.stack(entries)


def sgconv_kernel(layer, length):
    rows = []
    for sub_kernels, norm in zip(exact(layer.sub_kernels), layer.kernel_norm, strict=True):
        pieces = [sub_kernels[0]]
        for i, sub_kernel in enumerate(sub_kernels[1:], start=1):
            pieces.append(layer.decay**i * interpolated(sub_kernel, 2 ** (i - 1)))
        entries = torch.cat(pieces) / norm.item()
        rows.append(torch.cat((entries, torch.zeros(length, dtype=torch.float64)))[:length])
    return torch.stack(rows)


ACTIVATIONS = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu, "identity": torch.clone}


def convolved(kernel_of, layer, x):
    """A convolution and its output stage, from the kernel [rows, K]."""
    kernel, H = kernel_of(layer, min(x.shape[1], layer.kernel_length or x.shape[1])), layer.d_model
    left = kernel[H:] if layer.bidirectional else None
    y = reference.convolution(x, kernel[:H], left) + exact(layer.D) * x
    if not layer.project:
        return y
    return output_map(layer, ACTIVATIONS[layer.activation](y))


def linear(module, x):
    return x @ exact(module.weight).T + exact(module.bias)


def output_map(layer, y):
    y = linear(layer.out, y)
    return y[..., : layer.d_model] * y[..., layer.d_model :].sigmoid() if layer.glu else y


def gated(layer, x):
    """One product at a time: `y_t = q_t (D k_t v_t + sum_s K_|t-s| k_s v_s)`, in each channel."""
    H, L = layer.d_model, x.shape[1]
    q, k, v = linear(layer.qkv, x).split(H, dim=-1)
    K, D = dlr_kernel(layer.dlr, min(L, layer.dlr.kernel_length or L)), exact(layer.dlr.D)
    outputs = []
    for t in range(L):
        y = D * k[:, t] * v[:, t]
        for s in range(L):
            if s <= t < s + K.shape[1]:
                y = y + K[:H, t - s] * k[:, s] * v[:, s]
            elif layer.bidirectional and t < s <= t + K.shape[1]:
                y = y + K[H:, s - t - 1] * k[:, s] * v[:, s]
        outputs.append(q[:, t] * y)
    return output_map(layer, torch.stack(outputs, dim=1))


# ---------------------------------------------------------------------------------- attention


def sees(layer, t, s):
    chunk = getattr(layer, "chunk", None)
    near = chunk is None or abs(t // chunk - s // chunk) <= 1
    return near and (layer.bidirectional or s <= t)


def turned(x, position):
    """[d] as d/2 complex numbers, each times its own `exp(i angle)`."""
    half = len(x) // 2
    angles = [position * 10000.0 ** (-2 * i / len(x)) for i in range(half)]
    angle = torch.tensor(angles, dtype=torch.float64)
    z = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag))


def attended(layer, x):
    """One softmax at a time."""
    H, d, samples = layer.d_model, layer.d_model // layer.heads, []
    for u in x:
        q, k, v = linear(layer.qkv, u).split(H, dim=-1)
        rows = []
        for t in range(len(u)):
            known = [s for s in range(len(u)) if sees(layer, t, s)]
            heads = []
            for h in (slice(i, i + d) for i in range(0, H, d)):
                query = turned(q[t, h], t)
                scores = torch.stack([query @ turned(k[s, h], s) for s in known])
                weights = (scores * exact(layer.temperature)).exp()
                heads.append(weights @ v[known, h] / weights.sum())
            rows.append(torch.cat(heads))
        samples.append(torch.stack(rows))
    o = linear(layer.merge, torch.stack(samples))
    if isinstance(layer, layers.AttentionFF):
        for norm, up, _, down in layer.feed_forward:
            mean, variance = o.mean(-1, keepdim=True), o.var(-1, keepdim=True, correction=0)
            normal = (o - mean) / (variance + 1e-5).sqrt()
            normal = normal * exact(norm.weight) + exact(norm.bias)
            o = o + linear(down, F.gelu(linear(up, normal)))
    return output_map(layer, x + F.gelu(o))


# ---------------------------------------------------------------------------------- tape


def taped(layer, x):
    y = torch.stack([read_by_pairs(layer, u) for u in x])
    return output_map(layer, ACTIVATIONS[layer.activation](y))


def read_by_pairs(layer, u):
    """[L, heads * D]: for every pair of positions, the kernel between where they write and read."""
    L, heads, D, n = len(u), layer.heads, layer.d_head, torch.arange(layer.harmonics)
    if layer.hold and layer.hold < L:
        added = linear(layer.held, u[: layer.hold].flatten())
        u = torch.cat((u[: layer.hold], u[layer.hold :] + added))
    v = linear(layer.value, u).view(L, heads, D)
    if layer.gate:
        v = v * linear(layer.beta, u).sigmoid()[..., None]
    delta = torch.ones(L, 1).double() if layer.clock == "fixed" else linear(layer.delta, u)
    time = torch.stack([delta[:k].sum(0) for k in range(L)]).expand(L, heads)
    clock = torch.exp(2j * math.pi / layer.length * time)
    z = torch.view_as_complex((u @ exact(layer.z.weight).T).view(L, heads, layer.factors, 2))
    z = (z / z.abs()).prod(-1).conj()
    c = complex_(layer.c).repeat_interleave(D // layer.kernels, dim=1)  # [rows, D, N]
    rows = []
    for k in range(L):
        for h in range(heads):
            r = clock[k, h] * z[k, h] if h < layer.lag_heads else z[k, h]
            met = (r * clock[:, h].conj())[:, None] ** n  # [L, N]
            y = ((met @ c[h].T).real * v[:, h])[: k + 1].sum(0)
            if layer.bidirectional:
                y = y + ((met @ c[heads + h].T).real * v[:, h])[k:].sum(0)
            rows.append(y)
    return torch.cat(rows).view(L, heads * D)


DEFINITIONS = {
    layers.DLR: partial(convolved, dlr_kernel),
    layers.GatedDLR: gated,
    layers.DSS: partial(convolved, state_space_kernel),
    layers.S4D: partial(convolved, state_space_kernel),
    layers.S4: partial(convolved, s4_kernel),
    layers.SGConv: partial(convolved, sgconv_kernel),
    layers.Attention: attended,
    layers.AttentionFF: attended,
    layers.LocalAttention: attended,
    layers.TapeDLR: taped,
}
DEFINED = [form for form in EVERY if form.kind in DEFINITIONS]


@pytest.mark.parametrize("length", [1, 2, 16, 21, 33])
@pytest.mark.parametrize("form", DEFINED, ids=str)
def test_values_and_gradients_equal_the_definition(form, length):
    """A short kernel hardly depends on S4's Lambda: its gradient has the rounding of larger ones.

    Attention to a single key does not depend on its score.
    """
    layer, x = form.make(), form.input(length).requires_grad_()
    expected, inputs = DEFINITIONS[form.kind](layer, exact(x)), (x, *layer.parameters())
    tolerance = 1e-9 if form.kind is layers.S4 else 1e-11
    negligible = 1e-12 if length == 1 else 0.0
    both = assert_agree(layer(x), expected, inputs, 1e-12, tolerance, negligible=negligible)
    together = (torch.cat([part.flatten().cpu() for part in parts]) for parts in both)
    assert_close(*together, 1e-12)


@pytest.mark.parametrize("states", [2, 6, 64])
def test_the_initial_s4_is_the_dense_legs_system(states):
    """From HiPPO's formula alone: A is real, lower triangular and far from normal.

    C lives in the coordinates of the layer; any other coordinates see it through the Markov
    parameters: the kernel read out along the state that an impulse makes is `B^T Abar^k Bbar`,
    which no change to unitary coordinates changes.
    """
    n = torch.arange(states, dtype=torch.float64)
    B = (2 * n + 1).sqrt()
    A = -(torch.outer(B, B).tril(-1) + torch.diag(n + 1))
    layer = layers.S4(2, states, dt_min=1e-2, dt_max=1e-1).to(DEVICE).double()
    layer.reset_parameters()
    with torch.no_grad():
        layer.C.copy_(layer.B * torch.tensor([1.0, -1.0]).to(layer.B))  # C = B^*
    for dt, kernel in zip(layer.log_dt.exp().tolist(), layer.kernel(100), strict=True):
        assert_close(kernel, iterated(A, B, B, dt, 100), 1e-11)


# ---------------------------------------------------------------------------------- fp32


@pytest.mark.parametrize(
    "form", [form for form in EVERY if issubclass(form.kind, layers.Attention)], ids=str
)
def test_fp32_attention_is_close_to_float64(form):
    layer, x = form.make(torch.float32), form.input(300, dtype=torch.float32)
    assert_close(layer(x), copy.deepcopy(layer).double()(x.double()), 1e-5)


@pytest.mark.parametrize(
    ("make", "tolerance"),
    [
        (partial(layers.DLR, 4, 256, dt_min=1e-5, dt_max=1e-5), 1e-5),
        (partial(layers.DSS, 3, 512), 1e-5),  # phases of up to 0.01 pi 512 a step
        (partial(layers.S4D, 4), 1e-5),  # the highest frequency turns 128 rad a step
        (partial(layers.S4, 2, 16, dt_min=1e-5, dt_max=1e-4), 1e-6),
        (partial(layers.SGConv, 4, length=2**16, d_kernel=256), 1e-5),
    ],
    ids=lambda value: str(getattr(value, "func", value)),
)
def test_fp32_at_a_long_length(make, tolerance):
    """The kernel with its gradients, and the output."""
    layer = make().to(DEVICE)
    double = copy.deepcopy(layer).double()
    kernels, inputs = zip(
        *(
            (each.kernel(2**16), [getattr(each, name) for name in each.kernel_parameters])
            for each in (layer, double)
        ),
        strict=True,
    )
    assert_agree(*kernels, inputs[0], tolerance, 1e-5, truth=inputs[1])
    x = torch.randn(1, 2**16, layer.d_model, device=DEVICE)
    assert_close(layer(x), double(x.double()), 1e-5)


def test_fp32_of_s4_against_the_dense_recurrence():
    layer = layers.S4(4).to(DEVICE)
    assert_close(layer.kernel(1001), s4_kernel(layer, 1001), 1e-6)


@pytest.mark.parametrize(
    ("make", "chunk", "length", "tolerance"),
    [
        # a decay rounded to fp32 would be off by 7e-6 after 600 chunks of one position
        (partial(layers.DLR, 2, 64, dt_min=2e-7, dt_max=4e-7), 1, 600, 3e-6),
        (partial(layers.DSS, 2, 64, dt_min=1e-6, dt_max=1e-5), None, 2000, 1e-5),
        (partial(layers.S4D, 2, 64, dt_min=1e-6, dt_max=1e-5), None, 2000, 1e-5),
    ],
    ids=["dlr in chunks", "dss", "s4d"],
)
def test_fp32_states_keep_their_phase(make, chunk, length, tolerance):
    layer, x = make(project=False).to(DEVICE), torch.randn(1, length, 2, device=DEVICE)
    with torch.no_grad():
        _, state = in_chunks(layer, x, chunk) if chunk else in_steps(layer, x)
        _, expected = copy.deepcopy(layer).double()(x.double(), return_state=True)
    assert_close(state.x, expected.x, tolerance)


@pytest.mark.parametrize(
    ("make", "length", "tolerance"),
    [
        (partial(layers.S4, 2, dt_max=1e-3, project=False), 2000, 1e-5),
        # what leaves the window is taken out; what rounding leaves behind stays small
        (partial(layers.DLR, 5, 64, kernel_length=100, dt_min=1e-6, dt_max=1e-6), 2500, 1e-4),
    ],
    ids=["s4", "dlr with a restricted kernel"],
)
def test_fp32_steps_keep_their_accuracy(make, length, tolerance):
    layer = make().to(DEVICE)
    x = torch.randn(1, length, layer.d_model, device=DEVICE)
    with torch.no_grad():
        assert_close(in_steps(layer, x)[0], layer(x), tolerance)
