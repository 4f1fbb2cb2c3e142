"""Checkpoints: a folder that transformers can load, plus what a resume needs. Written beside, then renamed."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.distributed import sharded_safetensors as shards
from grpocli.errors import ConfigError, GrpoError
from grpocli.files import atomic_folder, full_disk_as_oserror, remove
from grpocli.models.lora import adapter_tensors, is_adapted, save_adapter
from grpocli.progress import Progress, unreported
from grpocli.tracking.run_dir import RunDir
from grpocli.tracking.sessions import run_id
from grpocli.training import checksums, leftover_groups, optimizer_state

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpocli.distributed.world import World
    from grpocli.training.collect import Collected
    from grpocli.training.policy import Policy
    from grpocli.training.reference import Reference
    from grpocli.types import Group

STATE = "trainer.json"
NAME = re.compile(r"step_(\d+)")
UNREADABLE = (GrpoError, RuntimeError, ValueError, KeyError, TypeError, EOFError)
"""What reading a file with unexpected content raises."""
LOST = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EIO)
"""Error numbers of a file that is damaged. With any other, such as a missing permission, it may be whole."""
REFERENCE = "reference"
WEIGHTS = "model"
CHECKSUMS = "checksums"
"""The key of STATE that says that there are checksums. Earlier versions wrote none."""


@dataclass(frozen=True, slots=True)
class State:
    """Where a run stands. Everything random is drawn from the seed and these counters.

    step: steps done. draws: prompts drawn. updates: optimizer updates. seconds: time spent. before: the
    evaluation before training. num_tokens: of prompts and completions, in the steps done. unevaluated: the evaluation
    after `step` was due and has not ended. run: `sessions.run_id`. Raises ValueError where one is out of range.
    """

    step: int = 0
    draws: int = 0
    updates: int = 0
    seconds: float = 0.0
    before: dict[str, float] | None = None
    num_tokens: int = 0
    unevaluated: bool = False
    run: str = ""

    def __post_init__(self) -> None:
        counts = (self.step, self.draws, self.updates, self.num_tokens)
        fits = all(type(count) is int and count >= 0 for count in counts)
        fits = fits and isinstance(self.seconds, float | int) and 0 <= self.seconds < math.inf
        if not (fits and isinstance(self.before, dict | None) and isinstance(self.unevaluated, bool)):
            raise ValueError(f"{STATE} holds a value that no run has")


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint holds beside `State`.

    reference: only if it changes in training. carried, ahead: groups and whole steps that have been sampled for the
    steps to come.
    """

    policy: Policy
    optimizer: Any
    tokenizer: PreTrainedTokenizerBase
    reference: Reference | None = None
    carried: Sequence[Group] = ()
    ahead: Sequence[Collected] = ()


def save(path: Path, state: State, contents: Contents, world: World, progress: Progress = unreported) -> None:
    """Write the checkpoint `path`; it exists only when it is whole. Collective.

    With LoRA it holds the updates alone: the base model does not change. progress: called for each tensor of the model
    that is written; the optimizer's state comes last.
    """
    policy, reference = contents.policy, contents.reference
    parallel = policy.parallel
    with _folder(path, world) as folder:
        if is_adapted(policy.model):
            updates = dict(_gathered(policy, adapter_tensors(policy.model)))
            if world.is_main:
                save_adapter(policy.model, folder, updates)
        else:
            _save_weights(policy.model, folder, _gathered(policy, parallel.parameters(policy.model), progress), world)
        if reference is not None:
            theirs = _gathered(policy, parallel.parameters(reference.model))
            _save_weights(reference.model, folder / REFERENCE, theirs, world)
        progress(0, 0, "the optimizer's state")
        optimizer_state.write(folder, policy, contents.optimizer, world)
        if world.is_main:
            contents.tokenizer.save_pretrained(folder)
            leftover_groups.save(contents.carried, folder)
            leftover_groups.save_steps(contents.ahead, folder)
            (folder / STATE).write_text(json.dumps(asdict(state) | {CHECKSUMS: checksums.INDEX}, indent=2))
        progress(0, 0, "checksums")
        checksums.write(folder, world)


def save_model(
    path: Path,
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    card: str,
    world: World,
    progress: Progress = unreported,
) -> None:
    """Write the final model, in `dtype`, with its card; with LoRA, a plain model with the updates added. Collective."""
    with _folder(path, world) as folder:
        _save_weights(policy.model, folder, _gathered(policy, policy.weights(), progress), world, dtype)
        if world.is_main:
            tokenizer.save_pretrained(folder)
            (folder / "README.md").write_text(card)


@contextmanager
def _folder(path: Path, world: World) -> Iterator[Path]:
    """An `atomic_folder` that all processes write to; it is renamed when all are through."""
    with atomic_folder(path, replace=True) if world.is_main else full_disk_as_oserror(path) as made:
        yield Path(world.broadcast_object(str(made)))
        world.barrier()


def _gathered(
    policy: Policy, tensors: Iterable[tuple[str, Tensor]], progress: Progress = unreported
) -> Iterator[tuple[str, Tensor]]:
    """Whole, one at a time. Every process walks through them, to the end."""
    total = sum(1 for _ in policy.model.parameters())
    for i, (name, tensor) in enumerate(tensors):
        progress(i, total, "tensors")
        yield name, policy.parallel.gather(tensor.detach())


def _save_weights(
    model: PreTrainedModel,
    folder: Path,
    weights: Iterable[tuple[str, Tensor]],
    world: World,
    dtype: torch.dtype | None = None,
) -> None:
    """A folder that `from_pretrained` loads, in files' names and tensors' as transformers writes them.

    weights: the parameters, whole; buffers that belong in it are added. Collective.
    """
    from transformers.core_model_loading import revert_weight_conversion

    if world.is_main:
        _save_config(model, folder, dtype)
    kept = model.state_dict().keys()
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in kept)
    convert = partial(revert_weight_conversion, model)
    files = shards.write(chain(weights, buffers), folder, WEIGHTS, world, dtype, convert)
    if not world.is_main:
        return
    if len(set(files.values())) == 1:
        (folder / next(iter(files.values()))).rename(folder / f"{WEIGHTS}.safetensors")
    else:
        shards.write_index(files, folder / f"{WEIGHTS}.safetensors.index.json")


def _save_config(model: PreTrainedModel, folder: Path, dtype: torch.dtype | None) -> None:
    """All that transformers saves of a model but its weights."""
    configured = model.config.dtype
    try:
        model.save_pretrained(folder, state_dict={})
        if dtype is not None:
            model.config.dtype = dtype
            model.config.save_pretrained(folder)
    finally:
        model.config.dtype = configured


def load_state(path: Path) -> State:
    """Raises ValueError or TypeError where the file holds something else."""
    state = State(**{key: value for key, value in _state(path).items() if key != CHECKSUMS})
    if (numbered := NAME.fullmatch(path.name)) and int(numbered[1]) != state.step:
        raise ValueError(f"{STATE} is of step {state.step}")
    return state


def _state(path: Path) -> dict[str, Any]:
    state = json.loads((path / STATE).read_text())
    if not isinstance(state, dict):
        raise ValueError(f"{STATE} holds no state")
    return state


def load_optimizer(path: Path, policy: Policy, optimizer: Any) -> None:
    """Restore the optimizer's state. Rates, decay and the like are the config's."""
    optimizer_state.restore(path, policy, optimizer)


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return [path for path in _numbered(folder) if (path / STATE).is_file()]


def _numbered(folder: Path) -> list[Path]:
    """Folders that hold a checkpoint, or what is left of one, oldest first."""
    found = [path for path in folder.glob("step_*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(
        (path for path in found if any(path.iterdir())), key=lambda path: int(path.name.removeprefix("step_"))
    )


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint below `folder`."""
    found = checkpoints(folder)
    return found[-1] if found else None


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints (0: none)."""
    for path in checkpoints(folder)[:-keep] if keep else []:
        # renamed first: half a checkpoint must not look whole; a resume deletes what is called .tmp-
        doomed = path.with_name(f".tmp-{path.name}-{os.getpid()}")
        path.rename(doomed)
        remove(doomed)


@contextmanager
def restoring(path: Path | None) -> Iterator[None]:
    """Turn the errors of an unreadable checkpoint into a sentence that says how to go on without it."""
    try:
        yield
    except UNREADABLE as error:
        if path is None:
            raise
        raise ConfigError(
            f"resume: the checkpoint {path} cannot be read ({_cause(error)}); "
            "remove that folder to go on from the one before"
        ) from error


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a run goes on.

    path: the checkpoint; None where the run had not reached its first. damaged: newer checkpoints, and what is wrong
    with each. has_checksums: False for a checkpoint of an earlier version, in which damage goes unnoticed.
    """

    path: Path | None = None
    damaged: dict[Path, str] = field(default_factory=dict)
    has_checksums: bool = True

    @property
    def fallback(self) -> list[str]:
        """A sentence for each damaged checkpoint."""
        return [
            f"the checkpoint {path.name} was damaged ({problem}), and is called {_aside(path).name} now"
            for path, problem in self.damaged.items()
        ]

    def set_aside(self) -> None:
        """Rename damaged checkpoints, so that neither a later resume nor `prune` takes them for the newest ones."""
        for path in self.damaged:
            shutil.rmtree(_aside(path), ignore_errors=True)
            path.rename(_aside(path))


def resume_point(run_dir: Path, fallback: bool, progress: Progress = unreported) -> ResumePoint:
    """The newest checkpoint of a run, with every file checked.

    fallback: where it is damaged, take the newest one that is whole. Raises ConfigError if `resume=` does not name a
    run, or there is no such checkpoint; OSError where files cannot be read though they may be whole.
    """
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError("holds no run: there is no config.yaml in it", key="resume", value=run_dir)
    damaged: dict[Path, str] = {}
    found, run = None, run_id(RunDir(run_dir))
    for path in reversed(_numbered(run_dir / "checkpoints")):
        try:
            found = ResumePoint(path, damaged, _check(path, run, progress))
            break
        except (OSError, *UNREADABLE) as error:
            if isinstance(error, OSError) and error.errno not in LOST:
                raise
            damaged[path] = _cause(error)
    if damaged and not (found and fallback):
        newest, problem = next(iter(damaged.items()))
        remedy = (
            f"resume_fallback=true goes on from {found.path.name}, the newest one that is whole"
            if found and found.path
            else f"no other one is whole: remove {newest.parent} to begin again"
        )
        raise ConfigError(f"resume: the checkpoint {newest} is damaged ({problem}); {remedy}")
    return found or ResumePoint()


def _check(path: Path, run: str, progress: Progress) -> bool:
    """Whether a checkpoint has checksums. Raises OSError or one of UNREADABLE where it is damaged.

    run: of which it must be; empty where that is not known.
    """
    state = load_state(path)
    if run and state.run and state.run != run:
        raise ValueError("it is of another run")
    promised = CHECKSUMS in _state(path)
    if promised or (path / checksums.INDEX).exists():
        checksums.check(path, progress)
    return promised


def _aside(path: Path) -> Path:
    return path.with_name(f"damaged_{path.name}")


def _cause(error: Exception) -> str:
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{Path(error.filename).name} is missing"
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
