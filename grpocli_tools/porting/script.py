"""A training script read as syntax: its calls of GRPOConfig, LoraConfig, GRPOTrainer and load_dataset. Nothing is run.

Literals and constants of the script are values. Anything else is `Unread`, which becomes a `# check:` line.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpocli.config import yaml_text
from grpocli.errors import ConfigError
from grpocli_tools.porting.source import (
    Data,
    RewardCall,
    ScriptSource,
    Unread,
    add_arguments,
    put,
    read_mapping,
    read_text,
)
from grpocli_tools.porting.translation import shortened

TOO_DEEP = "an expression is nested too deep, or has too many terms, to be read"
IPYTHON = re.compile(r"^([ \t]*)[!%](?:.*\\\n)*.*$", re.MULTILINE)
FOREIGN_CELLS = ("%%bash", "%%sh", "%%writefile", "%%html", "%%javascript", "%%script")
"""Beginnings of a notebook's cells that are not Python."""
POSITIONS = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class")
"""Arguments of GRPOTrainer that are given by position."""
FROM_COMMAND_LINE = (
    "the script reads GRPOConfig from its command line, so TRL's defaults are used; give the arguments after `--`"
)
ONLY_CALLS = (
    "only the script's calls of GRPOConfig, LoraConfig, GRPOTrainer and load_dataset are read: set what else it does "
    "to its model, tokenizer and rows yourself"
)


def of_script(file: Path, words: Sequence[str] = ()) -> ScriptSource:
    """The source of a script. words: the arguments of its command line.

    Raises ConfigError if it cannot be read or has neither GRPOConfig nor GRPOTrainer.
    """
    try:
        source = Script(file).source()
    except RecursionError as error:
        raise ConfigError(TOO_DEEP, key=str(file)) from error
    given = arguments_of(words)
    if isinstance(config := given.pop("config", None), str):  # as TrlParser reads it, here or beside the script
        beside = file.parent / config
        given = read_mapping(beside if beside.is_file() and not Path(config).is_file() else Path(config)) | given
    if given and FROM_COMMAND_LINE in source.notes:
        source.notes.remove(FROM_COMMAND_LINE)
    add_arguments(source, given)
    return source


def arguments_of(words: Sequence[str]) -> dict[str, Any]:
    """The arguments `--name value ...` of a command line; a name alone is true, and a file alone is `config`.

    Raises ConfigError for a value without a name.
    """
    found: dict[str, list[Any]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [yaml_text.load(value)] if equals else []
        elif name:
            found[name].append(yaml_text.load(word.rstrip(",")))
        elif word.endswith((".yaml", ".yml", ".json")):
            found["config"] = [word]
        else:
            raise ConfigError("must be --NAME", key="--", value=word, hint="write -- --learning_rate 1e-5 ...")
    return {name: True if not one else one[0] if len(one) == 1 else one for name, one in found.items()}


class Script:
    """The syntax of one script or notebook. Raises ConfigError, with the line of a syntax error."""

    def __init__(self, file: Path) -> None:
        self.file, self.text = file, script_text(file)
        try:
            self.tree = ast.parse(self.text)
        except SyntaxError as error:
            raise ConfigError(f"line {error.lineno}: {error.msg}", key=str(file)) from error
        except (RecursionError, MemoryError) as error:
            raise ConfigError(TOO_DEEP, key=str(file)) from error
        self.nodes = list(ast.walk(self.tree))
        self.assigned = self._assigned()
        self.constants: dict[str, Any] = {}
        for name, node in self.assigned.items():
            if not isinstance(value := self.value(node), Unread):
                self.constants[name] = value
        self.imported = {
            alias.asname or alias.name: (node.module or "", alias.name)
            for node in self.nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def _assigned(self) -> dict[str, ast.expr]:
        """The expressions of names that the whole script binds once."""
        bound: Counter[str] = Counter()
        found: dict[str, ast.expr] = {}
        for node in self.nodes:
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                    bound[name] += 1
                case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store()):  # settings["beta"] = 0.1
                    bound[name] += 1
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    found[name] = value
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    found[name] = value
        return {name: node for name, node in found.items() if bound[name] == 1}

    def source(self) -> ScriptSource:
        """Everything that the calls set."""
        source = ScriptSource(self.file, is_script=True)
        trainers, configs = self.calls("GRPOTrainer"), self.calls("GRPOConfig")
        if not trainers and not configs:
            raise self._without_grpo()
        for name, calls in (("GRPOTrainer", trainers), ("GRPOConfig", configs)):
            if len(calls) > 1:
                source.notes.append(f"the script has {len(calls)} {name} calls, and this reads the last")
        if configs:
            given = self.arguments(configs[-1], ("output_dir",))
            source.settings = {name: self.value(node) for name, node in given.items()}
        else:
            source.notes.append(FROM_COMMAND_LINE)
        if trainers:
            self._read_trainer(source, self.arguments(trainers[-1], POSITIONS))
        source.notes.append(ONLY_CALLS)
        return source

    def _without_grpo(self) -> ConfigError:
        found = [name for name in ("SFTTrainer", "DPOTrainer", "PPOTrainer", "RLOOTrainer") if self.calls(name)]
        problem = "has no GRPOConfig(...) and no GRPOTrainer(...)"
        return ConfigError(f"{problem}{f', but {found[0]}' if found else ''}", key=str(self.file))

    def _read_trainer(self, source: ScriptSource, arguments: dict[str, ast.expr]) -> None:
        for name, node in arguments.items():
            match name:
                case "args":
                    source.settings |= self._changes(node)
                case "model":
                    self._read_model(source, node)
                case "reward_funcs":
                    source.rewards = list(self._rewards(self.made(node)))
                case "train_dataset":
                    source.data = self._data(node)
                case "eval_dataset":
                    source.eval_data = self._loaded(self.made(node)) or self._unread(node)
                case "peft_config":
                    self._read_lora(source, node)
                case _:
                    source.ignored[name] = self.value(node)

    def _changes(self, args: ast.expr) -> dict[str, Unread]:
        """Settings that are assigned to the config after it is made."""
        return {
            node.attr: self._unread(node)
            for node in self.nodes
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(args, ast.Name)
            and isinstance(node.value, ast.Name)
            and node.value.id == args.id
        }

    def _read_model(self, source: ScriptSource, node: ast.expr) -> None:
        """A path, or `CLASS.from_pretrained(PATH, ...)`."""
        made = self.made(node)
        source.model = self.value(node)
        if isinstance(made, ast.Call) and last_name(made.func) == "from_pretrained":
            given = self.arguments(made, ("pretrained_model_name_or_path",))
            values = {name: self.value(one) for name, one in given.items() if name != "device_map"}
            source.model = values.pop("pretrained_model_name_or_path", None) or values.pop("model_name", None)
            for name, value in values.items():
                if name not in source.settings:
                    put(source, name, value)

    def _read_lora(self, source: ScriptSource, node: ast.expr) -> None:
        made = self.made(node)
        if isinstance(made, ast.Call) and last_name(made.func) == "LoraConfig":
            source.lora = {name: self.value(one) for name, one in self.arguments(made, ("r",)).items()}
        elif isinstance(made, ast.Call) and last_name(made.func) == "get_peft_config":
            source.settings.setdefault("use_peft", False)  # its arguments are those of the command line
        elif self.value(node) is not None:
            source.notes.append(f"peft_config={self._unread(node)} is not read: set model.lora.rank yourself")

    def _rewards(self, node: ast.expr) -> Iterator[RewardCall | Unread]:
        match node:
            case ast.List() | ast.Tuple():
                for one in node.elts:
                    yield from self._rewards(one)
            case ast.Name(id=name) if name in self.imported:
                module, there = self.imported[name]
                yield RewardCall(there, module)
            case ast.Name(id=name) if name in self.definitions():
                yield RewardCall(name)
            case _ if isinstance(path := self.value(node), str):
                yield RewardCall("model", path=path)
            case _:
                yield self._unread(node)

    def _data(self, node: ast.expr) -> Data | Unread:
        """The script's only `load_dataset(...)`, or the one behind a name."""
        if data := self._loaded(self.made(node)):
            return data
        calls = self.calls("load_dataset")
        data = self._loaded(calls[0]) if len(calls) == 1 else None
        if data is None:
            return self._unread(node)
        data.rest = self._unread(node)
        return data

    def _loaded(self, node: ast.expr) -> Data | None:
        """The dataset of `load_dataset(...)`; None for another expression, or without a literal path and files."""
        if not isinstance(node, ast.Call) or last_name(node.func) != "load_dataset":
            return None
        given = self.arguments(node, ("path", "name", "data_dir", "data_files", "split"))
        values = {name: value for name, one in given.items() if (value := self.value(one)) is not None}
        if not isinstance(values.get("path"), str) or isinstance(values.get("data_files"), Unread):
            return None
        texts = {key: value for key in ("name", "split") if isinstance(value := values.get(key), str)}
        used = {"path", "data_files", *texts}
        if isinstance(values.get("streaming"), bool):
            used.add("streaming")
        return Data(
            values["path"],
            texts.get("name"),
            texts.get("split"),
            values.get("data_files"),
            values.get("streaming") is True,
            others={key: value for key, value in values.items() if key not in used},
        )

    def value(self, node: ast.expr) -> Any:
        """The value of a literal or of a constant; Unread for anything else."""
        values: Any = None
        match node:
            case ast.Constant():
                return node.value
            case ast.Name(id=name) if name in self.constants:
                return self.constants[name]
            case ast.Attribute(value=ast.Name(id="torch")):  # torch.bfloat16
                return node.attr
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.List() | ast.Tuple() | ast.Set():
                values = [self.value(one) for one in node.elts]
            case ast.Dict() if all(isinstance(key, ast.Constant) for key in node.keys):
                keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
                values = dict(zip(keys, map(self.value, node.values), strict=True))
        inner = values.values() if isinstance(values, dict) else values
        return self._unread(node) if inner is None or any(isinstance(one, Unread) for one in inner) else values

    def made(self, node: ast.expr) -> ast.expr:
        """The expression behind a name that is bound once."""
        return self.assigned.get(node.id, node) if isinstance(node, ast.Name) else node

    def calls(self, name: str) -> list[ast.Call]:
        """The calls of a function, in the script's order."""
        found = [one for one in self.nodes if isinstance(one, ast.Call) and last_name(one.func) == name]
        return sorted(found, key=lambda call: call.lineno)

    def arguments(self, call: ast.Call, positions: tuple[str, ...]) -> dict[str, ast.expr]:
        """{name: expression} of a call; `**settings` of a dictionary that is written out is its entries."""
        found = dict(zip(positions, (one for one in call.args if not isinstance(one, ast.Starred)), strict=False))
        for keyword in call.keywords:
            inner = self.made(keyword.value)
            if keyword.arg is not None:
                found[keyword.arg] = keyword.value
            elif isinstance(inner, ast.Dict) and isinstance(entries := self.value(keyword.value), dict):
                found |= {str(key): one for key, one in zip(entries, inner.values, strict=True)}
            else:
                found[f"**{ast.unparse(keyword.value)}"] = keyword.value
        return found

    def definitions(self) -> dict[str, ast.stmt]:
        """The statements at the script's outermost level that bind a name: functions, classes, constants, imports."""
        found: dict[str, ast.stmt] = {}
        for statement in self.tree.body:
            match statement:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    found[name] = statement
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    found[name] = statement
                case ast.Import() | ast.ImportFrom() | ast.Try():
                    aliases = [one for one in ast.walk(statement) if isinstance(one, ast.alias)]
                    found |= {(one.asname or one.name).partition(".")[0]: statement for one in aliases}
        return found

    def _unread(self, node: ast.AST) -> Unread:
        return Unread(shortened(ast.unparse(node)), getattr(node, "lineno", 0))


def functions_file(source: ScriptSource) -> tuple[str, list[str]]:
    """The text of a file with the script's reward functions and what they need, and the names that stay behind.

    Importing the script would start its training. An assignment with a call (a tokenizer, a dataset) stays behind;
    `re.compile(...)` moves.
    """
    names = [one.name for one in source.rewards if isinstance(one, RewardCall) and not one.module and not one.path]
    if not names:
        return "", []
    script = Script(source.file)
    defined = script.definitions()
    chosen: set[ast.stmt] = set()
    left: list[str] = []
    while names:
        name = names.pop()
        statement = defined.get(name)
        if statement is None or statement in chosen:
            continue
        calls = [one.func for one in ast.walk(statement) if isinstance(one, ast.Call)]
        if isinstance(statement, ast.Assign | ast.AnnAssign) and any(ast.unparse(one) != "re.compile" for one in calls):
            left += [] if (text := f"{name} (line {statement.lineno}), which a call makes") in left else [text]
            continue
        chosen.add(statement)
        names += [one.id for one in ast.walk(statement) if isinstance(one, ast.Name)]
    lines = script.text.splitlines()
    texts = [f'"""The reward functions of {source.file.name}, moved by grpocli from-trl."""', *_future(script.tree)]
    for statement in sorted(chosen, key=lambda one: one.lineno):
        first = min([statement.lineno, *(one.lineno for one in getattr(statement, "decorator_list", []))])
        texts.append("\n".join(lines[first - 1 : statement.end_lineno]))
    return "\n\n".join(texts) + "\n", left


def _future(tree: ast.Module) -> list[str]:
    return [ast.unparse(one) for one in tree.body if isinstance(one, ast.ImportFrom) and one.module == "__future__"]


def script_text(file: Path) -> str:
    """The text of a script, or of the code cells of a notebook; lines for IPython (`!pip`, `%cd`) are `pass`."""
    text = read_text(file)
    if file.suffix == ".ipynb":
        cells = [one for one in read_mapping(file).get("cells", ()) if one.get("cell_type") == "code"]
        sources = ["".join(one.get("source", ())) for one in cells]
        text = "\n".join(one for one in sources if not one.lstrip().startswith(FOREIGN_CELLS))
    with suppress(SyntaxError, RecursionError, MemoryError):
        ast.parse(text)
        return text
    return IPYTHON.sub(lambda found: f"{found[1]}pass" + "\n" * found[0].count("\n"), text)


def last_name(node: ast.expr) -> str:
    """`b` of the expressions `b` and `a.b`; "" for others."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
