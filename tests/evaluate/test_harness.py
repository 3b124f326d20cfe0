"""lm-eval runs its tasks on an LLM: scores are those of the backend's rows, answers those of the LLM."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpuspec import LLM
from cpuspec.checkpoints import open_checkpoint
from cpuspec.errors import ConfigError
from cpuspec.evaluate.quality import Scorer, logits_of
from cpuspec.sampling import log_softmax
from cpuspec.settings import EngineConfig, SpecConfig
from tests.checkpoints.test_adapters import write_peft
from tools.make_tiny_model import make_tiny_gguf, make_tiny_hf

pytest.importorskip("lm_eval", reason="lm-eval is not installed; pip install 'cpuspec[eval]'")

from lm_eval.api.instance import Instance

from cpuspec.evaluate import harness
from cpuspec.evaluate.harness import HarnessLM, harness_table, open_harness, run_harness

CHOICES = [{"question": f"{n} and {n}?", "choices": [" one", " two words", " three"], "label": n % 3} for n in range(4)]


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HarnessLM]:
    model = open_checkpoint(make_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context_length=128))
    settings = EngineConfig(threads=1, max_sequences=2, max_rows=16)
    with open_harness(model, SpecConfig.parse("ngram"), settings=settings) as one:
        yield one


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Two tasks of a user's own, with their data beside them."""
    (tmp_path / "choices.json").write_text("".join(json.dumps(one) + "\n" for one in CHOICES), "utf-8")
    shared = f"""dataset_path: json
dataset_kwargs:
  data_files: {{test: {tmp_path}/choices.json}}
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
"""
    (tmp_path / "choose.yaml").write_text(
        f"task: own_choice\noutput_type: multiple_choice\n{shared}doc_to_choice: choices\ndoc_to_target: label\n"
        "metric_list: [{metric: acc}, {metric: acc_norm}]\n",
        "utf-8",
    )
    (tmp_path / "say.yaml").write_text(
        f'task: own_answer\noutput_type: generate_until\n{shared}doc_to_target: "{{{{choices[label]}}}}"\n'
        'generation_kwargs: {until: ["zz"], do_sample: false, max_gen_toks: 5}\nmetric_list: [{metric: exact_match}]\n',
        "utf-8",
    )
    return tmp_path


def instance(kind: str, *arguments: Any) -> Instance:
    return Instance(kind, {}, arguments, 0)


def likelihood(lm: HarnessLM, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    rows = log_softmax(np.concatenate(list(logits_of(lm._scorer._backend, context + continuation, 16))))
    at = np.arange(len(context) - 1, len(context) + len(continuation) - 1)
    return float(rows[at, continuation].sum()), bool((rows[at].argmax(axis=1) == continuation).all())


def test_likelihoods_are_those_of_the_continuation_behind_its_context(lm: HarnessLM) -> None:
    pairs = [("the cat", " sat on"), ("the cat", " ran"), ("a dog", " sat on the mat"), ("the cat", " sat on")]
    found = lm.loglikelihood([instance("loglikelihood", *pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (value, greedy) in zip(pairs, found, strict=True):
        ids, whole = lm.tok_encode(context), lm.tok_encode(context + continuation)
        assert (value, greedy) == pytest.approx(likelihood(lm, ids, whole[len(ids) :]))
    assert found[0] == found[3]
    likeliest = lm.tokenizer.decode([int(list(lm._scorer.logits(lm.tok_encode("the cat")))[-1][-1].argmax())])
    if lm.tok_encode("the cat" + likeliest)[: len(lm.tok_encode("the cat"))] == lm.tok_encode("the cat"):
        assert lm.loglikelihood([instance("loglikelihood", "the cat", likeliest)], disable_tqdm=True)[0][0] < 0


def test_a_context_that_does_not_fit_loses_its_beginning(lm: HarnessLM) -> None:
    (found,) = lm.loglikelihood([instance("loglikelihood", "the cat sat on the mat " * 40, " and ran")], disable_tqdm=True)
    ids, tail = lm.tok_encode("the cat sat on the mat " * 40 + " and ran"), lm.tok_encode("the cat sat on the mat " * 40)
    continuation = ids[len(lm.tok_encode(("the cat sat on the mat " * 40).rstrip())) :]
    kept = ids[-(lm.max_length + 1) :]
    assert len(tail) > lm.max_length
    assert found[0] == pytest.approx(likelihood_of_tail(lm, kept, len(continuation)))


def likelihood_of_tail(lm: HarnessLM, tokens: list[int], count: int) -> float:
    rows = log_softmax(np.concatenate(list(logits_of(lm._scorer._backend, tokens[:-1], 16))))
    return float(sum(rows[len(tokens) - 1 - count + number, tokens[len(tokens) - count + number]] for number in range(count)))


def test_rolling_likelihood_counts_every_token_of_a_text_once(lm: HarnessLM) -> None:
    short, long = "the cat sat on the mat", "the cat sat on the mat and ran " * 20
    found = lm.loglikelihood_rolling([instance("loglikelihood_rolling", text) for text in (short, long)], disable_tqdm=True)
    plain = [lm.tok_encode(text, add_special_tokens=False) for text in (short, long)]
    assert found[0] == pytest.approx(likelihood(lm, [lm.prefix_token_id], plain[0])[0])
    ids = [lm.prefix_token_id, *plain[1]]
    assert len(ids) > lm.max_length
    total, at = 0.0, 1
    while at < len(ids):  # each window counts what the ones before it have not
        end = min(at + lm.max_length, len(ids))
        begin = max(end - lm.max_length - 1, 0)
        total += likelihood_of_tail(lm, ids[begin:end], end - at)
        at = end
    assert found[1] == pytest.approx(total)


def test_rolling_likelihood_counts_no_prefix_after_a_prefix(lm: HarnessLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that puts BOS before every text, as Llama 3's: the windows have it already."""
    (before,) = lm.loglikelihood_rolling([instance("loglikelihood_rolling", "the cat sat")], disable_tqdm=True)
    monkeypatch.setattr(type(lm.tokenizer), "prefix", property(lambda _: (lm.prefix_token_id,)))
    assert lm.tok_encode("the cat sat")[0] == lm.prefix_token_id
    assert lm.loglikelihood_rolling([instance("loglikelihood_rolling", "the cat sat")], disable_tqdm=True) == [before]


def test_answers_that_are_done_are_kept_when_others_fail(lm: HarnessLM, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[str] = []
    monkeypatch.setattr(harness, "_ANSWERS_AT_ONCE", 2)
    monkeypatch.setattr(lm.cache_hook, "add_partial", lambda kind, arguments, answer: kept.append(arguments[0]))
    real = harness.answer_all

    def fails(llm: LLM, asked: Any) -> Any:
        if kept:
            raise KeyboardInterrupt
        return real(llm, asked)

    monkeypatch.setattr(harness, "answer_all", fails)
    options = {"until": [], "do_sample": False, "max_gen_toks": 2}
    with pytest.raises(KeyboardInterrupt):
        lm.generate_until([instance("generate_until", text, options) for text in ("a cat", "a dog", "a mat")], disable_tqdm=True)
    assert kept == ["a cat", "a dog"]


def test_answers_are_those_of_the_llm_and_stop_where_the_task_says(lm: HarnessLM) -> None:
    options = {"until": ["zz"], "do_sample": False, "max_gen_toks": 6}
    texts = ["the cat", "a dog ran", "one two one two one"]
    found = lm.generate_until([instance("generate_until", text, options) for text in texts], disable_tqdm=True)
    wanted = [lm._llm.generate(lm.tok_encode(text), max_tokens=6, stop=("zz",))[0].text for text in texts]
    assert found == wanted
    stop = found[0][1:3]
    (cut,) = lm.generate_until([instance("generate_until", texts[0], {"until": stop, "max_gen_toks": 6})], disable_tqdm=True)
    assert stop
    assert cut == found[0][: found[0].index(stop)]


def test_conversations_become_their_control_tokens(lm: HarnessLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    text = lm.apply_chat_template(messages)
    assert lm.tok_encode(text) == lm.tokenizer.encode_chat(messages)
    assert lm.chat_template(True) == lm.tokenizer.chat_template
    assert lm.tokenizer_name


@pytest.mark.parametrize("chat", [False, True])
def test_the_harness_runs_choices_and_answers(lm: HarnessLM, tasks: Path, chat: bool) -> None:
    found = run_harness(lm, ["own_choice", "own_answer"], tasks, limit=3, chat=chat)
    assert found["n-samples"]["own_choice"]["effective"] == 3
    accuracy = found["results"]["own_choice"]["acc,none"]
    if not chat:
        right = 0
        for one in CHOICES[:3]:
            context = lm.tok_encode(f"Question: {one['question']}\nAnswer:")
            values = []
            for choice in one["choices"]:
                whole = lm.tok_encode(f"Question: {one['question']}\nAnswer: {choice}")
                values.append(likelihood(lm, context, whole[len(context) :])[0])
            right += int(np.argmax(values)) == one["label"]
        assert accuracy == pytest.approx(right / 3)
    assert found["results"]["own_answer"]["exact_match,none"] == 0
    assert "own_choice" in harness_table(found)


def test_unknown_tasks_are_refused(lm: HarnessLM, tasks: Path) -> None:
    with pytest.raises(ConfigError, match="no task 'own_nothing'"):
        run_harness(lm, ["own_nothing"], tasks)


def test_what_texts_share_is_not_computed_again_and_changes_nothing(lm: HarnessLM) -> None:
    backend = lm._scorer._backend
    scorer, text = Scorer(backend, 64), list(range(3, 43))
    for tokens, first in ((text, 0), ([*text[:30], 5, 6, 7], 29), (text, 35), (text[:10], 9), ([1, 2], 0)):
        rows = np.concatenate(list(scorer.logits(tokens, first)))
        assert np.array_equal(rows, np.concatenate(list(logits_of(backend, tokens, 16, first))))


def test_scores_are_those_with_the_adapters_of_the_settings(tmp_path: Path) -> None:
    model = make_tiny_hf(tmp_path / "model")
    write_peft(tmp_path / "lora", model)
    tokens, checkpoint = [1, 2, 3, 4, 5], open_checkpoint(model)
    settings = EngineConfig(threads=1, max_rows=16, keep_packed=False, lora=(str(tmp_path / "lora"),))
    with open_harness(checkpoint, backend="numpy", settings=settings) as lm:
        ((found, _),) = lm._loglikelihood_tokens([(("", ""), tokens[:3], tokens[3:])])
    with LLM(checkpoint, "none", "numpy", settings=settings) as llm:
        with_adapter, without = (
            sum(one.logprob for one in llm.score([tokens], lora_request=adapters)[0][-2:]) for adapters in (None, {})
        )
    assert found == pytest.approx(with_adapter, abs=1e-4)
    assert abs(found - without) > 0.01, "else the adapter changes nothing"
