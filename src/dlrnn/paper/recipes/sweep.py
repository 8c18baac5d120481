"""Many runs, each a process of its own: locally a few at a time, or as Slurm jobs."""

import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dlrnn.common.files import open_append
from dlrnn.common.untrusted import brief
from dlrnn.models.config import is_built_in
from dlrnn.paper.recipes.catalogue import chosen
from dlrnn.paper.recipes.outcome import (
    DONE,
    changed_path,
    check_folder,
    outcome_in,
    run_config,
    score_best,
)
from dlrnn.paper.recipes.recipe import Recipe
from dlrnn.paper.recipes.scale import Scale
from dlrnn.train import RunConfig, with_overrides
from dlrnn.train.checkpoint import checkpoints, step_of
from dlrnn.train.run_directory import CONFIG, RunDirectory

IN_USE = "in use by another process"


class Wanted(NamedTuple):
    """A run that was asked for."""

    recipe: Recipe
    config: RunConfig
    path: Path

    @property
    def name(self) -> str:
        """To speak of it."""
        return f"{self.recipe.name}, seed {self.config.seed}"


class Job(NamedTuple):
    """A run that is not complete."""

    run: Wanted
    command: list[str]

    @property
    def starts(self) -> str:
        """What it does: a folder without a checkpoint begins anew."""
        found = checkpoints(self.run.path) if "--resume" in self.command else []
        return f"goes on from step {step_of(found[-1])}" if found else "begins"


def sweep(
    patterns: Sequence[str],
    *,
    overrides: Sequence[str] = (),
    seeds: Iterable[int] = (0,),
    jobs: int = 1,
    slurm: str | None = None,
    scale: Scale = "full",
    out: str | Path = "runs",
    device: str = "cpu",
    early_stop: bool = False,
) -> list[dict[str, Any]]:
    """Run every recipe with every seed; what is complete is left alone, what was stopped goes on.

    `overrides` are settings that all of them change, as `with_overrides` takes them. A run that
    breaks does not stop the others; its last words are in its row and its log. With a Slurm
    partition the jobs are submitted, and a later sweep tells how they went.
    """
    wanted = []
    for recipe, seed in [(recipe, seed) for recipe in chosen(patterns) for seed in seeds]:
        config = run_config(recipe, scale, seed)
        config = with_overrides(config, overrides) if overrides else config
        wanted.append(Wanted(recipe, config, changed_path(recipe, out, scale, config)))
    where = ["--device", device, *(["--early-stop"] if early_stop else [])]
    waiting: list[Job] = []
    said: dict[Path, str] = {}
    refused: set[Path] = set()
    for run in wanted:
        try:
            if command := _command(run, ["--scale", scale, *overrides]):
                waiting.append(Job(run, [*command, *where]))
        except ValueError as error:  # this folder, not the others
            said[run.path] = brief(error)
            refused.add(run.path)
    if slurm is not None:
        said |= _submit(waiting, Path(out), slurm, device)
    else:
        said |= _run_all(waiting, jobs)
    rows = [_row(run, said.get(run.path, ""), None if slurm else device) for run in wanted]
    for run, row in zip(wanted, rows, strict=True):
        row["status"] = "refused" if run.path in refused else row["status"]
    return rows


def _command(run: Wanted, settings: list[str]) -> list[str] | None:
    """None if it is complete."""
    own = [sys.executable, "-P", "-m", "dlrnn", "train"]
    if not (run.path / CONFIG).is_file():
        seed = str(run.config.seed)
        return [*own, run.recipe.name, *settings, "--seed", seed, "--out", str(run.path)]
    check_folder(run.path, run.config)
    if RunDirectory.open(run.path).result is not None:
        return None
    return [*own, "--resume", str(run.path), *_trust(run)]


def _trust(run: Wanted) -> list[str]:
    """The folder's mixer is the one that the user named for this sweep, so it needs no consent."""
    return [] if is_built_in(run.config.model.mixer) else ["--trust"]


def _row(run: Wanted, said: str, device: str | None) -> dict[str, Any]:
    """How it went; on a device it is tested first, if it was not."""
    failed = bool(said)
    if not said and device:
        try:
            if (run.path / CONFIG).is_file():
                check_folder(run.path, run.config)
            score_best(run.path, device, trust=bool(_trust(run)))
        except Exception as error:  # whatever happened, the other runs are not to blame
            said = brief(error) or type(error).__name__
    found = outcome_in(run.path, run.recipe, run.config)
    if failed and found.status == DONE:  # another sweep has completed it meanwhile
        said = ""
    status = "broken" if said and device else found.status
    return {
        "recipe": run.recipe.name,
        "seed": run.config.seed,
        "status": "in use" if said == IN_USE else status,
        "paper": next(iter(run.recipe.paper.values()), None),
        "score": next(iter((found.scores or {}).values()), None),
        "said": said,
    }


def _run_all(waiting: list[Job], jobs: int) -> dict[Path, str]:
    """So many at once. Ctrl-C and SIGTERM end the runs too, each with a checkpoint."""
    running: list[subprocess.Popen[bytes]] = []
    stopped = threading.Event()

    def run(job: Job) -> str:
        return _run(job, running, stopped)

    with _terminated_as_interrupted(stopped), ThreadPoolExecutor(jobs) as pool:
        try:
            return dict(zip((job.run.path for job in waiting), pool.map(run, waiting), strict=True))
        except KeyboardInterrupt:
            stopped.set()
            for process in running.copy():
                process.terminate()
            raise


@contextmanager
def _terminated_as_interrupted(stopped: threading.Event) -> Iterator[None]:
    """Once: `timeout` sends two signals, and the second must not meet us while we pass it on."""
    if threading.current_thread() is not threading.main_thread():  # which alone can listen
        yield
        return

    def interrupt(*_: object) -> None:
        if not stopped.is_set():
            stopped.set()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(job: Job, running: list[subprocess.Popen[bytes]], stopped: threading.Event) -> str:
    """The last line that was said, nothing if all went well.

    In a process group of its own: a terminal's Ctrl-C is ours to pass on, once; a second one,
    later, would end a run before its checkpoint.
    """
    log = job.run.path.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    if stopped.is_set():
        return "not begun"
    _say(f"{job.run.name}: {job.starts}, {log}")
    with (
        open_append(log) as file,
        subprocess.Popen(
            job.command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, process_group=0
        ) as process,
    ):
        running.append(process)
        if stopped.is_set():
            process.terminate()
        status = process.wait()
        running.remove(process)
    ended = {0: "done", 75: IN_USE, 130: "stopped", -signal.SIGTERM: "stopped"}
    _say(f"{job.run.name}: {ended.get(status, 'broken')}")
    if status in (0, 75):
        return IN_USE if status else ""
    said = log.read_text().strip().splitlines()
    return said[-1] if said else f"exit status {status}"


def _say(text: str) -> None:
    """Whole: several threads speak."""
    sys.stderr.write(f"{text}\n")


def _submit(waiting: list[Job], out: Path, partition: str, device: str) -> dict[Path, str]:
    """Each trains its run, and tests it."""
    try:
        import submitit
    except ImportError:
        raise ValueError("--slurm needs submitit: pip install submitit") from None
    executor = submitit.SlurmExecutor(folder=out / "slurm")
    executor.update_parameters(partition=partition, gpus_per_node=1, time=24 * 60)
    submitted = {}
    for job in waiting:
        test = [sys.executable, "-P", "-m", "dlrnn", "eval", str(job.run.path), "--device", device]
        test += _trust(job.run)
        both = f"{shlex.join(job.command)} && {shlex.join(test)}"
        handle = executor.submit(submitit.helpers.CommandFunction(["bash", "-c", both]))
        submitted[job.run.path] = f"submitted as {handle.job_id}"
    return submitted
