"""Prometheus metrics with vLLM's meanings under the prefix `cpuspec:`, and the log line of each request.

Sources of names and buckets: vLLM's v1/metrics/loggers.py. `level` is the drafter whose tokens were counted.
"""

import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily as Counted
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric

from cpuspec.metrics import LevelCounters, LevelReads, PrefixStats, now_s
from cpuspec.server.admission import AnswerMeter

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LOG = logging.getLogger("cpuspec.server")

_TTFT = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_RECENT = 1024  # requests that the percentiles cover

# Metrics with a value for each level: kind, name, help, and the value; None where a level has none.
Row = tuple[type[Gauge] | type[Counted], str, str, Callable[[Any], float | None]]
_OF_READS: Sequence[Row] = (
    (Counted, "model_forwards", "Forwards of a model.", lambda one: one.num_forwards),
    (Counted, "weight_bytes_read", "Bytes of weights that they read.", lambda one: one.weight_bytes),
    (Counted, "disk_bytes_read", "Bytes of experts read from the disk.", lambda one: one.disk and one.disk.num_bytes),
    (Counted, "disk_wait_seconds", "Time that forwards waited for these.", lambda one: one.disk and one.disk.wait_s),
)
_OF_PREFIXES: Sequence[Row] = (
    (Gauge, "kept_bytes", "Keys and values in memory that finished requests have left.", lambda one: one.kept_bytes),
    (Gauge, "limit_bytes", "The most that they may take.", lambda one: inf if one.limit_bytes is None else one.limit_bytes),
    (Gauge, "disk_bytes", "Files of the cache's directory, of all models.", lambda one: one.disk_bytes),
    (Counted, "evictions", "Blocks that left the memory to make room.", lambda one: one.num_evictions),
    (Counted, "blocks_read", "Blocks that were read from the disk.", lambda one: one.num_blocks_read),
    (Counted, "blocks_written", "Blocks that were written to the disk.", lambda one: one.num_blocks_written),
    (Counted, "blocks_refused", "Blocks of the disk that were damaged.", lambda one: one.num_blocks_refused),
    (Counted, "blocks_dropped", "Blocks that a slow disk had no time to write.", lambda one: one.num_blocks_dropped),
)
_OF_ROUNDS: Sequence[Row] = (
    (Counted, "num_rounds", 'Verifications, without a draft, too: "auto" counts those.', lambda one: one.num_cycles),
)
_OF_DRAFTS: Sequence[Row] = (
    (Counted, "num_drafts", "Drafts that were verified.", lambda one: one.num_drafts),
    (Counted, "num_draft_tokens", "Tokens that were drafted.", lambda one: one.num_draft_tokens),
    (Counted, "num_accepted_tokens", "Drafted tokens that were accepted.", lambda one: one.num_accepted_tokens),
    (
        Gauge,
        "mean_acceptance_length",
        "Tokens of a draft, its bonus too.",
        lambda one: 1 + one.num_accepted_tokens / one.num_drafts,
    ),
)


class Metrics:
    """All metrics of a model, in a registry of their own.

    state: returns the numbers of answers that run and wait, and the share of the cache that the running ones hold.
    levels, reads, draft_failures: return the LLM's counters.
    """

    def __init__(
        self,
        model: str,
        state: Callable[[], tuple[int, int, float]],
        levels: Callable[[], dict[str, LevelCounters]],
        reads: Callable[[], list[LevelReads]],
        draft_failures: Callable[[], int],
    ) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._state, self._levels, self._reads, self._draft_failures = state, levels, reads, draft_failures
        self.prefixes: Sequence[PrefixStats] = ()  # of each model of the chain, as they were last asked for
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=_RECENT) for name in ("ttft", "tpot", "itl", "e2e")}

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"cpuspec:{name}", help, ["model_name"], buckets=buckets, registry=self.registry)
            return made.labels(model)

        def counter(name: str, help: str) -> Counter:
            return Counter(f"cpuspec:{name}", help, ["model_name"], registry=self.registry).labels(model)

        self._ttft = histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", _TTFT)
        self._itl = histogram("inter_token_latency_seconds", "Gaps between the outputs of a request.", _GAP)
        self._tpot = histogram("request_time_per_output_token_seconds", "Time after the first token, over the tokens then.", _GAP)
        self._e2e = histogram("e2e_request_latency_seconds", "From a request's arrival to its last token.", _WHOLE)
        self._queue = histogram("request_queue_time_seconds", "Time that a request waited for a place.", _WHOLE)
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._new = histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._prompt_total = counter("prompt_tokens", "Tokens of prompts.")
        self._new_total = counter("generation_tokens", "Tokens of answers.")
        self._cached_total = counter("prefix_cache_hits", "Tokens of prompts that the cache held.")
        self._queried_total = counter("prefix_cache_queries", "Tokens of prompts that were looked for in the cache.")
        self._ended = Counter(
            "cpuspec:request_success", "Ended answers.", ["model_name", "finished_reason"], registry=self.registry
        )
        self._refused = Counter("cpuspec:request_refused", "Refused requests.", ["model_name", "status"], registry=self.registry)
        self.registry.register(self)

    def output(self, meter: AnswerMeter, num_tokens: int) -> None:
        """Count tokens that have just arrived."""
        now = now_s()
        if num_tokens and meter.first_s is None:
            meter.first_s = now
            self._ttft.observe(now - meter.arrival_s)
            self._recent["ttft"].append(now - meter.arrival_s)
        elif num_tokens and meter.last_s is not None:
            self._itl.observe(now - meter.last_s)
            self._recent["itl"].append(now - meter.last_s)
        if num_tokens:
            meter.last_s = now
        meter.num_new_tokens += num_tokens
        self._new_total.inc(num_tokens)

    def ended(self, meter: AnswerMeter, reason: str, num_cached_tokens: int) -> None:
        """Count an answer that has ended."""
        self._ended.labels(self._model, reason).inc()
        self._prompt_total.inc(meter.num_prompt_tokens)
        self._queried_total.inc(meter.num_prompt_tokens)
        self._cached_total.inc(num_cached_tokens)
        if meter.start_s is not None:
            self._queue.observe(meter.start_s - meter.arrival_s)
        if reason == "aborted" or meter.first_s is None or meter.last_s is None:
            return
        self._prompt.observe(meter.num_prompt_tokens)
        self._new.observe(meter.num_new_tokens)
        self._e2e.observe(meter.last_s - meter.arrival_s)
        self._recent["e2e"].append(meter.last_s - meter.arrival_s)
        if meter.num_new_tokens > 1:
            tpot_s = (meter.last_s - meter.first_s) / (meter.num_new_tokens - 1)
            self._tpot.observe(tpot_s)
            self._recent["tpot"].append(tpot_s)

    def refused(self, status: int) -> None:
        """Count a request that got no answer."""
        self._refused.labels(self._model, str(status)).inc()

    @property
    def mean_request_s(self) -> float:
        """How long recent requests took, 1 second before there were any."""
        recent = self._recent["e2e"]
        return float(np.mean(recent)) if recent else 1.0

    def collect(self) -> Iterator[Metric]:
        """The metrics that are computed when they are asked for, as a registry wants them of a collector."""
        running, waiting, share = self._state()
        yield self._family(Gauge, "num_requests_running", "Answers that run.", [(running,)])
        yield self._family(Gauge, "num_requests_waiting", "Answers that wait for a place, or for memory or a prefix.", [(waiting,)])
        help = "Share of the cache's tokens that running answers hold; 1 is all."
        yield self._family(Gauge, "kv_cache_usage_perc", help, [(share,)])
        for name, values in self._recent.items():
            rows = [(str(rank), float(np.quantile(values, rank))) for rank in (0.5, 0.95, 0.99) if values]
            yield self._family(Gauge, f"recent_{name}_seconds", f"{name} of the last {_RECENT} at most.", rows, "quantile")
        yield from self._of_levels("", _OF_READS, [(one.name, one) for one in self._reads()])
        yield from self._of_levels("prefix_cache_", _OF_PREFIXES, [(one.name, one) for one in self.prefixes])
        levels = list(self._levels().items())
        drafting = [(name, level) for name, level in levels if level.num_drafts]
        yield from self._of_levels("spec_decode_", _OF_ROUNDS, levels)
        yield from self._of_levels("spec_decode_", _OF_DRAFTS, drafting)
        help = "Requests that went on without drafts because their drafter failed."
        yield self._family(Counted, "spec_decode_num_draft_failures", help, [(self._draft_failures(),)])
        by_position = [
            (name, str(position), number)
            for name, level in drafting
            for position, number in enumerate(level.num_accepted_tokens_per_pos)
        ]
        help = "The same by their position in the draft."
        yield self._family(Counted, "spec_decode_num_accepted_tokens_per_pos", help, by_position, "level", "position")

    def _of_levels(self, prefix: str, table: Iterable[Row], levels: Sequence[tuple[str, Any]]) -> Iterator[Metric]:
        """A family for each row of a table, with a value for each level that has one."""
        for kind, name, help, value in table:
            found = [(level, value(one)) for level, one in levels]
            yield self._family(kind, prefix + name, help, [row for row in found if row[1] is not None], "level")

    def _family(
        self, kind: type[Gauge] | type[Counted], name: str, help: str, rows: Sequence[tuple[Any, ...]], *labels: str
    ) -> Metric:
        """A family of this model's metrics. rows: the labels' values, and the number."""
        family = kind(f"cpuspec:{name}", help, labels=["model_name", *labels])
        for *values, number in rows:
            family.add_metric([self._model, *values], number)
        return family


def metrics_text(found: Iterable[Metric]) -> bytes:
    """The metrics of several models in Prometheus' text format, which names each metric once."""
    families: dict[str, Metric] = {}
    for family in found:
        families.setdefault(family.name, Metric(family.name, family.documentation, family.type)).samples.extend(family.samples)
    return generate_latest(_Families(list(families.values())))


class _Families:
    """A registry of metrics that have been collected."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def log_event(event: str, fields: Mapping[str, Any]) -> None:
    """A line of JSON in the log. No text of a prompt or an answer belongs into it."""
    _LOG.info("%s", json.dumps({"event": event, **fields}))
