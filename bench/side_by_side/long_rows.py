"""Memory and time of updates with long rows: `python bench/side_by_side/long_rows.py [lengths] [activations]`.

lengths: against the length of rows. activations: with gradient checkpointing, and with two processes that share each
micro-batch. Each measurement is a run of grpocli in its own processes. Writes the tables between markers of
docs/evidence/benchmarks.md, as `run.py` does.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from run import GRPOCLI_SIDE, WARM, check, rounds_of, write
from workloads import ALL, LONG_ROWS, Workload, make_model

TWO = ("hardware.processes=2", "hardware.context_parallel=2", "hardware.timeout=600")
CHECKPOINTING = "train.gradient_checkpointing=true"
WAYS: dict[str, tuple[str, ...]] = {
    "W7": (),
    "W7, gradient checkpointing": (CHECKPOINTING,),
    "W7, 2 processes share each row": TWO,
    "W7, both": (*TWO, CHECKPOINTING),
}


def measured(name: str, folder: Path, steps: int, options: tuple[str, ...] = ()) -> dict[str, float]:
    """Median seconds of a step, and the peak memory of the main trainer process in GiB."""
    from run import one

    found = one(*GRPOCLI_SIDE, name, folder, steps, *options)
    return {
        "seconds": statistics.median(found["seconds"][WARM:]),
        "GiB": max(found["parts"]["memory/peak_gib"]),
        "norm": found["logs"][0]["grad_norm"],
    }


def kept(name: str, folder: Path, checkpointing: bool) -> float:
    """GiB that autograd keeps of a micro-batch."""
    code = f"import long_rows; print(long_rows.bytes_kept({name!r}, {str(folder)!r}, {checkpointing}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return int(done.stdout.split()[-1]) / 2**30


def bytes_kept(name: str, folder: str, checkpointing: bool) -> int:
    """The bytes of `kept`, counted in this process on a CPU: each memory once, without weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from grpocli.models.loading import checkpoint_activations
    from grpocli.training.packing import MicroBatch
    from grpocli.training.policy import Policy
    from grpocli.training.trials import pack
    from grpocli.types import Row, Sampling

    work: Workload = ALL[name]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    if checkpointing:
        checkpoint_activations(model)
    policy = Policy(model, model, torch.bfloat16)
    assert pack(policy, None)
    rows = [
        Row([3] * work.prompt, ids, [1] * len(ids), 1.0, group, [-6.0] * len(ids))
        for group, completions in enumerate(work.completions(0))
        for ids in completions
    ]
    batch = MicroBatch.build(rows, torch.device("cpu"), policy.layout(Sampling(1)))
    known, found = {weight.untyped_storage().data_ptr() for weight in model.parameters()}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in known:
            found[memory.data_ptr()] = max(found.get(memory.data_ptr(), 0), memory.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = policy.scores(batch, Sampling(1))
    assert scores.logp.requires_grad
    return sum(found.values())


def tokens(work: Workload) -> int:
    return work.needed(0)[0]


def lengths_table(found: dict[str, list[dict[str, float]]]) -> str:
    rows = [
        "| | tokens of a micro-batch | s | s for 1,000 tokens | GiB | GiB more for 1,000 tokens |",
        f"|{'---|' * 6}",
    ]
    before: tuple[int, float] | None = None
    for name, runs in found.items():
        work, seconds, gib = LONG_ROWS[name], middle(runs, "seconds"), middle(runs, "GiB")
        count = tokens(work)
        more = f"{1000 * (gib - before[1]) / (count - before[0]):.3f}" if before else ""
        rows.append(
            f"| {name}: {work.about} | {count:,} | {seconds:.2f} | {1000 * seconds / count:.2f} | {gib:.2f} | {more} |"
        )
        before = count, gib
    return "\n".join(rows)


def activations_table(found: dict[str, list[dict[str, float]]]) -> str:
    rows = [
        "| | s | GiB of a process | kept for the backward pass, GiB |",
        f"|{'---|' * 4}",
    ]
    for name, runs in found.items():
        counted = f"{middle(runs, 'kept'):.2f}" if "kept" in runs[0] else ""
        rows.append(f"| {name} | {middle(runs, 'seconds'):.2f} | {middle(runs, 'GiB'):.2f} | {counted} |")
    return "\n".join(rows)


def middle(runs: list[dict[str, float]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="lengths, activations; both by default")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--print", action="store_true", help="leave the docs alone")
    args = parser.parse_args()
    check(parser, args)
    measurements: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
        "lengths": {name: (name, ()) for name in LONG_ROWS},
        "activations": {name: ("W7", options) for name, options in WAYS.items()},
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(ALL["W7"].model, Path(scratch) / "model")
        for table in args.tables or measurements:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in measurements[table]}
            for _ in range(args.rounds):
                for name, (work, options) in measurements[table].items():
                    run = measured(work, folder, args.steps, options)
                    if table == "activations" and options in ((), (CHECKPOINTING,)):
                        run["kept"] = kept(work, folder, bool(options))
                    found[name].append(run)
                    print(f"{name}: {run}", file=sys.stderr, flush=True)
            text = {"lengths": lengths_table, "activations": activations_table}[table](found)
            text += f"\n\n{rounds_of(args.rounds, args.steps)}."
            print(text)
            if not args.print:
                write(f"long rows: {table}", text, found)


if __name__ == "__main__":
    main()
