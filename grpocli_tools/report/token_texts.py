"""The text of each token of a completion, with the tokenizer in the folders of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpocli.runs.run_dir import RunDir

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNFINISHED = "\ufffd"
"""The character that a decoder returns for bytes that are not a whole character."""


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """Decodes tokens one by one."""

    tokenizer: Tokenizer

    @classmethod
    def of_run(cls, run: Path, config: Mapping[str, Any]) -> TokenTexts | None:
        """With the tokenizer of the final model, of the newest checkpoint or of a local start model; None without."""
        from tokenizers import Tokenizer

        for folder in _folders(run, config):
            try:
                return cls(Tokenizer.from_file(str(folder / "tokenizer.json")))
            except Exception:  # noqa: BLE001 - tokenizers raises plain Exception for a missing or broken file
                continue
        return None

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """A text for each token, special tokens included; joined they are the decoded text.

        A character of several tokens is in the last one of them.
        """
        from tokenizers.decoders import DecodeStream

        whole = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        stream = DecodeStream(skip_special_tokens=False)
        try:
            pieces = [stream.step(self.tokenizer, token) or "" for token in ids]
        except Exception:  # noqa: BLE001 - tokenizers raises plain Exception for bytes that no text has
            return self._by_prefix(ids, whole)
        joined = "".join(pieces)
        if pieces and whole.startswith(joined):  # the rest are bytes of a character that was cut off
            return [*pieces[:-1], pieces[-1] + whole[len(joined) :]]
        return self._by_prefix(ids, whole)

    def _by_prefix(self, ids: Sequence[int], whole: str) -> list[str]:
        """Each piece ends where the text of the tokens so far and the whole text differ; slow for long completions."""
        if not ids:
            return []
        ends = [0]
        for end in range(1, len(ids)):
            text = self.tokenizer.decode(list(ids[:end]), skip_special_tokens=False).rstrip(UNFINISHED)
            ends.append(max(ends[-1], len(commonprefix([text, whole]))))  # noqa: RUF071 - of texts, not of paths
        return [whole[first:last] for first, last in pairwise([*ends, len(whole)])]


def _folders(run: Path, config: Mapping[str, Any]) -> list[Path]:
    run_dir = RunDir(run)
    checkpoints = sorted(run_dir.checkpoints.glob("step_*"), reverse=True) if run_dir.checkpoints.is_dir() else []
    model = config.get("model")
    path = model.get("path") if isinstance(model, Mapping) else None
    local = [Path(path)] if isinstance(path, str) and Path(path).is_dir() else []
    return [run_dir.model, *checkpoints, *local]
