"""Log-probabilities of what a step has committed, where requests ask for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from pilotfish.core.scheduling.executor import Outcome
from pilotfish.core.scheduling.step import RequestCommit, Step


class AskedLogprobs(Struct, frozen=True):
    place: int  # of the commit that gets them
    field: str  # which of its fields
    rows: list[int]
    tokens: list[int]
    top: int


def with_logprobs(
    commits: Sequence[RequestCommit], step: Step, scoring: Mapping[int, range], outcome: Outcome
) -> list[RequestCommit]:
    """The commits with those that their requests ask for. `scoring` are the kept rows that score prompts, by request.
    All that ask for as many are scored together: a device is slow to begin."""
    told, by_top = list(commits), defaultdict[int, list[AskedLogprobs]](list)
    for one in _asked(commits, step, scoring):
        by_top[one.top].append(one)
    for top, asked in by_top.items():
        rows, tokens = [row for one in asked for row in one.rows], [token for one in asked for token in one.tokens]
        scored = iter(outcome.logprobs(rows, tokens, top))
        for one in asked:
            told[one.place] = replace(told[one.place], **{one.field: list(islice(scored, len(one.rows)))})
    return told


def _asked(commits: Sequence[RequestCommit], step: Step, scoring: Mapping[int, range]) -> Iterator[AskedLogprobs]:
    for place, commit in enumerate(commits):
        request, params = commit.request, commit.request.params
        if params.logprobs is not None and commit.tokens:
            rows = step.sample_rows[commit.samples].tolist()
            yield AskedLogprobs(place, "logprobs", rows, commit.tokens, params.logprobs)
        if commit.scored:
            assert params.prompt_logprobs is not None  # or nothing would be scored
            tokens = [request.tokens[index + 1] for index in commit.scored]
            yield AskedLogprobs(place, "prompt_logprobs", [*scoring[request.id]], tokens, params.prompt_logprobs)
