"""Each package knows only those before it, and what is done in one place is done nowhere else. Read from the syntax trees."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cpuspec

ROOT = Path(cpuspec.__file__).parent

# From the bottom to the top; those in one row do not know each other. "" is the package itself with its lazy names.
LAYERS = (
    ("errors",),
    ("platform",),
    ("config", "environment", "files"),
    ("settings",),
    ("layers",),
    ("formats",),
    ("checkpoints",),
    ("kernels",),
    ("model",),
    ("backends",),
    ("sampling",),
    ("sequence",),
    ("text",),
    ("metrics",),
    ("quantize",),
    ("loadtest",),
    ("speculation",),
    ("engine",),
    ("",),
    ("server",),
    ("batch",),
    ("ray",),
    ("evaluate",),
    ("train",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# Who may use what: a library, or a name that stands for something done in one place.
HOMES = {
    "numba": {"kernels"},
    "llvmlite": {"kernels"},
    "jinja2": {"text"},
    "tokenizers": {"text"},
    "typer": {"cli"},
    "rich": {"cli"},
    "huggingface_hub": {"checkpoints"},
    "llguidance": {"text"},
    "torch": {"backends", "train"},
    "triton": {"backends"},
    "transformers": set(),
    "onnx": {"backends"},
    "onnxruntime": {"backends"},
    "openvino": {"backends"},
    "fastapi": {"server"},
    "starlette": {"ray", "server"},
    "uvicorn": {"server"},
    "pydantic": {"evaluate", "server"},
    "prometheus_client": {"ray", "server"},
    "httpx": {"loadtest"},
    "httpx_sse": {"loadtest"},
    "ray": {"ray"},
    "lm_eval": {"evaluate"},
    "evalplus": {"evaluate"},
    "optimum": set(),
    "pickle": set(),
    "environment variables": {"environment", "text"},
    "printing": {"cli", "text"},
    "relative imports": set(),  # this test reads absolute ones
}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
OUTPUT = {"stdout", "stderr", "__stdout__", "__stderr__"}


def violations(module: str, source: str) -> list[str]:
    """What `module` (a dotted name below cpuspec) does that its place forbids."""
    home = module.partition(".")[0]
    if home not in RANK:
        return [f"{module}: {home!r} has no place in LAYERS"]
    found = []
    for line, what in _uses(ast.parse(source)):
        if what.split(".")[0] == "cpuspec":
            other = (what.split(".")[1:] or [""])[0]
            if other not in RANK:
                other = ""  # a name that the package itself offers
            if other != home and RANK[other] >= RANK[home]:
                found.append(f"{module}:{line} imports {other or 'cpuspec itself'}")
        elif home not in HOMES.get(what.split(".")[0], {home}):
            found.append(f"{module}:{line} uses {what}")
    return found


def _uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import, and the uses that HOMES names in words."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for name in names:
                    yield node.lineno, name.name
            case ast.ImportFrom(level=level) if level:
                yield node.lineno, "relative imports"
            case ast.ImportFrom(module=str(module), names=names):
                for name in names:
                    yield node.lineno, f"{module}.{name.name}"
                    if module == "os" and name.name in ENVIRONMENT:
                        yield node.lineno, "environment variables"
                    if module == "sys" and name.name in OUTPUT:
                        yield node.lineno, "printing"
            case ast.Call(func=ast.Name(id="import_module" | "__import__"), args=[ast.Constant(value=str(module)), *_]):
                yield node.lineno, module
            case ast.Call(func=ast.Name(id="print")):
                yield node.lineno, "printing"
            case ast.Attribute(value=ast.Name(id="os"), attr=attribute) if attribute in ENVIRONMENT:
                yield node.lineno, "environment variables"
            case ast.Attribute(value=ast.Name(id="sys"), attr=attribute) if attribute in OUTPUT:
                yield node.lineno, "printing"


def modules() -> dict[str, Path]:
    paths = (path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py")
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def test_every_module_keeps_to_its_place() -> None:
    found = {module: violations(module, path.read_text("utf-8")) for module, path in modules().items()}
    assert {module: why for module, why in found.items() if why} == {}
    assert len(found) > 100


def cycle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import one another in a ring; none if there is no ring."""
    left = dict(imports)
    while free := [module for module, needed in left.items() if not needed & left.keys()]:
        for module in free:
            del left[module]
    return sorted(left)


def test_no_modules_import_each_other() -> None:
    found = modules()
    imports = {}
    for module, path in found.items():
        named = {what.removeprefix("cpuspec.") for _, what in _uses(ast.parse(path.read_text("utf-8")))}
        # `from package import name` may name a module, or a name of the package.
        needed = named | {what.rpartition(".")[0] for what in named if what not in found}
        imports[module] = {other for other in needed & found.keys() if other != module and not module.startswith(f"{other}.")}
    assert cycle(imports) == []
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("formats.blocks32", "from cpuspec.checkpoints import Checkpoint"),
        ("speculation.round", "def f():\n    import cpuspec.engine.engine"),
        ("speculation.round", "from cpuspec import engine"),
        ("engine.llm", "from cpuspec import LLM"),
        ("config", "from cpuspec.environment import cache_dir"),
        ("engine.llm", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from cpuspec.cli import main"),
        ("engine.llm", "from importlib import import_module\nimport_module('cpuspec.cli.app')"),
        ("cli.app", "from ..server import app"),
        ("server.app", "from cpuspec.cli.console import note"),
        ("surprise", ""),
        ("backends.numba_backend", "import numba"),
        ("sampling", "from numba.core import types"),
        ("speculation.drafters.lookups", "import torch.nn"),
        ("engine.llm", "import onnxruntime"),
        ("checkpoints.gguf", "import pickle"),
        ("kernels.isa", "import os\nos.environ['X'] = '1'"),
        ("kernels.isa", "import os\nvalue = os.getenv('X')"),
        ("kernels.isa", "from os import environ"),
        ("metrics", "print('x')"),
        ("metrics", "import sys\nsys.stderr.write('x')"),
        ("metrics", "from sys import stdout"),
        ("metrics", "import rich.table"),
    ],
)
def test_a_module_out_of_its_place_is_caught(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cli.app", "import typer\nfrom cpuspec import __version__\nfrom cpuspec.engine.llm import LLM\nprint('x')"),
        ("kernels.simd", "import numba\nfrom cpuspec.kernels.isa import dot_isa\nfrom cpuspec.errors import FormatError"),
        ("environment", "import os\nos.environ.get('X')"),
        ("metrics", "import os, sys\nos.replace('a', 'b')\nsys.executable"),
    ],
)
def test_a_module_in_its_place_is_not_accused(module: str, source: str) -> None:
    assert violations(module, source) == []


HEAVY = (
    *("numpy", "numba", "llvmlite", "torch", "transformers", "onnx", "onnxruntime", "tokenizers", "jinja2", "typer", "rich"),
    *("huggingface_hub", "fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client", "httpx", "httpx_sse", "ray"),
)


def foreign_imports(source: str) -> set[str]:
    """Packages of this project, oracles aside, that a module imports."""
    names = (name for _, name in _uses(ast.parse(source)) if not name.startswith("tests.oracles."))
    return {name.partition(".")[0] for name in names} & {"cpuspec", "tools", "benchmarks", "tests"}


def test_oracles_import_nothing_that_they_judge() -> None:
    oracles = sorted((Path(__file__).parent / "oracles").glob("*.py"))
    assert oracles
    assert not {path.name: found for path in oracles if (found := foreign_imports(path.read_text()))}
    assert foreign_imports("from cpuspec.text import Tokenizer\nimport numpy") == {"cpuspec"}


def heavy_imports(code: str) -> list[str]:
    """Which of HEAVY a fresh interpreter has loaded after `code`."""
    code += f"\nimport sys\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    return done.stdout.split()


def test_importing_cpuspec_loads_nothing_heavy() -> None:
    assert heavy_imports("import cpuspec") == []
    assert heavy_imports("from cpuspec import SamplingParams, SpecConfig, CpuspecError") == []


def test_a_heavy_import_would_be_seen() -> None:
    assert heavy_imports("import cpuspec.sampling") == ["numpy"]


def test_the_command_line_starts_without_the_engine() -> None:
    assert set(heavy_imports("import cpuspec.cli.app")) <= {"typer"}, "`cpuspec --help` imports no command"
