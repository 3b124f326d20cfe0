"""Heads that the reference classes make and save: this engine reads their files and computes the same logits.

The classes are those of `speculators` (extra `oracles`), which train published heads, and of transformers. The formulas of
tests/heads.py say the same, from the papers.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cpuspec.backends import make_backend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.heads import Head, own_mtp
from cpuspec.model.batch import ForwardBatch
from cpuspec.sequence import Sequence
from cpuspec.settings import EngineConfig, SamplingParams
from cpuspec.speculation.context import Context
from cpuspec.speculation.drafters.blocks import _corrected
from cpuspec.speculation.drafters.masks import MaskProposer
from tests.backends.models import MIXTURES, every_backend
from tests.heads import RandomHead, opened, random_array, write_head
from tools.make_tiny_model import make_tiny_hf

torch = pytest.importorskip("torch")
SMALL = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_layers": 4, "vocab_size": 320, "context_length": 128}
SETTINGS = EngineConfig(threads=1, max_rows=64, kv_format="f32", keep_packed=False)
BACKENDS = every_backend(("numba", "numpy", "torch"))
LENGTH, DRAFTED, MASK_ID, BLOCK, ANCHOR = 11, 96, 300, 5, 6
TOLERANCE = 1e-4  # of the largest logit


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_tiny_hf(tmp_path_factory.mktemp("target") / "tiny", "qwen3", tied=False, **SMALL))


@pytest.fixture(scope="module")
def speculators() -> Any:
    return pytest.importorskip("speculators", reason="install cpuspec[oracles]")


def saved(model: Any, target: Checkpoint, path: Path) -> RandomHead:
    """The model with random weights, the target's embedding, and a list of tokens if it drafts few; and its files."""
    rng = np.random.default_rng(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            values = random_array(rng, shape) if len(shape) < 3 else rng.standard_normal(shape)
            parameter.copy_(torch.from_numpy(values.astype(np.float32)) * (3 if name.startswith("lm_head") else 1))
        model.embed_tokens.weight.copy_(torch.from_numpy(target.tensors["embed"].dequantize()))
        if model.d2t is not None:
            ids = np.sort(rng.permutation(target.config.vocab_size)[:DRAFTED])
            offsets, taken = ids - np.arange(DRAFTED), np.isin(np.arange(target.config.vocab_size), ids)
            model.load_vocab_mappings(torch.from_numpy(taken), torch.from_numpy(offsets))
        else:
            model.lm_head.weight.copy_(torch.from_numpy(target.tensors["output"].dequantize()))
    model.eval().save_pretrained(path)
    return RandomHead(path, {}, {})


def layer_config(kind: str, target: Checkpoint, num_layers: int) -> Any:
    from transformers import LlamaConfig, Qwen3Config

    config = (LlamaConfig if kind == "llama" else Qwen3Config)(
        **{"vocab_size": target.config.vocab_size, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": num_layers},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5},
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    config._attn_implementation = "eager"
    return config


def verifier(speculators: Any, algorithm: str, number: int = 3) -> Any:
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return speculators.SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=number)],
        default_proposal_method="greedy",
        verifier=speculators.VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
    )


def inputs(target: Checkpoint, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of rows, and features of as many numbers."""
    rng = np.random.default_rng(4)
    return rng.integers(0, target.config.vocab_size, LENGTH), rng.standard_normal((LENGTH, size)).astype(np.float32)


def recorded(model: Any, *args: Any, **kwargs: Any) -> list[np.ndarray]:
    """What the output matrix gives in a forward, call by call."""
    found: list[np.ndarray] = []
    hook = model.lm_head.register_forward_hook(lambda _module, _given, logits: found.append(logits[0].numpy()))
    with torch.no_grad():
        model(*args, **kwargs)
    hook.remove()
    return found


def encoded(head: Head, backend: Any, features: np.ndarray) -> np.ndarray:
    for norm in head.feature_norms:
        features = norm.applied(features)
    return backend.project(features, "encode")


def run(
    head: Head, backend: Any, tokens: list[int], positions: list[int], parents: list[int] | None, hidden: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Logits of rows of a new sequence, and the states that following rows are made of."""
    last = (head.model.config.num_layers - 1,)
    batch = ForwardBatch(tokens, positions, [0], [0, len(tokens)], parents, None, last, hidden.astype(np.float32))
    output = backend.forward(batch, backend.new_cache(1, 64))
    return output.logits, head.state_norm.applied(output.hidden[0]) if head.state_norm else output.hidden[0]


def assert_alike(got: np.ndarray, wanted: np.ndarray, what: str) -> None:
    error = float(np.abs(got - wanted).max() / np.abs(wanted).max())
    assert np.abs(np.roll(wanted, 1, axis=0) - wanted).max() > 100 * TOLERANCE * np.abs(wanted).max()
    assert error < TOLERANCE, (what, error)


EAGLE3: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"kind": "qwen3"},
    "normed residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "two layers, five read": {"num_layers": 2, "ids": [1, 2, 3, 4, 1]},
    "all tokens": {"drafted": SMALL["vocab_size"]},
}


@BACKENDS
@pytest.mark.parametrize("kind", EAGLE3)
def test_eagle3_computes_what_speculators_computes(
    speculators: Any, target: Checkpoint, tmp_path: Path, kind: str, name: str
) -> None:
    """Also over drafted rows, which are made of the head's own states."""
    options = {"kind": "llama", "num_layers": 1, "ids": [1, 2, 3], "drafted": DRAFTED, **EAGLE3[kind]}
    config = speculators.Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config(options.pop("kind"), target, options.pop("num_layers")),
        eagle_aux_hidden_state_layer_ids=(ids := options.pop("ids")),
        draft_vocab_size=options.pop("drafted"),
        speculators_config=verifier(speculators, "eagle3"),
        **options,
    )
    model = speculators.Eagle3DraftModel(config)
    head = opened(saved(model, target, tmp_path / "head"), target)
    tokens, features = inputs(target, len(ids) * 64)
    given = [torch.from_numpy(features)[None], torch.from_numpy(tokens)[None], torch.zeros(1, LENGTH, dtype=torch.long)]
    wanted = recorded(model, *given, ttt_steps=3)
    backend = make_backend(name, head.model, SETTINGS)
    hidden, rows = encoded(head, backend, features), list(range(LENGTH))
    strings, positions, parents = tokens.tolist(), rows[:], [-1, *rows[:-1]]
    for step, logits in enumerate(wanted):
        got, states = run(head, backend, strings, positions, parents, hidden)
        assert_alike(got[-LENGTH:], logits, f"step {step}")
        # Each row goes on from its own state with the token that the reference was given.
        strings += [*tokens[step + 1 :].tolist(), *[0] * (step + 1)]
        positions += [row + step + 1 for row in rows]
        parents += [row + step * LENGTH for row in rows]
        hidden = np.concatenate([hidden, states[-LENGTH:]])


@BACKENDS
@pytest.mark.parametrize("norm", [False, True])
def test_peagle_computes_what_speculators_computes(
    speculators: Any,
    target: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    norm: bool,
    name: str,
) -> None:
    config = speculators.PEagleSpeculatorConfig(
        transformer_layer_config=layer_config("llama", target, 2),
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        draft_vocab_size=DRAFTED,
        mask_token_id=MASK_ID,
        fc_norm=norm,
        speculators_config=verifier(speculators, "peagle"),
    )
    model = speculators.PEagleDraftModel(config)
    head = opened(saved(model, target, tmp_path / "head"), target)
    tokens, features = inputs(target, 3 * 64)
    # The rows of one draft: all tokens, and behind the last one masks.
    depth = torch.tensor([0] * LENGTH + [1, 2, 3])
    anchors = torch.tensor([*range(LENGTH), *[LENGTH - 1] * 3])
    monkeypatch.setattr("speculators.models.peagle.core.generate_cod_sample_indices", lambda **_: (anchors, depth))
    monkeypatch.setattr("speculators.models.peagle.core.compute_metrics", lambda **_: (0, {}))
    longer = np.concatenate([features, np.zeros((3, 3 * 64), np.float32)])  # rows of masks have places, but no features
    (wanted,) = recorded(
        model,
        torch.from_numpy(longer)[None],
        torch.from_numpy(np.append(tokens, [0] * 3))[None],
        torch.zeros(1, LENGTH + 3, dtype=torch.long),
        verifier_last_hidden_states=torch.zeros(1, LENGTH + 3, 64),
    )[:1]
    backend = make_backend(name, head.model, SETTINGS)
    assert (head.method, head.mask_id) == ("p-eagle", MASK_ID)
    assert head.mask_features is not None
    hidden = encoded(head, backend, np.concatenate([features, head.mask_features.repeat(3, axis=0)]))
    got, _ = run(head, backend, [*tokens.tolist(), *[MASK_ID] * 3], list(range(LENGTH + 3)), None, hidden)
    assert_alike(got, wanted, "logits")


BLOCKS: dict[str, dict[str, Any]] = {
    "DFlash": {},
    "DFlash of few tokens": {"drafted": DRAFTED},
    "DSpark": {"head": "vanilla"},
    "DSpark of few tokens": {"head": "vanilla", "drafted": DRAFTED},
    "gated DSpark": {"head": "gated"},
    "recurrent DSpark": {"head": "rnn"},
    "DSpark, confidence of the state": {"head": "vanilla", "with_markov": False},
}


@BACKENDS
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_computes_what_speculators_computes(
    speculators: Any,
    target: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    name: str,
) -> None:
    options = {"head": "", "drafted": SMALL["vocab_size"], "with_markov": True, **BLOCKS[kind]}
    algorithm, module = ("DSpark", "dspark") if options["head"] else ("DFlash", "dflash")
    common = {
        "transformer_layer_config": layer_config("qwen3", target, 2),
        "aux_hidden_state_layer_ids": [1, 3],
        "draft_vocab_size": options["drafted"],
        "block_size": BLOCK,
        "mask_token_id": MASK_ID,
        "speculators_config": verifier(speculators, module, BLOCK),
    }
    own = {"markov_rank": 8, "markov_head_type": options["head"], "confidence_head_with_markov": options["with_markov"]}
    config = getattr(speculators, f"{algorithm}SpeculatorConfig")(**common, **(own if options["head"] else {}))
    model = getattr(speculators, f"{algorithm}DraftModel")(config)
    head = opened(saved(model, target, tmp_path / "head"), target)
    tokens, features = inputs(target, 2 * 64)
    tokens[ANCHOR:] = np.arange(ANCHOR, LENGTH)
    found: list[Any] = []

    def metrics(*args: Any, **_: Any) -> tuple[int, dict[str, Any]]:
        found.extend(args[:3])
        return 0, {}

    monkeypatch.setattr("speculators.models.dflash.core.select_anchors", lambda *_: (torch.tensor([ANCHOR]), torch.tensor([True])))
    monkeypatch.setattr(f"speculators.models.{module}.core.compute_metrics", metrics)
    with torch.no_grad():
        model(
            *(torch.from_numpy(features)[None], torch.from_numpy(tokens)[None], torch.ones(1, LENGTH)),
            *(torch.zeros(1, LENGTH, 64), torch.zeros(1, LENGTH, dtype=torch.long)),
            max_anchors=1,
        )
    backend, block = make_backend(name, head.model, SETTINGS), head.block
    assert block is not None
    assert (block.size, block.num_skipped, block.both_ways) == (BLOCK, 0 if options["head"] else 1, True)
    cache, count = backend.new_cache(1, 64), ANCHOR
    context = encoded(head, backend, features[:count])
    backend.inject(ForwardBatch([0] * count, list(range(count)), [0], [0, count], hidden=context), cache)
    string = [int(tokens[ANCHOR]), *[MASK_ID] * (BLOCK - 1)]
    last = (head.model.config.num_layers - 1,)
    rows = ForwardBatch(string, list(range(count, count + BLOCK)), [0], [0, BLOCK], None, None, last, None, True)
    output = backend.forward(rows, cache)
    assert head.state_norm is not None
    states, got, wanted = head.state_norm.applied(output.hidden[0]), output.logits, found[0][0].numpy()
    if block.markov is not None:
        before = tokens[ANCHOR : ANCHOR + BLOCK]  # the reference is given the tokens that were chosen
        w1, memory, corrected_rows = block.markov.w1.rows(before), np.zeros(8, np.float32), []
        for row, state, one in zip(got, states, w1, strict=True):
            vector, memory = block.markov.vector(one, state, memory)
            corrected_rows.append(_corrected(row, vector, block.markov))
        corrected = np.stack(corrected_rows)
        kept = np.isfinite(corrected)
        assert kept.sum(axis=1).min() >= 64
        got = np.where(kept, corrected, wanted)
        assert block.confidence is not None
        said = np.concatenate([states, w1], axis=1)[:, : len(block.confidence)] @ block.confidence + block.confidence_bias
        assert_alike(said, found[2][0].numpy(), "confidence")
    assert_alike(got, wanted, "logits")


@BACKENDS
def test_a_layer_for_multi_token_prediction_computes_what_speculators_computes(
    speculators: Any, target: Checkpoint, tmp_path: Path, name: str
) -> None:
    layers = layer_config("qwen3", target, 4)
    layers.rms_norm_eps = target.config.norm_eps
    layers.rope_parameters = {"rope_type": "default", "rope_theta": target.config.rope_base}
    config = speculators.MTPSpeculatorConfig(transformer_layer_config=layers, speculators_config=verifier(speculators, "mtp", 2))
    model = speculators.MTPDraftModel(config)
    del model.verifier_lm_head  # as after `load_verifier_weights`
    head = opened(saved(model, target, tmp_path / "head"), target)
    tokens, hidden = inputs(target, 64)
    backend, count = make_backend(name, head.model, SETTINGS), LENGTH - 3
    wanted = recorded(model, torch.from_numpy(tokens)[None], torch.from_numpy(hidden)[None])
    assert len(wanted) == 2
    for step, logits in enumerate(wanted):
        string = tokens[step + 1 : step + 1 + count].tolist()
        got, hidden = run(head, backend, string, list(range(count)), None, hidden[:count])
        assert_alike(got, logits, f"step {step}")


OF_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tied": False},
    "glm4moe": {**MIXTURES["glm4moe"], "rope_dims": 8},
    "deepseek2": MIXTURES["deepseek2"],
    "glm4_moe_lite": MIXTURES["glm4_moe_lite"],
    "qwen35": {"tied": False},
    "qwen35moe": {"tied": False, "shared_size": 64},
}


@BACKENDS
@pytest.mark.parametrize("family", OF_FAMILIES)
def test_a_targets_own_layer_computes_what_transformers_computes(tmp_path: Path, family: str, name: str) -> None:
    """In DeepSeek's layout."""
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this version of transformers has no MtpModel")
    from transformers import AutoModelForCausalLM, DynamicCache

    directory = make_tiny_hf(tmp_path / "target", **{"architecture": family, **OF_FAMILIES[family], **SMALL})
    main = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    plain = open_checkpoint(directory)
    main.config.num_mtp_layers, main.config.mtp_layer_types = 1, ["full_attention"]
    if getattr(main.config, "mlp_layer_types", None):
        main.config.mtp_mlp_layer_types = ["sparse"]
    model = layers.MtpModel(main, 1).eval()
    rng, prefix, arrays = np.random.default_rng(5), f"model.layers.{plain.config.num_layers}.", {}
    with torch.no_grad():
        for key, parameter in [*model.layers[0].named_parameters(), *model.layers[0].named_buffers()]:
            values = rng.standard_normal(tuple(parameter.shape)) / parameter.shape[-1] ** 0.5
            values = np.float32(1 + 0.1 * values if key.endswith("norm.weight") else values)
            parameter.copy_(torch.from_numpy(values))
            arrays[prefix + key.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")] = values
    settings = json.loads((directory / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    own = shutil.copytree(directory, tmp_path / "own")  # the first is mapped, and Windows writes over no such file
    write_head(own, settings, {**load_file(directory / "model.safetensors"), **arrays})
    target = open_checkpoint(own)
    head = own_mtp(target)
    assert target.config == plain.config
    tokens, hidden = inputs(target, 64)
    with torch.no_grad():
        states = model.forward_layer(
            0,
            torch.from_numpy(hidden)[None],
            torch.arange(LENGTH)[None],
            DynamicCache(),
            input_ids=torch.from_numpy(tokens)[None],
        )
        wanted = main.lm_head(states)[0].numpy()
    backend = make_backend(name, head.model, SETTINGS)
    got, _ = run(head, backend, tokens.tolist(), list(range(LENGTH)), None, hidden)
    assert_alike(got, wanted, "logits")


def test_a_draft_of_masks_is_what_transformers_computes(tmp_path: Path) -> None:
    """PARD: an ordinary model, and a token whose rows it fills."""
    transformers = pytest.importorskip("transformers")
    directory = make_tiny_hf(tmp_path / "pard", "qwen2", **SMALL)
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**settings, "pard_token": MASK_ID}))
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    checkpoint = open_checkpoint(directory)
    assert checkpoint.mask_id == MASK_ID
    proposer = MaskProposer(Context(make_backend("numpy", checkpoint, SETTINGS), 1, 64), MASK_ID, "pard", 4)
    tokens, _ = inputs(checkpoint, 1)
    for count in range(2, LENGTH):
        seq = Sequence.new(0, tokens[:count].tolist(), SamplingParams())
        proposer.begin(seq, 0)
        (draft,) = proposer.propose([seq], [4])
        proposer.end(seq)
        with torch.no_grad():
            logits = reference(torch.tensor([[*seq.tokens, *[MASK_ID] * 3]])).logits[0, -4:]
        assert draft.tokens.tolist() == logits.argmax(-1).tolist()
