"""Damaged files of a finished run: they are reported and never trained on; an older checkpoint serves on request."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from chaos.trial import Kind, require, spread
from chaos.workspace import Workspace, check_equal

STEPS = 6  # of the resumed run; the damaged one ended after `DONE`
DONE = 4
WEIGHTS, OPTIMIZER, STATE = "model.safetensors", "optimizer-00001.safetensors", "trainer.json"
WRONG_COUNTERS = {"step": 3, "draws": 12, "updates": 9, "num_tokens": -1, "seconds": float("nan")}

Change = Callable[[Path, Random], None]


def flip(path: Path, random: Random) -> None:
    data = bytearray(path.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(data)


def zeros(path: Path, random: Random) -> None:
    data = bytearray(path.read_bytes())
    start = random.randrange(max(1, len(data) - 4096))
    length = min(4096, len(data) - start)
    data[start : start + length] = bytes(length)
    path.write_bytes(data)


def noise(path: Path, random: Random) -> None:
    path.write_bytes(random.randbytes(path.stat().st_size))


def cut(path: Path, random: Random) -> None:
    path.write_bytes(path.read_bytes()[: random.randrange(path.stat().st_size)])


def longer(path: Path, random: Random) -> None:
    path.write_bytes(path.read_bytes() + random.randbytes(1 + random.randrange(100)))


def empty(path: Path, random: Random) -> None:
    path.write_bytes(b"")


def removed(path: Path, random: Random) -> None:
    path.unlink()


def a_folder(path: Path, random: Random) -> None:
    path.unlink()
    path.mkdir()


def of_the_step_before(path: Path, random: Random) -> None:
    shutil.copyfile(path.parents[1] / f"step_{DONE - 1:06d}" / path.name, path)


def counter(path: Path, random: Random) -> None:
    state = json.loads(path.read_text())
    name = random.choice(sorted(WRONG_COUNTERS))
    state[name] = WRONG_COUNTERS[name]
    path.write_text(json.dumps(state))


def extra_file(path: Path, random: Random) -> None:
    """A second file of tensors, as a manual copy leaves it."""
    shutil.copyfile(path, path.with_name("model-00002-of-00002.safetensors"))


IN_CHECKPOINTS: dict[str, tuple[Change, Sequence[str]]] = {
    "one flipped bit": (flip, (WEIGHTS, OPTIMIZER, STATE, "config.json", "optimizer.safetensors.index.json")),
    "4 KiB of zeros": (zeros, (WEIGHTS, OPTIMIZER)),
    "noise": (noise, (WEIGHTS, OPTIMIZER, STATE)),
    "cut off": (cut, (WEIGHTS, OPTIMIZER, "tokenizer.json")),
    "bytes added": (longer, (WEIGHTS, OPTIMIZER)),
    "empty": (empty, (WEIGHTS, STATE, "config.json")),
    "removed": (removed, (WEIGHTS, OPTIMIZER, "tokenizer.json", "config.json")),
    "a folder": (a_folder, (WEIGHTS,)),
    "of the checkpoint before": (of_the_step_before, (WEIGHTS, OPTIMIZER, STATE)),
    "a changed counter": (counter, (STATE,)),
    "an extra file": (extra_file, (WEIGHTS,)),
}
CASES = [(damage, name) for damage, (_, names) in IN_CHECKPOINTS.items() for name in names]


@dataclass(frozen=True, slots=True)
class Damage:
    """A damage of `IN_CHECKPOINTS` to one file. fallback: an older checkpoint may be used. seed: of its position."""

    damage: str
    name: str
    fallback: bool
    seed: int

    attacks = 1

    def __str__(self) -> str:
        return f"{self.name} of the last checkpoint: {self.damage}" + ", resume_fallback=true" * self.fallback

    def execute(self, workspace: Workspace) -> None:
        run = workspace.copy(workspace.finished(f"train.steps={DONE}"))
        folder = run / "checkpoints" / f"step_{DONE:06d}"
        IN_CHECKPOINTS[self.damage][0](folder / self.name, Random(self.seed))
        shutil.rmtree(run / "model")
        more = ["train", f"resume={run}", f"train.steps={STEPS}"]
        before = (run / "metrics.jsonl").read_bytes()
        if self.fallback:
            ended = workspace.run(*more, "resume_fallback=true")
            ended.check(0)
            require(folder.name in ended.text, f"it does not report that {folder.name} is damaged{ended.tail}")
            check_equal(run, workspace.finished(f"train.steps={STEPS}"))
            return
        ended = workspace.run(*more)
        ended.check(2, str(folder), "resume_fallback", f"step_{DONE - 1:06d}")
        require((run / "metrics.jsonl").read_bytes() == before, "metrics.jsonl has changed")
        require(not (run / "model").exists(), "it wrote a model")


@dataclass(frozen=True, slots=True)
class Metrics:
    """Damage to metrics.jsonl, which training does not need: it is reported, and the final model is the same."""

    how: str
    attacks = 1

    def __str__(self) -> str:
        return f"metrics.jsonl: {self.how}"

    def execute(self, workspace: Workspace) -> None:
        expected = workspace.finished(f"train.steps={STEPS}")
        run = workspace.copy(workspace.finished(f"train.steps={DONE}"))
        path = run / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        if self.how == "removed":
            path.unlink()
        elif self.how == "a line of noise":
            path.write_bytes(b"".join([lines[0], b"\xff\x00{]\n", *lines[1:]]))
        elif self.how == "torn":
            path.write_bytes(b"".join(lines[:2]) + lines[2][:40])
        else:
            path.write_bytes(lines[0])
        shutil.rmtree(run / "model")
        ended = workspace.run("train", f"resume={run}", f"train.steps={STEPS}")
        require("metrics.jsonl" in ended.text, f"it does not report the damage{ended.tail}")
        if ended.code != 0:
            ended.check(2, "metrics.jsonl")
            return
        models = [(one / "model" / WEIGHTS).read_bytes() for one in (run, expected)]
        require(models[0] == models[1], "the final model differs")


def draw(random: Random, count: int) -> Sequence[Damage | Metrics]:
    others = [Metrics(how) for how in ("removed", "a line of noise", "torn", "cut off")]
    few = min(len(others), count // 8)
    trials: list[Damage | Metrics] = [
        Damage(damage, name, random.random() < 0.4, random.randrange(2**32))
        for damage, name in spread(random, CASES, count - few)
    ]
    return trials + others[:few]


KIND = Kind("damages", 40, draw)
