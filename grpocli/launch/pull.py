"""`resume=hub:OWNER/NAME`: the folder of a pushed run, with its newest checkpoint, on this machine.

The downloaded config could name any code. So code outside grpocli must be named again on the command line.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grpocli.config import yaml_text
from grpocli.config.parts import USER_CODE, is_marked
from grpocli.errors import ConfigError
from grpocli.files import remove
from grpocli.hub import HubPath, hub_api, hub_errors, hub_path
from grpocli.launch.push import TEXTS
from grpocli.launch.report_page import foreign_target
from grpocli.tracking.published import ELSEWHERE
from grpocli.tracking.run_dir import RunDir

KEY = "resume"
STATE = "trainer.json"
CONFIG = "config.yaml"


def fetched(overrides: Sequence[str]) -> list[str]:
    """The overrides with the folder of the downloaded run in the place of `resume=hub:...`.

    The folder is that of hydra.run.dir=, or runs/OWNER/NAME. Raises ConfigError if there is no such run, if the folder
    is taken, or if the run needs something that is not given here.
    """
    named = [text.partition("=")[2] for text in overrides if text.startswith(f"{KEY}=")][-1].strip("'\"")
    place = hub_path(named, KEY)
    assert place is not None
    if place.folder:
        raise ConfigError("expected hub:OWNER/NAME, hub:OWNER/NAME@REVISION", key=KEY, value=named)
    folders = [text.partition("=")[2].strip("'\"") for text in overrides if text.startswith("hydra.run.dir=")]
    folder = Path(folders[-1]) if folders else Path("runs") / place.repo
    rest = [text for text in overrides if not text.startswith((f"{KEY}=", "hydra.run.dir="))]
    fetch(place, named, folder, rest)
    return [f"{KEY}='{folder}'", *rest]


def fetch(place: HubPath, named: str, folder: Path, given: Sequence[str]) -> None:
    """Download a run into a new folder. given: overrides, which may name code and files again."""
    RunDir(folder).check_free()
    partial = folder.with_name(f"{folder.name}.download")
    print(f"downloading {named} ...", flush=True)
    with hub_errors(KEY, named):
        from huggingface_hub import hf_hub_download, snapshot_download

        api = hub_api()
        commit = api.repo_info(place.repo, revision=place.revision).sha
        files = api.list_repo_files(place.repo, revision=commit)
        if CONFIG not in files:
            raise ConfigError("holds no run of grpocli: there is no config.yaml in it", key=KEY, value=named)
        check_config(Path(hf_hub_download(place.repo, CONFIG, revision=commit)), named, given)
        checkpoint = newest_checkpoint(files, named)
        wanted = [*TEXTS, "rollouts/step_*.parquet", f"{checkpoint}/*"]
        snapshot_download(place.repo, revision=commit, local_dir=partial, allow_patterns=wanted)
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    if folder.exists():
        remove(folder)  # it is free, so it is empty but for the log of a run that never began
    partial.rename(folder)


def newest_checkpoint(files: Sequence[str], named: str) -> str:
    """The folder of the newest checkpoint among the files of a repository."""
    found = [path.removesuffix(f"/{STATE}") for path in files if path.startswith("checkpoints/step_")]
    whole = sorted(path for path in found if f"{path}/{STATE}" in files)
    if not whole:
        problem = "holds no checkpoint, from which alone a run resumes"
        hint = "push them with hub.checkpoints=true, or grpocli push RUN --checkpoints"
        raise ConfigError(problem, key=KEY, value=named, hint=hint)
    return whole[-1]


def check_config(path: Path, named: str, given: Sequence[str]) -> None:
    """Raise ConfigError if the config names code outside grpocli, or files that are not on the hub, and `given` does
    not name them again."""
    try:
        config = yaml_text.load(path.read_text())
    except (ValueError, OSError) as error:
        raise ConfigError(f"its config.yaml is broken: {error}", key=KEY, value=named) from error
    keys = [text.lstrip("+~").partition("=")[0].partition("@")[0].replace("/", ".") for text in given]
    for key, value in _leaves({name: node for name, node in config.items() if name != "overrides"}):
        if any(key == one or key.startswith(f"{one}.") for one in keys):
            continue
        if _runs_code(key, value):
            problem = f"its config runs code outside grpocli, {key}={value}"
            raise ConfigError(problem, key=KEY, value=named, hint="if you trust it, give this key again")
        if isinstance(value, str) and value.startswith(f"{ELSEWHERE}/"):
            problem = f"{key} was a file outside of the run, {Path(value.partition('/')[2])}, which is not on the hub"
            raise ConfigError(problem, key=KEY, value=named, hint="give this key again, with its place here")


def _runs_code(key: str, value: Any) -> bool:
    """Whether a value of a config makes the run execute code that is no part of grpocli."""
    name = key.rpartition(".")[2]
    if name == "_target_":
        return bool(foreign_target({"_target_": value}))
    return bool(value) and (name == "trust_remote_code" or is_marked(key, USER_CODE))


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key, value) of each plain value of a config; a list's values have the key of the list."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _leaves(value, f"{prefix}.{name}".lstrip("."))
    elif isinstance(node, list):
        for value in node:
            yield from _leaves(value, prefix)
    else:
        yield prefix, node
