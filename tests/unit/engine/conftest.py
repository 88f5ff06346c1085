"""A probe for each test."""

from collections.abc import Iterator

import pytest

from tests.unit.engine.probe import Probe


@pytest.fixture
def probe() -> Iterator[Probe]:
    one = Probe()
    yield one
    one.close_all()
