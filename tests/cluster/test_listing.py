"""What a process knows of a cluster's others. Needs no Ray: what it tells is told here."""

import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from pilotfish.cluster.config import Role, cluster_config
from pilotfish.cluster.heard import LISTENERS, Listed
from pilotfish.cluster.listing import Listing, introduction
from pilotfish.engine.targets.members import Members

CONFIG = cluster_config({"roles": {"api": {}, "target": {"model": "/models/target"}}})


def listed(role: Role, id: str, endpoint: str = "") -> Listed:
    return Listed(id, "host", introduction(CONFIG, role, id, endpoint), {"ready": True})


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = SimpleNamespace(shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "pilotfish.cluster.alpha", SimpleNamespace(follow=lambda *_: handle))


@pytest.fixture
def listing() -> Listing:
    return Listing(CONFIG, ("api", "target"))


def test_a_target_that_has_left_drains(listing: Listing) -> None:
    one, other = listed("target", "a", "tcp://10.0.0.1:7000"), listed("target", "b", "tcp://10.0.0.2:7000")
    LISTENERS["pilotfish-target"]([other, one])
    assert listing.of("target") == [one, other]
    assert listing.members("target") == (one.member, other.member)
    LISTENERS["pilotfish-target"]([other])
    known = [(member.name, member.draining) for member in listing.members("target")]
    assert known == [("target-b", False), ("target-a", True)]


def test_servers_are_known_and_dialled_by_nobody(listing: Listing) -> None:
    one = listed("api", "a")
    LISTENERS["pilotfish-api"]([one])
    assert listing.of("api") == [one]
    LISTENERS["pilotfish-api"]([])
    assert listing.of("api") == [] and listing.members("api") == ()


@pytest.mark.usefixtures("listing")
def test_a_process_that_follows_an_application_routes_nothing_to_it() -> None:
    assert "pilotfish-api" in LISTENERS and "pilotfish-target" in LISTENERS
    assert "pilotfish-elsewhere" not in LISTENERS


def test_members_are_written_after_each_change(tmp_path: Path) -> None:
    path = tmp_path / "members.json"
    listing = Listing(CONFIG, ("target",), path)
    assert not listing.serving
    for ids in (["a"], ["a", "b"]):
        LISTENERS["pilotfish-target"]([listed("target", id, f"tcp://10.0.0.1:{ord(id)}") for id in ids])
        written = msgspec.json.decode(path.read_bytes(), type=Members)
        assert [member.name for member in written.targets] == [f"target-{id}" for id in ids] and listing.serving
    listing.close()
