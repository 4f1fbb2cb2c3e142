"""Misbehaving reward functions: the run ends with an error that names the function, or equals that of a correct one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from chaos.trial import Kind, require, spread
from chaos.workspace import TINY, Workspace, check_equal, metrics
from cli.copied import config_dir

HONEST = """
import re
def honest(completions):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [1.0 if re.fullmatch(".*[02468]", text) else 0.0 for text in texts]
"""
SCORE = """
calls = 0
def score(completions, **kwargs):
    global calls
    calls += 1
    if calls != {call}:
        return honest(completions)
{body}
    return honest(completions)
"""
ENDS = {
    "raises": "raise KeyError('oops')",
    "raises an error whose text raises": "class E(Exception):\n    def __str__(self): raise self\nraise E",
    "raises an error with escapes": "raise ValueError('\\x1b]0;owned\\x07' * 9)",
    "too few values": "return honest(completions)[1:]",
    "too many values": "return honest(completions) + [1.0]",
    "texts": "return ['good'] * len(completions)",
    "one text": "return 'good'",
    "a dictionary": "return dict(enumerate(completions))",
    "nothing": "return None",
    "a generator without end": "return iter(int, 1)",
    "lists": "return [[1.0]] * len(completions)",
    "complex numbers": "return [1j] * len(completions)",
    "NaN": "return [float('nan')] * len(completions)",
    "infinity": "return [float('inf')] * len(completions)",
    "an integer that no float holds": "return [10 ** 400] * len(completions)",
    "sys.exit": "import sys; sys.exit(0)",
    "an interpreter's recursion": "def f(): return f()\nf()",
    "memory": "x = bytearray(2 ** 60)",
}
HANGS = {
    "sleeps": "import time; time.sleep(3600)",
    "loops": "while True: pass",
    "catches the timeout": "import time\nwhile True:\n    try: time.sleep(3600)\n    except Exception: pass",
    "a catastrophic regex": "import re; re.match('(a+)+$', 'a' * 60 + 'b')",
    "waits for a lock": "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "C code that holds the GIL": "sum(range(10 ** 13))",
    "a power": "x = 7 ** 7 ** 9",
}
DIES = {
    "a crash": "import ctypes; ctypes.string_at(0)",
    "os._exit": "import os; os._exit(0)",
    "closed descriptors": "import os; os.closerange(3, 256)",
}
"""Tried again in a new process, whose first call may succeed."""
CONTINUES = {
    "a thread that stays": "import threading, time; threading.Thread(target=time.sleep, args=(3600,)).start()",
    "a forked child that returns": "import os; os.fork()",
    "a forked child that raises": "import os\nif os.fork() == 0: raise SystemExit(0)",
    "a pending alarm": "import signal; signal.alarm(1)",
    "a pending timer": "import signal; signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)",
    "closed output": "import os; os.close(1); os.close(2)",
    "another folder": "import os; os.chdir('/')",
    "a mask for files": "import os; os.umask(0o777)",
    "an empty environment": "import os; os.environ.clear()",
    "seeds": "import random, numpy, torch; random.seed(0); numpy.random.seed(0); torch.manual_seed(0)",
    "no gradients": "import torch; torch.set_grad_enabled(False)",
    "another default dtype": "import torch; torch.set_default_dtype(torch.float64)",
    "more threads": "import torch; torch.set_num_threads(3)",
    "changed completions": "scores = honest(completions); completions.clear(); return scores",
    "changed columns": "[value.clear() for value in kwargs.values()]",
    "silence": "import logging; logging.disable(logging.CRITICAL); logging.shutdown()",
    "no stdout": "import sys; sys.stdout = sys.stderr = None",
    "warnings as errors": "import warnings; warnings.simplefilter('error')",
    "ignored signals": "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "much text": "print('x' * 10 ** 7)",
}
ALL = ENDS | HANGS | DIES | CONTINUES


@dataclass(frozen=True, slots=True)
class Misbehaviour:
    """A misbehaviour of `ALL` in one call. ahead: rewards are computed in a thread beside training."""

    how: str
    call: int
    ahead: bool
    attacks = 1

    def __str__(self) -> str:
        return f"in call {self.call}: {self.how}" + ", staleness 1" * self.ahead

    def execute(self, workspace: Workspace) -> None:
        shared = workspace.shared.folder
        honest = shared / "honest.py"
        if not honest.exists():
            honest.write_text(HONEST + "score = lambda completions: honest(completions)\n")
        config_dir(shared / "conf")
        more = ["--config-dir", str(shared / "conf"), "reward=[python]", "reward.python.timeout=3", "train.steps=4"]
        if self.ahead:
            more += ["engine=copied", "rollout.max_staleness=1", "rollout.in_flight=false"]
        body = "\n".join(f"    {line}" for line in ALL[self.how].splitlines())
        (workspace.folder / "mine.py").write_text(HONEST + SCORE.format(call=self.call, body=body))
        run = workspace.folder / "run"
        options = [
            *more,
            f"reward.python.function={workspace.folder}/mine.py:score",
            f"hydra.run.dir={run}",
        ]
        ended = workspace.run("train", *TINY, *options, fresh="closed" in self.how)
        steps = [row["step"] for row in metrics(run)]
        require(steps == list(range(1, len(steps) + 1)), f"the steps are {steps}")
        if ended.code == 0:
            require(self.how in CONTINUES | DIES, f"it continued{ended.tail}")
            ended.check_readable()
            check_equal(run, workspace.finished(*more, f"reward.python.function={honest}:score", small=TINY))
            return
        require(ended.code == 1, f"it ended with {ended.code}{ended.tail}")
        said = json.loads((run / "summary.json").read_text())["exit"]
        require("reward.python" in said or "mine.py" in said, f"the summary does not name the reward: {said}")
        if self.how != "closed output":
            ended.check(1, "mine.py")
        if self.how in HANGS:
            ended.check(1, "3 s")


def draw(random: Random, count: int) -> Sequence[Misbehaviour]:
    trials = []
    for how in spread(random, list(ALL), count):
        ahead = how in HANGS and random.random() < 0.5
        trials.append(Misbehaviour(how, random.randint(1, 3), ahead))
    return trials


KIND = Kind("rewards", len(ALL), draw)
