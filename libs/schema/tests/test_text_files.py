"""Text files of users."""

import pytest
from headrace_schema.text_files import numbered_lines


def test_a_line_ends_at_a_line_feed_and_nowhere_else(tmp_path):
    file = tmp_path / "corpus.jsonl"
    file.write_bytes("\ufeffone\u2028still one\u2029\x85\x1c\r\n\n  \nfour\n\n".encode())
    assert list(numbered_lines(file)) == [(1, "one\u2028still one\u2029\x85\x1c"), (4, "four")]
    file.write_bytes(b"\xff")
    with pytest.raises(UnicodeDecodeError):
        list(numbered_lines(file))
