import pytest

from twinflow.bench.rows import STANDARD, Row, parse_rows
from twinflow.contracts.errors import BadRequest


def test_rows_are_read_in_order() -> None:
    assert parse_rows("prefill:2x1024, decode:8@64") == (Row("prefill", 2, 1024), Row("decode", 8, 64))


def test_the_standard_rows_print_as_they_are_written() -> None:
    assert ",".join(str(row) for row in parse_rows(STANDARD)) == STANDARD


@pytest.mark.parametrize("text", ["", "prefill:1024", "decode:1x64", "prefill:1@64", "decode:0@64", "prefill:1x0"])
def test_what_is_no_row_is_named(text: str) -> None:
    with pytest.raises(BadRequest, match=repr(text)):
        parse_rows(text)
