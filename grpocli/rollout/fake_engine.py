"""engine=fake: fixed texts as completions, to try rewards, tasks and configs without a capable model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from grpocli.config.parts import Escaped, UserCode, part, require
from grpocli.errors import RunError
from grpocli.models.chat_template import end_of_turn
from grpocli.rewards.reward import accepted, with_one_answer
from grpocli.rollout.engine import Engine, EnginePart, Listener, ignore_group
from grpocli.types import Completion, Prompt, Request, Sampling

if TYPE_CHECKING:
    from grpocli.rollout.engine import EngineContext, OnGroup

COLUMN = re.compile(r"\{([\w.]+)\}")


@part("engine", "fake")
class Fake(EnginePart):
    """Returns fixed texts as completions, selected by the prompt's seed; the policy scores them and trains on them."""

    completions: list[Escaped] = field(default_factory=lambda: ["{answer}", "wrong"])
    """Texts to choose from. `{answer}`, or any column name in braces, is replaced by that column of the example."""
    function: UserCode | None = None
    """FILE.py:NAME or module:NAME, called as NAME(prompt=..., n=..., seed=..., and the example's columns); it returns n
    texts. null: use `completions`."""

    def __post_init__(self) -> None:
        require(self, "completions", bool(self.completions), "needs at least one text")
        require(self, "function", ":" in (self.function or ":"), "must be FILE.py:NAME or module:NAME")

    def check_ready(self) -> None:
        from grpocli.config.user_code import check_exists

        if self.function:
            check_exists(self.function, "engine.function")

    def connect(self, context: EngineContext) -> Engine:
        return FakeEngine(self, context.policy, context.tokenizer)

    def texts(self, prompt: Prompt, n: int, seed: int) -> list[str]:
        """The completions of a prompt. Raises RunError unless the user's function returns n texts."""
        from grpocli.config.user_code import load
        from grpocli.rollout.sampling import derive_seed

        if not self.function:
            chosen = [self.completions[derive_seed(seed, i) % len(self.completions)] for i in range(n)]
            return [filled(text, prompt.columns) for text in chosen]
        columns = {**prompt.columns, "prompt": prompt.text, "n": n, "seed": seed}
        texts = load(self.function, "engine.function")(**columns)
        if not isinstance(texts, list) or len(texts) != n or not all(isinstance(text, str) for text in texts):
            raise RunError(f"engine.function={self.function} returned {texts!r:.200}, which is not a list of {n} texts")
        return texts


def filled(text: str, columns: Mapping[str, Any]) -> str:
    """The text with {NAME} replaced by the column NAME, if there is one; {answer} is the first accepted one."""
    columns = with_one_answer({**columns, "answer": accepted(columns.get("answer")) or "{answer}"})
    return COLUMN.sub(lambda found: str(columns.get(found[1], found[0])), text)


class FakeEngine(Engine):
    """The engine of `engine=fake`. Log-probs are the policy's, so that a step is on-policy, as with transformers."""

    def __init__(self, part: Fake, policy: Any, tokenizer: Any) -> None:
        self.part, self.policy, self.tokenizer = part, policy, tokenizer
        self.version = 0
        written = end_of_turn(tokenizer)
        self.end = tokenizer.eos_token_id if written is None else written

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_group: OnGroup = ignore_group
    ) -> list[list[Completion]]:
        """`n` completions for each request, in order."""
        listener = Listener.wrap(on_group)
        results: list[list[Completion]] = [[] for _ in requests]
        with self.policy.sampling_mode():
            for k, request in enumerate(requests):
                if listener.watch.cancelled():
                    break
                results[k] = self._completions(request, request.under(sampling))
                listener.watch.progress(k + 1, len(requests), "prompts")
                listener(k, results[k])
        return results

    def _completions(self, request: Request, sampling: Sampling) -> list[Completion]:
        """The completions of one request; each different text is scored once."""
        prompt = request.prompt or Prompt("", request.token_ids, self.tokenizer.decode(request.token_ids))
        texts = self.part.texts(prompt, request.n, request.seed)
        made = {text: self._completion(text, request, sampling) for text in dict.fromkeys(texts)}
        return [made[text] for text in texts]

    def _completion(self, text: str, request: Request, sampling: Sampling) -> Completion:
        ids = [*self.tokenizer(text, add_special_tokens=False).input_ids, self.end]
        ids = ids[: self._length(ids, request, sampling)]
        cut = len(ids) > sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        logprobs = self._logprobs(request.token_ids, ids, sampling)
        return Completion(ids, logprobs, "length" if cut else "stop", self.version)

    def _length(self, ids: Sequence[int], request: Request, sampling: Sampling) -> int:
        """The number of tokens up to the one that completes a stop string."""
        from grpocli.rollout.sampling import StopStrings

        if not sampling.stop:
            return len(ids)
        watched = StopStrings(self.tokenizer, sampling.stop, request.token_ids)
        return next((i + 1 for i, token in enumerate(ids) if watched.completed_by(token)), len(ids))

    def _logprobs(self, prompt_ids: Sequence[int], ids: Sequence[int], sampling: Sampling) -> list[float]:
        """Log-probs in nats under the policy's sampling distribution; 0 for greedy sampling."""
        import torch

        from grpocli.rollout.sampling import first_occurrence, sampling_logits

        if sampling.temperature == 0:
            return [0.0] * len(ids)
        model = self.policy.model
        ids_1L = torch.tensor([[*prompt_ids, *ids]], device=model.device)
        logits_TV = model(input_ids=ids_1L, use_cache=False).logits[0, -len(ids) - 1 : -1]
        ids_T = ids_1L[0, -len(ids) :]
        seen_TV = None
        if sampling.repetition_penalty != 1:
            first_1V = first_occurrence(ids_1L, torch.ones_like(ids_1L), len(ids), logits_TV.shape[-1])
            seen_TV = first_1V < torch.arange(len(ids), device=model.device).unsqueeze(1)
        logp_TV = sampling_logits(logits_TV, sampling, ids_T, seen_TV).log_softmax(-1)
        logprobs: list[float] = logp_TV.gather(1, ids_T.unsqueeze(1)).squeeze(1).tolist()
        return logprobs

    def sync(self, version: int) -> dict[str, float]:
        self.version = version
        return {}

    def close(self) -> None:
        """Do nothing: there is no process to stop."""
