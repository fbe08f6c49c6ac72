"""One server for all tests of the doctor: faults are put into it and taken out again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.doctor.faulty_server import tiny_server
from tests.serve.running import RunningServer


@pytest.fixture(scope="session")
def doctor_server() -> Iterator[RunningServer]:
    with tiny_server() as server:
        yield server
