"""`cpuspec serve` as a user meets it, before it listens."""

import re
import shlex
import socket
import stat
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import typer

import cpuspec
from cpuspec.checkpoints.recipes import DEFAULT_RECIPE
from cpuspec.cli import app as module
from cpuspec.cli.serve import read_keys
from cpuspec.errors import ConfigError
from cpuspec.server.app import listen
from cpuspec.settings import ServerConfig
from tests.command import ok, refused, run
from tests.server.running import PATIENCE_S, load, serving, tiny_model


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CPUSPEC_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(module, "show_log", lambda: None)  # other tests' servers would log from then on


def test_keys_come_from_the_environment_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_keys(None) == []
    file = tmp_path / "keys"
    file.write_text("one\n\n  two \n")
    assert read_keys(file) == ["one", "two"]
    monkeypatch.setenv("CPUSPEC_API_KEY", "zero")
    assert read_keys(None) == ["zero"]
    assert read_keys(file) == ["zero", "one", "two"]


@pytest.mark.parametrize("content", ["", "\n \n", b"\xff\xfe", None])
def test_a_file_without_keys_is_wrong_usage(tmp_path: Path, content: Any) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(typer.BadParameter, match=r"has no key|cannot be read"):
        read_keys(file)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--port", "70000"), "port must be an integer from 0 to 65535"),
        (("--max-request-s", "0"), "max_request_s must be a number > 0"),
        (("--drain-s", "-1"), "drain_s must be a number >= 0"),
        (("--max-new-tokens", "0"), "max_new_tokens must be None or an integer from 1"),
        (("--alias", ""), "aliases must be a text or several"),
    ],
)
def test_limits_that_cannot_be_are_wrong_usage(options: tuple[str, ...], wanted: str) -> None:
    refused("serve", "no-model", *options, code=2, message=wanted)


def test_without_a_name_the_default_model_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def open_with_drafts(model: str, *rest: Any, **named: Any) -> Any:
        asked.append(model)
        raise typer.BadParameter("it is not opened")

    monkeypatch.setattr("cpuspec.cli.serve.open_with_drafts", open_with_drafts)
    assert "it is not opened" in run("serve").stderr
    assert asked == [DEFAULT_RECIPE]


def test_the_curl_of_the_front_page_is_answered(tmp_path: Path) -> None:
    front = (Path(cpuspec.__file__).parents[1] / "README.md").read_text("utf-8")
    (command,) = re.findall(r"^\$ (curl .*)$", front, re.MULTILINE)
    _, url, flag, header, data, body = shlex.split(command)
    assert (flag, data) == ("-H", "-d")
    model = tiny_model(tmp_path)
    with serving(lambda: load(model)) as running:
        name, value = header.split(": ")
        reply = httpx.post(running.url + urlsplit(url).path, headers={name: value}, content=body, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["role"] == "assistant"


def test_every_setting_of_the_server_is_an_option() -> None:
    shown = ok("serve", "--help-all")
    names = ("host", "port", "alias", "cors", "max-waiting", "api-key-file", "drain-s", "draft", "threads", "uds")
    for option in (f"--{name}" for name in names):
        assert re.search(rf"{option}[ ,]", shown), option


@pytest.mark.parametrize("option", ["uds", "host"])
def test_a_server_listens_on_a_unix_socket(tmp_path: Path, option: str) -> None:
    path, model = tmp_path / "a.sock", tiny_model(tmp_path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with serving(lambda: load(model), **{option: str(path)}) as running:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=PATIENCE_S) as client:
            body = {"prompt": "the cat", "max_tokens": 3}
            reply = client.post("http://any.name/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert running.server.state == "ready"
        with pytest.raises(ConfigError, match="another server listens there"):
            listen(ServerConfig(uds=str(path)))
    assert not path.exists()


def test_a_socket_replaces_no_file(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    for wrong in (path, tmp_path / "none" / "a.sock", tmp_path / ("a" * 200)):
        with pytest.raises(ConfigError, match="choose another --uds"):
            listen(ServerConfig(uds=str(wrong)))
    assert path.read_text() == "mine"
