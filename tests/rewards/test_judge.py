"""The LLM judge with a local endpoint that fails, hangs, answers late, or answers nonsense."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rewards.conftest import rollouts

from grpocli.errors import ConfigError, RewardError, RewardGone, ServiceGone
from grpocli.rewards.judge import Judge
from grpocli.rewards.reward import Failure, Sample
from grpocli.rewards.scorer import Scorer


class Endpoint:
    """An endpoint whose behaviour follows from the completion in the request; it records requests."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.tries: Counter[str] = Counter()
        self.at_once = self.most = 0
        self.lock = threading.Lock()
        self.closed = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(200, {"data": []})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                what = body["messages"][-1]["content"].rpartition("Answer:")[2].strip()
                with outer.lock:
                    outer.requests.append(body)
                    outer.keys.add(self.headers.get("Authorization"))
                    outer.tries[what] += 1
                self.act(what, outer.tries[what])

            def act(self, what: str, attempt: int) -> None:
                if what == "busy" and attempt < 3:
                    self.reply(429, {"error": "slow down"}, {"Retry-After": "0"})
                elif what == "down":
                    self.reply(503, {"error": "no"})
                elif what == "refused":
                    self.reply(401, {"error": "who are you?"})
                elif what == "hangs" or (what == "late" and attempt == 1):
                    outer.closed.wait(90)
                elif what == "drops" and attempt == 1:
                    self.connection.close()
                elif what == "empty":
                    self.reply(200, {"choices": []})
                elif what == "no number":
                    self.answer("I cannot say.")
                elif what == "slow":
                    with outer.lock:
                        outer.at_once += 1
                        outer.most = max(outer.most, outer.at_once)
                    time.sleep(0.2)
                    with outer.lock:  # before the answer, which allows the next request
                        outer.at_once -= 1
                    self.answer("Score: 1")
                else:
                    self.answer(f"Well, score: 0. No: Score: {what}")

            def answer(self, text: str) -> None:
                self.reply(200, {"choices": [{"message": {"role": "assistant", "content": text}}]})

            def reply(self, code: int, body: Any, headers: dict[str, str] | None = None) -> None:
                data = json.dumps(body).encode()
                self.send_response(code)
                for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign] # clients that give up
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    yield made
    made.closed.set()
    made.server.shutdown()
    made.server.server_close()


def samples(*texts: str) -> list[Sample]:
    return [Sample.of(one, 9) for one in rollouts(*texts, prompt=[{"role": "user", "content": "2+2?"}], answer="4")]


def judge(endpoint: Endpoint, **settings: Any) -> Judge:
    return Judge(base_url=endpoint.url, model="m", backoff=0.01, **{"timeout": 1.0, "retries": 2} | settings)


def test_scores_are_read_and_clipped(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert judge(endpoint, system="Be strict.")(samples("1", "0", "0.25", "7", "-3", ".5")) == [
        *(1.0, 0.0, 0.25, 1.0, 0.0, 0.5)
    ]
    asked = next(r for r in endpoint.requests if r["messages"][1]["content"].rstrip().endswith("0.25"))
    assert asked["messages"][0] == {"role": "system", "content": "Be strict."}
    assert "Question:\n2+2?" in asked["messages"][1]["content"]
    assert "Reference:\n4" in asked["messages"][1]["content"]
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("m", 0.0, 512)
    assert endpoint.keys == {"Bearer secret"}


@pytest.mark.slow
def test_temporary_errors_are_retried(endpoint: Endpoint) -> None:
    assert judge(endpoint)(samples("busy", "late", "drops")) == [0.0, 0.0, 0.0]
    assert endpoint.tries == {"busy": 3, "late": 2, "drops": 2}


@pytest.mark.parametrize(
    ("what", "tries", "said"),
    [
        ("down", 3, 'no judgement: HTTP 503 {"error": "no"}, after 3 tries'),
        ("hangs", 3, "after 3 tries"),
        ("refused", 1, 'the judge refused: HTTP 401 {"error": "who are you?"}'),
        ("empty", 1, "the judge gave no score"),
        ("no number", 1, "the judge gave no score: 'I cannot say.'"),
    ],
)
def test_a_failed_judgement_is_a_failure_of_its_sample_only(
    endpoint: Endpoint, what: str, tries: int, said: str
) -> None:
    good, bad = judge(endpoint, timeout=0.3 if what == "hangs" else 10.0)(samples("1", what))
    assert good == 1.0
    assert isinstance(bad, Failure)
    assert said in bad.reason
    assert endpoint.tries[what] == tries


@pytest.mark.parametrize(("others", "kind"), [(["1"], RewardGone), (["refused"] * 3, RewardError)])
def test_an_unavailable_judge_ends_the_run_with_a_checkpoint(
    endpoint: Endpoint, others: list[str], kind: type[RewardError]
) -> None:
    """A judge that refuses or gives no score would do so again after a resume."""
    scorer = Scorer({"judge": judge(endpoint)}, 0.5)
    with pytest.raises(kind, match=r"reward\.judge .* more than rollout\.max_reward_errors=0\.5 allows") as caught:
        scorer.check_errors(scorer.score(rollouts("down", "down", *others, answer="4"), 9)[1])
    assert (type(caught.value), isinstance(caught.value, ServiceGone)) == (kind, kind is RewardGone)


@pytest.mark.slow
def test_requests_are_concurrent_up_to_the_limit(endpoint: Endpoint) -> None:
    assert judge(endpoint, concurrency=5, timeout=30.0)(samples(*["slow"] * 20)) == [1.0] * 20
    assert 1 < endpoint.most <= 5


def test_the_judge_is_checked_before_training(endpoint: Endpoint) -> None:
    judge(endpoint).check(["answer"])
    with pytest.raises(ConfigError, match=r"uses {answer}, but the task has no such column; did you mean \"answers\""):
        judge(endpoint).check(["answers"])
    with pytest.raises(ConfigError, match=r"reward\.judge\.prompt=.*double the braces that stand for themselves"):
        judge(endpoint, prompt="{").check([])
    with pytest.raises(ConfigError, match=r"reward\.judge\.base_url=http://127\.0\.0\.1:1/v1: cannot be reached"):
        Judge(base_url="http://127.0.0.1:1/v1", model="m", prompt="{prompt}").check([])


def test_a_run_that_ends_does_not_wait_for_the_judge(endpoint: Endpoint) -> None:
    asked = judge(endpoint, timeout=60.0)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(asked(samples("hangs", "hangs"))))
    thread.start()
    while not endpoint.requests:
        time.sleep(0.01)
    asked.close()
    thread.join(30)
    assert not thread.is_alive(), "it waits for the endpoint, which never answers"
    assert [isinstance(one, Failure) for one in found] == [True, True]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"base_url": "localhost:8000"}, r"reward\.judge\.base_url=localhost:8000: must be a URL"),
        ({"pattern": "score"}, r"reward\.judge\.pattern=score: needs a group"),
        ({"low": 1.0}, r"reward\.judge\.high=1\.0: must be above reward\.judge\.low=1\.0"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Judge(**{"base_url": "http://127.0.0.1:1/v1", "model": "m"} | settings)
