"""The prefix cache behind the server: it outlives a restart, is saved and restored by name, and figures wait for no step."""

import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cpuspec.engine.changing_lines import RULES
from cpuspec.server import model as served_model
from tests.processes import interrupt, started
from tests.server.running import PATIENCE_S, Running, before_forwards, load, ready_url, serving

PROMPT = list(range(3, 203)) * 2
BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def saving(path: Path, tmp_path: Path) -> Iterator[Running]:
    (tmp_path / "slots").mkdir()
    with serving(lambda: load(path), slot_save_path=str(tmp_path / "slots")) as running:
        yield running


def ask(url: str, **changes: Any) -> tuple[str, int]:
    """The answer and how many tokens of the prompt were cached."""
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        reply = client.post("/v1/completions", json=BODY | changes)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"], reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def value(running: Running, name: str) -> float:
    found = re.search(rf"cpuspec:{name}{{.*}} (\S+)", running.get("/metrics").text)
    assert found, name
    return float(found[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_restarted_server_finds_what_the_last_one_computed(path: Path, tmp_path: Path, number: signal.Signals) -> None:
    directory = tmp_path / "prefixes"
    arguments = ("serve", str(path), "--port", "0", "--threads", "1", "--draft", "none", "--prefix-cache-dir", str(directory))
    answers = []
    for _ in range(2):
        with started(*arguments) as process:
            answers.append(ask(ready_url(process)))
            interrupt(process, number)
            assert process.wait(PATIENCE_S) == 0
    assert list(directory.glob("*.prefix"))
    (fresh, num_fresh), (again, num_again) = answers
    assert num_fresh == 0
    assert num_again >= 256
    assert again == fresh


def test_lines_that_agents_change_are_dropped_unless_that_is_refused(path: Path) -> None:
    def shown(client: httpx.Client, line: str) -> tuple[str, int]:
        messages = [{"role": "system", "content": f"{line}\nYou."}, {"role": "user", "content": f"{line}\nhello"}]
        body = {"messages": messages[1:], "system": [{"type": "text", "text": line}, {"type": "text", "text": "You."}]}
        prompt = client.post("/apply-template", json={"messages": messages}).json()["prompt"]
        return prompt, client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]

    for drop in (True, False):
        with serving(lambda: load(path), drop_changing_lines=drop) as running, running.client() as client:
            plain, num_plain = shown(client, "")
            for rule in RULES:
                prompt, num_tokens = shown(client, rule.example)
                assert prompt.count(rule.example) == (1 if drop else 2)  # a user's message is left alone
                assert ("You." in prompt) == ("You." in plain)
                assert (num_tokens > num_plain + len(rule.example) // 4) or drop


def test_a_slot_is_saved_erased_and_restored(saving: Running, tmp_path: Path) -> None:
    answer, _ = ask(saving.url)

    def post(action: str, name: str = "agent.prefix") -> dict[str, Any]:
        reply = saving.post(f"/slots/0?action={action}", json={"filename": name})
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    saved = post("save")
    assert saved["n_saved"] >= len(PROMPT)
    assert saved["n_written"] == (tmp_path / "slots" / "agent.prefix").stat().st_size
    assert post("erase")["n_erased"] >= len(PROMPT)
    assert ask(saving.url, max_tokens=1, prompt=PROMPT[:40])[1] == 0
    post("erase")
    assert post("restore")["n_restored"] == saved["n_saved"]
    assert ask(saving.url) == (answer, len(PROMPT) - 1)


@pytest.fixture
def keyed(path: Path, tmp_path: Path) -> Iterator[Running]:
    with serving(lambda: load(path, spec="suffix"), ("first", "second"), slot_save_path=str(tmp_path)) as running:
        yield running


def test_keys_and_salts_share_nothing_and_a_key_finds_its_own(keyed: Running) -> None:
    def cached(key: str, **changes: Any) -> int:
        with keyed.client(headers={"authorization": f"Bearer {key}"}) as client:
            usage = client.post("/v1/completions", json=BODY | changes).json()["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    assert [cached("first"), cached("second"), cached("second", cache_salt="mine")] == [0, 0, 0]
    everything = len(PROMPT) - 1
    assert [cached("first"), cached("second"), cached("second", cache_salt="mine")] == [everything] * 3
    assert cached("first", cache_salt="mine") == cached("first", cache_salt="other") == 0


def test_a_slot_is_saved_by_the_key_alone_whose_prompt_it_had(keyed: Running) -> None:
    first, second = ({"authorization": f"Bearer {key}"} for key in ("first", "second"))
    body = {"filename": "saved"}
    assert keyed.post("/v1/completions", json=BODY, headers=first).status_code == 200
    assert keyed.post("/slots/0?action=save", json=body, headers=second).status_code == 400
    assert keyed.post("/slots/0?action=save", json=body, headers=first).status_code == 200
    assert keyed.post("/slots/0?action=erase", headers=first).status_code == 403
    assert keyed.post("/slots/0?action=restore", json=body, headers=second).status_code == 400
    assert keyed.post("/slots/0?action=restore", json=body, headers=first).status_code == 200
    replies = [keyed.post("/v1/completions", json=BODY, headers=headers).json() for headers in (second, first)]
    assert [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies] == [0, len(PROMPT) - 1]


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\\b", ".hidden", "a\0b", "a\n", "x" * 101, "é"])
@pytest.mark.parametrize("action", ["save", "restore"])
def test_only_plain_names_inside_the_directory_are_files(saving: Running, action: str, name: str) -> None:
    reply = saving.post(f"/slots/0?action={action}", json={"filename": name})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "filename")


def test_what_cannot_be_saved_or_restored_is_a_clear_error(saving: Running, tmp_path: Path, path: Path) -> None:
    (tmp_path / "slots" / "junk").write_bytes(b"junk")
    for target, name in (("0?action=restore", "absent"), ("0?action=restore", "junk"), ("0?action=save", "new"), ("9", "new")):
        reply = saving.post(f"/slots/{target}", json={"filename": name})
        assert reply.status_code == 400
        assert str(tmp_path) not in reply.text
    assert saving.post("/slots/0?action=dance", json={"filename": "a"}).status_code == 400
    with serving(lambda: load(path)) as running:
        assert running.post("/slots/0?action=save", json={"filename": "a"}).status_code == 501


def test_metrics_tell_what_the_cache_holds_and_wait_for_no_step(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_model, "_STEP_S", 0.05)
    llm = load(path, prefix_cache_gb=1e-5)
    go_on, stands = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        assert go_on.wait(PATIENCE_S)

    with serving(lambda: llm) as running:
        ask(running.url)
        running.eventually(lambda: value(running, "prefix_cache_limit_bytes") == 10_000)
        assert 0 <= value(running, "prefix_cache_kept_bytes") <= 10_000
        assert value(running, "prefix_cache_evictions_total") >= 0
        with before_forwards(llm, stand):
            thread = threading.Thread(target=ask, args=(running.url,), daemon=True)
            thread.start()
            assert stands.wait(PATIENCE_S)
            assert value(running, "prefix_cache_limit_bytes") == 10_000
            go_on.set()
            thread.join(PATIENCE_S)
