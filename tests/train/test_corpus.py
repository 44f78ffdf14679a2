from pathlib import Path

import pytest

from pilotfish.errors import ParameterError
from pilotfish.train.corpus import STDLIB_EXCLUDED, Document, collect, encode, split


def test_held_out_packages_and_their_tests_are_absent_from_training(sources: Path) -> None:
    parts = split(collect([sources]), ("beta",))
    assert not any("beta" in document.name or "beta" in document.text for document in parts.training)
    assert {document.name for document in parts.held_out} >= {"beta/m0.py", "test_beta.py"}
    assert {document.name for document in parts.training} >= {"alpha/m0.py", "gamma.py"}


def test_standard_library_is_the_default_source() -> None:
    documents = collect(())
    parts = split(documents, ("asyncio", "email", "http", "unittest"))
    assert {"asyncio/tasks.py", "email/message.py"} <= {document.name for document in parts.held_out}
    assert {"argparse.py", "json/decoder.py"} <= {document.name for document in parts.training}
    names = {part for document in documents for part in Path(document.name).parts}
    assert not names & STDLIB_EXCLUDED
    assert not any(document.name.startswith("asyncio/") for document in parts.training)


def test_without_a_named_package_a_twentieth_is_held_out() -> None:
    documents = [Document(f"{number}.py", str(number)) for number in range(40)]
    parts = split(documents, ("absent",))
    assert len(parts.held_out) == 2
    assert parts == split(documents, ("absent",))


def test_unreadable_and_repeated_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.py").write_text("x = 1\n")
    (tmp_path / "c.py").write_bytes(b"\xff\xfe")
    (tmp_path / "d.py").write_text("\n")
    (tmp_path / "e.txt").write_text("x = 2\n")
    assert [document.name for document in collect([tmp_path])] == ["a.py"]


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_documents_are_refused(count: int) -> None:
    with pytest.raises(ParameterError, match="source"):
        split([Document("a.py", "x")] * count, ())


def test_missing_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="source"):
        collect([tmp_path / "absent"])


def test_every_document_ends_in_the_end_token() -> None:
    documents = [Document("a", "12"), Document("b", "3")]
    row = encode(documents, lambda texts: [[int(mark) for mark in text] for text in texts], 0)
    assert row.tolist() == [1, 2, 0, 3, 0]
