"""Train many runs, each in its own process: a few at a time here, or as Slurm jobs."""

import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

from dlrnn.common.files import open_append
from dlrnn.common.untrusted import brief
from dlrnn.paper.recipes import Scale, chosen
from dlrnn.paper.runs import DONE, Run, evaluate_best, run_of
from dlrnn.train.checkpoint import checkpoints, needs_trust, step_of
from dlrnn.train.run_directory import RunDirectory

IN_USE = "in use by another process"


class Job(NamedTuple):
    """A run that is not complete, and the command that trains it."""

    run: Run
    command: list[str]

    @property
    def starts(self) -> str:
        """Whether the run goes on from a checkpoint or begins."""
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
    """Train every recipe with every seed: complete runs are skipped, stopped ones are resumed.

    `overrides` change settings of all runs, as `with_overrides` takes them. A run that fails does
    not stop the others; the last line of its output is in its row, all of it in its log. With a
    Slurm partition the jobs are submitted, and a later sweep reports their status.
    """
    runs = [
        run_of(recipe, out, scale, seed, overrides) for recipe in chosen(patterns) for seed in seeds
    ]
    where = ["--device", device, *(["--early-stop"] if early_stop else [])]
    waiting: list[Job] = []
    said: dict[Path, str] = {}
    refused: set[Path] = set()
    for run in runs:
        try:
            if command := train_command(run, ["--scale", scale, *overrides]):
                waiting.append(Job(run, [*command, *where]))
        except ValueError as error:  # the other runs go on
            said[run.path] = brief(error)
            refused.add(run.path)
    if slurm is None:
        said |= _run_all(waiting, jobs)
    else:
        said |= _submit(waiting, Path(out), slurm, device)
    rows = []
    for run in runs:
        status, problem = "", said.get(run.path, "")
        if run.path in refused:
            status = "refused"
        elif slurm is None:
            if not problem:
                problem = _test(run, device)
            elif run.outcome().status == DONE:  # another sweep completed it in the meantime
                problem = ""
            if problem:
                status = "in use" if problem == IN_USE else "broken"
        found = run.outcome()
        row = {
            "recipe": run.recipe.name,
            "seed": run.config.seed,
            "status": status or found.status,
            "paper": next(iter(run.recipe.paper.values()), None),
            "score": next(iter((found.metrics or {}).values()), None),
            "said": problem,
        }
        rows.append(row)
    return rows


def _test(run: Run, device: str) -> str:
    """Test a run if it was not tested yet; return why that failed, or ""."""
    try:
        if run.begun:
            run.check()
        evaluate_best(run.path, device, trust=bool(_trust(run)))
    except Exception as error:  # the other runs go on
        return brief(error) or type(error).__name__
    return ""


def train_command(run: Run, settings: list[str]) -> list[str] | None:
    """The command that trains or resumes a run; None if the run is complete."""
    dlrnn = [sys.executable, "-P", "-m", "dlrnn", "train"]
    if not run.begun:
        seed = str(run.config.seed)
        return [*dlrnn, run.recipe.name, *settings, "--seed", seed, "--out", str(run.path)]
    run.check()
    if RunDirectory.open(run.path).result is not None:
        return None
    return [*dlrnn, "--resume", str(run.path), *_trust(run)]


def _trust(run: Run) -> list[str]:
    """`--trust` for a mixer or a task of the user's own: the user named it for this sweep."""
    return ["--trust"] if needs_trust(run.config) else []


def _run_all(waiting: list[Job], jobs: int) -> dict[Path, str]:
    """Run `jobs` runs at a time. Ctrl-C and SIGTERM stop the runs, each with a checkpoint."""
    running: list[subprocess.Popen[bytes]] = []
    stopped = threading.Event()
    paths = [job.run.path for job in waiting]
    with _terminated_as_interrupted(), ThreadPoolExecutor(jobs) as pool:
        try:
            said = pool.map(run_job, waiting, repeat(running), repeat(stopped))
            return dict(zip(paths, said, strict=True))
        except KeyboardInterrupt:
            stopped.set()
            for process in running.copy():
                process.terminate()
            raise


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Turn the first SIGTERM into KeyboardInterrupt; `timeout` sends a second one, ignored here."""
    if threading.current_thread() is not threading.main_thread():  # only it can set signal handlers
        yield
        return

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_job(job: Job, running: list[subprocess.Popen[bytes]], stopped: threading.Event) -> str:
    """Run a job and return the last line of its output, or "" if it succeeded.

    The job has its own process group, so that Ctrl-C in a terminal reaches it once, through this
    process: a second signal would end the run before its checkpoint.
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
    """Write a whole line at once: several threads write."""
    sys.stderr.write(f"{text}\n")


def _submit(waiting: list[Job], out: Path, partition: str, device: str) -> dict[Path, str]:
    """Submit jobs that train a run and test it."""
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
