"""Whether a draft model speaks the target's token ids.

Padded vocabularies do (`Context.vocab_size`). A context whose model has other tokens would translate in the same place, what is
fed and the rows that come back, so that everything above it stays in the target's ids.
"""

from cpuspec.errors import ConfigError
from cpuspec.tokenizer import Tokenizer


def check_same_tokens(target: Tokenizer, draft: Tokenizer, drafter: str) -> None:
    """Raise ConfigError unless every id that both have stands for the same bytes, or for the same control token."""
    token_id = target.first_difference(draft)
    if token_id is not None:
        ours, theirs = (tokenizer.decode([token_id], skip_special=False) for tokenizer in (target, draft))
        raise ConfigError(
            f"{drafter} has another vocabulary than the target: token {token_id} is {theirs!r} there and {ours!r} here; "
            "draft with a smaller model of the target's family, or with ngram"
        )
