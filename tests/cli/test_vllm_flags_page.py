"""docs/coming-from-vllm.md: its tables of flags say what the command line does."""

import shlex
from pathlib import Path

import pytest
from conftest import Configured
from pages import codes, table

from pilotfish.cli.vllm_arguments import FLAGS, Flag

PAGE = "coming-from-vllm.md"
WORKING = [codes(row[0])[0] for row in table(PAGE, "Flags that work")]
OTHERS = table(PAGE, "Flags that change nothing, and flags that are refused")


@pytest.mark.parametrize("line", WORKING)
def test_what_the_page_says_works_is_taken(
    configured: Configured, llama: Path, draft: Path, tmp_path: Path, line: str
) -> None:
    (tmp_path / "template").write_text("{{ messages }}")
    stands_for = {"MODEL": llama, "DRAFT": draft, "FILE": tmp_path / "template"}
    for word, path in stands_for.items():
        line = line.replace(word, str(path))
    assert configured(*shlex.split(line)).engine.target == llama


def test_what_the_page_says_of_other_flags_is_what_is_said() -> None:
    """Each flag is on the page, with the values that are accepted and the line for all others."""
    on_page = {
        name.removeprefix("--"): Flag(why, tuple(codes(accepted) or accepted.split(", ") if accepted else ()))
        for names, accepted, why in OTHERS
        for name in codes(names)
    }
    assert on_page == {name: Flag(flag.why, flag.accepted) for name, flag in FLAGS.items()}
