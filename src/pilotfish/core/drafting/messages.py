"""The messages between a target and a draft (docs/draft-protocol.md), as MessagePack maps with a `type`.

    target                                    draft
      ├─ Hello ──────────────────────────────► │   once a second: the connection lives
      │ ◄──────────────────────────── Load ────┤   the answer to a first Hello, then a few times a second
      ├─ Open(tokens so far) ────────────────► │
      │ ◄──────── Tree(nodes added) ───────────┤   pushed as they are found, several before the next Commit
      ├─ Commit(base_len, tokens) ───────────► │   both sides re-root
      │ ◄──────── Tree(…) ─────────────────────┤
      ├─ Close ──────────────────────────────► │

A draft that wants features gets those of the tokens since right before each Commit, a prompt's in pieces. Further
messages go only to a side that names their *capability* in Hello or Load:

    feedback      TreeFeedback ───►        what became of nodes
    progress      ◄──────── Progress       how much of a long prompt is read
    pauses        Pause, Resume ◄─►        a session rests, and is kept
    errors        Error ◄─────────►        why a frame was of no use

Ids are positive. Every number has its limit here, so that a decoded message can be handled.
"""

import hashlib
import struct
import sys
from collections.abc import Sequence
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from pilotfish.core.cache.prefix_keys import KEY_BYTES
from pilotfish.core.drafting.vocabulary import MAX_ADDED
from pilotfish.core.features.features import FeatureType
from pilotfish.core.peers import fields
from pilotfish.core.peers.fields import Readable
from pilotfish.core.sampling.constraint import Constraint
from pilotfish.core.sampling.logit_rules import LogitRules
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import Request

PROTOCOL_VERSION = 1
#: Capabilities. A draft's alone: an Open may have a `prefix_key`; send features of every session.
PREFIX_KEYS, FEATURES = "prefix_keys", "features"
#: A draft's, of another tokenizer, which serves the target that hears of it through a map.
MAPPED = "mapped"
FEEDBACK = "feedback"  # a target's, which sends them, and a draft's, which wants them
PROGRESS = "progress"  # a target's, which wants it
#: Either's, which understands them.
PAUSES, ERRORS = "pauses", "errors"
TARGET_CAPABILITIES = FEEDBACK, PROGRESS, PAUSES, ERRORS
MAX_NODES = 1 << 14  # nodes of one Tree
MAX_FEATURE_BYTES = 1 << 20  # bytes of the rows of one FeatureRows
CONNECTION = 0  # the session that a Refuse names where it means the whole connection

#: Finite, as all of a Tree's and a Load's numbers.
Score: TypeAlias = Annotated[float, Meta(ge=-sys.float_info.max, le=0.0)]
FEATURE_DIGEST_BYTES = 8
FeatureDigest: TypeAlias = Annotated[bytes, Meta(min_length=FEATURE_DIGEST_BYTES, max_length=FEATURE_DIGEST_BYTES)]
PrefixKey: TypeAlias = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Capability: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64)]
Capabilities: TypeAlias = Annotated[list[Capability], Meta(max_length=64)]
NodeIds: TypeAlias = Annotated[list[fields.Id], Meta(max_length=MAX_NODES)]
TokenIds: TypeAlias = Annotated[list[fields.Index], Meta(max_length=1 << 14)]  # as many as a request may name


class FeatureOffer(Readable, frozen=True):
    digest: fields.Text  # of the projection that makes them
    width: Annotated[int, Meta(ge=1, le=MAX_FEATURE_BYTES // 4)]  # numbers of one
    dtype: fields.Text  # as which they are sent


class Hello(Readable, tag="hello", frozen=True, omit_defaults=True):
    """The answer is Load, or Refuse where versions, tokenizers or features do not fit."""

    version: fields.Index  # the newest that it speaks
    tokenizer: fields.Text  # digest of the base vocabulary
    vocab_size: fields.Length
    model: fields.Text
    added_tokens: Annotated[dict[fields.Index, fields.Text], Meta(max_length=MAX_ADDED)] = {}  # noqa: RUF012 beyond the base vocabulary, by id
    features: FeatureOffer | None = None
    oldest: fields.Index = 1  # version that it speaks
    capabilities: Capabilities = []  # noqa: RUF012
    echo: fields.Echo | None = None
    step_ms: fields.Milliseconds = 0.0  # from one of its steps to the next, lately; 0: it is not known
    depth: fields.Index = 0  # of the deepest node that it lately verified


class RequestSampling(Struct, frozen=True, omit_defaults=True):
    """The target's edits of logits before it draws, for a draft that mirrors it: fields of SamplingParams."""

    temperature: float = 1.0
    top_k: fields.Index = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Annotated[dict[fields.Index, float], Meta(max_length=1 << 14)] = {}
    allowed_token_ids: TokenIds | None = None
    bad_token_ids: TokenIds = []
    bad_sequences: Annotated[list[TokenIds], Meta(max_length=128)] = []
    stop_ids: TokenIds = []  # tokens that end the output; never given while there are fewer than min_tokens
    min_tokens: fields.Index = 0

    @classmethod
    def of(cls, request: Request) -> "RequestSampling":
        params, allowed = request.params, request.params.allowed_token_ids
        lists = {
            "logit_bias": dict(params.logit_bias),
            "allowed_token_ids": None if allowed is None else list(allowed),
            "bad_token_ids": list(params.bad_token_ids),
            "bad_sequences": [list(sequence) for sequence in request.bad_sequences],
            "stop_ids": sorted(request.stop_ids),
        }
        return cls(**{name: getattr(params, name) for name in _SHARED} | lists)

    def params(self) -> SamplingParams:
        """ParameterError for parameters that no target takes."""
        shared = {name: getattr(self, name) for name in _SHARED}
        return SamplingParams(**shared, max_tokens=max(self.min_tokens, 1))

    def rules(self, params: SamplingParams, tokens: Sequence[int], prompt_tokens: int) -> LogitRules | None:
        """Of a sequence whose first `prompt_tokens` are its prompt; None where logits stay as they are."""
        rules = LogitRules.of(params, tokens[:prompt_tokens], frozenset(self.stop_ids), self.bad_sequences)
        if rules is not None:
            rules.extend(tokens[prompt_tokens:])
        return rules


#: Fields that both have.
_SHARED = [name for name in RequestSampling.__struct_fields__ if name in SamplingParams.__dataclass_fields__]


class OfSession(Struct, frozen=True):
    session: fields.Id
    generation: fields.Id


class Open(OfSession, tag="open", frozen=True, omit_defaults=True):
    """A sequence to draft for. One of a higher generation replaces the session."""

    tokens: fields.Tokens  # committed so far, but for those that `prefix_key` names
    prompt_tokens: fields.Length  # the first of the sequence
    max_length: fields.Length  # tokens that the sequence can reach
    seed: Annotated[int, Meta(ge=0)]  # 64 bits
    sampling: RequestSampling
    wanted: fields.Index  # nodes below the root after which to stop growing
    salt: fields.SaltDigest | None = None  # sequences of different ones share nothing that is kept of them
    prefix_key: PrefixKey | None = None  # of the tokens before `tokens` (core/cache/prefix_keys.py)
    constraint: Constraint | None = None  # of the output

    @classmethod
    def of(cls, request: Request, number: int, generation: int, wanted: int, salt_key: bytes = b"") -> "Open":
        return cls(
            number,
            generation,
            list(request.tokens),
            request.num_prompt_tokens,
            request.max_length,
            request.seed,
            RequestSampling.of(request),
            wanted,
            fields.salt_digest(request.cache_salt, salt_key),
            constraint=request.params.structured_outputs,
        )


class Commit(OfSession, tag="commit", frozen=True):
    """The target's own tokens after `base_len` ones: re-root."""

    base_len: fields.Length  # tokens of the sequence before these
    tokens: Annotated[list[fields.Index], Meta(min_length=1, max_length=1 << 16)]
    wanted: fields.Index


class FeatureRows(OfSession, tag="features", frozen=True):
    """Features of consecutive tokens (core/features/features.py). A repeated one changes nothing."""

    number: fields.Id  # of this frame, among those to this draft, which tells the last one that came
    first: fields.Index  # position of the first token
    dtype: FeatureType
    rows: Annotated[bytes, Meta(min_length=1, max_length=MAX_FEATURE_BYTES)]
    digest: FeatureDigest  # of all that matters here
    scales: Annotated[bytes, Meta(max_length=MAX_FEATURE_BYTES)] = b""  # a float32 a row, where the type has them

    def digested(self) -> bytes:
        header = struct.pack("<3Q", self.session, self.generation, self.first) + self.dtype.encode()
        return hashlib.blake2b(header + self.scales + self.rows, digest_size=FEATURE_DIGEST_BYTES).digest()


class TreeFeedback(OfSession, tag="feedback", frozen=True, omit_defaults=True):
    """The fate of nodes in a step, before its Commit; none for a sequence's last step. A node that is gone after the
    Commit and was never named was not looked at."""

    base_len: fields.Length  # where the root was
    verified: NodeIds = []
    accepted: NodeIds = []  # of `verified`, from below the root down
    late: NodeIds = []  # came, since the last of these, when their parents were gone


class Pause(OfSession, tag="pause", frozen=True):
    """From a target: the sequence waits without KV; grow nothing. From a draft: no room; hold Commits until Resume."""


class Resume(OfSession, tag="resume", frozen=True):
    """A paused session goes on. So does a target's Commit; a draft's Resume gets one Commit of all tokens since."""


class Close(OfSession, tag="close", frozen=True):
    """The sequence has ended, or goes on elsewhere."""


class Tree(OfSession, tag="tree", frozen=True):
    """Nodes added since the last push, parents first; the four lists have one length. Ids rise within a generation;
    parent 0 is the root, the last of the `base_len` tokens that the draft knew of. A score is the log of the chance of
    the node's token, given that its parent's path is the target's."""

    sequence: fields.Index  # 0 for a generation's first push, then one more each
    base_len: fields.Length
    ids: Annotated[list[fields.Id], Meta(max_length=MAX_NODES)]
    parents: Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 53)]], Meta(max_length=MAX_NODES)]
    tokens: Annotated[list[fields.Index], Meta(max_length=MAX_NODES)]
    scores: Annotated[list[Score], Meta(max_length=MAX_NODES)]


class Resync(OfSession, Readable, tag="resync", frozen=True):
    """The draft cannot follow; the target opens the session anew, one generation up."""

    reason: fields.Text


class Skip(OfSession, tag="skip", frozen=True):
    first: fields.Index


class Progress(OfSession, tag="progress", frozen=True):
    """How many of a session's tokens are read. It also breaks the draft's silence."""

    read: fields.Index


class Refuse(Readable, tag="refuse", frozen=True):
    """The draft will not serve this session, or (`CONNECTION`) this target."""

    session: fields.AnyId
    generation: fields.AnyId
    reason: fields.Text


class Load(Readable, tag="load", frozen=True, omit_defaults=True):
    model: fields.Text
    sessions: fields.Index  # of all targets
    own_sessions: fields.Index  # of the target that this goes to
    own_rows: fields.Count  # rows grown for it so far
    free_slots: fields.Index
    step_ms: fields.Milliseconds  # of a level, lately
    queue_ms: fields.Milliseconds  # that committed tokens lately waited before a level took them
    own_cached: fields.Count = 0  # tokens of that target whose KV was there when they were opened
    revision: fields.Text = ""  # of the draft, as its operator names it
    own_features: fields.Count = 0  # the number of that target's last FeatureRows that came; 0: none did
    #: FeatureRows of that target that could not be used, by reason.
    own_feature_drops: Annotated[dict[fields.Text, fields.Count], Meta(max_length=16)] = {}  # noqa: RUF012
    target_digest: fields.Text = ""  # of the embedding of the target whose features it was given to expect
    version: fields.Index = PROTOCOL_VERSION  # of the target's range, which it has chosen
    capabilities: Capabilities = []  # noqa: RUF012
    echo: fields.Echo | None = None
    slots: fields.Count = 0  # tokens that its KV has room for; 0: it says nothing of that
    busy_ms: fields.Milliseconds = 0.0  # for so long it may say nothing


ToDraft: TypeAlias = Hello | Open | FeatureRows | TreeFeedback | Commit | Pause | Resume | fields.Error | Close
ToTarget: TypeAlias = Tree | Progress | Pause | Resume | Resync | Skip | Refuse | fields.Error | Load
