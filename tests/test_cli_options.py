"""Every option of every command, from the command line to what the command gets; the cases come from the declarations."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, get_args, get_origin

import pytest
import typer

import cpuspec
from cpuspec.cli.app import COMMANDS as NAMES
from cpuspec.cli.app import load, whole_command
from cpuspec.settings import EngineConfig, SamplingParams, ServerConfig

# Options whose texts have a grammar: a text, and what the command gets.
_VALUES: dict[str, tuple[str, Any]] = {
    **{"--activations": ("int8", "int8"), "--backend": ("numpy", "numpy"), "--device": ("cpu", "cpu")},
    **{"--draft": ("ngram@3", "ngram@3"), "--dtype": ("f32", "f32"), "--goodput": ("ttft:500", ["ttft:500"])},
    **{"--draft-format": ("int4", "int4"), "--kv-format": ("int8", "int8"), "--logit-bias": ("5=1.5", {5: 1.5})},
    **{"--memory": ("8GB", "8GB"), "--output": ("csv", "csv"), "--pooling": ("mean", "mean")},
    **{"--percentile-metrics": ("ttft", ("ttft",)), "--metric-percentiles": ("3", (3.0,))},
    **{"--prompt-arithmetic": ("codes", "codes"), "--weights": ("codes", "codes")},
}
_OF_COMMANDS = {
    "train": {"--layers": ("1,3", (1, 3))},
    "bench": dict.fromkeys(("--depth", "--sequences", "--rows"), ("3", (3,))),
    "quantize": {"--method": ("gptq", ("gptq",)), "--candidates": ("q4_0", ("q4_0",))},
}
_NEEDS = {"--grammar-trigger": ("--regex", "a+"), "--candidates": ("--bits-per-weight", "4")}  # options that another one goes with


def _commands() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in NAMES:
        found = load(name)
        if not isinstance(found, typer.Typer):
            yield name, found
            continue
        for one in found.registered_commands:
            assert one.callback is not None
            yield f"{name} {one.name or one.callback.__name__.replace('_', '-')}", one.callback


PROGRAM = {name: whole_command(name) for name in NAMES}
COMMANDS = dict(_commands())


def _declared(callback: Callable[..., Any]) -> Iterator[tuple[inspect.Parameter, Any, Any]]:
    """Every parameter of a command, its type without None, and what Typer is told of it."""
    for parameter in inspect.signature(callback, eval_str=True).parameters.values():
        if parameter.name in ("model_option", "help_all"):  # says the same as the argument MODEL; prints the help and ends
            continue
        assert get_origin(parameter.annotation) is Annotated, parameter
        kind, told = get_args(parameter.annotation)[:2]
        yield parameter, next((one for one in get_args(kind) if type(None) in get_args(kind) and one is not type(None)), kind), told


def _spellings(parameter: inspect.Parameter, told: Any) -> list[str]:
    """Typer takes the first spelling for the default in an annotation, until it reads that."""
    declared = [one for one in (told.default, *(told.param_decls or ())) if isinstance(one, str) and one.startswith("-")]
    return [spelling for one in declared or [f"--{parameter.name.replace('_', '-')}"] for spelling in one.split("/")]


OPTIONS = {
    name: [(parameter, kind, told) for parameter, kind, told in _declared(callback) if isinstance(told, typer.models.OptionInfo)]
    for name, callback in COMMANDS.items()
}
REQUIRED = {
    name: [(parameter, told) for parameter, _, told in _declared(callback) if parameter.default is parameter.empty]
    for name, callback in COMMANDS.items()
}
ARGUMENTS = {
    name: [(parameter, told) for parameter, _, told in _declared(callback) if isinstance(told, typer.models.ArgumentInfo)]
    for name, callback in COMMANDS.items()
}
SETTINGS = (EngineConfig, ServerConfig, SamplingParams)


def _body(**arguments: Any) -> None:
    raise LookupError(arguments)


def arguments_of(
    name: str, directory: Path, monkeypatch: pytest.MonkeyPatch, *given: str, positional: list[str] | None = None
) -> dict[str, Any]:
    """What the function of a command is called with: settings by their own names. positional: by default what it requires."""
    required, needed = [], []
    file = directory / "file"
    file.write_text("text")
    for parameter, told in REQUIRED[name]:
        if isinstance(told, typer.models.ArgumentInfo):
            needed.append(str(file if told.file_okay else directory))
        elif not set(given) & set(_spellings(parameter, told)):
            required += [_spellings(parameter, told)[0], str(directory / "usual")]
    monkeypatch.setattr(inspect.unwrap(COMMANDS[name]), "__code__", _body.__code__)
    first, *inner = name.split()
    with pytest.raises(LookupError) as reached:
        PROGRAM[first].main([*inner, *given, *required, *(needed if positional is None else positional)], standalone_mode=False)
    (own,) = reached.value.args
    found = own.pop("chosen", {}) | own.pop("sampling", {})
    if running := own.pop("running", None):
        found |= {"backend": running.backend} | vars(running.settings)
    for record in ("serving", "plan", "wanted", "job", "gptq"):
        found |= vars(own.pop(record, None) or SimpleNamespace())
    return found | own


def value_of(name: str, parameter: inspect.Parameter, kind: Any, told: Any, file: Path) -> tuple[str, Any]:
    """A value of an option that is not its default, as text and as the command gets it."""
    for spelling in _spellings(parameter, told):
        if found := _OF_COMMANDS.get(name.partition(" ")[0], {}).get(spelling) or _VALUES.get(spelling):
            return found
    if get_origin(kind) is list:
        text, one = value_of(name, parameter, get_args(kind)[0], told, file)
        return text, [one]
    if kind is Path:
        return str(file), file
    if kind is int:
        number = max(int(told.min or 0), 3) + (parameter.default == max(int(told.min or 0), 3))
        return str(number), number
    if kind is float:
        return ("0.25", 0.25) if parameter.default != 0.25 else ("0.5", 0.5)
    return (str(file), "text") if parameter.name in ("json_schema", "grammar") else ("some", "some")


@pytest.mark.parametrize("name", [name for name, options in OPTIONS.items() if options])
def test_an_option_sets_what_it_is_called_by(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = arguments_of(name, tmp_path, monkeypatch)
    for parameter, kind, told in OPTIONS[name]:
        spellings, before = _spellings(parameter, told), usual.get(parameter.name)
        more = [text for spelling in spellings for text in _NEEDS.get(spelling, ())]
        text, wanted = ("", None) if kind is bool else value_of(name, parameter, kind, told, tmp_path / "file")
        values = []
        for spelling in spellings:
            given = [spelling, *([] if kind is bool else [text]), *more]
            got = arguments_of(name, tmp_path, monkeypatch, *given)[parameter.name]
            if kind is bool:
                wanted = not spelling.startswith("--no-") or parameter.name.startswith("no_")
            assert (list(got) if isinstance(wanted, list) else got) == wanted, given
            values.append(got)
        assert any(value != before for value in values), f"{spellings} set what is there without them"
        if kind is bool and before is not None:
            assert before is parameter.default, spellings


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_how_the_help_of_each_begins(name: str) -> None:
    if name in NAMES:
        told = (COMMANDS[name].__doc__ or "").replace("\n", " ")
        assert told.startswith(NAMES[name][1].rstrip("."))


MODELS = {name: first for name in COMMANDS if (first := ARGUMENTS[name][:1]) and first[0][0].name in ("model", "models")}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_named_by_its_place_or_by_an_option(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((parameter, _),) = MODELS[name]
    others = [str(tmp_path / "file" if told.file_okay else tmp_path) for _, told in ARGUMENTS[name][1:]]
    for positional in (["this", *others], ["-m", "this", *others], [*others, "--model=this"]):
        found = arguments_of(name, tmp_path, monkeypatch, positional=positional)[parameter.name]
        assert found == (["this"] if parameter.name == "models" else "this")
    if parameter.default is not parameter.empty:
        assert arguments_of(name, tmp_path, monkeypatch, positional=others)[parameter.name] == parameter.default


@pytest.mark.parametrize("name", COMMANDS)
def test_what_no_option_sets_is_the_settings_own_default(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = set(inspect.signature(inspect.unwrap(COMMANDS[name])).parameters) | {"max_tokens"}  # which is each command's own
    own |= (
        {"seed", "threads", "device", "dtype"} if name in ("train eagle3", "train mtp", "train distill", "bench-serve") else set()
    )
    found = arguments_of(name, tmp_path, monkeypatch)
    defaults = {one.name: one.default for settings in SETTINGS for one in fields(settings)}
    wrong = {setting for setting in (found.keys() & defaults.keys()) - own if found[setting] != defaults[setting]}
    assert wrong == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_uses_every_value_that_it_gets(name: str) -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(COMMANDS[name]))))
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    read = {one.id for line in function.body for one in ast.walk(line) if isinstance(one, ast.Name)}
    taken = {one.arg for one in (*function.args.args, *function.args.kwonlyargs)}
    assert taken - read == set()


def test_every_setting_is_read_somewhere() -> None:
    package = Path(cpuspec.__file__).parent
    read: set[str] = set()
    for file in package.rglob("*.py"):
        if file.parent.name != "cli" and file.name != "settings.py":
            tree = ast.walk(ast.parse(file.read_text("utf-8")))
            read |= {one.attr for one in tree if isinstance(one, ast.Attribute)}
    assert {one.name for settings in SETTINGS for one in fields(settings)} - read == set()
