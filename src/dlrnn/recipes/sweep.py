"""Many runs, each a process of its own: locally a few at a time, or as Slurm jobs."""

import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from dlrnn.recipes.catalogue import RECIPES, advice
from dlrnn.recipes.outcome import check_folder, outcome, run_config, run_path, score_best
from dlrnn.recipes.recipe import Recipe
from dlrnn.recipes.scale import Scale
from dlrnn.train.folder import CONFIG, RunFolder


class Job(NamedTuple):
    """One run that is not complete."""

    recipe: Recipe
    seed: int
    path: Path
    command: list[str]


def chosen(patterns: Iterable[str]) -> list[Recipe]:
    """Recipes by name or pattern, `table1/*/dlr-1`, each once."""
    found: dict[str, Recipe] = {}
    for pattern in patterns:
        names = [name for name in RECIPES if fnmatch(name, pattern)]
        if not names:
            raise ValueError(f"there is no recipe {pattern!r}: {_advice(pattern)}")
        found |= {name: RECIPES[name] for name in names}
    return list(found.values())


def _advice(pattern: str) -> str:
    """Of all names, and of their patterns with a star for one part or two."""
    known: dict[str, None] = {}
    for name in RECIPES:
        table, task, model = name.split("/")
        ways = (f"{table}/*", f"{table}/{task}/*", f"{table}/*/{model}", f"*/{task}/*")
        known |= dict.fromkeys((*ways, f"*/{model}", name))
    return advice(pattern, list(known))


def sweep(
    patterns: Sequence[str],
    *,
    seeds: Iterable[int] = (0,),
    jobs: int = 1,
    slurm: str | None = None,
    scale: Scale = "full",
    out: str | Path = "runs",
    device: str = "cpu",
    until_plain: bool = False,
) -> list[dict[str, Any]]:
    """Run every recipe with every seed; what is complete is left alone, what was stopped goes on.

    A run that breaks does not stop the others; its last words are in its row and its log. With a
    Slurm partition the jobs are submitted, and a later sweep tells how they went.
    """
    wanted = [(recipe, seed) for recipe in chosen(patterns) for seed in seeds]
    where = ["--device", device, *(["--until-plain"] if until_plain else [])]
    waiting: list[Job] = []
    said: dict[Path, str] = {}
    for recipe, seed in wanted:
        path = run_path(recipe, out, scale, seed)
        try:
            if job := _job(recipe, seed, path, scale, where):
                waiting.append(job)
        except ValueError as error:  # this folder, not the others
            said[path] = str(error)
    if slurm is not None:
        said |= _submit(waiting, Path(out), slurm, device)
    else:
        with ThreadPoolExecutor(jobs) as pool:
            said |= dict(zip((job.path for job in waiting), pool.map(_run, waiting), strict=True))
    rows = []
    for recipe, seed in wanted:
        path = run_path(recipe, out, scale, seed)
        broken = said.get(path, "")
        if not broken and slurm is None:
            try:
                score_best(path, device)
            except ValueError as error:  # this run, not the others
                broken = str(error)
        found = outcome(recipe, out, scale, seed)
        status = "broken" if broken and slurm is None else found.status
        scores = found.scores or {}
        row = {"recipe": recipe.name, "seed": seed, "status": status}
        rows.append({**row, "score": next(iter(scores.values()), None), "said": broken})
    return rows


def _job(recipe: Recipe, seed: int, path: Path, scale: Scale, where: list[str]) -> Job | None:
    own = [sys.executable, "-m", "dlrnn", "train"]
    if not (path / CONFIG).is_file():
        new = [recipe.name, "--scale", scale, "--seed", str(seed), "--out", str(path)]
        return Job(recipe, seed, path, [*own, *new, *where])
    check_folder(path, run_config(recipe, scale, seed))
    if RunFolder.open(path).result is not None:
        return None
    return Job(recipe, seed, path, [*own, "--resume", str(path), *where])


def _run(job: Job) -> str:
    """The last line that was said, nothing if all went well."""
    log = job.path.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    name = f"{job.recipe.name}, seed {job.seed}"
    print(f"{name}: begins, {log}", file=sys.stderr)
    with open(log, "a") as file:
        done = subprocess.run(job.command, stdout=file, stderr=file, check=False)
    ended = {0: "done", 130: "stopped"}.get(done.returncode, "broken")
    print(f"{name}: {ended}", file=sys.stderr)
    if done.returncode == 0:
        return ""
    said = log.read_text().strip().splitlines()
    return said[-1] if said else f"exit status {done.returncode}"


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
        test = [sys.executable, "-m", "dlrnn", "eval", str(job.path), "--device", device]
        both = f"{shlex.join(job.command)} && {shlex.join(test)}"
        handle = executor.submit(submitit.helpers.CommandFunction(["bash", "-c", both]))
        submitted[job.path] = f"submitted as {handle.job_id}"
    return submitted
