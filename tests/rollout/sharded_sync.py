"""A trainer process for test_vllm_weight_sync.py: FSDP2 weights go to a stand-in server, and to one that fails."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from test_vllm_weight_sync import Server
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from grpocli.distributed.world import World
from grpocli.errors import EngineError
from grpocli.hardware import Single
from grpocli.processes.threads import end_process
from grpocli.rollout.engine import EngineContext
from grpocli.rollout.sync_config import ShmSyncConfig
from grpocli.rollout.vllm.engine import make_synchronizer
from grpocli.training.policy import Policy


class Replica(Server):
    """Computes log-probs with the weights that it has loaded, in bfloat16."""

    model: Any

    @torch.no_grad()
    def score(self, token_ids: list[int], first: bool) -> list[float]:
        super().score(token_ids, first)
        self.model.load_state_dict(self.loaded, strict=False)
        ids = torch.tensor([token_ids])
        logp_LV = self.model(ids).logits[0, :-1].float().log_softmax(-1)
        return logp_LV.gather(1, ids[0, 1:, None])[:, 0].tolist()


def main(folder: Path) -> None:
    world = World(Single(device="cpu", timeout=60))
    torch.manual_seed(1)
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24}  # odd, so that the processes' shards differ
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=True)
    model: Any = LlamaForCausalLM(config)
    replica = LlamaForCausalLM(config).bfloat16()
    if world.is_main:
        torch.save({name: p.detach().clone() for name, p in model.named_parameters()}, folder / "whole.pt")
    mesh = init_device_mesh("cpu", (world.size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    policy = Policy(model, model, torch.bfloat16)
    server: Any = Replica(folder)
    server.model = replica
    job = SimpleNamespace(lora_rank=0, dtype="bfloat16", transport="shm", quantized=False, gpus=(), max_tokens=40)
    context = EngineContext(job, policy, None, world, ShmSyncConfig())  # type: ignore[arg-type]
    sync = make_synchronizer([server], context)
    assert sync.weights.sharded
    sync(1)
    if world.is_main:
        torch.save(server.loaded, folder / "loaded.pt")
    server.fails = "update"
    try:
        sync(2)
    except EngineError as error:
        (folder / f"failed_{world.rank}").write_text(str(error))
    world.barrier()
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_process(0)  # as a trainer does
