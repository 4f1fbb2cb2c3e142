"""engine=vllm against real vLLM servers: one that the engine starts (tied embeddings), one of vllm-serve (untied)."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
import torch
from rollout.vllm_tiny import TOKENIZER, Alone, TinyPolicy, build_model, expected_logprobs

from grpocli.errors import ConfigError, EngineError
from grpocli.processes.guard import wait_gone
from grpocli.processes.reaper import descendants
from grpocli.rollout.engine import EngineContext, EngineJob
from grpocli.rollout.vllm.endpoint import Endpoint, run_file
from grpocli.rollout.vllm.engine import VllmEngine
from grpocli.rollout.vllm.options import Vllm
from grpocli.rollout.vllm.private_folder import LOCK
from grpocli.rollout.vllm.protocol import Refused
from grpocli.types import Completion, Request, Sampling

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@dataclass
class Running:
    """An engine with a server of its own."""

    engine: VllmEngine
    policy: TinyPolicy
    job: EngineJob
    endpoint: Endpoint


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Started once; at the end nothing of it may be left."""
    folder = tmp_path_factory.mktemp("tied")
    job = EngineJob(str(build_model(folder / "model", tied=True)), "float32", 128, folder / "run", seed=0)
    policy, options = TinyPolicy(folder / "model"), Vllm()
    before = set(descendants())
    with options.launch(job):
        processes = [pid for pid in descendants() if pid not in before]
        endpoint = Endpoint.load(run_file(job.run_dir))
        engine = options.connect(EngineContext(job, policy, TOKENIZER, Alone()))  # type: ignore[arg-type]
        yield Running(engine, policy, job, endpoint)  # type: ignore[arg-type]
        engine.close()
    assert len(processes) >= 3
    assert wait_gone(processes, 5) == []
    assert not Path(endpoint.shm_dir).exists()
    assert not run_file(job.run_dir).exists()


PROMPTS = [[5, 6, 7, 8], [9, 10], [5, 6, 7, 8], [11] * 40]


def requests(n: int = 4, seed: int = 0) -> list[Request]:
    return [Request(prompt, n, seed + i) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize(
    "sampling",
    [Sampling(24), Sampling(24, temperature=0.7, top_p=0.9, top_k=20, min_p=0.02)],
    ids=["plain", "truncated"],
)
def test_logprobs_are_those_of_transformers(running: Running, sampling: Sampling) -> None:
    completions = running.engine.generate(requests(n=8), sampling)
    assert [len(group) for group in completions] == [8] * len(PROMPTS)
    reasons = set()
    for prompt, group in zip(PROMPTS, completions, strict=True):
        for one in group:
            expected = expected_logprobs(running.policy, prompt, one.token_ids, sampling)
            assert one.logprobs == pytest.approx(expected, abs=1e-3)
            ended = one.token_ids[-1] == TOKENIZER.eos_token_id
            assert one.finish_reason == ("stop" if ended else "length")
            assert ended or len(one.token_ids) == sampling.max_tokens
            assert TOKENIZER.eos_token_id not in one.token_ids[:-1]
            reasons.add(one.finish_reason)
    assert sampling.truncates or reasons == {"stop", "length"}


def test_same_seed_same_tokens_in_any_company(running: Running) -> None:
    together = running.engine.generate(requests(), Sampling(16))
    alone = [running.engine.generate([request], Sampling(16))[0] for request in reversed(requests())]
    assert [[c.token_ids for c in g] for g in together] == [[c.token_ids for c in g] for g in reversed(alone)]
    everything = [tuple(c.token_ids) for group in together for c in group]
    assert len(set(everything)) == len(everything), "neighbouring seeds gave the same completion"
    other = running.engine.generate(requests(seed=100), Sampling(16))
    assert other != together


def test_more_prompts_than_fit_into_a_batch(running: Running) -> None:
    """vLLM would compute some prompts in pieces, which with a seed kills it on a CPU."""
    asked = [Request([2 + (7 * i + j) % 90 for j in range(120)], 1, seed=i) for i in range(60)]
    groups = running.engine.generate(asked, Sampling(2))
    assert [len(group) for group in groups] == [1] * len(asked)
    for request, (one,) in list(zip(asked, groups, strict=True))[::20]:
        expected = expected_logprobs(running.policy, request.token_ids, one.token_ids, Sampling(2))
        assert one.logprobs == pytest.approx(expected, abs=1e-3)
    assert running.engine.restarts == 0


def test_greedy(running: Running) -> None:
    group = running.engine.generate([Request([5, 6, 7, 8], 3, seed=0)], Sampling(8, temperature=0.0))[0]
    ids = [5, 6, 7, 8]
    for _ in range(8):
        with torch.no_grad():
            ids.append(int(running.policy.model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == TOKENIZER.eos_token_id:
            break
    assert [c.token_ids for c in group] == [ids[4:]] * 3


@pytest.mark.parametrize("bucket", [2**29, 20_000], ids=["one file", "many files"])
def test_sync_of_changed_weights_is_verified(running: Running, monkeypatch: pytest.MonkeyPatch, bucket: int) -> None:
    monkeypatch.setattr(running.engine._sync.transport, "bucket", bucket)  # type: ignore[attr-defined]
    for version in (bucket, bucket + 1):
        running.policy.change(seed=version)
        metrics = running.engine.sync(version)
        assert metrics["sync/bytes"] == 4.0 * sum(p.numel() for p in running.policy.model.parameters())
        assert running.engine.fleet.clients[0].weight_version() == version
        group = running.engine.generate([Request(PROMPTS[3], 2, seed=1)], Sampling(16))[0]
        for one in group:
            assert one.version == version
            expected = expected_logprobs(running.policy, PROMPTS[3], one.token_ids, Sampling(16))
            assert one.logprobs == pytest.approx(expected, abs=1e-3)
        folder = Path(running.endpoint.shm_dir)  # the server's lock and sockets are there, too
        assert [path for path in folder.iterdir() if path.is_file() and path.name != LOCK] == []


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"]
)
def test_corrupted_sync_is_refused_with_both_numbers(running: Running, name: str) -> None:
    weights = dict(running.policy.model.named_parameters())
    running.policy.sent = weights | {name: weights[name] + 0.05 * torch.randn_like(weights[name])}
    with pytest.raises(EngineError, match="does not have the trainer's weights") as caught:
        running.engine.sync(50)
    running.policy.sent = None
    probe = running.engine._sync.probe.token_ids
    for number in (running.policy.score(probe), running.engine.fleet.clients[0].score(probe)):
        assert f"{sum(number) / len(number):.5f}" in str(caught.value)
    running.engine.sync(51)


def test_a_missing_parameter_is_noticed(running: Running) -> None:
    running.policy.change(seed=7)
    running.policy.sent = {
        name: p for name, p in running.policy.model.named_parameters() if "layers.0.self_attn.o_proj" not in name
    }
    with pytest.raises(EngineError, match="does not have the trainer's weights"):
        running.engine.sync(60)
    running.policy.sent = None
    running.engine.sync(61)


def test_weights_change_under_running_requests(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens before the sync are of the old version, those after it of the new one; each has its version's log-prob."""
    monkeypatch.setattr(running.engine._sync, "mode", "keep")  # type: ignore[attr-defined]
    running.engine.sync(100)
    before = TinyPolicy(Path(running.job.model_path))
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


def test_an_update_that_another_run_left_unfinished(running: Running) -> None:
    running.engine.fleet.clients[0].pause()
    running.engine.fleet.clients[0].start_update()
    running.policy.change(seed=8)
    running.engine.sync(70)
    assert running.engine.generate([Request([5], 1, seed=0)], Sampling(4))[0][0].version == 70


def test_the_server_reads_weights_from_its_own_folder_only(running: Running, tmp_path: Path) -> None:
    client = running.engine.fleet.clients[0]
    (tmp_path / "weights.safetensors").write_bytes(b"")
    Path(running.endpoint.shm_dir, "link").symlink_to(tmp_path / "weights.safetensors")
    for name in (str(tmp_path / "weights.safetensors"), "../weights", "link", "missing", ""):
        client.start_update()
        with pytest.raises(Refused):
            client.update({"file": name})
    Path(running.endpoint.shm_dir, "link").unlink()
    running.engine.sync(80)


def test_a_prompt_that_does_not_fit(running: Running) -> None:
    with pytest.raises(EngineError, match=r"refused /inference/v1/generate \(400\).*128"):
        running.engine.generate([Request([5] * 130, 1, seed=0)], Sampling(24))
    with pytest.raises(EngineError, match="after 8 of 24 tokens"):
        running.engine.generate([Request([5] * 120, 8, seed=0)], Sampling(24))


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
    assert run_file(running.job.run_dir).stat().st_mode & 0o777 == 0o600
    assert Path(running.endpoint.shm_dir).stat().st_mode & 0o777 == 0o700
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "grpocli.rollout.vllm.api_server" in lines
    assert running.endpoint.api_key not in lines
    assert running.endpoint.api_key not in Path(str(running.endpoint.log)).read_text()


def test_given_server_that_does_not_fit(running: Running, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(running.endpoint.api_key)
    other = build_model(tmp_path / "other", tied=False)
    good = Vllm(base_url=running.endpoint.url, api_key_file=str(key))
    job = replace(running.job, run_dir=tmp_path / "run", sync_folder=running.endpoint.shm_dir)
    cases = [
        (good, replace(job, dtype="bfloat16"), "computes in float32, the run in bfloat16: serve with dtype"),
        (good, replace(job, max_tokens=1000), "takes 128 tokens, the run needs 1000"),
        (good, replace(job, model_path=str(other)), "tie_word_embeddings=True, the run's False"),
        (good, replace(job, sync_folder=None), "sync.folder=None"),
        (good, replace(job, most=129), "runs 128 completions at once, one request of the run has 129"),
    ]
    for options, needs, message in cases:
        with pytest.raises(ConfigError, match=message), options.launch(needs):
            pass
    key.write_text("wrong")
    with pytest.raises(ConfigError, match=r"refuses the key: set engine\.api_key_file"), good.launch(job):
        pass


SERVE = """
import sys
from grpocli.rollout.vllm.options import Vllm
from grpocli.launch.shared_server import Serve, serve
sys.exit(serve(Serve(model=None, engine=Vllm(), port=int(sys.argv[2]), max_model_len=128), sys.argv[1], "float32"))
"""


def test_vllm_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Untied embeddings; the key is found by itself; a run leaves the server as it was; Ctrl-C ends all of it."""
    from grpocli.rollout.vllm.endpoint import serve_file
    from grpocli.rollout.vllm.server import free_port

    monkeypatch.setenv("GRPOCLI_CACHE", str(tmp_path / "cache"))
    model, port = build_model(tmp_path / "model", tied=False), free_port()
    policy, options = TinyPolicy(model), Vllm(base_url=f"http://127.0.0.1:{port}")
    output, before = tmp_path / "output", set(descendants())
    with (
        output.open("wb") as file,
        subprocess.Popen(
            [sys.executable, "-c", SERVE, str(model), str(port)], stdout=file, stderr=subprocess.STDOUT
        ) as server,
    ):
        wait_for(serve_file(port), server, output)
        job = EngineJob(str(model), "float32", 100, tmp_path / "run", seed=0)
        with options.launch(job):
            engine = options.connect(EngineContext(job, policy, TOKENIZER, Alone()))  # type: ignore[arg-type]
            for version in (1, 2):
                policy.change(seed=version)
                engine.sync(version)
            one = engine.generate([Request([5, 6], 1, seed=0)], Sampling(12))[0][0]
            expected = expected_logprobs(policy, [5, 6], one.token_ids, Sampling(12))
            assert one.logprobs == pytest.approx(expected, abs=1e-3)
            engine.close()
        endpoint = Endpoint.load(serve_file(port))
        assert f"engine.base_url={endpoint.url}" in output.read_text()
        started = [pid for pid in descendants() if pid not in before]
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0, output.read_text()[-2000:]
    assert wait_gone(started, 5) == []
    assert not serve_file(port).exists()
    assert not Path(endpoint.shm_dir).exists()


def wait_for(path: Path, server: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + 240
    while not path.exists():
        assert server.poll() is None, output.read_text()[-2000:]
        assert time.monotonic() < deadline, output.read_text()[-2000:]
        time.sleep(0.2)
