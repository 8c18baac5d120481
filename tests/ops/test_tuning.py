"""Plans of kernels: where they come from, without a GPU; and that each gives the same answer."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from support import DEVICE, assert_close, refused, run_interpreted
from test_nvrtc import compiled, mix  # noqa: F401 (a fixture)
from torch._subclasses.fake_tensor import FakeTensorMode

from dlrnn.bench.tuning import write_table
from dlrnn.cli import main
from dlrnn.ops import tuning
from dlrnn.ops.cuda import output_stage as mixing

GPU = "NVIDIA Abacus"
PLANS = (64, 4), (128, 4), (32, 8)


def which(k):
    """Decides for candidate k, or the last one."""
    return lambda name, candidates, run, x: candidates[min(k, len(candidates) - 1)]


class Machine:
    """A GPU that takes so many microseconds for each of PLANS."""

    def __init__(self, folder):
        self.times, self.measured, self.folder = (3.0, 2.0, 1.0), 0, folder / "tuned"

    def times_of(self, candidates, run, x):
        self.measured += 1
        return dict(zip(candidates, self.times, strict=True))

    def choose(self, kernel="norm", positions=5000):
        sizes = 128, tuning.size_class(positions)
        return tuning.choose(kernel, sizes, PLANS, lambda plan: None, torch.empty(1))

    @property
    def files(self):
        return sorted(self.folder.glob("*")) if self.folder.exists() else []


@pytest.fixture
def machine(monkeypatch, tmp_path):
    made = Machine(tmp_path)
    monkeypatch.setenv("DLRNN_CACHE", str(tmp_path))
    monkeypatch.delenv("DLRNN_TUNE", raising=False)
    monkeypatch.setattr(tuning, "_is_on_gpu", lambda x: True)
    monkeypatch.setattr(tuning, "times_of", made.times_of)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ship(monkeypatch, tmp_path, {})
    forget()
    yield made
    tuning._chosen.clear()
    tuning.shipped.cache_clear()


def ship(monkeypatch, folder, table):
    (folder / "shipped.json").write_text(json.dumps(table))
    monkeypatch.setattr(tuning, "SHIPPED", folder / "shipped.json")
    tuning.shipped.cache_clear()


def forget():
    """As in a new process."""
    tuning._chosen.clear()
    tuning._say_once.cache_clear()


def test_positions_fall_into_few_size_classes():
    assert tuning.size_class(1) == tuning.size_class(4096) == 4096
    assert tuning.size_class(4097) == tuning.size_class(2**14) == 2**14
    assert {tuning.size_class(n) for n in range(1, 2**20, 997)} == set(tuning.POSITIONS)


def test_the_fastest_is_chosen_once_and_kept(machine):
    assert machine.choose() == (32, 8)
    machine.times = 1.0, 2.0, 3.0
    assert machine.choose() == machine.choose(positions=8000) == (32, 8)
    forget()
    assert machine.choose() == (32, 8)
    assert machine.measured == 1
    assert machine.choose(positions=20000) == (64, 4), "another class of sizes"
    assert machine.choose("map") == (64, 4), "another kernel"
    assert len(machine.files) == 3


def test_a_difference_within_noise_keeps_the_default(machine):
    machine.times = 1.0, 0.99, 0.98
    assert machine.choose() == (64, 4)
    machine.times = float("inf"), float("inf"), 1.0  # the others cannot run
    assert machine.choose("map") == (64, 4)
    assert len(machine.files) == 1


def test_tuning_is_announced_once(machine, caplog):
    machine.choose()
    machine.choose("map")
    (said,) = caplog.messages
    assert all(word in said for word in ("tuning", GPU, str(machine.folder)))


def test_a_shipped_table_decides_alone(machine, monkeypatch, tmp_path, caplog):
    machine.choose()
    ship(monkeypatch, tmp_path, {GPU: {"norm 128 16384": "128 4", "map 128 16384": "7 7"}})
    forget()
    caplog.clear()
    assert machine.choose() == (128, 4)
    assert machine.choose(positions=20000) == (64, 4), "what it does not name is the default"
    assert machine.choose("map") == (64, 4), "it names a plan that is none"
    assert machine.measured == 1
    assert not caplog.messages


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"plan": "128 4"}', b"9" * 9999]
)
def test_a_damaged_file_is_ignored(machine, caplog, content):
    machine.choose()
    (path,) = machine.files
    before = path.read_bytes()
    path.write_bytes(content)
    forget()
    caplog.clear()
    assert machine.choose() == (32, 8)
    assert machine.measured == 2
    assert str(path) in caplog.messages[0]
    assert "plan" in caplog.messages[0]
    assert machine.files == [path]
    assert path.read_bytes() == before


def test_a_file_of_another_gpu_is_ignored(machine, monkeypatch, caplog):
    machine.choose()
    (path,) = machine.files
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")
    machine.choose("map")
    (other,) = set(machine.files) - {path}
    other.write_bytes(path.read_bytes())
    forget()
    caplog.clear()
    machine.choose("map")
    assert machine.measured == 3
    assert str(other) in caplog.text


def test_the_first_of_several_processes_decides(machine):
    about = {"gpu": GPU, "kernel": "norm", "candidates": [str(k) for k in range(24)]}
    machine.folder.mkdir()
    with ThreadPoolExecutor(12) as pool:
        path = machine.folder / "norm.json"
        found = list(pool.map(lambda k: tuning._keep(path, about, str(k)), range(24)))
    assert len(set(found)) == 1
    assert machine.files == [path]
    assert json.loads(path.read_text()) == about | {"plan": found[0]}


def test_a_file_system_without_links_is_supported(machine, monkeypatch):
    def link(*_):
        raise PermissionError

    monkeypatch.setattr("os.link", link)
    assert machine.choose() == (32, 8)
    forget()
    assert machine.choose() == (32, 8)
    assert machine.measured == len(machine.files) == 1


def test_without_a_writable_cache_nothing_is_measured(machine, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DLRNN_CACHE", str(tmp_path / "file"))
    assert machine.choose() == machine.choose("map") == (64, 4)
    assert machine.measured == 0
    (said,) = caplog.messages
    assert "default" in said
    assert str(tmp_path / "file" / "tuned") in said


def test_a_full_disk_keeps_the_default(machine, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", full)
    assert machine.choose() == (64, 4), "the next process could find another one the fastest"


def test_never_during_a_capture(machine, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert machine.choose() == (64, 4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert machine.choose() == (64, 4), "the same from then on: the graph has it"
    assert machine.measured == 0
    assert not machine.files
    assert not caplog.messages


def test_a_capture_reads_what_was_kept(machine, monkeypatch):
    machine.choose()
    forget()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert machine.choose() == (32, 8)


def test_tuning_can_be_switched_off(machine, monkeypatch, caplog):
    monkeypatch.setenv("DLRNN_TUNE", "0")
    assert machine.choose() == (64, 4)
    assert machine.measured == 0
    assert not caplog.messages
    monkeypatch.setenv("DLRNN_TUNE", "1")
    forget()
    assert machine.choose() == (32, 8)
    monkeypatch.setenv("DLRNN_TUNE", "0")
    forget()
    assert machine.choose() == (32, 8), "what was kept is read"
    monkeypatch.setenv("DLRNN_TUNE", "perhaps")
    with refused("DLRNN_TUNE", "0", "1", "'perhaps'"):
        machine.choose("map")


def test_cpu_and_fake_tensors_take_the_default_plan():
    def run(plan):
        raise AssertionError("measured")

    with FakeTensorMode():
        fake = torch.empty(2, device="cuda")
    for x in (torch.empty(2), fake):
        assert tuning.choose("norm", (1,), PLANS, run, x) == (64, 4)
    assert not any(key[0] == "norm" for key in tuning._chosen)


def test_a_plan_that_cannot_run_is_not_timed(monkeypatch):
    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            pass

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return 0.5

    def run(plan):
        if plan == (128, 4):
            raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    times = tuning.times_of(PLANS, run, torch.empty(1))
    assert times == {(64, 4): 500.0, (128, 4): float("inf"), (32, 8): 500.0}


# ---------------------------------------------------------------------------------- the tables


def candidates_of(kernel, sizes):
    pytest.importorskip("triton")
    from dlrnn.ops.triton import layer_norm, thin_linear

    if kernel.startswith("mixing."):
        channels, columns, in_rows, _ = sizes
        part = mixing.Part(channels, columns, channels, columns, bool(in_rows), True, False)
        return getattr(mixing, kernel.removeprefix("mixing.") + "_plans")(part)
    known = {
        "layer_norm.forward": layer_norm.FORWARD,
        "layer_norm.backward": layer_norm.BACKWARD,
        "thin_linear.spread": thin_linear.SPREAD,
        "thin_linear.gather": thin_linear.GATHER,
        "thin_linear.outer": thin_linear.OUTER,
    }
    return known[kernel]


def test_the_shipped_table_names_plans_that_exist():
    assert "NVIDIA H200" in tuning.shipped()
    for table in tuning.shipped().values():
        for name, plan in table.items():
            kernel, *sizes = name.split()
            sizes = [int(size) for size in sizes]
            _, *others = map(tuning.text_of, candidates_of(kernel, sizes))
            assert plan in others, f"{name}: {plan} is the default, or none"
            assert sizes[-1] == tuning.size_class(sizes[-1])


def test_writing_a_table_keeps_other_gpus(tmp_path):
    path = tmp_path / "tuned.json"
    write_table(str(path), {"one": {"norm 1": "2 3"}})
    write_table(str(path), {"other": {}})
    write_table(str(path), {"one": {"norm 1": "3 3"}})
    assert json.loads(path.read_text()) == {"one": {"norm 1": "3 3"}, "other": {}}
    assert list(tmp_path.iterdir()) == [path]


def test_bench_tuning_needs_a_gpu(capsys):
    assert main(["bench", "tuning", "--device", "cpu"]) == 2
    assert "cpu" in capsys.readouterr().err


# ---------------------------------------------------------------------------------- the answers

INTERPRETED = """
from dlrnn.ops import tuning
from dlrnn.ops.triton import layer_norm, thin_linear

torch.manual_seed(0)
x, other, thin = torch.randn(70, 48), torch.randn(70, 48), torch.randn(70, 3)
weight, bias, matrix = torch.randn(48), torch.randn(48), torch.randn(3, 48)

def results(k):
    with tuning.decided_by(lambda name, candidates, run, x: candidates[k % len(candidates)]):
        return [
            *layer_norm.forward(x, other, weight, bias, 1e-5),
            *layer_norm.backward(other, x, weight, 1e-5),
            thin_linear.spread(thin, matrix, bias),
            thin_linear.gather(x, matrix, bias[:3]),
            *thin_linear.outer(thin, x),
        ]

first = results(0)
for k in range(1, 4):
    for have, want in zip(results(k), first, strict=True):
        assert (have - want).norm() < 1e-6 * want.norm()
print("the same")
"""


def test_all_plans_give_one_answer_in_the_interpreter():
    pytest.importorskip("triton")
    assert "the same" in run_interpreted(INTERPRETED)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("channels", "columns"), [(16, 32), (64, 48), (128, 16)])
def test_all_plans_give_one_answer_emulated(channels, columns):
    in_rows = columns > 16
    y, dout = torch.randn(2, 130, channels), torch.randn(2, 130, columns)
    y = torch.nn.functional.pad(y.transpose(1, 2), (0, 2)).contiguous() if in_rows else y
    weight, bias = torch.randn(columns, channels), torch.randn(columns)

    def results(k):
        with tuning.decided_by(which(k)):
            out = mixing.forward(y, 130, weight, bias, "gelu", in_rows=in_rows)
            dy, *others = mixing.backward(dout, y, weight, "gelu", in_rows=in_rows)
        return out, dy[..., :130] if in_rows else dy, *others

    first = results(0)
    for k in (1, 2):
        for have, want in zip(results(k), first, strict=True):
            assert_close(have, want, 4e-7)


@pytest.mark.parametrize(
    "arguments", [(16, 48, "gelu", True), (32, 32, "gelu", False), (64, 64, "identity", True)]
)
def test_all_plans_compile(compiled, arguments):  # noqa: F811
    for k in (1, 2):
        with tuning.decided_by(which(k)):
            mix(*arguments)
    assert len(compiled) >= 2


@pytest.mark.gpu
class TestOnAGPU:
    @pytest.mark.parametrize("width", [16, 32, 64, 128, 256])
    def test_all_plans_give_one_answer(self, width):
        from dlrnn.bench.tuning import kernel_calls, require_one_answer

        for positions in (2**12, 2**16):
            for call in kernel_calls(width, positions, DEVICE):
                require_one_answer(call)

    def test_tuning_measures_on_a_gpu(self, monkeypatch, tmp_path, caplog):
        """As on a GPU that the shipped table does not know."""
        from dlrnn.ops.triton import layer_norm

        monkeypatch.setenv("DLRNN_CACHE", str(tmp_path))
        ship(monkeypatch, tmp_path, {})
        forget()
        x = torch.randn(3, 5000, 128, device=DEVICE)
        weight, bias = x[0, :2]
        with caplog.at_level(logging.WARNING, "dlrnn"):
            out, total = layer_norm.forward(x, x, weight, bias, 1e-5)
        assert "tuning kernels for" in caplog.text
        assert len(list((tmp_path / "tuned").glob("*.json"))) == 1
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured, _ = layer_norm.forward(x, x, weight, bias, 1e-5)
        graph.replay()
        assert torch.equal(captured, out)
        want = torch.nn.functional.layer_norm(
            (x + x).double(), (128,), weight.double(), bias.double()
        )
        assert_close(out, want, 1e-6)
        assert torch.equal(total, x + x)
        forget()
        tuning.shipped.cache_clear()
