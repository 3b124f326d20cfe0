"""The benchmark of structured outputs sends the same requests to each arm, and checks what comes back by another library."""

import pytest
import structured

from tests.backends.models import SMALL
from tools.make_tiny_model import make_tiny_gguf


def test_every_arm_answers_the_same_and_what_ends_is_valid(tmp_path, measured):
    model = make_tiny_gguf(tmp_path / "tiny.gguf", context_length=2048, **SMALL)
    found, _ = measured(structured.main, model, "--requests", "5", "--clients", "2", "--rounds", "1", "--threads", "1")
    counts = found["counts"]
    assert counts["answers"] == counts["valid"] + counts["cut off"] == 15
    assert counts["valid"]
    assert set(found["figures"][f"2 clients, {structured.OVER}"]) == {"forced", "auto"}


@pytest.mark.parametrize(
    ("content", "reason", "wanted"),
    [
        ('{"a": 3}', "stop", "valid"),
        ('{"a": 9}', "stop", "invalid"),
        ('{"a": 3', "stop", "invalid"),
        ('{"a": 3', "length", "cut off"),
    ],
)
def test_an_answer_is_judged_by_its_schema(content, reason, wanted):
    schema = structured.record_of(a=structured.whole(1, 5))
    answer = {"choices": [{"finish_reason": reason, "message": {"content": content}}]}
    assert structured.judge(schema, answer) == wanted
