"""model.attention=flex_attention and model.compile=true in whole runs: both take effect, and a resume is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cli.running import EVEN, SMALL, assert_same_run, killed_after, run_here

from grpocli.models.flex_attention import TiledMask
from grpocli.training import trials


@pytest.mark.survival
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about its own code
def test_a_compiled_run_with_flex_attention_resumes_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []
    calls: list[TiledMask] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def attend(self: TiledMask, *given: Any) -> Any:
        calls.append(self)
        return plain(self, *given)

    plain = TiledMask.attend
    monkeypatch.setattr(TiledMask, "attend", attend)
    monkeypatch.setattr(trials, "COMPILE_OPTIONS", trials.COMPILE_OPTIONS | {"backend": backend})
    keys = ["model.compile=true", "model.attention=flex_attention", "checkpoint.every=1", "eval.problems=0"]
    run = tmp_path / "run"
    try:
        assert run_here("train", *SMALL, *EVEN, *keys, "train.steps=2", f"hydra.run.dir={run}") == 0
        assert graphs, "layers are compiled"
        assert calls, "attention over packed rows is flex attention's"
        again = killed_after(1, run, tmp_path / "again")
        torch.compiler.reset()
        assert run_here("train", f"resume={again}") == 0
    finally:
        torch.compiler.reset()
    assert_same_run(again, run)
