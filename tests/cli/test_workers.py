"""`pilotfish draft`, `prefill` and `target`, by hand and as an engine or a server starts them; their processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attending import LIMIT, TARGET, AttendingServer
from command_runs import Refused, Run
from support import make_engine, run, write_model

from pilotfish.config.engine import EngineConfig
from pilotfish.config.text import config_text
from pilotfish.config.workers import DraftConfig, PrefillConfig, TargetConfig
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.memory import plan_memory
from pilotfish.engine.pairs import resolve_pair
from pilotfish.engine.pools.remote_pools import worker_command
from pilotfish.engine.processes.host_memory import GIB
from pilotfish.wire.curve_keys import TargetKeys, new_key_pair, write_key_pair
from pilotfish.wire.serving import Declined
from pilotfish.wire.sockets import DialingChannel

LISTEN = "ipc:///tmp/worker-3"


@pytest.fixture
def config(llama: Path, draft: Path, tmp_path: Path) -> EngineConfig:
    """With values that no field has by default."""
    sizes = {"memory": 3.5, "kv_slots": 512, "kv_host_memory": 1.0, "max_requests": 5, "max_rows": 99, "threads": 3}
    kinds = {"drafter": "lm", "dtype": "float32", "kv_dtype": "int8", "pace": "draft=2ms,prefill=2ms", "cores": "0"}
    own = {"leaves": 7, "prefill_workers": 2, "max_model_len": 100, "trace": tmp_path / "trace.json", "eager": True}
    return EngineConfig(target=llama, draft=draft, mode="async", **sizes, **kinds, **own)


def differing(model: EngineConfig, config: EngineConfig) -> set[str]:
    return {item.name for item in fields(config) if getattr(model, item.name) != getattr(config, item.name)}


def test_a_draft_worker_gets_its_options(pilotfish: Run, config: EngineConfig, started: list[DraftConfig]) -> None:
    assert pilotfish(*worker_command("draft", config, LISTEN, "draft 3")[3:]).code == 0
    (pool,) = started
    assert pool == DraftConfig(model=config.of_draft, listen=LISTEN, name="draft 3", leaves=7)
    assert pool.model.target == config.draft and (pool.model.cores, pool.model.threads) == ("", 0)
    own = {"target", "draft", "mode", "cores", "threads", "max_rows", "max_model_len"}
    assert differing(pool.model, config) - own <= {"prefill_workers", "kv_host_memory"}
    assert own <= differing(pool.model, config)
    assert pool.model.memory == 3.5 and plan_memory(pool.model).limit == round(3.5 * GIB)


def test_a_prefill_worker_gets_its_options(pilotfish: Run, config: EngineConfig, started: list[PrefillConfig]) -> None:
    assert pilotfish(*worker_command("prefill", config, LISTEN, "prefill 1")[3:]).code == 0
    assert started == [PrefillConfig(model=config.of_prefill, listen=LISTEN, name="prefill 1")]
    own = {"draft", "mode", "cores", "threads", "max_rows", "kv_host_memory", "prefill_workers"}
    assert own <= differing(started[0].model, config) <= own | {"drafter", "leaves"}


def test_a_servers_target_gets_its_options(pilotfish: Run, config: EngineConfig, started: list[TargetConfig]) -> None:
    assert pilotfish("target", f"--listen={LISTEN}", f"--config={config_text(config)}").code == 0
    assert started == [TargetConfig(engine=config, listen=LISTEN)]


def test_options_of_a_prefill_pool(pilotfish: Run, llama: Path, started: list[Any], tmp_path: Path) -> None:
    options = ("--kv-slots", 512, "--max-queued-tokens", "8K", "--segment-bytes", "64K", "--segment-memory", 0.5)
    options += ("--lease", 3, "--name", "a", "--insecure", "--key", tmp_path, "--max-model-len", "1k")
    assert pilotfish("prefill", "--model", llama, "--listen", LISTEN, *options).code == 0
    own = {"segment_bytes": 1 << 16, "segment_memory": 0.5, "max_queued_tokens": 8192, "lease": 3.0}
    model = EngineConfig(target=llama, kv_slots=512, max_model_len=1000, max_rows=2048)
    assert started == [PrefillConfig(model=model, listen=LISTEN, name="a", insecure=True, key=tmp_path, **own)]


def test_a_draft_of_a_pair_by_name(pilotfish: Run, refused: Refused, started: list[DraftConfig]) -> None:
    assert pilotfish("draft", "--pair", "pycode", "--draft", "eagle3", "--listen", LISTEN).code == 0
    assert pilotfish("draft", "--pair", "pycode", "--listen", LISTEN).code == 0
    head, pair = resolve_pair("pycode", "eagle3"), resolve_pair("pycode")
    assert [(pool.model.target, pool.target) for pool in started] == [(head.draft, head.target), (pair.draft, None)]
    line = refused("draft", "--pair", "pycode", "--draft", "medusa", "--listen", LISTEN)
    assert line == "draft: 'medusa' is not allowed; expected draft, dspark, eagle3; others need --target"


# -- what is refused


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("windowed"), "mistral")


ALL = ("draft", "prefill", "target")


@pytest.mark.parametrize(
    ("commands", "options", "line"),
    [
        (ALL, ("--config", "{{}}"), "config: '{}' is not allowed; expected an engine's configuration"),
        (ALL, ("--listen", "tcp://0.0.0.0:0"), "listen: 'tcp://0.0.0.0:0' is not allowed; expected "),
        (ALL, ("--listen", "nowhere"), "listen: 'nowhere' is not allowed; expected "),
        (ALL, ("--key", "{key}"), "allow: None is not allowed; expected an allowlist, with --key"),
        (ALL, ("--key", "{key}", "--allow", "{key}"), "allow: "),
        (ALL, ("--listen", "ipc:///no/such/directory/pool"), "listen: 'ipc:///no/such/directory/pool'"),
        (ALL, ("--allow", "{key}"), "key: None is not allowed; expected a key file, with --allow"),
        (("target",), ("--log-format", "xml"), "log_format: 'xml' is not allowed; expected json or text"),
        (("draft",), ("--draft", "/no/such/draft"), "draft: '/no/such/draft'"),
        (("draft",), ("--cores", "4000"), "cores: '4000' is not allowed; expected "),
        (("draft",), ("--revision", 129 * "x"), "revision: 'xxx"),
        (("prefill",), ("--max-queued-tokens", "many"), "max_queued_tokens: 'many' is not allowed; expected a whole"),
        (("prefill",), ("--segment-memory", 0.001), "segment_memory: 0.001 is not allowed; expected room for two of"),
        (("prefill",), ("--model", "{windowed}"), "target: every layer of "),
        (("prefill",), ("--model", "{tmp}/none"), "target: "),
        (("prefill",), ("--pair", "pycode"), "pair: it cannot be combined with --target"),
        (("prefill",), ("--pace", "prefill=soon"), "pace: 'soon' is not allowed; expected "),
    ],
    ids=str,
)
def test_what_cannot_be(
    refused: Refused,
    llama: Path,
    windowed: Path,
    tmp_path: Path,
    commands: tuple[str, ...],
    options: tuple[object, ...],
    line: str,
) -> None:
    write_key_pair(new_key_pair(), tmp_path / "own.key")
    names = {"key": tmp_path / "own.key", "windowed": windowed, "tmp": tmp_path}
    given = [option.format(**names) if isinstance(option, str) else option for option in options]
    for command in commands:
        fixed = ("--model", llama, "--listen", f"ipc://{tmp_path}/{command}", "--kv-slots", 64)
        assert refused(command, *fixed, *given).startswith(line)


# -- processes


@contextmanager
def process_of(command: str, *options: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A worker's process, and where it says that it listens."""
    fixed = ("--dtype", "float32", "--threads", "1", "--eager", "--json", "--name", f"{command} 7")
    words = [sys.executable, "-m", "pilotfish", command, *map(str, options), *fixed]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            endpoint = msgspec.json.decode(process.stdout.readline())["endpoint"]
            title = Path(f"/proc/{process.pid}/cmdline").read_bytes().rstrip(b"\0").decode()
            assert title == f"pilotfish: {command} 7"
            assert Path(f"/proc/{process.pid}/comm").read_text() == f"{title[:15]}\n"
            yield process, endpoint
        finally:
            process.kill()


def test_a_target_process_serves_two_servers_that_hold_its_keys_and_ends_in_order(llama: Path, tmp_path: Path) -> None:
    pairs = {name: new_key_pair() for name in ("target", "a", "b", "stranger")}
    write_key_pair(pairs["target"], tmp_path / "target.key")
    (tmp_path / "servers").write_text(f"{pairs['a'].public} one\n{pairs['b'].public} two\n")
    own_keys = ("--key", tmp_path / "target.key", "--allow", tmp_path / "servers", "--kv-slots", 1024)
    listen = ("--model", llama, "--listen", "tcp://127.0.0.1:0")
    with process_of("target", *listen, *own_keys) as (process, endpoint), ExitStack() as stack:
        assert endpoint.startswith("tcp://127.0.0.1:")
        keys = [TargetKeys(pairs[name], pairs["target"].public) for name in ("a", "b", "stranger")]
        channels = [DialingChannel([endpoint], own.own.public[:8].encode(), [own]) for own in keys]
        a, b, stranger = (AttendingServer(stack.enter_context(closing(channel))) for channel in channels)
        params = [SamplingParams(max_tokens=9, seed=seed, temperature=0.8) for seed in (1, 2)]
        for server, own in zip((a, b), params, strict=True):
            identity = server.join().identity
            assert identity.kv_slots == 1024 and identity.version and identity.tokenizer
            server.submit(1, [5, 6, 7], own)  # the same number
        outputs = [server.output(1) for server in (a, b)]
        assert a.whole and b.whole
        os.kill(process.pid, signal.SIGTERM)
        for server in (a, b):
            assert server.until(Declined).reason == "it shuts down"
        assert process.stderr is not None and process.wait(LIMIT) == 0
        lines = process.stderr.read()
        assert "Traceback" not in lines and "leak" not in lines
        assert not stranger.channel.receive(0.5) and stranger.channel.refused(TARGET)
    assert outputs == run(make_engine(llama), [[5, 6, 7]] * 2, params)
    assert f"target 7 listens at {endpoint}" in lines
