"""A certificate is given to drafts that change nothing, and to no others; and it is not given blindly."""

import dataclasses
from functools import partial

import numpy as np
import pytest

from cpuspec import LLM
from cpuspec.backends import make_backend
from cpuspec.checkpoints import open_checkpoint
from cpuspec.engine.engine import Engine
from cpuspec.errors import ConfigError
from cpuspec.evaluate import certify as module
from cpuspec.evaluate.certify import TEMPERATURES, certify, check_greedy, check_sampled, plain_rows
from cpuspec.settings import EngineConfig, SamplingParams, SpecConfig
from cpuspec.speculation.context import Context
from cpuspec.speculation.proposer import NullProposer
from cpuspec.text import make_tokenizer
from tests.toys import SampledProposer
from tools.make_tiny_model import make_tiny_gguf

VOCAB = 384
NGRAM = SpecConfig.parse("ngram")
ONE_THREAD = EngineConfig(threads=1)
PROMPT = [5, 9, 7, 5, 9, 8, 5, 9]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    small = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
    return open_checkpoint(make_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", vocab_size=VOCAB, **small))


@pytest.fixture(scope="module")
def plain(checkpoint):
    return make_backend("numpy", checkpoint, EngineConfig(8, 64))


@pytest.fixture(scope="module")
def rows(plain):
    return plain_rows(plain, PROMPT)


@pytest.fixture(scope="module")
def certificate(checkpoint):
    return certify(checkpoint, NGRAM, max_tokens=12, num_samples=60, backend="numpy", settings=ONE_THREAD)


def sampled(checkpoint, plain, rows, proposer, num_samples=64):
    engine = Engine(Context(plain, 8, 64), proposer, make_tokenizer(checkpoint))

    def answers(each):
        tokens = {engine.add_request(PROMPT, params): [] for params in each}
        while engine.has_work:
            for output in engine.step():
                tokens[output.request_id] += output.token_ids
        return [(ids, None) for ids in tokens.values()]

    return check_sampled(answers, rows, num_samples)


def test_packed_weights_are_verified_before_they_are_certified(monkeypatch):
    def ask(threads):
        raise ConfigError("asked")

    monkeypatch.setattr(module, "verify_packed", ask)
    with pytest.raises(ConfigError, match="asked"):
        certify(None, NGRAM)


def test_drafts_that_change_nothing_are_certified_by_a_test_that_sees_a_lie(certificate):
    assert certificate.passed
    assert certificate.control_rejected
    assert not certificate.control.passed
    assert {arm.at_once for arm in certificate.greedy.arms} == {1, 8}
    assert all(arm.num_draft_tokens for arm in certificate.greedy.arms)
    assert certificate.sampled.num_draft_tokens > 0
    assert len(certificate.sampled.comparisons) == 4 * len(TEMPERATURES)


@pytest.mark.parametrize(
    ("backend", "draft"),
    [("numba", "torch:self:mxfp4@3"), ("numba", "onnxruntime:self:mxfp4@3"), ("torch", "ngram,numba:self:q8_0@3")],
)
def test_drafts_on_another_backend_than_the_targets_are_certified(checkpoint, backend, draft):
    found = certify(checkpoint, SpecConfig.parse(draft), max_tokens=12, num_samples=60, backend=backend, settings=ONE_THREAD)
    assert found.passed
    assert found.control_rejected
    assert found.sampled.num_draft_tokens > 0


def test_each_part_alone_can_refuse_a_certificate(certificate):
    arm = dataclasses.replace(certificate.greedy.arms[0], num_identical=0)
    greedy = dataclasses.replace(certificate.greedy, arms=(*certificate.greedy.arms, arm))
    assert not dataclasses.replace(certificate, greedy=greedy).passed
    assert not dataclasses.replace(certificate, sampled=certificate.control).passed
    assert not dataclasses.replace(certificate, control=certificate.sampled).passed


def test_a_token_that_drafts_changed_is_found(checkpoint, monkeypatch):
    class Wrong(LLM):
        def generate(self, prompts, params=None):
            answers = super().generate(prompts, params)
            if self.spec.levels:
                answers[-1].token_ids[4] += 1
            return answers

    monkeypatch.setattr(module, "LLM", Wrong)
    found = check_greedy(checkpoint, NGRAM, ["one", "two", "three"], 8, "numpy", ONE_THREAD)
    assert not found.passed
    assert [arm.first_differences for arm in found.arms] == [{0: 4, 1: 4, 2: 4}, {2: 4}]


def test_the_expected_probabilities_are_those_of_every_beginning(plain, rows):
    params = SamplingParams(temperature=1.0, top_k=4)
    probs = module._beginnings(rows, params)
    assert sum(probs.values()) == pytest.approx(1)
    assert len(probs) == 4**3
    path = max(probs, key=probs.__getitem__)
    expected = 1.0
    for i, token in enumerate(path):
        weights = np.sort(np.exp(rows[path[:i]].astype(float)))[-4:]
        expected *= np.exp(float(rows[path[:i]][token])) / weights.sum()
    assert probs[path] == pytest.approx(expected)


@pytest.mark.parametrize("honest", [NullProposer(), SampledProposer(VOCAB)], ids=["none", "sampled"])
def test_honest_proposers_follow_the_distribution(checkpoint, plain, rows, honest):
    assert sampled(checkpoint, plain, rows, honest).passed


def test_a_verifier_that_believes_its_drafts_is_seen_at_every_temperature(rows):
    found = check_sampled(partial(module.believed, rows), rows, 300)
    assert found.rejected_at() == set(TEMPERATURES)


def test_too_few_samples_are_refused(checkpoint):
    with pytest.raises(ConfigError, match="at least 50"):
        certify(checkpoint, NGRAM, num_samples=9)
