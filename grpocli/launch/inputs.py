"""What a run reads beside its config: weights, other files and user code, whose digests a resume compares.

A digest reads 64 MiB at most, so that it delays no start: smaller files whole, of larger ones blocks evenly spaced.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import xxhash

from grpocli.composition.overrides import PATH
from grpocli.config.parts import USER_CODE, is_marked
from grpocli.config.user_code import is_spec
from grpocli.config.yaml_text import TARGET, leaves
from grpocli.errors import ConfigError
from grpocli.runs.sessions import Changes
from grpocli.tasks.loading import kind_of

MODEL = "model"
"""The start model among the inputs: the base below LoRA, and the reference of a KL term."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
MEANING = ("config.json", "adapter_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
"""Files beside the weights that decide what they compute."""
RENDERING = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")
"""Files of a model that decide how prompts are written and where completions end."""
BLOCK, BLOCKS = 1 << 16, 1 << 10


def inputs_of(config: Mapping[str, Any], model_path: str, commit: str | None) -> dict[str, str]:
    """{config key: kind and digest} of all inputs that are files here; kind: `weights`, `code` or `content`.

    config: plain; keys of paths and of user code name inputs. model_path: the start model; commit: its commit, for a
    name on the hub, which a resume only tells: an edited page is another commit, too. Other names on the hub, addresses
    and installed packages have no digest.
    """
    kinds, found = {}, defaultdict[str, list[Path]](list)
    written = ("sync.", "tracker.")  # folders that the run itself fills
    for key, value in [*leaves(dict(config)), (MODEL, model_path)]:
        name, is_code = key.removesuffix(f".{TARGET}"), key.endswith(f".{TARGET}") or is_marked(key, USER_CODE)
        is_path = key == MODEL or (PATH.fullmatch(key) and key != "model.path" and not key.startswith(written))
        if isinstance(value, str) and (is_code or is_path):
            with suppress(OSError, RuntimeError):  # a text that is no path, or a file that the run itself reports
                kinds[name], files = ("code", _code(value)) if is_code else _files_of(Path(value).expanduser())
                found[name] += files
    found["model.chat_template"] += _named(Path(model_path), RENDERING)
    inputs = {key: f"{kinds.get(key, 'content')} {digest(files)}" for key, files in found.items() if files}
    return inputs if MODEL in inputs or not commit else inputs | {MODEL: f"commit {commit}"}


def _code(value: str) -> list[Path]:
    """The file of the user code that a value names, with its imports; none if it names no file here."""
    place = value.rpartition(":")[0] if is_spec(value) else ""
    if place.endswith(".py"):
        file = Path(place).expanduser().absolute()
        packages = [folder for folder in file.parents if (folder / "__init__.py").is_file()]
        return _with_imports([file], [file.parent, *(folder.parent for folder in packages)]) if file.is_file() else []
    return _with_imports(_files_of_module(Path.cwd(), place), [Path.cwd()]) if place else []


def _files_of(path: Path) -> tuple[str, list[Path]]:
    """The kind of the input at a path, and its files; none if nothing is there."""
    if not path.is_dir():
        return "content", [path] if path.is_file() else []
    here = sorted(file for file in path.iterdir() if file.is_file())
    if weights := [file for file in here if file.suffix in WEIGHTS]:
        return "weights", [*weights, *_named(path, MEANING)]
    below = sorted(file for file in path.glob("*/*") if file.is_file())
    return "content", [file for file in (*here, *below) if kind_of(file.name)]


def _named(folder: Path, names: Sequence[str]) -> list[Path]:
    return [folder / name for name in names if (folder / name).is_file()]


def _files_of_module(folder: Path, name: str) -> list[Path]:
    """The files that the import of a module below a folder reads: its packages' and its own."""
    places = [folder.joinpath(*name.split(".")[: n + 1]) for n in range(name.count(".") + 1)]
    files = [file for place in places for file in (place / "__init__.py", place.with_name(f"{place.name}.py"))]
    return [file for file in files if file.is_file()]


def _with_imports(files: Sequence[Path], roots: Sequence[Path]) -> list[Path]:
    """Files of Python, and what they import from `roots` or relative to themselves."""
    found, waiting = set(files), list(files)
    while waiting:
        file, nodes = waiting.pop(), []
        with suppress(SyntaxError, ValueError):  # the run reports it
            nodes = list(ast.walk(ast.parse(file.read_bytes())))
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                level, base = getattr(node, "level", 0), getattr(node, "module", None)
                names = [f"{base}.{alias.name}" if base else alias.name for alias in node.names]
                places = product(file.parents[level - 1 : level] if level else roots, names)
                new = {path for place in places for path in _files_of_module(*place)} - found
                found |= new
                waiting += new
    return sorted(found)


def digest(files: Sequence[Path]) -> str:
    """The XXH3 digest of the sizes and of at most BLOCKS blocks, which all files share."""
    sizes = [file.stat().st_size for file in files]
    found = xxhash.xxh3_128(repr(sizes).encode())
    for path, size in zip(files, sizes, strict=True):
        with path.open("rb", buffering=0) as file:
            for place in range(0, size, max(BLOCK, sum(sizes) // BLOCKS)):
                file.seek(place)
                found.update(file.read(BLOCK))
    return found.hexdigest()


def changed_inputs(before: Mapping[str, str], now: Mapping[str, str], changed: Changes, allowed: bool) -> list[str]:
    """A sentence for each input of a resume whose content is not that of the run so far.

    changed: the config's keys; such a key names another input on purpose, but the start model may only be elsewhere.
    Raises ConfigError for weights that are not `allowed`.
    """
    sentences = []
    for key, value in now.items():
        given = key != MODEL and any(f"{key}.".startswith(f"{one}.") for one in changed)
        if not given and before.get(key, value) != value:
            kind = value.partition(" ")[0]
            if kind == "weights" and not allowed:
                problem = "its weights or its tokenizer differ from those of the last session"
                hint = "give those, or resume_other_weights=true to go on with these"
                raise ConfigError(problem, key=key, hint=hint)
            sentences.append(
                f"the {kind} of {key} {'have' if kind == 'weights' else 'has'} changed since the last start"
            )
    return sentences


def check_fits(part: Any, path: str, checkpoint: Path) -> None:
    """Raise ConfigError if the start model at `path` has other tokens than a checkpoint."""
    from grpocli.models.loading import load_tokenizer
    from grpocli.models.teacher import difference

    if problem := difference(*(load_tokenizer(part, one).get_vocab() for one in (str(checkpoint), path))):
        raise ConfigError(problem, key="model.path", value=path, hint="another model needs a new run")
