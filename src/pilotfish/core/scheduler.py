"""Which rows go into the next forward, and what its outcome commits.

There is no prefill, decode or speculative phase. Each request has committed tokens without KV (a prompt,
or its last token) and a tree of guesses below the last one, maybe empty. A step gives rows to both.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pilotfish.core.logprobs import TokenLogprobs
from pilotfish.core.request import FinishReason, Request
from pilotfish.core.slots import SlotPool
from pilotfish.core.tree import ROOT, TokenTree, walk
from pilotfish.errors import PromptError

#: Tokens that a request may grow, with everyone else standing still, before it can be short of slots: a step's
#: worth for most trees. More keeps slots idle, fewer admits what is soon preempted.
HEADROOM = 64


@dataclass(frozen=True)
class Chunk:
    """Committed tokens [num_computed, num_computed + count) of a request, chosen for a step."""

    request: Request
    count: int

    @property
    def complete(self) -> bool:
        """Whether it reaches the last committed token, so that the step samples what follows."""
        return self.count == self.request.num_pending


@dataclass(frozen=True)
class Plan:
    """What a step begins with."""

    chunks: list[Chunk]
    preempted: list[Request]  # back in the queue, without KV: whatever is kept for them elsewhere can go


@dataclass(frozen=True)
class Rows:
    """One request's rows in a forward: a chunk of committed tokens, then the nodes of its tree."""

    request: Request
    count: int  # committed tokens
    tree: TokenTree  # empty unless `samples`
    samples: bool  # the last committed row and every node give a token
    scored: range  # indices of prompt tokens whose rows score the token that follows
    slots: list[int]  # [count + len(tree)]

    @property
    def num_samples(self) -> int:
        return 1 + len(self.tree) if self.samples else 0


@dataclass(frozen=True)
class Step:
    """One forward."""

    rows: list[Rows]

    @property
    def num_rows(self) -> int:
        return sum(len(rows.slots) for rows in self.rows)

    @property
    def num_samples(self) -> int:
        return sum(rows.num_samples for rows in self.rows)


@dataclass(frozen=True)
class Commit:
    """What a step added to one request. All tokens but the last were guessed by the draft."""

    request: Request
    tokens: list[int]  # none where only prompt tokens were scored, and where the request ended with an error
    origins: list[str]  # of the tokens that were guessed, the first ones
    sampled_rows: list[int]  # [len(tokens)], which of the step's sampling rows gave each token
    scored: range  # indices of prompt tokens whose rows scored the token that follows
    nodes: int = 0  # of its tree, that were verified
    logprobs: Sequence[TokenLogprobs] = ()  # of `tokens`, where the request asks for them
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # of the prompt tokens after `scored`

    @property
    def accepted(self) -> int:
        return len(self.origins)


class Scheduler:
    """Continuous batching in arrival order over one slot pool; the only place that changes requests.

    A request is admitted when its tokens and a little growth fit beside what the others are about to take. When
    slots run out the youngest is preempted: its slots are freed, and it waits, first in the queue, until the slots
    of its longest possible sequence can be set aside; its KV is computed again and its output is the same. So a
    request is preempted once at most, and the oldest always ends. Trees take only slots that nobody else needs.

        pool   [ live ........ | set aside | growth of the others, trees | free ]
    """

    def __init__(self, pool: SlotPool, max_rows: int, max_requests: int) -> None:
        self.pool = pool
        self.max_rows = max_rows
        self.max_requests = min(max_requests, max_rows)  # so that each running request gets a row
        self.headroom = HEADROOM
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a request; PromptError when the pool could never hold it."""
        if request.max_length > self.pool.capacity:
            raise PromptError(
                f"prompt: {request.num_prompt_tokens} tokens and max_tokens {request.params.max_tokens} "
                f"need {request.max_length} KV slots; the pool has {self.pool.capacity}"
            )
        self.waiting.append(request)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    # -- what goes into the next forward

    def plan(self) -> Plan:
        """Admit, then split the row budget over committed tokens: one row for each request first (so
        that a long prompt delays nobody's next token), the rest in order of arrival. Preempt while slots lack."""
        self._admit()
        preempted = []
        while self._growth(chunks := self._chunks()) > self._unclaimed():
            preempted.append(self._preempt())
        return Plan(chunks, preempted)

    def _chunks(self) -> list[Chunk]:
        left = self.max_rows - len(self.running)
        chunks = []
        for request in self.running:
            extra = min(request.num_pending - 1, left)
            left -= extra
            chunks.append(Chunk(request, 1 + extra))
        return chunks

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_requests:
            request = self.waiting[0]
            pending = sum(r.num_pending for r in self.running if not r.set_aside)
            need = request.max_length if request.stats.preemptions else request.num_pending + self.headroom
            if min(need, request.max_length) > self._unclaimed() - pending:
                return
            request.set_aside = bool(request.stats.preemptions)
            self.running.append(self.waiting.popleft())

    def _preempt(self) -> Request:
        """The youngest whose slots are not set aside: there is one, or nobody could lack any."""
        request = next(r for r in reversed(self.running) if not r.set_aside)
        self._retire(request)
        request.restart()
        self.preemptions += 1
        self.waiting.appendleft(request)
        return request

    def _unclaimed(self) -> int:
        """Free slots that are not set aside for a running request."""
        return self.pool.num_free - sum(r.max_length - r.num_computed for r in self.running if r.set_aside)

    @staticmethod
    def _growth(chunks: Sequence[Chunk]) -> int:
        """Slots that a step takes from those unclaimed."""
        return sum(chunk.count for chunk in chunks if not chunk.request.set_aside)

    def schedule(self, chunks: Sequence[Chunk], trees: Sequence[TokenTree], max_nodes: int) -> Step:
        """Give the rows that chunks leave over to the best nodes of all trees, `max_nodes` at most, and slots to
        all rows.

        `trees` holds one tree for each chunk that is complete, in order.
        """
        proposed = iter(trees)
        offers = [_useful(next(proposed), chunk.request) if chunk.complete else TokenTree() for chunk in chunks]
        spare_rows = self.max_rows - sum(chunk.count for chunk in chunks)
        budget = min(max_nodes, spare_rows, self._spare_slots(chunks))
        return Step([self._rows(chunk, tree) for chunk, tree in zip(chunks, share(offers, budget), strict=True)])

    def _spare_slots(self, chunks: Sequence[Chunk]) -> int:
        """Slots that trees may take beside the chunks. What is set aside is lent to them where nobody could keep it
        but those for whom it is: what a tree does not get accepted is free again after the step."""
        if all(chunk.request.set_aside for chunk in chunks):
            return self.pool.num_free - sum(chunk.count for chunk in chunks)
        return self._unclaimed() - self._growth(chunks)

    def _rows(self, chunk: Chunk, tree: TokenTree) -> Rows:
        slots = self.pool.allocate(chunk.count + len(tree))
        return Rows(chunk.request, chunk.count, tree, chunk.complete, chunk.request.to_score(chunk.count), slots)

    # -- what its outcome commits

    def commit(self, step: Step, sampled: Sequence[int | None], unscored: Collection[int] = ()) -> list[Commit]:
        """Walk every tree; `sampled` [step.num_samples] holds the target's token after each sampling row, None where
        it can sample none. A request that gets no token at all for that reason ends with an error; so do those with
        ids in `unscored`, whose prompts cannot be scored."""
        commits, start = [], 0
        for rows in step.rows:
            own = sampled[start : start + rows.num_samples]
            if rows.request.id in unscored or (rows.samples and own[ROOT] is None):
                commits.append(self._fail(rows))
            else:
                commit = self._commit_rows(rows, own, start)
                if rows.samples or rows.scored:
                    commits.append(commit)
            start += rows.num_samples
            if rows.request.finish_reason is not None:
                self._retire(rows.request)
        return commits

    def _fail(self, rows: Rows) -> Commit:
        self.pool.release(rows.slots)
        rows.request.finish_reason = FinishReason.ERROR
        return Commit(rows.request, [], [], [], range(0), len(rows.tree))

    def _commit_rows(self, rows: Rows, sampled: Sequence[int | None], first_sample: int) -> Commit:
        request, tree = rows.request, rows.tree
        tokens = walk(tree, sampled) if rows.samples else []
        path = tree.follow(tokens[:-1])  # the last token may be in the tree where the walk ended early
        kept = rows.slots[: rows.count] + [rows.slots[rows.count + node - 1] for node in path]
        request.add_slots(kept)
        request.num_scored = max(request.num_scored, rows.scored.stop)
        self.pool.release(set(rows.slots) - set(kept))
        committed = request.extend(tokens)
        origins = [tree.origins[node] for node in path[: len(committed)]]
        if rows.samples:
            request.stats.count(tree.depths[1:], origins)
        gave = [first_sample + node for node in (ROOT, *path)]
        return Commit(request, committed, origins, gave[: len(committed)], rows.scored, len(tree))

    def cancel(self, step: Step) -> list[Request]:
        """The forward of `step` failed: end its requests, free their slots and the step's; return them."""
        for rows in step.rows:
            self.pool.release(rows.slots)
            self.abort(rows.request)
        return [rows.request for rows in step.rows]

    def abort(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request between two steps and free all it held; one that has ended stays as it is."""
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self._retire(request)

    def _retire(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.slots[: request.num_computed].tolist())

    def check(self) -> None:
        """EngineError unless every slot is free or belongs to exactly one running request."""
        self.pool.check([slot for r in self.running for slot in r.slots[: r.num_computed].tolist()])


def _useful(tree: TokenTree, request: Request) -> TokenTree:
    """Without the nodes that lie too deep to be committed before `max_tokens`; of the others the best `max_nodes`."""
    if max(tree.depths) >= request.num_remaining:
        tree = tree.subtree([node for node in tree.nodes() if tree.depths[node] < request.num_remaining])
    return tree if request.max_nodes is None else share([tree], request.max_nodes)[0]


def share(trees: Sequence[TokenTree], budget: int) -> list[TokenTree]:
    """The best `budget` nodes of all trees together, as a subtree of each; ties to the older request."""
    if sum(len(tree) for tree in trees) <= budget:
        return list(trees)
    ranked = ((-tree.scores[node], i, node) for i, tree in enumerate(trees) for node in tree.nodes())
    chosen: list[list[int]] = [[] for _ in trees]
    for _, i, node in heapq.nsmallest(max(budget, 0), ranked):
        chosen[i].append(node)
    return [tree.subtree(sorted(nodes)) for tree, nodes in zip(trees, chosen, strict=True)]
