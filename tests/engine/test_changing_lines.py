"""Only what a rule names is taken out, and only of system messages."""

import pytest

from cpuspec.engine.changing_lines import RULES, Rule, without_changing_lines, without_lines

BILLING, TOKENS = (rule.example for rule in RULES)


@pytest.mark.parametrize("rule", RULES, ids=[rule.name for rule in RULES])
def test_each_rule_takes_its_example_out_and_nothing_else(rule: Rule) -> None:
    assert [one.name for one in RULES if one.line.fullmatch(rule.example)] == [rule.name]
    assert without_lines(rule.example) == ""
    for end in ("\n", "\r\n"):
        assert without_lines(f"before{end}{rule.example}{end}after{end}{end}{end}") == f"before{end}after{end}{end}{end}"
    for text in (f"The line {rule.example} in a sentence", f"`{rule.example}`", rule.example[:-10].replace(":", ""), "", "\n\n"):
        assert without_lines(text) == text


def test_prompts_of_two_requests_of_an_agent_become_the_same() -> None:
    def request(cch: str, left: int) -> list[dict[str, object]]:
        return [
            {
                "role": "system",
                "content": [{"type": "text", "text": BILLING.replace("fa690", cch)}, {"type": "text", "text": "You."}],
            },
            {"role": "user", "content": "hey"},
            {"role": "system", "content": TOKENS.replace("14999436", str(left))},
        ]

    first, second = without_changing_lines(request("aaaaa", 14999436)), without_changing_lines(request("bbbbb", 9))
    assert first == second
    assert first == [{"role": "system", "content": [{"type": "text", "text": "You."}]}, {"role": "user", "content": "hey"}]


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_other_messages_are_left_alone(role: str) -> None:
    messages = [{"role": role, "content": BILLING}, {"role": role, "content": [{"type": "text", "text": TOKENS}]}]
    assert without_changing_lines(messages) == messages


@pytest.mark.parametrize("content", ["", None, [], 5, [{"type": "image"}, "text", None, {"text": ""}, {"text": 5}]])
def test_content_of_any_kind_comes_back_as_it_was(content: object) -> None:
    assert without_changing_lines([{"role": "system", "content": content, "name": "n"}]) == [
        {"role": "system", "content": content, "name": "n"}
    ]
