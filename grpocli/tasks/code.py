"""task=code: programming problems with tests, in the columns of MBPP or HumanEval, or in those of grpocli."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpocli.config.parts import part
from grpocli.errors import ConfigError
from grpocli.tasks.jsonl import Jsonl

if TYPE_CHECKING:
    from grpocli.tasks.loading import Row


@part("task", "code")
class CodeProblems(Jsonl):
    """Programming problems with the column `tests` for reward=[code].

    Further columns: `setup` (code before the tests), `before` (code before the program), `answer` (a right program).
    Rows in the form of MBPP (`test_list`, `code`; arXiv 2108.07732) and of HumanEval (`test`, `entry_point`,
    `canonical_solution`; arXiv 2107.03374) are converted to these columns.
    """

    format: str = "chat"

    def convert(self, row: Row, where: str) -> Row:
        """The row with the column `tests`. Raises ConfigError if it has none."""
        if tests := row.get("test_list"):
            setup = [*(row.get("test_imports") or []), row.get("test_setup_code") or ""]
            shown = tests if isinstance(tests, str) else "\n".join(tests)  # one text, for the prompt
            return {**row, "tests": tests, "setup": "\n".join(setup), "test_list": shown}
        if tests := row.get("test"):
            return {**row, "tests": tests, "before": (row.get("entry_point") and row.get("prompt")) or ""}
        if not row.get("tests"):
            problem = f"{where} has no tests: needs the column tests, test_list or test"
            raise ConfigError(problem, key="task")
        return row
