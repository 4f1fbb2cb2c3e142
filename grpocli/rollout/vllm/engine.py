"""engine=vllm in a trainer process: completions from the servers, weights to them, and what to do when one is gone."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Protocol

from grpocli.errors import EngineError, EngineGone
from grpocli.http import pause
from grpocli.rollout.engine import Listener, ignore
from grpocli.rollout.transformers_engine import stop_ids
from grpocli.rollout.vllm.client import Client
from grpocli.rollout.vllm.endpoint import Endpoint, run_files
from grpocli.rollout.vllm.protocol import KeepsRefusing
from grpocli.rollout.vllm.reconnect import Given, Own, Waiting
from grpocli.rollout.vllm.request import body, check_temperature, completions
from grpocli.rollout.vllm.server_pool import Choices, Count, Fleet
from grpocli.rollout.vllm.validate import check_sampling
from grpocli.types import Completion, Request, Sampling

if TYPE_CHECKING:
    from grpocli.distributed.world import World
    from grpocli.rollout.engine import EngineContext, OnGroup
    from grpocli.rollout.vllm.config import VllmOptions

logger = logging.getLogger(__name__)

AGAIN = 0.5  # seconds, at most, before the second attempt
ATTEMPTS = 10  # at one sync or one batch of completions; a server that dies each time must end some day


class Sync(Protocol):
    """How the servers get what is trained; collective."""

    def __call__(self, version: int) -> dict[str, float]:
        """Bring every server to the present weights and prove it. Raises EngineError in every process, or in none.

        After an error servers hold their requests, until a call succeeds or `release`.
        """
        ...

    def release(self) -> None:
        """A failed call is not followed by another: let requests go on. Not collective."""
        ...

    def close(self) -> None: ...


class VllmEngine:
    """See `Vllm`; made by `connect`.

    recover: called by `generate`, in every process and as often in each, where requests are left that no living
    server can answer; when it returns, the servers are back and have the weights to sample with. By default it syncs
    the present version again, in the thread that called `generate`. Who calls `generate` beside a thread that changes
    the weights gives one that asks that thread to `sync` and waits.
    """

    def __init__(
        self,
        fleet: Fleet,
        sync: Sync,
        stop: Sequence[int],
        version: int | None,
        world: World,
        waiting: Waiting,
        recover: Callable[[], None] | None = None,
        trial: Callable[[], None] | None = None,
        vocabulary: int | None = None,
    ) -> None:
        """version: of the servers' weights; None where another run may have changed them.

        trial: called once, in every process, when the servers have the first weights. vocabulary: tokens of the model.
        """
        self.fleet, self._sync, self._stop, self.version = fleet, sync, list(stop), version
        self.world, self._waiting = world, waiting
        self.recover: Callable[[], None] = recover or self._sync_again
        self._trial, self._vocabulary = trial, vocabulary
        self.restarts = 0  # servers that came back
        self._synced = False
        self._gone: str | None = None  # why none will come back
        self._failure: EngineError | None = None  # of the last sync: servers may have any weights

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_group: OnGroup = ignore
    ) -> list[list[Completion]]:
        """`n` completions for each request, in order; answers of servers that have died since are kept.

        Collective. Raises EngineError if any cannot be had, EngineGone if its server does not come back in time.
        """
        if self.version is None:
            raise EngineError("a given vLLM server may have any weights: sync before the first completion")
        check_temperature(sampling)
        version, synced = self.version, self._synced  # before the requests: a sync may come meanwhile
        bodies = [body(request, sampling, self._stop) for request in requests]
        found: dict[int, list[Completion]] = {}
        listener = Listener.wrap(on_group)
        count = Count(listener.watch, sum(request.n for request in requests))

        def answered(k: int, choices: Choices) -> None:
            if self._failure:  # of a sync: they may come from any weights
                return
            found[k] = completions(choices, requests[k], sampling, version, synced=synced, vocabulary=self._vocabulary)
            count.add(len(found[k]))
            listener(k, found[k])

        self._ask(bodies, found, answered, count)
        return [found.get(k, []) for k in range(len(requests))]  # all, unless it was cancelled

    def _ask(
        self,
        bodies: Sequence[dict[str, object]],
        found: Container[int],
        answered: Callable[[int, Choices], None],
        count: Count,
    ) -> None:
        """Rounds of requests, of those not yet `found`, until every process has answers to all of its own."""
        for _ in range(ATTEMPTS):
            left = [k for k in range(len(bodies)) if k not in found]
            self._round(bodies, left, answered, count)
            if self._failure:
                raise _again(self._failure)
            unanswered = any(k not in found for k in left) and not count.watch.cancelled()
            reasons = list(self.fleet.lost.values()) or ["a vLLM server died"]
            problems = self.world.gather_objects(reasons[:1] if unanswered else [])
            if not problems:
                return
            self.recover()
        raise EngineGone(f"{problems[0]}; so ended {ATTEMPTS} attempts at one batch of completions")

    def _round(
        self,
        bodies: Sequence[dict[str, object]],
        left: Sequence[int],
        answered: Callable[[int, Choices], None],
        count: Count,
    ) -> None:
        self.fleet.complete([bodies[k] for k in left], lambda i, choices: answered(left[i], choices), count)

    def _sync_again(self) -> None:
        assert self.version is not None
        self.sync(self.version)

    def sync(self, version: int) -> dict[str, float]:
        """Bring every server to the policy's present weights and prove it; servers that are gone come back first.

        Collective. Raises EngineGone in every process if one does not.
        """
        try:
            metrics = self._sync_all(version)
        except EngineError as error:
            self._failure = error  # before requests go on: their answers are of no use
            self._sync.release()
            raise
        self.version, self._synced, self._failure = version, True, None
        self.fleet.open()
        if self._trial:
            trial, self._trial = self._trial, None
            trial()
        return metrics | {"engine/restarts": float(self.restarts)}

    def _sync_all(self, version: int) -> dict[str, float]:
        """As often as servers die meanwhile. Those that live hold their requests from one time to the next."""
        for attempt in range(1, ATTEMPTS + 1):
            self._bring_back()
            try:
                return self._sync(version)
            except EngineError as error:
                if not self._lost():
                    raise
                last = error
            time.sleep(pause(attempt, AGAIN))  # it may be busy
        raise EngineGone(f"{ATTEMPTS} syncs of weights failed one after the other: {last}")

    def _lost(self) -> dict[int, str]:
        """The servers that any process has lost, by number, and how each was. Collective."""
        found = self.world.gather_objects(list(self.fleet.lost.items()))
        return dict(sorted(found, reverse=True))

    def _bring_back(self) -> None:
        """Wait for the servers that are gone, or for others in their places. Collective."""
        if self._gone:  # it has been waited for
            raise EngineGone(self._gone)
        if self.world.is_main:
            self._waiting.look(self.fleet.clients)
        lost = self._lost()
        if not lost:
            return
        refusing = [str(client.lost) for client in self.fleet.clients if isinstance(client.lost, KeepsRefusing)]
        if refusing := self.world.gather_objects(refusing):
            self._gone = refusing[0]
            raise EngineGone(self._gone)
        found = self.world.broadcast_object(self._wait(lost) if self.world.is_main else "")
        if isinstance(found, str):
            self._gone = found
            raise EngineGone(found)
        for index, endpoint in zip(lost, found, strict=True):
            self.fleet.replace(index, endpoint)
            self.restarts += 1
            logger.warning("vLLM server %d is back, at %s", index, endpoint.url)

    def _wait(self, lost: dict[int, str]) -> list[Endpoint] | str:
        """Where they are now, or why there is none."""
        for index, reason in lost.items():
            logger.warning("vLLM server %d is lost: %s", index, reason)
        try:
            return self._waiting.wait({i: (self.fleet.clients[i].endpoint, reason) for i, reason in lost.items()})
        except (EngineGone, OSError) as error:  # the other processes wait for what is said here
            return str(error)

    def close(self) -> None:
        self._sync.close()


def _again(error: EngineError) -> EngineError:
    """The same, for another thread."""
    return EngineGone(str(error)) if isinstance(error, EngineGone) else EngineError(str(error))


def connect(options: VllmOptions, context: EngineContext) -> VllmEngine:
    """Talk to the servers whose addresses `launch` left in the run folder.

    Raises ConfigError if vLLM cannot sample what the run wants. Where a server must be asked, the first sync does:
    before it, a run that was killed may have left servers paused.
    """
    job = context.job
    run = hashlib.blake2b(str(job.run_dir.absolute()).encode(), digest_size=4).hexdigest()  # in every process the same
    patience = 0 if options.base_url is None else options.patience  # errors of our own servers do not pass
    clients = [Client(Endpoint.load(path), options.request_timeout, run, patience) for path in run_files(job.run_dir)]
    fleet = Fleet(clients)
    waiting = Own if options.base_url is None else Given

    if context.sampling:
        check_temperature(context.sampling)

    def trial() -> None:
        if context.sampling:
            check_sampling(context.sampling, lambda request, sampling: fleet.complete([body(request, sampling, [])]))

    return VllmEngine(
        fleet,
        _sync(clients, context),
        stop_ids(context.policy.model, context.tokenizer),
        version=0 if options.base_url is None else None,
        world=context.world,
        waiting=waiting(options, job, context.stopping),
        recover=context.recover,
        trial=trial,
        vocabulary=int(context.policy.model.config.get_text_config().vocab_size),
    )


def _sync(clients: Sequence[Client], context: EngineContext) -> Sync:
    """What is trained goes over: all weights, or an adapter."""
    if context.job.lora_rank:
        from grpocli.rollout.vllm.adapter import AdapterSync

        return AdapterSync(clients, context)
    from grpocli.rollout.vllm.sync import WeightSync

    return WeightSync(clients, context)
