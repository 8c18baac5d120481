"""The training loop, the same for all tasks and models."""

import hashlib
import math
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlrnn.analysis.snapshot import SNAPSHOTS, snapshot
from dlrnn.common.files import write_whole
from dlrnn.common.progress import Progress
from dlrnn.common.untrusted import COMPACT, naming_file, printable
from dlrnn.nn import check_optimizer
from dlrnn.ops.checks import NotFiniteError
from dlrnn.tasks import Batch, Task
from dlrnn.train.checkpoint import (
    BEST,
    LoadedCheckpoint,
    check_generator,
    check_trusted,
    checkpoints,
    generator_of,
    grow,
    load_model,
    load_newest,
    load_optimizer,
    prepared,
    read_header,
    remove_old,
    save_best,
    save_checkpoint,
    state_tensors,
)
from dlrnn.train.config import RunConfig, in_json
from dlrnn.train.distributed import deterministic, is_sharded, make_fabric, stop_requests
from dlrnn.train.early_stopping import constant_level, should_stop, stop_reason
from dlrnn.train.run_directory import (
    CONFIG,
    RECORDS,
    RESULT,
    TIMING,
    JsonLines,
    RunDirectory,
    check_writer,
    open_writer,
)
from dlrnn.train.step import (
    DIVERGED,
    TrainingStep,
    held_out,
    make_optimizer,
    micro_batch_size,
    scores,
)

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_BEGINNING: dict[str, Any] = {
    **{"step": 0, "logged": 0, "loss_sum": 0.0, "best": {"value": None, "step": 0}, "last": {}},
    **{"records": 0, "records_sha256": None, "snapshots": 0},
}
"""The counters of a run without a checkpoint."""


def train(
    path: str | Path,
    config: RunConfig | None = None,
    *,
    device: str = "cpu",
    devices: int | None = None,
    nodes: int | None = None,
    sharded: bool = False,
    early_stop: bool = False,
    show: bool = True,
    writer: str = "tensorboard",
    trust: bool = False,
) -> dict[str, Any]:
    """Train a new run in `path`, or, without a configuration, resume the run that is there.

    Returns the content of `result.json`. A run that was killed at any moment and resumed ends with
    the same weights and records, bit by bit, on the same device (for attention on a GPU: with the
    setting `deterministic`).

    Args:
        path: the run directory.
        config: the configuration of a new run.
        device: cpu or cuda.
        devices: processes on this machine; default: what torchrun says, else 1.
        nodes: machines; default: what torchrun says, else 1.
        sharded: share the parameters among the processes (FSDP), instead of a copy in each (DDP).
        early_stop: end a run whose metric stays at 0 or 1 (train/early_stopping.py).
        show: print progress to stderr.
        writer: "tensorboard", "wandb" or "none".
        trust: import a mixer or a task outside of dlrnn that the configuration on disk names.

    Raises:
        KeyboardInterrupt: SIGINT or SIGTERM stopped the run, after a checkpoint of its last step.
        ValueError: `path` holds a run already, and a configuration was given.
    """
    if not isinstance(config, RunConfig | None):
        raise ValueError(
            f"config must be a RunConfig, as recipe.config is, not a {type(config).__name__}"
        )
    begins = config is not None
    folder = RunDirectory(path) if begins else RunDirectory.open(path)
    if config is None:
        config = folder.config
        if (result := folder.result) is not None:
            return result
        check_trusted(config, folder.path / CONFIG, trust=trust)
    check_writer(writer)
    fabric = make_fabric(device, config.precision, devices, nodes, sharded=sharded)
    fabric.launch()
    micro_batch_size(config, fabric.world_size)  # raises before a folder is made
    with nullcontext() if begins else naming_file(folder.path / CONFIG):
        task, model = prepared(config)
        if config.lengths is not None:
            if sharded:
                raise ValueError("growing lengths need whole parameters: train without --sharded")
            _, model = prepared(config.at_stage(0))
    if early_stop and task.less_is_better:
        raise ValueError(f"--early-stop needs a metric that ends at 1; {task.name} has a loss")
    with ExitStack() as stack:
        if fabric.is_global_zero:
            files = task.files() if begins else {}
            if begins:
                folder.check_foreign(files)
            stack.enter_context(folder.locked())
            if begins:
                RunDirectory.create(folder.path, config, files)
            else:
                threads = folder.note_environment(anew=not checkpoints(folder.path))
                if threads is not None and fabric.device.type == "cpu":
                    said = f"{path} had {threads} threads of PyTorch, and now has another number"
                    cure = f"rounding may differ; OMP_NUM_THREADS={threads} resumes it exactly"
                    print(printable(f"{said}: {cure}"), file=sys.stderr)
        fabric.barrier()
        stack.enter_context(deterministic(enable=config.deterministic))
        options: dict[str, Any] = {"early_stop": early_stop, "show": show, "writer": writer}
        return Trainer(folder, config, fabric, task, model, stack=stack, **options).run()


class Trainer:
    """One process of a run: it restores the newest checkpoint, and trains the remaining steps.

    Files and writers that it opens are closed by `stack`. Only the process of rank zero writes.
    """

    def __init__(
        self,
        folder: RunDirectory,
        config: RunConfig,
        fabric: "Fabric",
        task: Task,
        model: nn.Module,
        *,
        stack: ExitStack,
        early_stop: bool,
        show: bool,
        writer: str,
    ) -> None:
        self.folder, self.config, self.fabric, self.run_task = folder, config, fabric, task
        self.device, self.rank_zero = fabric.device, fabric.is_global_zero
        self.early_stop = early_stop
        self.module = model.to(self.device)
        files = task.files().items() if self.rank_zero else ()
        self.files = {name: hashlib.sha256(content).hexdigest() for name, content in files}
        self.generator = generator_of(task)
        self.identity = {"config": config.digest(), "data": task.digest()}
        """What must not change during a run. The location of its data may."""
        checkpoint = load_newest(folder.path)
        counters = _BEGINNING if checkpoint is None else checkpoint.counters
        stage = config.stage(max(counters["step"] - 1, 0))  # of the last step that was made
        if stage > 0:
            grow(model, config, stage)
        if checkpoint is not None:
            load_model(checkpoint.path, checkpoint.tensors, model)
            self._check_identity(checkpoint)
        self.start: int = counters["step"]
        self.logged: int = counters["logged"]
        self.best: dict[str, Any] = counters["best"]
        self.last: dict[str, float] = counters["last"]
        self.later_best = self._find_later_best()
        if self.rank_zero:
            self._open_files(counters, stack)
        known = folder.evaluations(task.metric) if self.start and self.rank_zero else []
        evaluations = [(each["step"], each[task.metric]) for each in known]
        self.evaluations: list[tuple[int, float]] = fabric.broadcast(evaluations)
        lacks = task.metric not in self.last or self.best["value"] is None
        if lacks and checkpoint is not None and (self.evaluations or self.start == config.steps):
            problem = f"its header lacks the evaluations before step {self.start}"
            raise ValueError(f"{checkpoint.path}: {problem}")

        self._enter(stage, checkpoint)
        self.step.loss_sum.fill_(counters["loss_sum"] if self.rank_zero else 0.0)  # of all ranks

        self.shown: dict[str, str] = {}
        name = f"{task.name} {config.model.mixer}"
        shows = show and self.rank_zero
        self.progress = Progress(name, "steps", config.steps, self.start) if shows else None
        if self.progress is not None:
            stack.enter_context(self.progress).say(f"run: {folder.path}")
            self.progress.begin()
        for problem in checkpoint.problems if checkpoint is not None and self.rank_zero else ():
            print(printable(f"{problem}; the checkpoint before it is used"), file=sys.stderr)
        self.writer = open_writer(writer, folder.path, self.start) if self.rank_zero else None
        self.stop_requests = stack.enter_context(stop_requests())  # until everything is closed
        if self.writer is not None:
            stack.callback(self.writer.close)

    def _enter(self, stage: int, checkpoint: LoadedCheckpoint | None = None) -> None:
        """Make what a stage needs of its own: task, wrapped model, optimizer and step."""
        self.stage, config = stage, self.config
        self.task = self.run_task if config.lengths is None else config.at_stage(stage).make_task()
        self.parameters = sum(p.numel() for p in self.module.parameters())
        self.model = self.fabric.setup_module(self.module)
        self.module_optimizer = make_optimizer(config, self.module, self.device)
        if self.rank_zero and config.kernel_lr is None:  # a rate that was chosen is not questioned
            check_optimizer(self.module, self.module_optimizer)
        if checkpoint is not None:
            load_optimizer(checkpoint.tensors, self.module, self.module_optimizer)
        optimizer = cast("Optimizer", self.fabric.setup_optimizers(self.module_optimizer))
        self.step = TrainingStep(config, self.task, self.model, optimizer, self.fabric)

    def _batches(self, start: int, stop: int) -> Generator[list[Batch] | None, None, None]:
        """The batches of steps start .. stop - 1; where a stage begins, the model grows before."""
        for number, stage in enumerate(self.config.stages()):
            first, end = max(start, stage.start), min(stop, stage.stop)
            if first >= end:
                continue
            if number != self.stage:
                self.step.check_finite()
                loss_sum = self.step.loss_sum
                grow(self.module, self.config, number)
                self._enter(number)
                self.step.loss_sum.copy_(loss_sum)
                self.model.train()
            yield from self.step.prefetched(first, end)

    def _open_files(self, counters: dict[str, Any], stack: ExitStack) -> None:
        def opened(name: str, length: int | None, digest: str | None = None) -> JsonLines:
            return stack.enter_context(closing(JsonLines(self.folder.path / name, length, digest)))

        self.records = opened(RECORDS, counters["records"], counters["records_sha256"])
        self.timing = opened(TIMING, None if self.start else 0)
        self.snapshots = opened(SNAPSHOTS, counters["snapshots"])

    def _check_identity(self, checkpoint: LoadedCheckpoint) -> None:
        """Refuse a checkpoint of another configuration, other data, or a later step."""
        step, steps = checkpoint.counters["step"], self.config.steps
        if step > steps:
            raise ValueError(f"{checkpoint.path} is of step {step}, and the run has {steps}")
        for name, what in (("config", "configuration"), ("data", "set of data")):
            if checkpoint.counters[name] != self.identity[name]:
                path = self.folder.path
                raise ValueError(f"{path} was begun with another {what}: begin a new run")
        check_generator(self.folder.path, checkpoint.counters, self.run_task)

    def _find_later_best(self) -> dict[str, Any] | None:
        """The best model on disk, if it is newer than the checkpoint that the run resumes from.

        The resumed run finds it again on the same device; on another device it may not, and then
        the file is kept.
        """
        with suppress(ValueError):  # a missing or damaged file is replaced by the next best model
            later = read_header(self.folder.path / BEST)
            if later["step"] > self.best["step"] and later["config"] == self.identity["config"]:
                return {"value": later["value"], "step": later["step"]}
        return None

    def _is_better(self, value: float, best: float | None) -> bool:
        if best is None or math.isnan(best):
            return True
        return value < best if self.task.less_is_better else value > best

    def run(self) -> dict[str, Any]:
        """Train the remaining steps, and return what `result.json` holds."""
        config, began = self.config, time.perf_counter()
        self.model.train()
        done = self.start
        ended = any(step == done for step, _ in self.evaluations) and self._should_stop(done)
        batches = self._batches(done, done if ended else config.steps)
        alone, stops = self.fabric.world_size == 1, False
        for done, parts in enumerate(batches, start=self.start + 1):
            with _divergence(done):
                self.step(done - 1, parts)
            ends = done == config.steps
            evaluation = done % config.eval_every == 0 or ends
            checkpoint = done % config.checkpoint_every == 0 or ends
            due = done % config.log_every == 0 or checkpoint
            if due or evaluation or self.device.type == "cpu":
                self.step.check_finite()
            if due:
                self._log(done, time.perf_counter() - began)
            if evaluation:
                with _divergence(done):
                    self._evaluate(done)
                ends = ends or self._should_stop(done)
                self._snapshot(done, ends=ends)
            if ends and not due:
                self._log(done, time.perf_counter() - began)
            if checkpoint or ends:
                self._checkpoint(done)
            if due or ends or alone:  # several processes agree at steps that synchronise them
                stops = self._stop_requested()
            if ends:
                break
            if stops:
                self.step.check_finite()
                if not checkpoint:
                    self._checkpoint(done)
                self.fabric.barrier()  # an early exit looks like a failure to a launcher
                raise KeyboardInterrupt
        batches.close()
        result = self._result(done, time.perf_counter() - began)
        if self.rank_zero:
            remove_old(self.folder.path)
            write_whole(self.folder.path / RESULT, in_json(result).encode())
        self.fabric.barrier()
        if stops or (alone and self.stop_requests):  # the caller must not start another run
            raise KeyboardInterrupt
        return result

    def _stop_requested(self) -> bool:
        """Whether a signal asked any of the processes to stop."""
        if self.fabric.world_size == 1:
            return bool(self.stop_requests)
        count = torch.tensor(float(len(self.stop_requests)), device=self.device)
        return bool(self.fabric.all_reduce(count, reduce_op="sum"))

    def _should_stop(self, step: int) -> bool:
        return self.early_stop and should_stop(self.evaluations, step, self.config.steps)

    def _log(self, step: int, seconds: float) -> None:
        loss = self.step.take_loss(step - self.logged)
        self.logged = step
        rate = self.config.lr * self.config.rate(step - 1)
        self._record(step, "train", {"loss": loss, "lr": rate})
        if self.rank_zero:
            cuda = self.device.type == "cuda"
            memory = torch.cuda.max_memory_allocated(self.device) if cuda else None
            line = {"step": step, "from": self.start, "seconds": seconds, "memory": memory}
            self.timing.append(line)

    def _evaluate(self, step: int) -> None:
        first, of = self.fabric.global_rank, self.fabric.world_size
        if is_sharded(self.fabric):
            first, of = 0, 1  # each process evaluates all: every forward synchronises them
        batches = held_out(self.task, self.config, "validation", self.device, first=first, of=of)
        found = scores(self.model, self.task, batches, self._total)
        earlier = (self.config.lengths or [])[:-1]
        if self.stage < len(earlier):  # another task: it has no best model
            self._record(step, "stage", {"length": float(earlier[self.stage]), **found})
            return
        self.last = found
        self._record(step, "validation", self.last)
        value = self.last[self.task.metric]
        self.evaluations.append((step, value))
        if self._is_better(value, self.best["value"]):
            self.best = {"value": value, "step": step}
            tensors = state_tensors(self.module, keep=self.rank_zero)
            later = self.later_best
            later = later if later and later["step"] > step else None
            if self.rank_zero and (later is None or self._is_better(value, later["value"])):
                about = {"config": self.identity["config"], "metric": self.task.metric}
                counters = {**about, "value": value, "files": self.files, **self.generator}
                save_best(self.folder.path, step, tensors, counters)

    def _total(self, sums: Tensor) -> Tensor:
        """Sums over all processes."""
        if is_sharded(self.fabric):
            return self.fabric.broadcast(sums)  # all agree on the best model
        return cast("Tensor", self.fabric.all_reduce(sums, reduce_op="sum"))

    def _snapshot(self, step: int, *, ends: bool) -> None:
        """Record eigenvalues and kernels after 1, 2, 4, ... evaluations, and at the end."""
        count = -(-step // self.config.eval_every)
        due = count & (count - 1) == 0 or ends
        if due and self.rank_zero and not is_sharded(self.fabric):
            taken = snapshot(self.module, step, self.task.input_length)
            if taken["layers"]:
                self.snapshots.append(taken, **COMPACT)

    def _checkpoint(self, step: int) -> None:
        """Write a checkpoint; between two records of the loss it holds the sum since the last."""
        if self.run_task.digest() != self.identity["data"]:
            changed = "the set of data was changed while the run read it"
            raise ValueError(f"{changed}: no checkpoint was written; begin a new run")
        tensors = state_tensors(self.module, self.module_optimizer, keep=self.rank_zero)
        if self.rank_zero:
            counters = {"records": self.records.length(), "best": self.best, "last": self.last}
            counters |= {"records_sha256": self.records.sha256, **self.identity, **self.generator}
            counters["snapshots"] = self.snapshots.length()
            if self.logged < step:
                counters |= {"logged": self.logged, "loss_sum": self.step.loss_sum.item()}
            save_checkpoint(self.folder.path, step, tensors, counters)

    def _record(self, step: int, split: str, values: dict[str, float]) -> None:
        if not self.rank_zero:
            return
        self.records.append({"step": step, "split": split, **values})
        self._show(step, split, values)
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(f"{name}/{split}", value, step)

    def _show(self, step: int, split: str, values: dict[str, float]) -> None:
        """Show the loss or the metric of a step, beside the others that were shown last."""
        if self.progress is None:
            return
        metric = "loss" if split == "train" else self.task.metric
        name = f"{split} loss" if split != "train" and metric == "loss" else metric
        self.shown[name] = f"{name} {values[metric]:.4g}"
        words = list(self.shown.values())
        if self.device.type == "cuda":
            words.append(f"{torch.cuda.max_memory_allocated(self.device) / 2**30:.2g} GiB")
        self.progress.update(step, text="  ".join(words))

    def _result(self, steps: int, seconds: float) -> dict[str, Any]:
        later, best = self.later_best, self.best
        if later is not None and self._is_better(later["value"], best["value"]):
            best = later
        level = None if steps == self.config.steps else constant_level(self.evaluations, steps)
        stopped = {} if level is None else {"stopped": stop_reason(self.task.metric, level)}
        on_gpu = self.device.type == "cuda"
        return {
            "task": self.task.name,
            "metric": self.task.metric,
            "value": self.last[self.task.metric],
            "best": best["value"],
            "best_step": best["step"],
            "steps": steps,
            **stopped,
            "seed": self.config.seed,
            "parameters": self.parameters,
            "seconds": round(seconds, 3),
            "seconds_from_step": self.start,
            "device": torch.cuda.get_device_name(self.device) if on_gpu else "cpu",
        }


@contextmanager
def _divergence(step: int) -> Iterator[None]:
    """Turn a layer's error about its input into one about the run: batches are always finite."""
    try:
        yield
    except NotFiniteError as error:
        sentence = f"step {step}: the run has diverged ({error}), and {DIVERGED}"
        raise FloatingPointError(sentence) from error
