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

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "bench" / "gpu_proof"
OWN = """
import os, signal, time
from pathlib import Path
from experiment import NotRun, at_most, experiment

@experiment("machine", "within its law", at_most("number", 2, "a number"))
def works(setting):
    return {"number": 1}

@experiment("machine", "outside of its law", at_most("number", 2, "a number"))
def differs(setting):
    return {"number": 3}

@experiment("machine", "raises", at_most("number", 2, "a number"))
def raises(setting):
    raise ValueError("the reason")

@experiment("machine", "crashes", at_most("number", 2, "a number"))
def crashes(setting):
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)

@experiment("machine", "hangs, and ignores SIGTERM", at_most("number", 2, "a number"), seconds=1)
def hangs(setting):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)

@experiment("machine", "needs a GPU", at_most("number", 2, "a number"), needs=("gpu",))
def elsewhere(setting):
    return {"number": 1}

@experiment("machine", "finds that it cannot run", at_most("number", 2, "a number"))
def declines(setting):
    raise NotRun("nothing to see here")

@experiment("machine", "takes a while", at_most("number", 2, "a number"), seconds=120)
def lasts(setting):
    Path(setting.folder, "begun").touch()
    time.sleep(float(os.environ.get("LASTS", "0")))
    return {"number": 1}
"""
VERDICTS = {
    "works": "as expected",
    "differs": "not as expected",
    "raises": "failed",
    "crashes": "failed",
    "hangs": "failed",
    "elsewhere": "not run",
    "declines": "not run",
}


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
    command = [sys.executable, str(FOLDER / "gpu_proof.py"), "--add", str(own), "--device", "cpu", "--stages", names]
    folders = ["--out", str(own.parent / "out"), "--work", str(own.parent / "work")]
    env = {**os.environ, **environment}
    return subprocess.Popen([*command, *folders, *options], stdout=subprocess.PIPE, text=True, env=env)


def run(own: Path, names: str, *options: str) -> str:
    """The output of a call that succeeds."""
    with start(own, names, *options) as call:
        out, _ = call.communicate(timeout=300)
    assert call.returncode == 0, out
    return out


def results(own: Path) -> dict[str, Any]:
    file = own.parent / "out" / "results.json"
    found: dict[str, Any] = json.loads(file.read_text())["experiments"] if file.exists() else {}
    return found


@pytest.mark.survival
def test_each_experiment_has_a_result_whatever_it_does(own: Path) -> None:
    run(own, ",".join(VERDICTS))
    found = results(own)
    assert {name: result["verdict"] for name, result in found.items()} == VERDICTS
    assert found["raises"]["reason"] == "ValueError: the reason"
    assert found["crashes"]["reason"] == "it ended with SIGSEGV"
    assert found["crashes"]["log"] == "last words"
    assert found["hangs"]["reason"] == "no result within 3 s"
    assert found["elsewhere"]["reason"] == "needs a GPU"
    assert found["declines"]["reason"] == "nothing to see here"
    assert found["works"]["machine"]["device"] == "CPU"
    page = (own.parent / "out" / "results.md").read_text()
    assert "| `works`: within its law | a number: at most 2 | 1 | as expected |" in page
    assert "small sizes: a test of the script" in page


@pytest.mark.survival
def test_a_call_that_is_killed_leaves_whole_results_and_the_next_goes_on(own: Path) -> None:
    begun = own.parent / "work" / "lasts" / "begun"
    until = time.monotonic() + 120
    with start(own, "works,lasts", LASTS="600") as call:
        while not begun.exists():
            assert call.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        call.send_signal(signal.SIGKILL)
    assert list(results(own)) == ["works"]
    first = results(own)["works"]
    run(own, "works,lasts")
    assert results(own)["lasts"]["verdict"] == "as expected"
    assert results(own)["works"] == first, "it has a result, so it does not run again"


@pytest.mark.survival
def test_an_experiment_that_does_not_fit_is_left_for_the_next_call(own: Path) -> None:
    out = run(own, "works,lasts", "--minutes", "5")
    assert list(results(own)) == ["works"], "the other may take three times 120 s on a CPU"
    assert "5 minutes do not suffice for lasts" in out


def test_an_experiment_sees_as_many_gpus_as_its_laws_are_for(
    proof: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [proof.environment(n)["CUDA_VISIBLE_DEVICES"] for n in (1, 2)] == ["0", "0,1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5,7")
    assert [proof.environment(n)["CUDA_VISIBLE_DEVICES"] for n in (1, 2)] == ["3", "3,GPU-5"]
    assert proof.environment()["CUDA_VISIBLE_DEVICES"] == "3,GPU-5,7"


def test_a_driver_that_hangs_ends_the_call(proof: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr(proof, "FACTS", 0.1)
    with pytest.raises(SystemExit, match=r"python did not say within 0\.1 s what this machine has"):
        proof.machine_facts(str(python))


def test_every_exit_code_has_words(proof: ModuleType) -> None:
    said = [proof._ending(code).removeprefix("it ended with ") for code in (1, 139, 255)]
    assert said == ["exit code 1", "SIGSEGV", "exit code 255"]


def test_laws_check_numbers_between_their_limits(proof: ModuleType) -> None:
    from experiment import at_most, between, true

    law = between("x", 1, 2, "a figure")
    holds = [law.check({"x": x}, "cuda")["holds"] for x in (0.9, 1, 2, 2.1)]
    assert holds == [False, True, True, False]
    assert law.check({}, "cuda")["holds"] is None
    assert law.check({"x": "nan"}, "cuda")["holds"] is None
    assert true("x", "").check({"x": False}, "cuda")["holds"] is False
    assert at_most("x", 1, "", gpu=True).check({"x": 2}, "cpu")["holds"] is None
    assert [one.range for one in (law, at_most("x", 5, ""), true("x", ""))] == ["1 to 2", "at most 5", "yes"]


def test_a_law_without_its_figure_does_not_hold_on_a_gpu(proof: ModuleType) -> None:
    from experiment import Experiment, at_most, checked

    one = Experiment("one", "machine", "", (at_most("x", 1, ""),), lambda setting: {}, (), 1)
    assert checked(one, {}, "cuda")[0] == "not as expected"
    assert checked(one, {}, "cpu")[0] == "as expected"


def test_the_page_is_what_the_results_say(proof: ModuleType) -> None:
    """docs/gpu.md lists every experiment of the script, with the results of docs/gpu.json, if there are any."""
    import page
    from experiment import Results

    proof.load()
    text = page.PAGE.read_text()
    assert page.rendered(text, Results(page.DATA)) == text, "run bench/gpu_proof/gpu_proof.py --render"


def test_results_of_a_cpu_do_not_reach_the_page(proof: ModuleType, tmp_path: Path) -> None:
    import page
    from experiment import EXPECTED, Results, outcome

    found = Results(tmp_path / "results.json")
    found.put("settings", outcome(EXPECTED, {"device": "CPU"}, "cpu"))
    with pytest.raises(SystemExit, match="results of a CPU"):
        page.render([found.path])


def test_texts_of_results_are_data(proof: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import page
    from experiment import EXPECTED, FAILED, Results, outcome

    evil = "\x1b[31mred\n# head\x07<script>alert(1)</script>|[a](javascript:x)\u202e"
    machine = dict.fromkeys(("device", "driver", "torch", "commit"), evil)
    found = Results(tmp_path / "results.json")
    found.put("settings", outcome(EXPECTED, machine, "cuda", measured={"speed": evil}, reason=evil))
    found.put("capabilities", outcome(FAILED, machine, "cuda", reason=evil, log=f"{evil}\n```\n# head"))
    copy = tmp_path / "gpu.md"
    copy.write_text(page.PAGE.read_text())
    monkeypatch.setattr(page, "PAGE", copy)
    monkeypatch.setattr(page, "DATA", tmp_path / "gpu.json")
    page.render([found.path])
    page.write_page(found, tmp_path / "results.md")
    for text in (copy.read_text(), (tmp_path / "results.md").read_text()):
        assert "alert(1)" in text
        assert not [bad for bad in ("\x1b", "\x07", "\u202e", "<script", "[a](", "\n# head", "\n```\n#") if bad in text]


@pytest.mark.parametrize(
    "text",
    [
        '{"half": ',
        "",
        "[]",
        "null",
        '{"schema": 2, "experiments": {}}',
        '{"schema": 1, "experiments": []}',
        '{"schema": 1, "experiments": {"settings": {"verdict": "as expected"}}}',
        "\udcff",
        "[" * 100_000,
    ],
)
def test_damaged_results_are_refused_in_a_sentence(proof: ModuleType, tmp_path: Path, text: str) -> None:
    from experiment import Results

    file = tmp_path / "results.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(SystemExit, match="damaged or of another version"):
        Results(file)


def test_a_size_or_verdict_that_is_none_is_refused(proof: ModuleType, tmp_path: Path) -> None:
    from experiment import EXPECTED, Results, outcome

    for change in ({"size": "small, no"}, {"verdict": "fine"}, {"machine": {"device": 3}}, {"laws": [1]}):
        Results(file := tmp_path / "results.json").put(
            "settings", outcome(EXPECTED, {"device": "GPU"}, "cuda") | change
        )
        with pytest.raises(SystemExit, match=r"'settings' has another|'settings' is no"):
            Results(file)
        file.unlink()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--minutes", "nan"], "--minutes nan: must be above 0"),
        (["--minutes", "0"], "--minutes 0: must be above 0"),
        (["--wheels", "/nope"], "--wheels /nope: there is no such folder"),
        (["--model", "/nope"], "--model /nope: there is no such folder"),
        (["--add", "/nope.py"], "--add /nope.py: there is no such file"),
        (["--render", "/nope.json"], "--render /nope.json: there is no such file"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: list[str], said: str) -> None:
    command = [sys.executable, str(FOLDER / "gpu_proof.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"{said}\n"


def test_one_call_at_a_time_writes_into_a_folder(proof: ModuleType, tmp_path: Path) -> None:
    with proof.held(tmp_path), pytest.raises(SystemExit, match="another call writes there"), proof.held(tmp_path):
        pass
    with proof.held(tmp_path):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="cannot be written to"), proof.held(tmp_path / "file"):
        pass


def test_parts_of_a_file_that_arrive_in_several_calls_are_put_together(proof: ModuleType, tmp_path: Path) -> None:
    import environment
    import wheels

    content = bytes(range(256)) * 100
    whole = tmp_path / "flat" / "name-1.0.tar.xz"
    whole.parent.mkdir()
    whole.write_bytes(content)
    parts = wheels.split(whole, 10_000)
    assert [part.name for part in parts] == [f"name-1.0.tar.xz.part{k}of3" for k in range(3)]
    for number, piece in enumerate(wheels.pieces(parts, 18_000)):
        folder = tmp_path / f"piece{number}"
        folder.mkdir()
        assert sum(path.stat().st_size for path in piece) <= 18_000
        for path in piece:
            path.rename(folder / path.name)
        environment.keep(folder, tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["name-1.0.tar.xz"]
    assert (tmp_path / "kept" / "name-1.0.tar.xz").read_bytes() == content


def test_another_version_of_a_wheel_replaces_the_first(proof: ModuleType, tmp_path: Path) -> None:
    import environment

    for version in ("1.0", "1.1"):
        (tmp_path / version).mkdir()
        for name in ("some", "some_more"):
            (tmp_path / version / f"{name}-{version}-py3-none-any.whl").touch()
    (tmp_path / "1.1" / "some_more-1.1-py3-none-any.whl").unlink()
    for version in ("1.0", "1.1"):
        environment.keep(tmp_path / version, tmp_path / "kept")
    left = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert left == ["some-1.1-py3-none-any.whl", "some_more-1.0-py3-none-any.whl"]


def test_an_installation_that_was_interrupted_goes_on(
    proof: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import environment

    present, installed = {"torch"}, []
    monkeypatch.setattr(environment, "VENV", tmp_path / "venv")
    monkeypatch.setattr(environment, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(environment, "SMOLLM2", tmp_path / "smollm2")
    monkeypatch.setattr(environment, "has", lambda package: package in present)

    def install(python: Path, *words: str) -> None:
        installed.append(python)
        if len(installed) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(environment, "install", install)
    with pytest.raises(KeyboardInterrupt):
        environment.prepared_python(None, None)
    own = tmp_path / "venv" / "bin" / "python"
    for _ in range(2):
        assert environment.prepared_python(None, None) == (str(own), None)
    assert installed == [own, own]
    present.add("grpocli")
    assert environment.prepared_python(None, None) == (sys.executable, None)


def test_a_python_without_torch_is_refused(proof: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import environment

    monkeypatch.setattr(environment, "has", lambda package: False)
    with pytest.raises(SystemExit, match="has no torch; choose one"):
        environment.install_online(tmp_path / "venv")
    assert not (tmp_path / "venv").exists()


def test_packages_that_a_machine_has_in_another_version_are_packed(proof: ModuleType, tmp_path: Path) -> None:
    import wheels

    freeze = tmp_path / "present.txt"
    freeze.write_text("peft==0.1.0\nxxhash==3.5.0\nHydra_Core==1.3.2\ntorch @ file:///somewhere\n")
    assert wheels.present_on(freeze) == {"xxhash", "hydra-core", "torch"}
    assert [one.partition("==")[0] for one in wheels.wanted(("peft", "xxhash", "hydra-core"), {"xxhash"})] == [
        "peft",
        "hydra-core",
    ]


@pytest.mark.survival
def test_what_makes_sense_on_a_cpu_runs_there(tmp_path: Path) -> None:
    """With the smallest sizes: the laws hold that say something about a CPU, and the others are not checked."""
    names = ["settings", "packed_and_padded", "flex_and_sdpa", "skewed_update", "kill_and_resume"]
    own = tmp_path / "own.py"
    own.write_text("")
    run(own, ",".join([*names, "cudnn_plans"]), "--minutes", "60")
    found = results(own)
    assert {name: result["verdict"] for name, result in found.items()} == {
        **dict.fromkeys(names, "as expected"),
        "cudnn_plans": "not run",
    }
    holds = {law["figure"]: law["holds"] for law in found["skewed_update"]["laws"]}
    assert holds == {"times_as_fast": None, "gradient_apart": True}
