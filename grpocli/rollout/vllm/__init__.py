"""vLLM as an engine: servers beside the trainer (`engine=vllm`), or inside it (`engine=vllm_colocate`).

A weight's way to vLLM: the training step calls `VllmEngine.sync` (`engine.py`). `WeightSync` (`weight_sync.py`) streams
the policy's parameters and pauses the servers; a transport carries them: files in shared memory (`transport_shm.py`),
or NCCL and CUDA IPC (`transport_gpu.py`). In the server, `weight_transfer.py` hands them to vLLM's own weight loader
(`plugin.py` registers it with vLLM). `WeightVerifier` (`weight_verifier.py`) verifies them. With LoRA
`lora.py` sends an adapter instead; `colocate.py` hands the trainer's tensors directly to vLLM in the same process,
through `weight_transfer.py` too.

Requests go through `server_pool.py` and `client.py`; `connection.py` decides when a server is stuck. `supervisor.py`
starts the run's servers (`server.py`) and replaces lost ones; `external.py` checks and starts servers of several runs.
`api_server.py` protects every route of a server.
"""
