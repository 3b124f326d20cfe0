"""What a grammar allows: text by text against Python's own `re` and `json`, whatever was asked before, and under limits."""

import json
import re
import sys
from typing import Any

import numpy as np
import pytest

from cpuspec.errors import ConfigError
from cpuspec.settings import SamplingParams
from cpuspec.text import GrammarConstraint, Grammars
from cpuspec.text.grammar import Limited, Reasoning
from tests.toys import PieceTokenizer

WORDS = ["ab", "abc", "na", "name", '":', '", "', '{"', " ", "1", "12", "the", "é", "true", "size"]
BYTES = [bytes([byte]) for byte in range(256)]
PIECES = [*BYTES, *(word.encode() for word in WORDS), "<end>", None, "<start>"]
END = PIECES.index("<end>")


def grammars() -> Grammars:
    return Grammars(PieceTokenizer(PIECES, [END]))


def constraint(**settings: Any) -> GrammarConstraint:
    found = grammars().constraint(SamplingParams(**settings))
    assert found is not None
    return found


def text_of(path: list[int]) -> bytes:
    return b"".join(piece for piece in (PIECES[token] for token in path) if isinstance(piece, bytes))


def walk(one: GrammarConstraint, seed: int, most: int = 60) -> list[int] | None:
    """Tokens drawn among the legal ones until the answer ends, the end token among them; None if it does not end soon."""
    rng, path = np.random.default_rng(seed), list[int]()
    while len(path) < most:
        legal = one.legal(path)
        if legal is None:
            return path
        token = int(rng.choice(np.flatnonzero(legal)))
        if token == END:
            return path
        path.append(token)
    return None


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ab", "abc", "é"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 120},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "size", "ok"],
    "additionalProperties": False,
}
GBNF = 'root ::= item ("," item)?\nitem ::= "ab" | [0-9]{2} # a comment'
LARK = 'start: item ("," item)?\nitem: "ab" | /[0-9]{2}/'
GRAMMARS: dict[str, tuple[dict[str, Any], str]] = {  # settings, and what `re` must find
    "regex": ({"regex": r"(name|na)-[0-9]{1,3}( the é)?"}, r"(name|na)-[0-9]{1,3}( the é)?"),
    "choices": ({"choices": ["ab", "abc", "a|b", "the\n*"]}, r"ab|abc|a\|b|the\n\*"),
    "json_schema": ({"json_schema": SCHEMA}, r'\{"name": "(ab|abc|é)", "size": \d+, "ok": (true|false)\}'),
    "gbnf": ({"grammar": GBNF}, r"(ab|\d\d)(,(ab|\d\d))?"),
    "lark": ({"grammar": LARK}, r"(ab|\d\d)(,(ab|\d\d))?"),
}
every_grammar = pytest.mark.parametrize(("settings", "pattern"), GRAMMARS.values(), ids=GRAMMARS)


@every_grammar
def test_every_answer_is_a_text_of_the_grammar(settings: dict[str, Any], pattern: str) -> None:
    one = constraint(**settings)
    texts = {text_of(path).decode() for path in (walk(one, seed) for seed in range(30)) if path is not None}
    assert len(texts) > 1
    for text in texts:
        assert re.fullmatch(pattern, text)
        if "json_schema" in settings:
            found = json.loads(text)
            assert found["name"] in SCHEMA["properties"]["name"]["enum"]
            assert 0 <= found["size"] <= 120


@every_grammar
def test_what_is_legal_depends_on_the_path_alone(settings: dict[str, Any], pattern: str) -> None:
    """Paths in any order, forced tokens asked for or not, illegal paths between: each as a fresh constraint has it."""
    one, rng = constraint(**settings), np.random.default_rng(3)
    walks = [path for path in (walk(constraint(**settings), seed) for seed in range(6)) if path is not None]
    paths = [path[:n] for path in walks for n in range(len(path) + 1)] + [[*path[:1], END, 7] for path in walks] + [[0], [END]]
    for number in rng.permutation(len(paths)).tolist():
        path, fresh = paths[number], constraint(**settings)
        if rng.random() < 0.5:
            one.forced(path)
        mine, expected = one.legal(path), fresh.legal(path)
        assert (mine is None) == (expected is None)
        assert mine is None or expected is None or (mine == expected).all()
        assert one.accepts(path) == fresh.accepts(path)
        assert one.forced(path) == fresh.forced(path)


@every_grammar
def test_the_end_is_legal_exactly_where_the_grammar_accepts(settings: dict[str, Any], pattern: str) -> None:
    one = constraint(**settings)
    for seed in range(8):
        path = walk(one, seed) or []
        for n in range(len(path) + 1):
            whole = re.fullmatch(pattern, text_of(path[:n]).decode(errors="replace")) is not None
            legal = one.legal(path[:n])
            assert one.accepts(path[:n]) == whole
            assert (legal is None or bool(legal[END])) == whole


@every_grammar
def test_forced_tokens_are_the_only_legal_ones(settings: dict[str, Any], pattern: str) -> None:
    one, num_forced = constraint(**settings), 0
    for seed in range(8):
        path = walk(one, seed) or []
        for n in range(len(path) + 1):
            for number, token in enumerate(forced := one.forced(path[:n])):
                legal = one.legal([*path[:n], *forced[:number]])
                assert legal is not None
                assert np.flatnonzero(legal).tolist() == [token]
                num_forced += 1
    assert num_forced or "json_schema" not in settings


def test_names_of_properties_are_forced_as_a_whole() -> None:
    assert text_of(constraint(json_schema=SCHEMA).forced([])) == b'{"name": "'


MARKED = [*PIECES, "<think>", "</think>", "<call>"]
THINK, CLOSE, CALL = range(len(PIECES), len(MARKED))


def marked(prompt: list[int], **settings: Any) -> Any:
    found = Grammars(PieceTokenizer(MARKED, [END])).constraint(SamplingParams(**settings), prompt)
    assert found is not None
    return found


def answers(one: Any, path: list[int]) -> tuple[Any, bool, list[int]]:
    legal = one.legal(path)
    return None if legal is None else np.flatnonzero(legal).tolist(), one.accepts(path), one.forced(path)


@every_grammar
def test_a_grammar_begins_behind_the_reasoning(settings: dict[str, Any], pattern: str) -> None:
    """Every path, in any order, is answered as the rest behind the reasoning is by the grammar alone."""
    plain, text = marked([], **settings), walk(constraint(**settings), 1) or []
    paths = [text[:n] for n in range(len(text) + 1)]
    opened, own = marked([5, THINK, 10], **settings, free_reasoning=True), marked([5], **settings, free_reasoning=True)
    all_but_end = [token for token in range(len(MARKED)) if token != END]
    for number in np.random.default_rng(2).permutation(len(paths)).tolist():
        rest = paths[number]
        for thought in ([], [7, 8], [7, THINK, 8]):
            assert answers(opened, thought) == (all_but_end, False, [])
            assert answers(opened, [*thought, CLOSE, *rest]) == answers(plain, rest)
            assert answers(own, [THINK, *thought]) == (all_but_end, False, [])
            assert answers(own, [THINK, *thought, CLOSE, *rest]) == answers(plain, rest)
        if rest:
            assert answers(own, rest) == answers(plain, rest)
    legal, accepts, _ = answers(plain, [])
    assert answers(own, []) == (sorted([*legal, THINK]), accepts, [])
    for prompt in ([], [THINK, 10, CLOSE, 10], [THINK, *range(20)]):
        is_own = CLOSE not in prompt
        assert (THINK in answers(marked(prompt, **settings, free_reasoning=True), [])[0]) == is_own


def test_reasoning_that_is_known_to_be_open_may_be_of_any_length() -> None:
    prompt, params = [THINK, *range(20)], SamplingParams(regex="ab", free_reasoning=True)
    grammars = Grammars(PieceTokenizer(MARKED, [END]))
    known, unknown = (grammars.constraint(params, prompt, within) for within in ("</think>", ""))
    assert len(answers(known, [])[0]) == len(MARKED) - 1
    assert len(answers(unknown, [])[0]) < 5


def test_texts_that_never_come_may_come_in_reasoning() -> None:
    """One of a single token, and one of two."""
    bad = {(3,), (4, 5)}
    for opens, begun in ((None, []), (THINK, [THINK])):
        one = Limited(None, len(MARKED), bad=bad, reasoning=Reasoning(CLOSE, opens))
        for path, is_free in ((begun, True), ([*begun, 4], True), ([*begun, CLOSE], False), ([*begun, CLOSE, 4], False)):
            legal = one.legal(path)
            assert legal is not None
            assert legal[3] == is_free
            assert legal[5] == (is_free or path[-1] != 4)
    legal = Limited(None, len(MARKED), bad=bad, reasoning=Reasoning(CLOSE, THINK)).legal([7])
    assert legal is not None
    assert not legal[3], "the answer has no reasoning"


@every_grammar
def test_a_grammar_holds_behind_its_trigger_until_its_text_is_whole(settings: dict[str, Any], pattern: str) -> None:
    plain, one = marked([], **settings), marked([], **settings, grammar_trigger="<call>")
    walks = [walk(constraint(**settings), seed) for seed in range(9)]
    whole = [text for text in walks if text and plain.legal(text) is None]
    assert whole
    free = (list(range(len(MARKED))), True, [])
    for path in [[], [7, END], *([CALL, *text, *rest] for text in whole for rest in ([], [7, 8], text))]:
        assert answers(one, path) == free
        for text in whole[:3]:
            for n in range(len(text)):
                legal, _, forced = answers(plain, text[:n])
                assert answers(one, [*path, CALL, *text[:n]]) == (legal, False, forced)
    with pytest.raises(ConfigError, match="not a regular expression"):
        marked([], **settings, grammar_trigger="(<tool>")


def test_special_tokens_are_never_legal_and_cannot_be_named() -> None:
    legal = constraint(regex=r"(?s).*").legal([])
    assert legal is not None
    assert not legal[END + 1 :].any()
    for grammar in ('start: <start> "a"', "start: <[258]>", f"start: <[{END}]>", f'start: "a" | <[{END + 2}]> "b"'):
        try:
            legal = constraint(grammar=grammar).legal([])
        except ConfigError:
            continue
        assert legal is not None
        assert not legal[END:].any()


def test_a_model_without_an_end_token_ends_where_the_grammar_does() -> None:
    one = Grammars(PieceTokenizer(BYTES)).constraint(SamplingParams(regex="ab+"))
    assert one is not None
    assert one.legal([97]) is not None
    legal = one.legal([97, 98])
    assert legal is not None
    assert np.flatnonzero(legal).tolist() == [98]
    assert one.accepts([97, 98])


def test_bytes_that_a_normalizer_would_change_stay_reachable() -> None:
    """The tokenizer writes é in one character whatever it is given; the grammar wants two."""

    class Composing(PieceTokenizer):
        def encode_parts(self, parts: Any, continues: bool = False) -> list[int]:
            return super().encode_parts([part.replace("e\u0301".encode(), "é".encode()) for part in parts], continues)

    one = Grammars(Composing(PIECES, [END])).constraint(SamplingParams(regex="the e\u0301(1|2)"))
    assert one is not None
    path = walk(one, 1)
    assert path is not None
    assert text_of(path)[:-1] == "the e\u0301".encode()


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


HOSTILE: dict[str, dict[str, Any]] = {
    "not JSON": {"json_schema": "{"},
    "no schema": {"json_schema": "3"},
    "a schema of nothing": {"json_schema": {"enum": []}},
    "a deep schema": {"json_schema": nested(300)},
    "a schema of itself": {"json_schema": {"$ref": "#"}},
    "a schema elsewhere": {"json_schema": {"$ref": "https://example.com/schema.json"}},
    "a schema in a file": {"json_schema": {"$ref": "file:///etc/hostname"}},
    "a schema of too many cases": {
        "json_schema": {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(12)]}
    },
    "a huge schema": {"json_schema": {"const": "a" * 100_000}},
    "an open bracket": {"regex": "(a"},
    "a look-ahead": {"regex": "(?=a)b"},
    "a back-reference": {"regex": r"(a)\1"},
    "deep brackets": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "an impossible text": {"regex": r"[^\s\S]"},
    "the empty text": {"regex": ""},
    "a billion letters": {"regex": "((a{1000}){1000}){1000}"},
    "a grammar of itself": {"grammar": "start: start"},
    "no start": {"grammar": "a ::= b"},
    "deep Lark": {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
    "deep GBNF": {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
    "many rules of GBNF": {"grammar": "\n".join(f"r{i} ::= r{i + 1}" for i in range(1000))},
    "doubled terminals": {"grammar": "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(40)) + 'A40: "x"'},
    "many patterns at once": {"json_schema": {"allOf": [{"type": "string", "pattern": f"[a-z]{{{n},}}"} for n in range(60)]}},
    "an import": {"grammar": "%import .secret.KEY\nstart: KEY"},
    "half a character": {"regex": "\ud800"},
}


@pytest.mark.parametrize("settings", HOSTILE.values(), ids=HOSTILE)
def test_a_grammar_that_cannot_be_used_is_a_clear_error(settings: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"(schema|expression|grammar) (cannot be|allows no|has \d+ bytes|takes too much|was not compiled within)"
    ) as caught:
        constraint(**settings)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


ENDLESS: dict[str, dict[str, Any]] = {
    "letters for ever": {"grammar": 'start: "a" start'},
    "doubled rules": {"grammar": "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(40)) + 'a40: "x"'},
    "a million values": {"json_schema": {"type": "array", "items": {"const": 1}, "minItems": 1_000_000}},
    "a hundred thousand letters": {"regex": "a{100000}"},
    "every way to split": {"grammar": 'start: s\ns: s s | s s s | "a"'},
    "many states": {"regex": "[ab]*a[ab]{200}"},
}


@pytest.mark.parametrize("settings", ENDLESS.values(), ids=ENDLESS)
def test_a_grammar_without_a_near_end_allows_something_or_ends(settings: dict[str, Any]) -> None:
    """Steps have limits: a path either has legal tokens or is at its end, and says so each time it is asked."""
    try:
        one = constraint(**settings)
    except ConfigError:
        return
    path: list[int] = []
    for _ in range(20):
        legal = one.legal(path)
        if legal is None:
            assert one.legal(path) is None
            break
        path.append(int(np.flatnonzero(legal)[0]))
        one.forced(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"regex": "a", "choices": ["a"]}, "keeps to one grammar; got regex and choices"),
        ({"json_schema": {}, "grammar": "start: "}, "keeps to one grammar; got json_schema and grammar"),
        ({"regex": "a", "ignore_eos": True}, "leave out ignore_eos"),
        ({"choices": ["a"], "logit_bias": {1: -np.inf}}, "-inf may forbid"),
        ({"json_schema": {"a": {1}}}, "json_schema must be"),
        ({"regex": 3}, "regex must be"),
        ({"choices": [""]}, "choices must be"),
        ({"grammar_trigger": "<tool_call>"}, "give json_schema, regex, choices or grammar"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**settings)


def test_a_schema_is_the_same_as_a_dict_and_as_text_and_params_stay_hashable() -> None:
    one, two = SamplingParams(json_schema=SCHEMA), SamplingParams(json_schema=json.dumps(SCHEMA))
    assert one == two
    assert hash(one) == hash(two)
    assert grammars().constraint(SamplingParams()) is None


def test_without_llguidance_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"cpuspec\[grammar\]"):
        constraint(regex="a")
