"""Generators of reasoning-gym as tasks, scored by their own scorers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from rewards.conftest import rollouts

from grpocli.errors import ConfigError
from grpocli.library_environments.reasoning_gym import ReasoningGym, ReasoningGymReward
from grpocli.rewards.reward import Failure, Sample

GENERATORS = ["chain_sum", "mini_sudoku", "family_relationships"]

pytestmark = [
    pytest.mark.processes,  # the reward scores in worker processes
    pytest.mark.filterwarnings("ignore::SyntaxWarning"),  # from a library of reasoning-gym
]


@pytest.fixture(scope="module")
def reward() -> Iterator[ReasoningGymReward]:
    with closing(ReasoningGymReward(workers=2, timeout=60.0)) as made:
        yield made


def sample(example: dict, text: str) -> Sample:
    (rollout,) = rollouts(text, **example)
    return Sample.of(rollout, 99)


@pytest.mark.parametrize("name", GENERATORS)
def test_every_generator_scores_its_own_answer_as_right(name: str, reward: ReasoningGymReward) -> None:
    task, again = (
        ReasoningGym(name=name, train_size=5, eval_size=2, instructions="\nAnswer in <answer> tags.") for _ in range(2)
    )
    train, held_out = task.examples("train"), task.examples("eval")
    assert (len(train), len(held_out)) == (5, 2)
    assert not {str(one["prompt"]) for one in train} & {str(one["prompt"]) for one in held_out}
    assert train == again.examples("train")
    samples = [sample(one, f"Hm, <answer>0?</answer> no: <answer> {one['answer']} </answer>") for one in train]
    assert reward(samples) == [1.0] * 5
    wrong = reward([sample(one, "<answer></answer>") for one in train])
    assert all(isinstance(score, float) and score < 1 for score in wrong)


def test_settings_reach_the_generator() -> None:
    task = ReasoningGym(name="chain_sum", config={"min_terms": 2, "max_terms": 2}, train_size=20)
    assert all(one["question"].count(" + ") + one["question"].count(" - ") == 1 for one in task.examples("train"))


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"name": "chain_summ"}, "task.name"),
        ({"name": "chain_sum", "config": {"terms": 2}}, "task.config"),
        ({"name": "chain_sum", "config": {"min_terms": -1}}, "task.config"),
    ],
)
def test_bad_settings_name_their_key(settings: dict, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ReasoningGym(**settings).examples("train")
    assert refused.value.key == key


def test_examples_of_other_tasks_cannot_be_scored(reward: ReasoningGymReward) -> None:
    (score,) = reward([sample({"prompt": "?"}, "1")])
    assert isinstance(score, Failure)
