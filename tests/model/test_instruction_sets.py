"""Programs without torch: the kernels for another instruction set than this processor's best, others under an emulator,
and the threads that compute them. `make soak` has every set, and the kernels' tests with torch."""

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from instruction_sets import others, usable
from sizes import in_soak, sized

from pilotfish.config.cache import cache_folder, made_once
from pilotfish.errors import ParameterError
from pilotfish.model.cpu import native

SOURCES = Path(__file__).parent / "kernels"
WARNINGS = ("-Wall", "-Werror", "-Wno-maybe-uninitialized")
EMULATED_TILES = f'-DPILOTFISH_EMULATED_TILES="{SOURCES / "emulated_tiles.h"}"'
#: Compiler and emulator of other machines, from Debian's packages of these names.
CROSS = {"aarch64": ("aarch64-linux-gnu-g++", "qemu-aarch64")}


def program(source: str, *flags: str, compiler: str = "c++") -> Path:
    """Of a file of `SOURCES`, compiled once, as the kernels are. AssertionError with what the compiler says."""
    command = [compiler, *native._FLAGS, *flags, f"-I{native._SOURCES}", str(SOURCES / source), "-pthread"]
    files = sorted((*SOURCES.iterdir(), *native._SOURCES.glob("*.h")))
    digest = hashlib.sha256("\0".join((*command, *(path.read_text() for path in files))).encode()).hexdigest()[:16]

    def compiled(made: Path) -> None:
        done = subprocess.run([*command, "-o", made], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    return made_once(cache_folder("programs") / digest / source.removesuffix(".cpp"), compiled)


def compiled(*flags: str, compiler: str = "c++") -> Path:
    return program("check.cpp", *WARNINGS, *flags, compiler=compiler)


def check(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert done.stdout.endswith(" 0 failures\n")


#: In the suite the set after AVX-512's; the best is that of `test_kernels`, and tiles are emulated below.
ANOTHER = [name for name in others() if name == "avx2"] or usable()[-1:]


@pytest.mark.parametrize("name", sized(ANOTHER, usable()))
def test_the_kernels_without_torch_are_right_on(name: str) -> None:
    check(compiled(*native._flags()[name], sized("-O1", "-O3")))


LACKING = [name for name in native._flags() if name not in usable()]


@pytest.mark.parametrize("name", sized(LACKING[:1], LACKING))
def test_the_kernels_compile_for_what_this_processor_lacks(name: str) -> None:
    compiled(*native._flags()[name], sized("-O0", "-O3"))


@in_soak
def test_amx_is_right_with_emulated_tiles() -> None:
    check(compiled(EMULATED_TILES))


@pytest.mark.parametrize("machine", CROSS)
@in_soak
def test_the_kernels_are_right_on_another_machine(machine: str) -> None:
    compiler, emulator = CROSS[machine]
    for tool in (compiler, emulator):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    for flags in native.INSTRUCTION_SETS[machine].values():
        check(emulator, compiled("-static", *flags, compiler=compiler))


def test_the_best_that_the_processor_has_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.FORCED, raising=False)
    assert native.instruction_set() == usable()[0]
    monkeypatch.setattr(native, "_has", lambda name: name not in ("amx", "avx512_bf16", "avx512"))
    assert native.instruction_set() in ("avx2", "neon", "portable")
    digests = set()
    for name in native._flags():
        monkeypatch.setattr(native, "_has", lambda _: True)
        monkeypatch.setenv(native.FORCED, name)
        assert native.instruction_set() == name
        digests.add(native.build_digest())
    assert len(digests) == len(native._flags())


@pytest.mark.parametrize("name", ["sse9", "amx"])
def test_an_instruction_set_that_the_processor_lacks_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_has", lambda name: name == "portable")
    monkeypatch.setattr(native, "_flags", lambda: native.INSTRUCTION_SETS["x86_64"])
    monkeypatch.setenv(native.FORCED, name)
    with pytest.raises(ParameterError, match=rf"PILOTFISH_ISA: '{name}' is not allowed; expected one of portable on"):
        native.instruction_set()


def test_torch_sees_the_same_in_this_processor() -> None:
    seen = {
        "amx": torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx(),
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "avx512": torch.cpu._is_avx512_supported(),
        "avx2": torch.cpu._is_avx2_supported(),
    }
    assert {name: native._has(name) for name in seen} == seen


# -- the team of threads that computes kernels (src/pilotfish/model/cpu/kernels/team.h)

SANITIZED = ["-fsanitize=thread", "-g", "-O1"]


def run(program: Path, regions: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, str(regions)], capture_output=True, text=True, check=False)


def test_every_chunk_is_done_once_and_seen_by_the_next_phase() -> None:
    regions = sized(1000, 5000)
    done = run(program("stress.cpp"), regions)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"{regions} regions, 0 wrong\n"


@in_soak
def test_no_two_threads_meet_without_order() -> None:
    try:
        stress = program("stress.cpp", *SANITIZED)
    except AssertionError as error:
        if "cannot find" in str(error) and "tsan" in str(error):
            pytest.skip("the compiler has no ThreadSanitizer")
        raise
    done = run(stress, 300)
    assert done.returncode == 0, done.stdout + done.stderr[:3000]
