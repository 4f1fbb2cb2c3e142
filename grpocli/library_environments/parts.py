"""Imports the modules that define these parts, as the entry point of `grpocli.parts`."""

# ruff: noqa: F401

import grpocli.library_environments.openenv_task
import grpocli.library_environments.reasoning_gym_reward
import grpocli.library_environments.reasoning_gym_task
import grpocli.library_environments.verifiers_task
