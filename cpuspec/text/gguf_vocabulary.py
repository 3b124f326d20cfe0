"""Makes a tokenizer's parts from the vocabulary of a GGUF file.

Where a file leaves a setting out, llama.cpp's default holds (its llama-vocab.cpp), so that both encode a text alike. Words are
split by the `tokenizers` library, and merged by it or by `byte_pairs`, on a vocabulary without control tokens.
"""

import itertools
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from cpuspec.checkpoints.checkpoint import GgufVocabulary
from cpuspec.errors import TokenizerError
from cpuspec.text.byte_pairs import BytePairs, Rank, merge_order
from cpuspec.text.parts import (
    BYTE,
    CONTROL,
    HIDDEN,
    LONGEST_PIECE,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    ControlToken,
    Core,
    Finder,
    Parts,
    end_ids,
    is_control,
    library_errors,
    shown_ids,
)  # fmt: skip
from cpuspec.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from cpuspec.text.tokenizer_json import longest_replacement, quoted

_MOST_TOKENS = 1 << 24
_MOST_GROWTH = 64  # characters that a table may make of one
_LONGEST_BERT_WORD = 100  # characters; a longer word is unknown, as in BERT's own tokenizer
_SPACE = "▁"
_NEVER_SWALLOW = ("<unk>", "<s>", "<|endoftext|>")  # white space, in any vocabulary

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Model:
    """The defaults of one kind of vocabulary. The ids of special tokens hold where the tokens there look special."""

    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    sep_id: int | None = None
    adds_bos: bool = False
    adds_eos: bool = False
    adds_space: bool = False


_MODELS = {
    "gpt2": _Model(bos_id=11, eos_id=11),
    "llama": _Model(bos_id=1, eos_id=2, unk_id=0, adds_bos=True, adds_space=True),
    "gemma4": _Model(),
    "t5": _Model(eos_id=1, unk_id=2, adds_eos=True),
    "bert": _Model(bos_id=101, unk_id=100, sep_id=102, adds_bos=True),
}


def gguf_parts(vocabulary: GgufVocabulary) -> Parts:
    """The parts of a tokenizer. Raises TokenizerError for a vocabulary that cannot be used."""
    tokens = vocabulary.tokens
    if not 0 < len(tokens) <= _MOST_TOKENS:
        raise TokenizerError(f"the vocabulary has {len(tokens)} tokens; wanted 1 to {_MOST_TOKENS}")
    if len(vocabulary.token_types) != len(tokens):
        raise TokenizerError(f"the vocabulary has {len(vocabulary.token_types)} token types; wanted {len(tokens)}, one per token")
    if len(set(tokens)) - ("" in tokens) != len(tokens) - tokens.count(""):
        repeated = Counter(filter(None, tokens)).most_common(1)[0][0]
        raise TokenizerError(f"the vocabulary has {quoted(repeated)} more than once")
    if vocabulary.model not in _MODELS:
        raise TokenizerError(f"the vocabulary's model is {quoted(vocabulary.model)}; known: {', '.join(_MODELS)}")
    if vocabulary.model == "llama" and vocabulary.merges and vocabulary.scores == tuple(map(float, range(len(tokens)))):
        # Ollama's converter gives Gemma 4 this name, and every vocabulary with merges its ids as scores (its convert/tokenizer.go).
        if vocabulary.pre != "gemma4":
            raise TokenizerError(
                f"the vocabulary has merges, the ids of its tokens as scores, and the pre-tokenizer {quoted(vocabulary.pre)}; "
                "wanted gemma4 beside merges, or scores that order the pieces: take a file that llama.cpp's converter made"
            )
        vocabulary = replace(vocabulary, model="gemma4")
    pre = _pre_tokenizer(vocabulary)
    vocabulary = replace(_with_defaults(vocabulary, pre), token_types=tuple(_types(vocabulary)))
    types = vocabulary.token_types
    for name, wanted, value in (("BOS", vocabulary.add_bos, vocabulary.bos_id), ("EOS", vocabulary.add_eos, vocabulary.eos_id)):
        if wanted and value is None:
            raise TokenizerError(f"the file asks for {name} around every text and does not say which token that is")
    if pre is not None and not pre.spaced:
        core = middle_core = _byte_level_core(vocabulary, pre)
    elif vocabulary.model == "t5":
        core, middle_core = _unigram_cores(vocabulary)
    elif vocabulary.model == "bert":
        core = middle_core = _word_piece_core(vocabulary)
    else:
        core, middle_core = _spaced_cores(vocabulary, pre)
    control = tuple(
        ControlToken(i, tokens[i], swallows_right=vocabulary.control_swallows and tokens[i] not in _NEVER_SWALLOW)
        for i, kind in enumerate(types)
        if kind in (CONTROL, UNKNOWN)
    )
    by_text = {token.text: token.id for token in control}
    named = {"bos": vocabulary.bos_id, "eos": vocabulary.eos_id, "unk": vocabulary.unk_id, "pad": vocabulary.pad_id}
    suffix = (vocabulary.sep_id if vocabulary.model == "bert" else None, vocabulary.eos_id if vocabulary.add_eos else None)
    return Parts(
        core=core,
        later_core=core,
        middle_core=middle_core,
        tokens=tokens,
        special=frozenset(i for i, kind in enumerate(types) if kind in (CONTROL, UNKNOWN, UNUSED)),
        control=control,
        literal=frozenset(i for i, kind in enumerate(types) if kind == USER_DEFINED),
        byte_level=pre is not None and not pre.spaced,
        strips_first_space=bool(vocabulary.add_space_prefix) or vocabulary.merges_spaces or vocabulary.model == "bert",
        bos_id=vocabulary.bos_id,
        eos_ids=end_ids(by_text, (vocabulary.eos_id, *vocabulary.end_ids)),
        prefix=(vocabulary.bos_id,) if vocabulary.add_bos and vocabulary.bos_id is not None else (),
        suffix=tuple(token for token in suffix if token is not None),
        chat_templates=vocabulary.chat_templates,
        template_variables={
            f"{name}_token": "" if value is None else tokens[value].encode(errors="surrogateescape").decode(errors="replace")
            for name, value in named.items()
        },
        shown=shown_ids(by_text),
    )


def _pre_tokenizer(vocabulary: GgufVocabulary) -> PreTokenizer | None:
    """The rules that split a text; None for a vocabulary without merges. Raises TokenizerError for an unknown name."""
    if vocabulary.model not in ("gpt2", "gemma4"):
        return None
    name = "gemma4" if vocabulary.model == "gemma4" else vocabulary.pre
    if name in ("", "default"):
        named = "names no pre-tokenizer, as old converters left it out" if not name else "has the pre-tokenizer default, as of a "
        named += "converter that did not know the model's" * bool(name)
        _log.warning("the file %s; llama.cpp's default may encode worse", named)
        name = "default"
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise TokenizerError(f"the file names the pre-tokenizer {quoted(name)}; known: {', '.join(sorted(PRE_TOKENIZERS))}")
    return pre


def _with_defaults(vocabulary: GgufVocabulary, pre: PreTokenizer | None) -> GgufVocabulary:
    """The vocabulary with llama.cpp's defaults for what its file leaves out, and without special ids that are out of range."""
    default, size = _MODELS[vocabulary.model], len(vocabulary.tokens)

    def token_id(name: str, default_id: int | None = None) -> int | None:
        value = getattr(vocabulary, name)
        if value is not None and 0 <= value < size:
            return value
        if value is not None:
            _log.warning("%s is %d, outside of the vocabulary of %d tokens; it is ignored", name, value, size)
        # A file without such a token may have an ordinary token at the default id.
        usable = default_id is not None and default_id < size and vocabulary.token_types[default_id] in (UNKNOWN, CONTROL)
        return default_id if usable else None

    def flag(name: str, default_flag: bool) -> bool:
        value = getattr(vocabulary, name)
        return default_flag if value is None else value

    bos_id = token_id("bos_id", default.bos_id)
    adds_bos = bos_id is not None and (default.adds_bos or (pre is not None and pre.adds_bos))
    ends = tuple(end for end in vocabulary.end_ids if 0 <= end < size)
    if len(ends) < len(vocabulary.end_ids):
        _log.warning("tokens that end an answer are outside of the vocabulary of %d tokens; they are ignored", size)
    return replace(
        vocabulary,
        bos_id=bos_id,
        eos_id=token_id("eos_id", default.eos_id),
        unk_id=token_id("unk_id", default.unk_id),
        pad_id=token_id("pad_id"),
        sep_id=token_id("sep_id", default.sep_id),
        end_ids=ends,
        # Files of Gemma 4 say no by mistake, and llama.cpp overrides them.
        add_bos=flag("add_bos", adds_bos) or (adds_bos and pre is not None and pre.spaced),
        add_eos=flag("add_eos", default.adds_eos),
        add_space_prefix=flag("add_space_prefix", default.adds_space) and pre is None,
    )


def _types(vocabulary: GgufVocabulary) -> Iterator[int]:
    """The types of the tokens. Tokens that end a turn are control tokens, whatever the file calls them; empty ones are unused."""
    for token, kind in zip(vocabulary.tokens, vocabulary.token_types, strict=True):
        if not token:
            yield UNUSED
        elif token[0] in "<[_" and kind in (NORMAL, USER_DEFINED) and is_control(token, False, kind == USER_DEFINED):
            yield CONTROL
        else:
            yield kind


def _merges(vocabulary: GgufVocabulary, ids: dict[str, int]) -> Rank:
    """The order of the vocabulary's merges. ids: of tokens that may come out. Merges that join no two tokens to one are ignored:
    files have empty lines, the first line of merges.txt, and merges of tokens that were taken out.
    """
    known = set(vocabulary.tokens)
    odd = [merge for merge in vocabulary.merges if merge.replace(" ", "", 1) not in known or merge.strip(" ").count(" ") != 1]
    if odd:
        _log.warning(
            "%d of %d merges make no token of two, as %s; they are ignored", len(odd), len(vocabulary.merges), quoted(odd[0])
        )
    return merge_order(vocabulary.merges, ids)


def _byte_level_core(vocabulary: GgufVocabulary, pre: PreTokenizer) -> Core:
    from tokenizers import Regex, normalizers, pre_tokenizers

    # Without control tokens, so that no merge can lead to one.
    ids = {
        token: i
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.token_types, strict=True))
        if kind in (NORMAL, USER_DEFINED)
    }
    pairs = BytePairs(ids, _merges(vocabulary, ids), pre.ignore_merges)
    normalizer = normalizers.NFC() if pre.nfc else None
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    words = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    whole = _user_defined(vocabulary)

    def encode(text: str) -> list[int]:
        found: list[int] = []
        for between, token in whole.split(text):
            if between:
                composed = normalizer.normalize_str(between) if normalizer else between
                for part in _threes(composed, pre.threes == "words") if pre.threes else (composed,):
                    for word, _ in words.pre_tokenize_str(part):
                        found += pairs.encode(word)
            if token:
                found.append(ids[token])
        return found

    return encode


def _threes(text: str, only_words: bool) -> Iterator[str]:
    """The text in parts: digits in groups of three, counted from the end of their run. only_words: unless a letter follows."""
    at = 0
    for run in re.finditer(r"\d+", text):
        start, end = run.span()
        if only_words and re.match(r"\w", text[end : end + 1]):
            continue
        yield from filter(None, (text[at:start], text[start : start + (end - start) % 3]))
        yield from (text[i : i + 3] for i in range(start + (end - start) % 3, end, 3))
        at = end
    if at < len(text):
        yield text[at:]


def _user_defined(vocabulary: GgufVocabulary) -> Finder:
    """Finds tokens that are never split."""
    pairs = zip(vocabulary.tokens, vocabulary.token_types, strict=True)
    return Finder(token for token, kind in pairs if kind == USER_DEFINED)


def _scores(vocabulary: GgufVocabulary) -> tuple[float, ...]:
    """The scores of all pieces. Raises TokenizerError for a missing or infinite score, and for a piece too long to search for."""
    tokens, scores = vocabulary.tokens, vocabulary.scores
    if len(scores) != len(tokens) or not all(map(math.isfinite, scores)):
        raise TokenizerError(f"the vocabulary has {len(tokens)} tokens and {len(scores)} scores; wanted as many, all finite")
    if longest := next((t for t in tokens if len(t) > LONGEST_PIECE), None):
        raise TokenizerError(f"the vocabulary has a piece of {len(longest)} characters; at most {LONGEST_PIECE} are read")
    return scores


def _spaced_cores(vocabulary: GgufVocabulary, pre: PreTokenizer | None) -> tuple[Core, Core]:
    """The cores, for a text and for one that goes on from another, of a vocabulary whose pieces have ▁ for a space.

    SentencePiece's BPE keeps scores instead of merges: of all neighbours that join to a piece, those of the best piece go first
    (its bpe_model.cc). pre: of a vocabulary with merges.
    """
    tokens, types = vocabulary.tokens, vocabulary.token_types
    normal = {token: i for i, token in enumerate(tokens) if types[i] == NORMAL and token}
    if pre is None:
        scores = _scores(vocabulary)
        ranks = {token: -scores[i] for token, i in normal.items()}
        pairs = BytePairs(normal, lambda left, right: ranks.get(left + right), whole_words=False)
    else:
        pairs = BytePairs(normal, _merges(vocabulary, normal), pre.ignore_merges)
    # Where no piece goes on after a word's end, words are merged one by one, and those met before are remembered.
    across = any(re.search(f"[^{_SPACE}]{_SPACE}", token) for token in normal)
    by_words = ".+" if across else f"{_SPACE}*[^{_SPACE}]+|{_SPACE}+"
    words = re.compile(by_words if pre is None else "\n+|" + by_words.replace("^", "^\n"), 0 if across and pre else re.DOTALL)
    others = {token: i for i, token in enumerate(tokens) if token and types[i] in (USER_DEFINED, BYTE)}
    byte_ids: dict[int, int] = {}
    for byte in range(256):
        token_id = others.get(name := f"<0x{byte:02X}>", normal.get(name))
        if token_id is not None:
            byte_ids[byte] = token_id
    # The token for characters that even bytes cannot spell. Text must not become a control token this way.
    unknown = vocabulary.unk_id
    if unknown is not None and (types[unknown] not in (NORMAL, UNKNOWN) or not tokens[unknown]):
        unknown = None
    whole = _user_defined(vocabulary)

    def spell(characters: Iterable[str]) -> list[int]:
        """Ids for characters that are not pieces themselves."""
        found: list[int] = []
        for char in characters:
            data = char.encode()
            if char in others:
                found.append(others[char])
            elif all(byte in byte_ids for byte in data):
                found += [byte_ids[byte] for byte in data]
            elif unknown is not None and found[-1:] != [unknown]:
                found.append(unknown)
        return found

    def merged(word: str) -> list[int]:
        # Gemma has tokens for runs of newlines that no merge produces.
        return [normal[word]] if pre and word[0] == "\n" and word in normal else pairs.encode(word)

    def encode(text: str, before: str) -> list[int]:
        found: list[int] = []
        for between, token in whole.split(text):
            if between:
                for known, run in itertools.groupby(before + between.replace(" ", _SPACE), normal.__contains__):
                    if known:
                        for word in words.findall("".join(run)):
                            found += merged(word)
                    else:
                        found += spell(run)
            if token:
                found.append(others[token])
        return found

    before = _SPACE if vocabulary.add_space_prefix else ""
    return lambda text: encode(text, before), lambda text: encode(text, "")


def _unigram_cores(vocabulary: GgufVocabulary) -> tuple[Core, Core]:
    """The cores, for a text and for one that goes on from another, of the most likely pieces (Kudo 2018, arXiv:1804.10959)."""
    from tokenizers import models, normalizers

    tokens, types, scores = vocabulary.tokens, vocabulary.token_types, _scores(vocabulary)
    # An unknown character must not become the token that ends a text.
    if vocabulary.unk_id is None or vocabulary.unk_id in (vocabulary.eos_id, *vocabulary.end_ids):
        raise TokenizerError("the file does not say which token stands for unknown characters, or names one that ends a text")
    pieces = [
        (token if kind in (NORMAL, USER_DEFINED, UNUSED) and token else f"{HIDDEN}{i}", score)
        for i, (token, kind, score) in enumerate(zip(tokens, types, scores, strict=True))
    ]
    normalize: Callable[[str], str] = str
    with library_errors("the vocabulary cannot be used"):
        model = models.Unigram(pieces, vocabulary.unk_id, False)
        if vocabulary.charsmap:
            if longest_replacement(vocabulary.charsmap) > _MOST_GROWTH:
                raise TokenizerError(f"the precompiled_charsmap makes over {_MOST_GROWTH} characters of one")
            normalize = normalizers.Precompiled(vocabulary.charsmap).normalize_str
    whole, ids = _user_defined(vocabulary), {token: i for i, token in enumerate(tokens)}

    def encode(text: str, before: str) -> list[int]:
        found: list[int] = []
        for between, token in whole.split(text):
            spaced = normalize(between) if between else ""
            if vocabulary.merges_spaces:
                spaced = "".join(_SPACE + word for word in spaced.split(" ") if word)
                spaced = spaced if before or between[:1] == " " else spaced.removeprefix(_SPACE)
            else:
                spaced = (before if spaced else "") + spaced.replace(" ", _SPACE)
            found += [piece.id for piece in model.tokenize(spaced)] if spaced else []
            found += [ids[token]] if token else []
        return found

    before = _SPACE if vocabulary.add_space_prefix or vocabulary.merges_spaces else ""
    return lambda text: encode(text, before), lambda text: encode(text, "")


def _word_piece_core(vocabulary: GgufVocabulary) -> Core:
    """The core that takes the longest pieces from the left, as BERT. GGUF files put ▁ before a word's first piece, not ## before
    the others.
    """
    from tokenizers import models, normalizers, pre_tokenizers

    unknown = vocabulary.unk_id
    if unknown is None:
        raise TokenizerError("the file does not say which token stands for unknown words")
    pairs = enumerate(zip(vocabulary.tokens, vocabulary.token_types, strict=True))
    ids = {token[1:] if token[0] == _SPACE else f"##{token}": i for i, (token, kind) in pairs if kind in (NORMAL, USER_DEFINED)}
    ids[HIDDEN] = unknown
    with library_errors("the vocabulary cannot be used"):
        model = models.WordPiece(ids, unk_token=HIDDEN, continuing_subword_prefix="##", max_input_chars_per_word=_LONGEST_BERT_WORD)
    lowercase = vocabulary.lowercase is not False
    strips = lowercase if vocabulary.strip_accents is None else vocabulary.strip_accents
    normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strips)
    words = pre_tokenizers.BertPreTokenizer()

    def encode(text: str) -> list[int]:
        found = words.pre_tokenize_str(normalizer.normalize_str(text))
        return [piece.id for word, _ in found for piece in model.tokenize(word)]

    return encode
