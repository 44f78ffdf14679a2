"""How large the house is: `python tests/house.py` prints its counts, `test_house.py` holds them to `LIMITS`. A new
capability finds its room, or something makes room for it."""

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "pilotfish"
BENCH = PACKAGE / "cli" / "bench"
#: Kernels count for themselves: C++, and Triton's language in Python's clothes.
KERNELS = set((PACKAGE / "model" / "cuda" / "triton_kernels").glob("*.py"))
LIMITS = {
    "lines of the package": 58_000,
    "lines of bench in the package": 5_000,
    "lines of bench and benchmarks/": 8_500,
    "lines of tests": 65_000,
    "rooms": 14,
    "files beside each other": 20,
    "words of docs": 60_000,
    "words of docs/benchmarks.md": 6_000,
    "lines of README": 130,
    "words of ARCHITECTURE": 1_400,
    "words of the glossary": 25,
    "circles of imports": 0,
    "class names twice": 0,
    "folders without an introduction": 0,
}


def counts() -> dict[str, int]:
    bench = lines(BENCH.rglob("*.py"))
    return {
        "lines of the package": lines(path for path in PACKAGE.rglob("*.py") if path not in KERNELS),
        "lines of bench in the package": bench,
        "lines of bench and benchmarks/": bench + lines((ROOT / "benchmarks").rglob("*.py")),
        "lines of tests": lines((ROOT / "tests").rglob("*.py")),
        "rooms": sum(any(path.glob("*.py")) for path in PACKAGE.iterdir()),
        "files beside each other": max(beside_each_other().values()),
        "words of docs": sum(words(path) for path in (ROOT / "docs").rglob("*.md")),
        "words of docs/benchmarks.md": words(ROOT / "docs" / "benchmarks.md"),
        "lines of README": lines([ROOT / "README.md"]),
        "words of ARCHITECTURE": words(ROOT / "ARCHITECTURE.md"),
        "words of the glossary": len(glossary()),
        "circles of imports": len(circles(import_graph())),
        "class names twice": len(names_twice()),
        "folders without an introduction": len(without_introduction()),
    }


def lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def words(path: Path) -> int:
    """As `wc -w` counts them."""
    return len(path.read_text("utf-8").split())


def glossary() -> list[str]:
    """Rows of the table under the heading Glossary."""
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8").partition("## Glossary")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return rows[2:]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def import_graph() -> dict[str, set[str]]:
    """Which modules of the package each module imports, wherever in its file."""
    known = modules()
    return {name: {other for other in _imported(path) if other in known} for name, path in known.items()}


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Modules that import each other, by way of others too: strongly connected components (Tarjan 1972)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        number[node] = low[node] = len(number)
        stack.append(node)
        for other in graph[node]:
            if other not in number:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], number[other])
        if low[node] == number[node]:
            component = set(stack[stack.index(node) :])
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(component)

    for node in graph:
        if node not in number:
            visit(node)
    return found


def names_twice() -> list[str]:
    """Names of classes that stand in more than one module."""
    nodes = (node for path in modules().values() for node in parsed(path).body)
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return sorted(name for name, times in names.items() if times > 1 and not name.startswith("_"))


def beside_each_other() -> dict[str, int]:
    """Files of code in each folder, its introduction apart."""
    files = (path for path in PACKAGE.rglob("*.py") if path.name not in ("__init__.py", "__main__.py"))
    return Counter(str(path.parent.relative_to(PACKAGE)) for path in files)


def without_introduction() -> list[str]:
    """Folders whose `__init__.py` says nothing, or more than three sentences."""
    introductions = (path for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)
    texts = {path.parent: ast.get_docstring(parsed(path)) or "" for path in introductions}
    return sorted(str(folder.relative_to(PACKAGE)) for folder, text in texts.items() if not 1 <= sentences(text) <= 3)


def sentences(text: str) -> int:
    """Sentences before the first drawing."""
    prose = " ".join(text.partition("\n\n    ")[0].split())
    return sum(prose.count(end) for end in (". ", "? ")) + prose.endswith((".", ":", "?"))


def by_room() -> dict[str, int]:
    folders = sorted(path for path in PACKAGE.iterdir() if any(path.glob("*.py")))
    return {folder.name: lines(folder.rglob("*.py")) for folder in folders}


if __name__ == "__main__":
    for what, count in counts().items():
        sys.stdout.write(f"{count:>7,}  of {LIMITS[what]:>7,}  {what}\n")
    sys.stdout.write("".join(f"{count:>7,}  {room}/\n" for room, count in by_room().items()))
    for which in (circles(import_graph()), names_twice(), without_introduction()):
        sys.stdout.write("".join(f"  {one}\n" for one in which))
