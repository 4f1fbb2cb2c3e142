"""engine=vllm with one real server, started by `grpocli vllm-serve`: sampling, weight sync, key and shutdown."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from cli.family import wait_gone
from cli.running import until
from rollout.letters import cut, letters
from rollout.vllm_tiny import VOCABULARY, Alone, TinyPolicy, assert_right, build_model, expected_logprobs, requests

from grpocli.errors import EngineError
from grpocli.processes.reaper import descendants
from grpocli.rollout.engine import EngineContext, EngineJob
from grpocli.rollout.transformers_engine import Transformers
from grpocli.rollout.vllm.client import RequestRefused
from grpocli.rollout.vllm.engine import VllmEngine
from grpocli.rollout.vllm.engine_parts import Vllm
from grpocli.rollout.vllm.server import free_port
from grpocli.rollout.vllm.server_files import LOCK, Endpoint, run_file, serve_file
from grpocli.types import Completion, Request, Sampling

pytestmark = pytest.mark.vllm

TOKENIZER: Any = letters(VOCABULARY)
A, B, AB = TOKENIZER.convert_tokens_to_ids(["a", "b", "ab"])

SERVE = """
import sys
from grpocli.composition.compose import compose
from grpocli.rollout.vllm.external import build_server_config, serve
# random weights, as the servers of a run start, so that the first sync proves itself
words = ["engine.vllm_args.load_format=dummy", "engine.max_model_len=128", "model=hf"]
config = build_server_config(compose([*words, f"model.path={sys.argv[1]}", f"port={sys.argv[2]}"], "vllm_serve"))
sys.exit(serve(config, sys.argv[1], "float32"))
"""


@dataclass
class Running:
    """An engine and its server."""

    engine: VllmEngine
    policy: TinyPolicy
    context: EngineContext
    endpoint: Endpoint
    first_weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_model(tmp_path_factory.mktemp("untied") / "model", tied=False)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def endpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """The only server of this file. Ctrl-C ends it and leaves nothing behind."""
    folder, port = tmp_path_factory.mktemp("serve"), free_port()
    output, before = folder / "output", set(descendants())
    with pytest.MonkeyPatch.context() as patch, output.open("wb") as file:
        patch.setenv("GRPOCLI_CACHE", str(folder / "cache"))
        command = [sys.executable, "-c", SERVE, str(model), str(port)]
        with subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as server:
            try:
                until(lambda: serve_file(port).exists() or server.poll() is not None, 600)
                assert server.poll() is None, output.read_text()[-2000:]
                endpoint = Endpoint.load(serve_file(port))
                started = [pid for pid in descendants() if pid not in before]
                yield endpoint
            finally:
                server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0, output.read_text()[-2000:]
        assert f"engine.base_url={endpoint.url}" in output.read_text()
        assert len(started) >= 4
        assert wait_gone(started, 5) == []
        assert not serve_file(port).exists()
        assert not Path(endpoint.shm_dir).exists()


@pytest.fixture(scope="module")
def running(model: Path, endpoint: Endpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A run finds the server's key by its address, and leaves the server running."""
    run = tmp_path_factory.mktemp("run")
    job = EngineJob(str(model), "float32", 128, run, seed=0)
    policy, options = TinyPolicy(model), Vllm(base_url=endpoint.url)
    context = EngineContext(job, policy, TOKENIZER, Alone())  # type: ignore[arg-type]
    with options.launch(job):
        engine = options.connect(context)
        with pytest.raises(EngineError, match="sync before the first completion"):
            engine.generate([Request([5], 1, seed=0)], Sampling(4))
        weights = policy.model.named_parameters()
        policy.sent = {name: parameter for name, parameter in weights if "layers.0.self_attn.o_proj" not in name}
        with pytest.raises(EngineError, match="does not have the trainer's weights"):
            engine.sync(1)  # the server began with random weights
        policy.sent = None
        engine.sync(1)
        first = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
        yield Running(engine, policy, context, endpoint, first)  # type: ignore[arg-type]
        engine.close()
    assert not run_file(run).exists()
    assert httpx.get(f"{endpoint.url}/health", trust_env=False).status_code == 200


TRUNCATED = Sampling(24, temperature=0.7, top_p=0.9, top_k=20, min_p=0.02)
PROMPTS = [request.token_ids for request in requests()]


@pytest.mark.parametrize(
    "sampling",
    [Sampling(24), Sampling(24, repetition_penalty=0.8), replace(TRUNCATED, repetition_penalty=1.3)],
    ids=["plain", "reward", "penalty and truncation"],
)
def test_log_probs_equal_those_of_transformers(running: Running, sampling: Sampling) -> None:
    completions = running.engine.generate(requests(n=8), sampling)
    assert [len(group) for group in completions] == [8] * len(PROMPTS)
    reasons = set()
    for prompt, group in zip(PROMPTS, completions, strict=True):
        for one in group:
            assert_right(running.policy, prompt, one, sampling)
            ended = one.token_ids[-1] == TOKENIZER.eos_token_id
            assert one.finish_reason == ("stop" if ended else "length")
            assert ended or len(one.token_ids) == sampling.max_tokens
            assert TOKENIZER.eos_token_id not in one.token_ids[:-1]
            reasons.add(one.finish_reason)
    assert sampling != Sampling(24) or reasons == {"stop", "length"}


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(running: Running) -> None:
    together = running.engine.generate(requests(), Sampling(16))
    alone = [running.engine.generate([request], Sampling(16))[0] for request in reversed(requests())]
    assert [[c.token_ids for c in g] for g in together] == [[c.token_ids for c in g] for g in reversed(alone)]
    everything = [tuple(c.token_ids) for group in together for c in group]
    assert len(set(everything)) == len(everything), "neighbouring seeds gave the same completion"
    other = running.engine.generate(requests(seed=100), Sampling(16))
    assert other != together


@pytest.mark.parametrize("bucket", [2**29, 20_000], ids=["one file", "many files"])
def test_a_sync_brings_the_changed_weights(running: Running, monkeypatch: pytest.MonkeyPatch, bucket: int) -> None:
    monkeypatch.setattr(running.engine._synchronizer.transport, "bucket_bytes", bucket)  # type: ignore[attr-defined]
    for version in (bucket, bucket + 1):
        running.policy.change(seed=version)
        metrics = running.engine.sync(version)
        assert metrics["sync/bytes"] == 4.0 * sum(p.numel() for p in running.policy.model.parameters())
        assert running.engine.pool.clients[0].weight_version() == version
        group = running.engine.generate([Request(PROMPTS[3], 2, seed=1)], Sampling(16))[0]
        for one in group:
            assert one.version == version
            assert_right(running.policy, PROMPTS[3], one, Sampling(16))
        folder = Path(running.endpoint.shm_dir)  # the server's lock and sockets are there too
        assert [path for path in folder.iterdir() if path.is_file() and path.name != LOCK] == []


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"])
def test_a_corrupted_sync_is_refused_with_the_log_probs_of_both_sides(running: Running, name: str) -> None:
    weights = dict(running.policy.model.named_parameters())
    running.policy.sent = weights | {name: weights[name] + 0.05 * torch.randn_like(weights[name])}
    with pytest.raises(EngineError, match="does not have the trainer's weights") as caught:
        running.engine.sync(50)
    running.policy.sent = None
    probe = running.engine._synchronizer.verifier.token_ids
    for number in (running.policy.score(probe), running.engine.pool.clients[0].score(probe)):
        assert f"{sum(number) / len(number):.5f}" in str(caught.value)
    running.engine.sync(51)


def test_weights_change_under_running_requests(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens before the sync have the old version, those after it the new one; each has its version's log-prob."""
    monkeypatch.setattr(running.engine._synchronizer, "pause_mode", "keep")  # type: ignore[attr-defined]
    running.engine.sync(100)
    before = TinyPolicy(Path(running.context.job.model_path))
    before.model.load_state_dict(running.policy.model.state_dict())
    version, deadline = 100, time.monotonic() + 120
    mixed: list[Completion] = []
    with ThreadPoolExecutor(1) as thread:
        while not mixed:
            assert time.monotonic() < deadline, "no sync met a running request within 120 s"
            asked = [Request(PROMPTS[0], 16, seed=version + i) for i in range(8)]
            groups = thread.submit(running.engine.generate, asked, Sampling(100))
            version += 1
            before.model.load_state_dict(running.policy.model.state_dict())
            running.policy.change(seed=version)
            running.engine.sync(version)
            mixed = [one for group in groups.result() for one in group if one.spans]
    for one in mixed[:4]:
        assert one.spans is not None
        assert [label for label, _ in one.spans] == [version - 1, version]
        assert sum(tokens for _, tokens in one.spans) == len(one.token_ids)
        assert one.version == version - 1
        old, new = (expected_logprobs(p, PROMPTS[0], one.token_ids, Sampling(100)) for p in (before, running.policy))
        first = one.spans[0][1]
        assert one.logprobs[:first] == pytest.approx(old[:first], abs=1e-3)
        assert one.logprobs[first:] == pytest.approx(new[first:], abs=1e-3)


def test_a_sync_ends_an_update_that_another_run_left_unfinished(running: Running) -> None:
    running.engine.pool.clients[0].pause()
    running.engine.pool.clients[0].start_update()
    running.policy.change(seed=8)
    running.engine.sync(70)
    assert running.engine.generate([Request([5], 1, seed=0)], Sampling(4))[0][0].version == 70


def test_every_route_needs_the_key(running: Running) -> None:
    url, key = running.endpoint.url, running.endpoint.api_key
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as http:
        paths = http.get("/openapi.json", headers={"Authorization": f"Bearer {key}"}).json()["paths"]
        assert {"/update_weights", "/collective_rpc", "/pause", "/v1/completions"} <= set(paths)
        routes = [(method, path) for path, methods in paths.items() for method in methods]
        routes += [("get", path) for path in ("/metrics", "/docs", "/openapi.json", "/nowhere", "//health", "/")]
        for method, path in routes:
            if path != "/health":
                for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": key}):
                    assert http.request(method, path, headers=headers).status_code == 401, (method, path)
        assert http.get("/health").status_code == 200


def test_the_key_is_private(running: Running) -> None:
    assert run_file(running.context.job.run_dir).stat().st_mode & 0o777 == 0o600
    assert Path(running.endpoint.shm_dir).stat().st_mode & 0o777 == 0o700
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "grpocli.rollout.vllm.api_server" in lines
    assert running.endpoint.api_key not in lines
    assert running.endpoint.api_key not in Path(str(running.endpoint.log)).read_text()


# Stop strings, structured outputs

FREE = Sampling(40)


@pytest.fixture
def fresh(running: Running) -> Running:
    """The server with the model's first weights, whatever earlier tests have sent."""
    running.policy.model.load_state_dict(running.first_weights)
    running.engine.sync(0)
    return running


@pytest.fixture(scope="module")
def transformers(running: Running) -> Any:
    """The in-process sampler with the model's first weights."""
    model = TinyPolicy(Path(running.context.job.model_path)).model
    policy = SimpleNamespace(model=model, sampling_mode=torch.inference_mode)
    return Transformers().connect(replace(running.context, policy=policy))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stop", "regex"), [(("a",), None), (("fc", "3"), None), (("dé", "bé"), "[a-d]{1,3}é[a-p]{3}")], ids=str
)
def test_stop_strings_end_a_completion_and_keep_every_token(
    fresh: Running, stop: tuple[str, ...], regex: str | None
) -> None:
    """A completion is a prefix of the one with the same seed and no stop strings; é is two tokens."""
    free = replace(FREE, regex=regex)
    whole = fresh.engine.generate(requests(16), free)
    stopped = fresh.engine.generate(requests(16), replace(free, stop=stop))
    reasons = set()
    for a, b in zip(chain(*whole), chain(*stopped), strict=True):
        assert b.token_ids == cut(TOKENIZER, a.token_ids, stop)
        assert b.logprobs == pytest.approx(a.logprobs[: len(b.token_ids)], abs=1e-4)
        said = any(one in TOKENIZER.decode(b.token_ids, skip_special_tokens=True) for one in stop)
        assert b.finish_reason == ("stop" if said else a.finish_reason)
        reasons.add((said, b.finish_reason))
    assert (True, "stop") in reasons


def test_completions_match_a_json_schema(fresh: Running) -> None:
    fields = {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["c", "d"]}}
    schema = {"type": "object", "properties": fields, "required": ["a", "b"], "additionalProperties": False}
    for one in chain(*fresh.engine.generate(requests(), Sampling(60, json_schema=schema))):
        assert one.finish_reason == "stop"
        value = json.loads(TOKENIZER.decode(one.token_ids, skip_special_tokens=True))
        assert set(value) == {"a", "b"}
        assert 0 <= value["a"] <= 99
        assert value["b"] in ("c", "d")


def test_a_form_that_vllm_cannot_use_is_refused(fresh: Running) -> None:
    for structure in ({"regex": "(?<=a)b"}, {"json_schema": {"type": "nonsense"}}):
        with pytest.raises(RequestRefused, match=r"\(400\): ") as caught:
            fresh.engine.generate([Request([1, 2], 1, seed=0)], replace(FREE, **structure))
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["vllm", "transformers"])
def test_prompts_and_completions_are_sent_as_tokens(name: str, fresh: Running, transformers: Any) -> None:
    """Decoding and encoding again could give other tokens."""
    engine = fresh.engine if name == "vllm" else transformers
    prompt = [A, B, A, B]
    assert TOKENIZER.encode(TOKENIZER.decode(prompt)) == [AB, AB]
    group = engine.generate([Request(prompt, 24, seed=3)], FREE)[0]
    changed_by_text = 0
    for one in group:
        text = TOKENIZER.decode(one.token_ids, skip_special_tokens=True)
        changed_by_text += TOKENIZER.encode(text) != [i for i in one.token_ids if i != TOKENIZER.eos_token_id]
        assert_right(fresh.policy, prompt, one, FREE)
    assert changed_by_text > 12
    reencoded = expected_logprobs(fresh.policy, [AB, AB], group[0].token_ids, FREE)
    assert group[0].logprobs != pytest.approx(reencoded, abs=1e-2), "otherwise another prompt would look the same"
