"""The reference of a run with teachers: each scores its tasks' rows.

Those of `algorithm.kl.model` are loaded. Those of `algorithm.kl.base_url` are vLLM servers, which score tokens with
`prompt_logprobs`.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import torch

from grpocli.algorithm.kl import EVERY_TASK, key_of_teacher
from grpocli.errors import ConfigError, RunError, ServiceGone
from grpocli.hardware import to_device
from grpocli.http import answered, is_loopback
from grpocli.models.teacher import teachers_of
from grpocli.processes.threads import run_in_thread
from grpocli.progress import Progress, unreported
from grpocli.text import mask
from grpocli.training.packing import MicroBatch, RowBatch, padded
from grpocli.training.policy import Reference
from grpocli.types import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpocli.algorithm.kl import KL
    from grpocli.config.schema import Run
    from grpocli.distributed.context_parallel import ContextParallel
    from grpocli.distributed.world import World
    from grpocli.training.policy import Policy
    from grpocli.types import Sampling


CONCURRENCY = 64
"""Requests of a process at a time."""
FIRST_DELAY = 0.5
"""Seconds at most before the first retry."""
LOST = 3
"""Retries of a request whose connection failed."""
SAMPLED = 256
"""Tokens of the vocabulary whose text is compared, beside the last and the end token."""


class LoadedTeacher(Reference):
    """A teacher in this process, of any architecture."""

    at_head = True
    """As the policy's; `grpocli.training.trials` sets it."""

    def __init__(self, model: Any, policy: Policy, tasks: Sequence[str]) -> None:
        """tasks: the names of those that it scores."""
        super().__init__(model, policy)
        self.tasks, self.parallel = tasks, policy.parallel


@dataclass
class Teachers:
    """The teachers of a run, as its reference."""

    loaded: list[LoadedTeacher]
    served: list[ServedTeacher] = field(default_factory=list)
    scoring: list[Scoring] = field(default_factory=list)
    """This step's requests to servers."""
    shared_with: ContextParallel | None = None
    """The processes with the same rows, of which one asks servers."""

    @property
    def models(self) -> list[Any]:
        """The models in this process."""
        return [teacher.model for teacher in self.loaded]

    def begin(self, micro_batches: Sequence[RowBatch]) -> None:
        """Send this process's rows of the step to the servers, all at once."""
        asks = self.shared_with is None or self.shared_with.is_first
        rows = [row for micro_batch in micro_batches for row in micro_batch.rows]
        self.scoring = [
            Scoring(teacher, [row for row in rows if scores(teacher.tasks, row)]) for teacher in self.served if asks
        ]

    def score(self, micro_batch: RowBatch, batch: MicroBatch, sampling: Sampling) -> None:
        """Set `ref_logp` of the rows of loaded teachers, and 0 for others.

        Collective if weights are sharded: a process without rows for a teacher then scores an empty one.
        """
        ref_BT = micro_batch.known["ref_logp"] = torch.zeros_like(batch.rollout_logp)
        for teacher in self.loaded:
            own = [k for k, row in enumerate(micro_batch.rows) if scores(teacher.tasks, row)]
            if len(own) == len(micro_batch.rows):
                ref_BT.copy_(teacher.logp(batch, sampling))
            elif own or not teacher.parallel.replicated:
                scored = [micro_batch.rows[k] for k in own] or [Row.empty()]
                own_batch = MicroBatch.build(scored, batch.mask.device, type(batch.layout))
                logp_bT = teacher.logp(own_batch, sampling)
                if own:
                    ref_BT[own, : logp_bT.shape[1]] = logp_bT

    def finish(self, micro_batches: Sequence[RowBatch], world: World, progress: Progress = unreported) -> None:
        """Wait for the servers, and set `ref_logp` of their rows. Collective.

        Raises ServiceGone, in every process, if a server cannot be reached or misses its deadline, and RunError if it
        refuses a request. No weight has changed then.
        """
        if not self.served:
            return
        world.enter("teacher")
        problems = [problem for one in self.scoring if (problem := one.wait(progress))]
        self.scoring = []
        everyones = world.gather_objects(problems)
        for problem in sorted(everyones, key=lambda one: isinstance(one, ServiceGone)):
            raise problem
        rows = [row for micro_batch in micro_batches for row in micro_batch.rows]
        if self.shared_with and rows:
            received = self.shared_with.from_first([row.ref_logp for row in rows])
            for row, values in zip(rows, received, strict=True):
                row.ref_logp = values
        for micro_batch in micro_batches:
            served_B1 = to_device(torch.tensor([[row.ref_logp is not None] for row in micro_batch.rows]), world.device)
            ref_BT = to_device(
                padded([row.ref_logp or [0.0] * len(row.completion_ids) for row in micro_batch.rows]), world.device
            )
            micro_batch.known["ref_logp"] = ref_BT.where(served_B1, micro_batch.known.get("ref_logp", ref_BT))


def load_teachers(run: Run, policy: Policy) -> Teachers:
    """The teachers of a run, with the weights of those that are loaded. Collective."""
    kl = run.algorithm.kl
    loaded = [LoadedTeacher(one.load(), policy, one.tasks) for one in teachers_of(kl, run.model)]
    return Teachers(loaded, served_teachers(kl), shared_with=policy.shared_with)


def loaded_teachers(reference: Reference | Teachers | None) -> list[LoadedTeacher]:
    """The teachers in this process; empty for any other reference."""
    return reference.loaded if isinstance(reference, Teachers) else []


def scores(tasks: Sequence[str], row: Row) -> bool:
    """Whether a teacher of these tasks scores a row."""
    return EVERY_TASK in tasks or row.task in tasks


class Refused(Exception):
    """The server answered that the request cannot be served."""


@dataclass(frozen=True, slots=True)
class ServedTeacher:
    """One vLLM server."""

    url: str
    tasks: tuple[str, ...]
    """The names of the tasks whose rows it scores."""
    key: str
    """The config key of its URL."""
    api_key: str | None = field(repr=False)
    timeout: float
    """Seconds for all rows of a step."""

    def http(self) -> httpx.AsyncClient:
        """A client of the server: a proxy only for other machines."""
        if self.api_key:
            mask(self.api_key, "(the teacher's key)")
        return httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {self.api_key}"} if self.api_key else {},
            timeout=self.timeout,
            limits=httpx.Limits(max_connections=CONCURRENCY),
            verify=self.url.startswith("https"),  # reading certificates is slow
            trust_env=not is_loopback(urlsplit(self.url).hostname or ""),
        )

    async def model(self, http: httpx.AsyncClient) -> dict[str, Any]:
        """The card of the served model in `/v1/models`, that of the base model where it also serves adapters."""
        cards = (await self._json(http, "GET", "/v1/models"))["data"]
        return next((card for card in cards if not card.get("parent")), cards[0])

    async def _json(self, http: httpx.AsyncClient, method: str, path: str, body: Any = None) -> Any:
        """The answer's JSON, retried while the server is busy, and LOST times without a connection. Has no deadline.

        Raises Refused for an HTTP error that a retry does not mend, httpx.HTTPError without a connection.
        """
        response = await answered(lambda: http.request(method, path, json=body), FIRST_DELAY, LOST, math.inf)
        if not response.is_success:
            raise Refused(f"{path}: HTTP {response.status_code} {' '.join(response.text.split())[:200]}".rstrip())
        return response.json()

    async def score(self, http: httpx.AsyncClient, model: str, row: Row) -> list[float]:
        """The log-probs of the completion's tokens, in nats, at temperature 1."""
        body = {
            "model": model,
            "prompt": [*row.prompt_ids, *row.completion_ids],
            "prompt_logprobs": 0,
            "max_tokens": 1,
            "temperature": 0,
        }
        answer = await self._json(http, "POST", "/v1/completions", body)
        entries = answer["choices"][0]["prompt_logprobs"][len(row.prompt_ids) :]
        return [float(one[str(token)]["logprob"]) for one, token in zip(entries, row.completion_ids, strict=True)]


class Scoring:
    """The requests of one step to one teacher, in a thread."""

    def __init__(self, teacher: ServedTeacher, rows: Sequence[Row]) -> None:
        self.teacher, self.done = teacher, 0
        self.rows = [row for row in rows if row.ref_logp is None and any(row.mask)]
        self.progress: Progress = unreported
        self._future = run_in_thread(lambda: asyncio.run(self._score_all()), "teacher")

    async def _score_all(self) -> None:
        if not self.rows:
            return
        async with asyncio.timeout(self.teacher.timeout), self.teacher.http() as http, asyncio.TaskGroup() as group:
            model = str((await self.teacher.model(http))["id"])
            slots = asyncio.Semaphore(CONCURRENCY)
            for row in self.rows:
                group.create_task(self._score(http, model, row, slots))

    async def _score(self, http: httpx.AsyncClient, model: str, row: Row, slots: asyncio.Semaphore) -> None:
        async with slots:
            row.ref_logp = await self.teacher.score(http, model, row)
        self.done += 1
        self.progress(self.done, len(self.rows), "completions", "scored by the teacher's server")

    def wait(self, progress: Progress = unreported) -> RunError | None:
        """Wait until the rows have their `ref_logp`; returns the error, if any."""
        self.progress = progress
        error = self._future.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is None:
            return None
        server = f"{self.teacher.key}={self.teacher.url}: the teacher's server"
        if isinstance(error, TimeoutError):
            late = f"scored {self.done} of {len(self.rows)} completions within algorithm.kl.timeout"
            return ServiceGone(f"{server} {late}={self.teacher.timeout:g} s")
        if isinstance(error, httpx.HTTPError):
            return ServiceGone(f"{server} cannot be reached ({_cause(error)})")
        if isinstance(error, Refused):
            return RunError(f"{server} refused to score a completion ({error})")
        return RunError(f"{server} gave another answer than vLLM: {_cause(error)}")


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def served_teachers(kl: KL) -> list[ServedTeacher]:
    """The teachers behind `algorithm.kl.base_url`, each server once."""
    tasks: dict[str, list[str]] = {}
    for task, url in kl.urls.items() if kl.beta else ():
        tasks.setdefault(url, []).append(task)
    key = os.environ.get(kl.api_key)  # never in a config, a log or a message
    return [
        ServedTeacher(url, tuple(own), key_of_teacher("base_url", own[0]), key, kl.timeout)
        for url, own in tasks.items()
    ]


def check_served(kl: KL, tokenizer: PreTrainedTokenizerBase, longest: int) -> None:
    """Raise ConfigError unless every server is a vLLM server with the policy's tokenizer and room for a row.

    The server turns tokens from all over our vocabulary into text, the last one and the end token among them.
    longest: the most tokens of a row.
    """
    for teacher in served_teachers(kl):
        try:
            problem = asyncio.run(_problem(teacher, tokenizer, longest))
        except (httpx.HTTPError, TimeoutError) as error:
            problem = f"no vLLM server answers there ({_cause(error)})"
        except (Refused, AttributeError, LookupError, TypeError, ValueError) as error:
            problem = f"is not a vLLM server that scores tokens, or refuses the key ({_cause(error)})"
        if problem:
            raise ConfigError(problem, key=teacher.key, value=teacher.url)


async def _problem(teacher: ServedTeacher, tokenizer: Any, longest: int) -> str:
    known = sorted(tokenizer.get_vocab().values())
    sampled = [*known[:: -(-len(known) // SAMPLED)], known[-1], tokenizer.eos_token_id]
    async with asyncio.timeout(teacher.timeout), teacher.http() as http:
        card = await teacher.model(http)
        body = {"model": card["id"], "tokens": sampled}
        text = (await teacher._json(http, "POST", "/detokenize", body))["prompt"]
        await teacher.score(http, str(card["id"]), Row(known[:1], known[1:2], [1], 0.0, 0, []))
    if text != tokenizer.decode(sampled):
        return "its tokenizer is not the policy's: tokens from all over the vocabulary have another text there"
    room = card.get("max_model_len")
    if room is not None and room <= longest:
        return f"its max_model_len={room} has no room for a completion of {longest} tokens and one more"
    return ""
