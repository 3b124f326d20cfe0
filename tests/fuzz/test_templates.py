"""Templates that a grammar makes, in a child process with a limit of memory and a deadline.

Hostile ones are rendered or refused. See `drive`.
"""

import random
import re
from pathlib import Path

from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS

import cpuspec.text.chat_template
from tests.fuzz.drive import check

SECONDS = 0.1  # less than in use: the time of a run, not what it can find, depends on it
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


_NAMED = "attribute|indent|separators|default|reverse|d|count|width|precision|boolean"
_FILTER = f"<{'|'.join(sorted(DEFAULT_FILTERS))}>"
_TEST = f"<{'|'.join(sorted(filter(str.isidentifier, DEFAULT_TESTS)))}>"
_STR_METHODS = "|".join(name for name in dir(str) if not name.startswith("_"))
_METHOD = f"<{_STR_METHODS}|items|keys|values|get|index|count|cycle|changed|length|x|mro>"
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


def make_hostile(rng: random.Random) -> str:
    template = expand(HOSTILE, "template", rng, rng.randint(2, 7))
    if rng.random() < 0.1:
        at = rng.randrange(len(template))
        template = template[:at] + rng.choice(_DAMAGE) + template[at:]
    return template


# The cases


def render(template: str) -> str:
    return cpuspec.text.chat_template.ChatTemplate(template, {"bos": "<s>"}).render(MESSAGES, True)


def hostile(rng: random.Random, directory: Path) -> None:
    """A template renders, or is refused before it takes too much."""
    cpuspec.text.chat_template._SECONDS_AT_LEAST = SECONDS
    render(make_hostile(rng))


def test_templates_render_or_are_refused_within_limits() -> None:
    outcomes = check(hostile, 60)
    assert min(outcomes["answered"], outcomes["refused"]) > outcomes.total() // 20
