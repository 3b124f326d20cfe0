"""Every field of every body has a bound: its largest value is taken, and one more is refused by the field's name."""

import json
import types
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest

from cpuspec import LLM, SamplingParams
from cpuspec.batch.answer import answer_lines
from cpuspec.batch.lines import Line
from cpuspec.server import completions, embeddings, llama_server, messages, native, ollama, responses, schema
from cpuspec.server.bounds import MOST_HOLDERS, MOST_VALUES, Most, Range, Unread, size_of
from cpuspec.server.errors import RequestError
from cpuspec.server.fields import _VALUES, SAME_NAMES
from cpuspec.server.schema import Body
from tests.server.running import Running, load, serving, with_free_loop

USER = {"role": "user", "content": "the cat sat"}
# Each endpoint with its body, and a body that is answered.
ENDPOINTS: dict[str, tuple[type[Body], dict[str, Any]]] = {
    "/v1/chat/completions": (schema.ChatBody, {"messages": [USER], "max_tokens": 3}),
    "/v1/completions": (schema.CompletionBody, {"prompt": "the cat", "max_tokens": 3}),
    "/v1/responses": (responses.ResponsesBody, {"input": "the cat", "max_output_tokens": 3}),
    "/v1/messages": (messages.MessagesBody, {"messages": [USER], "max_tokens": 3}),
    "/v1/messages/count_tokens": (messages.CountBody, {"messages": [USER]}),
    "/v1/embeddings": (embeddings.EmbeddingsBody, {"input": "the cat"}),
    "/v1/rerank": (embeddings.RerankBody, {"query": "the cat", "documents": ["a dog", "the mat"]}),
    "/v1/score": (embeddings.ScoreBody, {"text_1": "the cat", "text_2": ["a dog", "the mat"]}),
    "/api/chat": (ollama.OllamaChatBody, {"messages": [USER], "max_tokens": 3}),
    "/api/generate": (ollama.GenerateBody, {"prompt": "the cat", "max_tokens": 3}),
    "/api/embed": (ollama.EmbedBody, {"input": "the cat"}),
    "/api/embeddings": (ollama.EmbeddingsBody, {"prompt": "the cat"}),
    "/api/show": (ollama.NameBody, {"model": "tiny"}),
    "/api/pull": (ollama.NameBody, {"model": "tiny"}),
    "/completion": (llama_server.CompletionBody, {"prompt": "the cat", "n_predict": 3}),
    "/infill": (llama_server.InfillBody, {"input_prefix": "the", "input_suffix": "cat", "n_predict": 3}),
    "/tokenize": (native.TokenizeBody, {"content": "the cat"}),
    "/detokenize": (native.DetokenizeBody, {"tokens": [5]}),
    "/apply-template": (native.TemplateBody, {"messages": [USER]}),
    "/v1/load_lora_adapter": (native.AdapterBody, {"lora_name": "one"}),
    "/slots/0?action=save": (native.SlotBody, {"filename": "one"}),
}
WITH_LARGE = {"/v1/chat/completions", "/v1/completions", "/detokenize", "/v1/embeddings"}  # bodies of megabytes, over HTTP
LINES = {"/v1/chat/completions", "/v1/completions"}  # what a line of a batch may ask
OF_TOKENS = {name for names in SAME_NAMES for name in names}
SETTINGS = {one.name: one.metadata["kind"] for one in fields(SamplingParams)}


def bounds_of(annotation: Any, metadata: tuple[Any, ...] = (), name: str = "") -> list[Any]:
    """The bounds of a field and of what it may be instead; a part that is a body has those of its fields.

    Fails for a text, a list, an object or a number without a bound.
    """
    found = [one for one in metadata if isinstance(one, Most | Range | Unread)]
    if get_origin(annotation) is Annotated:
        return bounds_of(get_args(annotation)[0], (*metadata, *get_args(annotation)[1:]), name)
    if found:
        return [(one, annotation) for one in found]
    if get_origin(annotation) in (Union, types.UnionType):
        return [bound for one in get_args(annotation) for bound in bounds_of(one, (), name)]
    if annotation in (bool, type(None)) or get_origin(annotation) is Literal:
        return []
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return []
    if name in SETTINGS and SETTINGS[name].low is not None:
        return [(Range(SETTINGS[name].low, SETTINGS[name].high), annotation)]
    raise AssertionError(f"{name} has no bound: {annotation}")


def fields_of(body: type[Body], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """The place, the bound and the type of each field, of parts, too."""
    for name, one in body.model_fields.items():
        place = (*path, one.alias or name)
        for bound, annotation in bounds_of(one.annotation, tuple(one.metadata), name):
            yield place, bound, annotation
        part = schema.body_in(one.annotation)
        if part is not None:
            yield from fields_of(part, place)


def values(bound: Any, annotation: Any, name: str) -> list[tuple[Any, Any]]:
    """Pairs of the largest value of a bound, and one beyond it; of a number the smallest, too, unless lower ones mean something."""
    if isinstance(bound, Range):
        whole = annotation is int or int in get_args(annotation)
        highest = (bound.high, bound.high + 1 if whole or bound.high <= 1 else bound.high * 2)
        if name in SAME_NAMES[0]:  # a number beyond all contexts is no limit
            return [(bound.high, 10**400)]
        lowest = (bound.low, bound.low - 1 if bound.low > -1e6 else bound.low * 2)
        return [highest] if name in _VALUES or name in OF_TOKENS else [highest, lowest]
    kinds = bare(annotation)
    found: list[tuple[Any, Any]] = []
    if str in kinds:
        found.append(("a" * bound.size, "a" * (bound.size + 1)))
    if list in kinds:
        item: Any = 1 if "int" in str(annotation) else {} if "dict" in str(annotation) else "a"
        if bound.items * (1 + size_of(item)) <= bound.size:
            found.append(([item] * bound.items, [item] * (bound.items + 1)))
        if "str" in str(annotation):
            found.append((["a" * (bound.size - 1)], ["a" * bound.size]))
    if dict in kinds:
        found.append(({"a": "a" * (bound.size - 2)}, {"a": "a" * (bound.size - 1)}))
        if bound.items < 1 << 14:
            listed = {str(number): 1 for number in range(bound.items + 1)}
            found.append((dict(list(listed.items())[:-1]), listed))
    assert found or annotation is Any, annotation
    return found


CASES = [
    pytest.param(path, place, bound, annotation, id=f"{path} {'.'.join(place)} {number}")
    for path, (body, _) in ENDPOINTS.items()
    for number, (place, bound, annotation) in enumerate(fields_of(body))
]


# Fields that a part needs beside the one that is tried.
BESIDE = {"prediction": {"type": "content", "content": "a"}, "lora": {"id": 0, "scale": 1.0}}


def with_field(body: dict[str, Any], place: Sequence[str], value: Any, listed: bool = False) -> dict[str, Any]:
    """The body with a value in this place; parts in a list are its only ones."""
    name, *inner = place
    if inner:
        part = body[name] if isinstance(body.get(name), dict) else BESIDE.get(name, {"text": "a"} if listed else {})
        value = [with_field(part, inner, value)] if listed else with_field(part, inner, value)
    return {**body, name: value}


def test_every_body_of_the_server_is_tested() -> None:
    modules = (completions, embeddings, llama_server, messages, native, ollama, responses, schema)
    bodies = {one for module in modules for one in vars(module).values() if isinstance(one, type) and issubclass(one, Body)}
    asked = {body for body, _ in ENDPOINTS.values()}
    parts = {
        one for body in asked for one in (*body.__mro__, *map(schema.body_in, (f.annotation for f in body.model_fields.values())))
    }
    assert bodies - parts - {Body} == set()


@pytest.fixture(scope="module")
def running(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    saved = str(tmp_path_factory.mktemp("slots"))
    options: dict[str, Any] = {"slot_save_path": saved, "lora_dir": saved, "pooling": "mean", "max_body_bytes": 1 << 25}
    with with_free_loop(), serving(lambda: load(path, context_length=512), **options) as found:
        yield found


@pytest.mark.parametrize(("path_", "place", "bound", "annotation"), CASES)
def test_a_field_takes_its_largest_value_and_no_more(
    running: Running, path_: str, place: tuple[str, ...], bound: Any, annotation: Any
) -> None:
    body = ENDPOINTS[path_][1]
    if isinstance(bound, Unread):
        assert running.post(path_, json={**body, place[0]: ["a" * 100_000] * 10}).status_code < 500
        return
    part = ENDPOINTS[path_][0].model_fields.get(place[0])
    listed = part is not None and "list[" in str(part.annotation)
    for largest, beyond in values(bound, annotation, place[-1]):
        if path_ not in WITH_LARGE and size_of(largest if isinstance(largest, str | list | dict) else 0) > 1 << 17:
            with pytest.raises(RequestError, match=rf"{place[0]}.* takes at most \d+ (items|characters), got "):
                ENDPOINTS[path_][0].of_fields(with_field(body, place, beyond, listed))
            with suppress(RequestError):
                assert ENDPOINTS[path_][0].of_fields(with_field(body, place, largest, listed))
            continue
        taken = running.post(path_, json=with_field(body, place, largest, listed))
        assert taken.status_code < 500, taken.text
        assert "takes at most" not in taken.text or place[-1] not in taken.text.partition(" takes at most")[0], taken.text
        refused = running.post(path_, json=with_field(body, place, beyond, listed))
        said = refused.json()["error"]
        said = said if isinstance(said, str) else said["message"]
        assert refused.status_code == 400, said
        assert any(name in said for name in place), said
        assert any(word in said for word in ("takes at most", "must be")), said
        assert ", got " in said, said


def bare(annotation: Any) -> list[Any]:
    """The types that a field may have, without what else is said of them."""
    if get_origin(annotation) is Annotated:
        return bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [found for one in get_args(annotation) for found in bare(one)]
    return [get_origin(annotation) or annotation]


@pytest.mark.parametrize("path_", sorted(LINES))
def test_a_line_of_a_batch_has_the_bounds_of_the_server(llm: LLM, path_: str) -> None:
    kind, body = ENDPOINTS[path_]
    for place, bound, annotation in fields_of(kind):
        if isinstance(bound, Unread) or len(place) > 1 or place[0] in ("prompt_logprobs", "suffix", "best_of"):
            continue
        _, beyond = values(bound, annotation, place[0])[0]
        line = {"custom_id": "a", "method": "POST", "url": path_, "body": {**body, place[0]: beyond}}
        (answer,) = answer_lines(llm, iter([Line(1, json.dumps(line).encode(), 0)]), {})
        assert answer["response"]["status_code"] == 400, (place, answer)
        said = answer["response"]["body"]["error"]["message"]
        assert place[0] in said, said
        assert ", got " in said, said


def test_a_field_without_a_bound_is_found() -> None:
    class Unbounded(Body):
        text: str

    with pytest.raises(AssertionError, match="text has no bound"):
        list(fields_of(Unbounded))


def test_a_body_of_too_many_values_is_refused_before_it_is_whole(running: Running) -> None:
    for body in (
        b'{"prompt": [' + b"1," * MOST_VALUES + b"1]}",
        b'{"prompt": ' + b"[" * 100_000,
        b'{"a": {' + b'"a":1,' * MOST_VALUES,
        b'{"a": [' + b"[]," * MOST_HOLDERS + b"[]]}",
    ):
        reply = running.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 400
