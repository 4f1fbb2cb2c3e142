"""Saving checkpoints in the background, while the next rollouts are sampled and before the next update."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from grpocli.processes.threads import run_in_thread
from grpocli.training import checkpoint
from grpocli.training.resume_point import prune

if TYPE_CHECKING:
    from grpocli.distributed.world import World
    from grpocli.progress import Progress
    from grpocli.runs.run_dir import RunDir
    from grpocli.training.policy import Policy, Reference
    from grpocli.training.prefetch import PrefetchState

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Checkpointer:
    """Saves the checkpoints of a run in a thread, one at a time, and deletes the oldest. Every method is collective.

    Where processes share weights or optimizer state (FSDP2, ZeRO), these are gathered in collective calls that cannot
    run beside others, so a checkpoint is saved at once, in the caller's thread.
    """

    run_dir: RunDir
    keep: int
    """How many checkpoints stay; 0: all."""
    policy: Policy
    optimizer: Any
    tokenizer: Any
    reference: Reference | None
    """None unless training changes it."""
    world: World
    progress: Progress
    unreported: list[int] = field(default_factory=list)
    """The steps of checkpoints that `take_saved` has not returned yet."""
    _channel: Callable[[], AbstractContextManager[None]] | None = field(init=False)
    _pending: Future[None] | None = None

    def __post_init__(self) -> None:
        self._channel = self.world.channel() if self.world.parallel.replicated else None

    def save(self, state: checkpoint.State, prefetched: PrefetchState) -> None:
        """Start to save. The policy, optimizer and reference must not change until `wait` returns.

        prefetched: the rollouts and scores that the next steps begin with.
        """
        contents = checkpoint.Contents(
            policy=self.policy,
            optimizer=self.optimizer,
            tokenizer=self.tokenizer,
            reference=self.reference,
            leftover=tuple(prefetched.leftover),
            prefetched=prefetched.ready,
            problems=prefetched.problems,
        )
        self.unreported.append(state.step)
        self.start(partial(self._save, state, contents))

    def _save(self, state: checkpoint.State, contents: checkpoint.Contents) -> None:
        checkpoint.save(self.run_dir.checkpoint(state.step), state, contents, self.world, self.progress)
        if self.world.is_main:
            prune(self.run_dir.checkpoints, self.keep)
        self.world.barrier()

    def start(self, write: Callable[[], None]) -> None:
        """Start `write` after the pending one, and raise the pending one's error."""
        self.wait()
        if self._channel is None:
            write()
            return
        # a daemon: after a second Ctrl-C the process must be able to exit
        self._pending = run_in_thread(partial(self._in_channel, write), "checkpoint")

    def _in_channel(self, write: Callable[[], None]) -> None:
        assert self._channel is not None
        with self._channel():
            write()

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is pending. Not collective."""
        return self._pending is not None

    def wait(self) -> None:
        """Wait until the checkpoint is saved, and raise the error of saving it."""
        if self._pending:
            wait([self._pending])
            pending, self._pending = self._pending, None
            pending.result()

    def take_saved(self) -> list[int]:
        """The steps of checkpoints that are whole by now, each once. Call `wait` before."""
        steps = self.unreported.copy()
        self.unreported.clear()
        return steps

    def close(self, timeout: float | None = None) -> None:
        """Like `wait`, but log an error instead of raising it, because the run ends for another reason.

        timeout: seconds after which the thread is abandoned (None: never).
        """
        if self._pending and not wait([self._pending], timeout).done:
            logger.warning("the last checkpoint was not written: it took longer than %s s", timeout)
            return
        try:
            self.wait()
        except Exception:
            logger.exception("the last checkpoint was not written")
