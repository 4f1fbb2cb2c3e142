"""One, two and three real processes make the same updates: weights and metrics agree, to rounding.

Each set of processes is started once, by the launcher of a run, and goes through all algorithms and kinds of
parallelism. Two processes come first and leave checkpoints, which one and three processes resume. They compute for a
minute, so these are survival tests; test_context_parallel.py has two processes in `make test`.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training import updating
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from grpocli.algorithm.metrics import EXTREMES
from grpocli.launch.trainer_launcher import command
from grpocli.rollout.sampler import sample
from grpocli.training.checkpoint import check_files
from grpocli.training.packing import Packed, group_spans
from grpocli.training.update import SCALE, SKIPPED
from grpocli.types import Request, Row, Sampling

pytestmark = [pytest.mark.processes, pytest.mark.survival]

ZERO = ("zero3",) if find_spec("deepspeed") else ()
PARALLEL = {1: ("ddp",), 2: ("ddp", "fsdp2"), 3: ("ddp", "fsdp2", *ZERO)}
Results = dict[tuple[int, int, str], dict[str, Any]]
ADVANTAGES = [[1.2, -0.3, -0.9], [-0.5, 1.5, -0.5, -0.5], [0.0, 0.0, 0.0], [2.0, -2.0], [0.4, 0.1, -0.7, 0.2, 0.3]]


@pytest.fixture(scope="module")
def tied_model(little_model) -> LlamaForCausalLM:
    """A model with tied embeddings, as small models have."""
    config = copy.deepcopy(little_model.config)
    config.tie_word_embeddings = True
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        parameter.data = little_model.get_parameter(name).detach().clone()
    return model.eval()


@pytest.fixture(scope="module")
def rows(tied_model) -> list[Row]:
    """Five ragged groups: one without advantages, one of an older policy, and two rows without tokens in the loss.

    The sampler's log-probs differ a little from the policy's, as an engine's do.
    """
    noise = torch.Generator().manual_seed(1)
    rows = []
    for group, advantages in enumerate(ADVANTAGES):
        prompt = [2, *range(5, 6 + 3 * group)]
        sampling = Sampling(3 + 4 * (group % 3), temperature=0.9)
        (done,) = sample(tied_model, [Request(prompt, len(advantages), group)], sampling, [1], 1)
        for completion, advantage in zip(done, advantages, strict=True):
            n = len(completion.token_ids)
            logp = [x + 0.1 * torch.randn((), generator=noise).item() for x in completion.logprobs]
            rows.append(Row(prompt, completion.token_ids, [1] * n, advantage, group, logp))
    for row in rows:
        row.old_logp = row.rollout_logp if row.group == 3 else None
    rows[1].mask = [0] * len(rows[1].mask)  # truncated
    rows[5].mask = [0] * len(rows[5].mask)
    rows[6].mask[1] = 0  # a token of an environment
    return rows


class Processes:
    """Starts each number of processes once, when a test first needs its results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ran: dict[int, Results] = {}

    def results(self, n: int) -> Results:
        """Results of `n` processes, by their number, rank and `hardware.parallel`."""
        if n not in self.ran:
            if not (self.folder / "2").exists() and n != 2:
                self.run(2, "checkpoints")  # which the others resume
            if not (self.folder / str(n)).exists():
                self.run(n, "everything")
            self.ran[n] = {
                (n, rank, parallel): torch.load(self.folder / f"{n}_{rank}_{parallel}.pt", weights_only=True)
                for rank in range(n)
                for parallel in PARALLEL[n]
            }
        return self.ran[n]

    def run(self, n: int, what: str) -> None:
        launched(updating.__file__, n, self.folder / str(n), str(self.folder), what, *PARALLEL[n])


def launched(script: str, n: int, logs: Path, *arguments: str) -> None:
    """Run a script in processes as `grpocli.launch.trainer_launcher` starts them; a single one without a launcher."""
    logs.mkdir()
    launcher = command(n, logs)
    launcher = launcher[: launcher.index("--module")] if n > 1 else [sys.executable]
    alone = {"OMP_NUM_THREADS": "1", "ACCELERATE_LOG_LEVEL": "ERROR", "PYTHONPATH": str(Path(__file__).parents[1])}
    run = [*launcher, script, *arguments]
    done = subprocess.run(run, env=os.environ | alone, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


@pytest.fixture(scope="module")
def processes(tied_model, rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> Processes:
    folder = tmp_path_factory.mktemp("processes")
    tied_model.save_pretrained(folder / "model")
    updating.save_rows(rows, folder / "rows.json")
    return Processes(folder)


@pytest.fixture(scope="module", params=[2, 3])
def n(request: pytest.FixtureRequest) -> int:
    """A number of processes, to be compared with one."""
    return int(request.param)


@pytest.fixture(scope="module")
def results(processes: Processes, n: int) -> Results:
    """Results of one process and of `n`, all of them."""
    several = processes.results(n)  # first, so that two processes do not leave their checkpoints alone
    assert "overflowed" in several[n, 0, "ddp"]
    return processes.results(1) | several


def test_the_shares_are_uneven(rows: list[Row], n: int) -> None:
    """The next test needs processes with different numbers of tokens and micro-batches."""
    spans = group_spans(updating.N_GROUPS, updating.TRAIN.minibatches)
    dealt = [Packed.deal([r for r in rows if r.group in span], n) for span in spans]
    limit = updating.TRAIN.micro_batch_tokens
    tokens = [{sum(sum(r.mask) for r in share) for share in shares} for shares in dealt]
    micro_batches = [{len(Packed.pack(share, limit)) for share in shares} for shares in dealt]
    assert max(len(counts) for counts in tokens) > 1
    assert max(len(counts) for counts in micro_batches) > 1


def assert_same(one: dict[str, Any], other: dict[str, Any], tolerance: float, where: object) -> None:
    assert (one["weights"] - other["weights"]).abs().max() <= tolerance, where
    if "mixed" in one:
        assert (one["mixed"] - other["mixed"]).abs().max() <= tolerance, where
    assert one["metrics"].keys() == other["metrics"].keys()
    of_split = {"tokens/padding", "tokens/shared", *EXTREMES}  # padding of a split, and extremes of its parts
    for metric in other["metrics"].keys() - of_split:
        value = other["metrics"][metric]
        assert one["metrics"][metric] == pytest.approx(value, rel=tolerance, abs=tolerance), (where, metric)


@pytest.mark.parametrize("name", updating.ALGORITHMS)
def test_the_number_of_processes_changes_nothing(results, tied_model, name: str) -> None:
    alone = results[1, 0, "ddp"][name]
    start = torch.cat([p.detach().flatten() for p in tied_model.parameters()])
    tolerance = 1e-6 if name not in updating.IN_16_BITS else 0.02
    change = alone["weights"] - start
    assert change.abs().max() > 0.005  # 5,000 times the tolerance, except in 16 bits
    for (n, rank, parallel), result in results.items():
        if name in result:
            assert_same(result[name], alone, tolerance, (n, rank, parallel))
            assert (result[name]["weights"] - alone["weights"]).norm() <= 0.05 * change.norm(), (n, rank, parallel)
            assert_extremes_of_all(result[name]["metrics"], results[n, 0, parallel][name]["metrics"])


def assert_extremes_of_all(metrics: dict[str, float], first: dict[str, float]) -> None:
    """Every process has the same extremes, on both sides of the mean."""
    assert {m: metrics.get(m) for m in EXTREMES} == {m: first.get(m) for m in EXTREMES}
    assert metrics.get("clip_ratio/low_min", 0.0) <= metrics.get("clip_ratio/low_mean", 0.0) + 1e-6
    assert metrics.get("clip_ratio/high_max", 0.0) >= metrics.get("clip_ratio/high_mean", 0.0) - 1e-6


def test_an_overflow_in_one_process_skips_the_update_in_all(results, tied_model) -> None:
    """Nothing changes but the scale, which halves; the update before, the only one that is made, is the same in all."""
    alone = results[1, 0, "ddp"]["overflowed"]["weights"]
    change = alone - torch.cat([p.detach().flatten() for p in tied_model.parameters()])
    for process, result in results.items():
        *early, good, last = result["overflowed"]["metrics"]
        assert len(early) > 3, process
        assert result["overflowed"]["kept"] == [True] * (len(early) + 1), process
        scales = [one[SCALE] for one in (*early, good, last)]
        assert scales == [2.0 ** (29 - i) for i in range(len(early))] + [scales[-3], scales[-3] / 2], process
        assert [one[SKIPPED] for one in (*early, good, last)] == [1] * len(early) + [0, 1], process
        assert ["grad_norm" in one for one in (good, last)] == [True, False], process
        assert (result["overflowed"]["weights"] - alone).norm() <= 0.05 * change.norm(), process


@pytest.mark.parametrize("name", updating.ALGORITHMS)
def test_the_main_process_gets_the_log_probs_of_every_row(results, rows: list[Row], name: str) -> None:
    """This includes entropies, ratios and clipped tokens, whichever process computed them; None if no process did."""
    alone = results[1, 0, "ddp"][name]["scored"]
    computed = [row.mask for row, scored in zip(rows, alone, strict=True) if scored is not None]
    assert all(map(any, computed))
    assert 0 < len(computed) < len(rows)
    for (_, rank, _), result in results.items():
        assert ("scored" in result.get(name, {})) == (rank == 0 and name in result)
        if "scored" in result.get(name, {}):
            assert_same_scores(result[name]["scored"], alone, name)


def assert_same_scores(scored: list[Any], alone: list[Any], name: str) -> None:
    for one, other in zip(scored, alone, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0.1 if name in updating.IN_16_BITS else 1e-5)


@pytest.mark.parametrize("saved", ["ddp", "fsdp2"])
def test_any_number_of_processes_resumes_a_checkpoint(processes: Processes, saved: str) -> None:
    """Two processes save it; one and three resume it, with the same and another `hardware.parallel`."""
    alone = processes.results(1)[1, 0, "ddp"][f"saved_2_{saved}"]
    for process, result in processes.results(3).items():
        assert_same(result[f"saved_2_{saved}"], alone, 1e-5, process)


@pytest.mark.parametrize("name", ["muon", "momentum"])
def test_other_optimizers_make_the_same_updates_in_any_number_of_processes(processes: Processes, results, name) -> None:
    """Also from a checkpoint of two processes, with weights and states in shards."""
    alone, start = results[1, 0, "ddp"], processes.folder / "model"
    before = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).parameters()
    change = alone[name]["weights"] - torch.cat([p.detach().flatten() for p in before])
    for process, result in results.items():
        for kind in (name, *(f"{name}_2_{parallel}" for parallel in updating.SHARED)):
            if kind in result:
                difference = (result[kind]["weights"] - alone[kind]["weights"]).norm()
                assert difference <= 0.05 * change.norm(), (process, kind)  # Muon computes in bfloat16
    assert {f"{name}_2_ddp", f"{name}_2_fsdp2"} <= alone.keys()


RESUMED = ["1_ddp", *(f"3_{parallel}" for parallel in PARALLEL[3])]


@pytest.mark.parametrize("saved", ["ddp", "fsdp2"])
@pytest.mark.parametrize("resumed", RESUMED)
def test_a_checkpoint_is_loaded_to_the_bit(processes: Processes, saved: str, resumed: str) -> None:
    """A checkpoint that is loaded and saved again is the same, whoever writes its checksums."""
    processes.results(int(resumed[0]))
    ended = processes.folder
    one, other = (
        {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for folder in (ended / f"saved_2_{saved}", ended / f"saved_2_{saved}_to_{resumed}.again")
    )
    assert len(list((ended / f"saved_2_{saved}").glob("*.safetensors"))) > 6
    assert one.keys() == other.keys()
    assert any(name.endswith(".exp_avg") for name in one)
    assert all(other[name].equal(tensor) for name, tensor in one.items())
    check_files(ended / f"saved_2_{saved}_to_{resumed}.again")


SAVED = ["saved_1_ddp", "saved_2_ddp", "saved_2_fsdp2", *(f"saved_3_{parallel}" for parallel in PARALLEL[3][1:])]


@pytest.mark.parametrize("name", SAVED)
def test_transformers_loads_the_checkpoints_of_any_number_of_processes(processes: Processes, name: str) -> None:
    """The loaded weights equal the trained ones to the bit."""
    _, n, parallel = name.split("_")
    trained = processes.results(int(n))[int(n), 0, parallel]["model"]["weights"]
    saved = processes.folder / name
    for folder, dtype in ((saved, torch.float32), (saved / "final", torch.bfloat16)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert type(model) is LlamaForCausalLM
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert weights.equal(trained.to(dtype).float())


@pytest.mark.zero
@pytest.mark.skipif(not ZERO, reason="no DeepSpeed: zero3 is not tried (pip install deepspeed)")
def test_zero_is_part_of_the_tests_above(processes: Processes) -> None:
    results = processes.results(3)
    for rank, parallel in product(range(3), ZERO):
        assert {"grpo", "clipped", "saved_2_fsdp2"} <= results[3, rank, parallel].keys()


def test_each_process_samples_any_number_of_tokens(results, tied_model) -> None:
    for (_, rank, parallel), result in results.items():
        if parallel == "zero3":
            continue  # refused
        expected = [updating.sampled_by(tied_model, rank, turn) for turn in (0, 1)]
        assert result["sampled"] == expected[0] + expected[1]
