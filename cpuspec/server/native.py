"""Endpoints besides the protocols': state and metrics for operators, text and tokens, adapters, and slots of the prefix cache."""

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from cpuspec import __version__
from cpuspec.engine.lora import LoadedAdapter
from cpuspec.errors import CacheError, CheckpointError
from cpuspec.metrics import now_s
from cpuspec.server.bodies import BodyRoute
from cpuspec.server.bounds import Ids, Listed, Most, Name, Object, Text
from cpuspec.server.chat import chat_prompt
from cpuspec.server.errors import ForbiddenError, NotFoundError, NotSupportedError, RequestError
from cpuspec.server.figures import token_text
from cpuspec.server.gate import context_of, model_of
from cpuspec.server.model import ServedModel
from cpuspec.server.observe import METRICS_TYPE, metrics_text
from cpuspec.server.replies import json_response, time_text
from cpuspec.server.runner import in_own_thread
from cpuspec.server.schema import Body, Choice, Ending, LoraScale
from cpuspec.server.server import Server, server_of

router = APIRouter(route_class=BodyRoute)

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


class TokenizeBody(Ending):
    content: Text | None = None
    prompt: Text | None = None  # vLLM's name for it
    messages: Listed | None = None
    tools: Listed | None = None
    add_special: bool = False
    parse_special: bool = False
    with_pieces: bool = False
    model: Name | None = None


class DetokenizeBody(Body):
    tokens: Ids
    model: Name | None = None


class TemplateBody(Ending):
    messages: Listed
    tools: Listed | None = None
    tool_choice: Choice | None = None
    chat_template_kwargs: Object | None = None
    model: Name | None = None


class AdapterBody(Body):
    lora_name: Name
    lora_path: Annotated[str, Most(1 << 12)] | None = None
    load_inplace: bool = False
    model: Name | None = None


class SlotBody(Body):
    filename: Name


@router.get("/livez")
@router.head("/livez", include_in_schema=False)
async def alive(request: Request) -> Response:
    """Liveness: 200 as long as the process answers, also while it loads or drains."""
    return json_response({"status": "ok", "state": server_of(request).state})


@router.get("/health")
@router.head("/health", include_in_schema=False)
async def health(request: Request) -> Response:
    """200 when requests are answered, else 503 with the reason. Scripts written for llama-server and vLLM wait for the 200."""
    server_of(request).check_ready()
    return json_response({"status": "ok"})


@router.get("/ready")
@router.head("/ready", include_in_schema=False)
async def ready(request: Request) -> Response:
    """200 when requests are answered, else 503."""
    server = server_of(request)
    status = "failed" if server.has_failed else server.state
    return json_response({"status": status}, 200 if status == "ready" else 503)


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """Every model under each of its names, once as OpenAI's clients read it and once as Codex does."""
    server = server_of(request)
    server.check_ready()
    rows = [_model_row(server, name) for name in server.names]
    rows += [_adapter_row(server, one, model) for model in server.models.values() for one in model.llm.adapters]
    if "anthropic-version" in request.headers:
        shown = list(map(_for_anthropic, rows))
        return json_response({"data": shown, "has_more": False, "first_id": shown[0]["id"], "last_id": shown[-1]["id"]})
    return json_response({"object": "list", "data": rows, "models": [{"slug": row["id"], "model": row["id"]} for row in rows]})


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> Response:
    """One model."""
    server = server_of(request)
    server.check_ready()
    own, adapter = server.split_name(name)
    found = server.models.get(server.own_name(own))
    if adapter:
        for one in found.llm.adapters if found else ():
            if one.name == adapter and found:
                return _one_model(request, _adapter_row(server, one, found) | {"id": name})
        raise NotFoundError(f"the model {own} has no loaded adapter {adapter[:200]!r}")
    return _one_model(request, _model_row(server, name))


def _one_model(request: Request, row: Mapping[str, Any]) -> Response:
    return json_response(_for_anthropic(row) if "anthropic-version" in request.headers else row)


def _for_anthropic(row: Mapping[str, Any]) -> dict[str, Any]:
    """A model in a list as Anthropic's clients read it; they send their API's version."""
    return {"type": "model", "id": row["id"], "display_name": row["id"], "created_at": time_text(row["created"])}


def _adapter_row(server: Server, one: LoadedAdapter, model: ServedModel) -> dict[str, Any]:
    """An adapter in a list, as vLLM shows it. A client does not learn in which directory it is."""
    about = {"root": one.adapter.path.name, "parent": server.shown_name(model.name), "status": {"value": "loaded"}}
    return {"id": one.name, "object": "model", "created": server.created, "owned_by": "cpuspec", **about}


def _model_row(server: Server, name: str) -> dict[str, Any]:
    """A model in a list; its figures once it is loaded."""
    found = server.models.get(server.own_name(name))
    row = {"id": name, "object": "model", "created": server.created, "owned_by": "cpuspec"}
    if found is None:
        return row | {"status": {"value": "unloaded"}}
    llm = found.llm
    config, length = llm.config, llm.context_length
    meta = {
        **{"n_ctx": length, "n_ctx_train": config.context_length, "n_vocab": config.vocab_size, "n_embd": config.hidden_size},
        **{"n_params": llm.num_parameters, "architecture": config.architecture},
    }
    # The context's length as vLLM's clients read it, and as OpenRouter's.
    return row | {"status": {"value": "loaded"}, "max_model_len": length, "context_length": length, "meta": meta}


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Token ids of a text, or of a conversation as the model gets it."""
    found = await model_of(request, body.model)
    tokenizer = found.llm.tokenizer

    def encoded() -> Response:
        if body.messages is not None:
            ids = chat_prompt(found, body.messages, body.tools or (), ending=body).ids
        else:
            text = body.content if body.content is not None else body.prompt or ""
            found.check_text(len(text))
            ids = tokenizer.encode(text, body.add_special, body.parse_special)
        tokens = [{"id": one, "piece": token_text(tokenizer, one)[0]} for one in ids] if body.with_pieces else ids
        return json_response({"tokens": tokens, "count": len(ids), "max_model_len": found.llm.context_length})

    return await found.in_worker(context_of(request).client, encoded)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """The text of token ids, special tokens included."""
    found = await model_of(request, body.model)
    text = await found.in_worker(context_of(request).client, found.llm.tokenizer.decode, body.tokens, skip_special=False)
    return json_response({"content": text, "prompt": text})


@router.post("/apply-template")
async def apply_template(body: TemplateBody, request: Request) -> Response:
    """The text that the model gets for a conversation."""
    found = await model_of(request, body.model)

    def text() -> str:
        variables = body.chat_template_kwargs
        ids = chat_prompt(found, body.messages, body.tools or (), body.tool_choice, variables, ending=body).ids
        return found.llm.tokenizer.decode(ids, skip_special=False)

    return json_response({"prompt": await found.in_worker(context_of(request).client, text)})


def _awake(request: Request) -> tuple[str, ServedModel | None]:
    """The own name of the model that a request's query names, and the model; None where it sleeps, or was not loaded yet.

    Nobody who watches a model wakes it, or keeps it awake.
    """
    server = server_of(request)
    server.check_ready()
    name = server.own_name(server.split_name(request.query_params.get("model"))[0])
    return name, server.models.get(name)


@router.get("/props")
async def props(request: Request) -> Response:
    """The model and the settings that requests meet. Of a model that sleeps only those that need no model."""
    server = server_of(request)
    name, found = _awake(request)
    most = ("max_new_tokens", "max_waiting", "max_body_bytes", "max_request_s")
    limits: dict[str, Any] = {one: getattr(server.config, one) for one in most}
    row = {
        "model": name,
        "model_alias": server.shown_name(name),
        "build_info": f"cpuspec {__version__}",
        "is_sleeping": found is None,  # llama-server's name
    }
    if found is None:
        return json_response({**row, "limits": limits})
    llm = found.llm
    row |= {
        "architecture": llm.config.architecture,
        "total_slots": llm.max_sequences,
        "context_length": llm.context_length,
        "chat_template": llm.tokenizer.chat_template,
        "tool_format": found.tool_use.form.name,
        "fills_in_the_middle": found.fill is not None,
        "draft": str(llm.spec),
        "threads": llm.threads,
        "default_generation_settings": {"n_ctx": llm.context_length, "params": llm.sampling_defaults.fields()},
    }
    limits |= {"max_prompt_tokens": found.max_prompt_tokens, "max_new_tokens": limits["max_new_tokens"] or llm.context_length}
    return json_response({**row, "limits": limits})


@router.get("/lora-adapters")
async def adapters(request: Request) -> Response:
    """The adapters with their scales for requests that name none, as llama-server lists them."""
    found = await model_of(request, request.query_params.get("model"))
    rows = [{"id": one.id, "path": one.adapter.path.name, "scale": one.scale, "name": one.name} for one in found.llm.adapters]
    return json_response(rows)


@router.post("/lora-adapters")
async def rescale_adapters(body: Annotated[list[LoraScale], Most(1 << 12, 256)], request: Request) -> Response:
    """Set these scales, as llama-server does; those of other adapters become 0."""
    found = await model_of(request, request.query_params.get("model"))
    if found.has_keys and server_of(request).config.lora_dir is None:
        raise ForbiddenError("scales are for all clients, which have keys of their own; start the server with --lora-dir DIR")
    found.llm.adapters.rescale({one.id: one.scale for one in body})
    return json_response({"success": True})


@router.post("/v1/load_lora_adapter")
async def load_adapter(body: AdapterBody, request: Request) -> Response:
    """Load an adapter for requests that name it. vLLM's fields, and its answer; the path lies in --lora-dir."""
    found, directory = await model_of(request, body.model), _lora_dir(request)
    if not body.lora_name or body.lora_name in server_of(request).names:
        raise RequestError("lora_name is the name of a new adapter, and not that of a model", "lora_name")
    path = _inside(directory, body.lora_path or "")
    try:
        await in_own_thread(partial(found.llm.load_adapter, path, body.lora_name, replaces=body.load_inplace))
    except CheckpointError as error:
        raise RequestError(str(error).replace(str(directory), "--lora-dir"), "lora_path") from None
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_adapter(body: AdapterBody, request: Request) -> Response:
    """Forget an adapter, as vLLM does. Requests that use it go on."""
    _lora_dir(request)
    found = await model_of(request, body.model)
    if body.lora_name not in found.llm.adapters:
        raise NotFoundError(f"no adapter is called {body.lora_name[:200]!r}", "lora_name")
    found.llm.adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _inside(directory: Path, text: str) -> Path:
    """What a request's path names in a directory. Raises RequestError, also for what is elsewhere."""
    with suppress(OSError, ValueError):  # of paths that are too long, or have a null byte
        path = (directory / text).resolve()
        if directory in path.parents and path.exists():
            return path
    raise RequestError("lora_path names no adapter in the server's --lora-dir; wanted a path in it, as my-adapter", "lora_path")


def _lora_dir(request: Request) -> Path:
    directory = server_of(request).config.lora_dir
    if directory is None:
        raise ForbiddenError("this server loads no adapters on request; start it with --lora-dir DIR, or give it --lora-modules")
    return Path(directory).resolve()


@router.get("/slots")
async def slots(request: Request) -> Response:
    """The slots, and the requests that run in them, without texts. A model that sleeps has none."""
    _, found = _awake(request)
    if found is None:
        return json_response([])
    rows = []
    for slot in found.slots:
        row: dict[str, Any] = {"id": slot.number, "n_ctx": found.llm.context_length, "is_processing": slot.meter is not None}
        if slot.meter:
            tokens = {"prompt_tokens": slot.meter.num_prompt_tokens, "new_tokens": slot.meter.num_new_tokens}
            row |= {"request_id": slot.request_id, **tokens}
        rows.append(row)
    return json_response(rows)


@router.post("/slots/{number}")
async def change_slot(number: int, action: str, request: Request, body: SlotBody | None = None) -> Response:
    """Save or restore what a slot's last request left in the prefix cache, or empty the cache, as llama-server spells it."""
    found, directory = await model_of(request, request.query_params.get("model")), server_of(request).config.slot_save_path
    if directory is None:
        raise NotSupportedError("this server saves no slots; start it with --slot-save-path DIR")
    slot = next((one for one in found.slots if one.number == number), None)
    if slot is None:
        raise RequestError(f"there is no slot {str(number)[:20]}; they are 0 to {len(found.slots) - 1}", "id_slot")
    client = context_of(request).client
    if action == "erase":
        if found.has_keys:
            raise ForbiddenError("erase empties the prefix cache of all clients, which have keys of their own")
        num_erased, slot.tokens = len(slot.tokens), []
        await in_own_thread(partial(found.llm.forget_prefixes, waits=False))
        return json_response({"id_slot": number, "n_erased": num_erased})
    if action not in ("save", "restore"):
        raise RequestError(f"action is save, restore or erase, got {action[:40]!r}", "action")
    name = body.filename if body else ""
    if not _FILE_NAME.fullmatch(name):
        raise RequestError("filename must be a plain name of letters, digits, dots, dashes and underscores", "filename")
    # Clients with keys of their own have files of their own.
    path, begin_s = Path(directory) / (f"{client}-{name}" if found.has_keys else name), now_s()
    if action == "save" and not (slot.tokens and (slot.client == client or not found.has_keys)):
        raise RequestError(f"slot {number} has computed nothing yet, or its last request was another key's", "id_slot")
    llm = found.llm
    try:
        if action == "save":
            done = await in_own_thread(partial(llm.save_prefix, slot.tokens.copy(), path, slot.salt))
        else:
            done = await in_own_thread(partial(llm.restore_prefix, path, found.salt(client)))
    except CacheError as error:  # a client must not learn where the directory is
        raise RequestError(str(error).replace(str(path), name), "filename") from None
    counts = ("n_saved", "n_written") if action == "save" else ("n_restored", "n_read")
    figures = dict(zip(counts, (done, path.stat().st_size), strict=True))
    times = {f"{action}_ms": round(1000 * (now_s() - begin_s), 3)}
    return json_response({"id_slot": number, "filename": name, **figures, "timings": times})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    models = list(server_of(request).models.values())
    for one in models:
        await one.ask_prefixes()
    text = metrics_text(family for one in models for family in one.metrics.registry.collect())
    return Response(text, media_type=METRICS_TYPE)
