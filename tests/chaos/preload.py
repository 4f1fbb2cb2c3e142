"""What commands import, for the process that they are forked from."""

from __future__ import annotations

import accelerate  # noqa: F401
import datasets  # noqa: F401
import math_verify  # noqa: F401
import pandas  # noqa: F401
import torch
import transformers.models.llama.modeling_llama  # noqa: F401

torch.set_num_threads(1)
