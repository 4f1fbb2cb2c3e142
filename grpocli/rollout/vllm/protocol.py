"""What a weight sync needs of a server, and how its calls fail."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from grpocli.errors import EngineError
from grpocli.rollout.vllm.endpoint import Endpoint

if TYPE_CHECKING:
    import httpx

MODEL = "policy"
"""The name under which a server offers its model."""
ADAPTER = f"{MODEL}-v"
"""With LoRA each update is a model of its own: this and its version."""
PROBE_TOKENS = 32  # of the sequence by which weights are proven, see `probe.py`
PROBE_ROOM = 2 * PROBE_TOKENS
"""Tokens of context that a server needs at least: a probe may be scored together with as many sampled after it."""


class Server(Protocol):
    """What a weight sync needs of one server, over HTTP or in this process.

    model: the name to ask completions of. prepared: whether this very server has had `init_transfer`; False again
    when another one takes its place. lost: how it was found to be gone; None while it answers.
    """

    endpoint: Endpoint
    model: str
    prepared: bool

    @property
    def lost(self) -> EngineError | None: ...

    def init_transfer(self, info: dict[str, Any]) -> None:
        """Make the server's side of the weight transfer, from what its backend needs to know."""
        ...

    def pause(self, mode: str = "wait") -> None:
        """Hold new requests; "wait": let the running ones end first, "keep": freeze them until `resume`."""
        ...

    def resume(self) -> None: ...

    def start_update(self) -> None:
        """Begin an update; one that another trainer left unfinished is closed first."""
        ...

    def update(self, info: dict[str, Any]) -> None:
        """Take some of the weights; `info` says which, in the backend's words."""
        ...

    def finish_update(self, version: int) -> None:
        """End the update; from here the server's weights have this version."""
        ...

    def abandon_update(self) -> None:
        """End an update that was left unfinished, if there is one; the weights are of no version."""
        ...

    def reset_prefix_cache(self, running: bool = False) -> None:
        """Forget what was computed with other weights; `running`: also for requests that are frozen by a pause.

        Raises EngineError if it cannot.
        """
        ...

    def weight_version(self) -> int | str:
        """The version; a label where its weights are not this run's."""
        ...

    def set_version(self, version: int) -> None:
        """Where an adapter is loaded instead of weights: the version from here on."""
        ...

    def adapters(self) -> dict[str, Path]:
        """The folder of each adapter that can be asked for."""
        ...

    def adapters_in_use(self) -> set[str]:
        """Those that requests of this process wait for."""
        ...

    def load_adapter(self, name: str, folder: Path) -> None: ...

    def unload_adapter(self, name: str) -> None:
        """It cannot be asked for any more."""
        ...

    def score(self, token_ids: Sequence[int], first: bool = False) -> list[float]:
        """log p(token_ids[i] | token_ids[:i]) for i >= 1, in nats, at temperature 1; first: before requests that
        wait."""
        ...

    def sample(self, token_ids: Sequence[int], tokens: int) -> tuple[list[int], list[float]]:
        """So many tokens that follow, the same ones for the same weights, and their log-probs at temperature 1; before
        requests that wait."""
        ...

    def world_size(self) -> int:
        """Processes that hold a part or a copy of the weights."""
        ...


class Refused(EngineError):
    """The server answered with an error. answer: the response."""

    def __init__(self, url: str, path: str, answer: httpx.Response, message: str) -> None:
        super().__init__(f"the vLLM server at {url} refused {path} ({answer.status_code}): {message}")
        self.status, self.path, self.answer = answer.status_code, path, answer


class ServerGone(EngineError):
    """The server cannot be reached, did not answer in time, or has lost its engine: only another one can help."""


class KeepsRefusing(ServerGone):
    """The server answers, and has been busy or failing for longer than `engine.patience`."""
