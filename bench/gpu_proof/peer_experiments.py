"""grpocli beside TRL on the GPU: two workloads of `make bench-gpu`, whose table has all of them."""

from __future__ import annotations

from experiment import Measured, Setting, at_most, experiment
from training_runs import side
from updates_experiments import gradient_apart, model_folder, seconds, update, workload

KINDS = ("even", "skewed")


@experiment(
    "peer",
    "updates beside TRL's, 0.5B: the time and the memory of grpocli over TRL's",
    *(at_most(f"{of}_{kind}", 1, f"{kind}: {of}", gpu=True) for of in ("time", "memory") for kind in KINDS),
    *(at_most(f"gradient_apart_{kind}", 0.03, f"{kind}: difference of the gradient norms") for kind in KINDS),
    needs=("trl",),
    seconds=180,
)
def beside_trl(setting: Setting) -> Measured:
    found: Measured = {}
    for kind in KINDS:
        name = workload(setting, f"0.5B, {kind}")
        ours = update(setting, name, 5)
        setting.save(found | {f"own_seconds_{kind}": ours["seconds"], f"own_gib_{kind}": ours["GiB"]})
        theirs = side("trl_side", name, model_folder(setting, name), 5)
        found |= {
            f"time_{kind}": seconds(ours) / seconds(theirs),
            f"memory_{kind}": ours["GiB"] / theirs["GiB"],
            f"gradient_apart_{kind}": gradient_apart(ours, theirs),
            f"seconds_{kind}": [ours["seconds"], theirs["seconds"]],
            f"gib_{kind}": [ours["GiB"], theirs["GiB"]],
        }
        setting.save(found)
    return found
