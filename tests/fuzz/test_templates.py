"""Templates that a grammar makes, in a child process with a limit of memory and a deadline.

Hostile ones are rendered or refused; ordinary ones render as jinja renders them. See `drive`.
"""

import json
import random
import re
from pathlib import Path

import jinja2
import jinja2.ext
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

import cpuspec.chat_template
from cpuspec.chat_template.filters import FILTERS, TESTS
from cpuspec.chat_template.operations import STR_METHODS
from cpuspec.errors import TokenizerError
from tests.fuzz.drive import Case, check

STEPS = 1 << 16  # a smaller budget than in use: the time of a run, not what it can find, depends on it
MESSAGES = [
    {"role": "system", "content": "Be brief.\n"},
    {
        "role": "user",
        "content": " Two <b>words</b> & \"more\"\n\n'é' 😀 ",
        "n": 3,
        "list": [3, 1, 2],
        "parts": [{"type": "text", "text": "a-b"}],
    },
    {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"x": 1.5, "y": None, "z": [True, "ß"]}}]},
]

# A grammar: what a symbol can be at the end of a branch, and what else. <a> stands for a symbol, <a|b> for one of the words.
Grammar = dict[str, tuple[list[str], list[str]]]

ORDINARY: Grammar = {
    "template": (
        [],
        [
            "{% set ns = namespace(text='t', n=1) %}{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}"
            "{% macro around(x) %}[{{ x }}{{ caller(x) }}]{% endmacro %}\n"
            "{% for message in messages %}\n<block><block>{% endfor %}\n"
        ],
    ),
    "text": (
        ["'a b'", "''", "message.content", "message['role']", "messages[0].content", "ns.text", "'x,y,,z'", "bos", "nothing"],
        [
            "(<text> + <text>)",
            "(<text> ~ <number> ~ <values>)",
            "(<text> if <truth> else <text>)",
            "(<text> * <small>)",
            "<text>[<small>:<small>]",
            "<text>[::<-2|-1|2>]",
            "(<text> | <trim|upper|lower|title|capitalize|string|e|safe>)",
            "(<text> | string | reverse)",
            "(<text> | replace(<text>, <text>))",
            "(<text> | indent(<small>, <truth>, <truth>))",
            "(<values> | join(<text>))",
            "(<values> | tojson(<indent=2|ensure_ascii=true|sort_keys=false>))",
            "<text>.<strip|lstrip|upper|title|swapcase|casefold>()",
            "<text>.<strip|rstrip|removeprefix|removesuffix>(<text>)",
            "<text>.replace(<text>, <text>)",
            "<text>.join(<text>.split())",
            "('%s|%5.3s|%d' % (<text>, <text>, <number>))",
            "'{} {{}} {}'.format(<text>, <number>)",
            "(<text> | default(<text>, <truth>))",
            "twice(<text>)",
        ],
    ),
    "small": (["0", "1", "2", "3", "-1", "-2", "loop.index", "ns.n % 3"], []),
    "number": (
        ["0", "1", "7", "2.5", "-3", "loop.index", "loop.index0", "loop.length", "loop.revindex", "ns.n", "message.n"],
        [
            "(<number> <+|-|*|/|//|%> <number>)",
            "(<number> ** <0|1|2|-1>)",
            "(-<number>)",
            "(<text> | length)",
            "(<values> | length)",
            "(<text> | <int|float|int(5)>)",
            "(<number> | <abs|round|round(1)|round(2, method='floor')|int>)",
            "<text>.<count|find|rfind>(<text>)",
            "([<number>, <number>, 4] | <min|max|first|last>)",
        ],
    ),
    "truth": (
        ["true", "false", "loop.first", "loop.last", "message.tool_calls", "none", "add_generation_prompt"],
        [
            "(<truth> <and|or> <truth>)",
            "(not <truth>)",
            "(<any> <==|!=> <any>)",
            "(<text> <LT|LE|GT|GE|in|not in> <text>)",
            "(<number> <LT|GE> <number> <LE|GT> <number>)",
            "(<any> in <values>)",
            "(<any> is <defined|none|string|mapping|not number|not iterable|sequence|true|integer|boolean|undefined>)",
            "<text>.<startswith|endswith>(<text>)",
            "<text>.<isdigit|isspace|isupper>()",
        ],
    ),
    "values": (
        ["[]", "[1, 2, 3]", "('a', 'b')", "message.list", "message.parts", "{'k': 1, 'j': 'v'}", "range(3)", "messages", "'xyz'"],
        [
            "[<text>, <number>, <values>]",
            "{'a': <text>, 'b': <values>}",
            "([<text>] + [<text>, 'B'])",
            "(<values> | list)[<small>:]",
            "<text>.<split|rsplit|partition|rpartition>(<' '|','|'a'>)",
            "<text>.splitlines(<truth>)",
            "(messages | <select|reject>attr('role', '<eq|==|equalto|in>', <text>) | list)",
            "(messages | map(attribute=<'role'|'tool_calls.0.name'>, default='d') | list)",
            "(<text>.split() | map('<upper|length|trim|string>') | list)",
            "(message.list | <select|reject>('<odd|even>') | list)",
            "(<text> | list | <sort|unique|reverse|sort(reverse=true)> | list)",
            "({'b': <number>, 'a': 2} | <dictsort|items|tojson> | list)",
            "{'b': <text>}.<items|keys|values>()",
            "dict(a=<number>, b=<text>)",
        ],
    ),
    "any": ([], ["<text>", "<number>", "<values>", "<truth>"]),
    "dash": (["", "-"], []),
    "jump": (["", "", "", "{% break %}", "{% continue %}", "{% if loop.first %}{% continue %}{% endif %}"], []),
    "block": (
        ["{{ <any> }}"],
        [
            " text\n  {%<dash> if <truth> <dash>%}\n<block>{% elif <truth> %}e{%<dash> else %} z {% endif %}\n",
            "{%<dash> for x in <values> <dash>%}<block>{{ x }}<jump>{% else %}none{% endfor %}",
            "{% for x in <values> if <truth> %}{{ loop.index }}<block>{% endfor %}",
            "{% for k, v in {'p': 1, 'q': <text>}.items() %}{{ k }}={{ v }}{{ loop.cycle('a', 'b') }}{% endfor %}",
            "{% set ns.text = <text> %}<block>",
            "{% set ns.n = <number> %}<block>",
            "{% set word = <text> %}<block>{{ word }}",
            "{% set caught | trim %}<block>{% endset %}[{{ caught }}]",
            "{% with y = <text> %}{{ y }}<block>{% endwith %}",
            "{% filter upper %}<block>{% endfilter %}",
            "{% macro m(a, b=<text>) %}{{ a }}{{ b }}{% endmacro %}{{ m(<text>) }}<block>",
            "{% call(z) around(<text>) %}{{ z }}<block>{% endcall %}",
            "{# comment #}{{ <any> }}\n<block>",
        ],
    ),
}

_NAMED = "attribute|indent|separators|default|reverse|d|count|width|precision|boolean"
_FILTER = f"<{'|'.join(sorted(FILTERS))}>"
_TEST = f"<{'|'.join(sorted(filter(str.isidentifier, TESTS)))}>"
_METHOD = f"<{'|'.join(sorted(STR_METHODS))}|items|keys|values|get|index|count|cycle|changed|length|x|mro>"
HOSTILE: Grammar = {
    "template": (
        [],
        [
            "{% set ns = namespace(x='a', y=[1], z=1) %}{% set big = 'é' * 100000 %}{% macro m() %}{{ caller() }}{% endmacro %}"
            "<start>"
        ],
    ),
    "e": (
        [
            "1",
            "0",
            "-1",
            "1000000000",
            "9223372036854775807",
            "1e308",
            "'a'",
            "'%s%999d'",
            "'é\\n'",
            "''",
            "none",
            "true",
            "messages",
            "ns.x",
            "ns.y",
            "ns.z",
            "ns",
            "loop",
            "big",
            "range(10000)",
            "nothing",
            "m",
            "messages[1]",
            "[]",
            "{}",
            "'a' * 100000",
        ],
        [
            "(<e> <+|-|*|/|//|%|**|~|==|!=|LT|LE|GT|GE|in|and|or> <e>)",
            "(<-|+|not > <e>)",
            f"(<e> | {_FILTER}(<some>))",
            f"(<e> | {_FILTER}(<{_NAMED}>=<e>))",
            f"(<e> | <map|select|reject>('{_FILTER}', <e>) | list)",
            f"(<e> | <select|reject>('{_TEST}', <e>) | list)",
            f"(<e> is {_TEST}(<some>))",
            f"<e>.{_METHOD}(<some>)",
            f"<e>.{_METHOD}",
            "<e>[<e>]",
            "<e>[<e>:<e>:<e>]",
            "[<some>]",
            "(<e>, <e>)",
            "{<e>: <e>, 'a': <e>}",
            "(<e> if <e> else <e>)",
            "<range|dict|namespace|m|loop|strftime_now|raise_exception>(<some>)",
            "m(*<e>, **<e>)",
        ],
    ),
    "start": (
        [],
        ["<attack>", "<attack><attack>", "<rounds><attack>", "<rounds>", "<rounds><rounds>{{ ns.x }}{{ ns.y }}{{ ns.x == ns.y }}"],
    ),
    "rounds": (
        [],
        ["{% for i in range(<40|10000>) %}<grow><grow>{% endfor %}", "{% for i in range(<40|10000>) %}<grow><attack>{% endfor %}"],
    ),
    "grow": (
        [],
        ["{% set <kept> = <grown> %}", "{% set ns.<x|y> = [ns.<x|y>, <grown>] %}", "{% if ns.x <==|LT|in> ns.y %}{% endif %}"],
    ),
    "some": ([""], ["<e>", "<e>, <e>", "<e>, <e>, <e>"]),
    "kept": (["ns.x", "ns.y", "ns.z"], []),
    "grown": (
        [],
        [
            "<kept> + <kept>",
            "<kept> ~ <kept>",
            "[<kept>, <kept>]",
            "(<kept>, <kept>)",
            "{'a': <kept>, 'b': <kept>}",
            "[<kept>] * 1000",
            "<kept> * 2",
            "<kept> | list + <kept> | list",
            "<kept>.split('a')",
            "<kept> | upper ~ <kept>",
            "[<kept>, <kept>] | join(<kept>)",
            "'%s%s' % (<kept>, <kept>)",
            "[<kept>, ns.y[1:]]",
            "<kept>.replace('a', <kept>)",
            "<kept> | indent(<kept>)",
            "<kept> | e ~ <kept>",
            "'{0}{0}'.format(<kept>)",
            "dict(a=<kept>, b=<kept>)",
            "<kept> | tojson",
            "<kept>.splitlines()",
            "<kept>[1:]",
        ],
    ),
    "attack": (
        ["{{ <e> }}", "{% set <kept> = <grown> %}", "{% set <kept> = <e> %}"],
        [
            "<attack><attack>",
            "{% for i in range(<3|40|10000>) %}<attack>{% endfor %}",
            "{% for i in <e> if <e> %}<attack>{% endfor %}",
            "{% for i in <e> recursive %}<attack>{{ loop([1, 2]) }}{% endfor %}",
            "{% macro m(a, b=<e>) %}<attack>{{ m(<e>) }}{% endmacro %}{{ m() }}",
            "{% set <kept> %}<attack>{{ <kept> }}{% endset %}",
            f"{{% filter {_FILTER} %}}<attack>{{% endfilter %}}",
            "{% call m() %}<attack>{% endcall %}",
            "{% with big = <e> %}<attack>{% endwith %}",
            "{% if <e> %}<attack>{% else %}<attack>{% endif %}",
        ],
    ),
}
_SYMBOL = re.compile(r"<([^<>]+)>")
_DAMAGE = ("{{", "%}", "(", "'", "\0", "{% for", "|", " not" * 3000, "[" * 3000)


def expand(grammar: Grammar, symbol: str, rng: random.Random, depth: int) -> str:
    """A text that `symbol` can be; below `depth`, branches end as soon as they can."""

    def write(match: re.Match[str]) -> str:
        if match[1] not in grammar:
            word = rng.choice(match[1].split("|"))
            return {"LT": "<", "LE": "<=", "GT": ">", "GE": ">="}.get(word, word)
        return expand(grammar, match[1], rng, depth - 1)

    ends, others = grammar[symbol]
    return _SYMBOL.sub(write, rng.choice(ends if ends and depth <= 0 else ends + others))


def make_ordinary(rng: random.Random) -> str:
    return expand(ORDINARY, "template", rng, rng.randint(3, 6))


def make_hostile(rng: random.Random) -> str:
    template = expand(HOSTILE, "template", rng, rng.randint(2, 7))
    if rng.random() < 0.1:
        at = rng.randrange(len(template))
        template = template[:at] + rng.choice(_DAMAGE) + template[at:]
    return template


# The cases


def reference(template: str) -> str:
    """As jinja renders it where transformers calls it."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    environment.filters["tojson"] = lambda value, **kwargs: json.dumps(value, **{"ensure_ascii": False, **kwargs})
    return environment.from_string(template).render(messages=MESSAGES, add_generation_prompt=True, bos="<s>")


def render(template: str) -> str:
    return cpuspec.chat_template.ChatTemplate(template, {"bos": "<s>"}).render(MESSAGES, True)


def ordinary(rng: random.Random, directory: Path) -> None:
    """A template renders as jinja renders it, and is refused where jinja fails."""
    template = make_ordinary(rng)
    try:
        wanted = reference(template)
    except Exception as error:
        with pytest.raises(TokenizerError):
            render(template)
        raise TokenizerError("as jinja") from error
    try:
        got = render(template)
    except TokenizerError as error:
        raise AssertionError(f"{error}; jinja renders {wanted!r} of {template!r}") from error
    assert got == wanted, template


def hostile(rng: random.Random, directory: Path) -> None:
    """A template renders, or is refused before it takes too much."""
    cpuspec.chat_template._STEPS_AT_LEAST = STEPS
    try:
        render(make_hostile(rng))
    except TokenizerError as error:
        if "MemoryError" in str(error):
            raise AssertionError(str(error)) from error
        raise


@pytest.mark.parametrize("case", [ordinary, hostile])
def test_templates_render_as_jinja_does_or_are_refused_within_limits(case: Case) -> None:
    outcomes = check(case, 300)
    assert min(outcomes["answered"], outcomes["refused"]) > outcomes.total() // 20
