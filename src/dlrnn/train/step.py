"""What a model does with batches: an update of its parameters, and an evaluation.

An update is a captured CUDA graph on a GPU, and eager PyTorch elsewhere.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from dlrnn.nn import param_groups, reuse_kernels
from dlrnn.tasks import Batch, Task
from dlrnn.train.checkpoint import make_model
from dlrnn.train.config import RunConfig
from dlrnn.train.distributed import is_sharded, local_processes, local_tensor, make_fabric

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Item = TypeVar("Item")

DIVERGED = "no checkpoint contains it: begin a new run with a smaller --lr, or with --clip 1"
_WARM = 3  # steps before a graph is captured: libraries choose their algorithms in them


def make_optimizer(config: RunConfig, model: nn.Module, device: torch.device) -> Optimizer:
    """AdamW with a parameter group for each role; on a GPU the rate is a tensor for the graph.

    All but kernel parameters decay, as in the paper.
    """
    groups = param_groups(
        model,
        lr=config.lr,
        weight_decay=config.weight_decay,
        kernel_lr=config.kernel_lr,
        decay_all=True,
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
        part = micro_batch_size(config, fabric.world_size)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.bad_step = torch.full((), -1, dtype=torch.int64, device=self.device)
        self.bad_parameter = torch.zeros((), dtype=torch.int64, device=self.device)
        self.index = torch.zeros((), dtype=torch.int64, device=self.device)  # the step
        self._graph: torch.cuda.CUDAGraph | None = None
        self._feed: list[Batch] = []  # the graph reads batches of the host from here
        self._capture = self.device.type == "cuda" and fabric.world_size == 1
        self._warm = 0
        self._dropout = _generator(self.device)
        self._parameters = list(model.parameters())  # listing them takes time in each step
        if self.device.type == "cuda":
            torch.compiler.reset()
        first = fabric.global_rank * config.accumulate
        self._makers = [
            batch_maker(task, part, self.device, (first + k) * part, config.batch_size)
            for k in range(config.accumulate)
        ]
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
        return cast("Tensor", self.fabric.all_reduce(totals, reduce_op="sum"))

    def samples(self, step: int) -> list[Batch]:
        """All micro-batches of this process, at a step."""
        return [maker(step) for maker in self._makers]

    def prefetched(self, start: int, stop: int) -> Generator[list[Batch] | None, None, None]:
        """`samples` of steps start .. stop - 1; None for each if the device makes them."""
        if self.task.on_device:
            yield from (None for _ in range(start, stop))
            return
        threads = thread_count(self.device, local_processes(self.fabric))
        yield from prefetch(self.samples, range(start, stop), threads)

    def take_loss(self, steps: int) -> float:
        """The mean loss of the last `steps`, over all processes; it waits for the device."""
        mean = cast("Tensor", self.fabric.all_reduce(self.loss_sum / steps, reduce_op="sum"))
        self.loss_sum.zero_()
        return mean.item()

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
        advice = f"and {DIVERGED}" if step else "in the first step: the initial parameters give it"
        raise FloatingPointError(f"step {step + 1}: the gradient of {name} is not finite, {advice}")

    def _set_rate(self, step: int) -> None:
        into = step - self.config.stages()[self.config.stage(step)].start
        if self.config.schedule == "constant" and into > self.config.warmup and self._warm:
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


def prefetch(
    make: Callable[[int], Item], numbers: Sequence[int], threads: int
) -> Generator[Item, None, None]:
    """`make(number)` for each number, in order, computed by threads a few numbers in advance.

    Drawing 16 images on the host may take longer than a GPU's training step with them.
    """
    pool = ThreadPoolExecutor(threads)
    pending = deque[Future[Item]]()
    try:
        for place in range(len(numbers)):
            for later in numbers[place + len(pending) : place + threads + 2]:
                pending.append(pool.submit(make, later))
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def thread_count(device: torch.device, processes: int) -> int:
    """Threads for `prefetch` in one of `processes` processes on this machine.

    Half of the process's cores when the model runs on the CPU; all but two with a GPU; at most 16.
    """
    known = getattr(os, "sched_getaffinity", None)
    cores = (len(known(0)) if known else os.cpu_count() or 1) // processes
    free = cores // 2 if device.type == "cpu" else cores - 2
    return max(1, min(16, free))


def make_step(config: RunConfig, device: torch.device) -> TrainingStep:
    """The step of a configuration in one process, with a new model, to test or time it."""
    fabric = make_fabric(str(device), config.precision)
    task = config.make_task()
    model = make_model(config, task).to(device)
    optimizer = make_optimizer(config, model, device)
    wrapped, wrapped_optimizer = fabric.setup(model, optimizer)
    return TrainingStep(config, task, wrapped, wrapped_optimizer, fabric)


# ---------------------------------------------------------------------------------- evaluation


def held_out(
    task: Task, config: RunConfig, split: str, device: torch.device, *, first: int = 0, of: int = 1
) -> Iterator[Batch]:
    """The batches of a split: all of a set on disk, otherwise `eval_batches`.

    One of several processes takes every `of`-th batch from `first` on.
    """
    size, count = config.batch_size, task.count(split)
    batches = config.eval_batches if count is None else -(-count // size)

    def batch(step: int) -> Batch:
        here = size if count is None else min(size, count - step * size)
        return task.sample(here, split=split, step=step, device=device, of=size)

    steps = range(first, batches, of)
    if task.on_device:
        return map(batch, steps)
    return prefetch(batch, steps, thread_count(device, of))


def scores(
    model: nn.Module,
    task: Task,
    batches: Iterator[Batch],
    total: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, float]:
    """Loss and metrics, averaged over batches by their weight; `total` adds up all processes."""
    was_training, device = model.training, next(model.parameters()).device
    names = [*sorted(("loss", *task.metric_names)), "weight"]
    sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in names}
    model.eval()
    with torch.no_grad():
        for batch in batches:
            output, weight = forward(model, batch, targets=task.gives_targets), task.weight(batch)
            values = {"loss": task.loss(output, batch), **task.metrics(output, batch)}
            for name, value in values.items():
                sums[name] = sums[name] + weight * value.double()
            sums["weight"] = sums["weight"] + weight
    model.train(was_training)
    stacked = torch.stack(list(sums.values()))
    *added, weights = (stacked if total is None else total(stacked)).tolist()
    return task.summary({name: value / weights for name, value in zip(names, added, strict=False)})
