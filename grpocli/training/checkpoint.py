"""Checkpoints: a folder that transformers can load, with the optimizer's state, the run's counters and its rollouts.

The optimizer's state is whole tensors: `NAME.exp_avg` belongs to the parameter `NAME`. So a resume may have another
number of processes or another `hardware.parallel`. No file is pickled code. A checkpoint is written to a temporary
folder and renamed, so it is whole or absent. It is written while the next rollouts are sampled and before the next
update.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from safetensors import SafetensorError

from grpocli.config.user_code import choice_of, is_spec
from grpocli.distributed import sharded_safetensors as shards
from grpocli.errors import ConfigError, GrpoError
from grpocli.files import atomic_folder, full_disk_as_oserror, remove
from grpocli.models.lora import adapter_tensors, is_adapted, save_adapter
from grpocli.processes.threads import run_in_thread
from grpocli.progress import Progress, unreported
from grpocli.runs.run_dir import RunDir, step_of
from grpocli.runs.saved_run import SavedRun
from grpocli.training.optim import Optimizer, matrices_in_layers

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpocli.distributed.world import World
    from grpocli.training.policy import Policy, Reference
    from grpocli.training.stream import RolloutState

logger = logging.getLogger(__name__)

STATE = "trainer.json"
REFERENCE = "reference"
WEIGHTS = "model"
OPTIMIZER = "optimizer"
OPTIMIZER_INDEX = f"{OPTIMIZER}.safetensors.index.json"
CHECKSUMS = "checksums.json"
"""The file {file: [bytes, XXH3 of 128 bits]}, by which a resume detects damage."""
UNREADABLE = (GrpoError, RuntimeError, ValueError, KeyError, TypeError, EOFError, SafetensorError)
"""The errors of reading a file with unexpected content."""
LOST = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EIO)
"""Error numbers of a damaged file. With any other, such as a missing permission, the file may be whole."""
READERS = 4
BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class State:
    """The counters of a run. All random numbers depend only on the seed and these counters."""

    step: int = 0
    """Steps done."""
    draws: int = 0
    """Prompts drawn."""
    updates: int = 0
    """Optimizer updates."""
    seconds: float = 0.0
    """Time spent."""
    before: dict[str, float] | None = None
    """The evaluation before training."""
    num_tokens: int = 0
    """Tokens of prompts and completions in the steps done."""
    unevaluated: bool = False
    """Whether the evaluation after `step` was due and has not ended."""
    evaluation: dict[str, float] | None = None
    """The results of the evaluation after `step`; None without one."""
    run: str = ""
    """`sessions.run_id`."""
    scaler: dict[str, Any] = field(default_factory=dict)
    """The state of `Parallel.scaler`."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint holds beside `State`."""

    policy: Policy
    optimizer: Any
    tokenizer: PreTrainedTokenizerBase
    reference: Reference | None = None
    """None unless it changes in training or has an adapter."""
    rollouts: RolloutState | None = None
    """Those that the next steps begin with, with their scores."""


def save(path: Path, state: State, contents: Contents, world: World, progress: Progress = unreported) -> None:
    """Write the checkpoint `path`, which exists only when it is whole. Collective.

    With LoRA it holds only adapters. progress: called for each tensor of the model.
    """
    policy = contents.policy
    with _folder(path, world) as folder:
        _save_trained(policy.model, folder, policy, world, progress)
        if contents.reference is not None:
            _save_trained(contents.reference.model, folder / REFERENCE, policy, world)
        progress(0, 0, "the optimizer's state")
        files = shards.write(_whole(policy, contents.optimizer), folder, OPTIMIZER, world)
        if world.is_main:
            shards.write_index(files, folder / OPTIMIZER_INDEX)
            contents.tokenizer.save_pretrained(folder)
            if contents.rollouts:
                contents.rollouts.save(folder)
            (folder / STATE).write_text(json.dumps(asdict(state), indent=2))
        progress(0, 0, "checksums")
        write_checksums(folder, world)


def _save_trained(
    model: PreTrainedModel, folder: Path, policy: Policy, world: World, progress: Progress = unreported
) -> None:
    """Write the weights of the policy or the reference; with an adapter, only that. Collective."""
    if not is_adapted(model):
        save_weights(model, folder, _gather(policy, policy.parallel.parameters(model), progress), world)
        return
    updates = dict(_gather(policy, adapter_tensors(model)))
    if world.is_main:
        save_adapter(model, folder, updates)


def save_model(
    path: Path,
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    card: str,
    world: World,
    progress: Progress = unreported,
) -> None:
    """Write the final model, in `dtype`, with its card; with LoRA, with the updates merged into it. Collective."""
    with _folder(path, world) as folder:
        save_weights(policy.model, folder, _gather(policy, policy.weights(), progress), world, dtype)
        if world.is_main:
            tokenizer.save_pretrained(folder)
            (folder / "README.md").write_text(card)


@contextmanager
def _folder(path: Path, world: World) -> Iterator[Path]:
    """An `atomic_folder` that all processes write to; it is renamed when all have written. Collective."""
    with atomic_folder(path, replace=True) if world.is_main else full_disk_as_oserror(path) as temporary:
        yield Path(world.broadcast_object(str(temporary)))
        world.barrier()


def _gather(
    policy: Policy, tensors: Iterable[tuple[str, Tensor]], progress: Progress = unreported
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors, one at a time. Collective: every process iterates to the end."""
    total = sum(1 for _ in policy.model.parameters())
    for i, (name, tensor) in enumerate(tensors):
        progress(i, total, "tensors")
        yield name, policy.parallel.gather(tensor.detach())


def save_weights(
    model: PreTrainedModel,
    folder: Path,
    weights: Iterable[tuple[str, Tensor]],
    world: World,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a folder that `from_pretrained` loads, with the file and tensor names of transformers. Collective.

    weights: the whole parameters; buffers of the state dict are added.
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
    """Save everything that transformers saves of a model except its weights; the generation config unchecked."""
    from transformers import GenerationConfig

    configured, generation = model.config.dtype, model.generation_config
    model.generation_config = GenerationConfig()
    model.save_pretrained(folder, state_dict={})
    generation.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
    if dtype is not None:
        model.config.dtype = dtype
        model.config.save_pretrained(folder)
    model.config.dtype, model.generation_config = configured, generation


def load_state(path: Path) -> State:
    """The counters of a checkpoint. Raises ValueError or TypeError if the file is damaged."""
    saved = json.loads((path / STATE).read_text())
    state = State(**{f.name: saved[f.name] for f in fields(State) if f.name in saved})
    if step_of(path) not in (-1, state.step):
        raise ValueError(f"{STATE} is of step {state.step}")
    return state


def _trained(policy: Policy) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters that the optimizer changes, in the same order in every process."""
    return ((name, p) for name, p in policy.model.named_parameters() if p.requires_grad)


def _whole(policy: Policy, optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the state, whole, one at a time. Collective: every process iterates to the end."""
    for name, parameter in _trained(policy):
        for kind, tensor in policy.parallel.moments(optimizer, parameter):
            yield f"{name}.{kind}", tensor


def load_optimizer(path: Path, policy: Policy, optimizer: Any, optim: Any = None) -> None:
    """Restore the optimizer's state; each process reads its part. Learning rates and decay are the config's.

    optim: the run's choice. Raises ConfigError if the state is another optimizer's, and ValueError if it does not fit
    the policy.
    """
    state: dict[str, dict[str, shards.StoredTensor]] = defaultdict(dict)  # a weight without a gradient so far has none
    with shards.reading(path / OPTIMIZER_INDEX) as stored:
        for key, tensor in stored.items():
            name, _, kind = key.rpartition(".")
            state[name][kind] = tensor
        unknown = state.keys() - {name for name, _ in _trained(policy)}
        if unknown:
            raise ValueError(f"there is optimizer state for {min(unknown)!r}, which is not trained")
        matrices = matrices_in_layers(policy.model)
        ours = isinstance(optim, Optimizer) and not is_spec(choice_of("optim", optim))
        for name, parameter in _trained(policy):
            if ours:
                shape = tuple(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO-3 leaves a parameter flat
                _check_state(name, state[name], optim.state_of(shape, name in matrices), optim)
            policy.parallel.restore_moments(optimizer, parameter, state[name])


def _check_state(name: str, state: Mapping[str, Any], expected: Mapping[str, Any], optim: Optimizer) -> None:
    """Raise unless a parameter has no state so far, or the tensors that its optimizer keeps."""
    if state and state.keys() < expected.keys():
        raise ValueError(f"{name} lacks {', '.join(sorted(expected.keys() - state.keys()))}")
    if state and state.keys() != expected.keys():
        problem = f"the checkpoint has another optimizer's state ({', '.join(sorted(state))}): keep that of the run"
        raise ConfigError(problem, key="optim", value=choice_of("optim", optim))


def write_checksums(folder: Path, world: World) -> None:
    """Write the checksums of all files below `folder`; each process reads those that it wrote. Collective."""
    world.barrier()
    names = world.broadcast_object(_files_of(folder))
    mine = [name for name in names if shards.writer(name, world.size) == world.rank]
    checksums = dict(world.gather_objects([(name, _checksum(folder / name)) for name in mine]))
    if world.is_main:
        (folder / CHECKSUMS).write_text(json.dumps({name: checksums[name] for name in names}, indent=2))


def check_files(folder: Path, progress: Progress = unreported) -> None:
    """Raise ValueError, with the name of a file, unless `folder` holds exactly the files that were written."""
    expected = json.loads((folder / CHECKSUMS).read_text())
    if not isinstance(expected, dict):
        raise ValueError(f"{CHECKSUMS} is damaged")
    names = _files_of(folder)
    if differing := sorted(expected.keys() ^ names):
        name = differing[0]
        raise ValueError(f"{name} is missing" if name in expected else f"{name} does not belong to the checkpoint")
    with ThreadPoolExecutor(READERS) as pool:
        checksums = pool.map(lambda name: _checksum(folder / name), names)
        for done, (name, checksum) in enumerate(zip(names, checksums, strict=True), 1):
            progress(done, len(names), "files")
            if checksum != expected[name]:
                pool.shutdown(wait=False, cancel_futures=True)  # the others need not be read
                raise ValueError(f"{name} differs from what was written")


def _files_of(folder: Path) -> list[str]:
    """Paths of the files below `folder`, without hidden ones, which file systems create."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".") and path != folder / CHECKSUMS
    )


def _checksum(path: Path) -> list[int | str]:
    """Size and digest of a file."""
    size, digest = 0, xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            digest.update(block)
            size += len(block)
    return [size, digest.hexdigest()]


# The checkpoints of a run


@dataclass(slots=True)
class Checkpointer:
    """Saves the checkpoints of a run in a thread, one at a time, and deletes the oldest. Every method is collective.

    FSDP2 and ZeRO gather weights in collective calls that cannot run beside others: they save in the caller's thread.
    """

    run_dir: RunDir
    keep: int
    """How many checkpoints stay; 0: all."""
    contents: Contents
    """What each checkpoint holds beside its rollouts."""
    world: World
    progress: Progress = unreported
    _steps: list[int] = field(default_factory=list)
    """The steps of checkpoints that `wait` has not returned yet."""
    _channel: Callable[[], AbstractContextManager[None]] | None = field(init=False)
    _pending: Future[None] | None = None

    def __post_init__(self) -> None:
        self._channel = self.world.channel() if self.world.parallel.replicated else None

    def save(self, state: State, rollouts: RolloutState) -> None:
        """Start to save. The policy, optimizer and reference must not change until `wait` returns."""

        def write() -> None:
            contents = replace(self.contents, rollouts=rollouts)
            save(self.run_dir.checkpoint(state.step), state, contents, self.world, self.progress)
            if self.world.is_main:
                prune(self.run_dir.checkpoints, self.keep)
            self.world.barrier()

        self._steps.append(state.step)
        self.start(write)

    def start(self, write: Callable[[], None]) -> None:
        """Start `write` after the pending one, and raise the pending one's error."""
        self._end_pending()
        if (channel := self._channel) is None:
            return write()

        def write_in_channel() -> None:
            with channel():
                write()

        self._pending = run_in_thread(write_in_channel, "checkpoint")
        return None

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is pending. Not collective."""
        return self._pending is not None

    def _end_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending:
            pending.result()

    def wait(self) -> list[int]:
        """Wait until the checkpoint is saved, or raise its error; return the steps saved since the last call."""
        self._end_pending()
        steps, self._steps = self._steps, []
        return steps

    def close(self, wait: bool = True) -> None:
        """Wait for the checkpoint, but log its error, because the run ends for another reason. wait: else leave it."""
        try:
            if wait:
                self.wait()
        except Exception:
            logger.exception("the last checkpoint was not written")


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return [path for path in _numbered(folder) if (path / STATE).is_file()]


def _numbered(folder: Path) -> list[Path]:
    """Folders of checkpoints, damaged ones included, oldest first."""
    folders = [path for path in folder.glob("step_*") if step_of(path) >= 0 and path.is_dir()]
    return sorted((path for path in folders if any(path.iterdir())), key=step_of)


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint below `folder`."""
    whole = checkpoints(folder)
    return whole[-1] if whole else None


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints (0: none)."""
    for path in checkpoints(folder)[:-keep] if keep else []:
        # renamed first: a half-deleted checkpoint must not look whole, and a resume deletes .tmp- folders
        doomed = path.with_name(f".tmp-{path.name}-{os.getpid()}")
        path.rename(doomed)
        remove(doomed)


def set_aside_after(folder: Path, step: int) -> None:
    """Rename checkpoints of later steps, which are damaged, so that a later resume and `prune` ignore them."""
    for path in _numbered(folder):
        if step_of(path) > step:
            shutil.rmtree(_aside(path), ignore_errors=True)
            path.rename(_aside(path))


@contextmanager
def restoring(path: Path | None) -> Iterator[None]:
    """Turn the errors of an unreadable checkpoint into a ConfigError with the remedy."""
    try:
        yield
    except UNREADABLE as error:
        if path is None or (isinstance(error, ConfigError) and error.value != str(path)):
            raise  # something else is at fault
        problem = f"the checkpoint {path} cannot be read ({_cause(error)})"
        raise ConfigError(problem, key="resume", hint="remove that folder to go on from the one before") from error


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The checkpoint that a resume starts from."""

    path: Path | None = None
    """None if the run has none yet."""
    damaged: dict[Path, str] = field(default_factory=dict)
    """Newer checkpoints, with what is wrong with each."""

    @property
    def fallback(self) -> list[str]:
        """A sentence for each damaged checkpoint."""
        return [
            f"the checkpoint {path.name} was damaged ({problem}) and renamed to {_aside(path).name}"
            for path, problem in self.damaged.items()
        ]


def resume_point(run_dir: Path, fallback: bool, progress: Progress = unreported) -> ResumePoint:
    """The newest checkpoint of a run, after checking every file.

    fallback: if it is damaged, take the newest whole one. Raises ConfigError if the run's checkpoints are all damaged
    or deleted; OSError if files cannot be read but may be whole.
    """
    run = SavedRun(run_dir)
    damaged: dict[Path, str] = {}
    whole = None
    for path in reversed(_numbered(run.dir.checkpoints)):
        try:
            owner = load_state(path).run
            if owner and run.id and owner != run.id:
                raise ValueError("it is of another run")
            check_files(path, progress)
        except (OSError, *UNREADABLE) as error:
            if isinstance(error, OSError) and error.errno not in LOST:
                raise
            damaged[path] = _cause(error)
        else:
            whole = path
            break
    if damaged and not (whole and fallback):
        newest, problem = next(iter(damaged.items()))
        remedy = "no other one is whole: start a new run"
        if whole:
            remedy = f"resume_fallback=true goes on from {whole.name}, the newest one that is whole"
        raise ConfigError(f"the checkpoint {newest} is damaged ({problem})", key="resume", hint=remedy)
    if not whole and _had_checkpoint(run):
        problem = "the run has saved checkpoints, and none is left to go on from"
        raise ConfigError(problem, key="resume", value=run_dir, hint="start a new run")
    return ResumePoint(whole, damaged)


def _had_checkpoint(run: SavedRun) -> bool:
    """Whether the run recorded a whole checkpoint: its summary, a step after it or a resume from it."""
    saved = run.finished_steps or run.summary.get("checkpoint") or any(one.step for one in run.sessions)
    return bool(saved) or any("time/checkpoint" in row for row in run.metrics)


def _aside(path: Path) -> Path:
    return path.with_name(f"damaged_{path.name}")


def _cause(error: Exception) -> str:
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{Path(error.filename).name} is missing"
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
