"""`make gpu-proof`: every experiment ends with a result, whatever it does, and the page says what the results say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "bench" / "gpu_proof"
OWN = """
import os, signal, time
from pathlib import Path
from experiment import at_most, experiment

@experiment("machine", "within its law", at_most("number", 2, "a number"))
def works(setting):
    return {"number": 1}

@experiment("machine", "outside of its law", at_most("number", 2, "a number"))
def differs(setting):
    return {"number": 3}

@experiment("machine", "raises", at_most("number", 2, "a number"))
def raises(setting):
    setting.save({"one side": 5})
    raise ValueError("the reason")

@experiment("machine", "crashes", at_most("number", 2, "a number"))
def crashes(setting):
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)

@experiment("machine", "hangs, and ignores SIGTERM", at_most("number", 2, "a number"), seconds=1)
def hangs(setting):
    setting.save({"one side": 6})
    os.spawnlp(os.P_NOWAIT, "setsid", "setsid", "sleep", "600.125")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)

@experiment("machine", "needs a GPU", at_most("number", 2, "a number"), needs=("gpu",))
def elsewhere(setting):
    return {"number": 1}

@experiment("machine", "takes a while", at_most("number", 2, "a number"), seconds=120)
def lasts(setting):
    Path(setting.folder, "begun").touch()
    time.sleep(float(os.environ.get("LASTS", "0")))
    return {"number": 1}
"""
VERDICTS = {"works": "as expected", "differs": "not as expected", "elsewhere": "not run"}
VERDICTS |= dict.fromkeys(("raises", "crashes", "hangs"), "failed")


@pytest.fixture(scope="module")
def proof() -> Iterator[ModuleType]:
    """The script as a module, without its experiments."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    import gpu_proof

    yield gpu_proof
    sys.path[:] = [path for path in sys.path if not path.startswith(str(ROOT / "bench"))]
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "bench")):
            del sys.modules[name]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


def start(own: Path, names: str, *options: str, **environment: str) -> subprocess.Popen[str]:
    """Start the script on a CPU, with the experiments of a file."""
    command = [sys.executable, str(FOLDER / "gpu_proof.py"), "--add", str(own), "--device", "cpu", "--only", names]
    env = {**os.environ, "OUT": str(own.parent / "out"), "TMPDIR": str(own.parent), **environment}
    return subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def run(own: Path, names: str, *options: str) -> str:
    """The output of a call that succeeds."""
    with start(own, names, *options) as call:
        out, err = call.communicate(timeout=600)
    assert call.returncode == 0, err
    return out


def results(own: Path) -> dict[str, Any]:
    return json.loads((own.parent / "out" / "results.json").read_text())["experiments"]


@pytest.mark.processes
@pytest.mark.survival
def test_each_experiment_has_a_result_whatever_it_does(own: Path) -> None:
    run(own, "+".join(VERDICTS))
    found = results(own)
    assert {name: result["verdict"] for name, result in found.items()} == VERDICTS
    assert found["raises"]["reason"] == "ValueError: the reason"
    assert found["raises"]["measured"] == {"one side": 5}
    assert found["crashes"]["reason"] == "it ended with SIGSEGV"
    assert found["crashes"]["log"] == "last words"
    assert found["hangs"]["reason"] == "no result within 3 s"
    assert found["hangs"]["measured"] == {"one side": 6}
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert "sleep 600.125" not in running, "what an experiment started ends with it, in a session of its own, too"
    assert found["elsewhere"]["reason"] == "needs a GPU"
    assert found["works"]["machine"]["device"] == "CPU"
    page = (own.parent / "out" / "results.md").read_text()
    assert "| `works`: within its law | a number: at most 2 | 1 | as expected |" in page
    assert "small sizes: a test of the script" in page
    kept = {path.name for path in (own.parent / "out").iterdir()}
    assert kept == {".lock", "results.json", "results.md", "log.txt", "logs.txt", "files.tar.xz"}, "all of them small"


@pytest.mark.processes
@pytest.mark.survival
def test_a_call_that_is_killed_leaves_whole_results_and_the_next_goes_on(own: Path) -> None:
    begun = own.parent / f"gpu-proof-{os.getuid()}" / "lasts" / "begun"
    until = time.monotonic() + 120
    with start(own, "works,lasts", LASTS="600") as call:
        while not begun.exists():
            assert call.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        call.send_signal(signal.SIGKILL)
    first = results(own)
    assert list(first) == ["works"]
    file = own.parent / "earlier.json"
    (own.parent / "out" / "results.json").rename(file)
    run(own, "works,lasts", "--resume", str(file))
    assert results(own)["lasts"]["verdict"] == "as expected"
    assert results(own)["works"] == first["works"], "it has a result, so it does not run again"


def test_the_page_is_what_the_results_say(proof: ModuleType) -> None:
    """docs/evidence/gpu.md lists every experiment of the script, with the results of gpu.json, if there are any."""
    import page
    from experiment import Results

    proof.load()
    text = page.PAGE.read_text()
    assert page.rendered(text, Results(page.DATA)) == text, "run bench/gpu_proof/gpu_proof.py --render"


@pytest.mark.processes
@pytest.mark.survival
def test_what_makes_sense_on_a_cpu_runs_there(tmp_path: Path) -> None:
    """With the smallest sizes: the laws hold that say something about a CPU, and the others are not checked."""
    names = ["settings", "packed_and_padded", "flex_and_sdpa", "attention_choices", "kill_and_resume"]
    own = tmp_path / "own.py"
    own.write_text("")
    run(own, ",".join([*names, "cudnn_plans"]))
    found = results(own)
    verdicts = {name: result["verdict"] for name, result in found.items()}
    assert verdicts == dict.fromkeys(names, "as expected") | {"cudnn_plans": "not run"}
    holds = {law["figure"]: law["holds"] for law in found["attention_choices"]["laws"]}
    checked = dict.fromkeys(("gradient_apart_skewed", "gradient_apart_prompts"), True)
    assert holds == checked | dict.fromkeys(("time_skewed", "time_prompts"))


def test_results_of_a_cpu_do_not_reach_the_page(proof: ModuleType, tmp_path: Path) -> None:
    import page
    from experiment import EXPECTED, Results, outcome

    found = Results(tmp_path / "results.json")
    found.put("settings", {"device": "CPU"}, "cuda", 1.0, outcome(EXPECTED))
    with pytest.raises(SystemExit, match="results of a CPU"):
        page.render([found.path])
