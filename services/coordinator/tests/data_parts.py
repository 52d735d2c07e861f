"""Items of a source of data, and the refusal of one, for the tests of data."""

import pytest
from headrace_coordinator.data.sources import open_source
from headrace_schema.problems import Impossible


def items_of(name, /, **options):
    """All items of a source."""
    return list(open_source(name, options).items())


def refusal(name, /, **options) -> str:
    """What is told of a source with wrong options or rows."""
    with pytest.raises(Impossible) as caught:
        items_of(name, **options)
    return str(caught.value)
