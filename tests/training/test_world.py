"""torch settings that `World` makes."""

from __future__ import annotations

import torch

from grpocli.distributed.world import World
from grpocli.hardware import Single


def test_world_disables_the_cudnn_attention_backend() -> None:
    """cuDNN builds a plan for each new sequence length, and packed rows rarely repeat one."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    World(Single(device="cpu")).close()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
