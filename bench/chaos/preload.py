"""Imports for the process from which commands are forked."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # libraries read these when they are imported
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"

import accelerate  # noqa: F401
import datasets  # noqa: F401
import math_verify  # noqa: F401
import pandas  # noqa: F401
import torch
import transformers.models.llama.modeling_llama  # noqa: F401

torch.set_num_threads(1)
