"""One update of the parameters: on a GPU a captured graph, elsewhere plain PyTorch."""

from collections.abc import Callable, Generator
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from dlrnn.nn import param_groups, reuse_kernels
from dlrnn.tasks import Batch, Task
from dlrnn.train.ahead import made_ahead, threads_for
from dlrnn.train.config import RunConfig
from dlrnn.train.sharded import is_sharded, share

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_WARM = 3  # steps before a graph is captured: libraries choose their algorithms in them


def make_optimizer(config: RunConfig, model: nn.Module, device: torch.device) -> Optimizer:
    """AdamW, groups by role; on a GPU its rate is a tensor, which a captured graph reads."""
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


def part_of_batch(config: RunConfig, world: int) -> int:
    """Samples of a micro-batch of one of `world` processes."""
    if config.batch_size % (world * config.accumulate):
        parts = f"{world} processes and {config.accumulate} micro-batches"
        raise ValueError(f"batch_size {config.batch_size} cannot be divided among {parts}")
    return config.batch_size // (world * config.accumulate)


class TrainingStep:
    """`step(k)` makes update k = 0, 1, ...; losses are summed on the device until `take_loss`."""

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
        self.part = part_of_batch(config, world)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.bad_step = torch.full((), -1, dtype=torch.int64, device=self.device)
        self.bad_parameter = torch.zeros((), dtype=torch.int64, device=self.device)
        self.index = torch.zeros((), dtype=torch.int64, device=self.device)  # of the step
        self._graph: torch.cuda.CUDAGraph | None = None
        self._feed: list[Batch] = []  # what a graph reads, where batches come from the host
        self._capture = self.device.type == "cuda" and world == 1
        self._warm = 0
        self._dropout = _generator(self.device)
        self._parameters = list(model.parameters())  # to walk through a model takes its time
        if self.device.type == "cuda":
            torch.compiler.reset()
        self._makers = [self._maker(k) for k in range(config.accumulate)]
        self._stream = torch.cuda.Stream() if self._capture else None

    def __call__(self, step: int, batches: list[Batch] | None) -> None:
        """One update; `batches` are its micro-batches, None where the device makes them."""
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
        # "thread_local": the thread that makes the next batches may copy them meanwhile
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
        holds = parts > 1 and not is_sharded(self.fabric)  # a shard makes no kernel
        with reuse_kernels(self.model) if holds else nullcontext():
            for k, batch in enumerate(batches):
                with self.fabric.no_backward_sync(self.model, enabled=k < parts - 1):  # type: ignore[arg-type]
                    output = forward(self.model, batch, targets=self.task.gives_targets)
                    part = self.task.loss(output, batch, totals)
                    self.fabric.backward(part * world)  # DDP takes the mean over processes
                loss += part.detach()
        if world > 1 and not is_sharded(self.fabric):
            self._require_gradients()
        gradients = [share(p.grad) for p in self._parameters if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients))
        if is_sharded(self.fabric):
            norms = self.fabric.all_reduce(norms.square(), reduce_op="sum").sqrt()  # type: ignore[union-attr]
        if self.config.clip is not None:
            factor = (self.config.clip / (norms.norm() + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor)
        self._note_bad(norms.isfinite())
        self.optimizer.step()
        if world > 1:
            for buffer in self.model.buffers():  # what a forward learnt, of all processes
                if not buffer.is_floating_point():
                    continue
                buffer.copy_(self.fabric.all_reduce(buffer.clone(), reduce_op="mean"))  # type: ignore[arg-type]
        self.loss_sum += loss
        self.index += 1

    def _require_gradients(self) -> None:
        """DDP waits for each of them, and would stop in its own words at the next step."""
        if all(p.grad is not None or not p.requires_grad for p in self._parameters):
            return
        every = self.model.named_parameters()
        idle = [_own_name(n) for n, p in every if p.grad is None and p.requires_grad]
        more = f" and {len(idle) - 1} more" if len(idle) > 1 else ""
        raise ValueError(
            f"{idle[0]}{more} had no part in the loss, and with several processes all must:"
            " use it, leave it out, freeze it (requires_grad_(False)), or train in one process"
        )

    def _totals(self, batches: list[Batch]) -> Tensor:
        """Of the whole batch: the losses of all parts, on all processes, add up."""
        totals = torch.stack([self.task.totals(batch) for batch in batches]).sum(0)
        if self.fabric.world_size > 1:
            totals = self.fabric.all_reduce(totals, reduce_op="sum")  # type: ignore[assignment]
        return totals

    def samples(self, step: int) -> list[Batch]:
        """All micro-batches of this process."""
        return [maker(step) for maker in self._makers]

    def _maker(self, part: int) -> Callable[[int | Tensor], Batch]:
        """Micro-batch `part` of this process, by its step."""
        first = (self.fabric.global_rank * self.config.accumulate + part) * self.part
        return batch_maker(self.task, self.part, self.device, first, self.config.batch_size)

    def take_loss(self, steps: int) -> float:
        """The mean over the last `steps`, over all processes; waits for the device."""
        mean = self.loss_sum / steps
        if self.fabric.world_size > 1:
            mean = self.fabric.all_reduce(mean, reduce_op="sum")  # type: ignore[assignment]
        value = float(mean)
        self.loss_sum.zero_()
        return value

    def _note_bad(self, finite: Tensor) -> None:
        """Keep the first step with a gradient that is not finite, and whose it is."""
        if self.device.type == "cpu" and bool(finite.all()):  # a GPU would have to be waited for
            return
        new = ~finite.all() & (self.bad_step < 0)
        self.bad_step.copy_(torch.where(new, self.index, self.bad_step))
        first = (~finite).to(torch.int64).argmax()
        self.bad_parameter.copy_(torch.where(new, first, self.bad_parameter))

    def check_finite(self) -> None:
        """Stop at a gradient that is not finite, and name it; waits for the device."""
        step = int(self.bad_step)
        if step < 0:
            return
        names = [n for n, p in self.model.named_parameters() if p.grad is not None]
        name = _own_name(names[int(self.bad_parameter)])
        advice = "and no checkpoint is of it: begin a new run with a smaller --lr, or with --clip 1"
        if step == 0:
            advice = "before anything was learnt: the model gives it from its first parameters"
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


def _own_name(name: str) -> str:
    """Of a parameter, without those of Fabric's and DDP's wrappers."""
    return name.removeprefix("_forward_module.").removeprefix("module.")


def _generator(device: torch.device) -> torch.Generator:
    """The one that dropout draws from. `torch.manual_seed` would seed those of every kind of
    device, 0.28 ms a step.
    """
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[device.index]


def batch_maker(
    task: Task, size: int, device: torch.device, first: int = 0, of: int | None = None
) -> Callable[[int | Tensor], Batch]:
    """`task.sample` by the step alone; compiled where the GPU makes batches, into a few kernels.

    `torch.compiler.reset()` before a new task: dynamo compiles one function 8 times, no more.
    """

    def make(step: int | Tensor) -> Batch:
        where = {"device": device, "first": first, "of": of}
        return task.sample(size, split="train", step=step, **where)  # type: ignore[arg-type]

    if not task.on_device or device.type != "cuda":
        return make
    make(0)  # what is drawn once is drawn before
    compiled: Callable[[int | Tensor], Batch] = torch.compile(make, dynamic=False)
    return compiled


def forward(model: nn.Module, batch: Batch, *, targets: bool = False) -> Tensor:
    """The model's answer to a batch; where it is given the `targets`, `-log p` of each."""
    if targets:
        surprises: Tensor = model(batch.inputs, targets=batch.targets)
        return surprises
    output: Tensor = model(batch.inputs) if batch.lengths is None else model(*batch[::2])
    return output


def prefetched(
    step: TrainingStep, start: int, stop: int
) -> Generator[list[Batch] | None, None, None]:
    """The micro-batches of steps start .. stop - 1; None each where the device makes them."""
    if step.task.on_device:
        yield from (None for _ in range(start, stop))
        return
    threads = threads_for(step.device, _processes_here(step.fabric))
    yield from made_ahead(step.samples, range(start, stop), threads)


def _processes_here(fabric: "Fabric") -> int:
    """Of this run, on this machine."""
    return len(getattr(fabric.strategy, "parallel_devices", None) or [fabric.device])
