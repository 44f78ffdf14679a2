"""The conformance kit: what is lawful passes, and what is broken fails by the name of its rule."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from drafters import BROKEN, Lawful, MixesTargets, listening
from sizes import in_soak, sized

from pilotfish.core.drafting.messages import PROTOCOL_VERSION, TARGET_CAPABILITIES, Hello
from pilotfish.wire.conformance.checks import CheckError, KitOptions
from pilotfish.wire.conformance.kit import CHECKS, SENTENCES, ConformanceReport, examine
from pilotfish.wire.sockets import DialingChannel

HELLO = Hello(PROTOCOL_VERSION, "digest", 4096, "kit", capabilities=list(TARGET_CAPABILITIES))
QUICK = KitOptions(patience=2.0, context=64, sessions=4, garbage=400)
#: Drafters that are examined at once; they mostly wait. By all checks fewer are: those leave sockets behind.
AT_ONCE, WHOLE_AT_ONCE = 12, 4


def examined(kind: type[Lawful], *only: str, options: KitOptions = QUICK) -> ConformanceReport:
    with listening(kind) as endpoint:
        return examine(lambda incarnation: DialingChannel([endpoint], incarnation), HELLO, options, only)


def all_examined(asked: Mapping[str, tuple[Any, ...]], at_once: int) -> dict[str, ConformanceReport]:
    with ThreadPoolExecutor(at_once) as pool:
        running = {name: pool.submit(examined, *arguments) for name, arguments in asked.items()}
        return {name: report.result() for name, report in running.items()}


@pytest.fixture(scope="module")
def reports() -> dict[str, ConformanceReport]:
    """Of all broken drafters, each by the check that shows what is wrong with it."""
    return all_examined({f"{kind.__name__} {name}": (kind, name) for kind, name, _ in BROKEN}, AT_ONCE)


@pytest.fixture(scope="module")
def whole_reports() -> dict[str, ConformanceReport]:
    """Of all broken drafters, by all checks."""
    return all_examined({kind.__name__: (kind,) for kind, _, _ in BROKEN}, WHOLE_AT_ONCE)


@pytest.mark.parametrize(("kind", "name", "rule"), BROKEN, ids=[f"{kind.__name__}, {name}" for kind, name, _ in BROKEN])
def test_a_broken_drafter_fails_by_the_name_of_its_rule(
    reports: dict[str, ConformanceReport], kind: type[Lawful], name: str, rule: str
) -> None:
    report = reports[f"{kind.__name__} {name}"]
    failed = {finding.name: finding.evidence for finding in report.failed}
    assert rule in failed and failed[rule].count("\n") == 0
    mixed = {"tree-sequence", "tree-ids", "tree-base-len", "tree-parents"} if kind is MixesTargets else set()
    assert failed.keys() <= {rule, name, "silence"} | mixed, failed


def test_the_example_passes() -> None:
    names = (
        [check.name for check in CHECKS]
        if sized(False, True)
        else ["serves-without-complaint", "resyncs-gaps", "reopens"]
    )
    report = examined(Lawful, *names)
    assert not report.failed, report.failed
    assert report.model == "ngram" and report.trees > 10
    optional = {"names-unknown-messages", "pauses", "prefix-keys"}
    assert {finding.name for finding in report.findings if finding.status == "pass"} >= set(names) - optional


@in_soak
@pytest.mark.parametrize("kind", sorted({kind for kind, _, _ in BROKEN}, key=lambda kind: kind.__name__))
def test_a_whole_run_finds_a_broken_drafter(whole_reports: dict[str, ConformanceReport], kind: type[Lawful]) -> None:
    rules = {rule for other, _, rule in BROKEN if other is kind}
    assert rules & {finding.name for finding in whole_reports[kind.__name__].failed}


def test_a_draft_that_refuses_says_why() -> None:
    class Picky(Lawful):
        def take(self, route: bytes, incarnation: bytes, message: dict[str, object]) -> None:  # noqa: ARG002
            self.send(route, "refuse", session=0, generation=0, reason="not you")

    with pytest.raises(CheckError, match="it refused: not you"):
        examined(Picky)


def test_every_check_and_rule_has_its_sentence() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert all(sentence.endswith(".") and name == name.lower() for name, sentence in SENTENCES.items())
