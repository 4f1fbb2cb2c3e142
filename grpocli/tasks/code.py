"""task=code: programming problems with tests, in the columns of MBPP or HumanEval, or in those of grpocli."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from grpocli.config.parts import part
from grpocli.errors import ConfigError
from grpocli.tasks.jsonl import Jsonl

if TYPE_CHECKING:
    from grpocli.tasks.json_rows import Row


@part("task", "code")
class CodeProblems(Jsonl):
    """Programming problems with the column `tests`, a text or a list of texts, for reward=[code].

    Further columns: `setup` (code before the tests), `before` (code before the program), `answer` (a right program).
    Rows in the form of MBPP (`test_list`, `code`; arXiv 2108.07732) and of HumanEval (`test`, `entry_point`,
    `canonical_solution`; arXiv 2107.03374) are converted to these columns.
    """

    format: str = "chat"

    def convert(self, row: Row, where: str) -> Row:
        """The row with the column `tests`. Raises ConfigError if it has none."""
        for columns, converted in STYLES.items():
            if all(row.get(column) for column in columns):
                return {**row, **converted(row)}
        if not row.get("tests"):
            problem = f"{where} has no tests: needs the column tests, test_list, or test and entry_point"
            raise ConfigError(problem, key="task")
        return row


def _mbpp(row: Row) -> dict[str, Any]:
    imports = row.get("test_imports") or []
    return {
        "tests": list(row["test_list"]),
        "setup": "\n".join([*imports, row.get("test_setup_code") or ""]),
        "test_list": "\n".join(row["test_list"]),  # one text, for the prompt
    }


def _human_eval(row: Row) -> dict[str, Any]:
    return {"tests": [f"{row['test']}\n\ncheck({row['entry_point']})\n"], "before": row["prompt"]}


STYLES: dict[tuple[str, ...], Callable[[Row], dict[str, Any]]] = {
    ("test_list",): _mbpp,
    ("test", "entry_point"): _human_eval,
}
"""{columns that identify a format: its converter}."""
