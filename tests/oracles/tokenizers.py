"""Tokenizers as their papers and programs define them, written the slow way."""

import itertools
import unicodedata
from collections.abc import Iterable, Mapping

import regex

WORDS = {
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
WORDS["llama-bpe"] = WORDS["qwen2"].replace(r"\p{N}|", r"\p{N}{1,3}|")


def spell(data: bytes) -> str:
    """GPT-2's characters for bytes (its encoder.py, bytes_to_unicode)."""
    keep = set(range(ord("!"), ord("~") + 1)) | set(range(ord("¡"), ord("¬") + 1)) | set(range(ord("®"), ord("ÿ") + 1))
    others = [byte for byte in range(256) if byte not in keep]
    return "".join(chr(byte) if byte in keep else chr(256 + others.index(byte)) for byte in data)


def split_words(text: str, pre: str) -> list[str]:
    """The pieces that are encoded by themselves."""
    if pre == "smollm":  # digits one by one, then GPT-2's words between them
        pieces = regex.split(r"(\p{N})", text)
        return [word for piece in pieces if piece for word in regex.findall(WORDS["gpt-2"], piece)]
    if pre == "qwen2":
        text = unicodedata.normalize("NFC", text)
    return regex.findall(WORDS[pre], text)


def byte_pair_ids(text: str, pre: str, merges: Iterable[tuple[str, str]], ids: Mapping[str, int]) -> list[int]:
    """Each word's bytes with one pair after the other joined, from the left."""
    found = []
    for word in split_words(text, pre):
        spelled = spell(word.encode())
        pieces = [spelled] if pre == "llama-bpe" and spelled in ids else list(spelled)
        for pair in merges:
            at = 0
            while at < len(pieces) - 1:
                if (pieces[at], pieces[at + 1]) == pair:
                    pieces[at : at + 2] = ["".join(pair)]
                at += 1
        found += [ids[piece] for piece in pieces]
    return found


def sentencepiece_ids(text: str, pieces: list[tuple[str, int, float]]) -> list[int]:
    """Joins the neighbours that make the best-scored piece, leftmost first, until none is left; spells the rest as bytes."""
    normal = {piece: score for piece, kind, score in pieces if kind == 1}
    piece_ids = {piece: i for i, (piece, _, _) in enumerate(pieces)}
    symbols = list(("▁" + text).replace(" ", "▁")) if text else []
    while True:
        joins = [(normal[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in normal]
        if not joins:
            break
        at = -max(joins)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids = []
    for symbol in symbols:
        ids += [piece_ids[symbol]] if symbol in normal else [piece_ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return ids


def unigram_pieces(text: str, pieces: list[tuple[str, int, float]]) -> list[str]:
    """The pieces with the best sum of scores, of all ways to split the text (Kudo 2018, arXiv:1804.10959, section 3.2)."""
    words = "".join("▁" + word for word in text.split(" ") if word)
    scores = {piece: score for piece, kind, score in pieces if kind == 1}
    best: list[tuple[float, list[str]]] = [(0.0, [])]
    for end in range(1, len(words) + 1):
        ways = [
            (best[at][0] + scores[words[at:end]], [*best[at][1], words[at:end]]) for at in range(end) if words[at:end] in scores
        ]
        best.append(max(ways, default=(float("-inf"), [])))
    return best[-1][1]
