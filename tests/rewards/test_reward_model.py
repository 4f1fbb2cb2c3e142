"""reward=[model]: scores that do not depend on the batch, and models that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from little import SHAPE
from rewards.conftest import rollouts

from grpocli.errors import ConfigError
from grpocli.models.tiny import make_tokenizer
from grpocli.rewards import reward_model
from grpocli.rewards.reward import Sample
from grpocli.rewards.reward_model import RewardModel


def save(folder: Path, labels: int, template: bool = True) -> Path:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE | {"vocab_size": 103, "pad_token_id": 0, "num_labels": labels})
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer = make_tokenizer()
    if not template:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return folder


def samples(texts: list[str], chat: bool) -> list[Sample]:
    prompt = [{"role": "user", "content": "2+2="}] if chat else "2+2="
    return [Sample.of(one, 9) for one in rollouts(*texts, prompt=prompt)]


@pytest.mark.parametrize("chat", [True, False])
def test_scores_do_not_depend_on_the_batch(tmp_path: Path, chat: bool) -> None:
    from transformers import AutoModelForSequenceClassification

    reward = RewardModel(path=str(save(tmp_path, 1)), batch=2, device="cpu")
    texts = ["4", "a long answer that says it is 4", "", "five", "4"]
    found = reward(samples(texts, chat))
    reward.close()
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval(), make_tokenizer()
    for text, score in zip(texts, found, strict=True):
        whole = f"<bos><user>2+2=<end><assistant>{text}<end>" if chat else f"2+2={text}"
        with torch.no_grad():
            ids = torch.tensor([tokenizer(whole, add_special_tokens=False).input_ids])
            assert score == pytest.approx(model(input_ids=ids).logits.item(), abs=1e-5)


def test_scores_do_not_depend_on_the_day(tmp_path: Path) -> None:
    """Chat templates such as that of Llama 3.2 write today's date."""
    template = save(tmp_path, 1) / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d+%m+%Y') }}{{ messages[-1].content }}")
    today = RewardModel(path=str(tmp_path), device="cpu")(samples(["4"], chat=True))
    template.write_text("01+07+2025{{ messages[-1].content }}")
    assert RewardModel(path=str(tmp_path), device="cpu", batch=1)(samples(["4"], chat=True)) == today
    template.write_text("02+07+2025{{ messages[-1].content }}")
    assert RewardModel(path=str(tmp_path), device="cpu", batch=2)(samples(["4"], chat=True)) != today


def test_long_texts_are_cut_at_the_beginning(tmp_path: Path) -> None:
    reward = RewardModel(path=str(save(tmp_path, 1)), max_tokens=3, device="cpu")
    one, other = reward(samples(["x" * 50 + "abc", "abc"], chat=False))
    assert one == pytest.approx(other, abs=1e-6)
    assert abs(one) > 1e-4


def test_other_models_are_refused(tmp_path: Path) -> None:
    two = RewardModel(path=str(save(tmp_path / "two", 2)), device="cpu")
    with pytest.raises(ConfigError, match=r"reward\.model\.path=.*two: has 2 outputs; a reward model has one"):
        two.check([])
    with pytest.raises(
        ConfigError, match=r"reward\.model\.path=nowhere/at/all: is not a sequence classification model"
    ):
        RewardModel(path="nowhere/at/all").check([])
    silent = RewardModel(path=str(save(tmp_path / "silent", 1, template=False)), device="cpu")
    with pytest.raises(ConfigError, match="has no chat template, but the prompts are conversations"):
        silent(samples(["4"], chat=True))


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_the_gpu_is_that_of_the_process_in_every_thread(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins with the first GPU, also in a process that trains on the second."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert reward_model._device(name) == torch.device("cuda", 1)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError) as refused:
        reward_model._device("cuda")
    assert refused.value.key == "reward.model.device"
