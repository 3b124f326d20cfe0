"""Other engines' drafts are read rightly, compared prompt by prompt, and one that fails is reported and left out."""

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from chains_peers import Answer, Choice, open_peers, peer_table, summarize_peers
from llama_server import Drafts
from peers_engines import PeerError

from cpuspec import LLM, SamplingParams
from cpuspec.checkpoints import open_checkpoint
from tests.backends.models import SMALL
from tools.make_tiny_model import make_tiny_gguf

# A llama-server that gives back the ids of the prompt, one a millisecond, but fails where FAILS_AT is among them.
SERVER = '''#!INTERPRETER
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if options["--spec-type"] == "psychic":
    sys.exit("unknown speculative type: psychic")

METRICS = """# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total {0}
llamacpp:spec_decode_num_draft_tokens_total {1}
llamacpp:spec_decode_num_accepted_tokens_total {0}
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {0}
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="1"}} 0
"""
num_answers = 0

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/metrics":
            return self.reply(METRICS.format(num_answers, 2 * num_answers))
        self.reply({"status": "ok"} if self.path == "/health" else {"build_info": "b7-fake"})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert request["temperature"] == 0 and not request["cache_prompt"] and request["return_tokens"]
        global num_answers
        num_answers += 1
        ids = request["prompt"][: request["n_predict"]]
        if FAILS_AT in ids:
            print("out of luck", flush=True)
            sys.stdout.flush()
            import os
            os._exit(3)
        step_ms = 1 if options["--spec-type"] == "none" else 0.5
        self.reply({"tokens": ids, "timings": {"predicted_n": len(ids), "predicted_ms": step_ms * (len(ids) - 1)}})

    def reply(self, answer):
        self.send_response(200)
        self.end_headers()
        self.wfile.write((answer if isinstance(answer, str) else json.dumps(answer)).encode())

    def log_message(self, *arguments):
        pass

HTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
'''


@pytest.fixture
def programs(tmp_path):
    program = tmp_path / "llama-server"
    program.write_text(SERVER.replace("INTERPRETER", sys.executable).replace("FAILS_AT", "666"), "utf-8")
    program.chmod(0o755)
    return tmp_path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", **SMALL)


def opened(stack, programs, *drafts):
    return open_peers(Choice(programs, drafts), Path("model.gguf"), 1, 100, [0], stack)


def test_ratios_are_of_each_prompt_and_against_the_same_engine():
    answers = {
        "llama.cpp: none": [Answer([1, 2], 10, 1.0), Answer([3, 4], 10, 2.0)],
        "llama.cpp: ngram-mod": [Answer([1, 2], 10, 0.5, Drafts(3, 9, (2, 1))), Answer([3, 5], 10, 1.0, Drafts(5, 5, (2,)))],
        "transformers: none": [Answer([9], 10, 10.0), Answer([9], 10, 10.0)],
        "transformers: lookup 10": [Answer([9], 10, 5.0), Answer([9], 10, 20.0)],
    }
    summary = summarize_peers(answers, [20.0, 40.0])
    mod, lookup = summary["llama.cpp: ngram-mod"], summary["transformers: lookup 10"]
    assert summary["llama.cpp: none"]["over_plain"] == pytest.approx(1)
    assert (mod["over_plain"], mod["over_plain_interval"]) == (pytest.approx(2), pytest.approx([2, 2]))
    assert mod["tokens_per_s"] == pytest.approx((20 * 10) ** 0.5)
    assert (mod["num_identical"], mod["num_prompts"], mod["num_tokens"]) == (1, 2, 4)
    assert mod["cpuspec_over"] == pytest.approx(2)  # 20 / 20 and 40 / 10
    assert mod["cpuspec_over_interval"] == pytest.approx([1, 4])
    assert mod["drafts"] == {"num_drafts": 8, "num_draft_tokens": 14, "num_accepted_tokens_per_pos": (4, 1)}
    assert lookup["over_plain"] == pytest.approx(1)
    assert lookup["over_plain_interval"] == pytest.approx([0.5, 2])
    assert lookup["num_identical"] == 2
    shown = peer_table(summary, "auto")
    assert "| llama.cpp: ngram-mod | 14.1 | 2.00x | 2.00 to 2.00 | 1 of 2 | 2.00x | 1.00 to 4.00 | 0.500 0.125 |" in shown
    assert "cpuspec auto over the peer" in shown


def test_servers_answer_in_turns_and_one_that_fails_is_left_out(programs):
    with ExitStack() as stack:
        peers = opened(stack, programs, "ngram-simple --spec-ngram-simple-size-n 4", "psychic")
        assert list(peers.arms) == ["llama.cpp: none", "llama.cpp: ngram-simple --spec-ngram-simple-size-n 4"]
        assert peers.abouts["llama.cpp"].startswith("llama.cpp b7-fake, llama-server; libraries: its own")
        assert peers.builds == {"llama.cpp": "unknown instructions"}  # there is no library to ask
        assert "unknown speculative type" in peers.failed["llama.cpp: psychic"]
        plain, drafted = (peers.answer(name, [5, 6, 7, 8], 3) for name in peers.arms)
        assert (plain, drafted) == (Answer([5, 6, 7], 2, 0.002), Answer([5, 6, 7], 2, 0.001, Drafts(1, 2, (1, 0))))
        assert peers.answer(list(peers.arms)[1], [5, 6, 7, 8], 3).drafts == Drafts(1, 2, (1, 0))  # of this answer alone
        assert peers.answer("llama.cpp: none", [666], 3) is None
        assert peers.answer("llama.cpp: none", [5], 3) is None
        assert "out of luck" in peers.failed["llama.cpp: none"]
        assert len(peers.arms) == 1


@pytest.mark.parametrize(
    ("choice", "target_dtype"),
    [
        (Choice(llama_cpp=Path("programs")), "bf16"),
        (Choice(transformers=Path("python")), "q8_0"),
    ],
)
def test_a_peer_that_would_decode_other_weights_is_refused(model, choice, target_dtype):
    choice.check(open_checkpoint(model), None)
    with pytest.raises(PeerError, match="leave out"):
        choice.check(open_checkpoint(model), target_dtype)


def test_transformers_reads_the_file_and_decodes_it_plainly_with_lookup_and_with_a_smaller_model(model):
    for needed in ("torch", "transformers", "gguf"):
        pytest.importorskip(needed)
    prompt = [5, 6, 7, 8] * 4
    with LLM(model, "none", "numpy") as llm:
        wanted = llm.generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids
    with ExitStack() as stack:
        choice = Choice(transformers=Path(sys.executable), num_lookup_tokens=4, assistant=model)
        peers = open_peers(choice, model, 1, 100, [], stack)
        assert peers.failed == {}
        plain, looked_up, assisted = (peers.answer(name, prompt, 8) for name in peers.arms)
    assert list(peers.arms) == ["transformers: none", "transformers: lookup 4", f"transformers: assistant {model.stem}"]
    assert plain.token_ids[0] == wanted[0]  # in bf16 later ones may part
    assert (len(plain.token_ids), plain.num_timed) == (8, 7)
    assert len(looked_up.token_ids) == len(assisted.token_ids) == 8
    assert looked_up.num_timed <= 7
    assert assisted.num_timed < 7  # the model agrees with itself, so its first draft comes with the first token
    assert plain.seconds > 0
