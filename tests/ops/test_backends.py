import importlib
from contextlib import nullcontext
from inspect import isfunction
from types import SimpleNamespace

import pytest
import torch
from support import DEVICE, assert_close, random_modes, refused, run_python

from dlrnn import ops
from dlrnn.common.device import on_its_device
from dlrnn.ops.backends import BACKENDS


@pytest.mark.parametrize("op", BACKENDS)
def test_the_default_backend_has_a_name_and_a_reason(op):
    name, why = ops.backend_for(op)
    assert name in BACKENDS[op]
    assert why


def test_an_available_backend_can_be_asked_for():
    W, log_lambda = random_modes(2, 3)
    with ops.use_backend("torch"):
        assert ops.backend_for("vandermonde") == ("torch", "asked for")
        ops.vandermonde(W, log_lambda, 8)


def test_asking_for_an_unknown_backend_raises():
    with refused("backend", "'cuneiform'"), ops.use_backend("cuneiform"):
        pass
    assert ops.backend_for("step")[0] == "torch"


def test_the_environment_variable_chooses_the_backend():
    code = (
        "import os; os.environ['DLRNN_BACKEND'] = 'cuneiform'\n"
        "import torch, dlrnn\n"
        "try: dlrnn.DLR(2, 4)(torch.ones(1, 8, 2))\n"
        "except ValueError as error: print(error)"
    )
    message = run_python(code)
    assert all(word in message for word in ("backend", "'cuneiform'", "vandermonde", "torch"))


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        (lambda x: ops.layer_norm(x, x[0, 0], x[0, 1]), (2, 3, 16)),
        (lambda x: ops.linear(x, x[0], x[0, :, 0]), (2, 3, 16)),
        (lambda x: ops.rotate(x, torch.arange(3, device=x.device)[None]), (2, 3, 4, 16)),
    ],
    ids=["layer_norm", "linear", "rotate"],
)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode_is_right_where_pytorch_computes(op, shape):
    """On a GPU as well, where jvp would give zeros for an op of our own."""
    x, v = torch.randn(2, *shape, dtype=torch.float64).float()
    _, want = torch.func.jvp(op, (x.double(),), (v.double(),))
    _, have = torch.func.jvp(op, (x.to(DEVICE),), (v.to(DEVICE),))
    assert want.norm() > 1
    assert_close(have.cpu(), want, 1e-5)


def test_triton_launches_on_the_device_of_its_tensors(monkeypatch):
    """A launch makes the tensors' device the current one; here it is a fake device."""
    pytest.importorskip("triton")
    kernels = ["dplr_weights", "layer_norm", "rotary", "sections", "thin_linear", "zero_order_hold"]
    launching = []
    for name in (*(f"dlrnn.ops.triton.{kernel}" for kernel in kernels), "dlrnn.tasks.gpu"):
        module = importlib.import_module(name)
        own = [
            each
            for key, each in vars(module).items()
            if isfunction(each) and each.__module__ == name and key[0] != "_" and key != "supports"
        ]
        assert own
        assert all(hasattr(each, "__wrapped__") for each in own), name
        launching += own
    assert len(launching) == 14

    current = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(current.append(device)))
    there = SimpleNamespace(is_cuda=True, device="cuda:1")
    run = on_its_device(lambda first, *rest, **more: (first, rest, more, list(current)))
    assert run(there, 2, x=3) == (there, (2,), {"x": 3}, ["cuda:1"])
    assert run(((there,), 4))[-1] == ["cuda:1"] * 2
    assert run(torch.ones(1))[-1] == ["cuda:1"] * 2
