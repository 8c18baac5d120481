"""The one loop for all tasks and models."""

import hashlib
import json
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from dlrnn.analysis.snapshot import SNAPSHOTS, snapshot
from dlrnn.common.files import write_whole
from dlrnn.common.untrusted import naming_file
from dlrnn.models import LanguageConfig
from dlrnn.models.model import Block
from dlrnn.ops.checks import NotFiniteError
from dlrnn.tasks import Task
from dlrnn.train.checkpoint import (
    BEST,
    Found,
    checkpoints,
    header,
    load_model,
    load_optimizer,
    newest,
    remove_old,
    save_best,
    save_checkpoint,
    tensors_of,
)
from dlrnn.train.config import RunConfig, from_json
from dlrnn.train.deterministic import deterministic
from dlrnn.train.evaluate import Share, averaged, evaluate, held_out
from dlrnn.train.folder import CONFIG, RECORDS, RESULT, TIMING, Lines, RunFolder
from dlrnn.train.interrupt import asked_to_stop
from dlrnn.train.model import check_trusted, make_model
from dlrnn.train.plain import Judged, in_words, may_stop, plain_level
from dlrnn.train.processes import make_fabric
from dlrnn.train.progress import Shown, Silent
from dlrnn.train.sharded import is_sharded
from dlrnn.train.step import TrainingStep, make_optimizer, part_of_batch, prefetched
from dlrnn.train.writers import check_writer, open_writer

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def train(
    path: str | Path,
    config: RunConfig | None = None,
    *,
    device: str = "cpu",
    devices: int | None = None,
    nodes: int | None = None,
    sharded: bool = False,
    until_plain: bool = False,
    show: bool = True,
    writer: str = "tensorboard",
    trust: bool = False,
) -> dict[str, Any]:
    """Begin a run in a new folder, or, without a configuration, go on with the one that is there.

    Returns what `result.json` holds. Killed at any moment and gone on with, a run ends with the
    same weights and records, bit by bit, on the same device (attention on a GPU: see the setting
    `deterministic`). `devices` and `nodes` are what torchrun says, by default; `sharded`
    processes share the parameters instead of having a copy each. `until_plain` ends a run whose
    metric is plainly at 0 or 1 (train/plain.py). A mixer outside of dlrnn that the folder's
    configuration names is imported, which runs its code, only with `trust`.
    """
    folder = RunFolder(path)
    if config is None:
        folder = RunFolder.open(path)
    else:
        config = from_json(config.to_json())  # as it will be read: what cannot be ends here
    known = folder.config if config is None else config
    if config is None and (result := folder.result) is not None:
        return result
    if config is None:
        check_trusted(known, folder.path / CONFIG, trust=trust)
    check_writer(writer)
    fabric = make_fabric(device, known.precision, devices, nodes, sharded=sharded)
    fabric.launch()
    how = {"until_plain": until_plain, "show": show, "writer": writer}
    return _launched(folder, fabric, known, begins=config is not None, how=how)


def _launched(
    folder: RunFolder, fabric: "Fabric", known: RunConfig, *, begins: bool, how: dict[str, Any]
) -> dict[str, Any]:
    part_of_batch(known, fabric.world_size)  # what cannot be ends here, before a folder is made
    with nullcontext() if begins else naming_file(folder.path / CONFIG):
        task = known.make_task()
        _check_data(task)
        _check_vocabulary(known, task)
        model = make_model(known, task)
        _check_padding(model, task)
        _check_state(model)
    if how["until_plain"] and task.less_is_better:
        raise ValueError(f"--until-plain is for metrics that end at 1; {task.name} has a loss")
    with ExitStack() as stack:
        if fabric.is_global_zero:
            files = task.files() if begins else {}
            if begins:
                folder.check_foreign(files)
            stack.enter_context(folder.locked())
            if begins:
                RunFolder.create(folder.path, known, files)
            else:
                folder.note_environment(anew=not checkpoints(folder.path))
        fabric.barrier()
        stack.enter_context(deterministic(wanted=known.deterministic))
        return _Run(folder, fabric, task, model, stack, **how).go()


def _check_data(task: Task) -> None:
    """Every split that the run will ask for is there."""
    splits = ["train", "validation", *(["test"] if task.kind != "regression" else [])]
    counts = [task.count(split) for split in splits]
    if None in counts and not task.drawable:
        task.sample(1)  # says what to do


def _check_padding(model: nn.Module, task: Task) -> None:
    if not task.on_device and task.sample(1).lengths is not None:
        for block in model.modules():
            if isinstance(block, Block):
                block.check_padding()


def _check_state(model: nn.Module) -> None:
    """Before the first checkpoint: it holds tensors."""
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise ValueError(f"checkpoints hold tensors, and {name} of the model is a {kind}")


def _check_vocabulary(config: RunConfig, task: Task) -> None:
    tokens = task.vocabulary or 0
    if isinstance(config.model, LanguageConfig) and tokens > config.model.vocabulary:
        less = f"the model's vocabulary, {config.model.vocabulary}"
        advice = f"--model.vocabulary {tokens}"
        raise ValueError(f"{task.name} has {tokens} tokens, more than {less}: say {advice}")


class _Run:
    """A run on this process."""

    def __init__(
        self,
        folder: RunFolder,
        fabric: "Fabric",
        task: Task,
        model: nn.Module,
        stack: ExitStack,
        *,
        until_plain: bool,
        show: bool,
        writer: str,
    ) -> None:
        self.folder, self.fabric, self.config = folder, fabric, folder.config
        self.device, self.leads = fabric.device, fabric.is_global_zero
        self.task, self.bare, self.until_plain = task, model, until_plain
        self.parameters = sum(p.numel() for p in self.bare.parameters())
        self.bare.to(self.device)
        files = task.files().items() if self.leads else ()
        self.files = {name: hashlib.sha256(content).hexdigest() for name, content in files}
        self.best: dict[str, Any] = {"value": None, "step": 0}
        self.last: dict[str, float] = {}
        found = newest(self.folder.path)
        if found is not None:
            load_model(found.path, found.tensors, self.bare)
        self.start = self._resume(found, stack)
        self.model = fabric.setup_module(self.bare)
        self.bare_optimizer = make_optimizer(self.config, self.bare, self.device)
        if found is not None:
            load_optimizer(found.tensors, self.bare, self.bare_optimizer)
        self.optimizer = cast("Optimizer", fabric.setup_optimizers(self.bare_optimizer))
        self.step = TrainingStep(self.config, self.task, self.model, self.optimizer, fabric)
        self.step.loss_sum.fill_(self.loss_sum if self.leads else 0.0)  # of all processes together
        shown = show and self.leads
        name = f"{self.task.name} {self.config.model.mixer}"
        steps = self.config.steps
        self.progress = Shown(name, self.start, steps, self.device) if shown else Silent()
        self.progress.say(f"run: {folder.path}")
        for problem in self.problems if self.leads else ():
            self.progress.warn(f"{problem}; the checkpoint before it is used")
        self.writer = open_writer(writer, folder.path, self.start) if self.leads else None
        self.asked = stack.enter_context(asked_to_stop())  # until all is closed
        if self.writer is not None:
            stack.callback(self.writer.close)

    def _resume(self, found: Found | None, stack: ExitStack) -> int:
        counters: dict[str, Any] = {"step": 0, "records": 0} if found is None else found.counters
        if found is not None and counters["step"] > self.config.steps:
            raise ValueError(
                f"{found.path} is of step {counters['step']}, and the run has {self.config.steps}"
            )
        self.problems = [] if found is None else found.problems
        self.origin = self._origin()
        for name, value in self.origin.items():
            if counters.get(name, value) != value:
                what = {"config": "configuration", "data": "set of data"}[name]
                raise ValueError(
                    f"{self.folder.path} was begun with another {what}: begin a new run"
                )
        self.best, self.last = counters.get("best", self.best), counters.get("last", self.last)
        self.later = self._later_best()
        if self.leads:
            here, digest = self.folder.path, counters.get("records_sha256")
            self.records = Lines(here / RECORDS, counters["records"], digest)
            stack.callback(self.records.close)
            self.timing = Lines(here / TIMING, 0 if found is None else None)
            stack.callback(self.timing.close)
            self.snapshots = Lines(here / SNAPSHOTS, counters.get("snapshots", 0))
            stack.callback(self.snapshots.close)
            self.snapshots.separators = (",", ":")
        step: int = counters["step"]
        self.logged, self.loss_sum = counters.get("logged", step), counters.get("loss_sum", 0.0)
        metric = self.task.metric
        known = self.folder.evaluations(metric) if step and self.leads else []
        judged = [(each["step"], each[metric]) for each in known]
        self.judged: list[Judged] = self.fabric.broadcast(judged)
        lacks = metric not in self.last or self.best["value"] is None
        if lacks and found is not None and (self.judged or step == self.config.steps):
            raise ValueError(f"{found.path}: its header lacks the evaluations before step {step}")
        return step

    def _later_best(self) -> dict[str, Any] | None:
        """The best model on disk, if it was written after the checkpoint that the run goes on from.

        On the same device the run finds it again; on another one it may not, and then it stays.
        """
        with suppress(ValueError):  # there is none, or it is damaged: the next best replaces it
            later = header(self.folder.path / BEST)
            if later["step"] > self.best["step"] and later["config"] == self.origin["config"]:
                return {"value": later["value"], "step": later["step"]}
        return None

    def _is_better(self, value: float, best: float | None) -> bool:
        if best is None or math.isnan(best):
            return True
        return value < best if self.task.less_is_better else value > best

    def _origin(self) -> dict[str, str | None]:
        """What a run cannot go on with if it has changed: not where its data lies."""
        return {"config": self.config.digest(), "data": self.task.digest()}

    def go(self) -> dict[str, Any]:
        """Every step that is left."""
        config, began = self.config, time.perf_counter()
        self.model.train()
        done = self.start
        ended = any(step == done for step, _ in self.judged) and self._is_plain(done)
        batches = prefetched(self.step, done, done if ended else config.steps)
        alone, stops = self.fabric.world_size == 1, False
        with self.progress:
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
                    ends = ends or self._is_plain(done)
                    self._snapshot(done, ends=ends)
                if ends and not due:
                    self._log(done, time.perf_counter() - began)
                if checkpoint or ends:
                    self._checkpoint(done)
                if due or ends or alone:  # several agree on the step where they meet anyway
                    stops = self._somebody()
                if ends:
                    break
                if stops:
                    self.step.check_finite()
                    if not checkpoint:
                        self._checkpoint(done)
                    self.fabric.barrier()  # who leaves first is a failure to who started them
                    raise KeyboardInterrupt
        batches.close()
        result = self._result(done, time.perf_counter() - began)
        if self.leads:
            remove_old(self.folder.path)
            content = json.dumps(result, indent=1) + "\n"
            write_whole(self.folder.path / RESULT, content.encode())
        self.fabric.barrier()
        if stops or (alone and self.asked):  # whatever comes after this run is not begun
            raise KeyboardInterrupt
        return result

    def _somebody(self) -> bool:
        """One process was asked to stop, so all of them were."""
        if self.fabric.world_size == 1:
            return bool(self.asked)
        count = torch.tensor(float(len(self.asked)), device=self.device)
        return bool(self.fabric.all_reduce(count, reduce_op="sum"))

    def _is_plain(self, step: int) -> bool:
        return self.until_plain and may_stop(self.judged, step, self.config.steps)

    def _log(self, step: int, seconds: float) -> None:
        loss = self.step.take_loss(step - self.logged)
        self.logged = step
        rate = self.config.lr * self.config.rate(step - 1)
        self._record(step, "train", {"loss": loss, "lr": rate})
        if self.leads:
            cuda = self.device.type == "cuda"
            memory = torch.cuda.max_memory_allocated(self.device) if cuda else None
            line = {"step": step, "from": self.start, "seconds": seconds, "memory": memory}
            self.timing.append(line)

    def _evaluate(self, step: int) -> None:
        rank, world = self.fabric.global_rank, self.fabric.world_size
        if is_sharded(self.fabric):
            rank, world = 0, 1  # all of it on each: they meet in every forward
        share = Share(rank, world)
        batches = held_out(self.task, self.config, "validation", self.device, share)
        total = evaluate(self.model, self.task, batches, self.device)
        names = sorted(total)
        sums = torch.stack([total[name] for name in names])
        if world > 1:
            sums = self.fabric.all_reduce(sums, reduce_op="sum")  # type: ignore[assignment]
        elif is_sharded(self.fabric):
            sums = self.fabric.broadcast(sums)  # one word on what is best
        self.last = averaged(self.task, dict(zip(names, sums.tolist(), strict=True)))
        self._record(step, "validation", self.last)
        value = self.last[self.task.metric]
        self.judged.append((step, value))
        if self._is_better(value, self.best["value"]):
            self.best = {"value": value, "step": step}
            tensors = tensors_of(self.bare, keep=self.leads)
            later = self.later if self.later and self.later["step"] > step else None
            if self.leads and (later is None or self._is_better(value, later["value"])):
                counters = {"config": self.origin["config"], "metric": self.task.metric}
                counted: dict[str, Any] = {**counters, "value": value, "files": self.files}
                save_best(self.folder.path, step, tensors, counted)

    def _snapshot(self, step: int, *, ends: bool) -> None:
        """What the report's explorer shows: after 1, 2, 4, ... evaluations, and at the end."""
        count = -(-step // self.config.eval_every)
        due = count & (count - 1) == 0 or ends
        if due and self.leads and not is_sharded(self.fabric):
            taken = snapshot(self.bare, step, self.task.input_length)
            if taken["layers"]:
                self.snapshots.append(taken)

    def _checkpoint(self, step: int) -> None:
        """Between two records of the loss it has the sum since the last one."""
        if self.task.digest() != self.origin["data"]:
            raise ValueError(
                "the set of data was changed while the run read it: no checkpoint was written;"
                " begin a new run"
            )
        tensors = tensors_of(self.bare, self.bare_optimizer, keep=self.leads)
        if self.leads:
            counters = {"records": self.records.length(), "best": self.best, "last": self.last}
            counters |= {"records_sha256": self.records.sha256, **self.origin}
            counters["snapshots"] = self.snapshots.length()
            if self.logged < step:
                counters |= {"logged": self.logged, "loss_sum": self.step.loss_sum.item()}
            save_checkpoint(self.folder.path, step, tensors, counters)

    def _record(self, step: int, split: str, values: dict[str, float]) -> None:
        if not self.leads:
            return
        self.records.append({"step": step, "split": split, **values})
        metric = self.task.metric
        shown = {k: v for k, v in values.items() if k != "lr"}
        if split != "train":
            shown = {f"{split} loss" if metric == "loss" else metric: values[metric]}
        self.progress.show(step, shown)
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(f"{name}/{split}", value, step)

    def _result(self, steps: int, seconds: float) -> dict[str, Any]:
        later, best = self.later, self.best
        if later is not None and self._is_better(later["value"], best["value"]):
            best = later
        level = None if steps == self.config.steps else plain_level(self.judged, steps)
        stopped = "" if level is None else in_words(self.task.metric, level)
        return {
            "task": self.task.name,
            "metric": self.task.metric,
            "value": self.last[self.task.metric],
            "best": best["value"],
            "best_step": best["step"],
            "steps": steps,
            **({"stopped": stopped} if stopped else {}),
            "seed": self.config.seed,
            "parameters": self.parameters,
            "seconds": round(seconds, 3),
            "seconds_from_step": self.start,
            "device": torch.cuda.get_device_name(self.device)
            if self.device.type == "cuda"
            else "cpu",
        }


@contextmanager
def _divergence(step: int) -> Iterator[None]:
    """On a CPU a layer says what it was given: a batch is finite, so the model is not."""
    try:
        yield
    except NotFiniteError as error:
        raise FloatingPointError(
            f"step {step}: the run has diverged ({error}), and no checkpoint is of it: begin a new"
            " run with a smaller --lr, or with --clip 1"
        ) from error
