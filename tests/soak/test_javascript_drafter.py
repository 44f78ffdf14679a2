"""The example drafter in JavaScript: the kit passes, its noise is the target's, and no output depends on it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support import SNIPPETS

from pilotfish import LLM, SamplingParams
from pilotfish.core.sampling.noise import gumbel_of
from pilotfish.engine import pairs

SOURCE = Path(__file__).parents[2] / "examples" / "javascript"
pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node.js with npm")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("javascript")
    shutil.copytree(SOURCE, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("node_modules"))
    subprocess.run(["npm", "install", "--no-package-lock", "--silent"], cwd=directory, check=True)
    return directory / "ngram_drafter.mjs"


@pytest.fixture(scope="module")
def endpoint(script: Path) -> Iterator[str]:
    script.parent.chmod(0o700)
    listen = f"ipc://{script.parent}/socket"
    process = subprocess.Popen(["node", script, "--listen", listen], stderr=subprocess.PIPE, text=True)
    yield listen
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=10)
    assert (process.returncode, said) == (0, "")


def test_the_kit_passes(endpoint: str) -> None:
    command = [sys.executable, "-m", "pilotfish", "draft-check", "--pool", endpoint, "--pair", "pycode", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert sum(finding["status"] == "pass" for finding in json.loads(done.stdout)["findings"]) > 40


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_outputs_are_those_without_a_draft(endpoint: str, temperature: float) -> None:
    params = [SamplingParams(max_tokens=80, temperature=temperature, seed=seed) for seed in range(3)]
    own: dict[str, Any] = {"dtype": "float32", "kv_slots": 4096}
    target = pairs.resolve_pair("pycode").target
    with LLM(target, **own) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(SNIPPETS[:3], params)]
    with LLM(target, mode="async", drafter="lm", draft_pool=(endpoint,), pace="target=10ms", **own) as llm:
        found = llm.generate(SNIPPETS[:3], params)
    assert [output.outputs[0].token_ids for output in found] == expected


def test_its_noise_is_the_targets(script: Path) -> None:
    """All words of the counter and of the key, at their ends and between."""
    draw = Random(4)
    seeds = [0, 1, 2**32 - 1, 2**32, 2**53, 2**64 - 1, *(draw.getrandbits(64) for _ in range(20))]
    places = [
        (0, 0),
        (1, 3),
        (2**31 - 1, 2**31 - 1),
        *((draw.getrandbits(31), draw.getrandbits(17)) for _ in range(20)),
    ]
    cases = [(str(seed), *place) for seed in seeds for place in places]
    program = (
        f"import {{ noise }} from {json.dumps(script.as_uri())};"
        "const cases = JSON.parse(await new Response(process.stdin).text());"
        "console.log(JSON.stringify(cases.map(([seed, position, token]) => noise(BigInt(seed), position, token))));"
    )
    command = ["node", "--input-type=module", "--eval", program]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, check=True)
    expected = [gumbel_of(int(seed), position, token) for seed, position, token in cases]
    assert json.loads(done.stdout) == pytest.approx(expected, abs=1e-6)


def test_bad_options_are_one_line(script: Path) -> None:
    done = subprocess.run(["node", script, "--listen", "foo"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "ngram_drafter: --listen is 'foo'; expected ipc://PATH or tcp://HOST:PORT\n"
