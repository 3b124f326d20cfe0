"""Prometheus metrics with the meanings that vLLM gives them, under our prefix, and a log line for each request.

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
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cpuspec.metrics import LevelCounters, LevelReads, PrefixStats, now_s
from cpuspec.server.meter import AnswerMeter

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LOG = logging.getLogger("cpuspec.server")

_TTFT = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_RECENT = 1024  # requests that the percentiles are of


class Metrics:
    """All metrics of a server, in a registry of their own.

    state: the answers that run and wait, and the share of the cache that running ones hold.
    levels, reads, draft_failures: of the LLM.
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
        self._queue = histogram("request_queue_time_seconds", "Time that a request waited for its turn.", _WHOLE)
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
        self.registry.register(_Now(self))

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
        """Count an answer that has come to its end."""
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

    def now(self) -> Iterator[Metric]:
        """The metrics that are computed when they are asked for."""
        names = ["model_name"]
        running, waiting, share = self._state()
        gauges = (
            ("num_requests_running", "Answers that are computed.", running),
            ("num_requests_waiting", "Answers that wait for their turn.", waiting),
            ("kv_cache_usage_perc", "Share of the cache's tokens that running answers hold; 1 is all.", share),
        )
        for name, help, value in gauges:
            gauge = GaugeMetricFamily(f"cpuspec:{name}", help, labels=names)
            gauge.add_metric([self._model], value)
            yield gauge
        for name, values in self._recent.items():
            quantiles = GaugeMetricFamily(
                f"cpuspec:recent_{name}_seconds", f"{name} of the last {_RECENT} at most.", labels=[*names, "quantile"]
            )
            for share in (0.5, 0.95, 0.99) if values else ():
                quantiles.add_metric([self._model, str(share)], float(np.quantile(values, share)))
            yield quantiles
        forwards = CounterMetricFamily("cpuspec:model_forwards", "Forwards of a model.", labels=[*names, "level"])
        read = CounterMetricFamily("cpuspec:weight_bytes_read", "Bytes of weights that they read.", labels=[*names, "level"])
        disk = CounterMetricFamily("cpuspec:disk_bytes_read", "Bytes of experts read from the disk.", labels=[*names, "level"])
        wait = CounterMetricFamily("cpuspec:disk_wait_seconds", "Time that forwards waited for these.", labels=[*names, "level"])
        for one in self._reads():
            forwards.add_metric([self._model, one.name], one.num_forwards)
            read.add_metric([self._model, one.name], one.weight_bytes)
            if one.disk:
                disk.add_metric([self._model, one.name], one.disk.num_bytes)
                wait.add_metric([self._model, one.name], one.disk.wait_s)
        yield from (forwards, read, disk, wait)
        yield from self._prefix_cache()
        yield from self._speculation()

    def _prefix_cache(self) -> Iterator[Metric]:
        labels = ["model_name", "level"]
        gauges: tuple[tuple[str, str, Callable[[PrefixStats], float]], ...] = (
            ("kept_bytes", "Keys and values in memory that finished requests have left.", lambda one: one.kept_bytes),
            ("limit_bytes", "The most that they may take.", lambda one: inf if one.limit_bytes is None else one.limit_bytes),
            ("disk_bytes", "Files of the cache's directory, of all models.", lambda one: one.disk_bytes),
        )
        counts: tuple[tuple[str, str, Callable[[PrefixStats], int]], ...] = (
            ("evictions", "Blocks that left the memory to make room.", lambda one: one.num_evictions),
            ("blocks_read", "Blocks that were read from the disk.", lambda one: one.num_blocks_read),
            ("blocks_written", "Blocks that were written to the disk.", lambda one: one.num_blocks_written),
            ("blocks_refused", "Blocks of the disk that were damaged.", lambda one: one.num_blocks_refused),
            ("blocks_dropped", "Blocks that a slow disk had no time to write.", lambda one: one.num_blocks_dropped),
        )
        for name, help, value in gauges:
            gauge = GaugeMetricFamily(f"cpuspec:prefix_cache_{name}", help, labels=labels)
            for one in self.prefixes:
                gauge.add_metric([self._model, one.name], value(one))
            yield gauge
        for name, help, count in counts:
            counter = CounterMetricFamily(f"cpuspec:prefix_cache_{name}", help, labels=labels)
            for one in self.prefixes:
                counter.add_metric([self._model, one.name], count(one))
            yield counter

    def _speculation(self) -> Iterator[Metric]:
        labels = ["model_name", "level"]
        counts: tuple[tuple[str, str, Callable[[LevelCounters], int]], ...] = (
            ("num_drafts", "Drafts that were verified.", lambda level: level.num_drafts),
            ("num_draft_tokens", "Tokens that were drafted.", lambda level: level.num_draft_tokens),
            ("num_accepted_tokens", "Drafted tokens that were accepted.", lambda level: level.num_accepted_tokens),
        )
        rounds = CounterMetricFamily(
            "cpuspec:spec_decode_num_rounds", 'Verifications, without a draft, too: "auto" counts those.', labels=labels
        )
        levels = dict(self._levels())
        for level, found in levels.items():
            rounds.add_metric([self._model, level], found.num_cycles)
        yield rounds
        levels = {name: level for name, level in levels.items() if level.num_drafts}
        for name, help, value in counts:
            counter = CounterMetricFamily(f"cpuspec:spec_decode_{name}", help, labels=labels)
            for level, found in levels.items():
                counter.add_metric([self._model, level], value(found))
            yield counter
        per_pos = CounterMetricFamily(
            "cpuspec:spec_decode_num_accepted_tokens_per_pos",
            "The same by their position in the draft.",
            labels=[*labels, "position"],
        )
        length = GaugeMetricFamily(
            "cpuspec:spec_decode_mean_acceptance_length", "Tokens of a draft that was verified, its bonus included.", labels=labels
        )
        for level, found in levels.items():
            for position, number in enumerate(found.num_accepted_tokens_per_pos):
                per_pos.add_metric([self._model, level, str(position)], number)
            length.add_metric([self._model, level], 1 + found.num_accepted_tokens / found.num_drafts)
        failures = CounterMetricFamily(
            "cpuspec:spec_decode_num_draft_failures",
            "Requests that went on without drafts because their drafter failed.",
            labels=labels[:1],
        )
        failures.add_metric([self._model], self._draft_failures())
        yield failures
        yield per_pos
        yield length


def metrics_text(found: Iterable[Metric]) -> bytes:
    """The metrics of several models in Prometheus' text format, which names each metric once."""
    families: dict[str, Metric] = {}
    for family in found:
        families.setdefault(family.name, Metric(family.name, family.documentation, family.type)).samples.extend(family.samples)
    return generate_latest(_Families(list(families.values())))


class _Families:
    """A registry of metrics that are there already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


class _Now:
    """A collector of `Metrics.now`, as prometheus_client wants it."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.now()


def log_event(event: str, fields: Mapping[str, Any]) -> None:
    """A line of JSON in the log. No text of a prompt or an answer belongs into it."""
    _LOG.info("%s", json.dumps({"event": event, **fields}))
