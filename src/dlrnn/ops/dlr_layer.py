"""The whole DLR layer as one op, on a GPU that has all its kernels.

    K = Re(W P),  P_nk = lambda_n^k,  lambda = exp(-log_lambda_re^2 + i log_lambda_im)
    out = linear(activation(conv(K, u) + D u))

It launches the kernels of `vandermonde`, `convolve` and the output stage one after the other, as
one node of autograd's graph: six ops with their nodes would take several times the host time.
`composition` defines the result.
"""

from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dlrnn.ops.checks import in_transform
from dlrnn.ops.convolution import DIRECT, as_sequences, needs_gradient
from dlrnn.ops.cuda import convolution as row_kernels
from dlrnn.ops.cuda import nvrtc, output_stage
from dlrnn.ops.cuda import vandermonde as kernels
from dlrnn.ops.cuda.negacyclic_fft import SHORTEST
from dlrnn.ops.dispatch import is_plain, op, prefers_fused, records_choices, runs_eagerly
from dlrnn.ops.mixing import FUSED_ACTIVATIONS, FUSED_CHANNELS, FUSED_COLUMNS, mix, stored_dtype
from dlrnn.ops.pairs import DLRExponents
from dlrnn.ops.vandermonde import vandermonde

LEAST = 2**SHORTEST // 2 + 1  # positions
THREADS = 128  # of a block of dlr_layer.cu


Parameters = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""log_lambda_re [N], log_lambda_im [N], W [H or 2 H, N, 2], D [H], weight [O, H] and bias [O]."""


def composition(u: Tensor, parameters: Parameters, entries: int, activation: str) -> Tensor:
    """The layer as a composition of ops; `entries` is the length of the kernel."""
    log_lambda_re, log_lambda_im, W, D, weight, bias = parameters
    log_lambda = DLRExponents(log_lambda_re, log_lambda_im).log_lambda()
    tf32 = stored_dtype(u) != torch.float32
    right, left = _directions(vandermonde(W, log_lambda, entries, tf32=tf32), D)
    return mix(u, right, _or_empty(left, right), weight, bias, skip=D, activation=activation)


def takes_dlr_layer(
    u: Tensor, parameters: tuple[Tensor | None, ...], entries: int, activation: str
) -> bool:
    """Whether `dlr_layer` takes these tensors, with the gradients of all parameters or of none."""
    if not (u.is_cuda and is_plain(u) and u.dtype in (torch.float32, stored_dtype(u))):
        return False
    given = [x for x in parameters if x is not None and is_plain(x)]
    if len(given) < len(parameters):
        return False
    weight, gradients = given[-2], {x.requires_grad for x in given}
    return (
        all(x.dtype == torch.float32 and x.device == u.device for x in given)
        and entries > DIRECT
        and activation in FUSED_ACTIVATIONS
        and weight.shape[0] in FUSED_COLUMNS
        and weight.shape[1] in FUSED_CHANNELS
        and (len(gradients) == 1 or not torch.is_grad_enabled())
        and not (records_choices() or in_transform())
        and prefers_fused()
        and u.numel() > 0
        and LEAST <= u.shape[1] <= longest(u.device.index)
    )


def longest(device: int) -> int:
    """The most positions that all kernels take on this CUDA device, or 0; a compiler may call it.

    The convolution's kernels may have as many entries.
    """
    return _longest(device)


# What torch.compiler.assume_constant_result does; that function would import the compiler (1 s).
longest._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _longest(device: int) -> int:
    one = torch.empty(1, 1, 1, device=torch.device("cuda", device))
    if not (kernels.supports(one, one) and output_stage.supports(one)):
        return 0
    lengths = (2**k for k in range(row_kernels.LONGEST, SHORTEST - 1, -1))
    return next((n for n in lengths if _convolves(one, n)), 0)


def _convolves(one: Tensor, length: int) -> bool:
    both_kernels = one.view(1, 1).expand(1, length)
    return row_kernels.supports(one.expand(1, length, 1), both_kernels, both_kernels)


def dlr_layer(
    u: Float[Tensor, "B L H"], parameters: Parameters, entries: int, activation: str
) -> Float[Tensor, "B L O"]:
    """`composition` for tensors that `takes_dlr_layer` accepts."""
    dtype = stored_dtype(u)
    # A compiled graph with spectra, whose size depends on the plan, would serve one length.
    keep = dtype == torch.bfloat16 and runs_eagerly(u) and needs_gradient(u, parameters[2])
    out: Tensor = layer_op(u, *parameters, entries, activation, dtype, keep)[0]
    return out


# ---------------------------------------------------------------------------------- launches


@op("dlrnn::dlr_layer", replays=True)
def layer_op(  # noqa: PLR0917
    u: Tensor,
    log_lambda_re: Tensor,
    log_lambda_im: Tensor,
    W: Tensor,
    D: Tensor,
    weight: Tensor,
    bias: Tensor,
    entries: int,
    activation: str,
    dtype: torch.dtype,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output in `dtype`; for backward u in rows, with `keep` its spectra, the convolution's
    result in rows, the kernel and log lambda.
    """
    states = log_lambda_re.shape[0]
    log_lambda = u.new_empty(states, 2, dtype=torch.float64)
    _kernel("log_lambda", u.device)(
        *(nvrtc.ceil_div(states, THREADS), THREADS),
        *(log_lambda_re.contiguous(), log_lambda_im.contiguous(), log_lambda, states),
    )
    kernel = kernels.vandermonde(W, log_lambda, entries, tf32=dtype != torch.float32)
    right, left = _directions(kernel, D)
    y, rows_u, spectra = row_kernels.forward_rows(
        *(u, right, _or_empty(left, right), D, dtype, keep)
    )
    out = output_stage.forward(y, u.shape[1], weight, bias, activation, in_rows=True)
    return out, rows_u, spectra, y, kernel, log_lambda


@op("dlrnn::dlr_layer_backward", replays=True)
def layer_backward_op(  # noqa: PLR0917
    dout: Tensor,
    rows_u: Tensor,
    spectra: Tensor,
    y: Tensor,
    kernel: Tensor,
    log_lambda: Tensor,
    log_lambda_re: Tensor,
    W: Tensor,
    D: Tensor,
    weight: Tensor,
    activation: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of u (in `dtype`), both parts of log lambda, W, D, weight and bias."""
    dy, d_weight, d_bias = output_stage.backward(dout, y, weight, activation, in_rows=True)
    right, left = _directions(kernel, D)
    d_kernel = torch.empty_like(kernel)
    d_right, d_left = _directions(d_kernel, D)
    du, _, _ = row_kernels.backward_rows(
        *(dy, rows_u, spectra, dout.shape[1], right, _or_empty(left, right), D, dtype),
        gradients=(d_right, _or_empty(d_left, right)),
    )
    tf32 = rows_u.dtype != torch.float32
    dW, d_log_lambda = kernels.gradients(d_kernel, W, log_lambda, tf32=tf32)
    d_re, d_im, d_D = (torch.empty_like(x) for x in (log_lambda_re, log_lambda_re, D))
    states, channels = d_re.shape[0], D.shape[0]
    _kernel("parameter_gradients", dout.device)(
        *(nvrtc.ceil_div(max(states, channels), THREADS), THREADS),
        *(d_log_lambda, log_lambda_re.contiguous(), d_kernel, d_re, d_im, d_D),
        *(states, channels, kernel.shape[1]),
    )
    return du, d_re, d_im, dW, d_D, d_weight, d_bias


@layer_op.register_fake
def _(u: Tensor, *others: Any) -> tuple[Tensor, ...]:
    log_lambda_re, _, W, D, _, bias, entries, _, dtype, keep = others
    batch, length, channels = u.shape
    rows = u.new_empty(batch, channels, row_kernels.row_stride(length), dtype=dtype)
    kernel = W.new_empty(W.shape[0], entries)
    right, left = _directions(kernel, D)
    shape = row_kernels.spectra_shape(u, right, _or_empty(left, right)) if keep else 0
    log_lambda = u.new_empty(log_lambda_re.shape[0], 2, dtype=torch.float64)
    out = rows.new_empty(batch, length, bias.shape[0])
    return out, rows, rows.new_empty(shape), torch.empty_like(rows), kernel, log_lambda


@layer_backward_op.register_fake
def _(dout: Tensor, *others: Any) -> tuple[Tensor, ...]:
    log_lambda_re, W, D, weight, _, dtype = others[5:]
    du = dout.new_empty(dout.shape[0], dout.shape[1], D.shape[0], dtype=dtype)
    like = log_lambda_re, log_lambda_re, W, D, weight, weight[:, 0]
    d_re, d_im, dW, d_D, d_weight, d_bias = (x.new_empty(x.shape) for x in like)
    return du, d_re, d_im, dW, d_D, d_weight, d_bias


# ---------------------------------------------------------------------------------- derivatives


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """The rows of u are a differentiable output: second derivatives need it."""
    (u, *parameters, entries, activation, ctx.stored, _), (_, rows_u, *kept) = inputs, output
    ctx.length, ctx.dtype, ctx.options = u.shape[1], u.dtype, (entries, activation)
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(rows_u, *kept, *parameters)


def _gradients(
    ctx: Any, dout: Tensor | None, d_rows: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    """`d_rows` comes from second derivatives only: the rows are u's."""
    rows_u, spectra, y, kernel, log_lambda, *parameters = ctx.saved_tensors
    du = None if d_rows is None else as_sequences(d_rows, ctx.length).to(ctx.dtype)
    if dout is None:
        return du, *[None] * (len(parameters) + 4)
    more: Tensor | None
    gradients: tuple[Tensor | None, ...]
    if torch.is_grad_enabled():
        inputs = as_sequences(rows_u, ctx.length).to(ctx.dtype), *parameters
        with torch.autocast("cuda", ctx.stored, enabled=ctx.stored != torch.float32):
            out = composition(inputs[0], inputs[1:], *ctx.options)
        needed = [x for x in inputs if x.requires_grad]
        found = iter(torch.autograd.grad(out, needed, dout, create_graph=True))
        more, *gradients = (next(found) if x.requires_grad else None for x in inputs)  # type: ignore[assignment]
    else:
        log_lambda_re, _im, W, D, weight, _bias = parameters
        kept, activation = (rows_u, spectra, y, kernel, log_lambda), ctx.options[1]
        more, *gradients = layer_backward_op(
            *(dout, *kept, log_lambda_re, W, D, weight, activation, ctx.dtype)
        )
    return more if du is None or more is None else du + more, *gradients, *[None] * 4


layer_op.register_autograd(_gradients, setup_context=_setup)


def _directions(kernel: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
    """The kernels [H, K] that read from left to right, and from right to left (or [0, K])."""
    return kernel[: D.shape[0]], kernel[D.shape[0] :]


def _or_empty(left: Tensor, right: Tensor) -> Tensor:
    """The left kernel [H, K], or [H, 0] if there is none."""
    return left if left.shape[0] else right.new_empty(right.shape[0], 0)


def _kernel(name: str, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.load(("dlr_layer.cu",), name, (), 0, device.index)
