"""A server with vLLM's interface and a transformers model. It starts in seconds and is deterministic.

`python -m chaos.stand_in` serves the built-in model on a free port, with a key.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
import uvicorn
from transformers import AutoModelForCausalLM

from grpocli.composition.compose import compose
from grpocli.rollout.sampler import sample
from grpocli.rollout.vllm.api_server import RequireKey
from grpocli.rollout.vllm.client import GENERATE
from grpocli.rollout.vllm.external import build_server_config
from grpocli.rollout.vllm.server import free_port
from grpocli.rollout.vllm.server_files import Endpoint, serve_file
from grpocli.rollout.vllm.transports import MappedFiles
from grpocli.types import Request, Sampling

MAX_TOKENS = 64  # of a prompt and its completion
FIELDS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Model:
    """The model and its routes."""

    def __init__(self, path: str, folder: Path) -> None:
        self.path, self.folder = path, folder
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.version, self.generated = "default", 0
        self.files = MappedFiles()
        self.busy, self.running = threading.Lock(), threading.Event()
        self.running.set()
        self.routes: dict[str, Callable[[Any], Any]] = {
            "/health": lambda body: {},
            "/version": lambda body: {"version": "of chaos"},
            "/weight_info": lambda body: {"weight_version": self.version},
            "/server_info": lambda body: {"vllm_config": self.described()},
            "/metrics": lambda body: f"vllm:generation_tokens_total {self.generated}\n",
            "/is_paused": lambda body: {"is_paused": not self.running.is_set()},
            "/get_world_size": lambda body: {"world_size": 1},
            "/reset_prefix_cache": lambda body: {"success": True},
            "/init_weight_transfer_engine": lambda body: self.files.forget() or {},
            "/start_weight_update": lambda body: {},
            "/pause": lambda body: self.running.clear() or {},
            "/resume": lambda body: self.running.set() or {},
            "/update_weights": lambda body: self.update(body["update_info"]),
            "/finish_weight_update": lambda body: self.name((body or {}).get("weight_version")),
            "/update_weight_version": lambda body: self.name(body["new_version"]),
            GENERATE: self.answer,
        }

    def described(self) -> dict[str, Any]:
        model = {
            "model": self.path,
            "dtype": "torch.float32",
            "max_model_len": MAX_TOKENS,
            "logprobs_mode": "processed_logprobs",
            "served_model_name": "policy",
        }
        return {"model_config": model, "weight_transfer_config": {"backend": "shm"}, "lora_config": None}

    def name(self, version: str | None) -> dict[str, Any]:
        self.version = version or self.version
        return {}

    @torch.no_grad()
    def update(self, info: dict[str, Any]) -> dict[str, Any]:
        own = dict(self.model.named_parameters())
        with self.busy:
            for name, tensor in self.files.tensors(info["file"], self.folder, info.get("keep", False)):
                own[name].copy_(tensor)
        return {}

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        params = body["sampling_params"]
        if "prompt_logprobs" in params:
            return self.scored(body["token_ids"])
        self.running.wait()
        sampling = Sampling(**{name: params[name] for name in FIELDS if name in params})
        request = Request(body["token_ids"], params.get("n", 1), seed=params.get("seed", 0))
        with self.busy:
            (found,) = sample(self.model, [request], sampling, params.get("stop_token_ids", []), version=0)
            self.generated += sum(len(one.token_ids) for one in found)
            version = self.version
        return {
            "choices": [
                {
                    "index": i,
                    "token_ids": one.token_ids,
                    "logprobs": {"content": [{"logprob": logprob} for logprob in one.logprobs]},
                    "finish_reason": one.finish_reason,
                    "weight_versions": [{"version": version, "start": 0, "end": len(one.token_ids)}],
                }
                for i, one in enumerate(found)
            ]
        }

    @torch.no_grad()
    def scored(self, ids: list[int]) -> dict[str, Any]:
        with self.busy:
            logp = self.model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
        picked = logp.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        entries = [{str(token): {"logprob": value}} for token, value in zip(ids[1:], picked, strict=True)]
        return {"prompt_logprobs": [None, *entries], "choices": []}

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        if scope["type"] != "http":
            return
        data, more = b"", True
        while more:
            message = await receive()
            data, more = data + message.get("body", b""), message.get("more_body", False)
        status, answer = await asyncio.get_running_loop().run_in_executor(None, self.route, scope["path"], data)
        text = answer if isinstance(answer, str) else json.dumps(answer)
        kind = b"text/plain" if isinstance(answer, str) else b"application/json"
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": text.encode()})

    def route(self, path: str, data: bytes) -> tuple[int, Any]:
        if path not in self.routes:
            return 404, {"detail": "Not Found"}
        try:
            return 200, self.routes[path](json.loads(data) if data else None)
        except (KeyError, TypeError, ValueError) as error:
            return 422, {"error": {"message": f"{type(error).__name__}: {error}"}}


def main(overrides: list[str], kind: type[Model] = Model) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again at its end
    torch.set_num_threads(1)
    path = build_server_config(compose(overrides, "vllm_serve")).model.prepare(lambda fraction, text: None)
    port, key = free_port(), secrets.token_urlsafe(16)
    with tempfile.TemporaryDirectory(prefix="grpocli-chaos-", dir="/dev/shm") as folder:
        app = RequireKey(kind(path, Path(folder)), key)
        Endpoint(f"http://127.0.0.1:{port}", key, folder).save(serve_file(port))
        print(f"serves at http://127.0.0.1:{port}", flush=True)
        config = uvicorn.Config(app, port=port, log_level="critical", lifespan="off")
        try:
            uvicorn.Server(config).run()
        finally:
            serve_file(port).unlink(missing_ok=True)


if __name__ == "__main__":
    os.environ.setdefault("GRPOCLI_CACHE", tempfile.gettempdir())
    main(sys.argv[1:])
