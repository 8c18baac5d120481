"""The kernel of one step of the recurrence, recurrence_step.cu: emulated on a CPU, and on a GPU."""

import itertools
import sys

import pytest
import torch
from support import DEVICE, assert_close, random_modes

from dlrnn import DLR, ops
from dlrnn.ops import reference
from dlrnn.ops.cuda import nvrtc, recurrence_step
from dlrnn.ops.cuda.recurrence_step import make_plan
from dlrnn.ops.cuda.replay import Replayed

recurrence = sys.modules["dlrnn.ops.recurrence"]


@pytest.fixture(autouse=True)
def fused(monkeypatch, request):
    """`ops.step` runs its kernel: emulated on a CPU."""
    if DEVICE.type == "cpu":
        request.getfixturevalue("emulated")
        monkeypatch.setattr(recurrence, "may_fuse", lambda *_: True)
        monkeypatch.setattr(recurrence, "uses_fused", lambda *_: True)
        yield
    else:
        with torch.no_grad(), ops.use_backend("fused"):
            yield


@pytest.fixture(params=["float64", "two_floats"])
def arithmetic(request, monkeypatch):
    """Both ways to compute lambda x, of which a GPU would choose one."""
    here = [nvrtc.capability(DEVICE)] if request.param == "float64" else []
    monkeypatch.setattr(recurrence_step, "FAST_FLOAT64", here)
    recurrence_step.prepared.cache_clear()
    yield
    recurrence_step.prepared.cache_clear()


def problem(batch, channels, states, *, own=False, state=torch.float32):
    """u, W, log lambda, state, skip; log lambda is each channel's `own` or shared."""
    W, log_lambda = random_modes(channels, states, torch.float32)
    if own:
        log_lambda = torch.stack([log_lambda * (1 + 0.1 * h) for h in range(channels)])
    u = torch.randn(batch, channels, device=DEVICE)
    x = torch.randn(batch, channels, states, 2, dtype=state, device=DEVICE)
    return u, W, log_lambda, x, torch.randn(channels, device=DEVICE)


def expected(u, W, log_lambda, state, skip):
    """y and x' in float64, by the definition."""
    y, x = reference.recurrence(*(t.cpu() for t in (u[:, None], W, log_lambda, state)))
    return y[:, 0] + (skip * u).cpu().double(), x


SIZES = [
    (1, 3, 512),  # several warps for a row, one block for several rows
    (7, 3, 64),
    (5, 4, 33),  # an odd number of states: vectors of one
    (3, 2, 1),
    (9, 5, 16),  # several rows for a warp
    (20, 2, 5000),  # three chunks; two sequences alone would test a cancellation
    (40, 12, 64),  # a team has several rows, of different channels
]


def test_the_sizes_have_several_chunks_and_several_rows_of_a_team():
    """On the emulator's three multiprocessors."""
    plans = {size: make_plan(*size, own=False, pairs=True, multiprocessors=3) for size in SIZES}
    chunked, repeated = plans[20, 2, 5000], plans[40, 12, 64]
    assert 2 * chunked.team * chunked.unroll < 5000
    assert repeated.share > 2 * repeated.threads // repeated.team
    assert repeated.share > 40


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_step_equals_the_definition(size, own):
    u, W, log_lambda, x, skip = problem(*size, own=own)
    y, new = ops.step(u, W, log_lambda, x, skip=skip)
    for have, want in zip((y, new), expected(u, W, log_lambda, x, skip), strict=True):
        assert have.dtype == torch.float32
        assert_close(have, want, 3e-7)


@pytest.mark.usefixtures("arithmetic")
def test_parameters_of_dlr_give_the_same_step():
    u, W, log_lambda, x, skip = problem(3, 4, 40)
    exponents = ops.DLRExponents((-log_lambda[:, 0]).sqrt().float(), log_lambda[:, 1].float())
    y, new = ops.step(u, W, exponents, x, skip=skip)
    for have, want in zip(
        (y, new), ops.step(u, W, exponents.log_lambda(), x, skip=skip), strict=True
    ):
        assert torch.equal(have, want)


@pytest.mark.usefixtures("arithmetic")
def test_a_state_is_rounded_once():
    """The state is the float64 result rounded to fp32, but for at most a tie in a million."""
    u, W, log_lambda, x, skip = problem(40, 3, 64)
    _, new = ops.step(u, W, log_lambda, x)
    _, exact = expected(u, W, log_lambda, x, skip)
    assert (new.cpu() != exact.float()).float().mean() < 1e-3


@pytest.mark.usefixtures("arithmetic")
def test_ten_thousand_steps_keep_their_phase():
    W, log_lambda = random_modes(1, 16, torch.float32, modulus=(1 - 2e-7, 1 - 1e-7))
    u = torch.randn(10000, 1, 1, device=DEVICE)
    state = torch.zeros(1, 1, 16, 2, device=DEVICE)
    exact = torch.zeros(1, 1, 16, dtype=torch.complex128)
    lam = torch.exp(torch.complex(*log_lambda.cpu().unbind(-1)))
    for u_k in u:
        _, state = ops.step(u_k, W, log_lambda, state)
        exact = lam * exact + u_k.cpu()[..., None]
    assert_close(state, torch.view_as_real(exact), 3e-6)


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("size", [(2, 4, 5), (1, 3, 64), (3, 8, 16)], ids=str)
def test_a_window_and_its_ring(size, own):
    """The state is that of the last inputs alone, and old states stay as they were."""
    (batch, channels, _), window = size, 6
    _, W, log_lambda, x, skip = problem(*size, own=own, state=torch.float64)
    u = torch.randn(2 * window + 3, batch, channels, device=DEVICE)
    state = (
        torch.zeros_like(x),
        torch.zeros_like(u[:window].transpose(0, 1)),
        torch.zeros(1).long().to(DEVICE),
    )
    state = tuple(each.contiguous() for each in state)
    for k, u_k in enumerate(u):
        before = [each.clone() for each in state]
        y, *after = ops.windowed_step(u_k, W, log_lambda, *state, skip=skip)
        seen = u[max(0, k + 1 - window) : k + 1].transpose(0, 1)
        wanted, x = reference.recurrence(*(t.cpu() for t in (seen, W, log_lambda)))
        assert_close(y, wanted[:, -1] + (skip * u_k).cpu(), 3e-7)
        assert_close(after[0], x, 1e-13)
        assert all(torch.equal(old, same) for old, same in zip(before, state, strict=True))
        ring = before[1].index_copy(1, before[2], u_k[:, None])
        assert torch.equal(after[1], ring)
        assert after[2].item() == (k + 1) % window
        state = after


@pytest.mark.parametrize("state", [torch.float32, torch.float64])
def test_an_input_that_leaves(state):
    u, W, log_lambda, x, skip = problem(3, 4, 10, state=state)
    leaving = torch.randn_like(u)
    y, new = ops.step(u, W, log_lambda, x, leaving=leaving, window=50, skip=skip)
    gone = ops.powers(log_lambda, 50) * leaving[..., None, None]
    _, exact = expected(u, W, log_lambda, x, skip)
    exact = exact - gone.cpu()
    wanted = (torch.view_as_complex(W.cpu().double()) * torch.view_as_complex(exact)).sum(-1).real
    assert_close(new, exact, 3e-7 if state == torch.float32 else 1e-15)
    assert_close(y, wanted + (skip * u).cpu(), 3e-7)


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("which", ["u", "W", "log_lambda", "x", "skip"])
def test_a_nan_reaches_the_outputs_that_depend_on_it_and_no_others(which):
    names = "u", "W", "log_lambda", "x", "skip"
    given = dict(zip(names, problem(3, 4, 6), strict=True))
    given[which].view(-1)[0] = torch.nan
    y, new = ops.step(given["u"], given["W"], given["log_lambda"], given["x"], skip=given["skip"])
    affected_y, affected_x = torch.zeros(3, 4).bool(), torch.zeros(3, 4, 6).bool()
    if which == "log_lambda":
        affected_y[:], affected_x[..., 0] = True, True
    elif which in ("u", "x"):
        affected_y[0, 0], affected_x[0, 0, slice(None) if which == "u" else 0] = True, True
    else:
        affected_y[:, 0] = True
    assert torch.equal(y.isnan().cpu(), affected_y)
    assert torch.equal(new.isnan().any(-1).cpu(), affected_x)


def test_results_do_not_vary_and_layouts_may():
    """Strided and unaligned tensors give the same bits."""
    u, W, log_lambda, x, skip = problem(3, 4, 10)
    wanted = ops.step(u, W, log_lambda, x, skip=skip)
    unaligned = torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
    for state in (x.transpose(0, 1).contiguous().transpose(0, 1), unaligned):
        have = ops.step(u.t().contiguous().t(), W, log_lambda, state, skip=skip)
        assert all(torch.equal(a, b) for a, b in zip(have, wanted, strict=True))


@pytest.mark.parametrize(
    "options", [{}, {"kernel_length": 7}, {"real": True}, {"cast": "prod"}], ids=str
)
def test_the_steps_of_a_layer_equal_the_whole(options):
    torch.manual_seed(1)
    layer = DLR(4, 6, dt_min=1e-6, dt_max=1e-2, **options).to(DEVICE).eval()
    x = torch.randn(2, 30, 4, device=DEVICE)
    with torch.no_grad():
        if DEVICE.type == "cpu":
            whole = layer(x)
        else:
            with ops.use_backend("torch"):
                whole = layer(x)
        y, state = layer.step(x[:, 0])
        outputs = [y]
        for x_t in x.unbind(1)[1:]:
            y, state = layer.step(x_t, state)
            outputs.append(y)
    assert_close(torch.stack(outputs, 1), whole, 1e-5)


@pytest.mark.parametrize("multiprocessors", [3, 82, 108, 132])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_every_plan_covers_its_rows_and_fits_every_gpu(own, pairs, multiprocessors):
    sizes = (1, 2, 7, 64, 5000), (1, 5, 128, 384), (1, 2, 16, 33, 512, 4096, 10001)
    for batch, channels, half in itertools.product(*sizes):
        states = 2 * half if pairs else half
        kind = {"own": own, "pairs": pairs, "multiprocessors": multiprocessors}
        plan = make_plan(batch, channels, states, **kind)
        assert plan.threads % 32 == plan.threads % plan.team == 0
        assert plan.threads <= plan.most_threads
        rows = batch if own else batch * channels
        assert plan.groups == (channels if own else 1)
        assert rows <= plan.parts * plan.share < rows + plan.share
        resident = 2 if plan.threads <= 256 else 1  # of 100 KiB on consumer GPUs, 1 KiB reserved
        assert resident * (plan.shared_bytes(window=not pairs) + 1024) <= 100 * 1024


def test_the_launches_of_steps_can_be_replayed():
    """Calls of the same sizes at other addresses, without and with a window."""
    step = Replayed(recurrence_step.step, lambda: "")
    windowed = Replayed(recurrence_step.windowed_step, lambda: "")
    for _ in range(4):
        u, W, log_lambda, x, skip = (each.clone() for each in problem(3, 4, 33))
        have = step(u, W, log_lambda, None, x, skip)
        for mine, want in zip(have, expected(u, W, log_lambda, x, skip), strict=True):
            assert_close(mine, want, 3e-7)
        given = u, W, log_lambda, None, x.double(), skip
        past, oldest = torch.randn(3, 9, 4, device=DEVICE), torch.tensor([5], device=DEVICE)
        have = windowed(*given, past, oldest)
        want = recurrence_step.windowed_step(*given, past, oldest)
        for mine, other in zip(have, want, strict=True):
            assert torch.equal(mine, other)
    for each in (step, windowed):
        assert not any(isinstance(plan, int) for plan in each._plans.values())


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("window", [0, 5])
def test_a_step_in_place_overwrites_the_state_with_the_same_one(window, own):
    for size in ((20, 2, 700), (40, 12, 64), (3, 4, 33)):
        dtype = torch.float64 if window else torch.float32
        u, W, log_lambda, x, skip = problem(*size, own=own, state=dtype)
        past = torch.randn(size[0], window, size[1], device=DEVICE)
        oldest = torch.tensor([window - 1 if window else 0], device=DEVICE)
        if window:
            wanted = ops.windowed_step(u, W, log_lambda, x, past, oldest, skip=skip)
        else:
            wanted = *ops.step(u, W, log_lambda, x, skip=skip), past, oldest
        have = ops.step_in_place(u, W, log_lambda, x, past, oldest, skip=skip)
        for mine, other in zip((have, x, past, oldest), wanted, strict=True):
            assert torch.equal(mine, other)
