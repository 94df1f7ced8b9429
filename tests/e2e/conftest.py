"""What several files of end-to-end tests use: a server of GRPO jobs, started once a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.job_server import JobServer


@pytest.fixture(scope="module")
def job_server() -> Iterator[JobServer]:
    server = JobServer()
    yield server
    server.close()
