"""An alias that clients ask for: the small model answers if it is sure, else the large one. The small model's updates
are held back until its first tokens are judged. One model gives the whole answer, as it would alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import model_name
from pilotfish.config.server import ServerConfig
from pilotfish.core.drafting.vocabulary import why_ids_differ
from pilotfish.engine.processes.host_memory import shared
from pilotfish.engine.targets.async_engine import AsyncEngine
from pilotfish.engine.targets.replica import num_own
from pilotfish.engine.targets.stream import Submits, Update, Updates, merged
from pilotfish.errors import EngineError, InputError, ModelError, ParameterError
from pilotfish.files import file_text
from pilotfish.operate.cascade_policy import CascadeAnswer, CascadePolicy, Confidence, Escalation, read_cascade
from pilotfish.server.observe.request_records import checked_tag
from pilotfish.wire.serving import EngineRequest

SMALL = "small"  # names of the small model's processes
#: Seconds that a request whose small target is lost waits for another one, at most: the large model is there.
RESUME = 2.0


@dataclass(frozen=True)
class CascadeSetup:
    policy: CascadePolicy
    large: EngineConfig  # leaves room for the small model where both are started here
    small: EngineConfig
    server: ServerConfig  # where the small one's targets are


def cascade_setup(engine: EngineConfig, server: ServerConfig) -> CascadeSetup | None:
    """None for a server without one. ParameterError for a file that cannot be used."""
    if server.cascade is None:
        return None
    policy = read_cascade(file_text("cascade", server.cascade, "TOML"))
    for tag in policy.tags:
        checked_tag(tag, "cascade.tags")
    if policy.name in (served := server.served_model_name or (model_name(engine.target),)):
        raise ParameterError("cascade.name", policy.name, f"a name other than {' and '.join(served)}")
    small, own = small_config(policy, engine), server_of_small(policy, server)
    targets = num_own(engine, server) if num_own(small, own) else 0
    both = shared(engine, targets, small)
    return CascadeSetup(policy, both.large, both.small, own)


def small_config(policy: CascadePolicy, engine: EngineConfig) -> EngineConfig:
    try:
        return engine.of_small(Path(policy.small.target), **policy.small.engine_fields)
    except ParameterError as error:
        raise ParameterError.described(f"cascade.small.{error.field}", f"cascade.small.{error}") from error


def server_of_small(policy: CascadePolicy, server: ServerConfig) -> ServerConfig:
    pools, keys = tuple(policy.small.pools), tuple(policy.small.keys)
    if len(set(pools)) < len(pools):
        raise ParameterError("cascade.small.pools", ",".join(pools), "each pool once")
    patience = min(server.resume_timeout, RESUME)
    return replace(
        server, replicas=None, target_pool=pools, target_pool_key=keys, resume_timeout=patience, cascade=None
    )


class Cascade:
    def __init__(self, setup: CascadeSetup, large: AsyncEngine, environment: Mapping[str, str]) -> None:
        self.policy, self.name = setup.policy, setup.policy.name
        self.small = AsyncEngine(setup.small, setup.server, environment, own_name=SMALL)
        self.large = large

    @property
    def facts(self) -> str:
        policy, own = self.policy, self.small.config
        return f"{self.small.name}\n{own.dtype}\n{own.quantization}\n{policy.tokens}\n{policy.threshold}"

    async def start(self) -> None:
        """ModelError for a small model that cannot take the large one's place."""
        await self.small.start()
        if (reason := why_ids_differ(self.large.tokenizer, self.small.tokenizer)) is not None:
            raise ModelError(f"cascade.small.target: {self.small.name} reads prompts otherwise: {reason}")

    def begin(self, tag: str | None, prompt_tokens: int) -> CascadeAnswer:
        return CascadeAnswer(escalated=self.policy.rule(tag, prompt_tokens))

    def of(self, answer: CascadeAnswer, large_name: str, *, exact: bool) -> Submits:
        return partial(CascadeStream, self, answer, large_name, exact)


class CascadeStream:
    """Raises the answering model's errors; after an early error of the small one the large one answers."""

    def __init__(
        self, cascade: Cascade, answer: CascadeAnswer, large_name: str, exact: bool, asked: Sequence[EngineRequest]
    ) -> None:
        """Fills in `answer`."""
        policy = cascade.policy
        self._cascade, self._answer, self._large_name, self._exact = cascade, answer, large_name, exact
        self._asked = asked
        self._confidence = Confidence(len(asked) * asked[0].params.n, policy.tokens, policy.threshold)
        self._held: dict[int, Update] = {}  # by output
        self._stream = self._begun()

    def abort(self) -> None:
        self._stream.abort()

    def revise(self, max_nodes: int | None) -> None:
        self._asked = [msgspec.structs.replace(request, max_nodes=max_nodes) for request in self._asked]
        if self._answer.escalated is not None:
            self._stream.revise(max_nodes)

    async def __anext__(self) -> Update:
        if self._answer.answered_by is None:
            await self._decide()
        if self._held:
            return self._shown(self._held.pop(next(iter(self._held))))
        return self._shown(await anext(self._stream))

    async def _decide(self) -> None:
        try:
            while (verdict := self._confidence.verdict) is None:
                self._hold(await anext(self._stream))
        except (EngineError, InputError):
            self._escalate("unavailable")
            return
        self._answer.confidence = self._confidence.value
        if verdict == "escalate":
            self._escalate("confidence")
        else:
            self._answer.answered_by = self._cascade.small.name

    def _hold(self, update: Update) -> None:
        before, delta = self._held.get(update.index), update.delta
        self._held[update.index] = update if before is None else merged(before, update)
        self._confidence.add(update.index, [one.logprob for one in delta.logprobs], ended=delta.finish is not None)

    def _shown(self, update: Update) -> Update:
        if self._asked[0].params.logprobs is not None or not update.delta.logprobs:
            return update
        return replace(update, delta=msgspec.structs.replace(update.delta, logprobs=[]))

    def _begun(self) -> Updates:
        if self._answer.escalated is not None:
            return self._of_large(self._answer.escalated)
        if (asked := self._for_small()) is None:
            return self._of_large("length")
        try:
            return self._cascade.small.submit(asked)
        except EngineError:
            return self._of_large("unavailable")

    def _for_small(self) -> list[EngineRequest] | None:
        """None where the small model has no room for the request."""
        params, identity = self._asked[0].params, self._cascade.small.health.identity
        longest = max(len(request.tokens) for request in self._asked)
        room = params.max_tokens if identity is None else identity.longest - longest
        if room < (params.max_tokens if self._exact else max(params.min_tokens, 1)):
            return None
        given = replace(params, max_tokens=min(params.max_tokens, room), logprobs=params.logprobs or 0)
        return [msgspec.structs.replace(one, params=given, max_nodes=None, draft="") for one in self._asked]

    def _escalate(self, reason: Escalation) -> None:
        self._stream.abort()
        self._held.clear()
        self._stream = self._of_large(reason)

    def _of_large(self, reason: Escalation) -> Updates:
        stream = self._cascade.large.submit(self._asked)
        self._answer.escalated, self._answer.answered_by = reason, self._large_name
        return stream
