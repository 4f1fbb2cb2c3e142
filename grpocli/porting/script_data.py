"""The dataset of a script: `load_dataset(...)`, and the methods called on it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self

from grpocli.porting.fold import Folder
from grpocli.porting.source import Data, DatasetStep, ScriptSource, Unread
from grpocli.porting.syntax import Binding, Function, Scope

STEPS = (
    *("map", "filter", "select", "shuffle", "sort", "take", "skip", "shard", "train_test_split", "flatten", "unique"),
    *("rename_column", "rename_columns", "remove_columns", "select_columns", "add_column", "cast", "cast_column"),
    *("set_transform", "with_transform", "filter_by_length", "drop_duplicates", "class_encode_column", "repeat"),
)
"""Methods that change a dataset."""


class DataReader(Folder):
    """Reads the datasets of one script."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.datasets: set[str] = set()
        """Names that hold the datasets that were read."""
        self.parameters: dict[str, Data] = {}
        """The datasets that a local function gets."""

    def data(self, node: ast.expr, scope: Scope, line: int | None = None, depth: int = 0) -> Data | Unread | None:
        """The dataset of an expression: `load_dataset(...)`, methods on it, names and local functions."""
        line = node.lineno if line is None else line
        if depth > 60:
            return self._unread(node)
        match node:
            case ast.Constant(value=None):
                return None
            case ast.IfExp():
                test = self.fold(node.test, scope, line)
                branch = node.orelse if not test else node.body  # unread: as if it were true
                return self.data(branch, scope, line, depth + 1)
            case ast.Name():
                return self._named_data(node, scope, line, depth)
            case ast.Subscript():
                inner = self.data(node.value, scope, line, depth + 1)
                part = self.fold(node.slice, scope, line)
                if isinstance(inner, Data) and isinstance(part, str) and not inner.split:
                    inner.split = part
                return inner
            case ast.Call(func=ast.Attribute() as method) if method.attr not in ("load_dataset", "from_pretrained"):
                inner = self.data(method.value, scope, line, depth + 1)
                if isinstance(inner, Data):
                    inner.steps.append(self._step(node, method.attr, scope))
                    return inner
                return self._unread(node)
            case ast.Call() if self._callee(node, scope) == "load_dataset":
                return self._loaded(node, scope, line)
            case ast.Call(func=ast.Name() as name) if found := scope.function(name.id):
                reader, result, within = self._returned(node, *found, scope, depth)
                return reader.data(result, within, None, depth + 1)
        return self._unread(node)

    def _named_data(self, node: ast.Name, scope: Scope, line: int, depth: int) -> Data | Unread | None:
        found = scope.bound(node.id, line)
        self.datasets.add(node.id)
        if node.id in self.parameters and (found is None or found[1] is not scope):
            given = self.parameters[node.id]
            return replace(given, steps=[*given.steps])
        if found is None:
            return self._unread(node)
        binding, owner = found
        self._note_condition(node.id, binding)
        data = self.data(binding.value, owner, binding.line, depth + 1)
        if binding.index is not None and isinstance(data, Data):
            splits = (data.split or "").split("\n")  # load_dataset(split=[A, B])
            data.split = splits[binding.index] if len(splits) > binding.index else None
        return data

    def _loaded(self, node: ast.Call, scope: Scope, line: int) -> Data | Unread:
        given = self._arguments(node, scope, ("path", "name", "data_dir", "data_files", "split"))
        values = {name: self.fold(one, scope, line) for name, one in given.items()}
        path, name, split = values.get("path"), values.get("name"), values.get("split")
        if isinstance(split, list) and all(isinstance(one, str) for one in split):
            split = "\n".join(split)
        if not isinstance(path, str) or isinstance(values.get("data_files"), Unread):
            return self._unread(node)
        known = ("path", "name", "split", "data_files", "streaming")
        others = {key: value for key, value in values.items() if key not in known and value is not None}
        others |= {key: value for key in known if isinstance(value := values.get(key), Unread)}
        return Data(
            path,
            name if isinstance(name, str) else None,
            split if isinstance(split, str) else None,
            values.get("data_files"),
            values.get("streaming") is True,
            others=others,
        )

    def _returned(
        self, call: ast.Call, function: Function, owner: Scope, scope: Scope, depth: int
    ) -> tuple[Self, ast.expr, Scope]:
        """What a local function returns, with its scope and reader; it has the call's literals and datasets."""
        inner = Scope(owner)
        self._parameters(function, inner)
        names, parameters = tuple(one.arg for one in function.args.args), dict[str, Data]()
        for name, value in self._arguments(call, scope, names).items():
            folded = self.fold(value, scope)
            if isinstance(folded, str | int | float | bool):
                inner.bindings[name] = [Binding(ast.copy_location(ast.Constant(folded), call), 0)]
            elif isinstance(data := self.data(value, scope, None, depth + 1), Data):
                parameters[name] = data
        reader = type(self).__new__(type(self))
        reader.parameters, reader.datasets, reader.conditions = parameters, self.datasets, self.conditions
        reader.source_file, reader.tree, reader.module = self.source_file, self.tree, inner
        reader.calls, reader.changes = [], []
        reader.command_line, reader.argument_names = self.command_line, self.argument_names
        reader._visit(function.body, inner, certain=True)
        returns = [one for one in ast.walk(function) if isinstance(one, ast.Return) and one.value is not None]
        return reader, returns[-1].value if returns and returns[-1].value else ast.Constant(...), inner

    def _loose_steps(self, source: ScriptSource) -> Iterator[DatasetStep]:
        """Steps beside the chain of calls that was read, such as `data["train"] = data["train"].filter(f)` in a loop;
        all steps of the script if its dataset is not read."""
        known = [one for one in (source.data, source.eval_data) if isinstance(one, Data)]
        read = {(step.line, step.method) for one in known for step in one.steps}
        for node in ast.walk(self.tree):
            targets = node.targets if isinstance(node, ast.Assign) else [node] if isinstance(node, ast.Expr) else []
            if not targets or (isinstance(source.data, Data) and _holder(targets[0]) not in self.datasets):
                continue
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and isinstance(method := call.func, ast.Attribute):
                    library = isinstance(method.value, ast.Name) and self.module.imported(method.value.id)
                    if method.attr in STEPS and (call.lineno, method.attr) not in read and not library:
                        yield self._step(call, method.attr, self.module)

    def _step(self, call: ast.Call, method: str, scope: Scope) -> DatasetStep:
        text = self._unread(call).text
        first = call.args[0] if call.args else next((k.value for k in call.keywords if k.arg == "function"), None)
        harmless = ("function", "remove_columns", "num_proc", "desc", "load_from_cache_file", "batch_size", "seed")
        off = {k.arg for k in call.keywords if isinstance(k.value, ast.Constant) and not k.value.value}
        plain = len(call.args) <= 1 and all(k.arg in harmless or k.arg in off for k in call.keywords)
        function = ast.unparse(first) if isinstance(first, ast.Name | ast.Lambda) else ""
        arguments = tuple(self.fold(one, scope) for one in call.args)
        keywords = {str(k.arg): self.fold(k.value, scope) for k in call.keywords}
        return DatasetStep(method, text, call.lineno, function, plain, arguments, keywords)


def _holder(node: ast.AST) -> str:
    """`data` of the expressions `data`, `data["train"]` and `data["train"].map(f)["text"]`; "" of others."""
    while not isinstance(node, ast.Name):
        match node:
            case ast.Attribute() | ast.Subscript() | ast.Expr():
                node = node.value
            case ast.Call():
                node = node.func
            case _:
                return ""
    return node.id
