from pilotfish.config.hardware.tables import read_table
from pilotfish.operate.explaining.explanation import Cause, CohortFigures, Kind, Verdict
from pilotfish.printable import printable

NOTHING = "Not enough data: in one of the two no request ended that was answered."
#: Values that a sentence names.
NAMED = 3
GOOD = "Nothing: it raised acceptance."
_WORDS = read_table(__file__, "explain_wording", dict[str, dict[str, str]])
DIFFERENCES, ADVICE = _WORDS["differences"], _WORDS["advice"]
#: The kind with the right advice where such requests became fewer.
SHRUNK: dict[Kind, Kind] = {"draft": "variant", "client": "mix"}


def told(verdict: Verdict, before: CohortFigures, after: CohortFigures, width: float, tellable: float) -> str:
    """`width`: half of the change's interval, accepted tokens a step; `tellable`: a share."""
    old, new = before.accepted_per_step or 0.0, after.accepted_per_step or 0.0
    figures = f"{old:.2f} accepted tokens a step before, {new:.2f} after"
    if verdict == "same":
        enough = f"there is enough data to tell one of {tellable:.0%}"
        return f"No difference that matters: {figures} (±{width:.2f}); {enough}."
    if verdict == "unclear":
        requests = f"{before.requests} and {after.requests} requests"
        sure = f"cannot tell a change of {tellable:.0%} from none"
        return f"Not enough data: {requests} {sure}; {figures} (±{width:.2f})."
    relative = f" by {abs(new / old - 1):.0%}" if old else ""
    return f"Acceptance {'fell' if new < old else 'rose'}{relative}: {figures} (±{width:.2f})."


def advice(cause: Cause) -> str:
    if cause.effect > 0:
        return GOOD
    if cause.factor == "late":
        return ADVICE["late"]
    shrank = cause.part == "mix" and cause.after.share < cause.before.share
    return ADVICE[SHRUNK.get(cause.kind, cause.kind) if shrank else cause.kind]


def sentence(cause: Cause, all_before: CohortFigures) -> str:
    parts = [_mix(cause, all_before) if cause.part == "mix" else _within(cause)]
    if cause.depth is not None:
        change = "lost" if cause.depth.after < cause.depth.before else "won"
        shares = f"{cause.depth.after:.0%} of its guesses were accepted, against {cause.depth.before:.0%}"
        parts.append(f"Depth {cause.depth.depth} {change} most: {shares}.")
    if cause.alike:
        parts.append(f"It cannot be told from a change by {' or '.join(cause.alike)}: these are the same requests.")
    return " ".join(parts)


def headline(cause: Cause) -> str:
    where = "" if cause.dimension is None else f" ({place(cause)})"
    return f"{cause.kind}{where}: {cause.effect:+.2f} accepted tokens a step, {cause.share:.0%} of the change"


def place(cause: Cause) -> str:
    more = f" and {len(cause.values) - NAMED} more" if len(cause.values) > NAMED else ""
    return f"{cause.dimension} {', '.join(map(printable, cause.values[:NAMED]))}{more}"


def _mix(cause: Cause, all_before: CohortFigures) -> str:
    old, new = cause.before, cause.after
    if old.share == 0:
        moved = f"is new, with {new.share:.0%} of the steps"
    else:
        moved = f"went from {old.share:.0%} to {new.share:.0%} of the steps"
    rate = new.accepted_per_step if old.accepted_per_step is None else old.accepted_per_step
    has = f"It has {rate:.2f} accepted tokens a step, where all had {all_before.accepted_per_step:.2f}"
    where = place(cause)
    return f"{where[0].upper()}{where[1:]} {moved}. {has}, and differs most in {DIFFERENCES[cause.factor]}."


def _within(cause: Cause) -> str:
    old, new = cause.before, cause.after
    where = "Everywhere" if cause.dimension is None else f"In {place(cause)}, and not elsewhere"
    if cause.factor == "late":
        late = f"{_share(new.late)} of the steps that wanted a tree had none in time"
        return f"{where}, {late}, {_share(old.late)} before."
    if cause.factor == "wanted":
        wanted = f"{_share(new.wanted)} of the steps wanted a tree, {_share(old.wanted)} before"
        return f"{where}, {wanted}; {_number(new.load)} sequences shared a step, {_number(old.load)} before."
    trees = f"{_number(new.accepted_per_tree)} tokens of a tree are accepted, {_number(old.accepted_per_tree)} before"
    return f"{where}, {trees}; trees have {_number(new.nodes_per_tree)} nodes, {_number(old.nodes_per_tree)} before."


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.0%}"


def _number(value: float | None) -> str:
    return "no" if value is None else f"{value:.2f}"
