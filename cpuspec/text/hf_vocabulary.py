"""Makes a tokenizer's parts from the files of a Hugging Face directory: tokenizer.json, or the older files where it is missing.

Tokens, ends and chat templates are gathered from every file that may name them, since tools differ in which of them they write.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuspec.checkpoints.checkpoint import GgufVocabulary, HfTokenizerFiles
from cpuspec.errors import TokenizerError
from cpuspec.text.gguf_vocabulary import gguf_parts
from cpuspec.text.parts import (
    CONTROL,
    HIDDEN,
    USER_DEFINED,
    ControlToken,
    Core,
    Parts,
    checked_unicode,
    end_ids,
    is_control,
    library_errors,
    shown_ids,
)
from cpuspec.text.sentencepiece_file import read_sentencepiece
from cpuspec.text.tokenizer_json import TokenizerJson, exists, quoted, read_json, read_text_file, read_tokenizer_json

if TYPE_CHECKING:
    import tokenizers

_ORDINARY_GROWTH = 4  # bytes of a character; where steps of a file make more of it, a text may become _MOST_GROWN characters
_MOST_GROWN = 1 << 22
_MOST_TEMPLATES = 64

# The rules of vocab.json and merges.txt by the class or the model type that other files name.
_OLD_FILES = {
    **dict.fromkeys(("GPT2Tokenizer", "CodeGenTokenizer", "gpt2", "phi", "gpt_bigcode"), "gpt-2"),
    **dict.fromkeys(("Qwen2Tokenizer", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "qwen2"),
    **dict.fromkeys(("Qwen3_5Tokenizer", "qwen3_5", "qwen3_5_moe"), "qwen35"),
    **dict.fromkeys(("starcoder2",), "starcoder"),
}
# Classes whose ids differ from those in their SentencePiece file.
_MOVED_IDS = ("XLMRoberta", "Camembert", "MBart", "Nllb", "Barthez", "Pegasus", "M2M100")


def hf_parts(files: HfTokenizerFiles, vocab_size: int) -> Parts:
    """The parts of a tokenizer. vocab_size: the model's. Raises TokenizerError for files that cannot be used."""
    directory = files.directory
    config = read_json(directory / "tokenizer_config.json")
    read = read_hf_vocabulary(files, vocab_size)
    variables = _special_texts(directory, config)
    templates = _read_templates(directory, config)
    listed = _listed_ends(directory)
    if isinstance(read, GgufVocabulary):
        ids = {text: token_id for token_id, text in enumerate(read.tokens)}
        named = {
            f"{name}_id": ids.get(variables[f"{name}_token"], getattr(read, f"{name}_id")) for name in ("bos", "eos", "unk", "pad")
        }
        flags = {name: config[f"{name}_token"] for name in ("add_bos", "add_eos") if isinstance(config.get(f"{name}_token"), bool)}
        parts = gguf_parts(replace(read, **named, **flags, end_ids=tuple(end for end in listed if end < len(read.tokens))))
        return replace(parts, chat_templates=templates, template_variables=variables)
    control, literal = [], []
    for token in read.added:
        if is_control(token.content, token.special, user_defined=True):
            control.append(ControlToken(token.id, token.content, token.lstrip, token.rstrip))
        else:
            literal.append(token.id)
    added = {token.content for token in read.added}
    control += [
        ControlToken(token_id, text) for text, token_id in read.vocab.items() if text not in added and is_control(text, False)
    ]
    by_text = {token.text: token.id for token in control}

    bos_id = read.vocab.get(variables["bos_token"])
    eos_id = read.vocab.get(variables["eos_token"])
    prefix, suffix = read.prefix, read.suffix
    generic = config.get("tokenizer_class") in (None, "PreTrainedTokenizerFast", "TokenizersBackend")
    # A tokenizer class of a model builds its post-processor from these flags; the generic class uses the file's.
    if not generic and isinstance(config.get("add_bos_token"), bool):
        prefix = (bos_id,) if config["add_bos_token"] and bos_id is not None else ()
    if not generic and isinstance(config.get("add_eos_token"), bool):
        suffix = (eos_id,) if config["add_eos_token"] and eos_id is not None else ()
    eos_ids = end_ids(by_text, [eos_id, *(end for end in listed if end < len(read.tokens))])
    core, later_core, middle_core = _library_cores(read, set(by_text), eos_ids, files.tokenizer_json)
    hidden = {*by_text.values(), *literal}
    return Parts(
        core=core,
        later_core=later_core,
        middle_core=middle_core,
        tokens=read.tokens if read.kind != "WordPiece" else tuple(_spaced_word_pieces(read, hidden)),
        special=frozenset(by_text.values()),
        control=tuple(control),
        literal=frozenset(literal),
        byte_level=read.byte_level,
        strips_first_space=read.strips_first_space,
        bos_id=bos_id,
        eos_ids=eos_ids,
        prefix=prefix,
        suffix=suffix,
        chat_templates=templates,
        template_variables=variables,
        shown=shown_ids(by_text),
    )


def read_hf_vocabulary(files: HfTokenizerFiles, vocab_size: int) -> TokenizerJson | GgufVocabulary:
    """Read tokenizer.json and the tokens that other files add to it. Without tokenizer.json, read the older files.

    vocab_size: of the model, which has no rows for tokens beyond. Raises TokenizerError.
    """
    directory = files.directory
    more = list(_more_tokens(directory, read_json(directory / "tokenizer_config.json")))
    if exists(files.tokenizer_json):
        return read_tokenizer_json(files.tokenizer_json, more, vocab_size)
    return _with_more(_older_files(files), more, vocab_size)


def _older_files(files: HfTokenizerFiles) -> GgufVocabulary:
    directory = files.directory
    kinds = [read_json(directory / name).get(key) for name, key in _KINDS]
    if exists(directory / "tokenizer.model"):
        if moved := next((kind for kind in kinds if isinstance(kind, str) and kind.startswith(_MOVED_IDS)), None):
            raise TokenizerError(f"{directory} has a tokenizer.model whose ids {moved} moves; save it with a tokenizer.json")
        return read_sentencepiece(directory / "tokenizer.model")
    if not exists(directory / "vocab.json") or not exists(directory / "merges.txt"):
        raise TokenizerError(
            f"{files.tokenizer_json} is missing, and so are tokenizer.model, and vocab.json with merges.txt; "
            "download one of them beside the weights"
        )
    pre = next((_OLD_FILES[kind] for kind in kinds if isinstance(kind, str) and kind in _OLD_FILES), None)
    if pre is None:
        raise TokenizerError(
            f"{directory} has vocab.json and merges.txt of {quoted(kinds[0] or kinds[1])}, which do not say how text is split; "
            f"known: {', '.join(_OLD_FILES)}. Save the tokenizer with a tokenizer.json"
        )
    vocab = read_json(directory / "vocab.json", required=True)
    tokens = [""] * len(vocab)
    for text, token_id in vocab.items():
        if type(token_id) is not int or not 0 <= token_id < len(vocab) or tokens[token_id]:
            raise TokenizerError(
                f"{directory / 'vocab.json'}: the id of {quoted(text)} is {quoted(token_id)}; wanted 0, 1, 2 and so on"
            )
        tokens[token_id] = checked_unicode(text, "a token")
    lines = read_text_file(directory / "merges.txt").split("\n")
    merges = tuple(line.removesuffix("\r") for line in lines if line.strip() and not line.startswith("#version"))
    return GgufVocabulary(model="gpt2", pre=pre, tokens=tuple(tokens), token_types=(1,) * len(tokens), merges=merges)


_KINDS = (("tokenizer_config.json", "tokenizer_class"), ("config.json", "model_type"))


def _more_tokens(directory: Path, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Tokens that files beside tokenizer.json name, as its `added_tokens` have them; the id is None where a file leaves it out."""
    decoder = config.get("added_tokens_decoder")
    for key, token in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(token, dict) and str(key).isascii() and str(key).isdigit():
            yield {**token, "id": int(key)}
    for text, token_id in read_json(directory / "added_tokens.json").items():
        yield {"content": text, "id": token_id}
    special = read_json(directory / "special_tokens_map.json")
    for name in ("extra_special_tokens", "additional_special_tokens"):
        for listed in (config.get(name), special.get(name)):
            tokens = listed.values() if isinstance(listed, dict) else listed if isinstance(listed, list) else ()
            for token in tokens:
                fields = token if isinstance(token, dict) else {"content": token}
                if isinstance(fields.get("content"), str):
                    yield {**fields, "id": None, "special": True}


def _with_more(vocabulary: GgufVocabulary, more: list[dict[str, Any]], vocab_size: int) -> GgufVocabulary:
    """The vocabulary with tokens that other files add, each in its place if that is free."""
    tokens, types = list(vocabulary.tokens), list(vocabulary.token_types)
    ids = {text: token_id for token_id, text in enumerate(tokens)}
    for token in more:
        text, token_id = token.get("content"), token.get("id")
        if not isinstance(text, str) or not text:
            continue
        found = ids.get(text, token_id if type(token_id) is int and token_id >= 0 else len(tokens))
        if found >= vocab_size or (found < len(tokens) and tokens[found] not in ("", text)):
            continue
        tokens += [""] * (found + 1 - len(tokens))
        types += [1] * (found + 1 - len(types))
        tokens[found], ids[text] = checked_unicode(text, "a token"), found
        types[found] = CONTROL if token.get("special") is True or types[found] == CONTROL else USER_DEFINED
    return replace(
        vocabulary,
        tokens=tuple(tokens),
        token_types=tuple(types),
        scores=vocabulary.scores + (0.0,) * (len(tokens) - len(vocabulary.scores) if vocabulary.scores else 0),
    )


def _listed_ends(directory: Path) -> list[int]:
    """Ids that generation_config.json or config.json name as ends of an answer."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        settings = read_json(directory / name)
        inner = settings.get("text_config")
        for value in (settings.get("eos_token_id"), inner.get("eos_token_id") if isinstance(inner, dict) else None):
            found += [end for end in (value if isinstance(value, list) else [value]) if type(end) is int and end >= 0]
        if found:
            break
    return found


def _spaced_word_pieces(read: TokenizerJson, hidden: set[int]) -> Iterator[str | None]:
    """WordPiece's tokens with ▁ before a word's first piece instead of a prefix before others. hidden: tokens left unchanged."""
    for token_id, text in enumerate(read.tokens):
        if text is None or token_id in hidden:
            yield text
        else:
            yield text.removeprefix(read.continuing_prefix) if text.startswith(read.continuing_prefix) else f"▁{text}"


def _library_cores(read: TokenizerJson, control: set[str], eos_ids: frozenset[int], path: Path) -> tuple[Core, Core, Core]:
    """The cores for a text, for text after a control token, and for text that goes on from other text.

    The library gets no control tokens except the one for unknown characters, under a name that no text contains. Added tokens are
    in the vocabulary that it gets, so they keep their ids.
    """
    from tokenizers import AddedToken, models
    from tokenizers import Tokenizer as LibraryTokenizer

    vocab = {text: token_id for text, token_id in read.vocab.items() if text not in control}
    unknown = read.unk_token
    if unknown in control and unknown in read.vocab:
        token_id = read.vocab[unknown]
        # A character that the vocabulary lacks must not become the token that ends a text.
        unknown = None if token_id in eos_ids else f"{HIDDEN}{unknown}"
        if unknown:
            vocab[unknown] = token_id
    merges = [pair for pair in read.merges if "".join(pair) not in control]
    literal = [token for token in read.added if token.content not in control]
    first = read.pre_tokenizer
    # "first" means the beginning of the whole input, but the library sees the text after each control token as an input.
    later = [step | {"prepend_scheme": "never"} if step.get("prepend_scheme") == "first" else step for step in first]
    no_space: dict[str, dict[str, Any]] = {"Metaspace": {"prepend_scheme": "never"}, "ByteLevel": {"add_prefix_space": False}}
    middle = [step | no_space.get(step["type"], {}) for step in first]
    no_prefix = [step for step in read.normalizer if step["type"] != "Prepend"]

    with library_errors(f"{path} cannot be used"):
        if read.kind == "Unigram":
            # Pieces by id: control tokens under names that no text has, and added tokens after the model's.
            least, unk_id = min(read.scores), None if read.unk_id in eos_ids else read.unk_id
            texts = [text if text in vocab else f"{HIDDEN}{i}" for i, text in enumerate(read.tokens)]
            scores = [*read.scores, *[least] * (len(texts) - len(read.scores))]
            model: Any = models.Unigram(list(zip(texts, scores, strict=True)), unk_id, read.byte_fallback)
        elif read.kind == "WordPiece":
            if unknown is None:
                raise TokenizerError("unk_token is missing; wanted the token of unknown words")
            model = models.WordPiece(
                vocab,
                unk_token=unknown,
                continuing_subword_prefix=read.continuing_prefix,
                max_input_chars_per_word=read.longest_word,
            )
        else:
            model = models.BPE(
                vocab=vocab,
                merges=merges,
                unk_token=unknown,
                fuse_unk=read.fuse_unk,
                byte_fallback=read.byte_fallback,
                ignore_merges=read.ignore_merges,
            )
        flags = ("single_word", "lstrip", "rstrip", "normalized")
        whole = [AddedToken(token.content, special=False, **{name: getattr(token, name) for name in flags}) for token in literal]
        cores: dict[str, Core] = {}  # by their steps; in most files all three have the same
        steps = []
        for normalizer, pre_tokenizer in ((read.normalizer, first), (read.normalizer, later), (no_prefix, middle)):
            parts = {
                "normalizer": {"type": "Sequence", "normalizers": normalizer},
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre_tokenizer},
                "model": {"type": "BPE", "vocab": {}, "merges": []},
            }
            steps.append(json.dumps(parts))
            if steps[-1] not in cores:
                library = LibraryTokenizer.from_str(steps[-1])
                library.model = model
                library.add_tokens(whole)
                cores[steps[-1]] = _library_core(library, read.growth)
    return cores[steps[0]], cores[steps[1]], cores[steps[2]]


def _library_core(library: "tokenizers.Tokenizer", growth: float) -> Core:
    def encode(text: str) -> list[int]:
        if growth > _ORDINARY_GROWTH and len(text) * growth > _MOST_GROWN:
            raise TokenizerError(
                f"it has {len(text)} characters, and the tokenizer's file may make {growth:.0f} of each; shorten it"
            )
        return library.encode(text, add_special_tokens=False).ids

    return encode


def _special_texts(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    special = read_json(directory / "special_tokens_map.json")
    texts = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name) or special.get(name) or ""
        value = value.get("content", "") if isinstance(value, dict) else value
        texts[name] = checked_unicode(value, name) if isinstance(value, str) else ""
    return texts


def _read_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates that are not empty, by name: of files of their own, or else of the tokenizer's settings."""
    found: dict[str, Any] = {}
    more = directory / "additional_chat_templates"
    try:
        paths = sorted(more.glob("*.jinja"))[:_MOST_TEMPLATES] if exists(more) else []
    except OSError as error:
        raise TokenizerError(f"{more} cannot be read: {error.strerror or error}") from error
    for name, path in (("default", directory / "chat_template.jinja"), *((path.stem, path) for path in paths)):
        if exists(path):
            found[name] = read_text_file(path)
    if not found:
        given = config.get("chat_template") or read_json(directory / "chat_template.json").get("chat_template")
        if isinstance(given, list):  # several, by name
            given = {str(one.get("name")): one.get("template") for one in given if isinstance(one, dict)}
        found = given if isinstance(given, dict) else {"default": given}
    return {name: checked_unicode(text, "chat_template") for name, text in found.items() if isinstance(text, str) and text}
