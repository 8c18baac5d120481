import pytest
import torch
from support import DEVICE, assert_close, random_modes, run_interpreted, run_python

from dlrnn import ops
from dlrnn.ops.backends import BACKENDS


@pytest.mark.parametrize("op", BACKENDS)
def test_the_default_is_named_with_a_reason(op):
    name, why = ops.backend_for(op)
    assert name in BACKENDS[op]
    assert why


def test_asked_for_and_there():
    W, log_lambda = random_modes(2, 3)
    with ops.use_backend("torch"):
        assert ops.backend_for("vandermonde") == ("torch", "asked for")
        ops.vandermonde(W, log_lambda, 8)


def test_asked_for_and_not_there_is_an_error():
    with (
        pytest.raises(ValueError, match="backend 'cuneiform' was asked for"),
        ops.use_backend("cuneiform"),
    ):
        pass
    assert ops.backend_for("step")[0] == "torch"


def test_the_variable_is_heard():
    code = (
        "import os; os.environ['DLRNN_BACKEND'] = 'cuneiform'\n"
        "import torch, dlrnn\n"
        "try: dlrnn.DLR(2, 4)(torch.ones(1, 8, 2))\n"
        "except ValueError as error: print(error)"
    )
    assert "backend 'cuneiform' was asked for, and vandermonde has only: " in run_python(code)


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
def test_torch_func_sees_through_what_has_a_plain_form(op, shape):
    """On a GPU as well, where jvp would give zeros for an op of our own."""
    x, v = torch.randn(2, *shape, dtype=torch.float64).float()
    _, want = torch.func.jvp(op, (x.double(),), (v.double(),))
    _, have = torch.func.jvp(op, (x.to(DEVICE),), (v.to(DEVICE),))
    assert want.norm() > 1
    assert_close(have.cpu(), want, 1e-5)


def test_triton_runs_where_the_tensors_are():
    """Every function that launches; which device is made the current one, by a stand-in."""
    pytest.importorskip("triton")
    out = run_interpreted("""
from contextlib import nullcontext
from types import SimpleNamespace
from dlrnn import _device as device
from dlrnn.ops.triton import dplr_weights, layer_norm, rotary, sections
from dlrnn.ops.triton import thin_linear, zero_order_hold
from dlrnn.tasks import gpu
for module in (dplr_weights, layer_norm, rotary, sections, thin_linear, zero_order_hold, gpu):
    for name, one in vars(module).items():
        ours = callable(one) and getattr(one, "__module__", "") == module.__name__
        if ours and name[0] != "_" and name != "supports":
            assert hasattr(one, "__wrapped__"), (module, name)
            print(name)
current = []
torch.cuda.device = lambda device: current.append(device) or nullcontext()
there = SimpleNamespace(is_cuda=True, device="cuda:1")
run = device.on_its_device(lambda first, *rest, **more: (first, rest, more, list(current)))
assert run(there, 2, x=3) == (there, (2,), {"x": 3}, ["cuda:1"])
assert run(((there,), 4))[-1] == ["cuda:1"] * 2
assert run(torch.ones(1))[-1] == ["cuda:1"] * 2
""")
    assert len(out.split()) == 14
