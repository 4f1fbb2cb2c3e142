"""A training script read as syntax: `GRPOConfig(...)`, `GRPOTrainer(...)`, its dataset, rewards and LoRA.

Nothing is imported or run. Literals, constants assigned once and simple arithmetic are folded; anything else is
`Unread`, with its text and line.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpocli.errors import ConfigError
from grpocli.porting.source import Data, RewardCall, Source, Step, Unread, read_text

BUDGET = 100_000
"""Expressions that are folded in a file; more are left unread, since names can multiply as YAML aliases do."""
LONGEST = 20_000
"""Characters of a folded text."""
OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Binding:
    """An assignment to a name. index: its place in an unpacked tuple; None if the value is its own."""

    value: ast.expr
    line: int
    index: int | None = None
    certain: bool = True


@dataclass(slots=True)
class Scope:
    """A module or function: the assignments to each name, its functions, and the scope around it."""

    outer: Scope | None = None
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    """{name: (module, name there)}."""

    def bound(self, name: str, line: int) -> tuple[Binding, Scope] | None:
        """The last assignment before a line, and its scope. Outer scopes count as a whole."""
        own = [one for one in self.bindings.get(name, ()) if one.line < line]
        if own:
            return own[-1], self
        return self.outer.bound(name, 10**9) if self.outer else None

    def function(self, name: str) -> tuple[Function, Scope] | None:
        if name in self.functions:
            return self.functions[name], self
        return self.outer.function(name) if self.outer else None

    def imported(self, name: str) -> tuple[str, str] | None:
        return self.imports.get(name) or (self.outer.imported(name) if self.outer else None)


def parsed(file: Path) -> ast.Module:
    """The syntax of a script. Raises ConfigError, with the line of a syntax error."""
    text = read_text(file)
    try:
        return ast.parse(text)
    except SyntaxError as error:
        hint = "a notebook is exported as a script first" if file.suffix == ".ipynb" else ""
        raise ConfigError(f"line {error.lineno}: {error.msg}", key=str(file), hint=hint) from error
    except (RecursionError, MemoryError) as error:
        raise ConfigError("is nested too deep to be read", key=str(file)) from error
    except ValueError as error:  # a null byte
        raise ConfigError(f"cannot be read: {error}", key=str(file)) from error


def of_script(file: Path) -> Source:
    """The source of a script. Raises ConfigError if it cannot be read or has neither GRPOConfig nor GRPOTrainer."""
    tree = parsed(file)
    try:
        return Reader(file, tree).source()
    except RecursionError as error:
        raise ConfigError("has expressions nested too deep to be read", key=str(file)) from error


class Reader:
    """Reads one script."""

    def __init__(self, file: Path, tree: ast.Module) -> None:
        self.source_file, self.tree = file, tree
        self.budget = BUDGET
        self.module = Scope()
        self.calls: list[tuple[ast.Call, Scope]] = []
        self.changes: list[tuple[ast.Attribute, ast.expr, Scope]] = []
        self._visit(tree.body, self.module, certain=True)

    def source(self) -> Source:
        """Everything that the script sets."""
        source = Source(self.source_file, is_script=True, starts_training=self._starts_training())
        trainers = self._calls_of("GRPOTrainer")
        configs = self._calls_of("GRPOConfig")
        if not trainers and not configs:
            raise self._without_grpo()
        if len(trainers) > 1:
            source.notes.append(f"the script has {len(trainers)} GRPOTrainer calls, and this reads the last")
        arguments = self._arguments(*trainers[-1], ("model", "reward_funcs", "args")) if trainers else {}
        scope = trainers[-1][1] if trainers else self.module
        self._read_config(source, arguments, configs, scope)
        self._read_trainer(source, arguments, scope)
        if not source.settings and not configs:
            source.notes.append(
                "GRPOConfig comes from the command line here, so TRL's defaults stand for it: write the arguments "
                "into a YAML, one FIELD: VALUE a line, and give that file instead"
            )
        return source

    def _without_grpo(self) -> ConfigError:
        found = [name for name in ("SFTTrainer", "DPOTrainer", "PPOTrainer", "RLOOTrainer") if self._calls_of(name)]
        problem = "has no GRPOConfig(...) and no GRPOTrainer(...)"
        return ConfigError(f"{problem}{f', but {found[0]}' if found else ''}", key=str(self.source_file))

    # what there is

    def _visit(self, body: list[ast.stmt], scope: Scope, certain: bool) -> None:
        for statement in body:
            self._statement(statement, scope, certain)

    def _statement(self, statement: ast.stmt, scope: Scope, certain: bool) -> None:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                scope.functions[statement.name] = statement
                inner = Scope(scope)
                self._parameters(statement, inner)
                self._visit(statement.body, inner, certain=True)
            case ast.ClassDef():
                self._visit(statement.body, Scope(scope), certain=True)
            case ast.ImportFrom() | ast.Import():
                self._import(statement, scope)
            case ast.Assign():
                self._expression(statement.value, scope)
                for target in statement.targets:
                    self._bind(target, statement.value, scope, certain)
            case ast.AnnAssign() if statement.value is not None:
                self._expression(statement.value, scope)
                self._bind(statement.target, statement.value, scope, certain)
            case ast.AugAssign():
                self._bind(
                    statement.target, ast.BinOp(_load(statement.target), statement.op, statement.value), scope, False
                )
            case _:
                for child in ast.iter_child_nodes(statement):
                    if isinstance(child, ast.expr):
                        self._expression(child, scope)
                main = isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
                sure = certain and (main or isinstance(statement, ast.With | ast.Try))
                for inner_body in _bodies(statement):
                    self._visit(inner_body, scope, sure)

    def _parameters(self, function: Function, scope: Scope) -> None:
        """Defaults of parameters count as assignments."""
        named = [*function.args.posonlyargs, *function.args.args]
        given = list(zip(named[len(named) - len(function.args.defaults) :], function.args.defaults, strict=True))
        more = [(a, d) for a, d in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True) if d]
        for parameter, value in [*given, *more]:
            scope.bindings.setdefault(parameter.arg, []).append(Binding(value, function.lineno))

    def _import(self, statement: ast.ImportFrom | ast.Import, scope: Scope) -> None:
        for alias in statement.names:
            name = alias.asname or alias.name
            module = (statement.module or "") if isinstance(statement, ast.ImportFrom) else ""
            scope.imports[name] = (module, alias.name)

    def _expression(self, node: ast.expr, scope: Scope) -> None:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call):
                self.calls.append((inner, scope))

    def _bind(self, target: ast.expr, value: ast.expr, scope: Scope, certain: bool) -> None:
        line = target.lineno
        if isinstance(target, ast.Name):
            scope.bindings.setdefault(target.id, []).append(Binding(value, line, None, certain))
        elif isinstance(target, ast.Tuple | ast.List):
            for index, one in enumerate(target.elts):
                if isinstance(one, ast.Name):
                    scope.bindings.setdefault(one.id, []).append(Binding(value, line, index, certain))
        elif isinstance(target, ast.Attribute):
            self.changes.append((target, value, scope))

    def _calls_of(self, name: str) -> list[tuple[ast.Call, Scope]]:
        return [(call, scope) for call, scope in self.calls if self._callee(call, scope) == name]

    def _callee(self, call: ast.Call, scope: Scope) -> str:
        """The last name of a called function, as it is called where it is imported from."""
        if isinstance(call.func, ast.Attribute):
            return call.func.attr
        if isinstance(call.func, ast.Name):
            imported = scope.imported(call.func.id)
            return imported[1] if imported else call.func.id
        return ""

    def _starts_training(self) -> bool:
        """Whether statements at the top level, which an import would run, load data or train."""
        outside = [s for s in self.tree.body if not (isinstance(s, ast.If) and "__name__" in ast.unparse(s.test))]
        loose = [s for s in outside if not isinstance(s, Function | ast.ClassDef)]
        words = ("GRPOTrainer", "load_dataset", "train", "from_pretrained")
        calls = [node for s in loose for node in ast.walk(s) if isinstance(node, ast.Call)]
        return any(self._callee(call, self.module) in words for call in calls)

    # values

    def fold(self, node: ast.expr, scope: Scope, line: int | None = None) -> Any:
        """The value of an expression, or Unread."""
        self.budget -= 1
        line = getattr(node, "lineno", 0) if line is None else line
        if self.budget < 0:
            return self._unread(node)
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self._fold_name(node, scope, line)
            case ast.List() | ast.Tuple() | ast.Set():
                return self._whole(node, [self.fold(one, scope, line) for one in node.elts])
            case ast.Dict():
                return self._fold_dict(node, scope, line)
            case ast.UnaryOp(op=ast.USub()):
                value = self.fold(node.operand, scope, line)
                return -value if isinstance(value, int | float) else self._unread(node)
            case ast.BinOp():
                return self._fold_operation(node, scope, line)
            case ast.JoinedStr():
                return self._fold_text(node, scope, line)
            case ast.Attribute(value=ast.Name(id="torch")):
                return node.attr
            case ast.Call(func=ast.Name(id="dict")) if not node.args and all(one.arg for one in node.keywords):
                values = {str(one.arg): self.fold(one.value, scope, line) for one in node.keywords}
                return self._whole(node, values)
            case ast.Call(func=ast.Name(id="int" | "float" | "str" as kind), args=[only]):
                return self._convert(node, kind, self.fold(only, scope, line))
        return self._unread(node)

    def _unread(self, node: ast.AST) -> Unread:
        text = " ".join(ast.unparse(node).split())
        return Unread(text if len(text) <= 80 else f"{text[:77]}...", getattr(node, "lineno", 0))

    def _whole(self, node: ast.expr, values: Any) -> Any:
        """A list or mapping, or Unread if one of its values is."""
        inner = values.values() if isinstance(values, dict) else values
        return self._unread(node) if any(isinstance(one, Unread) for one in inner) else values

    def _fold_name(self, node: ast.Name, scope: Scope, line: int) -> Any:
        found = scope.bound(node.id, line)
        if found is None:
            return self._unread(node)
        binding, owner = found
        if not binding.certain:
            return self._unread(node)
        value = self.fold(binding.value, owner, binding.line)
        if binding.index is None or isinstance(value, Unread):
            return value
        return value[binding.index] if isinstance(value, list) and binding.index < len(value) else self._unread(node)

    def _fold_dict(self, node: ast.Dict, scope: Scope, line: int) -> Any:
        values: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            folded = self.fold(value, scope, line)
            if key is None and isinstance(folded, dict):
                values |= folded
                continue
            name = self.fold(key, scope, line) if key is not None else self._unread(node)
            if not isinstance(name, str | int | float | bool):
                return self._unread(node)
            values[name] = folded
        return self._whole(node, values)

    def _fold_operation(self, node: ast.BinOp, scope: Scope, line: int) -> Any:
        left, right = self.fold(node.left, scope, line), self.fold(node.right, scope, line)
        operation = OPERATIONS.get(type(node.op))
        small = all(isinstance(one, int | float) and abs(one) < 1e15 for one in (left, right))
        power = isinstance(node.op, ast.Pow)
        fits = small and not (power and (abs(right) > 64 or abs(left) > 1e4))
        texts = isinstance(node.op, ast.Add) and all(
            isinstance(one, str) and len(one) < LONGEST for one in (left, right)
        )
        if operation is None or not (fits or texts):
            return self._unread(node)
        try:
            return operation(left, right)
        except (ArithmeticError, ValueError):
            return self._unread(node)

    def _fold_text(self, node: ast.JoinedStr, scope: Scope, line: int) -> Any:
        pieces = []
        for part in node.values:
            value = part.value if isinstance(part, ast.Constant) else Unread("", 0)
            if isinstance(part, ast.FormattedValue) and part.conversion == -1 and part.format_spec is None:
                value = self.fold(part.value, scope, line)
            if not isinstance(value, str | int | float):
                return self._unread(node)
            pieces.append(str(value))
        text = "".join(pieces)
        return text if len(text) <= LONGEST else self._unread(node)

    def _convert(self, node: ast.Call, kind: str, value: Any) -> Any:
        try:
            return {"int": int, "float": float, "str": str}[kind](value) if not isinstance(value, Unread) else value
        except (TypeError, ValueError):
            return self._unread(node)

    def _arguments(self, call: ast.Call, scope: Scope, names: tuple[str, ...] = ()) -> dict[str, ast.expr]:
        """{name: expression} of a call; `**settings` of a dictionary are its entries."""
        found = dict(zip(names, (one for one in call.args if not isinstance(one, ast.Starred)), strict=False))
        for keyword in call.keywords:
            if keyword.arg is not None:
                found[keyword.arg] = keyword.value
                continue
            value = self._definition(keyword.value, scope)
            if isinstance(value, ast.Dict):
                found |= {
                    key.value: one
                    for key, one in zip(value.keys, value.values, strict=True)
                    if isinstance(key, ast.Constant) and isinstance(key.value, str)
                }
            else:
                found[f"**{ast.unparse(keyword.value)}"] = keyword.value
        return found

    def _definition(self, node: ast.expr, scope: Scope) -> ast.expr:
        """The expression that a name was assigned last; the expression itself if it is no name."""
        while isinstance(node, ast.Name) and (found := scope.bound(node.id, node.lineno)):
            binding, scope = found
            if binding.index is not None:
                break
            node = binding.value
        return node

    # the parts of a training

    def _read_config(
        self, source: Source, arguments: dict[str, ast.expr], configs: list[tuple[ast.Call, Scope]], scope: Scope
    ) -> None:
        """Read the GRPOConfig that the trainer gets, else the last one."""
        args = arguments.pop("args", None)
        made = self._definition(args, scope) if args is not None else None
        chosen = next(((call, place) for call, place in configs if call is made), configs[-1] if configs else None)
        if chosen is None:
            return
        if len(configs) > 1 and chosen[0] is not made:
            source.notes.append(f"the script has {len(configs)} GRPOConfig calls, and this reads the last")
        for name, value in self._arguments(*chosen, ("output_dir",)).items():
            source.settings[name] = self.fold(value, chosen[1])
        for target, value, place in self.changes:  # training_args.learning_rate = 1e-6
            if isinstance(args, ast.Name) and isinstance(target.value, ast.Name) and target.value.id == args.id:
                source.settings[target.attr] = self.fold(value, place)

    def _read_trainer(self, source: Source, arguments: dict[str, ast.expr], scope: Scope) -> None:
        for name, node in arguments.items():
            match name:
                case "model":
                    self._read_model(source, node, scope)
                case "reward_funcs":
                    source.rewards = list(self._rewards(node, scope))
                case "train_dataset":
                    source.data = self.data(node, scope)
                case "eval_dataset":
                    source.eval_data = self.data(node, scope)
                case "peft_config":
                    self._read_lora(source, node, scope)
                case "processing_class" | "tokenizer" | "reward_processing_classes":
                    pass
                case _:
                    value = self.fold(node, scope)
                    if value is not None:
                        source.ignored[name] = value

    def _read_model(self, source: Source, node: ast.expr, scope: Scope, depth: int = 0) -> None:
        value = self.fold(node, scope)
        if isinstance(value, str) or depth > 8:
            source.model = value
            return
        made, place = self._made(node, scope)
        source.model = source.model or self._unread(node)
        if not isinstance(made, ast.Call):
            return
        callee = self._callee(made, place)
        if callee == "get_peft_model":
            inner = self._arguments(made, place, ("model", "peft_config"))
            self._read_model(source, inner.pop("model", made.func), place, depth + 1)
            if config := inner.pop("peft_config", None):
                self._read_lora(source, config, place)
            else:
                source.lora = {name: self.fold(one, place) for name, one in inner.items()}
        elif callee == "from_pretrained":
            given = self._arguments(made, place, ("pretrained_model_name_or_path",))
            values = {name: self.fold(one, place) for name, one in given.items()}
            source.model = values.pop("pretrained_model_name_or_path", None) or values.pop("model_name", None)
            known = ("dtype", "torch_dtype", "attn_implementation", "revision", "trust_remote_code", "max_seq_length")
            for name, one in values.items():
                if name in known or name == "gpu_memory_utilization":
                    source.settings.setdefault(
                        {"gpu_memory_utilization": "vllm_gpu_memory_utilization"}.get(name, name), one
                    )
                elif name == "fast_inference" and one is True:  # Unsloth's name of vLLM in the trainer
                    source.settings.setdefault("use_vllm", True)
                elif one not in (None, False) and name not in ("device_map", "max_lora_rank", "use_cache"):
                    source.ignored[name] = one

    def _made(self, node: ast.expr, scope: Scope) -> tuple[ast.expr, Scope]:
        """The expression behind a name, also of the first name of an unpacked tuple, and its scope."""
        for _ in range(20):
            if not isinstance(node, ast.Name) or not (found := scope.bound(node.id, node.lineno)):
                break
            binding, scope = found
            node = binding.value
        return node, scope

    def _read_lora(self, source: Source, node: ast.expr, scope: Scope) -> None:
        made, place = self._made(node, scope)
        if isinstance(made, ast.Call) and self._callee(made, place) == "LoraConfig":
            source.lora = {name: self.fold(one, place) for name, one in self._arguments(made, place, ("r",)).items()}
        elif not (isinstance(made, ast.Constant) and made.value is None):
            source.notes.append(f"peft_config={self._unread(node)} is not read: set model.lora.rank yourself")

    def _rewards(self, node: ast.expr, scope: Scope) -> Iterator[RewardCall | Unread]:
        if isinstance(node, ast.List | ast.Tuple):
            for one in node.elts:
                yield from self._rewards(one, scope)
            return
        if isinstance(node, ast.Name) and scope.function(node.id):
            yield RewardCall(node.id)
        elif isinstance(node, ast.Name) and (imported := scope.imported(node.id)):
            yield RewardCall(imported[1], imported[0])
        elif isinstance(node, ast.Name) and (found := scope.bound(node.id, node.lineno)):
            yield from self._rewards(found[0].value, found[1]) if found[0].index is None else [self._unread(node)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            imported = scope.imported(node.func.id)
            values = {name: self.fold(one, scope) for name, one in self._arguments(node, scope).items()}
            yield RewardCall(imported[1], imported[0], values) if imported else self._unread(node)
        elif isinstance(value := self.fold(node, scope), str):
            yield RewardCall("model", path=value)
        else:
            yield self._unread(node)

    def data(self, node: ast.expr, scope: Scope, line: int | None = None, depth: int = 0) -> Data | Unread | None:
        """The dataset of an expression: `load_dataset(...)`, methods on it, names and local functions."""
        line = node.lineno if line is None else line
        if depth > 60:
            return self._unread(node)
        match node:
            case ast.Constant(value=None):
                return None
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
        given = self._arguments(node, scope, ("path", "name"))
        values = {name: self.fold(one, scope, line) for name, one in given.items()}
        path, name, split = values.get("path"), values.get("name"), values.get("split")
        if isinstance(split, list) and all(isinstance(one, str) for one in split):
            split = "\n".join(split)
        if not isinstance(path, str) or isinstance(values.get("data_files"), Unread):
            return self._unread(node)
        return Data(
            path,
            name if isinstance(name, str) else None,
            split if isinstance(split, str) else None,
            values.get("data_files"),
            values.get("streaming") is True,
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
        reader = Reader.__new__(Reader)
        reader.source_file, reader.tree, reader.budget, reader.module = self.source_file, self.tree, self.budget, inner
        reader.calls, reader.changes = [], []
        reader._visit(function.body, inner, certain=True)
        returns = [one for one in ast.walk(function) if isinstance(one, ast.Return) and one.value is not None]
        if not returns or returns[-1].value is None:
            return self._unread(call)
        return reader.data(returns[-1].value, inner, None, depth + 1)

    def _step(self, call: ast.Call, method: str, scope: Scope) -> Step:
        text = self._unread(call).text
        first = call.args[0] if call.args else next((k.value for k in call.keywords if k.arg == "function"), None)
        harmless = ("function", "remove_columns", "num_proc", "desc", "load_from_cache_file", "batch_size", "seed")
        plain = len(call.args) <= 1 and all(k.arg in harmless for k in call.keywords)
        function = ast.unparse(first) if isinstance(first, ast.Name | ast.Lambda) else ""
        arguments = tuple(self.fold(one, scope) for one in call.args)
        return Step(method, text, call.lineno, function, plain, arguments)


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        if isinstance(inner := getattr(statement, name, None), list):
            yield inner
    for handler in getattr(statement, "handlers", ()):
        yield handler.body


def _load(target: ast.expr) -> ast.expr:
    """A target of an assignment as a value."""
    return target
