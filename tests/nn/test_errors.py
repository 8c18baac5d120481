"""Bad input is refused with one clear message, before any work starts.

Messages are matched by keywords, so that they can be reworded.
"""

import copy
import math
from functools import partial

import pytest
import torch
from mixers import SMALL, STREAMING, UsersMixer
from support import DEVICE, assert_close, refused
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlrnn.models import ModelConfig, build_model
from dlrnn.nn import Attention, Mixer, RecurrentState

pytestmark = pytest.mark.usefixtures("unchecked")

ON_CPU = pytest.mark.skipif(DEVICE.type != "cpu", reason="values on a GPU are not read back")
KERNEL_MIXERS = "dlr", "dss", "s4d", "s4", "sgconv"
SMALL = SMALL | {"users": partial(UsersMixer, d_model=4)}
STREAMING = SMALL | STREAMING
every_mixer = pytest.mark.parametrize("name", SMALL)
every_kernel_mixer = pytest.mark.parametrize("name", KERNEL_MIXERS)

# ---------------------------------------------------------------------------------- options

BAD = [
    ("dlr", {"d_model": 0}, ("d_model", "at least 1", "0")),
    ("dlr", {"d_state": -1}, ("d_state", "at least 1", "-1")),
    ("dlr", {"d_model": 4.0}, ("d_model", "at least 1", "4.0")),
    ("dlr", {"d_state": "6"}, ("d_state", "at least 1", "'6'")),
    ("dlr", {"kernel_length": 0}, ("kernel_length", "0")),
    ("dlr", {"kernel_length": 2.5}, ("kernel_length", "2.5")),
    ("dlr", {"dt_max": math.inf}, ("dt_min", "dt_max", "0.0005", "inf")),
    ("dlr", {"dt_min": 0.6}, ("dt_min", "dt_max", "0.6", "0.5")),
    ("dlr", {"dt_min": "a"}, ("dt_min", "dt_max", "'a'", "0.5")),
    ("dlr", {"dt_min": 0.0}, ("dt_min", "dt_max", "0.0", "0.5")),
    ("dlr", {"cast": "imag"}, ("cast", "real", "prod", "'imag'")),
    ("dlr", {"activation": "glue"}, ("activation", "gelu, silu, relu, identity", "'glue'")),
    ("dlr", {"dropout": 1.0}, ("dropout", "below 1", "1.0")),
    ("dlr", {"dropout": "0.1"}, ("dropout", "below 1", "'0.1'")),
    ("dlr", {"real": True, "cast": "prod"}, ("real=True", "cast='prod'")),
    ("dlr", {"bidirectional": "no"}, ("bidirectional", "'no'")),
    ("dlr", {"real": 1}, ("real", "1")),
    ("dlr", {"project": False, "glu": True}, ("project=False", "glu")),
    ("dlr", {"project": False, "activation": "relu"}, ("project=False", "activation", "'relu'")),
    ("gated-dlr", {"d_model": 0}, ("d_model", "at least 1", "0")),
    ("gated-dlr", {"d_state": -1}, ("d_state", "at least 1", "-1")),
    ("gated-dlr", {"cast": "imag"}, ("cast", "real", "prod", "'imag'")),
    ("gated-dlr", {"dropout": 1.0}, ("dropout", "below 1", "1.0")),
    ("gated-dlr", {"glu": "no"}, ("glu", "'no'")),
    ("dss", {"d_state": 0}, ("d_state", "at least 1", "0")),
    ("dss", {"d_model": 2.5}, ("d_model", "at least 1", "2.5")),
    ("dss", {"dt_min": 0.0}, ("dt_min", "dt_max", "0.0", "0.01")),
    ("dss", {"dt_min": 0.1}, ("dt_min", "dt_max", "0.1", "0.01")),
    ("dss", {"dt_max": math.inf}, ("dt_min", "dt_max", "0.0001", "inf")),
    ("dss", {"frequency_step": 0.0}, ("frequency_step", "above 0", "0.0")),
    ("dss", {"frequency_step": math.nan}, ("frequency_step", "finite", "nan")),
    ("dss", {"frequency_step": "a"}, ("frequency_step", "above 0", "'a'")),
    ("s4d", {"d_state": 7}, ("d_state", "even", "7")),
    ("s4d", {"d_state": 0}, ("d_state", "at least 1", "0")),
    ("s4d", {"d_model": "4"}, ("d_model", "at least 1", "'4'")),
    ("s4d", {"dt_min": 0.2}, ("dt_min", "dt_max", "0.2", "0.1")),
    ("s4d", {"activation": "glue"}, ("activation", "gelu, silu, relu, identity", "'glue'")),
    ("s4", {"d_state": 0}, ("d_state", "at least 1", "0")),
    ("s4", {"d_state": 7}, ("d_state", "even", "7")),
    ("s4", {"dt_min": 0.2}, ("dt_min", "dt_max", "0.2", "0.1")),
    ("s4", {"dt_min": 0.0}, ("dt_min", "dt_max", "0.0", "0.1")),
    ("sgconv", {"length": 0}, ("length", "at least 1", "0")),
    ("sgconv", {"d_kernel": 2.0}, ("d_kernel", "at least 1", "2.0")),
    ("sgconv", {"decay": 0.0}, ("decay", "above 0", "at most 1", "0.0")),
    ("sgconv", {"decay": 1.5}, ("decay", "above 0", "at most 1", "1.5")),
    ("sgconv", {"decay": "a"}, ("decay", "above 0", "at most 1", "'a'")),
    ("sgconv", {"kernel_length": 17}, ("kernel_length", "length", "16", "17")),
    ("tape", {"length": 0}, ("length", "at least 1", "0")),
    ("tape", {"d_head": 3}, ("d_head", "multiple", "kernels", "3", "2")),
    ("tape", {"kernels": 0}, ("kernels", "at least 1", "0")),
    ("tape", {"lag_heads": 3}, ("lag_heads", "at most 2", "3")),
    ("tape", {"hold": -1}, ("hold", "at least 0", "-1")),
    ("tape", {"hold": True}, ("hold", "True")),
    ("tape", {"factors": 3}, ("factors", "1 or 2", "3")),
    ("tape", {"clock": "none"}, ("clock", "fixed, shared, own", "'none'")),
    ("tape", {"activation": "glue"}, ("activation", "gelu, silu, relu, identity", "'glue'")),
    ("tape", {"gate": 1}, ("gate", "1")),
    ("attention", {"d_model": 0}, ("d_model", "at least 1", "0")),
    ("attention", {"bidirectional": "no"}, ("bidirectional", "'no'")),
    ("attention", {"heads": 0}, ("heads", "at least 1", "0")),
    ("attention", {"d_model": 12, "heads": 4}, ("d_model", "multiple of 2 * heads", "12")),
    ("attention", {"dropout": 1.0}, ("dropout", "below 1", "1.0")),
    ("attention-ff", {"d_ff": 0}, ("d_ff", "at least 1", "0")),
    ("local-attention", {"chunk": 2.5}, ("chunk", "at least 1", "2.5")),
    ("experts", {"experts": 0}, ("experts", "at least 1", "0")),
    ("experts", {"router": "best"}, ("router", "top, threshold", "'best'")),
    ("experts", {"dropout": 1}, ("dropout", "below 1", "1")),
]


@pytest.mark.parametrize(("name", "options", "keywords"), BAD, ids=str)
def test_bad_options_are_refused(name, options, keywords):
    with refused(*keywords):
        SMALL[name](**options)


@every_mixer
def test_unknown_options_raise(name):
    with refused("d_stat", error=TypeError):
        SMALL[name](d_stat=6)


def test_an_incomplete_mixer_is_refused():
    class Half(UsersMixer):
        _step = Mixer._step

    with refused("abstract", "_step", error=TypeError):
        Half(3)


# ---------------------------------------------------------------------------------- inputs


def put(x, index, value):
    x = x.clone()
    x[index] = value
    return x


X = torch.randn(2, 10, 4, device=DEVICE)


@every_mixer
@pytest.mark.parametrize(
    ("x", "keywords"),
    [
        (X[0], ("x", "[B, L, 4]", "[10, 4]")),
        (X[..., :3], ("x", "[B, L, 4]", "[2, 10, 3]")),
        (X[:, :0], ("x", "length 0")),
        (X.double(), ("x", "float32", "float64")),
        (X.int(), ("x", "float32", "int32")),
        (X.tolist(), ("x", "torch tensor", "list")),
        (X.cpu().numpy(), ("x", "torch tensor", "ndarray")),
        (X.to("meta"), ("x", "meta", ".to()")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_bad_input_is_refused(name, x, keywords):
    with refused(*keywords):
        SMALL[name]().to(DEVICE)(x)


@pytest.mark.parametrize("name", STREAMING)
def test_a_step_takes_one_position(name):
    with refused("x", "[B, 4]", "[2, 10, 4]"):
        STREAMING[name]().to(DEVICE).step(X)


@every_mixer
@pytest.mark.parametrize(
    ("lengths", "keywords"),
    [
        (torch.tensor([1, 11]), ("lengths", "between 0 and 10", "11")),
        (torch.tensor([-1, 5]), ("lengths", "between 0 and 10", "-1")),
        (torch.tensor([5]), ("lengths", "[2]", "[1]")),
        (torch.tensor([5.0, 5.0]), ("lengths", "whole numbers", "float32")),
        (torch.tensor([5j, 5j]), ("lengths", "whole numbers", "complex64")),
        ([5, 5], ("lengths", "torch tensor", "list")),
        (torch.tensor([True, False]), ("lengths", "whole numbers", "bool")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_lengths_are_refused(name, lengths, keywords):
    if "between 0 and 10" in keywords and DEVICE.type != "cpu":
        pytest.skip("values on a GPU are not read back")
    lengths = lengths.to(DEVICE) if isinstance(lengths, torch.Tensor) else lengths
    with refused(*keywords):
        SMALL[name]().to(DEVICE)(X, lengths=lengths)


@ON_CPU
@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("name", STREAMING)
def test_an_input_that_is_not_finite_is_refused_on_a_cpu(name, value):
    layer = STREAMING[name]()
    with refused("x", value, "[1, 3, 2]", "finite"):
        layer(put(X, (1, 3, 2), float(value)))
    with refused("x", value, "[1, 2]", "finite"):
        layer.step(put(X[:, 0], (1, 2), float(value)))


@ON_CPU
@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize(
    ("name", "parameter", "index"),
    [
        ("dlr", "W", (2, 3, 1)),
        ("dss", "log_dt", (1,)),
        ("s4d", "log_dt", (1,)),
        ("s4", "C", (1, 2, 0)),
        *((name, "D", (1,)) for name in KERNEL_MIXERS),
    ],
)
def test_a_kernel_parameter_that_is_not_finite_is_refused_on_a_cpu(name, parameter, index, value):
    layer = SMALL[name]()
    with torch.no_grad():
        getattr(layer, parameter)[index] = float(value)
    with refused(parameter, value, str(list(index)), "finite"):
        layer(X)


@pytest.mark.parametrize("name", ["attention", "experts"])
def test_a_16_bit_layer_takes_fp32_under_autocast_alone(name):
    layer = SMALL[name]().to(DEVICE).bfloat16()
    with refused("x", "bfloat16", "float32", ".to()", "autocast"):
        layer(X)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert layer(X).shape == X.shape


def test_a_model_takes_16_bits_under_autocast_alone():
    model = build_model(ModelConfig("dlr", {"d_state": 4}, d_model=4), d_input=4, d_output=2)
    with refused("x", "bfloat16", "float32", "autocast"):
        model.to(DEVICE)(X.bfloat16())


@every_mixer
def test_a_float64_layer_takes_no_half_precision_input(name):
    layer = SMALL[name]().to(DEVICE).double()
    with refused("x", "float64", "bfloat16"):
        layer(X.bfloat16())


@every_kernel_mixer
@pytest.mark.parametrize("length", [0, 5.0, "5"])
def test_a_kernel_needs_a_whole_length_of_at_least_1(name, length):
    with refused("length", "at least 1", repr(length)):
        SMALL[name]().kernel(length)


# ---------------------------------------------------------------------------------- states


@every_mixer
def test_a_bidirectional_layer_cannot_stream(name):
    """The error names the reason: such a layer reads the future."""
    options = {} if name == "experts" else {"bidirectional": True}
    layer, causal = SMALL[name](**options).to(DEVICE), STREAMING[name]().to(DEVICE)
    for call in (
        lambda: layer.step(X[:, 0]),
        lambda: layer(X, return_state=True),
        lambda: layer(X, causal.initial_state(2)),
        lambda: layer.initial_state(2),
    ):
        with refused("reads the future", *(["'threshold'"] if name == "experts" else [])):
            call()


@pytest.mark.parametrize("size", [-1, 2.0, "2", None, True])
@pytest.mark.parametrize("name", STREAMING)
def test_a_batch_size_must_be_a_whole_number_of_at_least_0(name, size):
    with refused("batch_size", "at least 0", repr(size)):
        STREAMING[name]().to(DEVICE).initial_state(size)


S = torch.zeros(2, 3, 4, device=DEVICE)


@pytest.mark.parametrize(
    ("name", "options", "state", "keywords"),
    [
        ("dlr", {}, RecurrentState(S, S, S), ("state.x", "[2, 4, 6, 2]")),
        ("dlr", {}, [1], ("state", "RecurrentState", "list")),
        ("dlr", {"cast": "prod", "d_state": 99}, RecurrentState(S, S, S), ("OnlineState",)),
        ("s4", {"kernel_length": 9}, RecurrentState(S, S, S), ("OnlineState",)),
        ("sgconv", {}, RecurrentState(S, S, S), ("OnlineState", "RecurrentState")),
        ("gated-dlr", {}, RecurrentState(S, S, S), ("state.x", "[2, 4, 6, 2]")),
        ("tape", {}, RecurrentState(S, S, S), ("TapeState", "RecurrentState")),
        ("attention", {}, RecurrentState(S, S, S), ("KeyValueState", "RecurrentState")),
        ("local-attention", {}, RecurrentState(S, S, S), ("KeyValueState", "RecurrentState")),
        ("experts", {"router": "threshold"}, [1], ("state", "()", "list")),
    ],
    ids=str,
)
def test_a_state_of_another_kind_is_refused(name, options, state, keywords):
    layer = SMALL[name](**options).to(DEVICE)
    for call in (lambda: layer.step(X[:, 0], state), lambda: layer(X, state)):
        with refused(*keywords):
            call()


@pytest.mark.parametrize("name", ["dlr", "dss", "s4d", "s4"])
def test_a_recurrent_state_of_another_layer_is_refused(name):
    layer = SMALL[name]().to(DEVICE)
    _, state = layer(X, return_state=True)
    with refused("state.x", str([1, *state.x.shape[1:]]), str(list(state.x.shape))):
        layer.step(X[:1, 0], state)
    with refused("state.x", str([3, *state.x.shape[1:]])):
        layer(torch.cat((X, X[:1])), state)
    larger = SMALL[name](d_state=8).to(DEVICE)
    with refused("state.x", str([2, 4, larger.initial_state(1).x.shape[2], 2])):
        larger.step(X[:, 0], state)
    if name != "s4":  # S4 with a kernel_length has a state of another kind
        with refused("state.past", "[2, 5, 4]"):
            SMALL[name](kernel_length=5).to(DEVICE).step(X[:, 0], state)
    double = RecurrentState(state.x.double(), state.past, state.oldest)
    away = RecurrentState(state.x.to("meta"), state.past, state.oldest)
    for call in (layer.step, lambda x, s: layer(x[:, None], s)):
        with refused("state.x", "float32", "float64"):
            call(X[:, 0], double)
        with refused("state.x", "meta"):
            call(X[:, 0], away)


@pytest.mark.parametrize(
    ("name", "options", "part"),
    [
        ("dlr", {"kernel_length": 5}, "state.past"),
        ("dlr", {"d_state": 99, "cast": "prod"}, "state.kernel"),
        ("s4", {"kernel_length": 9}, "state.kernel"),
        ("sgconv", {}, "state.kernel"),
        ("gated-dlr", {}, "state.x"),
        ("tape", {}, "state.tape"),
        ("attention", {}, "state.keys"),
        ("local-attention", {}, "state.keys"),
    ],
    ids=str,
)
def test_a_state_of_another_precision_is_refused(name, options, part):
    layer = SMALL[name](**options).to(DEVICE)
    _, state = layer(X, return_state=True)
    with refused(part, "float64", "float32"):
        copy.deepcopy(layer).double().step(X[:, 0].double(), state)


def test_a_key_value_state_of_another_layer_is_refused():
    layer, local = SMALL["attention"]().to(DEVICE), SMALL["local-attention"]().to(DEVICE)
    _, state = layer(X, return_state=True)
    with refused("state.keys", "[1, S, 4]"):
        layer.step(X[:1, 0], state)
    with refused("state.keys", "[2, 8, 4]"):
        local.step(X[:, 0], state)
    with refused("state.values", "float32", "float64"):
        layer.step(X[:, 0], state._replace(values=state.values.double()))
    with refused("state.keys", "meta"):
        layer(X, state._replace(keys=state.keys.to("meta")))
    with refused("state.seen", "[2]", "[1]"):
        layer(X, state._replace(seen=state.seen[:1]))


# ---------------------------------------------------------------------------------- transforms


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@every_kernel_mixer
def test_transforms_of_torch_func_are_refused(name):
    """They do not see into our ops: jvp would give zeros."""
    layer = SMALL[name]().to(DEVICE)
    for call in (
        lambda: torch.func.jvp(layer, (X,), (X,)),
        lambda: torch.func.jacfwd(layer)(X),
        lambda: torch.func.grad(lambda x: layer(x).sum())(X),
        lambda: torch.func.vmap(lambda x: layer(x[None]))(X),
    ):
        with refused("torch.func", "jvp", "vmap", "torch.autograd"):
            call()
    torch.func.functional_call(layer, dict(layer.named_parameters()), (X,))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@every_kernel_mixer
def test_forward_mode_is_refused(name):
    """Its tangent would be 0, or lack the part of the kernel."""
    layer = SMALL[name]().to(DEVICE).requires_grad_(False)
    with forward_ad.dual_level(), refused("forward-mode AD", "torch.autograd"):
        layer(forward_ad.make_dual(X, torch.ones_like(X)))
    layer(X)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_forward_mode_of_attention_is_right():
    """All its kernels are PyTorch's."""
    layer, x = Attention(4, heads=1).to(DEVICE).double(), X.double()
    with sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        dual = layer(forward_ad.make_dual(x, torch.ones_like(x)))
        tangent = forward_ad.unpack_dual(dual).tangent
    step = 1e-6
    with torch.no_grad():
        expected = (layer(x + step) - layer(x - step)) / (2 * step)
    assert_close(tangent, expected, 1e-7)
