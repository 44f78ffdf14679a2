"""Messages of servers and target workers: MessagePack maps with a `type`. Targets listen, any number of servers dial.

    server                                    target worker
      ├─ Attend ─────────────────────────────► │   twice a second, as long as the server lives
      │ ◄──────────────────────────── Status ──┤   the answer to the first Attend, once there is one; later each second,
      │                                        │   and on change
      │ ◄────────────────────────────── Held ──┤   to servers that ask for it: which prefixes it has KV of
      ├─ Submit(request) ────────────────────► │
      │ ◄─────── StepProgress(step, deltas) ───┤   after each step: what it added to each output of this server
      ├─ Abort ──────────────────────────────► │   ends the request early
      ├─ Revise ─────────────────────────────► │   other guesses for it from now on
      │ ◄────────────────────────────── Beat ──┤   twice a second, also during a step

A Failure ends a request that cannot be served, or requests whose step broke. Declined says why a server is not served.
A target's incarnation is its process; request ids mean nothing to the next one.

No loss goes unnoticed. Attend counts the Submits, Aborts and Revises sent: a target that received another number ends
all requests of that server, and leaves a gap in its numbering. StepProgress and Failure are numbered, and Beat has the
next number: a gap ends all requests of the server at this target."""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from pilotfish.core.cache.tiers import TierCounts, TierUse
from pilotfish.core.drafting.target_machine import Arrival
from pilotfish.core.peers.fields import Count, Id, Index, Length, Readable, Text, Tokens
from pilotfish.core.prefilling.handover import HandOverReport, HandOverTotals
from pilotfish.core.routing.held_prefixes import Held
from pilotfish.core.routing.router import ReplicaLoad
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import TokenLogprobs
from pilotfish.core.scheduling.request import FinishReason

#: Raised when these messages change.
SERVING_VERSION = 3
#: Seconds between two Attends, and of silence after which a server's requests end.
ATTEND, SERVER_SILENCE = 0.5, 10.0
#: Messages that may wait on either side: more than come before a server counts as silent, or a target is killed.
WAITING = 1 << 16
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0)]


class Attend(Struct, tag="attend", frozen=True):
    """Shows that a server lives: a target ends the requests of a silent one."""

    version: Count  # SERVING_VERSION
    incarnation: Text  # of the target whose messages it counts; "" before it knows one
    sent: Count  # Submits, Aborts and Revises, to this incarnation
    sequence: Count  # of the StepProgress or Failure that it expects next
    held: bool = False  # whether it wants to know the prefixes that the target has KV of
    heard: Count = 0  # the sequence of the next Held that it expects; 0: all is to be told to it


class EngineRequest(Struct, frozen=True):
    """`params.n` outputs of one prompt."""

    tokens: Tokens
    params: SamplingParams
    cache_salt: str | None = None  # drafts and KV are shared among requests of one salt; None: with none
    max_nodes: Index | None = None  # of a tree; 0: no speculation, None: as the target is configured
    session: str | None = None  # its requests go to one target if nothing speaks against it
    draft: Text = ""  # the revision of the drafts in pools that may guess for it; "": any


class PartialOutput(Struct, frozen=True):
    """The server's part of an output that another target had begun."""

    index: Index  # in its request
    tokens: list[int] = []
    scored: Index = 0  # tokens of the prompt whose log-probabilities came, where asked for


class Submit(Struct, tag="submit", frozen=True):
    """A resumed request has a seed and goes on exactly: target, prompt, parameters and seed determine its tokens."""

    id: Id  # the server's
    incarnation: Text  # of the target that it is meant for; any other drops it
    request: EngineRequest
    resumed: list[PartialOutput] | None = None  # the outputs that have not ended; None: it is new


class Abort(Struct, tag="abort", frozen=True):
    id: Id
    incarnation: Text  # of the target that has it


class Revise(Struct, tag="revise", frozen=True):
    """Other guesses from now on: no output changes."""

    id: Id
    incarnation: Text  # of the target that has it
    max_nodes: Index | None  # as in EngineRequest


class Identity(Readable, frozen=True):
    model: Text
    mode: Text  # off, sync or async
    dtype: Text
    context: Length  # tokens of a sequence
    vocab_size: Length
    kv_slots: Length
    longest: Length  # tokens of a sequence that the slots can serve, `context` at most
    max_requests: Length  # sequences that run at a time
    max_nodes: Index  # of a sequence's tree; 0 in mode off
    quantization: Text = "none"  # of the weights
    kv_dtype: Text = "auto"  # as it was asked for
    fingerprint: Text = ""  # of all that its tokens follow from: equal ones may resume each other's requests
    tokenizer: Text = ""  # its digest
    config: Text = ""  # digest of the model's config.json
    version: Text = ""  # of Pilotfish
    ranks: Count = 1  # processes that hold its weights together
    exact: bool = True  # whether a row's bits are the same in any company, so that speculation changes no output


class Status(Struct, tag="status", frozen=True):
    """`preemptions` and the tiers' counts are since the target's start; the rest is current, of all servers."""

    identity: Identity
    running: Count
    waiting: Count
    free_slots: Count
    preemptions: Count
    incarnation: Text
    pending_tokens: Count = 0  # committed tokens without KV, of running and waiting requests
    pools: "list[PoolLoad]" = []
    prefill_pools: "list[PrefillPoolLoad]" = []
    tiers: list[TierUse] = []  # the device first
    tier_counts: TierCounts = msgspec.field(default_factory=TierCounts)
    shadows: "list[ShadowReport]" = []

    @property
    def load(self) -> ReplicaLoad:
        live, room = self.identity.kv_slots - self.free_slots, self.identity.max_requests - self.running
        return ReplicaLoad(self.pending_tokens, live, self.waiting, room)


class Declined(Readable, tag="declined", frozen=True):
    """Why a target does not serve this server, or will not from now on."""

    reason: Text


class PoolLoad(Readable, frozen=True):
    """A draft pool, as of its last message to the target."""

    name: Text
    ready: bool
    sessions: Count
    free_slots: Count
    step_ms: Seconds
    queue_ms: Seconds
    drops: dict[str, Count] = msgspec.field(default_factory=dict)  # since the target started, by reason
    cached: Count = 0  # tokens of the target's sequences whose KV it had, since it was first greeted
    revision: Text = ""  # of its draft
    own: bool = False  # a worker of the target itself; others may be known to several targets
    feature_bytes: Count = 0  # sent to it since the target started
    feature_drops: dict[str, Count] = msgspec.field(default_factory=dict)  # of their frames there, by reason
    model: Text = ""  # the draft's name
    capabilities: list[Text] = msgspec.field(default_factory=list)  # as it names them
    own_sessions: Count = 0  # of this target
    slots: Count = 0  # tokens that its KV has room for; 0: it does not say
    busy: bool = False  # it said that nothing is to be expected of it yet
    refusal: Text | None = None  # why it does not serve this target
    delay_ms: Seconds | None = None  # of a message one way; None until one came back
    trees: Count = 0  # that came since the target started
    nodes: Count = 0  # in them
    verified: Count = 0  # of them
    accepted: Count = 0


class ShadowReport(Readable, frozen=True):
    """A draft pool that is scored and not used (shadow.py). Counts since the target's start; rates over about two
    thousand steps, in tokens a second of a sequence that decodes, 0 until known."""

    name: Text
    ready: bool  # it answers, and is scored
    revision: Text
    requests: Count  # begun
    steps: Count
    trees: Count  # steps with anything to verify
    late: Count  # steps for which it had no node below the root
    accepted: Count  # nodes that would have been
    hits: Count
    tried_by_depth: list[Count]  # trees so deep whose path was accepted up to the depth before
    accepted_by_depth: list[Count]  # of them, those that were accepted at this depth
    tokens_per_step: Seconds  # if it were live
    tokens_per_second: Seconds  # likewise, at the times of live steps
    live_tokens_per_second: Seconds
    error: float  # live steps' modelled rate over the measured one, less 1
    cpu_seconds: Seconds  # of the target's process, spent on it


class PrefillPoolLoad(Readable, frozen=True):
    """A prefill pool, as of its last message to the target; counts are since that started."""

    name: Text
    ready: bool
    transport: Text  # by which segments are read; "" while it is not ready
    queued_tokens: Count
    free_slots: Count
    token_ms: Seconds
    leases: Count
    totals: dict[str, HandOverTotals] = msgspec.field(default_factory=dict)  # by transport
    refused: dict[str, Count] = msgspec.field(default_factory=dict)  # frames that were not used, by reason
    own: bool = False


class StepReport(Struct, frozen=True):
    """In seconds: `at` and `verified` on the target's clock; the rest are durations that make up the whole step."""

    at: float  # when it began
    draft: Seconds  # exposed wait for drafts
    forward: Seconds
    verify: Seconds  # sampling
    coordination: Seconds  # all else
    sequences: Count  # that sampled
    rows: Count
    nodes: Count  # of them, of trees
    accepted: Count  # nodes
    committed: Count  # tokens
    hits: Count  # sequences whose bonus token was in a tree that lives on
    verified: float  # when its tokens were known, on the target's clock
    pushes: list[Arrival] = []  # from draft pools, since the step before


class Verified(Struct, frozen=True, omit_defaults=True):
    """An output's part of a step: `nodes` of its tree were verified; `accepted` of its `tokens` came from them."""

    at: float  # StepReport.at
    tokens: Count
    nodes: Count
    accepted: Count
    origins: list[str] = []  # [accepted] who guessed them
    resumed: bool = False  # the first one at a target that goes on with an output: the ones before have another clock
    depth: Count = 0  # of the deepest node
    late: bool = False  # a tree was asked for, and the drafter had none
    sharing: Count = 0  # the sequences among which the step shared out guesses; 0: none were asked for


class Finish(Struct, frozen=True):
    reason: FinishReason
    stop: str | int | None  # the stop string or token that ended it; None for the end of sequence


class Delta(Struct, frozen=True):
    """Added to one output of a request."""

    id: Id
    index: Index  # of the output
    tokens: list[int]
    text: str  # that no stop string can swallow any more
    ends: list[int]  # [tokens] characters of the whole output's text after each token
    verified: list[Verified]
    logprobs: list[TokenLogprobs] = []  # of `tokens`, where asked for
    prompt_logprobs: list[TokenLogprobs] = []  # of the prompt tokens but the first, where asked for
    seed: Annotated[int, Meta(ge=0)] | None = None  # with the first tokens of an output
    queued: Seconds | None = None  # with the first one: from submission to the first row in a step
    cached: dict[str, Index] = {}  # with the first one: tokens of the prompt whose KV was there, by tier
    pool: Text = ""  # with the first one: the draft pool that guesses for it then; "": none
    handovers: list[HandOverReport] = []  # that have ended since the delta before
    finish: Finish | None = None  # with the last one


class StepProgress(Struct, tag="progress", frozen=True):
    """Of this server's requests."""

    sequence: Count  # rises by one, together with those of Failures
    step: StepReport
    deltas: list[Delta]


class Failure(Readable, tag="failure", frozen=True):
    """Ends these requests."""

    sequence: Count
    ids: list[Id]
    reason: Text
    refused: bool = False  # they cannot be served; otherwise their step broke
    field: Text | None = None  # the parameter to blame


class Beat(Struct, tag="beat", frozen=True):
    pid: Count
    step: Seconds  # that the step at hand has lasted; 0 between steps
    incarnation: Text
    sequence: Count  # of the StepProgress or Failure that comes next


ToTarget: TypeAlias = Attend | Submit | Abort | Revise
ToServer: TypeAlias = Status | Held | StepProgress | Failure | Declined | Beat

#: For `wire.channel.decoded`.
TARGET_DECODER: msgspec.msgpack.Decoder[ToTarget] = msgspec.msgpack.Decoder(ToTarget)
SERVER_DECODER: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
