"""Draft specs: what can be written, what it becomes, and what is refused before a model is loaded."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpuspec.backends import BACKENDS
from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.gguf_file import GgufFile, read_gguf
from cpuspec.engine.draft_spec import LOOKUPS, OWN_WEIGHTS, Target, build, check_spec, draft_models, open_spec
from cpuspec.engine.llm import LLM
from cpuspec.errors import ConfigError, CpuspecError
from cpuspec.settings import EngineConfig, LevelSpec, SamplingParams, SpecConfig
from cpuspec.speculation.chain import DEFAULT_NUM_TOKENS, ChainProposer
from cpuspec.speculation.chosen import ChosenDrafts
from cpuspec.speculation.combine import Combined
from cpuspec.speculation.context import Context
from cpuspec.speculation.drafters.lookups import LookupProposer
from cpuspec.speculation.proposer import NullProposer, Proposer
from tests.conformance.harness import check_ways
from tests.toys import ToyBackend, ToyTokenizer
from tools.make_tiny_model import make_tiny_gguf, make_tiny_hf

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 3, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft of the same vocabulary with shorter context, padded and other vocabularies."""
    directory = tmp_path_factory.mktemp("models")
    make_tiny_gguf(directory / "target.gguf", context_length=256, **{**SMALL, "num_layers": 4}, predicts=True)
    make_tiny_gguf(directory / "draft.gguf", seed=1, context_length=64, **{**SMALL, "num_layers": 1})
    for name, vocab_size in (("padded", 400), ("fewer", 379), ("other", 300)):
        path = directory / f"{name}.gguf"
        make_tiny_gguf(path, seed=3, context_length=256, vocab_size=vocab_size, **{**SMALL, "num_layers": 1})
    make_tiny_hf(directory / "hf", seed=2, context_length=256, **{**SMALL, "num_layers": 1})
    return directory


def toy_target() -> Target:
    return Target(None, ToyBackend(1).config, ToyTokenizer(8), "numpy", 64, EngineConfig())  # type: ignore[arg-type]


def built(text: str) -> Proposer:
    return build(open_spec(SpecConfig.parse(text), toy_target()), Context(ToyBackend(1), 1, 64))


# --------------------------------------------------------------------------------------------------------------------- grammar


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("none", ()),
        ("", ()),
        ("ngram", (LevelSpec("ngram"),)),
        (" ngram@8 , self:mxfp4@4", (LevelSpec("ngram", 8), LevelSpec("self:mxfp4", 4))),
        ("some-model@6:0.4", (LevelSpec("some-model", 6, 0.4),)),
        ("text:some/model.gguf@6", (LevelSpec("text:some/model.gguf", 6),)),
        ("match:some/model.gguf@6", (LevelSpec("text:some/model.gguf", 6),)),
        ("ngram,torch:cuda:0,dtype=bf16:match:x@6", (LevelSpec("ngram"), LevelSpec("torch:cuda:0,dtype=bf16:text:x", 6))),
        ("numba:threads=1:a,numpy:b", (LevelSpec("numba:threads=1:a"), LevelSpec("numpy:b"))),
        ("some/model.gguf@:.25", (LevelSpec("some/model.gguf", None, 0.25),)),
        ("skip:3/7@2+ngram@9", (LevelSpec("skip:3/7", 2, then=(LevelSpec("ngram", 9),)),)),
        ("a+b+c:d@1", (LevelSpec("a", then=(LevelSpec("b"), LevelSpec("c:d", 1))),)),
        ("model@home@3", (LevelSpec("model@home", 3),)),
        ("my/file.py:Mine@5", (LevelSpec("my/file.py:Mine", 5),)),
    ],
)
def test_a_spec_reads_as_its_levels_and_writes_itself_again(text: str, levels: tuple[LevelSpec, ...]) -> None:
    spec = SpecConfig.parse(text)
    assert spec.levels == levels
    assert SpecConfig.parse(str(spec)) == spec


@pytest.mark.parametrize(
    "text",
    [
        ",",
        "ngram,",
        "ngram:",
        "ngram@",
        "@4",
        "ngram@0",
        "ngram@256",
        "ngram@4:1",
        "ngram@99999999999",
        "a++b",
        "+a",
        "none,a",
        ":x",
    ],
)
def test_what_is_no_spec_is_a_clear_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"draft level|draft spec|drafts 1 to 255|min_confidence|drafter"):
        check_spec(SpecConfig.parse(text))


@pytest.mark.parametrize("field", ["num_tokens", "min_confidence"])
def test_a_number_beyond_every_float_is_a_clear_error(field: str) -> None:
    with pytest.raises(ConfigError, match="got an integer of 16610 bits"):
        SpecConfig.read([{"drafter": "ngram", field: int("9" * 4000) * 10**1000}])


def test_tables_hold_what_a_text_cannot() -> None:
    value: list[Any] = ["ngram@8", {"drafter": "c++,v2@3.gguf", "num_tokens": 3, "min_confidence": 0.5, "then": ["ngram"]}]
    assert SpecConfig.read(value).levels == (LevelSpec("ngram", 8), LevelSpec("c++,v2@3.gguf", 3, 0.5, (LevelSpec("ngram"),)))
    assert SpecConfig.read("ngram@8") == SpecConfig.parse("ngram@8")


@pytest.mark.parametrize(
    ("config", "levels"),
    [
        ({"method": "eagle3", "model": "a/b", "num_speculative_tokens": 3}, (LevelSpec("a/b", 3),)),
        ({"model": "a/b", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}, (LevelSpec("a/b", 3),)),
        ({"method": "peagle", "model": "a,b@c", "parallel_drafting": True}, (LevelSpec("a,b@c"),)),
        ({"method": "ngram", "num_speculative_tokens": 5}, (LevelSpec("ngram", 5),)),
        (
            {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2, "num_speculative_tokens": 5},
            (LevelSpec("ngram", 5),),
        ),
        ({"model": "[ngram]", "prompt_lookup_max": 4}, (LevelSpec("ngram"),)),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 0.2, "enforce_eager": True}, (LevelSpec("suffix", None, 0.2),)),
        ({"method": "draft_model", "model": "a/b", "max_model_len": 2048, "use_heterogeneous_vocab": True}, (LevelSpec("a/b"),)),
        ({"method": "mimo_mtp", "num_speculative_tokens": 1}, (LevelSpec("mtp", 1),)),
        ({"method": "mtp", "model": "the target"}, (LevelSpec("mtp"),)),
    ],
)
def test_a_speculative_config_of_vllm_is_a_spec(config: dict[str, Any], levels: tuple[LevelSpec, ...]) -> None:
    assert SpecConfig.read(config).levels == levels
    assert SpecConfig.parse(json.dumps(config)).levels == levels


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        '{"method": "eagle3"}',
        '{"method": 3, "model": "a"}',
        '{"model": "a", "num_speculative_tokens": 0}',
        '{"method": "ngram", "prompt_lookup_max": 0}',
        '{"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3}',
        '{"model": "a", "rejection_sample_method": "synthetic"}',
        '{"model": "a", "revision": "main"}',
        '{"model": "a", "draft_tensor_parallel_size": 2}',
        "{" * 100_000,
    ],
)
def test_what_is_no_speculative_config_is_a_clear_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"speculative config|drafts 1 to 255"):
        SpecConfig.parse(text)


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        {"drafter": "a"},
        [3],
        [{}],
        [{"drafter": 3}],
        [{"drafter": "a", "tokens": 3}],
        [{"drafter": "a", "num_tokens": 2.5}],
    ],
)
def test_what_is_no_table_of_levels_is_a_clear_error(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"draft level|drafts 1 to 255"):
        SpecConfig.read(value)


# ------------------------------------------------------------------------------------------------------------- what it becomes


def test_sources_are_made_with_their_number_of_tokens() -> None:
    assert isinstance(built("none"), NullProposer)
    ngram = built("ngram@3")
    assert isinstance(ngram, LookupProposer)
    assert (ngram.num_tokens, ngram.tree) == (3, False)
    tree = built("ngram:tree@9:0.3")
    assert isinstance(tree, LookupProposer)
    assert (tree.num_tokens, tree.min_prob, tree.tree) == (9, 0.3, True)
    for name in LOOKUPS:
        assert built(name).name == name


def test_neighbouring_sources_are_asked_in_turn_and_joined_ones_continue_each_other() -> None:
    first = built("ngram@3,ngram@5+ngram@1")
    assert isinstance(first, Combined)
    assert first.name == "ngram,ngram+ngram"
    assert isinstance(first.proposers[1], Combined)
    assert len(set(map(id, (first.proposers[0], *first.proposers[1].proposers)))) == 3


def test_auto_chooses_among_the_levels_after_it(models: Path) -> None:
    target = open_checkpoint(models / "target.gguf")
    with LLM(target) as llm:
        assert llm.spec == SpecConfig.parse("auto")
        assert [one.name for one in llm.explain()] == ["none", "suffix", "mtp"]
    with LLM(models / "draft.gguf") as llm:  # which has no layer for prediction
        assert [one.name for one in llm.explain()] == ["none", "suffix"]
    with LLM(target, f"auto,ngram,{models / 'draft.gguf'}@3,self:q4_0") as llm:
        told = [(one.name, one.verifies) for one in llm.explain()]
        assert told == [
            *(("none", "target"), ("ngram", "target"), ("draft.gguf", "target")),
            *(("none", "draft.gguf"), ("ngram", "draft.gguf")),
            *(("self:q4_0", "target"), ("none", "self:q4_0"), ("ngram", "self:q4_0"), ("draft.gguf", "self:q4_0")),
            *(("none", "draft.gguf"), ("ngram", "draft.gguf")),
        ]
        assert [level.name for level in llm.memory()] == ["draft.gguf", "self:q4_0", "target"]
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        with LLM(target, "none") as plain:
            wanted = plain.generate("abc abc abc", params)[0].token_ids
        assert llm.generate("abc abc abc", params)[0].token_ids == wanted
    other = models / "other.gguf"
    with LLM(target, f"auto,ngram,{other},text:{other}@3,skip:1") as llm:
        assert [(one.name, one.verifies) for one in llm.explain()] == [
            *((name, "target") for name in ("none", "ngram", "other.gguf", "text:other.gguf", "skip:1")),
            *((name, "skip:1") for name in ("none", "ngram", "other.gguf", "text:other.gguf")),
        ]
        assert llm.generate("abc abc abc", params)[0].token_ids == wanted
    with LLM(target, "auto", backend="numpy") as llm:
        assert llm.explain() == []  # whose bits a draft's company could change


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "auto stands alone or before the levels") for text in ("ngram,auto", "auto,auto", "auto+ngram", "auto@4")),
        ("auto,self:q4_0+ngram", "auto chooses among models and does not join them"),
    ],
)
def test_auto_stands_first_and_joins_no_models(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_spec(SpecConfig.parse(text))


def test_models_verify_what_stands_before_them(models: Path) -> None:
    target = open_checkpoint(models / "target.gguf")
    with LLM(target, f"ngram,{models / 'draft.gguf'}@3,self:q4_0@5:0.5+ngram,skip:1") as llm:
        chosen = llm.engine._proposer._inner  # the guard is around every proposer
        assert isinstance(chosen, ChosenDrafts)
        skip = chosen.default
        assert isinstance(skip, ChainProposer)
        joined = skip.inner
        assert isinstance(joined, Combined)
        cast, continuing = joined.proposers
        assert isinstance(cast, ChainProposer)
        assert isinstance(continuing, LookupProposer)
        draft = cast.inner
        assert isinstance(draft, ChainProposer)
        assert isinstance(draft.inner, LookupProposer)
        assert [(level.name, level.num_tokens, level.min_confidence) for level in (draft, cast, skip)] == [
            ("draft.gguf", 3, 0),
            ("self:q4_0", 5, 0.5),
            ("skip:1", DEFAULT_NUM_TOKENS, 0),
        ]
        memory = {one.name: one for one in llm.memory()}
        assert list(memory) == ["draft.gguf", "self:q4_0", "skip:1", "target"]
        assert memory["draft.gguf"].shared_bytes == memory["target"].shared_bytes == 0
        assert 0 < memory["self:q4_0"].shared_bytes < memory["self:q4_0"].weight_bytes
        assert memory["skip:1"].shared_bytes == memory["skip:1"].weight_bytes < memory["target"].weight_bytes
        assert [level.context.capacity for level in (draft, cast, skip)] == [64, 256, 256]
        assert draft.context.cache.num_slots == 16


def test_a_spec_knows_the_models_that_it_takes_from_elsewhere() -> None:
    spec = SpecConfig.parse(
        "ngram,self:mxfp4+one.gguf,mod:Class+ngram,two,text:three,match:fo.ur/5.gguf@3,torch:skip:1,numba:six,torch:cpu,dtype=f32:text:7"
    )
    assert draft_models(spec) == ["one.gguf", "two", "three", "fo.ur/5.gguf", "six", "7"]


# ------------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("psychic", "drafter 'psychic' is none of ngram.*no model is called 'psychic'"),
        ("smollm2-135m-instrut", "did you mean smollm2-135m-instruct"),
        ("nowhere/model.gguf", "no file or directory 'nowhere/model.gguf'"),
        ("text:psychic", "drafter 'psychic' is none of ngram.*no model is called 'psychic'"),
        ("ngram:8", "ngram takes no argument or tree, got '8'; ngram@8"),
        ("self", "self takes an argument"),
        ("self:mxfp4,ngram", "ngram has no model to verify what self:mxfp4 drafts"),
        ("self:mxfp4", "this target is not a checkpoint"),
        ("numpy", "numpy runs a model, as in numpy:MODEL"),
        ("torch:ngram", "torch runs a model, as in torch:MODEL"),
        ("torch:auto", "torch runs a model"),
        ("torch:mod:Class", "torch runs a model"),
        ("torch:numba:x", "torch runs a model"),
        ("torch:psychic", "drafter 'psychic' is none of"),
        ("torch:dtype=f64:psychic", "dtype must be one of auto, f32"),
        ("torch:cpu,dtype=:psychic", "drafter 'cpu,dtype=:psychic' is none of"),
    ],
)
def test_what_cannot_draft_is_a_clear_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_spec(SpecConfig.parse(text), toy_target())


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("self:q99", "format 'q99' is not known"),
        ("skip:3", "cannot skip '3' of 3 layers"),
        ("skip:0/1/9", "wanted different numbers from 0 to 2"),
        ("no_such_module:Class", "no_such_module cannot be imported"),
    ],
)
def test_a_draft_that_does_not_fit_fails_before_weights_are_loaded(
    models: Path, draft: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cpuspec.engine.llm.make_backend", lambda *_: pytest.fail("the target was loaded"))
    with pytest.raises(CpuspecError, match=message):
        LLM(models / "target.gguf", draft, "numpy")


@pytest.mark.parametrize("name", [*OWN_WEIGHTS, "text"])
def test_models_of_the_targets_own_take_an_argument(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} takes an argument"):
        check_spec(SpecConfig.parse(name))


def test_a_chain_recipe_stands_for_a_target_with_its_drafts(models: Path, tmp_path: Path) -> None:
    path = tmp_path / "fast.toml"
    target, levels = models / "target.gguf", '["ngram@3", "self:q4_0@5"]'
    path.write_text(f"name = 'fast'\ndescription = 'x'\ntarget = '{target}'\nlevels = {levels}\n")
    for spec, wanted in ((None, "ngram@3,self:q4_0@5"), ("none", "none"), ("ngram", "ngram")):
        with LLM(path, spec, threads=1) as llm:
            assert str(llm.spec) == wanted


def test_a_draft_models_file_is_parsed_once(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = list[Path]()

    def counted(path: Path, mmap: bool = True) -> GgufFile:
        parsed.append(path)
        return read_gguf(path, mmap)

    monkeypatch.setattr("cpuspec.checkpoints.gguf_parts.read_gguf", counted)
    LLM(models / "target.gguf", str(models / "draft.gguf"), "numpy").close()
    assert parsed == [models / "target.gguf", models / "draft.gguf"]


def test_the_target_is_released_when_its_draft_cannot_be_loaded(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    def failing(*_: Any) -> Any:
        raise MemoryError

    def close(self: Any) -> None:
        closed.append(self)

    monkeypatch.setattr("cpuspec.engine.draft_spec.make_backend", failing)
    monkeypatch.setattr("cpuspec.backends.numpy_backend.NumpyBackend.close", close)
    with pytest.raises(MemoryError):
        LLM(models / "target.gguf", str(models / "draft.gguf"), "numpy")
    assert len(closed) == 1


# ---------------------------------------------------------------------------------------------------------- and what it answers

# Levels on levels; each drafter alone is in tests/conformance/test_drafters.py.
CHAINS = (
    "self:int3_g32_asym@4:0.3+ngram",
    "DRAFT@2,skip:1@4,self:q4_0@6",
    "HF@2+ngram@4",
    "suffix,PADDED@3,FEWER@4",
    "text:OTHER@4+ngram",
    "ngram@3,DRAFT@2,OTHER@3,match:DRAFT@4,self:q4_0@5",
    "DRAFT@2+mtp@6",
)
ACROSS = {  # levels that run on other backends than the target
    "numba": (
        "torch:DRAFT@3",
        "ngram,torch:HF@3,numpy:skip:1@4",
        "torch:self:q8_0@4,self:mxfp4@3",
        "torch:cpu,dtype=f32:text:OTHER@3+ngram",
        "onnxruntime:DRAFT@3",
        "numpy:mtp@3",
    ),
    "onnxruntime": ("numba:DRAFT@3",),
    "torch": ("numba:DRAFT@3", "suffix,numba:skip:1@3,DRAFT@2,numpy:self:q4_0@4", "skip:1@3,self:q8_0@4"),
}
PROMPTS = ["the cat sat on the mat and the cat sat on", "one two one two one", "x", "a b c d e f g"]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
SETTINGS = EngineConfig(threads=1, max_sequences=3)


def with_models(spec: str, models: Path) -> str:
    spec = re.sub("DRAFT|PADDED|FEWER|OTHER", lambda name: str(models / f"{name[0].lower()}.gguf"), spec)
    return spec.replace("HF", str(models / "hf"))


@pytest.mark.parametrize("chain", CHAINS)
def test_greedy_answers_are_the_same_with_every_chain_in_a_batch(models: Path, chain: str) -> None:
    ways = [(with_models(chain, models), {"threads": threads}) for threads in (1, 2)]
    check_ways(open_checkpoint(models / "target.gguf"), ways, PROMPTS, [PARAMS] * 4, SETTINGS)


def test_a_request_has_as_many_drafts_as_it_allows(models: Path) -> None:
    off, one = replace(PARAMS, max_draft_tokens=0), replace(PARAMS, max_draft_tokens=1)
    with LLM(models / "target.gguf", with_models("ngram@3,DRAFT@2,self:mxfp4@5", models), settings=SETTINGS) as llm:
        wanted = [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS)]
        plain, capped = llm.generate(PROMPTS[:2], [off, one])
        assert [plain.token_ids, capped.token_ids] == wanted[:2]
        assert plain.stats.levels == {}
        assert max(len(level.num_accepted_tokens_per_pos) for level in capped.stats.levels.values()) == 1
        assert llm.memory()[-1].kv_bytes > max(map(len, wanted)) * llm.context.cache.bytes_per_token


@pytest.mark.parametrize(("backend", "chain"), [(backend, chain) for backend, chains in ACROSS.items() for chain in chains])
def test_levels_may_run_on_other_backends_than_the_target(models: Path, backend: str, chain: str) -> None:
    """Greedy answers are those without drafts: numba promises it, and torch where no two tokens are nearly as likely, as here."""
    target, spec = open_checkpoint(models / "target.gguf"), with_models(chain, models)
    check_ways(target, [(spec, {})], PROMPTS, [replace(PARAMS, max_tokens=20)] * 4, SETTINGS, backend)
    with LLM(target, spec, backend, settings=SETTINGS) as llm:
        ran = {draft.name: draft.context.backend.name for draft in llm.drafts}
        assert list(ran) == [level.name for level in llm.memory()[:-1]]
        for name, where in ran.items():
            assert where == (name.partition(":")[0] if name.partition(":")[0] in BACKENDS else backend)


def test_a_level_may_have_settings_of_its_own(models: Path) -> None:
    with LLM(models / "target.gguf", f"ngram,numba:kv_format=f32:{models / 'draft.gguf'}", threads=1) as llm:
        [draft] = llm.drafts
        assert draft.name == "numba:kv_format=f32:draft.gguf"
        assert draft.context.cache.bytes_per_token == 2 * 32 * 4  # keys and values of one head in one layer
        assert len(llm.generate("x", SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4
    with pytest.raises(CpuspecError, match="dtype bf16 is a setting of the torch backend"):
        LLM(models / "target.gguf", f"numba:dtype=bf16:{models / 'draft.gguf'}")


def test_a_draft_on_another_backend_has_none_of_the_settings_of_the_targets(models: Path) -> None:
    with LLM(models / "target.gguf", f"numba:{models / 'draft.gguf'}", "torch:cpu,dtype=bf16", threads=1) as llm:
        assert [draft.context.backend.name for draft in llm.drafts] == ["numba"]
        assert len(llm.generate("x", SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


@pytest.mark.parametrize("before", ["", "text:", "numba:", "torch:cuda,dtype=bf16:", "draw:"])
def test_the_letter_of_a_windows_drive_names_no_drafter_and_no_backend(before: str) -> None:
    path = r"C:\models\draft.gguf"
    assert draft_models(SpecConfig.parse(f"suffix,{before}{path}@4:0.5")) == [path]
