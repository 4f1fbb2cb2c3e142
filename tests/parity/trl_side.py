"""TRL's side of the comparison: a real `trl.GRPOTrainer` on a random little model, built without network.

Only two things are not TRL's own. Completions come from its hook `rollout_func`, and the forward hands out the
log-probs of a `Batch` instead of the model's. Rewards, advantages, masks, the sampler's importance weights and the
loss are computed by TRL.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

EOS, PAD, WORD, FIRST_ROW = 1, 0, 2, 3  # a prompt is one token, which identifies the row


@dataclass(frozen=True, slots=True)
class Batch:
    """The input tensors [B, T] of both sides, in nats. `finished` [B]: whether a row ends with an end token."""

    logp: Tensor
    old_logp: Tensor
    ref_logp: Tensor
    rollout_logp: Tensor
    entropy: Tensor
    lengths: tuple[int, ...]
    finished: tuple[bool, ...]


def random_batch(
    dtype: torch.dtype, seed: int, lengths: tuple[int, ...], finished: tuple[bool, ...] | None = None
) -> Batch:
    """Ratios far enough from 1 to reach every compared bound, for both signs of the advantage.

    All values are float32 numbers, also in float64: TRL keeps the sampler's log-probs in float32.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return torch.randn(len(lengths), max(lengths), generator=generator) * scale

    logp = -noise(1.0).abs() - 0.1
    old_logp = logp + noise(0.5)
    rollout_logp = old_logp + noise(0.5)
    parts = (logp, old_logp, logp + noise(0.5), rollout_logp, noise(1.0).abs())
    return Batch(*(values.to(dtype) for values in parts), lengths, finished or (True,) * len(lengths))


class Peer:
    """One GRPOTrainer. `rewards` {name: a value or None for each row} are scripted; `settings` are GRPOConfig's.

    pieces: rows are split over so many micro-batches of one optimizer step. sampler: the sampler's log-probs count,
    which they do in TRL with vLLM only. Call `sample` before anything else.
    """

    batch: Batch
    logp: Tensor
    entropy: Tensor
    inputs: dict[str, Tensor]

    def __init__(
        self,
        folder: Path,
        rows: int,
        length: int,
        rewards: dict[str, list[float | None]],
        *,
        pieces: int = 1,
        sampler: bool = False,
        **settings: Any,
    ) -> None:
        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # the rollout hook warns that it may change; the version is pinned
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        self.pieces = pieces
        self.prompts = [{"prompt": f"row{row}"} for row in range(rows)]
        config = {
            "beta": 0.0,
            "num_generations": 4,
            "max_completion_length": length,
            "num_iterations": 2,  # several passes, so that old log-probs differ from the current ones
            "gradient_accumulation_steps": pieces,
            "per_device_train_batch_size": rows // pieces,
            "steps_per_generation": pieces,
            **settings,
        }
        self.trainer = GRPOTrainer(
            model=str(_model(folder / f"model-{rows}", rows)),
            reward_funcs=[_scripted(name, values) for name, values in rewards.items()],
            args=GRPOConfig(str(folder / "out"), use_cpu=True, bf16=False, report_to="none", **config),
            train_dataset=Dataset.from_list(self.prompts),
            processing_class=_tokenizer(rows),
            rollout_func=self._rollout,
        )
        self.trainer._get_per_token_logps_and_entropies = self._forward
        self.trainer.model.train()
        self.trainer.current_gradient_accumulation_steps = config["gradient_accumulation_steps"]
        self.trainer.use_vllm = sampler  # set late: with True in the config it would connect to a server
        self.trainer._last_loaded_step = 0  # no weights are sent

    def sample(self, batch: Batch) -> None:
        """Have TRL score the batch as if it had generated it."""
        self.batch = batch
        self.logp = batch.logp.clone().requires_grad_()
        self.entropy = batch.entropy.clone().requires_grad_()
        self.inputs = self.trainer._generate_and_score_completions(self.prompts)

    @property
    def advantages(self) -> Tensor:
        """[B], by TRL's code."""
        return self.inputs["advantages"]

    @property
    def mask(self) -> Tensor:
        """[B, T], by TRL's code."""
        return self.inputs["completion_mask"]

    def losses(self) -> list[Tensor]:
        """The loss of each micro-batch, scaled by TRL so that the sum is the loss of the step."""
        from trl.trainer.utils import split_tensor_dict

        whole = {**self.inputs, "advantages": self.advantages.to(self.logp.dtype)}
        return [self.trainer._compute_loss(self.trainer.model, part) for part in split_tensor_dict(whole, self.pieces)]

    def metric(self, name: str) -> Tensor | None:
        """The last logged value, or None."""
        values = self.trainer._metrics["train"].get(name)
        return torch.tensor(values[-1], dtype=torch.float64) if values else None

    def _rollout(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        batch = self.batch
        completions = [
            [WORD] * (length - 1) + [EOS if finished else WORD]
            for length, finished in zip(batch.lengths, batch.finished, strict=True)
        ]
        logprobs = [row[:length].tolist() for row, length in zip(batch.rollout_logp, batch.lengths, strict=True)]
        prompt_ids = [[FIRST_ROW + int(prompt.removeprefix("row"))] for prompt in prompts]
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logprobs}

    def _forward(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **options: Any
    ) -> tuple[Tensor, Tensor | None, None]:
        rows = input_ids[:, 0] - FIRST_ROW
        assert logits_to_keep == self.batch.logp.shape[1]
        if options.get("compute_entropy"):
            return self.logp[rows], self.entropy[rows], None
        reference = model is self.trainer.ref_model
        return (self.batch.ref_logp if reference else self.batch.old_logp)[rows], None, None


def _scripted(name: str, values: list[float | None]) -> Any:
    def reward(completions: list[str], **_: Any) -> list[float | None]:
        assert len(completions) == len(values)
        return values

    reward.__name__ = name
    return reward


def _vocabulary(rows: int) -> dict[str, int]:
    return {"<pad>": PAD, "<eos>": EOS, "word": WORD, **{f"row{row}": FIRST_ROW + row for row in range(rows)}}


def _tokenizer(rows: int) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel(_vocabulary(rows), unk_token="word"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def _model(folder: Path, rows: int) -> Path:
    """A saved model: TRL loads the policy and the reference from a folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if not folder.exists():
        config = LlamaConfig(
            vocab_size=len(_vocabulary(rows)),
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder
