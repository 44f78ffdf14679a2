"""Imports point down only, and core stays free of devices, clocks and sockets."""

import ast
import sys
from pathlib import Path

import house
import pytest

#: From the top down. A package may import itself and what stands below its own line.
LAYERS = (
    ("__main__",),
    ("cli",),
    ("cluster",),  # an extra: nothing else imports Ray
    ("server",),
    ("train",),
    ("__init__",),  # `from pilotfish import LLM` hands up what the engine offers
    ("engine",),
    ("plan",),
    ("workers",),  # the loops of targets, drafts and prefill workers, which meet only through core and wire
    ("model",),
    ("wire",),
    ("operate",),  # policy and statistics alone
    ("config",),  # a configuration is checked when it is made, paces of named devices included
    ("kv",),  # knows no device: KV is bytes
    ("grammar",),
    ("core",),
    ("prompts", "conversation", "command", "openmp", "torchless", "logs", "progress"),
    ("options", "validation", "files"),
    ("errors",),
    ("printable",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
#: What core may use beside the standard library.
CORE_ALLOWED = {"msgspec", "numpy", "pilotfish"}
#: What core may not use even of the standard library: clocks, I/O, threads.
CORE_FORBIDDEN = {"time", "datetime", "asyncio", "socket", "threading", "multiprocessing", "subprocess", "random", "os"}
#: Modules of each loop in `workers/`, and the rooms that it may use. Never torch: they run rows through an `Executor`.
LOOPS = {
    "target": ({"target", "target_shadow", "ahead"}, {"core", "errors"}),
    "draft": ({"draft", "lm", "ngram", "suffix", "automaton"}, {"core", "errors", "model", "wire"}),
    "prefill": ({"prefill", "export"}, {"core", "errors", "kv", "wire"}),
}
#: What all loops share.
SHARED = {"", "records"}


def unit(module: str) -> str:
    """The layer's name of a module below pilotfish: its first part."""
    return module.split(".")[1] if "." in module else "__init__"


def imports(source: str | Path, package: str) -> set[str]:
    """Absolute names of all modules that a source, a text or a file, imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source) if isinstance(source, str) else house.parsed(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) + 1 - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            found.add(module)
            found.update(
                f"{module}.{alias.name}" for alias in node.names if module != "pilotfish" or alias.name in LEVEL
            )
    return found


def upward(module: str, source: str | Path) -> list[str]:
    """Imports of `module` that do not point down; an unknown layer counts as one."""
    own = unit(module)
    package = module.rpartition(".")[0]
    edges = [name for name in imports(source, package) if name.split(".")[0] == "pilotfish"]
    return [name for name in edges if not allowed(own, unit(name))]


def allowed(own: str, other: str) -> bool:
    if own not in LEVEL or other not in LEVEL:
        return False
    return own == other or LEVEL[own] < LEVEL[other]


def foreign_to_core(source: str | Path) -> set[str]:
    roots = {name.split(".")[0] for name in imports(source, "pilotfish.core")}
    return roots & CORE_FORBIDDEN | {r for r in roots if r not in sys.stdlib_module_names | CORE_ALLOWED}


def foreign_to_loops(module: str, source: str | Path) -> set[str]:
    """What a module of a loop may not import."""
    own, rooms = next((own, rooms) for own, rooms in LOOPS.values() if stem(module) in own)
    names = imports(source, module.rpartition(".")[0])
    inside = {name for name in names if unit(name) == "workers"}
    others = {name for name in names if name.split(".")[0] == "pilotfish"} - inside
    neighbours = {name for name in inside if stem(name) not in own | SHARED}
    return (
        neighbours
        | {name for name in others if unit(name) not in rooms}
        | {name for name in names if name.split(".")[0] in ("torch", "transformers")}
    )


def stem(module: str) -> str:
    """The name of a loop's file: the third part of pilotfish.workers.target."""
    return "".join(module.split(".")[2:3]).removeprefix("__init__")


def sources() -> dict[str, Path]:
    """The file of every module by its name; a package's `__init__` keeps its own: its package is itself."""
    paths = house.modules().values()
    return {".".join(path.relative_to(house.PACKAGE.parent).with_suffix("").parts): path for path in paths}


def test_imports_point_down() -> None:
    assert {module: wrong for module, source in sources().items() if (wrong := upward(module, source))} == {}


def test_core_has_no_device_no_clock_no_io() -> None:
    core = {module: source for module, source in sources().items() if unit(module) == "core"}
    assert core
    assert {module: wrong for module, source in core.items() if (wrong := foreign_to_core(source))} == {}


def test_loops_know_no_torch_and_little_else() -> None:
    loops = {m: source for m, source in sources().items() if unit(m) == "workers" and stem(m) not in SHARED}
    assert {stem(module) for module in loops} == set().union(*(own for own, _ in LOOPS.values()))
    assert {module: wrong for module, source in loops.items() if (wrong := foreign_to_loops(module, source))} == {}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("prefill", "import torch"),
        ("prefill", "from pilotfish.model.kv_copy import copier_of"),
        ("prefill", "from pilotfish.workers.target import TargetWorker"),
        ("prefill", "from pilotfish import config"),
        ("target", "from pilotfish.workers.lm import LMDrafter"),
    ],
)
def test_a_model_or_another_loop_in_a_loop_would_be_found(module: str, source: str) -> None:
    assert foreign_to_loops(f"pilotfish.workers.{module}", source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pilotfish.core.trees.tree", "from pilotfish.model.executor import TorchExecutor"),
        ("pilotfish.core.trees.tree", "from ...model import runner"),
        ("pilotfish.model.executor", "def f():\n    import pilotfish.engine.engine"),
        ("pilotfish.model.executor", "from pilotfish import LLM"),
        ("pilotfish.core.trees.tree", "import pilotfish.newcomer"),
    ],
)
def test_an_upward_import_would_be_found(module: str, source: str) -> None:
    assert upward(module, source)


@pytest.mark.parametrize(
    "line", ["import torch", "import time", "from asyncio import Queue", "import zmq", "import socket"]
)
def test_a_clock_or_device_in_core_would_be_found(line: str) -> None:
    assert foreign_to_core(line)


def test_every_layer_of_the_source_is_placed() -> None:
    assert {unit(module) for module in sources()} <= LEVEL.keys()


def test_no_two_test_files_have_one_name() -> None:
    """pytest would collect the first alone. Those of `make soak` run apart."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py") if "soak" not in path.parts]
    assert sorted(names) == sorted(set(names))
