"""`pilotfish draft`, as an engine starts its workers: from the engine's own configuration."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
from conftest import Run

from pilotfish.config.engine import EngineConfig
from pilotfish.config.workers import DraftConfig
from pilotfish.engine.drafts import draft_pool
from pilotfish.engine.memory import plan_memory
from pilotfish.engine.pairs import resolve_pair
from pilotfish.engine.pools.remote_pools import worker_command
from pilotfish.engine.processes.host_memory import GIB

LISTEN = "ipc:///tmp/draft-3"


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[DraftConfig]]:
    """The pools that were to be run."""
    root, seen = logging.getLogger(), list[DraftConfig]()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setattr(draft_pool, "run_pool", lambda config, _: seen.append(config))
    yield seen
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def config(llama: Path, draft: Path, tmp_path: Path) -> EngineConfig:
    """With values that no field has by default."""
    return EngineConfig(
        target=llama,
        draft=draft,
        mode="async",
        drafter="lm",
        dtype="float32",
        leaves=7,
        memory=3.5,
        kv_slots=512,
        max_requests=5,
        max_rows=99,
        max_model_len=100,
        threads=3,
        cores="0",
        pace="draft=2ms",
        trace=tmp_path / "trace.json",
        eager=True,
    )


def test_a_worker_is_bound_by_the_memory_of_its_engine(
    pilotfish: Run, config: EngineConfig, pools: list[DraftConfig]
) -> None:
    assert pilotfish(*worker_command("draft", config, LISTEN, "draft 3")[3:]).code == 0
    (pool,) = pools
    assert pool.model.memory == 3.5 and plan_memory(pool.model).limit == round(3.5 * GIB)


def test_a_worker_has_every_field_of_its_engine_that_is_not_of_the_target_alone(
    pilotfish: Run, config: EngineConfig, pools: list[DraftConfig]
) -> None:
    assert pilotfish(*worker_command("draft", config, LISTEN, "draft 3")[3:]).code == 0
    (pool,) = pools
    own = {"target", "draft", "mode", "cores", "threads", "max_rows", "max_model_len"}
    assert pool == DraftConfig(model=config.of_draft, listen=LISTEN, name="draft 3", leaves=7)
    assert pool.model.target == config.draft and (pool.model.cores, pool.model.threads) == ("", 0)
    differing = {item.name for item in fields(config) if getattr(pool.model, item.name) != getattr(config, item.name)}
    assert differing == own


def test_options_of_the_command_are_those_of_the_pool(
    pilotfish: Run, draft: Path, pools: list[DraftConfig], tmp_path: Path
) -> None:
    options = ("--memory", 2, "--kv-slots", 512, "--leaves", 9, "--children", 3, "--name", "a", "--insecure")
    options += ("--revision", "monday")
    assert pilotfish("draft", "--draft", draft, "--listen", LISTEN, "--key", tmp_path, *options).code == 0
    model = EngineConfig(target=draft, memory=2.0, kv_slots=512)
    assert pools == [
        DraftConfig(
            model=model,
            listen=LISTEN,
            name="a",
            revision="monday",
            key=tmp_path,
            insecure=True,
            leaves=9,
            children=3,
        )
    ]


def test_a_draft_of_a_pair_by_name(pilotfish: Run, pools: list[DraftConfig]) -> None:
    assert pilotfish("draft", "--pair", "pycode", "--draft", "eagle3", "--listen", LISTEN).code == 0
    assert pilotfish("draft", "--pair", "pycode", "--listen", LISTEN).code == 0
    head, pair = resolve_pair("pycode", "eagle3"), resolve_pair("pycode")
    assert [(pool.model.target, pool.target) for pool in pools] == [(head.draft, head.target), (pair.draft, None)]
    refused = pilotfish("draft", "--pair", "pycode", "--draft", "medusa", "--listen", LISTEN)
    assert refused.code == 2 and refused.stderr == (
        "pilotfish: draft: 'medusa' is not allowed; expected draft, dspark, eagle3; others need --target\n"
    )


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--leaves", 0), "leaves: 0 is not allowed; expected an integer 1 to 1024"),
        (("--memory", -1), "memory: -1.0 is not allowed; expected a number of GiB, 0 to 1048576"),
        (("--kv-slots", 63), "kv_slots: 63 is not allowed; expected 0, or an integer 64 to 67108864"),
        (("--dtype", "int4"), "dtype: 'int4' is not allowed; expected auto or float32 or bfloat16"),
        (("--revision", 129 * "x"), f"revision: '{129 * 'x'}' is not allowed; expected strings of 0 to 128 characters"),
        (("--config", "{}"), "config: '{}' is not allowed; expected an engine's configuration"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(
    pilotfish: Run, draft: Path, options: tuple[object, ...], line: str
) -> None:
    result = pilotfish("draft", "--draft", draft, "--listen", LISTEN, *options)
    assert result.code == 2 and result.stderr.startswith(f"pilotfish: {line}") and result.stderr.count("\n") == 1


def test_a_copy_of_a_configuration_is_checked(config: EngineConfig) -> None:
    with pytest.raises(ValueError, match="levels: 65 is not allowed; expected an integer 1 to 64"):
        replace(config, levels=65)
