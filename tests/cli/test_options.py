"""Every option of every command, from the command line to what the command gets; the cases come from the declarations."""

import ast
import inspect
import textwrap
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

import cpuspec
from cpuspec.cli.app import COMMANDS as NAMES
from cpuspec.cli.app import whole_command
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
SETTINGS = (EngineConfig, ServerConfig, SamplingParams)
PROGRAM = {name: whole_command(name) for name in NAMES}
COMMANDS = {
    f"{name} {inner}".strip(): command
    for name, one in PROGRAM.items()
    for inner, command in getattr(one, "commands", {"": one}).items()
}
FUNCTIONS = {name: inspect.unwrap(command.callback) for name, command in COMMANDS.items()}


def declared(name: str, kind: str) -> list[Any]:
    """The options or arguments of a command, but for what says the same as the argument MODEL, and what prints help."""
    return [one for one in COMMANDS[name].params if one.param_type_name == kind and one.name not in ("model_option", "help_all")]


def spellings(option: Any) -> list[str]:
    return [*option.opts, *option.secondary_opts]


def _body(**arguments: Any) -> None:
    raise LookupError(arguments)


def arguments_of(
    name: str, directory: Path, monkeypatch: pytest.MonkeyPatch, *given: str, positional: list[str] | None = None
) -> dict[str, Any]:
    """What the function of a command is called with: settings by their own names. positional: by default what it requires."""
    (directory / "file").write_text("text")
    required = [place(name, one, directory) for one in declared(name, "argument") if one.required]
    options = [one.opts[0] for one in declared(name, "option") if one.required and not {*given} & {*spellings(one)}]
    usual = [text for option in options for text in (option, str(directory / "usual"))]
    monkeypatch.setattr(FUNCTIONS[name], "__code__", _body.__code__)
    first, *inner = name.split()
    with pytest.raises(LookupError) as reached:
        PROGRAM[first].main([*inner, *given, *usual, *(required if positional is None else positional)], standalone_mode=False)
    (own,) = reached.value.args
    found = own.pop("chosen", {}) | own.pop("sampling", {})
    if running := own.pop("running", None):
        found |= {"backend": running.backend} | vars(running.settings)
    for record in ("serving", "plan", "wanted", "job", "gptq"):
        found |= vars(own.pop(record, None) or SimpleNamespace())
    return found | own


def told(name: str, parameter: Any) -> tuple[str, Any]:
    """The type of a parameter of a command, and what Typer is told of it."""
    kind, info = get_args(inspect.signature(COMMANDS[name].callback, eval_str=True).parameters[parameter.name].annotation)
    return str(kind), info


def place(name: str, argument: Any, directory: Path) -> str:
    """A file or a directory that an argument takes."""
    return str(directory / "file" if told(name, argument)[1].file_okay else directory)


def value_of(name: str, option: Any, file: Path) -> tuple[str, Any]:
    """A value of an option that is not its default, as text and as the command gets it."""
    for spelling in option.opts:
        if found := _OF_COMMANDS.get(name.partition(" ")[0], {}).get(spelling) or _VALUES.get(spelling):
            return found
    kind, info = told(name, option)
    least = max(int(info.min or 0), 3)
    number = least + (option.default == least)
    fraction = 0.25 if option.default != 0.25 else 0.5
    if "int" in kind:
        text, value = str(number), number
    elif "float" in kind:
        text, value = str(fraction), fraction
    elif "Path" in kind:
        value = file if info.file_okay else file.parent
        text = str(value)
    else:
        text, value = (str(file), "text") if option.name in ("json_schema", "grammar") else ("some", "some")
    return text, [value] if option.multiple else value


@pytest.mark.parametrize("name", [name for name in COMMANDS if declared(name, "option")])
def test_an_option_sets_what_it_is_called_by(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = arguments_of(name, tmp_path, monkeypatch)
    for option in declared(name, "option"):
        before = usual.get(option.name)
        more = [text for spelling in spellings(option) for text in _NEEDS.get(spelling, ())]
        text, wanted = ("", None) if option.is_flag else value_of(name, option, tmp_path / "file")
        values = []
        for spelling in spellings(option):
            given = [spelling, *([] if option.is_flag else [text]), *more]
            got = arguments_of(name, tmp_path, monkeypatch, *given)[option.name]
            if option.is_flag:
                wanted = spelling in option.opts
            assert (list(got) if isinstance(wanted, list) else got) == wanted, given
            values.append(got)
        assert any(value != before for value in values), f"{spellings(option)} set what is there without them"
        if option.is_flag and before is not None:
            assert before is option.default, spellings(option)


@pytest.mark.parametrize("name", NAMES)
def test_the_list_of_commands_says_how_the_help_of_each_begins(name: str) -> None:
    assert PROGRAM[name].help.replace("\n", " ").startswith(NAMES[name][1].rstrip("."))


@pytest.mark.parametrize(
    "name", [name for name in COMMANDS if [one.name for one in declared(name, "argument")][:1] in (["model"], ["models"])]
)
def test_a_model_is_named_by_its_place_or_by_an_option(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, *rest = declared(name, "argument")
    others = [place(name, one, tmp_path) for one in rest]
    for positional in (["this", *others], ["-m", "this", *others], [*others, "--model=this"]):
        found = arguments_of(name, tmp_path, monkeypatch, positional=positional)[model.name]
        assert found == (["this"] if model.name == "models" else "this")
    if not model.required:
        assert arguments_of(name, tmp_path, monkeypatch, positional=others)[model.name] == model.default


@pytest.mark.parametrize("name", COMMANDS)
def test_what_no_option_sets_is_the_settings_own_default(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {*inspect.signature(FUNCTIONS[name]).parameters, "max_tokens"}  # which is each command's own
    own |= (
        {"seed", "threads", "device", "dtype"} if name in ("train eagle3", "train mtp", "train distill", "bench-serve") else set()
    )
    found = arguments_of(name, tmp_path, monkeypatch)
    defaults = {one.name: one.default for settings in SETTINGS for one in fields(settings)}
    wrong = {setting for setting in (found.keys() & defaults.keys()) - own if found[setting] != defaults[setting]}
    assert wrong == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_uses_every_value_that_it_gets(name: str) -> None:
    function = ast.parse(textwrap.dedent(inspect.getsource(FUNCTIONS[name]))).body[0]
    assert isinstance(function, ast.FunctionDef)
    read = {one.id for line in function.body for one in ast.walk(line) if isinstance(one, ast.Name)}
    taken = {one.arg for one in (*function.args.args, *function.args.kwonlyargs)}
    assert taken - read == set()


def test_every_setting_is_read_somewhere() -> None:
    read: set[str] = set()
    for file in Path(cpuspec.__file__).parent.rglob("*.py"):
        if file.parent.name != "cli" and file.name != "settings.py":
            read |= {one.attr for one in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(one, ast.Attribute)}
    assert {one.name for settings in SETTINGS for one in fields(settings)} - read == set()
