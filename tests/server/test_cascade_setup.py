"""A cascade as it is configured: its engines, their memory, and files that do not fit a server."""

from pathlib import Path
from typing import Any

import pytest
from cascade_double import FILE
from refusals import refused

from pilotfish.config.engine import EngineConfig
from pilotfish.config.server import ServerConfig
from pilotfish.engine.processes import host_memory
from pilotfish.engine.processes.host_memory import GIB
from pilotfish.errors import ParameterError
from pilotfish.server.traffic.cascade import CascadeSetup, cascade_setup


def setup_of(folder: Path, text: str, **engine: Any) -> CascadeSetup | None:
    (folder / "cascade.toml").write_text(text)
    config = ServerConfig(cascade=folder / "cascade.toml", replicas=engine.pop("replicas", None))
    return cascade_setup(EngineConfig(target=Path("models/large"), **engine), config)


def test_a_server_without_a_file_has_none() -> None:
    assert cascade_setup(EngineConfig(target=Path("x")), ServerConfig()) is None


def test_the_small_model_runs_plainly_and_alone(tmp_path: Path) -> None:
    given = {"draft": Path("d"), "mode": "async", "kv_slots": 4096, "max_requests": 9, "kv_host_memory": 1.0}
    setup = setup_of(tmp_path, FILE + "threads = 3\n", **given, threads=2)
    assert setup is not None
    small = setup.small
    assert (small.mode, small.draft, small.kv_slots, small.kv_host_memory) == ("off", None, 0, 0.0)
    assert (small.threads, small.max_requests, small.target) == (3, 9, Path("/models/small"))
    assert setup.server.target_pool == () and setup.server.replicas is None
    assert small.allotted > 0 and setup.large.allotted > 0


def test_pools_of_the_small_model_leave_the_host_to_the_large_one(tmp_path: Path) -> None:
    setup = setup_of(tmp_path, FILE + 'pools = ["ipc:///tmp/a"]\nkeys = ["k"]\n')
    assert setup is not None and setup.large.allotted == setup.small.allotted == 0
    assert (setup.server.target_pool, setup.server.target_pool_key) == (("ipc:///tmp/a",), ("k",))


def test_two_models_share_a_hosts_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its weights, and an equal part of what is left; or what is given."""
    monkeypatch.setattr(host_memory, "free_memory", lambda: 40 * GIB)
    monkeypatch.setattr(host_memory, "file_size", lambda model: (9 if model.name == "large" else 3) * GIB)

    def allotted(text: str = "", **engine: Any) -> list[float]:
        setup = setup_of(tmp_path, FILE + text, **engine)
        assert setup is not None
        return [setup.large.allotted / GIB, setup.small.allotted / GIB]

    assert allotted() == [9 + 12, 3 + 12]
    assert allotted(replicas=2) == [9 + 5, 3 + 5] and sum(allotted(replicas=2)) + 9 + 5 == 36
    assert allotted(memory=10.0) == [0, 26] and allotted("memory = 4.0\n") == [32, 0]
    assert allotted("memory = 4.0\n", memory=10.0) == [0, 0]
    assert allotted(replicas=0) == [0, 0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            FILE.replace('"auto"', '"models/large"'),
            "cascade.name: 'models/large' is not allowed; expected a name other",
        ),
        (FILE.replace('"hard"', '"a b"'), "cascade.tags: 'a b' is not allowed"),
        (FILE + "kv_slots = 3\n", "cascade.small.kv_slots: 3 is not allowed; expected 0, or an integer 64 to"),
        (FILE + 'dtype = "int4"\n', "cascade.small.dtype: 'int4' is not allowed"),
        (FILE + 'pools = ["a", "a"]\n', "cascade.small.pools: 'a,a' is not allowed; expected each pool once"),
    ],
)
def test_a_file_that_does_not_fit_the_server(tmp_path: Path, text: str, told: str) -> None:
    assert refused(ParameterError, setup_of, tmp_path, text).startswith(told)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name, told in (("none", "a file that can be read"), ("bytes", "TOML in UTF-8")):
        with pytest.raises(ParameterError, match=f"^cascade: .*{told}"):
            cascade_setup(EngineConfig(target=Path("x")), ServerConfig(cascade=tmp_path / name))


def test_two_models_on_one_gpu_say_what_they_take(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"^cascade\.small\.kv_slots: 0 .* both models are on cuda"):
        setup_of(tmp_path, FILE, device="cuda", kv_slots=4096)
    with pytest.raises(ParameterError, match=r"^kv_slots: 0 .* both models are on cuda"):
        setup_of(tmp_path, FILE + "kv_slots = 4096\n", device="cuda")
    assert setup_of(tmp_path, FILE + "memory = 4.0\n", device="cuda", kv_slots=4096)
    assert setup_of(tmp_path, FILE + 'device = "cpu"\n', device="cuda")
