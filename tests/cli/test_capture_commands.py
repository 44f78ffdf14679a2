"""`pilotfish rollout capture`: what is shown of a folder, and what is purged; folders that `serve` refuses."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_runs import Refused, Run

from pilotfish.operate.capture.folder import ClaimedFolder, found_rows
from pilotfish.operate.capture.rows import CapturedRow, framed, token_bytes
from pilotfish.operate.capture.store import CaptureStore, Retention
from pilotfish.train import distil as distil_module
from pilotfish.train.distil import Redistillation
from pilotfish.train.evaluate import CapturedEvaluation
from pilotfish.train.recipes import DistilRecipe

HOUR = 3600.0


@pytest.fixture
def now() -> float:
    return time.time()


@pytest.fixture
def directory(tmp_path: Path, now: float) -> Iterator[Path]:
    """Two rows of one client, 50 and 1 hours old, and one of another, 30 hours old; a server still writes there."""
    path = tmp_path / "captured"
    store = CaptureStore(ClaimedFolder(path), Retention(1e9, 1 << 30))
    for client, hours in (("search", 50), ("chat", 30), ("search", 1)):
        store.add(client, [row(now - hours * HOUR)])
    yield path
    store.close()


def row(moment: float) -> CapturedRow:
    tokens = {"prompt": token_bytes([11111, 2, 3]), "output": token_bytes([4, 5])}
    return CapturedRow(time=moment, **tokens, temperature=1.0, tag=None, fingerprint="f", tokenizer="t")


def ages(directory: Path, now: float) -> list[int]:
    """Of the files that are left, in hours."""
    return [round((now - file.begun) / HOUR) for file in found_rows(directory)]


def test_show(pilotfish: Run, directory: Path, now: float) -> None:
    (shown,) = pilotfish("rollout", "capture", "show", directory, "--json").rows
    search, chat = sorted(shown["partitions"], key=lambda one: -one["rows"])
    assert (search["rows"], search["prompt_tokens"], search["output_tokens"], search["files"]) == (2, 6, 4, 2)
    assert (chat["rows"], chat["bytes"]) == (1, len(framed(row(now))))
    assert search["oldest"] == now - 50 * HOUR and search["newest"] == now - HOUR
    result = pilotfish("rollout", "capture", "show", directory)
    assert result.code == 0 and search["name"] in result.stdout
    assert "2.1 d ago" in result.stdout and "1.0 h ago" in result.stdout
    assert "11111" not in result.stdout and "search" not in result.stdout


def test_purge_of_a_client_then_of_all(pilotfish: Run, directory: Path, now: float) -> None:
    result = pilotfish("rollout", "capture", "purge", directory, "--client", "search")
    assert (result.code, result.stderr) == (0, "") and result.stdout.startswith("removed 2 files, ")
    assert ages(directory, now) == [30]
    assert pilotfish("rollout", "capture", "purge", directory, "--all").code == 0 and ages(directory, now) == []


def test_purge_of_what_is_older(pilotfish: Run, directory: Path, now: float) -> None:
    assert pilotfish("rollout", "capture", "purge", directory, "--before", "40h").code == 0
    assert ages(directory, now) == [30, 1]
    iso = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(now - 2 * HOUR))
    assert pilotfish("rollout", "capture", "purge", directory, "--before", iso, "--json").rows[0]["files"] == 1
    assert ages(directory, now) == [1]


@pytest.mark.parametrize(
    "options", [(), ("--all", "--client", "search"), ("--before", "yesterday"), ("--before", "1h", "--all")]
)
def test_an_unclear_purge_removes_nothing(refused: Refused, directory: Path, now: float, options: tuple[str]) -> None:
    refused("rollout", "capture", "purge", directory, *options)
    assert ages(directory, now) == [50, 30, 1]


@pytest.mark.parametrize("command", [("show",), ("purge", "--all"), ("purge", "--client", "x")])
def test_what_is_no_such_folder_is_refused(refused: Refused, tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "file", tmp_path / "absent"):
        refused("rollout", "capture", command[0], path, *command[1:])
    assert (tmp_path / "file").read_text() == "x"


# -- serve


def test_serve_refuses_a_folder_that_it_cannot_use(refused: Refused, llama: Path, directory: Path) -> None:
    for path, why in ((llama, "capture.json"), (llama / "config.json", "capture"), (directory, "no other server")):
        line = refused("serve", "--target", llama, "--port", 0, "--capture", path)
        assert line.startswith("capture: ") and why in line
    assert refused("serve", "--target", llama, "--capture-tags", "a").startswith("capture_tags: 'a'")


# -- train distil --from


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[DistilRecipe]:
    """The recipes of drafts that gain 0.2 accepted tokens a step."""
    recipes = list[DistilRecipe]()

    def redistil(recipe: DistilRecipe, margin: float, *_: Any) -> Redistillation:
        recipes.append(recipe)
        return Redistillation(*(CapturedEvaluation(1, 1, 1, 1, 1, accepted) for accepted in (1.0, 1.2)), margin)

    monkeypatch.setattr(distil_module, "redistil", redistil)
    return recipes


@pytest.mark.parametrize(
    ("options", "code", "said"), [((), 0, "better by 0.200"), (("--margin", 0.3), 1, "not better")]
)
def test_the_verdict(
    pilotfish: Run, trained: list[DistilRecipe], options: tuple[object, ...], code: int, said: str
) -> None:
    given = ("train", "distil", "--target", ".", "--draft", "d", "--out", "o", "--threads", 1)
    result = pilotfish(*given, "--from", "a", "--from", "b", *options)
    assert (result.code, result.stderr) == (code, "") and result.stdout.splitlines()[-1].startswith(said)
    assert "accepted a step             1.000    1.200" in result.stdout
    told = json.loads(pilotfish(*given, "--from", "a", *options, "--json").stdout)
    assert told["better"] is (code == 0) and told["present"]["accepted_a_step"] == 1.0
    assert [recipe.captured for recipe in trained] == [(Path("a"), Path("b")), (Path("a"),)]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--draft", "d", "--from", "a", "--data", "b"), "from"),
        (("--draft", "d", "--from", "a", "--source", "b"), "from"),
        (("--draft", "1,64,2,1,64", "--from", "a"), "draft"),
        (("--draft", "d", "--margin", 0.1), "margin"),
        (("--draft", "d", "--from", "a", "--margin", -1), "margin"),
    ],
)
def test_what_does_not_go_with_captured_rows(
    refused: Refused, trained: list[DistilRecipe], options: tuple[object, ...], named: str
) -> None:
    assert named in refused("train", "distil", "--target", ".", "--out", "o", "--threads", 1, *options)
    assert not trained
