"""Saving checkpoints in the background, while the next rollouts are sampled and before the next update."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
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


class BackgroundWriter:
    """Runs one write at a time in a thread. Every method is collective.

    Where processes share weights or optimizer state (FSDP2, ZeRO), these are gathered in collective calls that cannot
    run beside others, so the write runs at once, in the caller's thread.
    """

    def __init__(self, world: World) -> None:
        self._channel = world.channel() if world.parallel.replicated else None
        self._pending: Future[None] | None = None

    @property
    def writing(self) -> bool:
        """Whether a write is pending. Not collective."""
        return self._pending is not None

    def start(self, write: Callable[[], None]) -> None:
        """Start `write` after the pending one, and raise the pending one's error."""
        self.wait()
        if self._channel is None:
            write()
            return
        # a daemon: after a second Ctrl-C the process must be able to exit
        self._pending = run_in_thread(partial(self._work, write), "checkpoint")

    def wait(self) -> None:
        """Wait for the write, and raise its error."""
        if self._pending:
            wait([self._pending])
            pending, self._pending = self._pending, None
            pending.result()

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

    def _work(self, write: Callable[[], None]) -> None:
        assert self._channel is not None
        with self._channel():
            write()


@dataclass(frozen=True, slots=True)
class Checkpointer:
    """Saves the checkpoints of a run and deletes the oldest. Every method is collective.

    keep: how many checkpoints stay (0: all). reference: None unless training changes it. unreported: the steps of
    checkpoints that `take_saved` has not returned yet.
    """

    run_dir: RunDir
    keep: int
    policy: Policy
    optimizer: Any
    tokenizer: Any
    reference: Reference | None
    world: World
    progress: Progress
    writer: BackgroundWriter
    unreported: list[int] = field(default_factory=list)

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
        path = self.run_dir.checkpoint(state.step)
        self.unreported.append(state.step)
        self.writer.start(
            partial(self._write, partial(checkpoint.save, path, state, contents, self.world, self.progress))
        )

    def _write(self, save: Callable[[], None]) -> None:
        save()
        if self.world.is_main:
            prune(self.run_dir.checkpoints, self.keep)
        self.world.barrier()

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is pending. Not collective."""
        return self.writer.writing

    def wait(self) -> None:
        """Wait until the checkpoint is saved. Raises the error of saving it."""
        self.writer.wait()

    def take_saved(self) -> list[int]:
        """The steps of checkpoints that are whole by now, each once. Call `wait` before."""
        steps = self.unreported.copy()
        self.unreported.clear()
        return steps

    def close(self, timeout: float | None = None) -> None:
        """See `BackgroundWriter.close`."""
        self.writer.close(timeout)
