"""model=tiny: tokenizer, warm start, and the same bytes for the same settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from composed import refused
from hypothesis import given
from hypothesis import strategies as st

from grpocli.composition.compose import compose
from grpocli.config.build import build
from grpocli.models.loading import load_model, load_tokenizer
from grpocli.models.tiny import ALPHABET, CALCULATOR, Tiny, content_hash, make_model, make_tokenizer, with_calls
from grpocli.models.warm_start import IGNORED, corrupt, kinds_of, orthogonalise, warm_start
from grpocli.rollout.turns import CallParser, TurnEncoder
from grpocli.tasks.generated import Arithmetic

TOKENIZER = make_tokenizer()


def plain(texts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """A text of plain characters; a special token in it is one token."""
    return texts.filter(lambda text: not any(token in text for token in TOKENIZER.all_special_tokens))


@given(plain(st.text(st.characters(exclude_categories=["Cs"]))))
def test_a_character_is_one_token_and_unknown_ones_are_left_out(text: str) -> None:
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "".join(c for c in text if c in ALPHABET)
    assert len(ids) == len(text)


def test_the_chat_template_writes_special_tokens_of_the_config() -> None:
    chat, config = [{"role": "user", "content": "47+85="}], make_model(seed=0).config
    text = TOKENIZER.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<bos><user>47+85=<end><assistant>"
    assert len(TOKENIZER(text, add_special_tokens=False).input_ids) == 4 + len("47+85=")
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        assert getattr(TOKENIZER, name) == getattr(config, name)
    assert len(TOKENIZER) == config.vocab_size


@pytest.mark.slow
def test_prepare_is_deterministic_and_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_folder: Path
) -> None:
    part = Tiny(warm_start_steps=3)
    first = Path(part.prepare())
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert first.parent == cache_folder / "models"
    assert part.prepare() == str(first)
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    monkeypatch.setenv("GRPOCLI_CACHE", str(tmp_path / "other"))
    torch.manual_seed(123)  # another global random state must not change the result, nor be changed
    before = torch.get_rng_state()
    second = Path(part.prepare())
    assert torch.equal(before, torch.get_rng_state())
    assert second.name == first.name
    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (first / file).read_bytes() == (second / file).read_bytes()


def test_the_prepared_folder_loads(cache_folder: Path) -> None:
    part = Tiny(warm_start_steps=1)
    path = part.prepare()
    model, tokenizer = load_model(part, path), load_tokenizer(part, path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert tokenizer.chat_template == TOKENIZER.chat_template
    assert tokenizer("47+85=").input_ids == TOKENIZER("47+85=").input_ids
    assert tokenizer.decode(tokenizer("a  b ,c").input_ids) == "a  b ,c"


def test_every_setting_changes_the_hash() -> None:
    parts = [Tiny(), Tiny(noise=0.1), Tiny(digits=3), Tiny(operation="-"), Tiny(warm_start_steps=9)]
    assert len({content_hash(part) for part in parts}) == len(parts)
    assert content_hash(Tiny(dtype="bfloat16")) == content_hash(Tiny())


@pytest.mark.slow
def test_the_warm_start_teaches_digits_and_restores_the_threads() -> None:
    threads = torch.get_num_threads()
    model, examples = make_model(seed=0), Arithmetic(digits=1).examples("train")
    prompt = TOKENIZER("<bos><user>2+2=<end><assistant>", add_special_tokens=False, return_tensors="pt")

    def probability_of_a_digit() -> float:
        with torch.no_grad():
            logits = model(**{k: prompt[k] for k in ("input_ids", "attention_mask")}).logits[0, -1]
        return float(logits.softmax(-1)[TOKENIZER.convert_tokens_to_ids(list("0123456789"))].sum())

    before = probability_of_a_digit()
    warm_start(model, TOKENIZER, examples, steps=12, noise=0.3, seed=0)
    assert before < 0.2
    assert probability_of_a_digit() > 0.6
    assert torch.get_num_threads() == threads


def test_noise_replaces_only_its_share_of_digits() -> None:
    digits = torch.arange(10)
    answers = torch.tensor([[3, 7, 50, -100]]).repeat(20_000, 1)
    noisy = corrupt(answers, digits, 0.3, torch.Generator().manual_seed(0))
    assert torch.equal(noisy[:, 2:], answers[:, 2:])
    changed = float((noisy[:, :2] != answers[:, :2]).float().mean())
    assert changed == pytest.approx(0.3 * 0.9, abs=0.01)  # a tenth of the replacements draw the same digit
    assert set(noisy[:, :2].flatten().tolist()) == set(range(10))


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 32, 16), (2, 16, 32)])
def test_muon_updates_have_singular_values_near_one(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    result = orthogonalise(torch.randn(shape))
    assert result.shape == shape
    values = torch.linalg.svdvals(result)
    assert float(values.min()) > 0.3
    assert float(values.max()) < 1.3


def test_the_number_of_digits_follows_the_task() -> None:
    for field, value in (("noise", 1.5), ("digits", 0), ("dtype", "bf16")):
        with refused(f"model.{field}"):
            Tiny(**{field: value})
    followed = build(compose(["model=tiny", "task=arithmetic", "task.digits=3", "task.operation='*'"]).model)
    assert (followed.digits, followed.operation) == (3, "*")
    own = build(compose(["model=tiny", "task=jsonl", "task.path=x.jsonl"]).model)
    assert (own.digits, own.operation) == (2, "+")


PRODUCTS = Arithmetic(digits=2, operation="*").examples("train")[:200]


def test_the_tokenizer_finds_its_own_calls() -> None:
    tokenizer = make_tokenizer()
    parser = CallParser(TurnEncoder(tokenizer, [CALCULATOR]))
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "47*85"}}}
    said = tokenizer("calculator(expression=47*85)<end>", add_special_tokens=False).input_ids
    assert parser.message(said) == {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = tokenizer("3995<end>", add_special_tokens=False).input_ids
    assert parser.message(answer) == {"role": "assistant", "content": "3995"}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert parser.encoder.render([turn]).endswith("<assistant>calculator(expression=47*85)<end>")


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_every_second_example_has_a_tool_and_a_share_of_these_call_it(share: float) -> None:
    with_tools = [one for one in with_calls(PRODUCTS, share) if "tools" in one]
    called = [one for one in with_tools if one["answer"].startswith("calculator(")]
    assert (len(with_tools), len(called)) == (100, 100 * share)


def test_the_warm_start_learns_calls_and_answers_but_no_results() -> None:
    tokenizer = make_tokenizer()
    kinds = kinds_of(with_calls(PRODUCTS, 0.1), tokenizer)
    assert [kind.share for kind in kinds] == pytest.approx([0.5, 0.45, 0.05])
    direct, shown, calls = kinds
    assert not direct.exact
    assert not shown.heard_NT.any()
    assert calls.exact
    row, heard = calls.answers_NT[0], calls.heard_NT[0]
    learned = tokenizer.decode(row[~heard & (row != IGNORED)])
    assert torch.equal(calls.answers_NT[:, 0], torch.full((10,), tokenizer.convert_tokens_to_ids("c")))
    call, result, answer = learned.split("<end>")[0], tokenizer.decode(row[heard]), learned.split("<end>")[1]
    assert call.startswith("calculator(expression=")
    assert result == f"<system>{answer}<end><assistant>"
