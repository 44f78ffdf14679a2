"""A run of the kit: all checks against one pool, and the rules that held or broke meanwhile."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from msgspec import Struct

from pilotfish.core.drafting.messages import Hello
from pilotfish.wire.conformance import faults, greeting, load, sessions
from pilotfish.wire.conformance.checks import Check, CheckContext, CheckResult, Figure, KitOptions
from pilotfish.wire.conformance.player import PlayerChannel
from pilotfish.wire.conformance.referee import RULES, Referee

#: In the order in which they stand there.
CHECKS = [one for part in (greeting, sessions, faults, load) for one in vars(part).values() if isinstance(one, Check)]
#: Of all checks and rules, with the sentence of docs/draft-protocol.md that each is about.
SENTENCES = {**{check.name: check.sentence for check in CHECKS}, **RULES}


class ConformanceReport(Struct, frozen=True):
    model: str  # the draft's name, as it says
    revision: str
    capabilities: list[str]
    trees: int  # that came in all
    nodes: int
    findings: list[CheckResult]
    figures: list[Figure]

    @property
    def failed(self) -> list[CheckResult]:
        return [finding for finding in self.findings if finding.status == "fail"]


def examine(
    dial: Callable[[bytes], PlayerChannel],
    hello: Hello,
    options: KitOptions,
    only: Sequence[str] = (),
    done: Callable[[str], None] = lambda _: None,
) -> ConformanceReport:
    """All checks, or the named ones, in order, each with its own targets. CheckError where nothing answers at all."""
    referee = Referee(hello.vocab_size)
    with ExitStack() as channels:
        loaded = CheckContext(dial, hello, options, referee, channels).target().loads[-1]
    findings, figures = list[CheckResult](), list[Figure]()
    for check in [check for check in CHECKS if not only or check.name in only]:
        with ExitStack() as channels:
            bench = CheckContext(dial, hello, options, referee, channels)
            findings.append(check.found(bench))
            figures += bench.figures
        done(check.name)
    rules = [_rule(name, referee) for name in RULES if not only or name in only or name in referee.breaches]
    identity = loaded.model, loaded.revision, loaded.capabilities
    return ConformanceReport(*identity, referee.trees, referee.nodes, findings + rules, figures)


def _rule(name: str, referee: Referee) -> CheckResult:
    if name not in referee.breaches:
        evidence = f"in {referee.trees} Trees" if name.startswith("tree-") else "never broken"
        return CheckResult(name, "rules", "pass", evidence)
    times = referee.counts[name]
    return CheckResult(name, "rules", "fail", f"{times} times, first: {referee.breaches[name]}")
