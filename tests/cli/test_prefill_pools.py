"""A target's options of prefill pools: what cannot be used is one line and exit code 2; a pool may be missing."""

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from command_runs import Refused, Run
from inline_prefills import prefill_worker
from support import edit_tensors, running, write_model

from pilotfish.config.engine import EngineConfig
from pilotfish.engine.pools import remote_pools
from pilotfish.wire.curve_keys import PoolClient, PoolKeys, new_key_pair, write_key_pair
from pilotfish.wire.sockets import ListeningChannel

LIMIT = 60.0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_pools, "ANSWER", LIMIT)


OTHER = " is not allowed; expected "
THRESHOLDS = "auto, or a number of tokens, as in 2048 or 2K"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *((f"--prefill-threshold={text}", f"prefill_threshold: {text!r}{OTHER}{THRESHOLDS}") for text in ("many", "")),
        ("--prefill-threshold -1", f"prefill_threshold: '-1'{OTHER}{THRESHOLDS}"),
        ("--prefill-workers 1 --prefill-pool ipc:///x", f"prefill_workers: 1{OTHER}0 with prefill_pool"),
        ("--prefill-workers 1 --prefill-cores x", f"prefill_cores: 'x'{OTHER}core numbers"),
        ("--prefill-workers 1 --prefill-cores 0 --cores 0", f"prefill_cores: '0'{OTHER}other cores than the target's"),
        ("--prefill-pool nonsense", f"prefill_pool: 'nonsense'{OTHER}ipc://PATH or"),
        ("--prefill-pool tcp://192.0.2.1:5", f"prefill_pool: 'tcp://192.0.2.1:5'{OTHER}an address of this host alone,"),
        ("--prefill-pool ipc:///x --prefill-pool-key k", f"prefill_key: None{OTHER}a key"),
        ("--prefill-pool ipc:///x --prefill-key /no/file", f"prefill_pool_key: []{OTHER}one public key for each of 1"),
    ],
)
def test_options_that_cannot_be(line: Refused, options: str, said: str) -> None:
    assert line(*options.split()).startswith(said)


def copied(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "other"))


def other_weights(llama: Path, tmp_path: Path) -> Path:
    add = torch.tensor(1.0)
    return edit_tensors(copied(llama, tmp_path), lambda tensors: next(iter(tensors.values())).add_(add))


def other_model(_: Path, tmp_path: Path) -> Path:
    return write_model(tmp_path / "other", "llama", num_hidden_layers=3)


def other_tokenizer(llama: Path, tmp_path: Path) -> Path:
    path = copied(llama, tmp_path) / "tokenizer.json"
    path.write_text(path.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true'))
    return path.parent


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (other_weights, "weights: .*, not "),
        (other_model, "model: llama of 3 layers, .*, not llama of 2 layers, "),
        (other_tokenizer, "tokenizer: "),
    ],
)
def test_a_pool_of_another_model(
    line: Refused, llama: Path, tmp_path: Path, where: str, other: Callable[[Path, Path], Path], said: str
) -> None:
    served = EngineConfig(target=other(llama, tmp_path), dtype="float32", threads=1, kv_slots=256)
    with prefill_worker(served, where):
        assert re.match(f"prefill_pool: {where}: {said}", line("--prefill-pool", where))


@contextmanager
def locked(where: str) -> Iterator[str]:
    """A pool that knows another key than anybody's; its own public half."""
    own, known = new_key_pair(), new_key_pair()
    stopped = threading.Event()
    with closing(ListeningChannel(where, PoolKeys(own, {known.public: PoolClient("somebody", 1.0)}))) as channel:

        def listen() -> None:
            while not stopped.is_set():
                channel.receive(0.02)

        with running(listen, stopped.set):
            yield own.public


def test_keys_that_do_not_fit(line: Refused, tmp_path: Path, where: str) -> None:
    own, key = new_key_pair(), tmp_path / "target.key"
    write_key_pair(own, key)
    with locked(where) as public:
        said = line("--prefill-pool", where, "--prefill-key", key, "--prefill-pool-key", public)
        assert said == f"prefill_pool: {where} refused the key {own.public}; expected one on its allowlist"
        said = line("--prefill-pool", where)
        assert said == f"prefill_pool: {where} broke off: it wants a key, or is no prefill pool"


def test_a_model_that_hands_nothing_over(line: Refused, tmp_path: Path, where: str) -> None:
    windowed = write_model(tmp_path / "windowed", "mistral", sliding_window=16)
    said = line("--target", windowed, "--prefill-pool", where)
    assert said.startswith(f"prefill_pool: ('{where}',) is not allowed; expected none for a model")


def test_a_pool_that_is_not_there(
    generate: Run, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_pools, "ANSWER", 0.3)
    plain = generate("--prompt", "a b c d", "--seed", 3)
    result = generate("--prompt", "a b c d", "--seed", 3, "--prefill-pool", where)
    assert result.code == 0 and result.rows[0]["text"] == plain.rows[0]["text"]
    expected = f"prefill_pool: nobody answers at {where}; prompts are computed without it until it comes"
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [expected]
