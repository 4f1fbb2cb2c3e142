"""The examples of CONTRIBUTING.md work as they stand."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from isolation import isolated

from grpocli import cli
from grpocli.algorithm import advantage, objective
from grpocli_tools.explain import formulas

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```python\n# (grpocli|grpocli_tools|tests)/(\S+)\.py\n(.*?)```", re.DOTALL)
BLOCKS = BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text())
EXAMPLES = {path: code for folder, path, code in BLOCKS if folder == "grpocli"}
(FORMULA,) = (code for folder, _, code in BLOCKS if folder == "grpocli_tools")
TESTS = {path: code for folder, path, code in BLOCKS if folder == "tests"}
ADDED_TO = {"algorithm/advantage": advantage, "algorithm/objective": objective}
COMPOSED = {
    "rewards/contains": ["reward=[exact_match,contains]", "reward.contains.word=so"],
    "tasks/reversal": ["task=reversal", "task.letters=5"],
    "algorithm/advantage": ["algorithm/advantage=rank", "algorithm.advantage.scale=2"],
    "algorithm/objective": ["algorithm/objective=reinforce"],
    "rollout/echo_engine": ["engine=echo"],
}


def run_example(path: str, code: str, folder: Path) -> None:
    """Import an example under the name that it would have in the package; an addition to a file runs in that file."""
    file = folder / f"{path.replace('/', '_')}.py"
    file.write_text(code)
    if path in ADDED_TO:
        exec(compile(code, str(file), "exec"), vars(ADDED_TO[path]))
        return
    name = "grpocli." + path.replace("/", ".")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec
    assert spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


@pytest.fixture
def examples(tmp_path: Path) -> Iterator[None]:
    """Every example is part of the package, until the test ends."""
    with isolated(tmp_path):
        before = {module: dict(vars(module)) for module in ADDED_TO.values()}
        for path, code in EXAMPLES.items():
            run_example(path, code, tmp_path)
        yield
        for module, names in before.items():
            vars(module).clear()
            vars(module).update(names)


@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize("path", TESTS)
def test_the_test_of_an_example_passes(path: str) -> None:
    scope: dict[str, object] = {}
    exec(TESTS[path], scope)
    (test,) = (value for name, value in scope.items() if name.startswith("test_"))
    assert callable(test)
    test()


@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize("path", COMPOSED)
def test_an_example_is_a_choice(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--cfg", "job", *COMPOSED[path]])
    assert ended.value.code == 0
    assert COMPOSED[path][0].rpartition("=")[2].strip("[]").rpartition(",")[2] in capsys.readouterr().out


@pytest.mark.usefixtures("examples")
def test_the_formula_of_an_example_is_shown() -> None:
    exec(FORMULA, {**vars(formulas), "Rank": advantage.Rank})  # type: ignore[attr-defined]
    assert formulas.formula_of(advantage.Rank()).symbols == {"κ": "scale"}  # type: ignore[attr-defined]


def test_every_kind_of_part_has_an_example() -> None:
    assert set(EXAMPLES) == {*COMPOSED, "environments/guess"}
    assert len(TESTS) == 5
