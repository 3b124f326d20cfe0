"""Reasoning in answers: the marks that chat templates have for it. What an answer holds is the task of `cpuspec.server.parsing`."""

from collections.abc import Sequence, Set

from cpuspec.text.tokenizer import Tokenizer

# Pairs of marks around reasoning. A template's pair is the first of which it contains a mark.
REASONING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
    ("<seed:think>", "</seed:think>"),
    ("<thought>", "</thought>"),  # EXAONE Deep
)
CHANNELS = "<|channel|>analysis"  # of gpt-oss: what is not in the channel "final" is no content


def reasoning_marks(template: str | None) -> tuple[str, str]:
    """The texts that begin and end reasoning in answers to prompts of a chat template."""
    template = template or ""
    return next((marks for marks in REASONING if marks[0] in template or marks[1] in template), REASONING[0])


def opens_reasoning(tokenizer: Tokenizer, template: str | None, prompt: Sequence[int]) -> bool:
    """Whether a prompt of the template, token ids, has opened the reasoning."""
    return tokenizer.decode(prompt[-8:], skip_special=False).rstrip().endswith(reasoning_marks(template)[0])


def reasoning_parts(template: str) -> list[tuple[str, str]]:
    """Pairs of texts between which an answer is no content."""
    is_in_channels = CHANNELS in template
    return [(mark, "final<|message|>") for mark in ("<|start|>", "<|channel|>")] if is_in_channels else [reasoning_marks(template)]


def stop_scope(
    tokenizer: Tokenizer, template: str, prompt: Sequence[int], shown: Set[int] = frozenset()
) -> tuple[list[tuple[str, str]], str]:
    """Pairs of texts between which no stop string counts, and the text that ends such a part if the answer begins in one, else "".

    prompt: token ids, of the template. shown: special tokens whose names are part of the text. Where a mark is a token that the
    text does not show, nothing tells reasoning from content, and stop strings count everywhere.
    """
    parts = reasoning_parts(template)
    for mark in {mark for pair in parts for mark in pair}:
        decoder = tokenizer.stream(shown=shown)
        if mark not in "".join(map(decoder.push, tokenizer.encode(mark, add_special=False, parse_special=True))):
            return [], ""
    return parts, parts[0][1] if opens_reasoning(tokenizer, template, prompt) else ""
