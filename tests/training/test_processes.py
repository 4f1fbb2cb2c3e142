"""One, two and three real processes make the same updates: weights and metrics, to rounding.

Each set of processes is started once, by the launcher that a run uses, and goes through all algorithms.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from training import updating

from grpocli.data import Request, Sampling
from grpocli.launch.processes import command
from grpocli.rollout.sampler import sample
from grpocli.training.batch import Row, deal, pack, windows

PROCESSES = (1, 2, 3)
ADVANTAGES = [[1.2, -0.3, -0.9], [-0.5, 1.5, -0.5, -0.5], [0.0, 0.0, 0.0], [2.0, -2.0], [0.4, 0.1, -0.7, 0.2, 0.3]]


@pytest.fixture(scope="module")
def rows(little_model) -> list[Row]:
    """Five ragged groups: one without advantages, one sampled by an older policy; two rows without tokens in the loss.

    The sampler's log-probs are off by a little, as an engine's are.
    """
    noise = torch.Generator().manual_seed(1)
    rows = []
    for group, advantages in enumerate(ADVANTAGES):
        prompt = [2, *range(5, 6 + 3 * group)]
        sampling = Sampling(3 + 4 * (group % 3), temperature=0.9)
        (done,) = sample(little_model, [Request(prompt, len(advantages), group)], sampling, [1], 1)
        for completion, advantage in zip(done, advantages, strict=True):
            n = len(completion.token_ids)
            logp = [x + 0.1 * torch.randn((), generator=noise).item() for x in completion.logprobs]
            rows.append(Row(prompt, completion.token_ids, [1] * n, advantage, group, logp))
    for row in rows:
        row.old_logp = torch.tensor(row.rollout_logp) if row.group == 3 else None
    rows[1].mask = [0] * len(rows[1].mask)  # truncated
    rows[5].mask = [0] * len(rows[5].mask)
    rows[6].mask[1] = 0  # an environment's word
    return rows


@pytest.fixture(scope="module")
def results(
    little_model, rows: list[Row], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[int, int], dict[str, Any]]:
    """What every process ended with, by (number of processes, rank)."""
    folder = tmp_path_factory.mktemp("processes")
    little_model.save_pretrained(folder / "model")
    updating.save_rows(rows, folder / "rows.json")
    started = [start(folder, n) for n in PROCESSES]
    try:
        for process in started:
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, output
    finally:
        for process in started:
            process.kill()
    return {(n, rank): torch.load(folder / f"{n}_{rank}.pt", weights_only=True) for n in PROCESSES for rank in range(n)}


def start(folder: Path, n: int) -> subprocess.Popen[str]:
    """As `grpocli.launch.processes` starts its workers, but for what they run; one needs no launcher."""
    script = [updating.__file__, str(folder)]
    (folder / str(n)).mkdir()
    launcher = command(n, folder / str(n))
    launcher = launcher[: launcher.index("--module")] if n > 1 else [sys.executable]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_LOG_LEVEL": "ERROR"}
    return subprocess.Popen([*launcher, *script], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("n", PROCESSES[1:])
def test_the_shares_are_uneven(rows: list[Row], n: int) -> None:
    """What the next test is a test of: processes with different numbers of tokens and of micro-batches."""
    spans = windows(updating.N_GROUPS, updating.TRAIN.minibatches)
    dealt = [deal([r for r in rows if r.group in span], n) for span in spans]
    tokens = [{sum(sum(r.mask) for r in share) for share in shares} for shares in dealt]
    micro_batches = [{len(pack(share, updating.TRAIN.micro_batch_tokens)) for share in shares} for shares in dealt]
    assert max(len(counts) for counts in tokens) > 1
    assert max(len(counts) for counts in micro_batches) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", updating.ALGORITHMS)
def test_the_number_of_processes_changes_nothing(results, little_model, name: str) -> None:
    alone = results[1, 0][name]
    start = torch.cat([p.detach().flatten() for p in little_model.parameters()])
    assert (alone["weights"] - start).abs().max() > 0.005  # 5,000 times what is tolerated
    for process, result in results.items():
        assert (result[name]["weights"] - alone["weights"]).abs().max() <= 1e-6, process
        assert result[name]["metrics"].keys() == alone["metrics"].keys()
        for metric, value in alone["metrics"].items():
            assert result[name]["metrics"][metric] == pytest.approx(value, rel=1e-6, abs=1e-6), (process, metric)


@pytest.mark.slow
def test_the_algorithms_differ(results) -> None:
    """The names above do not all run the same thing."""
    weights = [results[1, 0][name]["weights"] for name in updating.ALGORITHMS]
    for i, one in enumerate(weights):
        for other in weights[:i]:
            assert (one - other).abs().max() > 1e-4
