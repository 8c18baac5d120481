"""What every mixer must do: the same answer whole, in chunks, in steps and in a padded batch.

What is special to one mixer is in its own file; what is refused is in test_errors.py, compilers
are in test_compile.py.
"""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixers import CAUSAL, EVERY, KERNEL_MIXERS, SMALL, Form, UsersMixer
from safetensors.torch import load_file
from support import DEVICE, assert_agree, assert_close, in_chunks, in_steps
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from dlrnn.nn import (
    DLR,
    DSS,
    S4,
    S4D,
    Attention,
    Experts,
    GatedDLR,
    LocalAttention,
    SGConv,
    TapeDLR,
    save_model,
)

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
causal = pytest.mark.parametrize("form", CAUSAL, ids=str)
every = pytest.mark.parametrize("form", EVERY, ids=str)
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def chunks(length):
    """From one position to many; S4 reads the short ones in steps."""
    sizes = [1, 7, 16, 17]
    return [*sizes, length - sum(sizes)]


# ---------------------------------------------------------------------------------- streaming


@every_dtype
@causal
def test_whole_equals_chunks_and_steps(form, dtype):
    layer, x = form.make(dtype), form.input(form.length, dtype=dtype)
    with torch.no_grad():
        whole = layer(x)
        assert whole.shape == x.shape
        assert whole.dtype == dtype
        for streamed in (
            in_chunks(layer, x, chunks(form.length))[0],
            in_steps(layer, x)[0],
            layer(x, layer.initial_state(2)),
        ):
            assert_close(streamed, whole, TOLERANCE[dtype])


@settings(max_examples=60)
@given(st.data())
def test_any_mixture_of_chunks_and_steps_equals_the_whole(data):
    form = data.draw(st.sampled_from(CAUSAL))
    size = {"chunk": data.draw(st.integers(1, 40))} if form.kind is LocalAttention else {}
    layer, x = form.make(**size), form.input(data.draw(st.integers(1, 90)), batch=1)
    state, outputs, t = None, [], 0
    while t < x.shape[1]:
        size = data.draw(st.integers(1, x.shape[1] - t))
        piece = x[:, t : t + size]
        if data.draw(st.booleans()):
            y, state = layer(piece, state, return_state=True)
        else:
            y, state = in_steps(layer, piece, state)
        outputs.append(y)
        t += size
    assert_close(torch.cat(outputs, dim=1), layer(x), 1e-10)


@pytest.mark.parametrize(
    ("form", "dtype", "tolerance"),
    [
        *((form, torch.float64, 1e-9) for form in CAUSAL),
        *((form, torch.float32, 1e-4) for form in CAUSAL if form.kind is SGConv),
    ],
    ids=str,
)
def test_gradients_go_through_the_state(form, dtype, tolerance):
    layer, x = form.make(dtype), form.input(form.prefix, dtype=dtype).requires_grad_()
    sizes = [1, 7, 20, form.prefix - 28]
    for streamed in (in_chunks(layer, x, sizes)[0], in_steps(layer, x)[0]):
        assert_agree(streamed, layer(x), (x, *layer.parameters()), tolerance)


@causal
def test_a_state_made_without_gradients_keeps_those_of_later_positions(form):
    """Made under no_grad, or detached for truncated backpropagation: the same in every form."""
    layer, x = form.make(), form.input(60)
    with torch.no_grad():
        _, state = layer(x[:, :40], return_state=True)
    first, after = layer.step(x[:, 40], state)
    rest, _ = in_chunks(layer, x[:, 41:], [2, 1, 16], after)
    for streamed in (
        in_steps(layer, x[:, 40:], state)[0],
        torch.cat((first[:, None], rest), dim=1),
    ):
        assert_agree(streamed, layer(x[:, 40:], state), list(layer.parameters()), 1e-9)


@causal
def test_an_initial_state_made_without_gradients_takes_none_away(form):
    layer, x = form.make(), form.input(40)
    with torch.no_grad():
        state = layer.initial_state(2)
    assert_agree(in_steps(layer, x, state)[0], layer(x), list(layer.parameters()), 1e-9)


@causal
def test_a_state_alone_continues(form):
    """`state` without `return_state` gives the output only."""
    layer, x = form.make(), form.input(20)
    _, state = layer(x[:, :9], return_state=True)
    assert_close(layer(x[:, 9:], state), layer(x)[:, 9:], 1e-12)


@causal
def test_a_state_is_not_changed_by_using_it(form):
    layer, x = form.make(), form.input(60, batch=1)
    for read in (lambda: in_steps(layer, x)[1], lambda: layer(x, return_state=True)[1]):
        state = read()
        before = copy.deepcopy(tree_map(torch.Tensor.detach, state))
        layer.step(x[:, 0], state)
        layer(x, state, return_state=True)
        for now, then in zip(tree_leaves(state), tree_leaves(before), strict=True):
            assert torch.equal(now, then)


@causal
def test_an_input_buffer_can_be_used_again(form):
    layer, x = form.make(), form.input(40, batch=1)
    buffer, state, outputs = torch.empty_like(x[:, 0]), None, []
    for t in range(20):
        buffer.copy_(x[:, t])
        y, state = layer.step(buffer, state)
        outputs.append(y)
    buffer = x[:, 20:30].clone()
    y, state = layer(buffer, state, return_state=True)
    buffer.fill_(7.0)
    rest, _ = layer(x[:, 30:], state, return_state=True)
    together = torch.cat((torch.stack(outputs, dim=1), y, rest), dim=1)
    assert_close(together, layer(x), 1e-10)


@pytest.mark.parametrize("form", [form for form in CAUSAL if not form.many], ids=str)
def test_a_state_does_not_keep_the_prefix_alive(form):
    layer, x = form.make(), form.input(5000, batch=1)
    with torch.no_grad():
        _, state = layer(x, return_state=True)
    kept = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tree_leaves(state)
    }
    assert sum(kept.values()) < x.numel() * x.element_size() / 2


# ---------------------------------------------------------------------------------- sizes


@every
def test_one_position_is_a_step_and_a_batch_may_be_empty(form):
    layer, x = form.make(), form.input(21)
    assert layer(x[:, :1]).shape == (2, 1, x.shape[2])
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert layer(x[:0]).shape == layer(x[:0], lengths=none).shape == (0, *x.shape[1:])
    layer(x[:0]).sum().backward()
    if not layer.bidirectional:
        assert_close(layer.step(x[:, 0])[0], layer(x[:, :1])[:, 0], 1e-12)
        y, state = layer(x[:0], return_state=True)
        assert layer.step(y[:, 0], state)[0].shape == (0, x.shape[2])


@every_dtype
@every
def test_a_padded_batch_equals_single_sequences(form, dtype):
    """Padding may hold anything, and its gradient is not NaN."""
    layer, x = form.make(dtype), form.input(60, batch=5, dtype=dtype)
    lengths = torch.tensor([60, 1, 33, 0, 60], device=DEVICE)
    x[torch.arange(60, device=DEVICE) >= lengths[:, None]] = float("nan")
    y = layer(x, lengths=lengths)
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for b, n in enumerate(lengths.tolist()):
        assert (y[b, n:] == 0).all()
        if n:
            assert_close(y[b, :n], layer(x[b : b + 1, :n])[0], tolerance)


@causal
def test_states_of_a_padded_batch_equal_those_of_single_sequences(form):
    """Two padded chunks after each other, then a chunk and a step."""
    start = form.prefix
    layer, x = form.make(), form.input(start + 35, batch=4)
    first, second = torch.tensor([start, 3, 0, 17]), torch.tensor([0, 30, 30, 12])
    _, state = layer(x[:, :start], return_state=True, lengths=first.to(DEVICE))
    y, state = layer(x[:, start : start + 30], state, return_state=True, lengths=second.to(DEVICE))
    z, state = layer(x[:, start + 30 : start + 34], state, return_state=True)
    last, state = layer.step(x[:, start + 34], state)
    if issubclass(form.kind, Attention):
        assert state.seen.tolist() == (first + second + 5).tolist()
    for b, (n, m) in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
        alone = torch.cat((x[b, :n], x[b, start : start + m], x[b, start + 30 :]))[None]
        expected = layer(alone)[0]
        assert_close(y[b, :m], expected[n : n + m], 1e-10)
        assert_close(torch.cat((z[b], last[b : b + 1])), expected[n + m :], 1e-10)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32], ids=str
)
@pytest.mark.parametrize("form", [CAUSAL[0], Form(Attention, {})], ids=str)
def test_lengths_may_have_any_integer_type(form, dtype):
    layer, x = form.make(), form.input(300)
    lengths = torch.tensor([100, 10], device=DEVICE)
    y, state = layer(x, return_state=True, lengths=lengths.to(dtype))
    expected, expected_state = layer(x, return_state=True, lengths=lengths)
    assert torch.equal(y, expected)
    assert all(map(torch.equal, tree_leaves(state), tree_leaves(expected_state)))


@causal
def test_a_later_input_never_changes_an_earlier_output(form):
    layer, x = form.make(), form.input(40)
    changed = x.clone()
    changed[:, 20:] += 1
    assert_close(layer(changed)[:, :20], layer(x)[:, :20], 1e-11)


# ---------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@causal
def test_autocast_keeps_kernel_and_state_in_fp32(form, half):
    layer, x = form.make(torch.float32), form.input(33, dtype=torch.float32)
    convolves = form.kind in KERNEL_MIXERS
    kernel = layer.kernel(33) if convolves else None
    expected, expected_state = layer(x, return_state=True)
    with torch.autocast(DEVICE.type, dtype=half):
        if convolves:
            assert torch.equal(layer.kernel(33), kernel)
        y, state = layer(x, return_state=True)
        y_half, state_half = layer(x.to(half), return_state=True)
        y_step, state_step = layer.step(x[:, 0].to(half), state_half)
    projects = form.kind not in (Experts, UsersMixer) and form.options.get("project", True)
    assert y.dtype == (half if projects else torch.float32)
    assert y_half.dtype == y_step.dtype == half
    for each in (state, state_half, state_step):
        dtypes = [leaf.dtype for leaf in tree_leaves(each)]
        assert not {torch.bfloat16, torch.float16} & set(dtypes)
    if convolves:
        for have, want in zip(tree_leaves(state), tree_leaves(expected_state), strict=True):
            assert torch.equal(have, want)
    assert_close(y, expected, 1e-2 if convolves else 2e-2)  # bf16 has 8 bits
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


SECOND = [
    *(
        (lambda options=options: DLR(2, 3, activation="silu", **options), 7)
        for options in ({}, {"bidirectional": True}, {"kernel_length": 3})
    ),
    (lambda: GatedDLR(2, 3, bidirectional=True), 5),
    (lambda: DSS(2, 4, activation="silu", dt_min=0.1, dt_max=0.5), 5),
    (lambda: S4D(2, 4, activation="silu", dt_min=0.1, dt_max=0.5), 5),
    (lambda: Form(S4, {}).make(d_state=2, activation="silu"), 4),
    (lambda: Form(SGConv, {}).make(length=12, d_kernel=2, activation="silu"), 12),
    (
        lambda: Form(TapeDLR, {"hold": 1, "gate": True, "clock": "shared"}).make(
            length=3, d_head=2
        ),
        5,
    ),
    *(
        (lambda kind=kind, options=options: kind(4, heads=1, **options), 9)
        for kind, size in ((Attention, {}), (LocalAttention, {"chunk": 7}))
        for options in (size, size | {"bidirectional": True})
    ),
]


@pytest.mark.parametrize(("make", "length"), SECOND)
def test_second_derivatives(make, length):
    """Those of attention exist where PyTorch's kernel has them."""
    layer = make().to(DEVICE).double()
    x = torch.randn(1, length, layer.d_model, dtype=torch.float64, device=DEVICE)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def call(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(call, (x.requires_grad_(), *parameters))


# ---------------------------------------------------------------------------------- modules


@every
def test_copies_give_the_same_answer(form, tmp_path):
    """Also what a file holds."""
    layer, x = form.make(), form.input(20)
    expected = layer(x)
    loaded = form.make()
    assert not torch.equal(loaded(x), expected)
    save_model(layer, tmp_path / "layer.safetensors")
    loaded.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert torch.equal(other(x), expected)


@every
def test_parameters_are_real_and_options_make_the_layer_again(form):
    layer = form.make()
    assert not any(p.is_complex() for p in layer.state_dict().values())
    if form.kind is not Experts:
        assert type(layer)(**layer.options()).options() == layer.options()
        assert layer.options() | form.options == layer.options()


@pytest.mark.parametrize("name", SMALL)
def test_dropout_acts_in_training_only(name):
    options = {"router": "threshold"} if name == "experts" else {}
    layer, x = SMALL[name](dropout=0.5, **options).to(DEVICE), torch.randn(2, 9, 4, device=DEVICE)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))
