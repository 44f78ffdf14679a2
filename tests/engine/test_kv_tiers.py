"""KV that comes back from host memory, and from disk after a restart: the same output, always."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inline_drafts import inline_drafts
from sizes import paired, sized
from support import MODES, SNIPPETS, assert_idle, finish, make_engine, params, run, settle, write_model

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.engine.sample import Sample
from pilotfish.engine.targets.status import identity_of, status_of
from pilotfish.errors import ParameterError
from pilotfish.wire.channel import decoded, encode
from pilotfish.wire.serving import SERVER_DECODER, Status

#: Room for one long sequence.
SLOTS = 512


pytestmark = pytest.mark.usefixtures("patient_tiers")


@pytest.fixture(autouse=True)
def _drafts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with inline_drafts(monkeypatch):
        yield


@pytest.fixture(scope="module")
def plain(llama: Path) -> Engine:
    return make_engine(llama, prefix_cache=False)


def prompts(plain: Engine, count: int = 6, length: int = 300) -> list[list[int]]:
    """Long ones that have nothing in common."""
    text = plain.check_prompt("\n".join(SNIPPETS))
    return [[place + 3, *(text * 9)[place * 7 :][: length - 1]] for place in range(count)]


def served(engine: Engine, prompt: Any, asked: SamplingParams, salt: str | None = None) -> Sample:
    (sample,) = finish(engine, prompt, asked, salt)
    assert engine.tiers is not None
    settle(engine.tiers)
    return sample


def from_where(sample: Sample) -> set[str]:
    return set(sample.request.stats.cached_by_tier)


@pytest.mark.parametrize(("mode", "tier"), paired(list(MODES), ["host", "disk"]))
def test_evicted_kv_comes_back(tier: str, mode: str, llama: Path, draft: Path, plain: Engine, tmp_path: Path) -> None:
    where = {"kv_host_memory": 0.01} if tier == "host" else {"kv_disk": tmp_path / "kv", "kv_disk_size": 0.01}
    asked = params(8)
    with make_engine(llama, draft=draft, kv_slots=SLOTS, **MODES[mode], **where) as engine:
        for round_ in range(2):
            for prompt in prompts(plain):
                sample = served(engine, prompt, asked)
                assert [sample.token_ids] == run(plain, [prompt], [asked])
                assert round_ == 0 or (from_where(sample) == {tier} and sample.request.stats.cached_tokens == 256)
        status = decoded(SERVER_DECODER, encode(status_of(engine, identity_of(engine), "")))
        assert isinstance(status, Status) and engine.tiers is not None
        counts, (device, other) = status.tier_counts, status.tiers
        assert counts == engine.tiers.counts and counts.loaded_tokens[tier] == 6 * 256
        assert counts.saved >= 6 * 256 // 64 and counts.loading_seconds > 0
        assert (device.name, other.name) == ("device", tier) and device.evicted > 6 * 300
        assert device.capacity == SLOTS * engine.memory.target.slot and 0 < other.used <= other.capacity


@pytest.mark.parametrize(("kind", "dtype"), [("deepseek_v2", "auto"), ("deepseek_v3", "int8")])
def test_latents_come_back(kind: str, dtype: str, tiny_models: dict[str, Path], plain: Engine, tmp_path: Path) -> None:
    """From the pool, from memory and, after a restart, from disk."""
    own = {"kv_dtype": dtype, "kv_slots": SLOTS}
    each, asked = prompts(plain), params(8)
    alone = make_engine(tiny_models[kind], prefix_cache=False, **own)
    expected, seen = [run(alone, [prompt], [asked]) for prompt in each], set[str]()
    where = {"kv_host_memory": 0.01, "kv_disk": tmp_path / "kv", "kv_disk_size": 0.01}
    for _ in range(2):
        with make_engine(tiny_models[kind], **own, **where) as engine:
            for place in (0, 0, *range(6), *range(6)):
                sample = served(engine, each[place], asked)
                seen |= from_where(sample)
                assert [sample.token_ids] == expected[place]
    assert seen == {"device", "host", "disk"}


@pytest.fixture
def tiered(llama: Path) -> Iterator[Engine]:
    """A small pool over more host memory than there is KV."""
    with make_engine(llama, kv_slots=SLOTS, max_rows=64, kv_host_memory=0.05) as engine:
        yield engine


def test_prefixes_that_part_at_every_offset(tiered: Engine, plain: Engine) -> None:
    """Around the ends of objects, and the pool's own part of a prefix ends anywhere."""
    whole = prompts(plain)[0][:200]
    served(tiered, whole, params(4))
    for offset in (*range(1, 200, sized(27, 9)), *range(62, 67), *range(126, 131)):
        served(tiered, prompts(plain)[offset % 5 + 1], params(4))  # drives out some of it
        prompt = [*whole[:offset], 7, *whole[offset:]]
        sample = served(tiered, prompt, params(6))
        assert [sample.token_ids] == run(plain, [prompt], [params(6)])
        assert sample.request.stats.cached_tokens >= offset // 64 * 64
    assert tiered.tiers is not None and tiered.tiers.counts.loaded_tokens["host"] > 600


@pytest.mark.parametrize("length", sized([1, 64, 65, 1000], [1, 2, 63, 64, 65, 128, 129, 1000, 4000]))
def test_prompts_of_any_length(length: int, tmp_path: Path) -> None:
    """Beside others that drive each other out: all at once, then again after a restart."""
    llama = write_model(tmp_path, "llama", max_position_embeddings=4160)
    plain = make_engine(llama, prefix_cache=False, kv_slots=8192)
    text = plain.check_prompt("\n".join(SNIPPETS)) * 50
    each = [[place + 3, *text[place:]][:length] for place in range(3)]
    assert {len(prompt) for prompt in each} == {length}
    asked = [params(5, seed=place) for place in range(3)]
    where = {"kv_host_memory": 0.05, "kv_disk": tmp_path / "kv", "kv_disk_size": 0.1}
    for _ in range(2):
        with make_engine(llama, kv_slots=4224, **where) as engine:
            for _ in range(2):
                assert run(engine, each, asked) == run(plain, each, asked)
                assert engine.tiers is not None
                settle(engine.tiers)
            assert_idle(engine)


def test_salts_share_nothing_in_any_tier(tiered: Engine, plain: Engine) -> None:
    prompt, seen = prompts(plain)[0], set[str | None]()
    for salt in (None, "a", "b", "a", None):
        sample = served(tiered, prompt, params(4), salt)
        assert [sample.token_ids] == run(plain, [prompt], [params(4)])
        assert from_where(sample) == ({"host"} if salt in seen else set())
        seen.add(salt)
        for other in prompts(plain)[1:4]:
            served(tiered, other, params(4), "others")


def test_samples_of_one_prompt_and_prompts_that_are_scored(tiered: Engine, plain: Engine) -> None:
    for each in prompts(plain)[:4]:
        served(tiered, each, params(4))
    prompt, asked = prompts(plain)[0], [params(8, n=3), params(8, prompt_logprobs=1)]
    for own in asked:
        assert run(tiered, [prompt], [own]) == run(plain, [prompt], [own])
    assert_idle(tiered)


@pytest.mark.parametrize("eager", sized([False], [False, True]))
def test_every_plane_of_8_bits_is_kept(llama: Path, plain: Engine, tmp_path: Path, eager: bool) -> None:
    """In host memory and, after a restart, on disk."""
    options: dict[str, Any] = {"kv_dtype": "int8", "eager": eager}
    where = {"kv_host_memory": 0.005, "kv_disk": tmp_path, "kv_disk_size": 0.01, "kv_slots": SLOTS}
    asked = prompts(plain, 3)
    expected = run(make_engine(llama, prefix_cache=False, **options), asked, [params(8)] * 3)
    for tier, rounds in (("host", 2), ("disk", 1)):
        with make_engine(llama, **where, **options) as engine:
            samples = [served(engine, prompt, params(8)) for _ in range(rounds) for prompt in asked]
        assert [sample.token_ids for sample in samples] == expected * rounds
        assert all(from_where(sample) == {tier} for sample in samples[-3:])


def test_kv_of_another_shape_is_refused(llama: Path, tmp_path: Path) -> None:
    where = {"kv_disk": tmp_path / "kv", "kv_disk_size": 0.01}
    with make_engine(llama, **where):
        pass
    for other in ({"dtype": "bfloat16"}, {"kv_dtype": "int8"}, {"eager": True}, {"quantization": "int8"}):
        with pytest.raises(ParameterError, match="kv_disk"):
            make_engine(llama, **where, **other)
    other_weights = tmp_path / "other"
    shutil.copytree(llama, other_weights)
    (weights,) = other_weights.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ParameterError, match="kv_disk"):
        make_engine(other_weights, **where)
    with make_engine(llama, **where) as engine, pytest.raises(ParameterError, match="kv_disk"):
        assert engine.tiers is not None
        make_engine(llama, **where)  # it has an owner


@pytest.mark.parametrize("field", ["kv_host_memory", "kv_disk_size"])
def test_less_than_a_sequence_is_refused(field: str, llama: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"kv_disk": tmp_path / "kv"} if field == "kv_disk_size" else {}
    with pytest.raises(ParameterError, match=rf"{field}: 1e-05.* at least .* GiB: a sequence of \d+ tokens"):
        make_engine(llama, **given, **{field: 1e-5})


def test_tiers_need_the_prefix_cache(llama: Path) -> None:
    with pytest.raises(ParameterError, match=r"prefix_cache: .*true with kv_host_memory"):
        make_engine(llama, prefix_cache=False, kv_host_memory=0.01)
