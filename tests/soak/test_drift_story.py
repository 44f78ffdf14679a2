"""The whole of operating speculation, once (docs/explaining.md): a target is fine-tuned under its draft. Acceptance
falls, the guard cuts, `explain` says why, a draft learns what the new target writes, a shadow shows that it would pay,
a ramp brings it in. No request fails, and each output is one of the two targets'."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from live import LiveServer
from rollouts import PATIENCE, Files, Load, worker
from support import SNIPPETS, eventually
from transformers import AutoModelForCausalLM, AutoTokenizer

from pilotfish import LLM, SamplingParams
from pilotfish.engine.pairs import resolve_pair

STREAMS, REQUESTS, TOKENS = 8, 1200, 96
#: As of a target whose forwards cost more from 8 rows on.
PACE = "--pace=target=1:20ms/8:20ms/16:23ms/32:30ms/64:44ms/256:120ms,draft=4ms"
TAG = "story"
#: Seconds in which there is a whole minute of statistics.
PHASE = 130.0
#: Seconds of the ramp.
RAMP = 45
PRESENT = 'name = "present"\ndraft = "r0"'


# -- the two targets


def fine_tuned(target: Path, directory: Path) -> Path:
    """The target after 60 steps on lines of a log."""
    shutil.copytree(target, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ids = torch.tensor([token for line in log_lines(6000) for token in tokenizer(line).input_ids])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(60):
        rows = torch.stack([ids[place : place + 128] for place in torch.randint(len(ids) - 128, (8,))])
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory / "weights")
    shutil.move(directory / "weights" / "model.safetensors", directory)
    shutil.rmtree(directory / "weights")
    return directory


def log_lines(count: int) -> list[str]:
    chance = random.Random(0)

    def line() -> str:
        level, where = chance.choice(["INFO", "WARN"]), chance.choice(["gateway", "billing", "search"])
        what = chance.choice(["served", "queued", "refused"])
        return f"{level} {where}[{chance.randrange(90)}]: {what} in {chance.randrange(900)} ms\n"

    return [line() for _ in range(count)]


def bodies() -> list[dict[str, Any]]:
    each = {"temperature": 0.8, "max_tokens": TOKENS, "ignore_eos": True}
    return [{"prompt": SNIPPETS[i % len(SNIPPETS)], "seed": i, **each} for i in range(REQUESTS)]


def outputs(target: Path) -> list[tuple[int, ...]]:
    """What it writes without speculation."""
    given = [(body.pop("prompt"), SamplingParams(**body)) for body in bodies()]
    with LLM(target, dtype="float32") as llm:
        found = llm.generate([prompt for prompt, _ in given], [params for _, params in given])
    return [tuple(one.outputs[0].token_ids) for one in found]


# -- who tells it


@dataclass
class Stage:
    """Where processes are, and the files that they follow."""

    directory: Path
    files: Files

    def at(self, name: str) -> str:
        return f"ipc://{self.directory}/{name}"

    def draft(self, directory: Path, name: str, revision: str) -> AbstractContextManager[str]:
        return worker("draft", self.at(name), f"--draft={directory}", f"--revision={revision}", PACE)

    def target(self, directory: Path, name: str, *options: str) -> AbstractContextManager[str]:
        own = ["--mode=async", f"--members={self.files.members}", "--draft-optional", "--drafter=lm", PACE]
        return worker("target", self.at(name), f"--target={directory}", *own, *options)

    def members(self, pools: dict[str, bool], targets: dict[str, bool]) -> None:
        """By name, whether each drains."""
        self.files.write_members(*([(self.at(name), drains) for name, drains in m.items()] for m in (pools, targets)))


@dataclass
class Story:
    """A server on a stage, its load, and what came of it."""

    stage: Stage
    running: ExitStack
    server: LiveServer
    load: Load
    told: dict[str, Any] = field(default_factory=dict)

    def vary(self, *variants: str) -> None:
        self.stage.files.write_variants(*variants)
        status, answer = self.server.post("/v1/rollout/reload", {})
        assert status == 200, answer

    def phase(self) -> str:
        """Let it run; the whole minutes in between, as an interval of `explain`."""
        begin = math.ceil(time.time() / 60) * 60
        time.sleep(PHASE)
        end = math.floor(time.time() / 60) * 60
        return "..".join(datetime.fromtimestamp(at, UTC).isoformat() for at in (begin, end))

    def acceptance(self, variant: str, seconds: float = 40.0) -> float:
        """Accepted tokens a step from now on."""
        before = self.sums(variant)
        time.sleep(seconds)
        accepted, steps = (b - a for a, b in zip(before, self.sums(variant), strict=True))
        return accepted / steps

    def sums(self, variant: str) -> list[float]:
        names = ("accepted_tokens", "steps")
        return [self.sample(f"pilotfish_variant_{name}_total", f'variant="{variant}"') for name in names]

    def sample(self, name: str, label: str) -> float:
        """0: there is none."""
        lines = str(self.server.get("/metrics")[1]).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{") and label in line)

    def guard(self, variant: str) -> dict[str, Any]:
        found: dict[str, Any] = self.server.get("/v1/rollout")[1]["guard"][variant]
        return found

    def until(self, what: str, holds: Callable[[], bool], patience: float = PATIENCE) -> float:
        """Seconds that it took."""
        began = time.monotonic()
        eventually(holds, patience, pause=0.1, told=lambda: f"{what}: {self.told}: {self.server.log[-3000:]}")
        return time.monotonic() - began


@contextmanager
def streams(load: Load) -> Iterator[None]:
    """Their end raises what one of them met."""
    with ThreadPoolExecutor(STREAMS) as threads:
        running = [threads.submit(load.stream, number * REQUESTS // STREAMS) for number in range(STREAMS)]
        try:
            yield
        finally:
            load.ended.set()
        for one in running:
            one.result()


@contextmanager
def told(stage: Stage, running: ExitStack, target: Path, expected: Sequence[Any]) -> Iterator[Story]:
    """With a server, under load. `expected`: the outputs that each request may have. Processes that join end with
    `running`."""
    stage.files.write_variants(PRESENT)
    followed = {"members": stage.files.members, "rollout": stage.files.variants}
    with LiveServer(target, capture=stage.directory / "captured", capture_tags=TAG, **followed) as server:
        load = Load(server, bodies())
        load.expected = [set(outputs) for outputs in expected]
        load.headers = {"x-request-tag": TAG, "x-no-capture": "1"}
        with streams(load):
            yield Story(stage, running, server, load)


def pilotfish(*arguments: str) -> Any:
    """What a command says with --json."""
    command = [sys.executable, "-m", "pilotfish", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


# -- its chapters


def it_pays(story: Story) -> str:
    """An interval."""
    story.until("the draft is used", lambda: story.sums("present")[0] > 500)
    interval = story.phase()
    story.told["accepted before"] = story.acceptance("present")
    assert story.guard("present")["state"] == "live"
    return interval


def the_target_changes(story: Story, tuned: Path, old: ExitStack) -> None:
    """And is cut. Where that costs nothing it is tried again, and stays."""
    story.running.enter_context(story.stage.target(tuned, "new", f"--shadow-pool={story.stage.at('shadow')}"))
    story.load.headers = {"x-request-tag": TAG}  # from now on they may be kept
    story.stage.members({"r0": False}, {"old": False, "new": False})
    story.until("the new target serves", lambda: story.sample("pilotfish_replica_ready", story.stage.at("new")) == 1)
    story.stage.members({"r0": False}, {"old": True, "new": False})
    cut = story.until("the guard cuts", lambda: story.guard("present")["state"] == "cut")
    story.told |= {"seconds to the cut": cut, "why it was cut": story.guard("present")["reason"]}
    story.stage.members({"r0": False}, {"new": False})
    old.close()
    restored = story.until("it is restored", lambda: story.guard("present")["state"] == "live", 300.0)
    story.told |= {"seconds to the restoration": restored}


def it_is_explained(story: Story, before: str) -> None:
    after = story.phase()
    story.told["accepted after"] = story.acceptance("present")
    found = pilotfish("explain", f"--url={story.server.url}", f"--before={before}", f"--after={after}")
    story.told |= {"explained": found["sentence"], "causes": [one["sentence"] for one in found["causes"]]}
    assert found["verdict"] == "changed" and found["change"] < 0
    assert (found["causes"][0]["kind"], found["causes"][0]["part"]) == ("drift", "within"), story.told


def a_draft_learns(story: Story, tuned: Path, draft: Path) -> Path:
    better, captured = story.stage.directory / "better", story.stage.directory / "captured"
    models = [f"--target={tuned}", f"--draft={draft}", f"--from={captured}", f"--out={better}"]
    training = ["--tokens=300000", "--sequence-length=128", "--batch-rows=8", "--learning-rate=1e-3", "--threads=1"]
    story.told["taught"] = pilotfish("train", "distil", *models, *training)
    return better / "draft"


def a_shadow_promises(story: Story, draft: Path) -> None:
    shadow = story.stage.at("shadow")
    with story.stage.draft(draft, "shadow", "r1"):
        story.until("it has a score", lambda: story.sample("pilotfish_shadow_steps_total", shadow) > 3000)
        promised, live = (story.sample(f"pilotfish_shadow_{of}tokens_per_second", shadow) for of in ("", "live_"))
    story.told["promised"] = promised / live
    assert promised > 1.1 * live, story.told


def a_ramp_brings_it_in(story: Story, draft: Path, old: ExitStack) -> None:
    """And the old draft retires."""
    story.running.enter_context(story.stage.draft(draft, "r1", "r1"))
    story.stage.members({"r0": False, "r1": False}, {"new": False})
    story.until("it tells its revision", lambda: story.sample("pilotfish_pool_revision", 'revision="r1"') == 1)
    times = [(datetime.now(UTC) + timedelta(seconds=s)).isoformat(timespec="seconds") for s in (0, RAMP)]
    points = f"{{at = {times[0]}, share = 0.1}}, {{at = {times[1]}, share = 0.9}}"
    story.vary(f'name = "next"\ndraft = "r1"\nramp = [{points}]', PRESENT)
    time.sleep(RAMP + 15.0)
    story.told["accepted in the end"] = story.acceptance("next")
    story.told["the guard"] = story.server.get("/v1/rollout")[1]["events"][-8:]
    assert story.guard("next")["state"] == "live", story.told
    story.stage.members({"r0": True, "r1": False}, {"new": False})
    story.vary('name = "next"\ndraft = "r1"')
    story.until("the old draft rests", lambda: story.sample("pilotfish_pool_sessions", story.stage.at("r0")) == 0)
    story.stage.members({"r1": False}, {"new": False})
    old.close()
    time.sleep(10.0)


def test_a_target_is_fine_tuned_under_its_draft(tmp_path: Path) -> None:
    pair, stage = resolve_pair("pycode"), Stage(tmp_path, Files(tmp_path))
    tuned = fine_tuned(pair.target, tmp_path / "tuned")
    expected = list(zip(outputs(pair.target), outputs(tuned), strict=True))
    assert sum(old != new for old, new in expected) > REQUESTS // 2, "the new target writes other texts"
    with ExitStack() as running:
        old_draft, old_target = (running.enter_context(ExitStack()) for _ in range(2))
        stage.members({"r0": False}, {"old": False})
        old_draft.enter_context(stage.draft(pair.draft, "r0", "r0"))
        old_target.enter_context(stage.target(pair.target, "old"))
        with told(stage, running, pair.target, expected) as story:
            before = it_pays(story)
            the_target_changes(story, tuned, old_target)
            it_is_explained(story, before)
            better = a_draft_learns(story, tuned, pair.draft)
            a_shadow_promises(story, better)
            a_ramp_brings_it_in(story, better, old_draft)
    story.told |= {"requests": story.load.done, "unequal": story.load.unequal}
    print(json.dumps(story.told, indent=1))  # noqa: T201  # with -s
    assert story.load.unequal == 0 and story.load.done > 1000
    assert story.told["accepted after"] < 0.3 * story.told["accepted before"]
    assert story.told["accepted in the end"] > 0.7 * story.told["accepted before"]
