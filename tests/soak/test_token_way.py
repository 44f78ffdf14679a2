"""A token passes few files: a limit for each mode, measured by profilers in all processes."""

from __future__ import annotations

import pytest
from token_way import files_on_the_way


@pytest.mark.parametrize(("mode", "limit"), [("sync", 26), ("async", 36)])
def test_a_token_passes_few_files(mode: str, limit: int) -> None:
    files = set[str]().union(*files_on_the_way(mode))
    assert {"core/scheduling/scheduler.py", "model/executor.py"} <= files, "profilers saw nothing"
    assert len(files) <= limit
