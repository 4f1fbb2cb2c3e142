"""A file with the reward and dataset functions of a script, and what they need: the script's own text, never run here.

Importing a training script would start its training. Functions, classes, imports and constants move; a value that
training code makes, such as a tokenizer, stays behind and is named.
"""

from __future__ import annotations

import ast
import builtins
import symtable
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

from grpocli_tools.porting.source import Data, DatasetStep, RewardCall, ScriptSource, Unread
from grpocli_tools.porting.syntax import Function, parsed, script_text

TRAINING = (
    *("GRPOTrainer", "GRPOConfig", "LoraConfig", "load_dataset", "from_pretrained", "get_peft_model", "train"),
    *("parse_args", "parse_args_and_config", "login", "init", "TrlParser", "ArgumentParser", "LLM", "exit"),
)
"""Calls that load, train or read a command line."""
PROCESSOR = "to_example"
STEPS = ("map", "rename_column", "rename_columns", "remove_columns", "select_columns")
"""Methods of a dataset that a processor repeats for one row."""
Chain = tuple[Function, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """A statement that binds names. chain: the functions around it, outermost first."""

    statement: ast.stmt
    names: frozenset[str]
    chain: Chain


@dataclass(slots=True)
class Functions:
    """The text of the file, and what could not be moved."""

    text: str = ""
    left: list[str] = field(default_factory=list)


def functions_file(source: ScriptSource) -> Functions:
    """The functions of a script's rewards and dataset steps; without text if there are none."""
    local = [one for one in source.rewards if isinstance(one, RewardCall) and not one.module and not one.path]
    steps = carried_steps(source.data)
    if not local and not steps:
        return Functions()
    mover = Mover(parsed(source.file), script_text(source.file))
    tail = [f"{one.name} = {one.code}" for one in local if one.code]
    for one in local:
        mover.need(names_of(one.code) if one.code else {one.name}, one.line)
    for step in steps:
        mover.need(names_of(step.function) if step.function else (), step.line)
    if steps:
        tail.append(processor(steps))
    head = f'"""The reward and dataset functions of {source.file.name}, moved by grpocli from-trl."""'
    return Functions("\n\n\n".join([head, *mover.texts(), *tail]) + "\n", mover.left)


def carried_steps(data: Data | Unread | None) -> list[DatasetStep]:
    """The dataset steps that a processor repeats; none unless the dataset is read."""
    return [step for step in data.steps if step.method in STEPS and line_of(step)] if isinstance(data, Data) else []


def processor(steps: Iterable[DatasetStep]) -> str:
    """The function for `task.processor`: the steps on one row, with `answer` from TRL's column `solution`."""
    body = "\n".join(f"    {line_of(step)}" for step in steps)
    doc = '"""A row of the dataset after the steps of the script."""'
    answer = '    return {"answer": row["solution"], **row} if "solution" in row else row'
    return f"def {PROCESSOR}(row):\n    {doc}\n{body}\n{answer}\n".rstrip()


def line_of(step: DatasetStep) -> str:
    """A step as a statement on `row`; "" if one row does not suffice, as with `batched=True`."""
    call = step.function if step.function.isidentifier() else f"({step.function})"
    match step.method, step.arguments:
        case "map", _ if step.plain and step.function:
            dropped = step.keywords.get("remove_columns")
            if isinstance(dropped, Unread):  # dataset.column_names: every column
                return f"row = dict({call}(row))"
            columns = [dropped] if isinstance(dropped, str) else list(dropped or [])
            kept = f"{{k: v for k, v in row.items() if k not in {columns!r}}}" if columns else "row"
            return f"row = {{**{kept}, **{call}(row)}}"
        case "rename_column", (str(old), str(new)):
            return f"row = {{({new!r} if k == {old!r} else k): v for k, v in row.items()}}"
        case "rename_columns", (dict(names),):
            return f"row = {{{names!r}.get(k, k): v for k, v in row.items()}}"
        case "remove_columns", (str() | list() as columns,):
            return f"row = {{k: v for k, v in row.items() if k not in {_listed(columns)!r}}}"
        case "select_columns", (str() | list() as columns,):
            return f"row = {{k: row[k] for k in {_listed(columns)!r}}}"
    return ""


def _listed(columns: str | list[str]) -> list[str]:
    return [columns] if isinstance(columns, str) else columns


def names_of(code: str) -> set[str]:
    """The names that an expression reads from outside."""
    return free_names(ast.parse(code, mode="eval"))


def free_names(node: ast.AST) -> set[str]:
    """Names that code reads from outside, as the compiler sees them."""

    def read(table: symtable.SymbolTable, outermost: bool = False) -> Iterator[str]:
        yield from (
            one.get_name() for one in table.get_symbols() if one.is_referenced() and (outermost or one.is_global())
        )
        for inner in table.get_children():
            yield from read(inner)

    return set(read(symtable.symtable(ast.unparse(node), "", "exec"), outermost=True))


class Mover:
    """Finds the statements that names need."""

    def __init__(self, tree: ast.Module, text: str) -> None:
        self.lines = text.splitlines()
        self.units = list(_units(tree.body, ()))
        self.functions = [(unit.statement, unit.chain) for unit in self.units if isinstance(unit.statement, Function)]
        future = [one for one in self.units if getattr(one.statement, "module", "") == "__future__"]
        self.chosen = {id(unit.statement): unit for unit in future}
        self.left: list[str] = []

    def need(self, names: Iterable[str], line: int) -> None:
        """Choose the statements for names that are read at a line."""
        around = [
            (*chain, function)
            for function, chain in self.functions
            if isinstance(function, Function) and function.lineno <= line <= (function.end_lineno or 0)
        ]
        chain = max(around, key=len, default=())
        for name in sorted(names):
            self._need(name, chain)

    def _need(self, name: str, chain: Chain) -> None:
        for depth in range(len(chain), -1, -1):
            found = [unit for unit in self.units if name in unit.names and unit.chain == chain[:depth]]
            if found:
                for unit in _definition(found):
                    self._choose(unit, name)
                return
            if depth and name in {one.arg for one in ast.walk(chain[depth - 1].args) if isinstance(one, ast.arg)}:
                self._leave(f"{name} is a parameter of {chain[depth - 1].name} (line {chain[depth - 1].lineno})")
                return
        if not hasattr(builtins, name) and name not in ("__name__", "__file__"):
            self._leave(f"{name} is assigned nowhere in the script")

    def _choose(self, unit: Unit, name: str) -> None:
        statement = unit.statement
        if id(statement) in self.chosen:
            return
        if not isinstance(statement, Function | ast.ClassDef) and (call := _training_call(statement)):
            self._leave(f"{name} (line {statement.lineno}) is made with {call}(...)")
            return
        self.chosen[id(statement)] = unit
        for one in sorted(free_names(statement)):
            self._need(one, unit.chain)

    def _leave(self, text: str) -> None:
        if text not in self.left:
            self.left.append(text)

    def texts(self) -> Iterator[str]:
        """The chosen statements in the script's order, imports first."""
        imports = (ast.Import, ast.ImportFrom)
        units = sorted(self.chosen.values(), key=lambda u: (not isinstance(u.statement, imports), u.statement.lineno))
        for is_definition, group in groupby(units, lambda u: isinstance(u.statement, Function | ast.ClassDef)):
            texts = [self._text(unit.statement) for unit in group]
            yield from texts if is_definition else ["\n".join(texts)]

    def _text(self, statement: ast.stmt) -> str:
        """The script's own text, dedented where that changes nothing but the place."""
        first = min([statement.lineno, *(one.lineno for one in getattr(statement, "decorator_list", []))])
        text = textwrap.dedent("\n".join(self.lines[first - 1 : statement.end_lineno]))
        try:
            same = [ast.dump(one) for one in ast.parse(text).body] == [ast.dump(statement)]
        except SyntaxError:
            same = False
        return text if same else ast.unparse(statement)


def _units(body: list[ast.stmt], chain: Chain) -> Iterator[Unit]:
    """Statements that bind names, in order; those of functions have the functions as their chain."""
    for statement in body:
        if isinstance(statement, Function):
            yield Unit(statement, frozenset({statement.name}), chain)
            yield from _units(statement.body, (*chain, statement))
        elif isinstance(statement, ast.ClassDef):
            yield Unit(statement, frozenset({statement.name}), chain)
            for method in statement.body:
                if isinstance(method, Function):
                    yield from _units(method.body, (*chain, method))
        elif isinstance(statement, ast.If | ast.With | ast.Try) and not _is_small(statement):
            for name in ("body", "orelse", "finalbody"):
                yield from _units(getattr(statement, name, []), chain)
        elif names := _bound_in(statement):
            yield Unit(statement, frozenset(names), chain)


def _is_small(statement: ast.stmt) -> bool:
    """Whether an `if` or `try` only chooses between imports or constants."""
    main = isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
    kinds = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Pass)
    bodies = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
    bodies += [handler.body for handler in getattr(statement, "handlers", [])]
    return not main and all(isinstance(one, kinds) for body in bodies for one in body)


def _bound_in(statement: ast.stmt) -> set[str]:
    """Names that a statement binds or changes."""
    names: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.value.id} if isinstance(node.value, ast.Name) else set()
        elif isinstance(node, Function | ast.ClassDef) and node is not statement:
            names.add(node.name)
    return names


def _definition(found: list[Unit]) -> list[Unit]:
    """The last function, class or import of a name; all assignments if it has none."""
    defined = [u for u in found if isinstance(u.statement, Function | ast.ClassDef | ast.Import | ast.ImportFrom)]
    return defined[-1:] or found


def _training_call(statement: ast.stmt) -> str:
    """The name of a call that loads or trains; "" without one."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            callee = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if callee in TRAINING:
                return str(callee)
    return ""
