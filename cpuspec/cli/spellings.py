"""Options of llama.cpp, vLLM and Ollama on our command line: another name of one of ours, or a sentence that says what to do.

`translated` rewrites a command line before it is read. Options of our own come first, so nothing here changes what they mean.
Sources: `--help` of llama-cli and llama-server b11434, vLLM's `vllm serve --help` (0.12), Ollama's README.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer

LLAMA, VLLM, OLLAMA = "llama.cpp", "vLLM", "Ollama"


@dataclass(frozen=True)
class Spelling:
    """An option of another program.

    ours: the option that it stands for, "PROMPT" for an argument, "" for none. value: whether a value follows it.
    read: the value in our spelling; None for one that has none, "" for one that is our default.
    part: which part of a draft spec it is, where several options make one `--draft`.
    why: what to do where it stands for nothing. passes: it is left out with a note, else it is an error.
    """

    program: str
    names: tuple[str, ...]
    ours: str = ""
    value: bool = True
    read: Callable[[str], str | None] = str
    part: str = ""
    why: str = ""
    passes: bool = False


_KV = {"f16": "f16", "q8_0": "int8", "int8": "int8", "auto": "f16"}
# llama.cpp's ways to draft, by our drafters; "" for one of a model that another option names.
_METHODS = {
    **dict.fromkeys(("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"), "ngram"),
    **dict.fromkeys(("draft-simple", "draft-eagle3", "draft-dflash", "draft-dspark"), ""),
    "draft-mtp": "mtp",
    "none": "none",
}
_KIND, _MODEL, _TOKENS, _CONFIDENCE = "KIND", "MODEL", "MODEL@N", "MODEL@:P"
_BY_ITSELF = "the chat template says it"
_BY_FILES = "the model's files say it"
_HERE = "this is how it is here"
_KEPT = "prefixes are kept by themselves"
_ON_CPU = "everything runs on the CPU"


def _left_out(program: str, *names: str, why: str, value: bool = True) -> Spelling:
    return Spelling(program, names, value=value, why=why, passes=True)


def _flag(program: str, *names: str, why: str) -> Spelling:
    return _left_out(program, *names, why=why, value=False)


SPELLINGS = (
    Spelling(LLAMA, ("-p", "--prompt"), "PROMPT"),
    Spelling(LLAMA, ("--predict", "--n-predict"), "--max-tokens"),
    Spelling(LLAMA, ("-c", "--ctx-size"), "--context-length", read=lambda value: "" if value == "0" else value),
    Spelling(LLAMA, ("-t",), "--threads"),
    Spelling(LLAMA, ("--temp",), "--temperature"),
    Spelling(LLAMA, ("-s",), "--seed"),
    Spelling(LLAMA, ("--repeat-penalty",), "--repetition-penalty"),
    Spelling(LLAMA, ("-r", "--reverse-prompt"), "--stop"),
    Spelling(LLAMA, ("-sys", "--system-prompt"), "--system"),
    Spelling(LLAMA, ("-hf", "-hfr", "--hf-repo"), "--model"),
    Spelling(LLAMA, ("-np", "--parallel"), "--max-sequences"),
    Spelling(LLAMA, ("-a",), "--alias"),
    Spelling(LLAMA, ("-no-cnv", "--no-conversation"), "--raw", value=False),
    Spelling(LLAMA, ("-jf", "--json-schema-file"), "--json-schema"),
    Spelling(LLAMA, ("--grammar-file",), "--grammar"),
    Spelling(LLAMA, ("--spec-type",), "--draft", part=_KIND),
    Spelling(LLAMA, ("-md", "--model-draft", "--spec-draft-model"), "--draft", part=_MODEL),
    Spelling(LLAMA, ("-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf"), "--draft", part=_MODEL),
    Spelling(LLAMA, ("--draft-max", "--draft-n", "--spec-draft-n-max"), "--draft", part=_TOKENS),
    Spelling(LLAMA, ("--draft-p-min", "--spec-draft-p-min"), "--draft", part=_CONFIDENCE),
    _left_out(LLAMA, "--draft-min", "--draft-n-min", "--spec-draft-n-min", why="drafts of any length are verified"),
    _left_out(
        LLAMA,
        "-ngld",
        "--gpu-layers-draft",
        "--spec-draft-ngl",
        why="drafts run where the target does; torch:cuda:MODEL names a GPU",
    ),
    _left_out(LLAMA, "-td", "--threads-draft", "--spec-draft-threads", why="drafts use the same threads"),
    Spelling(LLAMA, ("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"), "--kv-format", read=_KV.get),
    Spelling(LLAMA, ("--api-key",), why="a key on the command line is seen by others: set CPUSPEC_API_KEY, or give --api-key-file"),
    Spelling(LLAMA, ("-j",), why="write the schema to a file, and give --json-schema FILE"),
    Spelling(LLAMA, ("--chat-template", "--chat-template-file"), why="the model's own template is used; --raw goes without one"),
    Spelling(LLAMA, ("--lora-scaled",), "--lora", read=lambda value: "=".join(value.rsplit(":", 1))),
    _flag(LLAMA, "--lora-init-without-apply", why="--lora-modules NAME=FILE is for requests that name it"),
    Spelling(
        LLAMA,
        ("-mm", "--mmproj", "--image"),
        why="models read text only; say in words what the picture shows, or use llama-mtmd-cli",
    ),
    Spelling(LLAMA, ("--embedding", "--embeddings"), value=False, why="the server embeds by itself; --pooling chooses how"),
    _left_out(LLAMA, "-ngl", "--gpu-layers", "--n-gpu-layers", why="everything runs on the CPU; --backend torch uses a GPU"),
    _left_out(LLAMA, "-fa", "--flash-attn", why="attention is always computed in blocks"),
    _left_out(LLAMA, "-b", "--batch-size", "-ub", "--ubatch-size", why="the size of a batch is chosen for the machine"),
    _left_out(LLAMA, "-tb", "--threads-batch", why="prompts use the same threads"),
    _left_out(LLAMA, "--numa", "--prio", "--poll", "-C", "--cpu-mask", why="threads are placed for the machine"),
    _left_out(LLAMA, "--cache-ram", "--cache-reuse", "--keep", why=_KEPT),
    _flag(LLAMA, "--mlock", why="weights stay in memory as long as they fit"),
    _flag(LLAMA, "--jinja", "--no-jinja", why="chat templates are always rendered by Jinja"),
    _flag(LLAMA, "-cnv", "--conversation", why="`cpuspec chat` is the conversation"),
    _flag(LLAMA, "-st", "--single-turn", "--no-display-prompt", "--simple-io", "--log-disable", why=_HERE),
    _flag(LLAMA, "--no-warmup", "--metrics", "--props", "--no-webui", "--cont-batching", "-cb", why=_HERE),
    _flag(
        LLAMA, "--repack", "-nr", "--no-repack", "--no-host", "--op-offload", "--no-op-offload", "-cmoe", "--cpu-moe", why=_ON_CPU
    ),
    _flag(LLAMA, "-kvo", "--kv-offload", "-nkvo", "--no-kv-offload", why=_ON_CPU),
    _left_out(LLAMA, "-dev", "-ncmoe", "--n-cpu-moe", "-ot", "--override-tensor", why=_ON_CPU),
    _left_out(LLAMA, "-sm", "--split-mode", "-ts", "--tensor-split", "-mg", "--main-gpu", why=_ON_CPU),
    _left_out(LLAMA, "-fit", "--fit", "-fitt", "--fit-target", "-fitc", "--fit-ctx", why="what does not fit is told; see --memory"),
    _left_out(LLAMA, "-ctxcp", "--ctx-checkpoints", "--swa-checkpoints", "-cms", "--checkpoint-min-step", why=_KEPT),
    _flag(LLAMA, "--cache-prompt", "--no-cache-prompt", "--cache-idle-slots", "--no-cache-idle-slots", why=_KEPT),
    _flag(LLAMA, "-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified", "--swa-full", why="caches grow as they are used"),
    _left_out(LLAMA, "-sps", "--slot-prompt-similarity", "-dt", "--defrag-thold", why=_KEPT),
    _flag(LLAMA, "--context-shift", "--no-context-shift", why="an answer ends where the context is full"),
    _flag(LLAMA, "-e", "--escape", "--perf", "--no-perf", "--slots", "--webui", "--ui", "--prefill-assistant", why=_HERE),
    _flag(LLAMA, "--log-prefix", "--no-log-prefix", "--log-timestamps", "--no-log-timestamps", why=_HERE),
    _left_out(LLAMA, "--log-file", "-lv", "--verbosity", "--log-verbosity", "--log-colors", why="the log goes to stderr"),
    _left_out(LLAMA, "--threads-http", "--sse-ping-interval", "--cache-type-k-draft", "-ctkd", "-ctvd", why=_HERE),
    _left_out(LLAMA, "--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale", why=_BY_FILES),
    _left_out(
        LLAMA, "--yarn-orig-ctx", "--yarn-ext-factor", "--yarn-attn-factor", "--yarn-beta-slow", "--yarn-beta-fast", why=_BY_FILES
    ),
    _left_out(LLAMA, "--reasoning-format", why="reasoning is reasoning_content, thinking or a reasoning item"),
    _flag(LLAMA, "--rerank", "--reranking", why="the server ranks by itself, where the model's files say so"),
    Spelling(
        LLAMA,
        ("-rea", "--reasoning", "--reasoning-budget", "--reasoning-effort", "--chat-template-kwargs"),
        why="--thinking and --no-thinking of chat and generate; requests to a server say it: enable_thinking, reasoning_effort",
    ),
    Spelling(
        LLAMA,
        ("--mirostat", "--dry-multiplier", "--xtc-probability", "--typical", "--typical-p", "--top-n-sigma", "--dynatemp-range"),
        why="answers are not sampled so; use --temperature, --top-k, --top-p and --min-p",
    ),
    Spelling(LLAMA, ("--samplers", "--sampler-seq"), why="penalties, temperature, top-k, top-p and min-p follow in this order"),
    Spelling(LLAMA, ("--control-vector", "--control-vector-scaled"), why="not there; a LoRA adapter changes a model: --lora"),
    Spelling(LLAMA, ("--override-kv",), why="settings are those of the model's file; write another with `cpuspec quantize`"),
    Spelling(LLAMA, ("-mu", "--model-url", "-hff", "--hf-file"), why="name a file of the hub: --model hf:owner/name/file.gguf"),
    Spelling(LLAMA, ("-hft", "--hf-token"), why="a token on the command line is seen by others: set HF_TOKEN"),
    Spelling(LLAMA, ("--ssl-key-file", "--ssl-cert-file", "--api-prefix"), why="let a proxy before the server do that"),
    Spelling(LLAMA, ("--models-dir", "--models-preset"), why="name several models: cpuspec serve MODEL MODEL"),
    Spelling(LLAMA, ("-to", "--timeout"), "--max-request-s"),
    Spelling(LLAMA, ("--cors-origins",), "--cors"),
    Spelling(LLAMA, ("--rpc",), why="a model runs on one machine"),
    Spelling(
        LLAMA,
        ("--spec-ngram-size-n", "--spec-ngram-size-m", "--spec-ngram-mod-n-max", "--spec-ngram-mod-n-match", "-lcs", "-lcd"),
        why="--draft ngram@N drafts N tokens, and finds the length of matches by itself",
    ),
    Spelling(VLLM, ("--max-model-len",), "--context-length"),
    Spelling(VLLM, ("--max-num-seqs",), "--max-sequences"),
    Spelling(VLLM, ("--served-model-name",), "--alias"),
    Spelling(VLLM, ("--kv-cache-dtype",), "--kv-format", read=_KV.get),
    Spelling(VLLM, ("--max-num-batched-tokens",), "--prompt-rows"),
    Spelling(VLLM, ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"), why="a model runs on one machine"),
    _flag(VLLM, "--enable-lora", why="adapters need no switch"),
    _left_out(
        VLLM, "--max-loras", "--max-cpu-loras", "--max-lora-rank", why="adapters of any rank up to 1024 are taken, 256 of them"
    ),
    _left_out(VLLM, "--gpu-memory-utilization", "--swap-space", "--block-size", why="memory is divided by itself; see --memory"),
    _left_out(VLLM, "--tool-call-parser", "--reasoning-parser", why=_BY_ITSELF),
    _left_out(VLLM, "-q", "--load-format", "--tokenizer-mode", why=_BY_FILES),
    _flag(VLLM, "--enable-auto-tool-choice", "--enable-reasoning", why=_BY_ITSELF),
    _flag(VLLM, "--enable-prefix-caching", "--enable-chunked-prefill", "--enforce-eager", why=_HERE),
    _flag(VLLM, "--trust-remote-code", why="no code of a model is ever run"),
    _left_out(VLLM, "--generation-config", "--tokenizer", "--structured-outputs-config", "--max-logprobs", why=_HERE),
    _left_out(VLLM, "--guided-decoding-backend", "--compilation-config", "--distributed-executor-backend", why=_HERE),
    _left_out(VLLM, "--cpu-offload-gb", "--kv-offloading-size", "--limit-mm-per-prompt", "--uvicorn-log-level", why=_HERE),
    _flag(VLLM, "--disable-log-requests", "--disable-log-stats", "--async-scheduling", "--no-enable-prefix-caching", why=_HERE),
    _left_out(VLLM, "--runner", "--convert", "--task", why="the model's files say it; --pooling chooses how states are pooled"),
    Spelling(VLLM, ("--allowed-origins",), "--cors"),
    Spelling(VLLM, ("--data-parallel-size", "-dp"), why="start a server for each machine; cpuspec.ray serves over several"),
    Spelling(VLLM, ("--override-generation-config",), why="requests say how they are sampled"),
    Spelling(VLLM, ("--default-chat-template-kwargs",), why="requests say it: chat_template_kwargs"),
    Spelling(VLLM, ("--ssl-keyfile", "--ssl-certfile", "--root-path"), why="let a proxy before the server do that"),
    Spelling(VLLM, ("--revision", "--download-dir"), why="a revision follows the model's name: owner/name@REVISION; set HF_HOME"),
    Spelling(OLLAMA, ("--keepalive",), why="a server unloads idle models with --sleep-idle-seconds S; requests say keep_alive"),
    _flag(OLLAMA, "--verbose", why="figures are always told on stderr"),
)
_BY_NAME: Mapping[str, Spelling] = {name: one for one in SPELLINGS for name in one.names}

# Commands of other programs, and what is typed here.
OTHER_COMMANDS = {
    "run": "cpuspec chat MODEL, or cpuspec generate MODEL PROMPT",
    "list": "cpuspec models",
    "ls": "cpuspec models",
    "show": "cpuspec inspect MODEL",
    "ps": "cpuspec serve MODEL, and GET /slots",
    "complete": "cpuspec generate MODEL PROMPT",
    "run-batch": "cpuspec batch MODEL FILE",
}


def translated(args: Sequence[str], command: Any, tell: Callable[[str], object]) -> list[str]:
    """The arguments of a command with options of other programs in our spelling.

    command: a click command, whose own options stay as they are. tell: gets a note for each option that is left out.
    Raises typer.BadParameter for one that has no counterpart here.
    """
    named = {name: param for param in command.params for name in (*param.opts, *param.secondary_opts)}
    own = {name: param for name, param in named.items() if name.startswith("-")}
    if "prompt" in named:
        own["PROMPT"] = named["prompt"]
    found: list[str] = []
    behind: list[str] = []  # arguments, which options may stand before
    drafts: dict[str, str] = {}  # parts of one --draft
    rest = iter(args)
    for arg in rest:
        name, is_joined, value = arg.partition("=")
        if arg == "--":
            found = [*_draft(drafts), *found]
            return [*found, *behind, arg, *rest] if not behind else [*found, "--", *behind, *rest]
        if name in own:
            found.append(arg)
            takes = not getattr(own[name], "is_flag", False) and not getattr(own[name], "count", False)
            if takes and not is_joined:
                found += _next(rest)
        elif (one := _BY_NAME.get(name)) is None:
            found.append(arg)
        else:
            given = [value] if is_joined else (_next(rest) if one.value else [])
            if one.part and one.ours in own and given:
                drafts[one.part] = given[0]
            else:
                found += _replaced(one, name, given, own, tell, behind)
    return [*_draft(drafts), *found, *(["--", *behind] if any(text.startswith("-") for text in behind) else behind)]


def _draft(parts: Mapping[str, str]) -> list[str]:
    """The option that llama.cpp's options of drafts make, if there are any. Of several ways to draft, auto chooses."""
    if not parts:
        return []
    model, levels = parts.get(_MODEL, ""), []
    for kind in parts.get(_KIND, "draft-simple" if model else "").split(","):
        if (level := _METHODS.get(kind)) is None:
            wanted = f"one of {', '.join(_METHODS)}" if kind else "a drafter beside it, as --draft ngram@8:0.4"
            raise typer.BadParameter(f"llama.cpp's options of drafts name {kind or 'no drafter'}; wanted {wanted}")
        if level == "none":
            return ["--draft", level]
        if not level and not model:
            raise typer.BadParameter(f"--spec-type {kind} drafts with a model; name it with --spec-draft-model")
        levels += [] if level == "ngram" and "ngram" in levels else [level if level == "ngram" else model or level]
    confidence = parts.get(_CONFIDENCE, "")
    cap = parts.get(_TOKENS, "") + (f":{confidence}" if confidence.strip("0.") else "")
    capped = [f"{level}@{cap}" if cap and (level != "ngram" or len(levels) == 1) else level for level in levels]
    return ["--draft", ",".join(["auto"] * (len(levels) > 1) + capped)]


def _replaced(
    one: Spelling, name: str, given: list[str], own: Mapping[str, Any], tell: Callable[[str], object], behind: list[str]
) -> list[str]:
    if one.ours == "PROMPT" and one.ours in own:
        behind += given
        return []
    if one.ours and one.ours in own:
        if not one.value:
            return [one.ours]
        read = one.read(given[0]) if given else None
        if read is not None:
            return [] if given[0] and not read else [one.ours, read]
        value = " ".join(given) or "an empty value"
        raise typer.BadParameter(f"{name} is {one.program}'s spelling of {one.ours}, which does not take {value}")
    if one.passes:
        tell(f"{name} is {one.program}'s and was left out: {one.why}")
        return []
    if one.ours:
        raise typer.BadParameter(f"{name} is {one.program}'s spelling of {one.ours}, which this command does not have")
    raise typer.BadParameter(f"{name} is {one.program}'s: {one.why}")


def _next(rest: Iterator[str]) -> list[str]:
    """The next argument, if there is one; click says what is missing."""
    value = next(rest, None)
    return [] if value is None else [value]
