"""Fixtures of tests of trained heads."""

import pytest
from head_files import write_target

from pilotfish.model.heads.target import TargetFacts


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetFacts:
    """No test changes its files."""
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(params=["kernels", "reference"])
def eager(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "reference")
