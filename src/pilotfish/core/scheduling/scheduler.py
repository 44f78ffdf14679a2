"""The rows of the next forward, and the commit of its outcome. There is no prefill, decode or speculative phase: a
step gives rows to a request's committed tokens without KV and to a tree of guesses below the last one, maybe empty."""

from collections.abc import Collection, Sequence

import numpy as np

from pilotfish.core.cache.prefix_cache import PrefixCache
from pilotfish.core.cache.slots import NO_SLOTS, SlotPool, Slots, present
from pilotfish.core.cache.tiers import DEVICE, KVLoad, Tiers, save_coldest, save_run
from pilotfish.core.prefilling.handover import Prefills
from pilotfish.core.scheduling.loads import Loads
from pilotfish.core.scheduling.request import FinishReason, Request, WaitingRequests
from pilotfish.core.scheduling.step import PLAIN_COSTS, Chunk, RequestCommit, RowBudget, RowCosts, Step, StepPlan
from pilotfish.core.trees.tree import NO_VERDICT, Forest, Ints, Verdict, best, walk
from pilotfish.errors import EngineError, PromptError

#: Tokens that a request may grow, with everyone else standing still, before it can be short of slots: a step's
#: worth for most trees. More keeps slots idle, fewer admits what is soon preempted.
HEADROOM = 64
SAVED_STEPS = 4  # steps for whose slots the cache's coldest KV is in tiers before it is evicted


class Scheduler:
    """Continuous batching over one slot pool; the only place that changes requests.

    A request is admitted when its tokens and a little growth fit beside what the others are about to take. When slots
    run out the youngest is preempted: it waits, first in the queue, until the slots of its longest possible sequence
    can be reserved, and its output is the same. So a request is preempted once at most, and the oldest always ends.
    Trees take only slots that nobody else needs. Requests of one group share their prompt's slots; others find KV in
    the cache: of prompts once computed, of outputs once ended or preempted. A request whose KV tiers have, or prefill
    workers compute sooner, waits for it with its slots and gets no rows meanwhile.

    Where every layer has a window a request gives back slots that none of its rows will see, and takes only those of a
    cached prefix that its rows will see. There are no tiers or hand-overs then: they bring a prefix from its beginning.

            pool   [ live ........ | reserved  | growth of the others, trees | idle, free ]
    """

    def __init__(
        self,
        pool: SlotPool,
        max_rows: int,
        max_requests: int,
        cache: PrefixCache | None = None,
        tiers: Tiers | None = None,
        prefills: Prefills | None = None,
        costs: RowCosts = PLAIN_COSTS,
    ) -> None:
        """`cache`, of this pool, keeps the KV of ended requests; `tiers` keep what it evicts."""
        if pool.window and not (tiers is None and prefills is None):
            raise EngineError("scheduler: tiers and prefill workers serve no pool with a window")
        self.pool = pool
        self.cache = PrefixCache(pool, keeps=False) if cache is None else cache
        self.tiers = tiers
        self.loads = Loads(tiers, prefills)
        #: Free slots below which the coldest in the cache are saved: what the next steps may evict.
        self.low_water = min(max(SAVED_STEPS * max_rows, pool.capacity // 8), pool.capacity)
        self.max_rows = max_rows
        self.costs = costs
        self.max_requests = min(max_requests, max_rows)  # so that each running request gets a row
        self.headroom = HEADROOM
        self.waiting = WaitingRequests(None if cache is None else self._num_known)
        self.running: list[Request] = []
        self.preemptions = 0

    def add(self, request: Request) -> None:
        """PromptError if the pool could never hold it."""
        if self.most(request) > self.pool.capacity:
            raise PromptError(
                f"prompt: {request.num_prompt_tokens} tokens and max_tokens {request.params.max_tokens} "
                f"need {self.most(request)} KV slots; the pool has {self.pool.capacity}"
            )
        self.waiting.add(request)

    def most(self, request: Request) -> int:
        """Slots that it may hold at a time; with a window those that its next row sees and a step's rows."""
        return min(request.max_length, self._most_in_window) if self.pool.window else request.max_length

    @property
    def _most_in_window(self) -> int:
        return self.pool.window - 1 + self.max_rows

    def longest(self, context: int) -> int:
        """Tokens of the longest sequence, at most `context`, that the pool can serve."""
        windowed = self.pool.window and self._most_in_window <= self.pool.capacity
        return context if windowed else min(context, self.pool.capacity)

    @property
    def busy(self) -> bool:
        return bool(len(self.waiting) or self.running)

    # -- what goes into the next forward

    def plan(self) -> StepPlan:
        self._end_loads()
        admitted = self._admit()
        self._share_prompts()
        self._give_back()
        preempted = []
        while self._growth(chunks := self._chunks()) > self._unclaimed():
            preempted.append(self._preempt())
        return StepPlan(chunks, preempted, admitted)

    def _chunks(self) -> list[Chunk]:
        ready = [request for request in self.running if request.load is None]
        budget, chunks = RowBudget(self.max_rows, len(ready), self.costs), dict[int, Chunk]()
        for request in ready:
            first = self._first_of_group(request)
            if first is None:
                if count := budget.take(request):
                    chunks[request.id] = Chunk(request, count)
            elif (chunk := chunks.get(first.id)) and chunk.complete and first.tokens == request.tokens:
                chunks[request.id] = Chunk(request, 0, first)
        return list(chunks.values())

    def room(self, chunks: Sequence[Chunk]) -> int:
        return max(int(self.max_rows - sum(self.costs.of(chunk.request, chunk.count) for chunk in chunks)), 0)

    def _first_of_group(self, request: Request) -> Request | None:
        if request.num_computed or request.load is not None or not request.num_shareable:
            return None
        seen = self.pool.first_seen(request.num_prompt_tokens - 1)
        first = next((r for r in self.running if r.group == request.group and r.num_gone <= seen), request)
        return None if first is request else first

    def _share_prompts(self) -> None:
        for request in self.running:
            first = self._first_of_group(request)
            if first is not None and first.num_computed >= request.num_shareable:
                slots = first.slots[: request.num_shareable]
                self.pool.share(present(slots))
                request.add_slots(slots)

    def _give_back(self) -> None:
        for request in self.running if self.pool.window else ():
            self.pool.release(request.give_back(self.pool.first_seen(request.num_computed)))

    def _missing(self, request: Request) -> int:
        shared = 0 if self._first_of_group(request) is None else request.num_shareable
        missing = len(request.tokens) - request.num_gone - request.num_held - shared
        return max(min(missing, self.most(request) - request.num_held), 0)

    def _admit(self) -> list[Request]:
        admitted: list[Request] = []
        while self._next_fits():
            request = self.waiting.next()
            known = self._known(request)
            request.reserved = bool(request.stats.preemptions)
            self.pool.share(present(known))
            request.add_slots(known)
            request.stats.cached_by_tier = {DEVICE: len(known)} if len(known) else {}
            if self._may_find(request):
                self.loads.load(request, self.cache.allocate)
                if request.load is None:
                    self._hand_over(request)
            self.waiting.take(request)
            self.running.append(request)
            admitted.append(request)
        return admitted

    def _next_fits(self) -> bool:
        if not self.waiting or len(self.running) >= self.max_requests:
            return False
        request = self.waiting.next()
        pending = sum(self._missing(r) for r in self.running if not r.reserved)
        again, most = bool(request.stats.preemptions), self.most(request)
        need = most if again else min(self._missing(request) + self.headroom, most)
        found = 0 if again and self.pool.window else self.pool.owned(present(self._known(request)))
        return need - found <= self._unclaimed() - pending

    def _num_known(self, request: Request) -> int:
        if self._first_of_group(request) is not None:
            return request.num_shareable
        if not request.num_shareable:
            return 0
        return self.cache.num_known(request.cache_salt, request.tokens[:-1])

    def _hand_over(self, request: Request) -> None:
        others = [other for other in self.running if other.load is None and other is not request]
        waiting, neighbours = sum(o.num_pending - 1 for o in others), sum(o.num_pending == 1 for o in others)
        self.loads.hand_over(request, self.cache.allocate, waiting, neighbours)

    def _end_loads(self) -> None:
        self.loads.poll()
        for request in self.running:
            if (load := request.load) is not None and load.count is not None:
                self.pool.release(request.end_load())
                if isinstance(load, KVLoad) and (request.reserved or request.num_pending <= self._unclaimed()):
                    self._hand_over(request)

    def wait(self) -> None:
        self.loads.wait(self.running)

    def save_all(self) -> None:
        if self.tiers is not None:
            self.tiers.closing()
            for run in reversed(list(self.cache.coldest(self.pool.capacity))):
                save_run(self.cache, self.tiers, run)

    def _save(self) -> None:
        if self.tiers is not None and self.pool.num_free < self.low_water:
            save_coldest(self.cache, self.tiers, self.low_water - self.pool.num_free)

    def _may_find(self, request: Request) -> bool:
        """Not while its prompt is to be scored, nor where it shares its group's."""
        return bool(request.num_shareable) and self._first_of_group(request) is None

    def _known(self, request: Request) -> Slots:
        """Not of the last token, whose row must be its own."""
        if not self._may_find(request):
            return NO_SLOTS
        return self.cache.match(request.cache_salt, request.tokens[:-1])

    def _remember(self, request: Request, count: int) -> None:
        if request.finish_reason is not FinishReason.ERROR:
            own = request.slots[:count]
            own[:] = self.cache.insert(request.cache_salt, request.tokens[:count], own)

    def _to_remember(self, request: Request, before: int) -> bool:
        """Whether the step computed a prompt, or a part whose first slots are about to be given back."""
        whole = request.num_prompt_tokens <= request.num_computed
        return before < request.num_prompt_tokens and (whole or bool(self.pool.window))

    def _preempt(self) -> Request:
        request = next(r for r in reversed(self.running) if not r.reserved)
        self._retire(request)
        request.restart()
        self.preemptions += 1
        self.waiting.put_first(request)
        return request

    def _unclaimed(self) -> int:
        reserved = [r for r in self.running if r.reserved]
        if not self.pool.window or not reserved:
            return self.pool.num_available - sum(r.max_length - r.num_held for r in reserved)
        # Shared slots may stay with their other owner when given back, and count for nobody else.
        others = np.concatenate([NO_SLOTS, *(r.held for r in self.running if not r.reserved)])
        alone = np.setdiff1d(np.concatenate([r.held for r in reserved]), others)
        return self.pool.num_available + len(alone) - sum(map(self.most, reserved))

    @staticmethod
    def _growth(chunks: Sequence[Chunk]) -> int:
        return sum(chunk.count for chunk in chunks if not chunk.request.reserved)

    def schedule(self, chunks: Sequence[Chunk], offered: Forest, max_nodes: int) -> Step:
        """Rows for the best nodes of all trees, up to `max_nodes`, and slots. `offered`: a tree per complete chunk."""
        samples, forest = [chunk.samples for chunk in chunks], offered
        if len(offered):
            budget = max(min(max_nodes, self.room(chunks), self._spare_slots(chunks)), 0)
            requests = [chunk.request for chunk in chunks if chunk.complete]
            forest = offered.take(_worth_a_row(offered, requests, budget))
        forest = forest.among([chunk.complete for chunk in chunks if chunk.samples])
        scored = [chunk.request.to_score(chunk.count) for chunk in chunks]
        slots = self._allocate(chunks)
        return Step(list(chunks), samples, scored, slots, forest, self.cache.allocate(len(forest)))

    def follow(self, step: Step) -> Step | None:
        """The step after a step of no trees that is not committed yet: a row of each request that it cannot end by its
        length. None where more hangs on its tokens than their own rows: masks, rules, who runs, whose slots."""
        live = [place for place, chunk in enumerate(step.chunks) if chunk.request.finish_reason is None]
        going = [place for place in live if step.chunks[place].request.num_remaining > 1]
        chunks, alone = [Chunk(step.chunks[place].request, 1) for place in going], len(live) == len(self.running)
        slots_change = self.pool.window or len(going) > self._unclaimed() or self._next_fits()
        if slots_change or not (going and alone and step.plain):
            return None
        return step.following(chunks, going, self._allocate(chunks))

    def _allocate(self, chunks: Sequence[Chunk]) -> list[Slots]:
        slots, used = self.cache.allocate(sum(chunk.count for chunk in chunks)), 0
        taken: dict[int, Slots] = {}
        for chunk in chunks:
            if (first := chunk.forked_from) is None:
                taken[chunk.request.id] = slots[used : (used := used + chunk.count)]
            else:
                taken[chunk.request.id] = np.concatenate((first.slots[: first.num_computed], taken[first.id]))
                self.pool.share(present(taken[chunk.request.id]))
        return list(taken.values())

    def _spare_slots(self, chunks: Sequence[Chunk]) -> int:
        """Reserved slots count if all have a reservation: nodes that are not accepted are freed after the step."""
        if all(chunk.request.reserved for chunk in chunks):
            return self.pool.num_available - sum(chunk.count for chunk in chunks)
        return self._unclaimed() - self._growth(chunks)

    # -- what its outcome commits

    def commit(self, step: Step, sampled: Ints, unscored: Collection[int] = ()) -> list[RequestCommit]:
        """Walk every tree; `sampled` [step.num_samples] holds the target's token after each root and node, or
        NO_TOKEN. A request that gets no token, or is in `unscored` (its prompt cannot be scored), ends with an
        error. One that has ended since the step was scheduled gets nothing. If this raises, the step's slots are free
        once its requests are aborted."""
        try:
            walked = iter(walk(step.forest, sampled))
        except BaseException:
            self.cancel(step)
            raise
        verdicts = [next(walked) if samples else NO_VERDICT for samples in step.samples]
        self._keep_slots(step, verdicts)
        commits = []
        for chunk, samples, scored, verdict in zip(step.chunks, step.samples, step.scored, verdicts, strict=True):
            request = chunk.request
            if request.finish_reason is not None:
                continue
            if request.id in unscored or (samples and not verdict.tokens):
                request.finish_reason = FinishReason.ERROR
                commits.append(RequestCommit(request, nodes=verdict.nodes))
            elif samples or scored:
                request.num_scored = max(request.num_scored, scored.stop)
                commits.append(_extended(request, verdict, scored, step))
            if request.finish_reason is not None:
                self._retire(request)
            elif self._to_remember(request, 0 if chunk.forked_from else request.num_computed - chunk.count):
                self._remember(request, min(request.num_computed, request.num_prompt_tokens))
        self._save()
        return commits

    def _keep_slots(self, step: Step, verdicts: Sequence[Verdict]) -> None:
        for chunk, slots in zip(step.chunks, step.slots, strict=True):
            if chunk.request.finish_reason is None:
                chunk.request.add_slots(slots)
            else:
                self.pool.release(slots)
        if not len(step.forest):
            return
        rejected = np.ones(len(step.forest), np.bool_)
        for chunk, verdict in zip(step.chunks, verdicts, strict=True):
            path = verdict.path[: max(len(verdict.tokens) - 1, 0)]  # the last token's KV is not kept
            if path and chunk.request.finish_reason is None:
                chunk.request.add_slots(step.node_slots[path])
                rejected[path] = False
        self.pool.release(step.node_slots[rejected])

    def cancel(self, step: Step) -> None:
        for slots in (*step.slots, step.node_slots):
            self.pool.release(present(slots))

    def abort(self, request: Request) -> None:
        """Between two steps, or after a failed one; an ended request stays as it is."""
        request.finish_reason = request.finish_reason or FinishReason.ABORT
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self._retire(request)

    def _retire(self, request: Request) -> None:
        self.running.remove(request)
        if request.load is not None:
            self.loads.cancel(request.load)
            self.pool.release(request.end_load())
        self._remember(request, min(request.num_computed, len(request.tokens)))  # it may have ended on its path
        self.pool.release(request.held)

    def check(self, launched: Step | None = None) -> None:
        """EngineError unless every slot is free, or in the cache, or counts its owners: running requests, and a step
        that was `launched`."""
        held = [slot for r in self.running for slot in r.held.tolist()]
        held += [] if launched is None else present(np.concatenate((*launched.slots, launched.node_slots))).tolist()
        loading = [slot for r in self.running if r.load is not None for slot in r.load.slots.tolist()]
        self.pool.check([*held, *loading], self.cache.slots)
        self.cache.check()


def _extended(request: Request, verdict: Verdict, scored: range, step: Step) -> RequestCommit:
    tokens = request.extend(verdict.tokens)
    path = verdict.path[: len(tokens)]
    origins = step.forest.nodes.origins[path].tolist() if path else []
    if verdict.tokens:
        request.stats.count(verdict.nodes, verdict.deepest, origins)
    samples = verdict.samples[: len(tokens)]
    return RequestCommit(request, tokens, path, origins, samples, scored, verdict.nodes, verdict.deepest)


def _worth_a_row(offered: Forest, requests: Sequence[Request], count: int) -> Ints:
    """The best `count` nodes of all trees, ties to the older request: none too deep to be committed before
    `max_tokens`, and of each tree at most its request's `max_nodes`."""
    room = np.array([request.num_remaining for request in requests], np.int64)
    useful = np.flatnonzero(offered.nodes.depths < room[offered.owners])
    for tree, request in enumerate(requests):
        if request.max_nodes is not None:
            own = offered.owners[useful] == tree
            of_tree = useful[own]
            allowed = of_tree[best(offered.nodes.scores[of_tree], request.max_nodes)]
            useful = np.sort(np.concatenate((useful[~own], allowed)))
    return useful[best(offered.nodes.scores[useful], count)]
