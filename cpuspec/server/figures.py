"""The figures of answers as OpenAI's `usage` and llama-server's `timings`; tokens with their log-probabilities."""

from collections.abc import Sequence
from itertools import accumulate
from math import isnan
from typing import Any

from cpuspec.engine.engine import Output
from cpuspec.metrics import RequestStats
from cpuspec.sampling import TokenLogprobs
from cpuspec.text import Tokenizer


def usage(stats: Sequence[RequestStats], num_prompts: int = 1) -> dict[str, Any]:
    """OpenAI's usage of all answers to `num_prompts` prompts; the answers to one prompt count its tokens once."""
    per_prompt = max(1, len(stats) // num_prompts)
    prompt_tokens = sum(one.num_prompt_tokens for one in stats[::per_prompt])
    new_tokens = sum(one.num_new_tokens for one in stats)
    drafted, accepted = sum(one.num_draft_tokens for one in stats), sum(one.num_accepted_tokens for one in stats)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(one.num_cached_tokens for one in stats[::per_prompt])},
        "completion_tokens_details": {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted},
    }


def timings(stats: RequestStats) -> dict[str, Any]:
    """llama-server's timings of one answer, in milliseconds. The first token's time belongs to the prompt, not to predicted_*."""
    num_read, num_decoded = stats.num_prompt_tokens - stats.num_cached_tokens, max(stats.num_new_tokens - 1, 0)
    prompt_ms, predicted_ms = 1000 * (stats.ttft_s or 0.0), 1000 * (stats.decode_s or 0.0)
    return {
        "cache_n": stats.num_cached_tokens,
        "prompt_n": num_read,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / num_read if num_read else 0.0,
        "prompt_per_second": 1000 * num_read / prompt_ms if prompt_ms else 0.0,
        "predicted_n": stats.num_new_tokens,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / num_decoded if num_decoded else 0.0,
        "predicted_per_second": stats.tokens_per_s or 0.0,
        "draft_n": stats.num_draft_tokens,
        "draft_n_accepted": stats.num_accepted_tokens,
    }


def token_parts(output: Output) -> list[tuple[str, list[TokenLogprobs], dict[str, Any]]]:
    """For each token the text that it added, its log-probabilities, and the `cpuspec` object of its chunk.

    level: the drafter that proposed the token, null for the target's own. rounds: only in the first token's object; the target's
    verifications that led to this output, each with the chosen drafter and its counts of drafted and accepted tokens.
    """
    rounds = [
        {"level": source if drafted else None, "drafted": drafted, "accepted": accepted}
        for source, drafted, accepted, _ in (cycles[-1] for cycles in output.cycles)
    ]
    parts = []
    for number, (token, text, source) in enumerate(zip(output.token_ids, output.token_texts, output.token_sources, strict=True)):
        drafted_by = {"id": token, "level": source or None} | ({} if number else {"rounds": rounds})
        parts.append((text, output.logprobs[number : number + 1], {"cpuspec": drafted_by}))
    return parts


def log_figures(stats: Sequence[RequestStats]) -> dict[str, Any]:
    """The figures of the answers for the log line of their request."""
    found = usage(stats)
    first = min((one.ttft_s for one in stats if one.ttft_s is not None), default=None)
    return {
        "prompt_tokens": stats[0].num_prompt_tokens,
        "cached_tokens": stats[0].num_cached_tokens,
        "new_tokens": found["completion_tokens"],
        "ttft_s": first and round(first, 4),
        "drafted_tokens": sum(one.num_draft_tokens for one in stats),
        "accepted_tokens": sum(one.num_accepted_tokens for one in stats),
    }


def token_text(tokenizer: Tokenizer, token: int) -> tuple[str, list[int]]:
    """A token's text and bytes; of a special token its name."""
    meaning = tokenizer.meaning(token)
    data = meaning if isinstance(meaning, bytes) else (meaning or "").encode()
    return data.decode(errors="replace"), list(data)


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """OpenAI's logprobs of a chat completion."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, data = token_text(tokenizer, token)
        return {"token": text, "logprob": logprob, "bytes": data}

    content = [
        entry(one.token_id, one.logprob) | {"top_logprobs": [entry(token, logprob) for token, logprob in one.top]} for one in tokens
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token of a prompt its entry and those of the likeliest tokens, by id; null for the first.

    rank: null for a token below the likeliest ones.
    """

    def entries(one: TokenLogprobs) -> dict[str, Any]:
        ranked: dict[int, tuple[float, int | None]] = {token: (logprob, rank) for rank, (token, logprob) in enumerate(one.top, 1)}
        ranked.setdefault(one.token_id, (one.logprob, None))
        return {
            str(token): {"logprob": logprob, "rank": rank, "decoded_token": token_text(tokenizer, token)[0]}
            for token, (logprob, rank) in ranked.items()
        }

    return [None if isnan(one.logprob) else entries(one) for one in tokens]


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
    """OpenAI's logprobs of a plain completion. offset: characters of the text before the first token.

    A token without a probability, as the first of a prompt, has a NaN, and gets nulls.
    """

    def name(token: int) -> str:
        """The token's text; of bytes that are no whole characters their codes, as OpenAI spells them, so that they stay apart."""
        text, data = token_text(tokenizer, token)
        return text if text.encode() == bytes(data) else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    texts = [token_text(tokenizer, one.token_id)[0] for one in tokens]
    offsets = list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else []
    tops = [{name(token): logprob for token, logprob in one.top} for one in tokens]
    return {
        "tokens": [name(one.token_id) for one in tokens],
        "token_logprobs": [None if isnan(one.logprob) else one.logprob for one in tokens],
        "top_logprobs": [top or None for top in tops] if any(tops) else None,
        "text_offset": offsets,
    }
