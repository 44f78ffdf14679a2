"""OpenMP's threads sleep while they wait, whoever starts them."""

import logging
import os
import subprocess
import sys

import pytest
from sizes import sized

from pilotfish import openmp
from pilotfish.openmp import POLICY, wait_passively, warn_of_spinning


@pytest.mark.parametrize(("given", "spins"), sized([(None, "0")], [(None, "0"), ("ACTIVE", "30000000000")]))
def test_torch_is_loaded_with_threads_that_sleep_unless_told_otherwise(given: str | None, spins: str) -> None:
    """OpenMP itself says so (GCC's; its default is 300000): every entry point imports the package before torch."""
    environment = {name: value for name, value in os.environ.items() if name != POLICY}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE"} | ({} if given is None else {POLICY: given})
    done = subprocess.run(
        [sys.executable, "-c", "import pilotfish, torch"], env=environment, capture_output=True, text=True, check=True
    )
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr


def test_earlier_torch_is_told_of_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv(POLICY)
    monkeypatch.setattr(openmp, "_came_late", False)
    wait_passively()  # torch is loaded in a test
    assert os.environ[POLICY] == "passive"
    with caplog.at_level(logging.WARNING):
        warn_of_spinning()
        warn_of_spinning()
    assert [record.message for record in caplog.records] == [
        "torch was imported before pilotfish, so its threads spin while they wait: with a busy neighbour on a core "
        "steps take up to ten times as long; import pilotfish first, or set OMP_WAIT_POLICY=passive"
    ]


def test_who_chose_a_policy_is_not_warned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(POLICY, "active")
    wait_passively()
    warn_of_spinning()
    assert os.environ[POLICY] == "active" and not caplog.records
