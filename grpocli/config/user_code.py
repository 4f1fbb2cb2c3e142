"""User code that a config names as FILE.py:NAME or module:NAME: loaded, as a choice, and its lines in errors.

A class is a choice of its group, `algorithm/advantage=FILE.py:CLASS`: a dataclass with or without `@part`, whose fields
are typed keys. A plain function is a reward, `reward=[FILE.py:NAME]`, called as by `reward=[python]`. A config source
of Hydra's (`composition/hydra_sources.py`) resolves them, so they work in overrides, lists, sweeps and recipes.
"""

from __future__ import annotations

import dataclasses
import errno
import importlib
import importlib.util
import os
import random
import re
import sys
import sysconfig
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from grpocli.config.parts import BASES, CLASSES, config_node, nearest, section, target_of
from grpocli.errors import ConfigError, GrpoError, RunError, causes, config_errors
from grpocli.plugins import plugins
from grpocli.text import shorten
from grpocli.version import PACKAGE

LONGEST = 120
"""The longest line of code that is shown, in characters."""
INSTALLED = ("site-packages", "dist-packages")
OTHERS = (PACKAGE, PACKAGE.parent / "hydra_plugins" / "grpocli_slurm", Path(sysconfig.get_path("stdlib")))
"""Folders of code that is not the user's, beside those of commands: grpocli, its Hydra plugin in a clone, Python."""

SAYS_MEMORY = re.compile(
    r"out of memory|can(?:no|')t allocate|failed to map segment|malloc of size|bad_alloc|start (?:new|watchdog) thread",
    re.IGNORECASE,
)
"""Messages of libraries about too little memory."""
DEFINED = re.compile(r"^(?:(?:async +)?def +|class +)?(\w+) *[(:=]", re.MULTILINE)
"""The names that source defines at its top level; others may come from an import or be made at run time."""

SPEC = re.compile(r"(?:[^:=\[\]{},]+|.+\.py):[A-Za-z_]\w*")
"""FILE.py:NAME or module:NAME."""
GROUP = re.compile(r"algorithm/\w+|engine|hardware|model|optim|reward|sync|task|tracker")
"""The config groups that accept parts of users."""
CHOICE = re.compile(rf"({GROUP.pattern})/({SPEC.pattern})")
ATTRIBUTE = None
REQUIRED_MEMBERS: Mapping[str, Mapping[str, str | None]] = {
    "algorithm/advantage": {"__call__": "scores"},
    "algorithm/aggregate": {"__call__": "mask group_ids totals"},
    "algorithm/correction": {"__call__": "old_logp rollout_logp mask"},
    "algorithm/entropy": {"__call__": "entropy", "coefficient": ATTRIBUTE},
    "algorithm/keep": {
        "__call__": "rewards",
        **dict.fromkeys(("mask_truncated", "max_rounds", "on_exhausted", "surplus", "reward"), ATTRIBUTE),
    },
    "algorithm/kl": {"__call__": "logp old_logp ref_logp", "beta": ATTRIBUTE},
    "algorithm/objective": {"__call__": "logp old_logp advantages mask"},
    "algorithm/question_weight": {"__call__": "scores accuracy", "reward": ATTRIBUTE},
    "algorithm/tokens": {"__call__": "entropy mask", "needs_entropy": ATTRIBUTE},
    "engine": {"launch": "job", "connect": "context"},
    "model": {"prepare": "report", "lora": ATTRIBUTE, "dtype": ATTRIBUTE},
    "optim": {"make": "parameters", "rate": "step total"},
    "reward": {"__call__": "samples"},
    "sync": {"choose": "servers"},
    "task": {"examples": "split"},
    "tracker": {"start": "name folder config done"},
}
"""{group: {member: a method's arguments, or ATTRIBUTE}} that every part of the group must have."""


def load(function: str, key: str) -> Callable[..., Any]:
    """Import the function or class that FILE.py:NAME or module:NAME names.

    Raises ConfigError for `key` if there is none.
    """
    place, _, name = function.rpartition(":")
    with config_errors(Exception, SystemExit, says="importing it raised {}", why=raised, key=key, value=function):
        if place.endswith(".py"):
            module = _file(_existing(place, key))
        else:
            _reachable(Path.cwd())
            module = importlib.import_module(place)
    found = getattr(module, name, None)
    if not callable(found):
        if hasattr(module, name):
            problem = f"{name} in {place} is of type {type(found).__name__}; give a function or a class"
            raise ConfigError(problem, key=key, value=function)
        raise _no_name(function, place, name, vars(module), key)
    result: Callable[..., Any] = found
    return result


def absolute(function: str) -> str:
    """The name with an absolute path, which is valid in every folder.

    A module that is a file in the working directory becomes that file; other modules stay.
    """
    place, colon, name = function.rpartition(":")
    if not place.endswith(".py"):
        file = Path(f"{place}.py")
        if not file.is_file():
            return function
        place = str(file)
    return f"{Path(place).expanduser().resolve()}{colon}{name}"


def short(spec: str) -> str:
    """FILE.py:NAME without folders."""
    place, _, name = spec.rpartition(":")
    return f"{Path(place).name}:{name}"


def check_exists(function: str, key: str) -> None:
    """Raise the ConfigError of `load` if the file, module or name is missing, without importing it.

    The import happens later, since it may be slow. Passes if the source may define the name at run time.
    """
    place, _, name = function.rpartition(":")
    with config_errors(Exception, says="importing it raised {}", why=raised, key=key, value=function):
        if (path := _existing(place, key) if place.endswith(".py") else _source_of(place)) is None:
            return
        source = path.read_text(errors="replace")
        compile(source, str(path), "exec")
    if not re.search(rf"\b{re.escape(name)}\b|import \*|__getattr__", source):
        raise _no_name(function, place, name, DEFINED.findall(source), key)


def _source_of(module: str) -> Path | None:
    """The file of a module; None for one in a package, which only an import finds."""
    _reachable(Path.cwd())
    package, _, rest = module.partition(".")
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {package!r}")
    return Path(spec.origin) if not rest and spec.origin and spec.origin.endswith(".py") else None


def _existing(place: str, key: str) -> Path:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise no_such_file(path, key)
    return path


def no_such_file(path: Path, key: str) -> ConfigError:
    """The ConfigError for a missing file of Python code, or for a folder if it has another ending."""
    kind, pattern = ("file", "*.py") if path.suffix == ".py" else ("folder", "*")
    beside = [file.name for file in path.parent.glob(pattern)] if path.parent.is_dir() else []
    return ConfigError(f"there is no such {kind}{nearest(path.name, beside)}", key=key, value=path)


def _no_name(function: str, place: str, name: str, names: Iterable[str], key: str) -> ConfigError:
    return ConfigError(f"{place} has no function or class {name}{nearest(name, names)}", key=key, value=function)


def _reachable(folder: Path) -> None:
    """Append a folder to the import path, after installed packages."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _file(path: Path) -> Any:
    """Import a file once, so that all configs get the same classes."""
    _reachable(path.parent)  # as for a script
    # two folders may have files of the same name
    name = f"grpocli_user_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up modules by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # the next import raises the error again instead of finding half a module
        raise
    return module


def is_spec(choice: str) -> bool:
    """Whether a choice names user code."""
    return SPEC.fullmatch(choice) is not None


def name_of(choice: str) -> str:
    """The name of a choice in a config; for user code the function's name, or the class's in snake case."""
    if not is_spec(choice):
        return choice
    name = choice.rpartition(":")[2]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower() if name[:1].isupper() else name


def choice_of(group: str, part: object) -> str:
    """The choice that builds a part: its registered name, FILE.py:CLASS for user code, or an import path."""
    target = target_of(type(part))
    return short(target) if is_spec(target) else target.removeprefix(f"{group}/")


def config_of(group: str, spec: str) -> tuple[DictConfig, str]:
    """The typed config of FILE.py:NAME, and the package of its keys. Raises ConfigError if it is no part."""
    package = f"reward.{name_of(spec)}" if group == "reward" else group.replace("/", ".")
    found = load(spec, group)
    if not isinstance(found, type):
        if group != "reward":
            calls = [f"{name}({', '.join(a.split())})" for name, a in REQUIRED_MEMBERS[group].items() if a is not None]
            problem = f"is a function, which only reward= accepts; give a class with {', '.join(calls)}"
            raise ConfigError(problem, key=group, value=spec)
        config = config_node(CLASSES["reward/python"])
        config.function = spec
        return config, package
    says = "has a field that cannot be a config key: {}"
    with config_errors(OmegaConfBaseException, says=says, key=group, value=spec):
        return config_node(_as_part(found, group, spec, package)), package


def user_class(spec: str, key: str) -> type[Any]:
    """The class FILE.py:CLASS as a part whose keys are below `key`. Raises ConfigError if it cannot be one."""
    first, *rest = key.split(".")
    group = f"{first}/{rest[0]}" if first == "algorithm" and rest else first
    cls: Any = load(spec, group)
    if not isinstance(cls, type):
        raise ConfigError("is a function, which is not a part: name a class", key=key, value=spec)
    return _as_part(cls, group, spec, key if first == "reward" else group.replace("/", "."))


def _as_part(cls: type[Any], group: str, spec: str, key: str) -> type[Any]:
    """The class as a part; a plain class becomes a frozen dataclass. Raises ConfigError if that fails."""
    if "__dataclass_params__" not in cls.__dict__:
        says = "cannot be made a frozen dataclass: {}"  # such as a base that is not frozen, or a mutable default
        with config_errors(TypeError, ValueError, says=says, key=group, value=spec):
            if "__init__" in cls.__dict__:
                raise TypeError("it defines __init__, and its fields would be its keys")
            section(key)(cls)
    if "config_key" not in cls.__dict__:
        cls.config_key = key
    cls.config_target = spec
    check_members(cls, group, spec)
    return cls


def check_members(cls: type[Any], group: str, spec: str) -> None:
    """Raise ConfigError unless the class has the base and the members of its group."""
    base = BASES.get(group, object)
    if not issubclass(cls, base):
        raise ConfigError(f"must derive from {base.__module__}.{base.__qualname__}", key=group, value=spec)
    members = {f.name for f in dataclasses.fields(cls)}.union(*map(vars, cls.__mro__))
    if missing := [name for name in REQUIRED_MEMBERS.get(group, {}) if name not in members]:
        raise ConfigError(f"must define {' and '.join(missing)}, as every choice of {group}=", key=group, value=spec)


@contextmanager
def keep_random_state(seed: int | None = None) -> Iterator[None]:
    """A block that begins with this seed, and after which the generators of Python, NumPy and torch are as before."""
    import numpy as np
    import torch

    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed)
                torch.manual_seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def raised(error: BaseException) -> str:
    """`IndexError: list index out of range (rewards.py:12, in score: return x[0])`, on one line.

    With GRPOCLI_TRACEBACK=1 the traceback follows. It is part of the text because worker processes send only text.
    """
    try:
        message = " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())
    except Exception:  # noqa: BLE001 - of an error of the user's whose text raises
        message = ""
    return f"{type(error).__name__}{message and f': {message}'}{where(error)}"


def where(error: BaseException) -> str:
    """` (rewards.py:12, in score: return x[0])`; empty without a frame of user code.

    It has at most two frames: the last one and its caller.
    """
    if isinstance(error, SyntaxError) and error.filename and _is_users(error.filename):
        frames = [f"{_short(error.filename)}:{error.lineno}: {_cut(error.text or '')}"]
    else:
        stack = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
        # a function and a comprehension on the same line: keep the function
        lines = {(f.filename, f.lineno): f for f in reversed(stack)}
        frames = [f"{_short(f.filename)}:{f.lineno}, in {f.name}: {_cut(f.line or '')}" for f in lines.values()]
    if not frames:
        return ""
    place = f" ({'; called at '.join(frames[:2])})"
    if os.environ.get("GRPOCLI_TRACEBACK"):
        place += "\n" + "".join(traceback.format_exception(error))
    return place


def from_user_code(error: BaseException) -> bool:
    """Whether user code raised an error or one of its causes, so that the message names the line.

    A GrpoError of user code does not count: it is a sentence for the user already.
    """
    return any(where(one) for one in causes(error) if not isinstance(one, GrpoError))


def too_little_memory(error: BaseException) -> RunError | None:
    """The RunError for an error that has too little memory among its causes; None for user code's and any other."""
    for one in takewhile(lambda one: not where(one), causes(error)):
        name, text = type(one).__name__, " ".join(str(one).split())[:300]
        told = isinstance(one, ImportError | RuntimeError) and SAYS_MEMORY.search(text)  # torch raises RuntimeErrors
        if told or isinstance(one, MemoryError) or getattr(one, "errno", None) == errno.ENOMEM:
            advice = "lower train.micro_batch_tokens, and" if "OutOfMemory" in name else "free some, or"
            return RunError(f"too little memory: {name}: {text}".rstrip(": .") + f"; {advice} see `grpocli plan`")
    return None


def _is_users(filename: str) -> bool:
    if filename.startswith("<") or any(part in INSTALLED for part in Path(filename).parts):
        return False
    tools = {PACKAGE.parent / plugin.module.partition(".")[0] for plugin in plugins("grpocli.commands").values()}
    return not any(Path(filename).is_relative_to(folder) for folder in (*OTHERS, *tools))


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


def _cut(line: str) -> str:
    return shorten(" ".join(line.split()), LONGEST)
