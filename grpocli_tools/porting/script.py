"""A training script read as syntax: its calls of GRPOConfig, LoraConfig, GRPOTrainer and load_dataset. Nothing is run.

Literals and constants of the script are values. Anything else is `Unread`, which becomes a `# check:` line.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpocli.config import yaml_text
from grpocli.config.parts import nearest
from grpocli.errors import ConfigError
from grpocli_tools.porting.foreign_names import ALIASES, LORA_CONFIG, TRAINER, TRL
from grpocli_tools.porting.port import Unread, short


@dataclass(frozen=True, slots=True)
class RewardCall:
    """A reward function, or a reward model."""

    name: str
    module: str = ""
    """Where it is imported from; "" for a function of the script."""
    path: str = ""
    """The reward model."""


@dataclass(slots=True)
class Data:
    """A dataset: the arguments of `load_dataset`."""

    path: str = ""
    name: str | None = None
    split: str | None = None
    files: Any = None
    others: dict[str, Any] = field(default_factory=dict)
    """Arguments without a field here."""
    rest: Unread | None = None
    """What the script does to it, which is not carried over."""


@dataclass(slots=True)
class ScriptSource:
    """What a file sets."""

    file: Path
    settings: dict[str, Any] = field(default_factory=dict)
    """{field: value or Unread} of GRPOConfig and what `trl grpo` reads beside it."""
    model: str | Unread | None = None
    rewards: list[RewardCall | Unread] = field(default_factory=list)
    data: Data | Unread | None = None
    eval_data: Data | Unread | None = None
    lora: dict[str, Any] | None = None
    """Arguments of LoraConfig."""
    ignored: dict[str, Any] = field(default_factory=dict)
    """Arguments of GRPOTrainer and others that are not settings."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know."""


def read_text(file: Path) -> str:
    """The text of a file. Raises ConfigError if it cannot be read, or is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 (byte {error.start:,})", key=str(file), hint="save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", key=str(file)) from error


def read_mapping(file: Path) -> dict[str, Any]:
    """The mapping of a YAML or JSON file. Raises ConfigError if it is broken or not a mapping."""
    text = read_text(file)
    try:
        values = json.loads(text) if file.suffix in (".json", ".ipynb") else yaml_text.load(text)
    except (ValueError, RecursionError) as error:
        hint = "give a YAML, a JSON or a .py file"
        raise ConfigError(f"cannot be read: {error}", key=str(file), hint=hint) from error
    if not isinstance(values, dict):
        raise ConfigError(f"is a {type(values).__name__}, not a mapping of settings", key=str(file))
    return {str(key): value for key, value in values.items()}


def of_mapping(file: Path, values: Mapping[str, Any]) -> ScriptSource:
    """The source of a `trl grpo --config` file. Raises ConfigError if no key of it is known."""
    if not TRL.keys() & values.keys():
        close = next((nearest(name, TRL) for name in values if nearest(name, TRL)), "")
        hint = "give the config of `trl grpo --config` or of NeMo RL, or a script with GRPOConfig(...)"
        raise ConfigError(f"has no key of TRL{close}", key=str(file), hint=hint)
    source = ScriptSource(file)
    for name, value in values.items():
        put(source, name, value)
    return source


def put(source: ScriptSource, name: str, value: Any) -> None:
    """Store a value of a config or a command line where the translation looks for it."""
    data = source.data if isinstance(source.data, Data) else Data(rest=source.data)
    match name:
        case "model_name_or_path":
            source.model = value if isinstance(value, Unread) else str(value)
        case "reward_funcs":
            names = [str(one).rpartition(".") for one in (value if isinstance(value, list) else [value])]
            source.rewards += [RewardCall(function, module or "trl.rewards") for module, _, function in names]
        case "reward_model_name_or_path":
            source.rewards.insert(0, RewardCall("model", path=str(value)))
        case "dataset_name":
            source.data, data.path = data, str(value)
        case "dataset_config":
            source.data, data.name = data, None if value is None else str(value)
        case "dataset_train_split":
            source.data, data.split = data, str(value)
        case "dataset_test_split":
            source.eval_data = Data(split=str(value))
        case "datasets" if isinstance(value, list) and value and isinstance(value[0], dict):
            first = value[0]
            source.data = Data(
                str(first.get("path", "")), first.get("name"), first.get("split"), first.get("data_files")
            )
            if len(value) > 1:
                note = f"the mixture has {len(value)} datasets, and this takes the first"
                source.notes.append(f"{note}: task=[A,B] trains on several")
        case _ if name in TRL or name in TRAINER or name in LORA_CONFIG or name in ALIASES:
            source.settings[name] = value
        case _:
            source.ignored[name] = value


IPYTHON = re.compile(r"^([ \t]*)[!%](?:.*\\\n)*.*$", re.MULTILINE)
"""Lines for the shell or for IPython in a notebook."""
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
    source = Script(file).source()
    given = arguments_of(words)
    if isinstance(config := given.pop("config", None), str):  # as TrlParser reads it, here or beside the script
        beside = file.parent / config
        given = read_mapping(beside if beside.is_file() and not Path(config).is_file() else Path(config)) | given
    if given and FROM_COMMAND_LINE in source.notes:
        source.notes.remove(FROM_COMMAND_LINE)
    for name, value in given.items():
        put(source, name, value)
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
            raise ConfigError("an expression is nested too deep to be read", key=str(file)) from error
        self.nodes = list(ast.walk(self.tree))
        self.assigned = self._assigned()
        self.constants: dict[str, Any] = {}
        for name, node in self.assigned.items():
            if not isinstance(value := self.value(node), Unread):
                self.constants[name] = value
        self.definitions = self._definitions()
        self.imported = {
            alias.asname or alias.name: node.module or ""
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

    def _definitions(self) -> dict[str, ast.stmt]:
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

    def source(self) -> ScriptSource:
        source = ScriptSource(self.file)
        trainers, configs = self.calls("GRPOTrainer"), self.calls("GRPOConfig")
        if not trainers and not configs:
            raise ConfigError("has no GRPOConfig(...) and no GRPOTrainer(...)", key=str(self.file))
        if len(trainers) > 1 or len(configs) > 1:
            source.notes.append("the script has several GRPOTrainer or GRPOConfig calls, and this reads the last")
        if configs:
            given = self.arguments(configs[-1], ("output_dir",))
            source.settings = {name: self.value(node) for name, node in given.items()}
        else:
            source.notes.append(FROM_COMMAND_LINE)
        for name, node in self.arguments(trainers[-1], POSITIONS).items() if trainers else ():
            self._read_argument(source, name, node)
        source.notes.append(ONLY_CALLS)
        return source

    def _read_argument(self, source: ScriptSource, name: str, node: ast.expr) -> None:
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
            and ast.unparse(node.value) == ast.unparse(args)
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
            case ast.Name(id=name) if name in self.imported or name in self.definitions:
                yield RewardCall(name, self.imported.get(name, ""))
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
        path, files = values.pop("path", None), values.pop("data_files", None)
        if not isinstance(path, str) or isinstance(files, Unread):
            return None
        read = {key: values.pop(key) for key in ("name", "split") if isinstance(values.get(key), str)}
        return Data(path, read.get("name"), read.get("split"), files, others=values)

    def value(self, node: ast.expr) -> Any:
        """The value of a literal or of a constant; Unread for anything else."""
        match node:
            case ast.Name(id=name) if name in self.constants:
                return self.constants[name]
            case ast.Attribute(value=ast.Name(id="torch")):  # torch.bfloat16
                return node.attr
            case ast.Dict(keys=keys, values=nodes):
                names = [None if key is None else self.value(key) for key in keys]
                found = dict(zip(names, map(self.value, nodes), strict=True))
                readable = all(isinstance(key, str | int) for key in names)
                return self._unread(node) if not readable or _any_unread(found.values()) else found
            case ast.List(elts=nodes) | ast.Tuple(elts=nodes) | ast.Set(elts=nodes):
                values = [self.value(one) for one in nodes]
                return self._unread(node) if _any_unread(values) else values
        try:
            return ast.literal_eval(node)
        except ValueError:
            return self._unread(node)

    def made(self, node: ast.expr) -> ast.expr:
        """The expression behind a name that is bound once."""
        return self.assigned.get(node.id, node) if isinstance(node, ast.Name) else node

    def calls(self, name: str) -> list[ast.Call]:
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

    def _unread(self, node: ast.AST) -> Unread:
        return Unread(short(ast.unparse(node)), getattr(node, "lineno", 0))


def functions_file(source: ScriptSource) -> tuple[str, list[str]]:
    """The text of a file with the script's reward functions and what they need, and the names that stay behind.

    Importing the script would start its training. An assignment with a call (a tokenizer, a dataset) stays behind;
    `re.compile(...)` moves.
    """
    names = [one.name for one in source.rewards if isinstance(one, RewardCall) and not one.module and not one.path]
    if not names:
        return "", []
    script = Script(source.file)
    chosen: set[ast.stmt] = set()
    left: dict[str, None] = {}
    while names:
        name = names.pop()
        statement = script.definitions.get(name)
        if statement is None or statement in chosen:
            continue
        calls = [ast.unparse(one.func) for one in ast.walk(statement) if isinstance(one, ast.Call)]
        if isinstance(statement, ast.Assign | ast.AnnAssign) and set(calls) - {"re.compile"}:
            left[f"{name} (line {statement.lineno}), which a call makes"] = None
            continue
        chosen.add(statement)
        names += [one.id for one in ast.walk(statement) if isinstance(one, ast.Name)]
    future = [one for one in script.tree.body if isinstance(one, ast.ImportFrom) and one.module == "__future__"]
    lines = script.text.splitlines()
    texts = [f'"""The reward functions of {source.file.name}, moved by grpocli from-trl."""']
    for statement in sorted({*future, *chosen}, key=lambda one: one.lineno):
        first = min([statement.lineno, *(one.lineno for one in getattr(statement, "decorator_list", []))])
        texts.append("\n".join(lines[first - 1 : statement.end_lineno]))
    return "\n\n".join(texts) + "\n", list(left)


def script_text(file: Path) -> str:
    """The text of a script, or of the Python cells of a notebook; lines for IPython (`!pip`, `%cd`) are `pass`."""
    if file.suffix == ".ipynb":
        cells = [one for one in read_mapping(file).get("cells", ()) if one.get("cell_type") == "code"]
        sources = ["".join(one.get("source", ())) for one in cells]
        text = "\n".join(one for one in sources if not one.startswith("%%") or one.startswith("%%capture"))
    else:
        text = read_text(file)
    try:
        ast.parse(text)
    except SyntaxError:
        return IPYTHON.sub(lambda found: f"{found[1]}pass" + "\n" * found[0].count("\n"), text)
    except (RecursionError, MemoryError):
        pass  # which `Script` says
    return text


def last_name(node: ast.expr) -> str:
    """`b` of the expressions `b` and `a.b`; "" for others."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _any_unread(values: Any) -> bool:
    return any(isinstance(one, Unread) for one in values)
