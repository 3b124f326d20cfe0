"""The page at `/`: its files and headers, what the stream tells it, and the page itself in a browser where there is one."""

import json
import re
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cpuspec
from cpuspec import SamplingParams
from cpuspec.server import answering, page
from tests.server.browser import CHROMIUM, Browser, browsing
from tests.server.running import Running, before_forwards, events, load, serving

PACKAGE = Path(cpuspec.__file__).parent
LOADED = {"max_rows": 64}
MESSAGES = [{"role": "user", "content": "the cat sat on the mat and the cat sat on the hat"}]
GREEDY: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "ignore_eos": True, "stream": True}

in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")


def chunks(running: Running, **settings: Any) -> list[dict[str, Any]]:
    """The chunks of a streamed answer."""
    return events(running.post("/v1/chat/completions", json=GREEDY | settings).text)


@pytest.fixture(scope="module")
def guarded(path: Path) -> Iterator[Running]:
    with serving(lambda: load(path), ("secret",)) as found:
        yield found


@pytest.mark.parametrize("where", page.FILES)
def test_the_pages_files_come_without_a_key_and_may_reach_nothing_but_this_server(guarded: Running, where: str) -> None:
    answer = guarded.get(where, headers={"accept": "text/html"})  # Ollama's clients look at "/", too
    assert guarded.get("/props").status_code == 401
    name, media_type = page.FILES[where]
    assert (answer.status_code, answer.headers["content-type"]) == (200, media_type)
    assert answer.content == (PACKAGE / "server" / "page" / name).read_bytes()
    policy = dict(one.strip().partition(" ")[::2] for one in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert (policy["frame-ancestors"], policy["require-trusted-types-for"]) == ("'none'", "'script'")
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", [name for name, _ in page.FILES.values()])
def test_the_pages_files_name_no_other_host_and_make_no_markup_of_text(name: str) -> None:
    text = (PACKAGE / "server" / "page" / name).read_text("utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.findall(r"https?:|wss?:|[\"'(]//|@import|url\(|data:[a-z]+/", text)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser", text)
    assert not re.findall(r"<script(?! src=)|<style|\son[a-z]+=|\sstyle=", text), "the policy forbids what stands in the markup"


def test_the_wheel_takes_the_whole_package_and_so_the_pages_files() -> None:
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]
    wheel = settings["targets"]["wheel"]
    assert (wheel["only-include"], wheel["exclude"]) == (["cpuspec", "models"], ["models/heads"])
    assert not {"exclude", "only-include", "artifacts"} & settings.keys()
    ignored = PACKAGE.parent / ".gitignore"
    endings = {Path(name).suffix for name, _ in page.FILES.values()}
    assert not any(line.strip().endswith(tuple(endings)) for line in ignored.read_text("utf-8").splitlines())


def test_a_stream_tells_who_drafted_each_token_if_asked(running: Running, path: Path) -> None:
    found = chunks(running, max_tokens=60, cpuspec={"tokens": True})
    with load(path) as llm:
        offline = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    tokens = [one["cpuspec"] for one in found if "cpuspec" in one]
    assert [one["id"] for one in tokens] == offline.token_ids  # type: ignore[union-attr]
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in found) == offline.text  # type: ignore[union-attr]
    rounds = [row for one in tokens for row in one.get("rounds", ())]
    assert {one["level"] for one in tokens} == {"ngram", None}
    assert sum(one["level"] is None for one in tokens) <= len(rounds)
    assert all(row["level"] == ("ngram" if row["drafted"] else None) and row["accepted"] <= row["drafted"] for row in rounds)
    timings = found[-1]["timings"]
    assert (timings["draft_n"], timings["draft_n_accepted"]) == tuple(
        sum(row[name] for row in rounds) for name in ("drafted", "accepted")
    )


def test_a_stream_without_the_option_is_openais_alone(running: Running) -> None:
    known = {"id", "object", "created", "model", "choices", "timings"}
    assert set().union(*chunks(running, max_tokens=20)) == known


def test_a_token_a_chunk_carries_its_own_logprobs(running: Running) -> None:
    found = chunks(running, max_tokens=30, logprobs=True, cpuspec={"tokens": True})
    told = [one["choices"][0]["logprobs"] for one in found if "cpuspec" in one]
    assert [len(one["content"]) for one in told] == [1] * 30


def test_a_stream_tells_how_much_of_the_prompt_has_been_read_if_asked(running: Running) -> None:
    messages = [{"role": "user", "content": "one two three four five six seven eight nine ten " * 40}]
    options = {"messages": messages, "max_tokens": 2, "return_progress": True}
    # Outputs that come faster than they are sent would be one.
    with before_forwards(running.model.llm, lambda: threading.Event().wait(0.05)):
        found = chunks(running, **options)
    progress = [one["prompt_progress"] for one in found if "prompt_progress" in one]
    read = [one["processed"] for one in progress]
    timings = found[-1]["timings"]
    assert len(read) > 2
    assert read == sorted(set(read))
    assert {one["total"] for one in progress} == {timings["prompt_n"] + timings["cache_n"]}
    assert read[-1] < progress[-1]["total"], "the last part comes with the first token"
    messages[0]["content"] += "and many more words that no cache has seen before, " * 10
    with before_forwards(running.model.llm, lambda: threading.Event().wait(0.05)):
        again = [one["prompt_progress"] for one in chunks(running, **options) if "prompt_progress" in one]
    assert {one["cache"] for one in again} == {again[0]["cache"]}
    assert 0 < again[0]["cache"] < again[0]["processed"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("profile")) as found:
        yield found


def opened(browser: Browser, running: Running, kept: dict[str, Any] | None = None) -> None:
    """Open the page in a browser that keeps nothing else."""
    browser.shape(1280, 800)
    browser.open(f"{running.url}/icon.svg")
    browser.value("sessionStorage.clear(); localStorage.clear()")
    for name, value in (kept or {}).items():
        browser.value(f"localStorage.setItem('cpuspec.{name}', {json.dumps(json.dumps(value))})")
    browser.troubles.clear()
    browser.asked.clear()
    browser.open(f"{running.url}/")
    browser.until("document.activeElement.id === 'input'")


def conversation(browser: Browser) -> Any:
    """The conversation that the browser keeps."""
    return browser.value("JSON.parse(localStorage['cpuspec.conversation.' + JSON.parse(localStorage['cpuspec.current'])])")


DONE = "document.querySelector('.assistant') && !document.querySelector('[aria-busy]')"


@in_a_browser
def test_a_message_is_sent_answered_tinted_and_kept(browser: Browser, running: Running) -> None:
    limits = {"max_tokens": "40", "temperature": "0"}
    opened(browser, running, {"settings": limits})
    browser.type("the cat sat on the mat")
    browser.press("Enter", shift=True)
    browser.type("and the cat sat on the hat")
    browser.press("Enter")
    browser.until(DONE)
    kept = conversation(browser)
    asked, answered = kept["messages"]
    assert asked["text"] == "the cat sat on the mat\nand the cat sat on the hat"
    body = {"messages": [{"role": "user", "content": asked["text"]}], "max_tokens": 40, "temperature": 0}
    wanted = running.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert "".join(text for _, text in answered["runs"]) == wanted
    shown = browser.value("document.querySelector('.assistant .body').textContent")
    assert "".join(shown.split()) == "".join(wanted.split()), "the tiny model writes no code blocks"
    drafted = [text for level, text in answered["runs"] if level]
    titles = browser.value("[...document.querySelectorAll('.assistant .l1')].map(one => one.title)")
    assert titles == ["drafted by ngram"] * len(drafted)
    assert any("tokens/s" in one for one in answered["figures"])
    assert browser.value("document.querySelector('#legend').textContent").startswith("ngram" if drafted else "target")
    browser.open(f"{running.url}/")
    browser.until(DONE)
    assert browser.value("document.querySelector('.assistant .body').textContent") == shown, "a reload loses nothing"
    assert browser.troubles == []
    assert all(one.startswith(f"{running.url}/") for one in browser.asked), browser.asked


@in_a_browser
def test_signs_of_life_disturb_no_answer(browser: Browser, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "KEEP_ALIVE_S", 0.05)
    opened(browser, running, {"settings": {"max_tokens": "5"}})
    with before_forwards(running.model.llm, lambda: threading.Event().wait(0.2)):
        browser.type("hello")
        browser.press("Enter")
        browser.until(DONE)
    assert conversation(browser)["messages"][1]["runs"]
    assert browser.troubles == []


@in_a_browser
@pytest.mark.parametrize("how", ["key", "button"])
def test_an_answer_is_stopped(browser: Browser, running: Running, how: str) -> None:
    opened(browser, running)
    browser.type("go on for ever")
    browser.press("Enter")
    browser.until("document.querySelector('.assistant span')")
    if how == "key":
        browser.press("Escape")
    else:
        browser.value("document.getElementById('stop').click()")
    browser.until(DONE)
    running.eventually(lambda: running.server.num_unfinished == 0)
    answered = conversation(browser)["messages"][1]
    assert "stopped" in answered["figures"]
    assert answered["runs"]
    assert browser.value("[document.getElementById('send').hidden, document.getElementById('stop').hidden]") == [False, True]
    assert browser.troubles == []


@in_a_browser
def test_what_a_model_writes_stays_text(browser: Browser, running: Running) -> None:
    lines = ("<img src=x onerror=alert(1)><script>alert(2)</script>", "", "second <b>paragraph</b>")
    hostile = "\n".join((*lines, "```html", "<script>alert(3)</script>", "```", "end"))
    runs = [["ngram" if number % 3 else None, char] for number, char in enumerate(hostile)]
    told = {"id": "1", "title": "<b>bold</b>", "messages": [{"role": "assistant", "runs": runs, "ended": True}]}
    opened(browser, running, {"current": "1", "conversations": [{"id": "1", "title": told["title"]}], "conversation.1": told})
    body = "document.querySelector('.assistant .body')"
    assert browser.value(f"{body}.querySelectorAll('img, script, b').length") == 0
    assert browser.value(f"[...{body}.querySelectorAll('p')].map(one => one.textContent.trim())") == [
        "<img src=x onerror=alert(1)><script>alert(2)</script>",
        "second <b>paragraph</b>",
        "end",
    ]
    assert browser.value(f"{body}.querySelector('code').textContent") == "<script>alert(3)</script>\n"
    assert browser.value("document.querySelector('#conversations .open').textContent") == "<b>bold</b>"
    assert browser.troubles == []


@in_a_browser
def test_the_browser_refuses_markup_from_text_and_other_hosts(browser: Browser, running: Running) -> None:
    opened(browser, running)
    refused = "(() => { try { document.body.innerHTML = '<p>'; return 'made' } catch (error) { return error.name } })()"
    assert browser.value(refused) == "TypeError"
    assert browser.value("fetch('http://127.0.0.2:9/').then(() => 'sent', () => 'refused')") == "refused"
    assert any("Content Security Policy" in one for one in browser.troubles)


@in_a_browser
def test_every_control_has_a_name_and_is_reached_by_the_keyboard(browser: Browser, running: Running) -> None:
    opened(browser, running)
    browser.value("document.getElementById('settings').showModal()")
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    browser.press("Escape")
    tree += browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "combobox", "checkbox", "spinbutton", "log", "dialog", "navigation"}
    controls = [one for one in tree if not one["ignored"] and one["role"]["value"] in roles]
    assert {one["role"]["value"] for one in controls} == roles
    assert [one for one in controls if not one["name"]["value"].strip()] == []
    browser.value("document.querySelector('.skip').focus()")
    reached = []
    for _ in range(6):
        browser.press("Tab")
        reached.append(browser.value("document.activeElement.id || document.activeElement.className"))
        assert browser.value("getComputedStyle(document.activeElement).outlineStyle") == "solid", reached
    assert reached == ["new", "model", "settings-open", "log", "input", "send"]


@in_a_browser
@pytest.mark.parametrize("dark", [False, True])
def test_a_narrow_window_shows_everything(browser: Browser, running: Running, dark: bool) -> None:
    opened(browser, running, {"settings": {"max_tokens": "30"}})
    browser.shape(390, 844, dark)
    browser.type("word " * 60 + "w" * 200)
    browser.press("Enter")
    browser.until(DONE)
    assert browser.value("document.documentElement.scrollWidth") <= 390
    controls = "[...document.querySelectorAll('header *, footer button, footer textarea')]"
    assert browser.value(f"{controls}.filter(one => one.getBoundingClientRect().right > 390).map(one => one.id)") == []
    assert (browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)") != dark
    assert browser.value("getComputedStyle(document.getElementById('sidebar')).visibility") == "hidden"
    browser.value("document.getElementById('menu').click()")
    browser.until("document.activeElement.id === 'new'")
    assert browser.value("getComputedStyle(document.getElementById('sidebar')).visibility") == "visible"
    browser.press("Escape")
    assert browser.value("document.activeElement.id") == "menu"


@in_a_browser
def test_a_key_is_asked_for_and_used(browser: Browser, path: Path) -> None:
    with serving(lambda: load(path), keys=("secret",)) as running:
        opened(browser, running, {"settings": {"max_tokens": "5"}})
        browser.until("document.getElementById('notice')")
        browser.value("document.getElementById('key').value = 'secret'")
        browser.value("document.getElementById('key').dispatchEvent(new Event('change'))")
        browser.until("!document.getElementById('notice')")
        browser.type("hello")
        browser.press("Enter")
        browser.until(DONE)
        assert conversation(browser)["messages"][1]["runs"]
        assert "secret" not in browser.value("JSON.stringify(localStorage)")
