"""Imports the modules that define these parts, as the entry point of `grpocli.parts`."""

# ruff: noqa: F401

import grpocli.library_environments.openenv
import grpocli.library_environments.reasoning_gym
import grpocli.library_environments.verifiers
