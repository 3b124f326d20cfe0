"""Words of strangers in a message neither reach the terminal as commands nor fill it."""

import pytest

from cpuspec.errors import in_one_line, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ä, 漢字 and 🙂\n\tin lines", "plain, ä, 漢字 and 🙂\n\tin lines"),
        ("\x1b[2J\r\x07", r"\x1b[2J\r\x07"),
        ("\x7f\x9b", r"\x7f\x9b"),
        ("a\u202eb\u2066c", r"a\u202eb\u2066c"),
        ("\u2028\udc80", r"\u2028\udc80"),
    ],
)
def test_what_a_terminal_may_obey_or_nobody_sees_is_written_out(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_quoted_text_takes_one_line_of_a_known_length() -> None:
    assert in_one_line(" two\n\n\tlines\x85here ") == "two lines here"
    assert in_one_line("x" * 500) == "x" * 200
    assert in_one_line("abc\x1bdef", 5) == r"abc\x1bd"
    assert in_one_line("\x1b\u2028\r\n\0", 9).isprintable()
