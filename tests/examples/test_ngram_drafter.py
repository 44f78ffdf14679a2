"""The example drafter, which tests/wire/conformance holds against the protocol; the frames in its page are real."""

import hashlib
import json
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

import msgspec
import ngram_drafter as script
import numpy as np
import pytest
from pages import codes, table
from support import tree_of

from pilotfish.core.cache.prefix_keys import prefix_keys, text_root
from pilotfish.core.drafting import messages
from pilotfish.core.features.feature_frames import FEATURE_DROPS
from pilotfish.core.features.features import FEATURE_TYPES, coded
from pilotfish.core.peers.fields import Echo
from pilotfish.core.peers.peer import CODES
from pilotfish.core.sampling.noise import gumbel_of
from pilotfish.core.trees.tree_copy import TreeCopy
from pilotfish.wire.channel import decode_to_draft, decode_to_target, encode
from pilotfish.wire.sockets import DialingChannel

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "draft-protocol.md"
VOCAB = 4096
HELLO = messages.Hello(messages.PROTOCOL_VERSION, "digest", VOCAB, "a target")
#: A text of which each token says what comes next.
LOOP = list(range(100, 110))
PATIENCE = 20.0  # seconds
WANTED = 40  # nodes below a root, more than there will be


class Target:
    """Of a drafter in this process, whose answers are kept in place of being sent."""

    def __init__(self) -> None:
        self.sent: list[messages.ToTarget] = []
        self.drafter = script.Drafter(None)
        self.drafter.send = self._keep
        self.send(HELLO)

    def send(self, message: messages.ToDraft) -> None:
        self.drafter.receive(b"route", b"one", encode(message))

    def _keep(self, _: bytes, kind: str, **fields: Any) -> None:
        self.sent.append(decode_to_target(msgspec.msgpack.encode({"type": kind, **fields})))

    def tree(self, copy: TreeCopy, base_len: int) -> None:
        """Attaches the next one."""
        tree = next(message for message in self.sent if isinstance(message, messages.Tree))
        self.sent.remove(tree)
        assert tree.base_len == base_len
        copy.attach(tree)


@pytest.fixture
def target() -> Target:
    return Target()


def opened(session: int, tokens: list[int], **fields: Any) -> messages.Open:
    values: dict[str, Any] = {
        "generation": 1,
        "prompt_tokens": len(tokens),
        "max_length": len(tokens) + 100,
        "seed": 7,
        "sampling": messages.RequestSampling(temperature=0.0),
        "wanted": WANTED,
    }
    return messages.Open(session=session, tokens=tokens, **{**values, **fields})


def test_its_process_understands_the_targets_own_channel_and_ends_when_told(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path / 'socket'}"
    command = [sys.executable, script.__file__, "--listen", endpoint]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    channel, received = DialingChannel([endpoint], b"its incarnation"), []
    try:
        deadline = time.monotonic() + PATIENCE
        while not received and time.monotonic() < deadline:
            channel.send(b"0", encode(HELLO))
            received = channel.receive(0.05)
        assert isinstance(decode_to_target(received[0].frame), messages.Load)
    finally:
        channel.close()
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=PATIENCE)
    assert (process.returncode, said) == (0, "")


# -- a session


def test_it_guesses_what_will_be_sampled(target: Target) -> None:
    seed = 12345
    for token in (0, 5, 4095):
        assert script.noise(seed, 2**33 + 9, token) == gumbel_of(seed, 2**33 + 9, token)
    text = [7, 201, 7, 202, 7, 203, 7, 204] * 20 + [7]  # four tokens follow 7 equally often
    text[-1:] = [8, 7]  # after a context that was never seen
    copy = TreeCopy(len(text), VOCAB, 1000)
    target.send(opened(1, text, seed=seed, sampling=messages.RequestSampling(temperature=0.8)))
    target.tree(copy, len(text))
    first = tree_of(copy).parents == -1
    best = tree_of(copy).tokens[first][tree_of(copy).scores[first].argmax()]
    assert best == max((201, 202, 203, 204), key=lambda token: gumbel_of(seed, len(text), token))


def test_nothing_grows_beyond_what_is_useful(target: Target) -> None:
    text = LOOP * 4
    copy = TreeCopy(len(text), VOCAB, 1000)
    target.send(opened(1, text, max_length=len(text) + 3))
    target.tree(copy, len(text))
    assert tree_of(copy).depths.max() == 2


# -- bounds


def test_what_is_held_is_bounded(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = target.drafter
    monkeypatch.setattr(script, "MAX_SESSIONS", 3)
    for session in range(1, 6):
        target.send(opened(session, LOOP))
    assert list(drafter.targets[b"one"].sessions) == [3, 4, 5]
    monkeypatch.setattr(script, "MAX_CONTEXTS", 5)
    target.send(messages.Commit(3, 1, len(LOOP), [100], WANTED))
    assert len(drafter.followers) == script.CONTEXT and list(drafter.targets[b"one"].sessions) == [4, 5, 3]
    monkeypatch.setattr(script, "SILENCE", 0.0)
    drafter.report()
    assert not drafter.targets and drafter.num_sessions() == 0


# -- the page


def test_the_pages_example_goes_as_the_page_says() -> None:
    frames = []
    for block in re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL):
        fields = json.loads(block)
        frames.append(msgspec.msgpack.encode(fields))
        decode = decode_to_draft if fields["type"] == "commit" else decode_to_target
        assert encode(decode(frames[-1])) == frames[-1]
    first, committed, late, last = frames
    copy = TreeCopy(4, VOCAB, 1000)
    for frame, count, lost in ((first, 4, 0), (late, 1, 1), (last, 3, 1)):
        if frame is late:
            commit = decode_to_draft(committed)
            assert isinstance(commit, messages.Commit) and commit.base_len == 4
            assert copy.commit(commit.tokens) and len(tree_of(copy)) == 0
        tree = decode_to_target(frame)
        assert isinstance(tree, messages.Tree)
        copy.attach(tree)
        assert len(tree_of(copy)) == count
        assert (copy.late, copy.dropped, copy.repeated) == (lost, 0, 0)
    tree = tree_of(copy)
    assert tree.parents.tolist() == [-1, 0, -1] and tree.tokens.tolist() == [90, 33, 91]


def test_the_pages_keys_are_those_of_its_tokens() -> None:
    rows = re.findall(r"^\| .* \| `([0-9a-f]{64})` \| `([0-9a-f]{64})` \|$", PAGE.read_text(), re.MULTILINE)
    for salt, keys in zip((None, bytes(range(16))), rows, strict=True):
        assert [key.hex() for key in prefix_keys(text_root(salt), range(100, 228))] == list(keys)
        tenant = b"" if salt is None else b"salt" + salt.hex().encode()
        root = hashlib.sha256(hashlib.sha256(b"").digest() + tenant).digest()
        assert hashlib.sha256(root + struct.pack("<64I", *range(100, 164))).hexdigest() == keys[0]


def test_the_pages_features_are_those_of_the_code() -> None:
    rows = table("draft-protocol.md", "Features")
    values = np.array([[1.0, -2.5, 0.3, 4.0]], np.float32)
    answers = [row for row in rows if len(row) == 4 and "`digest`" not in row]
    shown = {codes(row[0])[0]: [codes(cell) for cell in row[1:]] for row in answers}
    assert shown.keys() == set(FEATURE_TYPES)
    for kind in FEATURE_TYPES:
        sent = coded(values, kind)
        found = [bytes.fromhex("".join(cell)) for cell in shown[kind]]
        assert found[:2] == [sent.rows.tobytes(), sent.scales.tobytes()]
        content = struct.pack("<QQQ", 7, 1, 4) + kind.encode() + found[1] + found[0]
        assert found[2] == hashlib.blake2b(content, digest_size=8).digest()
        assert found[2] == messages.FeatureRows(7, 1, 1, 4, kind, found[0], b"", found[1]).digested()
    assert {codes(row[0])[0] for row in rows if len(row) == 2 and codes(row[0])} == set(FEATURE_DROPS)


def test_the_page_names_every_field() -> None:
    page = PAGE.read_text()
    sent = (*get_args(messages.ToDraft), *get_args(messages.ToTarget))
    for message in (*sent, messages.FeatureOffer, messages.RequestSampling, Echo):
        for field in msgspec.structs.fields(message):
            assert f"`{field.encode_name}`" in page, f"{message.__name__}.{field.name}"


def test_the_page_names_every_capability_and_every_code() -> None:
    capabilities = {name for row in table(PAGE.name, "Capabilities") for name in codes(row[0])}
    assert {*messages.TARGET_CAPABILITIES, messages.PREFIX_KEYS, messages.FEATURES} <= capabilities
    errors = PAGE.read_text().split("\n### Errors\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", errors, re.MULTILINE) == list(CODES)
