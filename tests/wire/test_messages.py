"""Messages survive the wire; whatever else comes is a WireError and nothing else."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pilotfish.core.cache.prefix_keys import KEY_BYTES
from pilotfish.core.drafting import messages
from pilotfish.core.features.features import FEATURE_TYPES
from pilotfish.core.peers.fields import MAX_FRAME, SALT_BYTES, Echo, Error
from pilotfish.errors import WireError
from pilotfish.wire.channel import decode_from_prefill, decode_to_draft, decode_to_prefill, decode_to_target, encode

indices = st.integers(0, (1 << 31) - 1)
ids = st.integers(1, (1 << 53) - 1)
any_ids = st.just(0) | ids
lengths = st.integers(1, (1 << 31) - 1)
texts = st.text(max_size=20)
tokens = st.lists(indices, max_size=20)
numbers = st.floats(allow_nan=False)
milliseconds = st.floats(0.0, 1e9, exclude_max=True)

salts = st.none() | st.binary(min_size=SALT_BYTES, max_size=SALT_BYTES)
keys = st.none() | st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
counts = st.integers(0, 1 << 40)
sampling = st.builds(
    messages.RequestSampling,
    temperature=numbers,
    top_k=indices,
    logit_bias=st.dictionaries(indices, numbers, max_size=3),
    allowed_token_ids=st.none() | tokens,
    bad_sequences=st.lists(tokens, max_size=3),
    stop_ids=tokens,
)
offers = st.builds(messages.FeatureOffer, texts, st.integers(1, 1 << 18), texts)
kinds, digests = st.sampled_from(FEATURE_TYPES), st.binary(min_size=8, max_size=8)
capabilities = st.lists(st.text(min_size=1, max_size=20), max_size=5)
micros = st.integers(0, (1 << 53) - 1)
echoes = st.none() | st.builds(Echo, micros, st.none() | micros, micros)
errors = st.builds(Error, texts, texts, texts, st.integers(1, 1 << 40), any_ids, any_ids)
clocked: dict[str, st.SearchStrategy[Any]] = {"capabilities": capabilities, "echo": echoes}
asked = {"features": st.none() | offers, "oldest": indices, "step_ms": milliseconds, "depth": indices}
loads = (texts, indices, indices, counts, indices, milliseconds, milliseconds, counts, texts)
seeds = st.integers(0, (1 << 64) - 1)
to_draft: st.SearchStrategy[messages.ToDraft] = st.one_of(
    st.builds(messages.Hello, *(indices, texts, lengths, texts), **clocked, **asked),
    st.builds(messages.TreeFeedback, ids, ids, lengths, st.lists(ids), st.lists(ids), st.lists(ids)),
    st.builds(messages.Pause, ids, ids),
    st.builds(messages.Resume, ids, ids),
    errors,
    st.builds(messages.FeatureRows, ids, ids, ids, indices, kinds, st.binary(min_size=1), digests, st.binary()),
    st.builds(messages.Open, ids, ids, tokens, lengths, lengths, seeds, sampling, indices, salts, keys),
    st.builds(messages.Commit, ids, ids, lengths, st.lists(indices, min_size=1, max_size=20), indices),
    st.builds(messages.Close, ids, ids),
)


@st.composite
def trees(draw: st.DrawFn) -> messages.Tree:
    """Of up to ten nodes; their ids and parents need not make sense to be carried."""
    nodes = draw(st.integers(0, 10))

    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=nodes, max_size=nodes))

    parents, scores = st.integers(0, (1 << 53) - 1), st.floats(max_value=0.0, allow_nan=False, allow_infinity=False)
    header = draw(ids), draw(ids), draw(indices), draw(lengths)
    return messages.Tree(*header, column(ids), column(parents), column(indices), column(scores))


to_target: st.SearchStrategy[messages.ToTarget] = st.one_of(
    trees(),
    st.builds(messages.Resync, ids, ids, texts),
    st.builds(messages.Skip, ids, ids, indices),
    st.builds(messages.Refuse, any_ids, any_ids, texts),
    st.builds(messages.Load, *loads, version=indices, slots=counts, busy_ms=milliseconds, **clocked),
    st.builds(messages.Progress, ids, ids, indices),
    st.builds(messages.Pause, ids, ids),
    st.builds(messages.Resume, ids, ids),
    errors,
)

TREE = messages.Tree(1, 1, 0, 5, [1, 2], [0, 1], [7, 8], [-0.5, -1.5])
LOAD = messages.Load("draft", 3, 1, 40, 100, 1.5, 0.25)
FEATURES = messages.FeatureRows(1, 1, 1, 0, "float32", bytes(8), bytes(8))
OPEN = messages.Open(1, 1, [1, 2], 1, 10, (1 << 64) - 1, messages.RequestSampling(), 16)


@given(message=to_draft)
@example(message=OPEN)
@example(message=FEATURES)
def test_to_draft_and_back(message: messages.ToDraft) -> None:
    assert decode_to_draft(encode(message)) == message


@given(message=to_target)
@example(message=TREE)
def test_to_target_and_back(message: messages.ToTarget) -> None:
    assert decode_to_target(encode(message)) == message


def decode_any(frame: bytes) -> None:
    """Whatever it is: a message, or a WireError of one line."""
    for decode in (decode_to_draft, decode_to_target, decode_to_prefill, decode_from_prefill):
        try:
            message = decode(frame)
        except WireError as error:
            assert "\n" not in str(error)
        else:
            assert encode(decode(encode(message))) == encode(message)  # by bytes: a number may be none


@given(frame=st.binary(max_size=200))
def test_any_bytes(frame: bytes) -> None:
    decode_any(frame)


@given(message=to_draft | to_target, data=st.data())
def test_flipped_and_cut_bytes(message: messages.ToDraft | messages.ToTarget, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    decode_any(bytes(frame))
    decode_any(encode(message)[: data.draw(st.integers(0, len(frame) - 1))])


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x91" * 100_000,  # lists in lists
        b"\x81\xa4type" * 100_000,
        b"\xdd\xff\xff\xff\xff",  # a list of 2**32 - 1 elements, none of which are there
        b"\xc6\xff\xff\xff\xff",
        b"\x81\xa4type\xa4\xff\xff\xff\xff",  # no UTF-8
        msgspec.msgpack.encode({"type": "hello"}),
        msgspec.msgpack.encode({"type": "farewell"}),
        msgspec.msgpack.encode([1, 2]),
        encode(TREE) + b"\0",
        bytes(MAX_FRAME + 1),
    ],
)
def test_what_is_no_message(frame: bytes) -> None:
    for decode in (decode_to_draft, decode_to_target):
        with pytest.raises(WireError, match=r"^(frame|type): ") as caught:
            decode(frame)
        assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


def test_messages_of_the_other_direction_are_none() -> None:
    with pytest.raises(WireError, match="tree"):
        decode_to_draft(encode(TREE))
    with pytest.raises(WireError, match="open"):
        decode_to_target(encode(OPEN))


def changed(message: messages.ToDraft | messages.ToTarget, **fields: object) -> bytes:
    """The frame of a message with fields that may be out of range."""
    return msgspec.msgpack.encode({**msgspec.to_builtins(message, builtin_types=(bytes,)), **fields})


NO_TIMES = [math.nan, math.inf, -math.inf, -1.0]
#: Messages, and values of their fields that are out of range; the error names the field.
LIMITS: list[tuple[messages.ToDraft | messages.ToTarget, dict[str, list[Any]]]] = [
    (
        TREE,
        {
            "session": [0, 1 << 53],
            "generation": [0],
            "sequence": [-1],
            "base_len": [0],
            "ids": [[1, 0], [1]],
            "parents": [[0, -1], [0, 1, 2]],
            "tokens": [[7, 1 << 31], [7, 8.5], [7, True], [], [1] * (messages.MAX_NODES + 1)],
            "scores": [*([-1.0, bad] for bad in (0.5, math.nan, -math.inf, math.inf, None)), [-1.0]],
        },
    ),
    (
        FEATURES,
        {
            "number": [0],
            "first": [-1, 1 << 31],
            "dtype": ["float16"],
            "rows": [b"", bytes(messages.MAX_FEATURE_BYTES + 1), [0] * 8],
            "digest": [bytes(7)],
            "scales": [bytes(messages.MAX_FEATURE_BYTES + 1)],
        },
    ),
    (
        OPEN,
        {
            "tokens": [[-1], "12"],
            "prompt_tokens": [0],
            "max_length": [1 << 31],
            "seed": [-1, 2.0**64],
            "wanted": [-1],
            "sampling": [None, {"temperature": "hot"}, {"top_k": -1}, {"logit_bias": {"a": 1.0}}],
            "salt": [b"s" * (SALT_BYTES - 1), b"s" * (SALT_BYTES + 1), "s" * SALT_BYTES],
            "prefix_key": [b"", b"k" * (KEY_BYTES + 1), [0] * KEY_BYTES],
        },
    ),
    (LOAD, {"step_ms": NO_TIMES, "queue_ms": NO_TIMES}),
    (messages.Hello(1, "digest", 10, "model"), {"model": ["x" * 1025], "vocab_size": [0]}),
    (messages.Commit(1, 1, 5, [1], 16), {"tokens": [[], [1] * ((1 << 16) + 1)]}),
]


@pytest.mark.parametrize(("message", "bad"), LIMITS, ids=[type(message).__name__ for message, _ in LIMITS])
def test_fields_out_of_limits(message: messages.ToDraft | messages.ToTarget, bad: dict[str, list[Any]]) -> None:
    decode = decode_to_target if isinstance(message, messages.Tree | messages.Load) else decode_to_draft
    assert decode(changed(message)) == message
    for field, values in bad.items():
        for value in values:
            with pytest.raises(WireError, match=field):
                decode(changed(message, **{field: value}))


def test_limits_of_bytes_and_of_nodes_are_reached() -> None:
    assert decode_to_draft(changed(FEATURES, rows=bytes(messages.MAX_FEATURE_BYTES)))
    many = {name: [1] * (messages.MAX_NODES + 1) for name in ("ids", "parents", "tokens")}
    with pytest.raises(WireError):
        decode_to_target(changed(TREE, **many, scores=[-1.0] * (messages.MAX_NODES + 1)))


def test_unknown_fields_are_passed_over() -> None:
    assert decode_to_draft(changed(OPEN, added_later=[1])) == OPEN


def test_a_full_tree_fits_into_a_frame() -> None:
    many, large = [(1 << 53) - 1] * messages.MAX_NODES, [(1 << 31) - 1] * messages.MAX_NODES
    assert len(encode(messages.Tree(1, 1, 0, 5, many, many, large, [-math.pi] * messages.MAX_NODES))) < MAX_FRAME
