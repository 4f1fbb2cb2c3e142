"""The dataset of a script: `load_dataset(...)`, and the methods called on it."""

from __future__ import annotations

import ast

from grpocli.porting.fold import Folder
from grpocli.porting.source import Data, DatasetStep, Unread
from grpocli.porting.syntax import Binding, Function, Scope


class DataReader(Folder):
    """Reads the datasets of one script."""

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
                return self._returned(node, *found, scope, depth)
        return self._unread(node)

    def _named_data(self, node: ast.Name, scope: Scope, line: int, depth: int) -> Data | Unread | None:
        found = scope.bound(node.id, line)
        if found is None:
            return self._unread(node)
        binding, owner = found
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
    ) -> Data | Unread | None:
        """The dataset that a local function returns, with the literal arguments of the call."""
        inner = Scope(owner)
        self._parameters(function, inner)
        names = tuple(one.arg for one in function.args.args)
        for name, value in self._arguments(call, scope, names).items():
            folded = self.fold(value, scope)
            if isinstance(folded, str | int | float | bool):
                inner.bindings[name] = [Binding(ast.copy_location(ast.Constant(folded), call), 0)]
        reader = type(self).__new__(type(self))
        reader.source_file, reader.tree, reader.budget, reader.module = self.source_file, self.tree, self.budget, inner
        reader.calls, reader.changes = [], []
        reader.command_line, reader.argument_names = self.command_line, self.argument_names
        reader._visit(function.body, inner, certain=True)
        returns = [one for one in ast.walk(function) if isinstance(one, ast.Return) and one.value is not None]
        if not returns or returns[-1].value is None:
            return self._unread(call)
        found: Data | Unread | None = reader.data(returns[-1].value, inner, None, depth + 1)
        return found

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
