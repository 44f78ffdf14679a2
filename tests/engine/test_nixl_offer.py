"""A prefill pool that is to offer its memory over NIXL where there is none says so, before it loads anything."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from pilotfish.config import EngineConfig, PrefillConfig
from pilotfish.engine import prefill_pool
from pilotfish.errors import ParameterError
from pilotfish.wire.sockets import ListeningChannel


def test_nixl_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_pool, "nixl_installed", lambda: False)
    config = PrefillConfig(model=EngineConfig(target=tmp_path / "nowhere"), listen="tcp://127.0.0.1:0", nixl=True)
    expected = r"nixl: True is not allowed; expected NIXL, which is not installed: pip install 'pilotfish\[nixl\]'"
    with (
        closing(ListeningChannel(config.listen)) as channel,
        pytest.raises(ParameterError, match=expected),
        prefill_pool.serving(config, channel),
    ):
        pass
