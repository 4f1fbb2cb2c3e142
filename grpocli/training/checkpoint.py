"""Checkpoints: a folder that transformers can load, plus what a resume needs. Written beside, then renamed."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING

import torch

from grpocli.errors import ConfigError, GrpoError
from grpocli.models.lora import is_adapted, merged, save_adapter
from grpocli.tracking.files import atomic_folder
from grpocli.training import carry

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpocli.data import Group

STATE = "trainer.json"
OPTIMIZER = "optimizer.pt"
REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class State:
    """Where a run stands. Everything random is drawn from the seed and these counters.

    step: steps done. draws: prompts drawn. updates: optimizer updates. seconds: time spent. before: the
    evaluation before training.
    """

    step: int = 0
    draws: int = 0
    updates: int = 0
    seconds: float = 0.0
    before: dict[str, float] | None = None


def save(
    path: Path,
    state: State,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: torch.optim.Optimizer,
    reference: PreTrainedModel | None = None,
    carried: Sequence[Group] = (),
    ahead: Sequence[carry.Step] = (),
) -> None:
    """Write the checkpoint `path`; it exists only when it is whole. `reference` only if it changes in training.
    carried, ahead: groups and whole steps that have been sampled for the steps to come.

    With LoRA it holds the updates alone: the base model does not change.
    """
    with atomic_folder(path, replace=True) as folder:
        if is_adapted(model):
            save_adapter(model, folder)
        else:
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        torch.save(optimizer.state_dict(), folder / OPTIMIZER)
        if reference is not None:
            reference.save_pretrained(folder / REFERENCE)
        carry.save(carried, folder)
        carry.save_steps(ahead, folder)
        (folder / STATE).write_text(json.dumps(asdict(state), indent=2))


def save_model(
    path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, card: str
) -> None:
    """Write the final model, in `dtype`, with its card; with LoRA, a plain model with the updates added."""
    with atomic_folder(path, replace=True) as folder:
        weights = {name: tensor.to(dtype) for name, tensor in merged(model, model.state_dict().items())}
        configured, model.config.dtype = model.config.dtype, dtype
        try:
            model.save_pretrained(folder, state_dict=weights)
        finally:
            model.config.dtype = configured
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(card)


def load_state(path: Path) -> State:
    return State(**json.loads((path / STATE).read_text()))


def load_optimizer(path: Path, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Restore the optimizer. Nothing but tensors and plain values is unpickled."""
    saved = torch.load(path / OPTIMIZER, map_location=device, weights_only=True)
    for new, old in zip(optimizer.state_dict()["param_groups"], saved["param_groups"], strict=True):
        old.update({name: value for name, value in new.items() if name != "params"})  # the config's, not the file's
    optimizer.load_state_dict(saved)


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    found = [p for p in folder.glob("step_*") if re.fullmatch(r"step_\d+", p.name) and (p / STATE).is_file()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))


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
        shutil.rmtree(doomed)


@contextmanager
def restoring(path: Path | None) -> Iterator[None]:
    """What a damaged checkpoint raises, as a sentence that says how to go on without it."""
    try:
        yield
    except (GrpoError, RuntimeError, ValueError, KeyError, TypeError, EOFError, UnpicklingError) as error:
        if path is None:
            raise
        cause = (" ".join(str(error).split()) or type(error).__name__)[:200]
        raise ConfigError(
            f"resume: the checkpoint {path} cannot be read ({cause}); remove that folder to go on from the one before"
        ) from error


def resume_point(run_dir: Path) -> Path | None:
    """The checkpoint to go on from; None where the run had not reached its first.

    Raises ConfigError if `resume=` does not name a run.
    """
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError.of("resume", run_dir, "holds no run: there is no config.yaml in it")
    found = latest(run_dir / "checkpoints")
    with restoring(found):
        if found:
            load_state(found)
    return found
