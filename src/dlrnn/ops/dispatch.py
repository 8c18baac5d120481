"""The choice of the implementation of an op: requests, rules and records.

There are two backends: `torch` runs on every device; `fused` are our own CUDA and Triton kernels,
for the tensors that they support. An op takes `fused` where it can. A backend can be requested with
`use_backend("fused")`, or with the variable DLRNN_BACKEND before dlrnn is imported. It is then
never replaced by the other one: an op that cannot run it on these tensors raises ValueError.
`recorded` tells what ran and why; `dlrnn doctor` prints it. Both hold for all threads of the
process, because PyTorch computes gradients on a GPU in threads of its own.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from threading import Lock, get_ident
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from dlrnn.ops.cuda.replay import Replayed

Backend = Literal["fused", "torch"]

FUSED = {
    "vandermonde": "fp32 on a GPU of compute capability 8.0 or later",
    "vandermonde_adjoint": "fp32 on a GPU of compute capability 8.0 or later",
    "channel_vandermonde": "fp32 on a GPU of compute capability 8.0 or later, at most 32 rows",
    "channel_adjoint": "fp32 on a GPU of compute capability 8.0 or later, at most 32 rows",
    "convolution": "u in fp32, bf16 or fp16 and kernels in fp32, on a GPU of compute capability 8.0"
    " or later, and 129 to 2^20 positions",
    "mix": "fp32, and under autocast u in fp32 or autocast's dtype, on a GPU of compute capability"
    " 8.0 or later, GELU or the identity, a bias, at most 256 input and 512 output channels in"
    " multiples of 16, and kernels of more than 4 entries",
    "layer_norm": "fp32 on a GPU, at most 1024 channels, no torch.func",
    "thin_linear": "fp32 on a GPU, also under autocast, at most 16 numbers on one side, a bias, and"
    " no torch.func",
    "rotate": "fp32, bf16 or fp16 on a GPU, an even head width, no torch.func",
    "zero_order_hold": "a GPU, not compiled",
    "sections": "a GPU of compute capability 9.0 or later, not compiled, at most two directions",
    "step": "fp32 parameters on a GPU of compute capability 8.0 or later, no gradients to record,"
    " not exported, no torch.func",
}
"""What the fused kernels of an op take."""

OPS = tuple(FUSED)
"""Every op that asks here."""

_HAS_TRITON = find_spec("triton") is not None  # looked up once: a compiled graph cannot do it
_requested = [os.environ.get("DLRNN_BACKEND", "")]
_threads = [0]  # that made these requests
_records: list[list["Choice"]] = []
_lock = Lock()  # for changes of these lists


class Choice(NamedTuple):
    """What ran, and why."""

    op: str
    backend: Backend
    reason: str


def uses_fused(op: str, x: Tensor, supports: Callable[[], bool] = lambda: False) -> bool:
    """Whether `op` runs its fused kernels on x; `supports` says whether they take these tensors.

    Raises ValueError if a backend was requested that cannot run here.
    """
    requested = _requested[-1]
    if not requested and not x.is_cuda and not _records:
        return False
    _require_known(requested, _source())
    able = x.is_cuda and prefers_fused() and supports()
    if requested == "fused" and not able:
        name = str(x.dtype).removeprefix("torch.")
        raise ValueError(
            f"backend 'fused' was requested ({_source()}), and {op} cannot run it on {name} tensors"
            f" on {x.device}; its kernels take {FUSED[op]}"
        )
    for choices in tuple(_records):
        choices.append(Choice(op, "fused" if able else "torch", _reason(op, x, able)))
    return able


def prefers_fused() -> bool:
    """Whether the fused kernels are installed and no other backend is requested.

    For code that a compiler traces, which must not look at tensors.
    """
    return _requested[-1] != "torch" and _fused_is_there()


def _reason(op: str, x: Tensor, able: bool) -> str:
    if _requested[-1]:
        return "requested"
    if able:
        return "its kernels take these tensors"
    if not x.is_cuda:
        return "the tensors are not on a GPU"
    return f"the kernels take {FUSED[op]}" if _HAS_TRITON else "triton is not installed"


def _require_known(name: str, source: str) -> None:
    if name and name not in get_args(Backend):
        known = " or ".join(get_args(Backend))
        raise ValueError(f"backend {name!r} was requested ({source}); there is only {known}")


def require_request() -> None:
    """Raises ValueError if the requested backend does not exist."""
    _require_known(_requested[-1], _source())


def _source() -> str:
    """What requested the backend, so that the request can be taken back."""
    return "by the variable DLRNN_BACKEND" if len(_requested) == 1 else "by use_backend"


def _fused_is_there() -> bool:
    """Whether there are Triton and a GPU; reading its properties would start CUDA before a fork."""
    return _HAS_TRITON and torch.cuda.is_available()


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Inside the context every op uses this backend, or raises ValueError.

    The request holds for all threads, so that two of them cannot request different backends.
    """
    _require_known(name, "by use_backend")
    if name == "fused" and not _fused_is_there():
        missing = "there is no CUDA device" if _HAS_TRITON else "triton is not installed"
        raise ValueError(f"backend 'fused' was requested, and {missing}")
    thread = get_ident()
    with _lock:
        others = {
            each for each, by in zip(_requested, _threads, strict=True) if by not in (0, thread)
        }
        if others - {name}:
            raise ValueError(
                f"backend {name!r} was requested, and another thread has requested"
                f" {others.pop()!r}: a request holds for all threads, so wait until it ends"
            )
        _requested.append(name)
        _threads.append(thread)
    try:
        yield
    finally:
        with _lock:
            place = len(_threads) - 1 - _threads[::-1].index(thread)
            del _requested[place], _threads[place]


@contextmanager
def recorded() -> Iterator[list[Choice]]:
    """Collects the choices that ops make inside the context, in all threads."""
    choices: list[Choice] = []
    with _lock:
        _records.append(choices)
    try:
        yield choices
    finally:
        with _lock:
            _records[:] = [each for each in _records if each is not choices]


def records_choices() -> bool:
    """Whether `recorded` is collecting choices."""
    return bool(_records)


def replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose launches are replayed where the same sizes come again."""
    return Replayed(function, _settings)


def _settings() -> tuple[str, str] | None:
    """What the launches depend on, besides the arguments; None while choices are recorded."""
    if _records:
        return None
    return _requested[-1], torch.backends.cuda.matmul.fp32_precision


def is_plain(x: Tensor) -> bool:
    """Whether x is a tensor of PyTorch's own types, with data; a compiler may trace it."""
    return (type(x) is Tensor or type(x) is nn.Parameter) and not x.is_meta


def runs_eagerly(x: Tensor) -> bool:
    """Whether x is a plain tensor outside of any compiler, tracer or dispatch mode.

    These see `torch.library` ops only. On a CPU, tracers and modes see our PyTorch code.
    """
    plain = type(x) is Tensor or type(x) is nn.Parameter  # not by a call: this runs for every op
    if not plain or x.is_meta or torch.compiler.is_compiling():
        return False
    return not x.is_cuda or not (
        torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state()
    )


class Op:
    """A function of tensors that compilers see as one op, and that eager calls run directly.

    A torch.library op, which compilers need, costs 0.1 to 0.7 ms of host time each way. So eager
    calls run the function itself, with its derivative as a torch.autograd.Function. On a GPU the
    launches of a function that `replays` are replayed.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        mutates: tuple[str, ...] = (),
        *,
        replays: bool = False,
    ) -> None:
        self.function = function
        self._on_gpu = replayed(function) if replays else function
        self.library_op = torch.library.custom_op(name, function, mutates_args=mutates)
        if replays:
            self.library_op.register_kernel("cuda")(self._on_gpu)
        self._apply: Callable[..., Any] | None = None

    def __call__(self, x: Tensor, *others: Any) -> Any:
        """The function of x and the others; x decides whether the call is an eager one."""
        if not runs_eagerly(x):
            return self.library_op(x, *others)
        if self._apply is None or not torch.is_grad_enabled():
            return (self._on_gpu if x.is_cuda else self.function)(x, *others)
        return self._apply(x, *others)

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` gives the shapes of the results."""
        return self.library_op.register_fake(function)

    def register_autograd(
        self, backward: Any, *, saves: int = 0, setup_context: Any = None
    ) -> None:
        """The derivative, as for `torch.library.CustomOpDef.register_autograd`.

        Without `setup_context` the first `saves` inputs are saved for backward.
        """

        def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.save_for_backward(*inputs[:saves])

        self.library_op.register_autograd(backward, setup_context=setup_context or save)
        function, on_gpu = self.function, self._on_gpu

        class Eager(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> Any:
                output = (on_gpu if inputs[0].is_cuda else function)(*inputs)
                if setup_context is None:
                    ctx.save_for_backward(*inputs[:saves])
                else:
                    setup_context(ctx, inputs, output)  # as a method of its own: 20 us a call
                return output

        Eager.backward = staticmethod(backward)  # type: ignore[method-assign]
        self._apply = Eager.apply


def op(
    name: str, mutates: tuple[str, ...] = (), *, replays: bool = False
) -> Callable[[Callable[..., Any]], Op]:
    """Makes an `Op` of a function; `mutates` names the arguments that it writes to."""
    return lambda function: Op(name, function, mutates, replays=replays)
