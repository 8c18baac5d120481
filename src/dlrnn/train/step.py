"""One update of the parameters: a captured CUDA graph on a GPU, eager PyTorch elsewhere."""

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from dlrnn.nn import param_groups, reuse_kernels
from dlrnn.tasks import Batch, Task
from dlrnn.train.config import RunConfig
from dlrnn.train.distributed import is_sharded, local_processes, local_tensor, make_fabric
from dlrnn.train.model import make_model
from dlrnn.train.prefetch import prefetch, thread_count

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_WARM = 3  # steps before a graph is captured: libraries choose their algorithms in them


def make_optimizer(config: RunConfig, model: nn.Module, device: torch.device) -> Optimizer:
    """AdamW with a parameter group for each role; on a GPU the rate is a tensor for the graph."""
    groups = param_groups(
        model, lr=config.lr, weight_decay=config.weight_decay, kernel_lr=config.kernel_lr
    )
    on_gpu = device.type == "cuda"
    for group in groups:
        group["full_lr"] = group["lr"]
        if on_gpu:
            group["lr"] = torch.tensor(group["lr"], device=device)
    fused = all(p.is_floating_point() for group in groups for p in group["params"])  # not complex
    return AdamW(groups, fused=fused, capturable=on_gpu)


def micro_batch_size(config: RunConfig, world: int) -> int:
    """Samples in a micro-batch of one of `world` processes."""
    if config.batch_size % (world * config.accumulate):
        parts = f"{world} processes and {config.accumulate} micro-batches"
        raise ValueError(f"batch_size {config.batch_size} cannot be divided among {parts}")
    return config.batch_size // (world * config.accumulate)


class TrainingStep:
    """`step(k, batches)` makes update k = 0, 1, ...; `take_loss` reads the summed losses."""

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        model: nn.Module,
        optimizer: Optimizer,
        fabric: "Fabric",
    ) -> None:
        self.config, self.task, self.model, self.optimizer = config, task, model, optimizer
        self.fabric, self.device = fabric, fabric.device
        world = fabric.world_size
        self.part = micro_batch_size(config, world)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.bad_step = torch.full((), -1, dtype=torch.int64, device=self.device)
        self.bad_parameter = torch.zeros((), dtype=torch.int64, device=self.device)
        self.index = torch.zeros((), dtype=torch.int64, device=self.device)  # the step
        self._graph: torch.cuda.CUDAGraph | None = None
        self._feed: list[Batch] = []  # the graph reads batches of the host from here
        self._capture = self.device.type == "cuda" and world == 1
        self._warm = 0
        self._dropout = _generator(self.device)
        self._parameters = list(model.parameters())  # listing them takes time in each step
        if self.device.type == "cuda":
            torch.compiler.reset()
        self._makers = [self._maker(k) for k in range(config.accumulate)]
        self._stream = torch.cuda.Stream() if self._capture else None

    def __call__(self, step: int, batches: list[Batch] | None) -> None:
        """Make one update; `batches` are its micro-batches, None if the device makes them."""
        self._set_rate(step)
        count = (self.config.seed * 1_000_003 + step) * 1009 + self.fabric.global_rank
        self._dropout.manual_seed(count % 2**63)  # a graph reads the seed when it is replayed
        if not self._capture:
            self.index.fill_(step)
            self._update(batches)
            return
        self._feed_graph(batches)
        if self._graph is not None:
            self._graph.replay()
            return
        assert self._stream is not None
        if self._warm == 0:
            self.index.fill_(step)
        if self._warm < _WARM:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._update(self._feed or None)
            torch.cuda.current_stream().wait_stream(self._stream)
            self._warm += 1
            return
        self._graph = torch.cuda.CUDAGraph()
        # "thread_local": prefetching threads may copy batches during the capture
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._update(self._feed or None)
        self._graph.replay()

    def _feed_graph(self, batches: list[Batch] | None) -> None:
        if batches is None:
            return
        if not self._feed:
            self._feed = [Batch(*(None if t is None else t.clone() for t in b)) for b in batches]  # type: ignore[arg-type]
            return
        for static, batch in zip(self._feed, batches, strict=True):
            for place, value in zip(static, batch, strict=True):
                if place is not None and value is not None:
                    place.copy_(value, non_blocking=True)

    def _update(self, made: list[Batch] | None) -> None:
        batches = [make(self.index) for make in self._makers] if made is None else made
        parts, world = len(batches), self.fabric.world_size
        totals = self._totals(batches) if parts * world > 1 else None
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        holds = parts > 1 and not is_sharded(self.fabric)  # shards have no whole kernel
        with reuse_kernels(self.model) if holds else nullcontext():
            for k, batch in enumerate(batches):
                with self.fabric.no_backward_sync(self.model, enabled=k < parts - 1):  # type: ignore[arg-type]
                    output = forward(self.model, batch, targets=self.task.gives_targets)
                    part = self.task.loss(output, batch, totals)
                    self.fabric.backward(part * world)  # DDP takes the mean over processes
                loss += part.detach()
        if world > 1 and not is_sharded(self.fabric):
            self._require_gradients()
        gradients = [local_tensor(p.grad) for p in self._parameters if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients))
        if is_sharded(self.fabric):
            norms = self.fabric.all_reduce(norms.square(), reduce_op="sum").sqrt()  # type: ignore[union-attr]
        if self.config.clip is not None:
            factor = (self.config.clip / (norms.norm() + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor)
        self._note_nonfinite(norms.isfinite())
        self.optimizer.step()
        if world > 1:
            for buffer in self.model.buffers():  # statistics that a forward updated
                if not buffer.is_floating_point():
                    continue
                buffer.copy_(self.fabric.all_reduce(buffer.clone(), reduce_op="mean"))  # type: ignore[arg-type]
        self.loss_sum += loss
        self.index += 1

    def _require_gradients(self) -> None:
        """Refuse parameters without a gradient: DDP would fail at the next step, less clearly."""
        if all(p.grad is not None or not p.requires_grad for p in self._parameters):
            return
        every = self.model.named_parameters()
        idle = [_unwrapped_name(n) for n, p in every if p.grad is None and p.requires_grad]
        more = f" and {len(idle) - 1} more" if len(idle) > 1 else ""
        raise ValueError(
            f"{idle[0]}{more} had no gradient, which training in several processes needs:"
            " use it, remove it, freeze it (requires_grad_(False)), or train in one process"
        )

    def _totals(self, batches: list[Batch]) -> Tensor:
        """Totals of the whole batch, so that the losses of its parts on all processes add up."""
        totals = torch.stack([self.task.totals(batch) for batch in batches]).sum(0)
        if self.fabric.world_size > 1:
            totals = self.fabric.all_reduce(totals, reduce_op="sum")  # type: ignore[assignment]
        return totals

    def samples(self, step: int) -> list[Batch]:
        """All micro-batches of this process, at a step."""
        return [maker(step) for maker in self._makers]

    def _maker(self, part: int) -> Callable[[int | Tensor], Batch]:
        """The function that makes micro-batch `part` of this process."""
        first = (self.fabric.global_rank * self.config.accumulate + part) * self.part
        return batch_maker(self.task, self.part, self.device, first, self.config.batch_size)

    def take_loss(self, steps: int) -> float:
        """The mean loss of the last `steps`, over all processes; it waits for the device."""
        mean = self.loss_sum / steps
        if self.fabric.world_size > 1:
            mean = self.fabric.all_reduce(mean, reduce_op="sum")  # type: ignore[assignment]
        value = float(mean)
        self.loss_sum.zero_()
        return value

    def _note_nonfinite(self, finite: Tensor) -> None:
        """Remember the first step with a gradient that is not finite, and its parameter."""
        if self.device.type == "cpu" and bool(finite.all()):  # reading it on a GPU would wait
            return
        new = ~finite.all() & (self.bad_step < 0)
        self.bad_step.copy_(torch.where(new, self.index, self.bad_step))
        first = (~finite).to(torch.int64).argmax()
        self.bad_parameter.copy_(torch.where(new, first, self.bad_parameter))

    def check_finite(self) -> None:
        """Raise if a gradient was not finite, and name it; it waits for the device."""
        step = int(self.bad_step)
        if step < 0:
            return
        names = [n for n, p in self.model.named_parameters() if p.grad is not None]
        name = _unwrapped_name(names[int(self.bad_parameter)])
        advice = (
            "and no checkpoint contains it: begin a new run with a smaller --lr, or with --clip 1"
        )
        if step == 0:
            advice = "in the first step: the initial parameters of the model give it"
        raise FloatingPointError(f"step {step + 1}: the gradient of {name} is not finite, {advice}")

    def _set_rate(self, step: int) -> None:
        if self.config.schedule == "constant" and step > self.config.warmup and self._warm:
            return
        rate = self.config.rate(step)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(group["full_lr"] * rate)
            else:
                group["lr"] = group["full_lr"] * rate


def _unwrapped_name(name: str) -> str:
    """A parameter's name without the prefixes of Fabric's and DDP's wrappers."""
    return name.removeprefix("_forward_module.").removeprefix("module.")


def _generator(device: torch.device) -> torch.Generator:
    """The generator of dropout: `torch.manual_seed` seeds all devices, which takes 0.28 ms."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[device.index]


def batch_maker(
    task: Task, size: int, device: torch.device, first: int = 0, of: int | None = None
) -> Callable[[int | Tensor], Batch]:
    """`task.sample` as a function of the step; compiled if the GPU makes batches.

    Call `torch.compiler.reset()` before a new task: dynamo compiles one function at most 8 times.
    """

    def make(step: int | Tensor) -> Batch:
        where = {"device": device, "first": first, "of": of}
        return task.sample(size, split="train", step=step, **where)  # type: ignore[arg-type]

    if not task.on_device or device.type != "cuda":
        return make
    make(0)  # constants are drawn before compilation
    compiled: Callable[[int | Tensor], Batch] = torch.compile(make, dynamic=False)
    return compiled


def forward(model: nn.Module, batch: Batch, *, targets: bool = False) -> Tensor:
    """The model's output for a batch; with `targets`, `-log p` of each target instead."""
    if targets:
        losses: Tensor = model(batch.inputs, targets=batch.targets)
        return losses
    output: Tensor = model(batch.inputs) if batch.lengths is None else model(*batch[::2])
    return output


def prefetched(
    step: TrainingStep, start: int, stop: int
) -> Generator[list[Batch] | None, None, None]:
    """The micro-batches of steps start .. stop - 1; None for each if the device makes them."""
    if step.task.on_device:
        yield from (None for _ in range(start, stop))
        return
    threads = thread_count(step.device, local_processes(step.fabric))
    yield from prefetch(step.samples, range(start, stop), threads)


def make_step(config: RunConfig, device: torch.device) -> TrainingStep:
    """The step of a configuration in one process, with a new model, to test or time it."""
    fabric = make_fabric(str(device), config.precision)
    task = config.make_task()
    model = make_model(config, task).to(device)
    optimizer = make_optimizer(config, model, device)
    wrapped, wrapped_optimizer = fabric.setup(model, optimizer)
    return TrainingStep(config, task, wrapped, wrapped_optimizer, fabric)


# ---------------------------------------------------------------------------------- determinism

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_REFUSED = " does not have a deterministic implementation"
_memory: Any = import_module("torch.utils.deterministic")  # its attribute has no type


@contextmanager
def deterministic(*, enable: bool) -> Iterator[None]:
    """PyTorch's strict deterministic mode, without its slow filling of new memory.

    The strict mode raises for an operation that has no deterministic kernel: where PyTorch only
    warns, attention's gradients are still added in any order.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if not enable or (enabled and not warns):
        yield
        return
    os.environ.setdefault(_CUBLAS, ":4096:8")  # the strict mode refuses cuBLAS without it
    fills = _memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    _memory.fill_uninitialized_memory = False
    try:
        yield
    except RuntimeError as error:
        if _CUBLAS in str(error):  # PyTorch reads the variable when cuBLAS is first used
            advice = f"set {_CUBLAS}=:4096:8 before its process starts, or train in a new one"
            raise ValueError(
                f"this process used cuBLAS before a deterministic run: {advice}"
            ) from error
        if _REFUSED not in str(error):
            raise
        operation = str(error).partition(_REFUSED)[0]
        raise ValueError(f"{operation}{_REFUSED}: train without --deterministic") from error
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        _memory.fill_uninitialized_memory = fills
