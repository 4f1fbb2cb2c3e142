"""Environments of the library verifiers for tests; `kind` of the config chooses how an episode goes."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import Iterator

import verifiers.v1 as vf


class CountData(vf.TaskData):
    answer: str


class CountTask(vf.Task[CountData]):
    """A reward of 0.5 for each turn of the model."""

    @vf.reward(weight=0.5)
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class CountConfig(vf.TasksetConfig):
    n: int | None = None
    kind: str = "plain"


class CountEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class CountEnv(vf.Env[CountEnvConfig]):
    """Answers each turn with the number of turns, until the model says the answer; that is worth 1."""

    async def run(self, task: CountTask, agents: vf.Agents) -> None:
        kind = self.taskset.config.kind
        if kind == "raises":
            raise RuntimeError("the board is lost")
        opened = task if task.data.prompt is not None else task.with_data(prompt=None)
        async with agents.player.interaction(opened) as interaction:
            segment = await (interaction.turn() if task.data.prompt is not None else interaction.turn("you begin"))
            for number in itertools.count(1):
                if segment.terminated or segment.last_reply == task.data.answer:
                    break
                if segment.last_reply == "sleep":
                    await asyncio.sleep(60)
                if segment.last_reply == "die":
                    os._exit(1)
                segment = await interaction.turn(f"turn {number}")
        interaction.trace.record_reward("right", float(segment.last_reply == task.data.answer), 1.0)


class CountTaskset(vf.Taskset[CountTask, CountConfig]):
    """Endless, unless `n` is given."""

    INFINITE = True

    def load(self) -> Iterator[CountTask]:
        if self.config.kind == "exits":
            sys.exit("bye")
        if self.config.kind == "variable":
            os.environ["COUNTING_KEY"]
        for i in itertools.count() if self.config.n is None else range(self.config.n):
            prompt = None if self.config.kind == "opens" else f"say {i}"
            system = "be brief" if self.config.kind == "system" else None
            yield CountTask(CountData(prompt=prompt, system_prompt=system, answer=str(i)), self.config.task)


__all__ = ["CountEnv", "CountTaskset"]
