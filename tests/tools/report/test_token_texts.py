"""Texts of tokens: they join to the decoded completion, for every kind of tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from grpocli.runs.saved_run import SavedRun
from grpocli_tools.report.rollout_sample import TokenTexts

TEXTS = [
    "2 + 2 = 4",
    "naïve café",
    "日本語のテキスト",
    "👩‍👩‍👧 and 🏳️‍🌈",
    "a\n\n  b\t",
    "عربي و עברית",
    "  two  spaces  ",
]
CORPUS = ["the answer is 4, and 2 + 2 = 4", "a naive text with two spaces"]
SPECIAL = [AddedToken("<|end|>", special=True), AddedToken("<think>", special=False)]


def byte_level() -> Tokenizer:
    """As in GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    return tokenizer


def sentencepiece() -> Tokenizer:
    """As in Llama 2 and Gemma: `▁` for spaces, and a token for each byte of unknown characters."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in ("▁", "▁2", "▁+", "▁=", "▁4", "a", "▁a", "n", "d", "▁an", "▁and"):
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("▁a", "n"), ("▁an", "d")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@pytest.fixture(params=[byte_level, sentencepiece])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    made: Tokenizer = request.param()
    made.add_special_tokens(SPECIAL[:1])
    made.add_tokens(SPECIAL[1:])
    return made


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_decoded_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = TokenTexts(tokenizer)(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("text", ["日本語", "👩‍👩‍👧", "café"])
def test_a_character_that_is_cut_off_keeps_its_place_at_the_end(tokenizer: Tokenizer, text: str) -> None:
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    for end in range(1, len(whole) + 1):
        pieces = TokenTexts(tokenizer)(whole[:end])  # None: the completion is shown as text
        shown = tokenizer.decode(whole[:end], skip_special_tokens=False)
        assert pieces is None or (len(pieces) == end and "".join(pieces) == shown)


def test_ids_outside_the_vocabulary_do_not_stop_the_page(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("2").ids, 10_000_000]
    assert TokenTexts(tokenizer)(ids) in (None, ["2", ""], [" 2", ""], ["", "2", ""])


def test_a_broken_tokenizer_leaves_the_completions_as_texts(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text('{"version": "1.0", "model"')
    assert TokenTexts.of_run(SavedRun(tmp_path)) is None
