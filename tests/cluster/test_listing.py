"""What a process knows of a cluster's others. Needs no Ray: what it tells is told here."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from pilotfish.cluster.config import Role, cluster_config
from pilotfish.cluster.heard import Listed, listens, told
from pilotfish.cluster.listing import Listing, introduction

CONFIG = cluster_config({"roles": {"api": {}, "target": {"model": "/models/target"}}})


def listed(role: Role, id: str, endpoint: str = "") -> Listed:
    return Listed(id, "host", introduction(CONFIG, role, id, endpoint), {"ready": True})


@pytest.fixture
def listing(monkeypatch: pytest.MonkeyPatch) -> Listing:
    handle = SimpleNamespace(shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "pilotfish.cluster.alpha", SimpleNamespace(follow=lambda *_: handle))
    return Listing(CONFIG, ("api", "target"))


def test_a_target_that_has_left_drains(listing: Listing) -> None:
    one, other = listed("target", "a", "tcp://10.0.0.1:7000"), listed("target", "b", "tcp://10.0.0.2:7000")
    told("pilotfish-target", [other, one])
    assert listing.of("target") == [one, other]
    assert listing.members("target") == (one.member, other.member)
    told("pilotfish-target", [other])
    assert [(member.name, member.draining) for member in listing.members("target")] == [
        ("target-b", False),
        ("target-a", True),
    ]


def test_servers_are_known_and_dialled_by_nobody(listing: Listing) -> None:
    one = listed("api", "a")
    told("pilotfish-api", [one])
    assert listing.of("api") == [one]
    told("pilotfish-api", [])
    assert listing.of("api") == [] and listing.members("api") == ()


@pytest.mark.usefixtures("listing")
def test_a_process_that_follows_an_application_routes_nothing_to_it() -> None:
    assert listens("pilotfish-api") and listens("pilotfish-target")
    assert not listens("pilotfish-elsewhere")
