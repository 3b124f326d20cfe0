"""Filling in the middle: the tokens around a gap, which make a model write the text that belongs there."""

from collections.abc import Sequence
from dataclasses import dataclass

from cpuspec.text import Tokenizer

# The marks of the text before the gap, of the text after it, and of the gap, by model family: Qwen2.5-Coder and CodeGemma;
# StarCoder 2, Granite and SmolLM; the first StarCoder's relatives; DeepSeek-Coder; CodeLlama; GLM-4.5; Falcon-H1-Coder (llama.cpp's
# list).
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),
)
# The marks before the name of a repository, and before the name of a file.
_REPOSITORIES = ("<|repo_name|>", "<|fim_repo|>", "<repo_name>", "<reponame>", "<fim-repo>", "<REPO>")
_FILES = ("<|file_sep|>", "<file_sep>")
_ENDS = (
    "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>", "<file_sep>", "<fim_pad>", "<|endoftext|>",
    "<repo_name>", "<fim-pad>", "▁<EOT>", "<EOT>",
)  # fmt: skip


@dataclass(frozen=True)
class FillTokens:
    """The tokens of filling in the middle. ends: any of these ends the gap's text. repository, file: None where it has none."""

    prefix: int
    suffix: int
    middle: int
    ends: tuple[int, ...]
    repository: int | None
    file: int | None

    def prompt(self, tokenizer: Tokenizer, before: str, after: str, others: Sequence[tuple[str, str]] = ()) -> list[int]:
        """The prompt that asks for the text between two texts. others: names and texts of other files.

        Source of the order: Qwen2.5-Coder's and StarCoder 2's repository format, as llama.cpp's server writes it.
        """

        def ids(text: str) -> list[int]:
            return tokenizer.encode(text, add_special=False)

        found = list(tokenizer.prefix)
        if others and self.repository is not None and self.file is not None:
            found += [self.repository, *ids("project\n")]
            for path, text in others:
                found += [self.file, *ids(f"{path}\n{text}\n")]
            found += [self.file, *ids("file\n")]
        elif others:
            found += ids("".join(f"{text}\n" for _, text in others))
        return [*found, self.prefix, *ids(before), self.suffix, *ids(after), self.middle]


def fill_tokens(tokenizer: Tokenizer) -> FillTokens | None:
    """The tokens that a vocabulary has for filling in the middle; None for a model that cannot."""
    find = tokenizer.token_id
    for marks in _MARKS:
        prefix, suffix, middle = map(find, marks)
        if prefix is not None and suffix is not None and middle is not None:
            ends = tuple(found for text in _ENDS if (found := find(text)) is not None)
            others = (next((text for text in texts if find(text) is not None), "") for texts in (_REPOSITORIES, _FILES))
            return FillTokens(prefix, suffix, middle, ends, *map(find, others))
    return None
