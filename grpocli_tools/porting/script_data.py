"""The dataset of a script: `load_dataset(...)`, and the methods called on it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from grpocli_tools.porting.fold import Folder
from grpocli_tools.porting.source import Data, DatasetStep, ScriptSource, Unread
from grpocli_tools.porting.syntax import Binding, Function, Scope

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

    def data(self, node: ast.expr, scope: Scope, depth: int = 0) -> Data | Unread | None:
        """The dataset of an expression: `load_dataset(...)`, methods on it, names and local functions."""
        if depth > 60:
            return self._unread(node)
        match node:
            case ast.Constant(value=None):
                return None
            case ast.IfExp(orelse=ast.Constant(value=None)):  # `test if strategy != "no" else None`
                return self.data(node.body, scope, depth + 1)
            case ast.Name():
                return self._named_data(node, scope, depth)
            case ast.Subscript():
                inner = self.data(node.value, scope, depth + 1)
                part = self.fold(node.slice, scope)
                if isinstance(inner, Data) and isinstance(part, str) and not inner.split:
                    inner.split = part
                return inner
            case ast.Call(func=ast.Attribute() as method) if method.attr not in ("load_dataset", "from_pretrained"):
                inner = self.data(method.value, scope, depth + 1)
                if isinstance(inner, Data):
                    inner.steps.append(self._step(node, method.attr, scope))
                    return inner
                return self._unread(node)
            case ast.Call() if self._callee(node, scope) == "load_dataset":
                return self._loaded(node, scope)
            case ast.Call(func=ast.Name() as name) if found := scope.function(name.id):
                return self.data(*self._returned(node, found[0], scope), depth + 1)
        return self._unread(node)

    def _named_data(self, node: ast.Name, scope: Scope, depth: int) -> Data | Unread | None:
        found = scope.bound(node.id, node.lineno)
        self.datasets.add(node.id)
        if found is None:
            return self._unread(node)
        binding, owner = found
        self._note_condition(node.id, binding)
        data = self.data(binding.value, owner, depth + 1)
        if binding.index is not None and isinstance(data, Data):
            splits = (data.split or "").split("\n")  # load_dataset(split=[A, B])
            data.split = splits[binding.index] if len(splits) > binding.index else None
        return data

    def _loaded(self, node: ast.Call, scope: Scope) -> Data | Unread:
        given = self._arguments(node, scope, ("path", "name", "data_dir", "data_files", "split"))
        values = {name: self.fold(one, scope) for name, one in given.items()}
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

    def _returned(self, call: ast.Call, function: Function, scope: Scope) -> tuple[ast.expr, Scope]:
        """What a local function returns, and its scope, in which the parameters are the call's arguments."""
        inner = self.scopes[function]
        bindings = {name: [*assigned] for name, assigned in inner.bindings.items()}
        for name, value in self._arguments(call, scope, tuple(one.arg for one in function.args.args)).items():
            bindings.setdefault(name, []).append(Binding(value, 0, scope=scope))
            bindings[name].sort(key=lambda one: one.line)
        returns = [one.value for one in ast.walk(function) if isinstance(one, ast.Return) and one.value]
        return returns[-1] if returns else ast.copy_location(ast.Constant(...), call), replace(inner, bindings=bindings)

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
