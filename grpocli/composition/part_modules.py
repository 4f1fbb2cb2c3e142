"""Imports every module that defines parts, which registers them. A test compares the list with the source.

These modules are imported at every start, so they import nothing heavy at the top.
"""

# ruff: noqa: F401

import grpocli.algorithm.advantage
import grpocli.algorithm.aggregate
import grpocli.algorithm.algorithm
import grpocli.algorithm.correction
import grpocli.algorithm.entropy
import grpocli.algorithm.keep
import grpocli.algorithm.kl
import grpocli.algorithm.objective
import grpocli.algorithm.question_weight
import grpocli.algorithm.tokens
import grpocli.config.schema
import grpocli.environments.environment
import grpocli.hardware
import grpocli.models.hf
import grpocli.models.tiny
import grpocli.rewards.code
import grpocli.rewards.judge
import grpocli.rewards.length
import grpocli.rewards.math
import grpocli.rewards.python
import grpocli.rewards.reward
import grpocli.rewards.reward_model
import grpocli.rewards.text_match
import grpocli.rollout.fake_engine
import grpocli.rollout.sync_config
import grpocli.rollout.transformers_engine
import grpocli.rollout.vllm.config
import grpocli.rollout.vllm.engine_parts
import grpocli.tasks.generated
import grpocli.tasks.jsonl
import grpocli.tasks.task
import grpocli.tracking.trackers
import grpocli.training.optim
