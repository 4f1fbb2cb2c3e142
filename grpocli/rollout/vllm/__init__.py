"""vLLM as an engine: servers beside the trainer (`engine=vllm`), or inside it (`engine=vllm_colocate`).

README.md says where a sync, a transport and a server's life are.
"""
