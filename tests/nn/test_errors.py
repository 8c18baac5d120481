"""Wrong input: one clear sentence, before any work starts."""

import pytest
import torch
from support import DEVICE, assert_close
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlrnn import DLR
from dlrnn.nn import DSS, S4, Attention, RecurrentState, SGConv


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"d_model": 0}, "d_model must be a whole number of at least 1, not 0"),
        ({"d_state": -1}, "d_state must be a whole number of at least 1, not -1"),
        ({"d_model": 4.0}, "d_model must be a whole number of at least 1, not 4.0"),
        ({"d_state": "6"}, "d_state must be a whole number of at least 1, not '6'"),
        ({"kernel_length": 0}, r"kernel_length \(None is no limit\) must be a whole .*, not 0"),
        ({"kernel_length": 2.5}, r"kernel_length \(None is no limit\) must be a whole .*, not 2.5"),
        ({"dt_max": float("inf")}, "0 < dt_min <= dt_max must hold, not 0.0005 and inf"),
        ({"cast": "imag"}, "cast must be 'real' or 'prod', not 'imag'"),
        (
            {"activation": "glue"},
            "activation must be one of gelu, silu, relu, identity, not 'glue'",
        ),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, not 1.0"),
        ({"dt_min": 0.6}, "0 < dt_min <= dt_max must hold, not 0.6 and 0.5"),
        ({"dropout": "0.1"}, "dropout must be at least 0 and below 1, not '0.1'"),
        ({"dt_min": "a"}, "0 < dt_min <= dt_max must hold, not 'a' and 0.5"),
        ({"dt_min": 0.0}, "0 < dt_min <= dt_max must hold, not 0.0 and 0.5"),
        ({"real": True, "cast": "prod"}, "real=True has no imaginary part"),
        ({"bidirectional": "no"}, "bidirectional must be True or False, not 'no'"),
        ({"real": 1}, "real must be True or False, not 1"),
        ({"project": False, "glu": True}, "project=False is a linear layer"),
        ({"project": False, "activation": "relu"}, "project=False is a linear layer"),
    ],
    ids=str,
)
def test_bad_options(options, sentence, unchecked):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        DLR(**{"d_model": 4, "d_state": 6, **options})


def test_unknown_option():
    with pytest.raises(TypeError, match="unexpected keyword argument 'd_stat'"):
        DLR(4, 6, d_stat=6)


def put(x, index, value):
    x = x.clone()
    x[index] = value
    return x


X = torch.randn(2, 10, 4, device=DEVICE)


@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        (X[0], r"x must have the shape \[B, L, 4\], not \[10, 4\]"),
        (X[..., :3], r"x must have the shape \[B, L, 4\], not \[2, 10, 3\]"),
        (X[:, :0], "x has length 0: give it at least one position"),
        (X.double(), "x must be float32, not float64"),
        (X.int(), "x must be float32, not int32"),
        (X.bfloat16(), "x is bfloat16: convert it to the layer's dtype or use torch.autocast"),
        (X.tolist(), "x must be a torch tensor, not a list"),
        (X.cpu().numpy(), "x must be a torch tensor, not a ndarray"),
        (X.to("meta"), "x is on meta, the layer on .*: move one of them with .to()"),
    ],
)
def test_bad_input(x, sentence, unchecked):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        DLR(4, 6).to(DEVICE)(x)


@pytest.mark.parametrize(
    ("lengths", "sentence"),
    [
        (torch.tensor([1, 11]), "lengths must lie between 0 and 10, the length of x, and not"),
        (torch.tensor([-1, 5]), "lengths must lie between 0 and 10"),
        (torch.tensor([5]), r"lengths must have the shape \[2\], not \[1\]"),
        (torch.tensor([5.0, 5.0]), "lengths must be whole numbers, not float32"),
        (torch.tensor([5j, 5j]), "lengths must be whole numbers, not complex64"),
        ([5, 5], "lengths must be a torch tensor, not a list"),
        (torch.tensor([True, False]), "lengths must be whole numbers, not bool"),
    ],
)
def test_bad_lengths(lengths, sentence, unchecked):
    if "between" in sentence and DEVICE.type != "cpu":
        return  # values on a GPU are not read back
    with pytest.raises(ValueError, match=f"^{sentence}"):
        DLR(4, 6).to(DEVICE)(X, lengths=lengths.to(DEVICE) if hasattr(lengths, "to") else lengths)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="values on a GPU are not read back")
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_not_finite(value, unchecked):
    layer = DLR(4, 6)
    sentence = f"^x holds {value} at \\[1, 3, 2\\]: every value must be finite"
    with pytest.raises(ValueError, match=sentence):
        layer(put(X, (1, 3, 2), float(value)))
    with pytest.raises(ValueError, match=f"^x holds {value} at \\[1, 2\\]"):
        layer.step(put(X[:, 0], (1, 2), float(value)))
    with torch.no_grad():
        layer.W[2, 3, 1] = float(value)
    with pytest.raises(ValueError, match=f"^W holds {value} at \\[2, 3, 1\\]"):
        layer(X)
    layer = DLR(4, 6)
    with torch.no_grad():
        layer.D[1] = float(value)
    with pytest.raises(ValueError, match=f"^D holds {value} at \\[1\\]"):
        layer(X)


def test_bidirectional_cannot_stream(unchecked):
    layer = DLR(4, 6, bidirectional=True).to(DEVICE)
    sentence = "^a bidirectional layer reads the future: it has no state and cannot stream"
    for call in (
        lambda: layer.step(X[:, 0]),
        lambda: layer(X, return_state=True),
        lambda: layer.initial_state(2),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()


def test_another_layers_state(unchecked):
    layer = DLR(4, 6).to(DEVICE)
    _, state = layer(X, return_state=True)
    with pytest.raises(ValueError, match=r"^state.x must have the shape \[1, 4, 6, 2\]"):
        layer.step(X[:1, 0], state)
    with pytest.raises(ValueError, match=r"^state.x must have the shape \[2, 4, 7, 2\]"):
        DLR(4, 7).to(DEVICE).step(X[:, 0], state)
    with pytest.raises(ValueError, match=r"^state.past must have the shape \[2, 5, 4\]"):
        DLR(4, 6, kernel_length=5).to(DEVICE).step(X[:, 0], state)
    with pytest.raises(ValueError, match=r"^this layer's state is a OnlineState, not a Recurrent"):
        DLR(4, 99, cast="prod").to(DEVICE).step(X[:, 0], state)


def test_a_state_of_another_dtype_or_device(unchecked):
    layer = DLR(4, 6).to(DEVICE)
    _, state = layer(X, return_state=True)
    double = RecurrentState(state.x.double(), state.past, state.oldest)
    away = RecurrentState(state.x.to("meta"), state.past, state.oldest)
    for call in (layer.step, lambda x, s: layer(x[:, None], s)):
        with pytest.raises(ValueError, match=r"^state.x must be float32, not float64"):
            call(X[:, 0], double)
        with pytest.raises(ValueError, match=r"^state.x is on meta, the layer on"):
            call(X[:, 0], away)


def test_a_state_of_another_precision(unchecked):
    for options in ({"kernel_length": 5}, {"d_state": 99, "cast": "prod"}):
        layer = DLR(4, **{"d_state": 6, **options}).to(DEVICE)
        _, state = layer(X, return_state=True)
        layer.double()
        with pytest.raises(ValueError, match=r"^state.(past|kernel) must be float64, not float32"):
            layer.step(X[:, 0].double(), state)


@pytest.mark.parametrize("size", [-1, 2.0, "2", None, True])
def test_a_batch_that_cannot_be(size, unchecked):
    with pytest.raises(ValueError, match=r"^batch_size must be a whole number of at least 0"):
        DLR(4, 6).to(DEVICE).initial_state(size)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_transforms_of_torch_func(unchecked):
    """They do not see into our ops: jvp would give zeros."""
    layer = DLR(4, 6).to(DEVICE)
    sentence = "^dlrnn cannot be used inside torch.func's jvp, vmap, grad or jacobians"
    for call in (
        lambda: torch.func.jvp(layer, (X,), (X,)),
        lambda: torch.func.jacfwd(layer)(X),
        lambda: torch.func.grad(lambda x: layer(x).sum())(X),
        lambda: torch.func.vmap(lambda x: layer(x[None]))(X),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()
    torch.func.functional_call(layer, dict(layer.named_parameters()), (X,))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("mixer", [DLR(4, 6), DSS(4, 6), S4(4, 6), SGConv(4, length=20)], ids=type)
def test_forward_mode(mixer, unchecked):
    """As above: without a word the tangent would be 0, or lack the kernel's part."""
    layer = mixer.to(DEVICE).requires_grad_(False)
    with (
        forward_ad.dual_level(),
        pytest.raises(ValueError, match=r"nor in forward-mode AD: use torch.autograd's"),
    ):
        layer(forward_ad.make_dual(X, torch.ones_like(X)))
    layer(X)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_forward_mode_of_what_has_no_op_of_ours():
    """Attention is right; its kernels are PyTorch's own."""
    layer, x = Attention(4, heads=1).to(DEVICE).double(), X.double()
    with sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        dual = layer(forward_ad.make_dual(x, torch.ones_like(x)))
        tangent = forward_ad.unpack_dual(dual).tangent
    step = 1e-6
    with torch.no_grad():
        expected = (layer(x + step) - layer(x - step)) / (2 * step)
    assert_close(tangent, expected, 1e-7)


def test_half_precision_parameters(unchecked):
    layer = DLR(4, 6).to(DEVICE).bfloat16()
    sentence = "^the parameters of a layer must be float32 or float64, not bfloat16"
    with pytest.raises(ValueError, match=sentence):
        layer(X.bfloat16())


def test_a_float64_layer_takes_no_half_precision(unchecked):
    layer = DLR(4, 6).to(DEVICE).double()
    with (
        torch.autocast(DEVICE.type, torch.bfloat16),
        pytest.raises(ValueError, match=r"^x must be float64, not bfloat16"),
    ):
        layer(X.bfloat16())


@pytest.mark.parametrize("length", [0, 5.0, "5"])
def test_kernel_of_no_length(length, unchecked):
    with pytest.raises(ValueError, match=r"^a kernel needs a whole length of at least 1, not "):
        DLR(4, 6).kernel(length)


def test_numbers_that_are_none(unchecked):
    for make, sentence in (
        (lambda: SGConv(4, length=9, decay="a"), "decay must be above 0 and at most 1, not 'a'"),
        (lambda: DSS(4, 6, frequency_step="a"), "frequency_step must be above 0 and finite, not"),
    ):
        with pytest.raises(ValueError, match=sentence):
            make()
