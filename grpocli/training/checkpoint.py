"""Checkpoints: a folder that transformers can load, plus what a resume needs. Written beside, then renamed."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.errors import ConfigError, GrpoError
from grpocli.models.lora import adapter_tensors, is_adapted, save_adapter
from grpocli.tracking.files import atomic_folder
from grpocli.training import carry, optimizer_state

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpocli.data import Group
    from grpocli.training.policy import Policy
    from grpocli.training.reference import Reference

STATE = "trainer.json"
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
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: Any,
    reference: Reference | None = None,
    carried: Sequence[Group] = (),
    ahead: Sequence[carry.Step] = (),
    main: bool = True,
) -> None:
    """Write the checkpoint `path`; it exists only when it is whole. `reference` only if it changes in training.
    carried, ahead: groups and whole steps that have been sampled for the steps to come.

    With LoRA it holds the updates alone: the base model does not change. Collective; the main process writes.
    """
    weights = _trained(policy)
    theirs = _whole(policy, policy.parallel.parameters(reference.model)) if reference else iter(())
    moments = optimizer_state.whole(policy, optimizer)
    if not main:
        _walk(weights, theirs, moments)
        return
    with atomic_folder(path, replace=True) as folder:
        if is_adapted(policy.model):
            save_adapter(policy.model, folder, dict(weights))
        else:
            _save_weights(policy.model, folder, dict(weights))
        tokenizer.save_pretrained(folder)
        if reference is not None:
            _save_weights(reference.model, folder / REFERENCE, dict(theirs))
        optimizer_state.write(moments, folder)
        carry.save(carried, folder)
        carry.save_steps(ahead, folder)
        (folder / STATE).write_text(json.dumps(asdict(state), indent=2))


def save_model(
    path: Path,
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    card: str,
    main: bool = True,
) -> None:
    """Write the final model, in `dtype`, with its card; with LoRA, a plain model with the updates added.

    Collective; the main process writes.
    """
    weights = _whole(policy, policy.weights(), dtype)
    if not main:
        _walk(weights)
        return
    model = policy.model
    with atomic_folder(path, replace=True) as folder:
        configured, model.config.dtype = model.config.dtype, dtype
        try:
            _save_weights(model, folder, dict(weights))
        finally:
            model.config.dtype = configured
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(card)


def _trained(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """What training changes: all weights, or LoRA's updates under their names in a file."""
    adapted = is_adapted(policy.model)
    return _whole(policy, adapter_tensors(policy.model) if adapted else policy.parallel.parameters(policy.model))


def _whole(
    policy: Policy, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors in the CPU's memory, gathered one at a time. Every process walks through them, to the end."""
    for name, tensor in tensors:
        yield name, policy.parallel.gather(tensor.detach()).to("cpu", dtype)


def _walk(*gathers: Iterator[tuple[str, Tensor]]) -> None:
    """Take part in what the main process writes, in its order."""
    for _ in chain(*gathers):
        pass


def _save_weights(model: PreTrainedModel, folder: Path, weights: dict[str, Tensor]) -> None:
    """A folder that `from_pretrained` loads. weights: its parameters; buffers that belong in it are added."""
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    model.save_pretrained(folder, state_dict=weights | buffers)


def load_state(path: Path) -> State:
    return State(**json.loads((path / STATE).read_text()))


def load_optimizer(path: Path, policy: Policy, optimizer: Any) -> None:
    """Restore the optimizer's state. Rates, decay and the like are the config's."""
    optimizer_state.restore(path, policy, optimizer)


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
    except (GrpoError, RuntimeError, ValueError, KeyError, TypeError, EOFError) as error:
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
