"""Everything that has to be seen once on a GPU: `python bench/gpu_proof/gpu_proof.py [OPTION ...]`.

One process imports torch and grpocli, and forks each experiment, with a deadline; one that crashes or hangs is a result
and does not end the others. results.json (its schema is in experiment.py) and results.md in the folder --out are
replaced after each. Run it again, and it goes on with the experiments that have no result yet. It ends by itself after
--seconds. Without a GPU it runs what makes sense on a CPU, at small sizes, which tests the script; nothing of that is a
figure of a GPU.

    gpu_proof.py --only kernels,A,B+C      stages, or experiments by their names; + runs them at the same time
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import json
import math
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import page
from carry import pack, prepare
from experiment import (
    EXPERIMENTS,
    FAILED,
    FIGURES,
    NOT_RUN,
    STAGES,
    Experiment,
    Results,
    Setting,
    checked,
    in_order,
    outcome,
    write,
)
from forks import GRACE, Guarded, child, forked
from machine import CARRY, ROOT, facts

GROUPS = ("kernels", "transfers", "updates", "runs", "serving")
PLAN = (
    "beside_trl,model_flops,float16_update,gap_in_16_bits,compiled_layers,default_run,attention_choices,step_profile,"
    "memory_against_plan+host_synchronizations,lora_adapters,kill_and_resume,"
    "flex_and_sdpa,capabilities,head_kernels,float32_head,cudnn_plans,"
    "settings+equal_to_the_cpu+packed_and_padded+ipc_handles+fsdp2_on_one_process+bucket_race+"
    "sent_after_a_change,lost_weight,killed_server,default_vllm,colocated_run,sync_by_ipc,ipc_of_half_a_billion,"
    "lora_colocated,sync_by_shm,cuda_graphs"
)
"""First what has not been seen. Those joined by + are not about times, and run together. Others follow."""
AT_ONCE = 5
SECONDS = {"cuda": 500.0, "cpu": 3600.0}
"""Of a call: machines with a GPU may end a command after ten minutes; a CPU takes longer."""
LEAST = 20.0  # seconds that must be left for an experiment to begin
RESERVE = 6.0  # seconds for the end of a call
FACTS = 180.0  # seconds in which the GPU's driver must answer
LOG_LINES, LOG_CHARACTERS = 40, 6000
RESULT, LOG = "result.json", "output.log"
"""In an experiment's folder."""
IMPORTED = (
    *("torch", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama", "accelerate", "datasets"),
    *("transformers.models.qwen2.modeling_qwen2", "transformers.integrations.sdpa_attention", "safetensors.torch"),
    *(
        "pyarrow.parquet",
        "grpocli.cli.train",
        "grpocli.launch.run",
        "grpocli.training.build_trainer",
        "grpocli_tools.plan.plan",
    ),
    *("grpocli.launch.trainer_process", "grpocli.distributed.fsdp2", "grpocli.rollout.vllm.engine", "grpocli_side"),
    "peft",  # after grpocli, which quiets bitsandbytes
)
"""What forks need. Nothing here may touch the GPU."""
PACKED = (".log", ".json", ".jsonl", ".md", ".txt", ".yaml")


def load(files: Sequence[Path] = ()) -> None:
    """Import the files of experiments, which register them. files: further ones."""
    # this Python may lack grpocli, which it needs for its own process only
    sys.path += [path for path in (str(ROOT / "bench" / "side_by_side"), str(ROOT)) if path not in sys.path]
    for name in GROUPS:
        importlib.import_module(f"{name}_experiments")
    for file in files:
        runpy.run_path(str(file))


def chosen(names: str) -> list[list[Experiment]]:
    """The experiments of `A,B+C`, joined by + in one group; all for "". Raises SystemExit for unknown names."""
    groups: list[list[Experiment]] = []
    parts, known = [part.split("+") for part in (names or PLAN).split(",") if part], [*STAGES, *EXPERIMENTS]
    unknown = [name for words in parts for name in words if name not in known]
    if unknown or not parts:
        raise SystemExit(f"--only {','.join(unknown) or names}: there are {', '.join(known)}")
    for words in parts:
        found = [one for name in words for one in in_order() if name in (one.name, one.stage)]
        groups += [found] if len(words) > 1 else [[one] for one in found]
    planned = [one for group in groups for one in group]
    return groups if names else [*groups, *([one] for one in in_order() if one not in planned)]


@dataclass
class Running:
    """An experiment under way. end: the time at which it is ended. cut: that has been asked for."""

    one: Experiment
    setting: Setting
    guard: Guarded
    began: float
    end: float
    cut: bool = False


class Runner:
    """Runs experiments. until: the time at which this call must end. note: writes a line."""

    def __init__(
        self, machine: dict[str, str], setting: Setting, results: Results, until: float, note: Callable[[str], None]
    ) -> None:
        self.machine, self.setting, self.results, self.until, self.note = machine, setting, results, until, note
        self.running: list[Running] = []
        self.left: list[str] = []

    def run(self, groups: Sequence[Sequence[Experiment]], has: dict[str, bool]) -> list[str]:
        """Run those without a result for which there is time; return the names of the others. has: of the machine."""
        try:
            for group in groups:
                waiting = [one for one in group if not self.results.has(one.name)]
                while waiting or self.running:
                    while waiting and len(self.running) < AT_ONCE:
                        self._begin(waiting.pop(0), has)
                    self.running = [run for run in self.running if not self._collected(run)]
                    time.sleep(0.02)
        finally:
            for run in self.running:
                run.guard.end()
        return self.left

    def _begin(self, one: Experiment, has: dict[str, bool]) -> None:
        now = time.monotonic()
        if missing := one.missing(has):
            self._put(one, 0.0, outcome(NOT_RUN, reason=missing))
        elif now + LEAST > self.until:
            self.left.append(one.name)
        else:
            setting = replace(self.setting, folder=self.setting.folder / one.name)
            shutil.rmtree(setting.folder, ignore_errors=True)
            setting.folder.mkdir(exist_ok=True)
            with (setting.folder / LOG).open("wb") as log:
                guard = Guarded(partial(run_one, one, setting), log.fileno())
            end = min(now + one.limit(setting.device), self.until - RESERVE)
            self.running.append(Running(one, setting, guard, now, end))

    def _collected(self, run: Running) -> bool:
        """Whether an experiment has ended, and its result is written."""
        code, now = run.guard.poll(), time.monotonic()
        if code is None and now < run.end:
            return False
        if code is None and not run.cut:
            run.guard.end()
            run.cut, run.end = True, now + 2 * GRACE  # even after SIGKILL it may wait for the GPU's driver
            return False
        folder, name, seconds = run.setting.folder, run.one.name, now - run.began
        log = (folder / LOG).read_text(errors="replace")
        with (self.results.path.parent / "logs.txt").open("a") as file:
            file.write(f"\n===== {name} ({seconds:.1f} s)\n{log[-LOG_CHARACTERS:]}\n")
        result = read(folder / RESULT) or outcome(FAILED, reason=ending(code or 0))
        if result["verdict"] == FAILED:
            if run.cut and run.began + run.one.limit(run.setting.device) > self.until - RESERVE:
                self.note(f"{name} was cut by the end of this call: it has no result")
                self.left.append(name)
                return True
            if run.cut:  # which is the reason, also if it raised when it was ended
                result["reason"] = f"no result within {run.one.limit(run.setting.device):g} s"
            last = "\n".join(log.splitlines()[-LOG_LINES:])
            result = outcome(FAILED, reason=result["reason"], measured=read(folder / FIGURES), log=last)
        self._put(run.one, seconds, result)
        return True

    def _put(self, one: Experiment, seconds: float, result: dict[str, Any]) -> None:
        self.results.put(one.name, self.machine, self.setting.device, seconds, result)
        page.write_page(self.results, self.results.path.with_suffix(".md"))
        pack_files(self.setting.folder, self.results.path.parent / "files.tar.xz")  # the call may be killed
        reason = f": {result['reason']}" if result["reason"] else ""
        self.note(f"{seconds:6.1f} s  {one.stage}/{one.name}: {result['verdict']}{reason}")


def read(file: Path) -> dict[str, Any]:
    """What `write` has written; {} if nothing."""
    return dict(json.loads(file.read_text())) if file.exists() else {}


def ending(code: int) -> str:
    """Why a process ended without a result."""
    names = {128 + one: one.name for one in signal.Signals}
    return f"it ended with {names.get(code, f'exit code {code}')}" if code else "it left no result"


def run_one(one: Experiment, setting: Setting) -> None:
    """The fork of one experiment: run it and write its result as a whole."""
    # its laws are for that number of GPUs
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[: 2 if "two gpus" in one.needs else 1]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(shown)
    try:
        measured = one.run(setting)
        verdict, laws = checked(one, measured, setting.device)
        unchecked = setting.small and all(law["holds"] is None for law in laws)
        reason = "none of its laws is about a CPU" if unchecked else ""
        result = outcome(verdict, reason=reason, measured=measured, laws=laws)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (a failure is a result)
        traceback.print_exc()
        result = outcome(FAILED, reason=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    write(setting.folder / RESULT, result)


def machine_facts() -> tuple[dict[str, str], dict[str, bool]]:
    """What `facts` finds, in a fork."""
    code, out, err = forked(lambda: print(json.dumps(facts())), FACTS)
    if code is None:
        raise SystemExit(f"{sys.executable} did not say within {FACTS:g} s what this machine has: does nvidia-smi?")
    if code:
        raise SystemExit(f"a fork of {sys.executable} cannot run the experiments:\n{err[-2000:]}")
    machine, has = json.loads(out.splitlines()[-1])
    return machine, has


def make_models(work: Path, names: Sequence[str]) -> None:
    """Make the models of updates on the CPU, while experiments without them run."""
    from updates_experiments import made_model

    os.nice(5)
    for name in names:
        made_model(name, work)


def read_ahead() -> None:
    """Read the files of large packages, many at a time: first imports wait for a disk."""
    from concurrent.futures import ThreadPoolExecutor
    from sysconfig import get_path

    folders = [Path(get_path("purelib"), name) for name in ("torch", "transformers", "accelerate", "triton", "pyarrow")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".pyc", ".so")]
    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(lambda path: path.stat().st_size < 4e8 and len(path.read_bytes()), files):
            continue


def pack_files(work: Path, archive: Path) -> None:
    """Logs, metrics and configs of runs, for reading elsewhere."""
    found = [path for path in sorted(work.rglob("*")) if path.suffix in PACKED and "tokenizer" not in path.name]
    of_runs = [path for path in found if path.relative_to(work).parts[0] != "site" and path.is_file()]
    pack(archive, work, [path for path in of_runs if path.stat().st_size < 2e6])


def listed() -> str:
    """The stages with their experiments and deadlines."""
    lines = []
    for stage, about in STAGES.items():
        minutes = sum(one.seconds for one in in_order() if one.stage == stage) / 60
        lines.append(f"{stage}: {about} (at most {minutes:.0f} min)")
        lines += [f"  {one.name:24} {one.question}" for one in in_order() if one.stage == stage]
    return "\n".join(lines)


def existing(text: str) -> Path:
    """A file or folder that an option names."""
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(f"{text}: there is no such file")
    return Path(text).resolve()


def duration(text: str) -> float:
    """A finite time above 0."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0, and finite")
    return float(text)


def arguments() -> argparse.Namespace:
    out = Path(os.environ.get("OUT") or ROOT / ".gpu-proof")
    work = Path(tempfile.gettempdir(), f"gpu-proof-{os.getuid()}") if os.environ.get("OUT") else None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="A,B+C", help="stages or experiments; all by default")
    parser.add_argument("--again", action="store_true", help="run them although they have results")
    parser.add_argument("--seconds", type=duration, help="after which this call ends by itself (500; on a CPU 3600)")
    parser.add_argument("--out", type=Path, default=out, metavar="FOLDER", help="for small files of results ($OUT)")
    parser.add_argument("--work", type=Path, default=work, metavar="FOLDER", help="for models and runs (below --out)")
    parser.add_argument("--resume", type=existing, metavar="FILE", help="earlier results, if --out has none")
    parser.add_argument("--model", type=existing, metavar="FOLDER", help="a pretrained model")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--list", action="store_true", help="print the stages and experiments")
    parser.add_argument("--render", nargs="*", type=existing, metavar="FILE", help="add results to docs/evidence/")
    parser.add_argument("--add", action="append", default=[], type=existing, metavar="FILE.py", help="experiments")
    return parser.parse_args()


@contextmanager
def held(option: str, folder: Path, mode: int = 0o777) -> Iterator[None]:
    """A block in which no other call writes into a folder. Raises SystemExit if one does, or nothing can be written."""
    try:
        folder.mkdir(mode, parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a")
    except OSError as error:
        raise SystemExit(f"{option} {folder}: {error.strerror}: choose another {option}") from error
    until = time.monotonic() + 2 * GRACE  # experiments of a call that was killed hold it until their guards end them
    with lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise SystemExit(f"{option} {folder}: another call writes there: choose another {option}") from None
                time.sleep(0.1)
        yield


def main() -> None:
    began, args = time.monotonic(), arguments()
    if args.render is not None or args.list:
        load(args.add)
        return print(listed()) if args.list else page.render(args.render)
    for number in (signal.SIGTERM, signal.SIGINT):  # experiments under way stay without a result
        signal.signal(number, lambda number, _: sys.exit(f"stopped by signal {number}: run it again to go on"))
    work = (args.work or args.out / "work").resolve()
    with held("--out", args.out), held("--work", work, 0o700):
        earlier = args.resume or CARRY / "results.json"
        results = Results(args.out / "results.json")
        if earlier.exists() and not results.path.exists():
            results.experiments = Results(earlier).experiments
            results.save()
        run(args, work, results, began)


def run(args: argparse.Namespace, work: Path, results: Results, began: float) -> None:
    """Prepare this process, and run the experiments that are chosen."""

    def note(text: str) -> None:
        line = f"[{time.monotonic() - began:6.1f} s] {text}"
        print(line, flush=True)
        with (args.out / "log.txt").open("a") as file:
            file.write(f"{line}\n")

    background = prepare(work)
    helpers = [child(read_ahead, 1, 2)]
    load(args.add)
    groups = chosen(args.only)  # before the imports, which take most of a minute on some machines
    wanted = [one for group in groups for one in group]
    note(f"{sys.executable} imports torch and grpocli; work in {work}")
    for name in IMPORTED:
        importlib.import_module(name)
    for one in wanted if args.again else ():
        results.experiments.pop(one.name, None)
    if any(os.waitpid(pid, 0)[1] for pid in background):
        note(f"an archive of {CARRY} cannot be unpacked, see above: experiments that need its packages do not run")
    machine, has = machine_facts()
    device = ("cuda" if has["gpu"] else "cpu") if args.device == "auto" else args.device
    if device == "cuda" and not has["gpu"]:
        raise SystemExit("--device cuda: torch finds no GPU")
    has["model"] = bool(args.model)
    if device == "cpu":
        has |= {"gpu": False, "two gpus": False}
    elif updates := [one.name for one in wanted if one.stage in ("updates", "peer") and not results.has(one.name)]:
        # not 6 GB that nothing reads: runs wait for the same disk
        names = ["qwen2.5-0.5b", *(["qwen2.5-1.5b"] if "model_flops" in updates else [])]
        helpers.append(child(partial(make_models, work, names), 1, 2))
    note(", ".join(f"{key} {value}" for key, value in machine.items() if value))
    before = {results.experiments[one.name]["machine"].get("commit") for one in wanted if results.has(one.name)}
    if others := before - {machine["commit"]}:
        note(f"{args.out} has results of commit {', '.join(map(repr, others))}, which stay: --again runs them anew")
    seconds = args.seconds or SECONDS[device]
    setting = Setting(device, args.model and str(args.model), work)
    try:
        left = Runner(machine, setting, results, began + seconds, note).run(groups, has)
    finally:
        for pid in helpers:
            os.kill(pid, signal.SIGKILL)
        pack_files(work, args.out / "files.tar.xz")
    if left:
        note(f"{seconds:g} s do not suffice for {', '.join(left)}: run it again to go on")
    page.write_page(results, args.out / "results.md")  # a call that had nothing to run has not written it
    note(f"all results so far: {args.out / 'results.md'}")


if __name__ == "__main__":
    main()
