"""The Triton kernels compiled for GPUs that this machine need not have. The compiler may refuse what the interpreter
accepts, and a binary for each width could change the order of sums."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from sizes import sized

pytest.importorskip("triton")

from pilotfish.config.cache import cache_folder
from pilotfish.model.cuda import triton_attention

#: Kernels' binaries by what is launched: one, but where a tile's width follows the rows.
BINARIES = {
    "attention": {"attend_parts": 1, "join_parts_in_order": 1, "write_kv": 1},
    "attention over 8 bits": {"attend_parts": 1, "join_parts_in_order": 1},
    "experts": {"expert_rows": 4, "plan_tiles": 2},  # of both products, by the width of their tiles
    "between products": {
        "attend_parts": 1,
        "join_parts_in_order": 1,
        "few_rows": 2,
        "many_rows": 2,
        "write_heads": 2,
        "gate_silu": 2,
    },
    "products": {"few_rows": 2, "join_parts": 1, "many_rows": 1},
    "products with fp8": {"few_rows": 2, "join_parts": 1, "many_rows": 1, "quantize_rows": 1},
    "products in float32": {"few_rows": 2, "join_parts": 1},
    "norms and rotations": {"rms_norm": 1, "rotate_heads": 1},
    "drawing": {
        "tops_of_blocks": 2,
        "narrow_border": 4,
        "best_of_block": 2,  # of 32 and 64 bits
        "best_of_all": 1,
        "mask_rows": 3,
        "add_to_tokens": 1,
        "lower_seen": 1,
        "lower_fresh": 1,
    },
}
CARDS = ("Ampere", "Hopper", "CDNA3")
#: Cases of `compile_triton`: every kernel for every card, in bfloat16 and in what only one of them multiplies.
EVERY = ("attention, bfloat16", "products", "norms and rotations", "drawing", "experts", "between products")
CASES = [f"{one} on {card}" for card in CARDS for one in EVERY]
CASES += ["attention, bfloat16 over fp8 on Hopper", "products with fp8 on Hopper"]
OTHERS = (
    *("attention, float32", "attention, float32 over int8", "attention, bfloat16 over int8"),
    *("products with int8", "products in float16", "products in float32"),
)
OTHER_CASES = [f"{one} on {card}" for card in CARDS for one in OTHERS]
MULTIPLYING = ("attend_parts", "few_rows", "many_rows", "expert_rows")
UNITS = {"Ampere": "mma.sync", "Hopper": "wgmma.mma", "CDNA3": "mfma"}
#: Bytes that every card of the kind has for a program.
SHARED = {"Ampere": 99 * 1024, "Hopper": 99 * 1024, "CDNA3": 64 * 1024}


def test_kernels_compile_for_cards_that_are_not_here() -> None:
    cases = sized(CASES, CASES + OTHER_CASES)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache_folder("triton"))}
    source = Path(triton_attention.__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    script = Path(__file__).with_name("compile_triton.py")
    result = subprocess.run([sys.executable, script, *cases], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for case, binaries in json.loads(result.stdout).items():
        launched, card = case.rsplit(" on ", 1)
        kind = launched.partition(",")[0].removesuffix(" with int8").removesuffix(" in float16")
        kind = "attention over 8 bits" if " over " in launched else kind
        assert Counter(binary["kernel"] for binary in binaries) == BINARIES[kind], case
        for binary in binaries:
            of_case = f"{case}: {binary}"
            assert not binary["tf32"], of_case
            fused = binary["fused"] and card != "CDNA3"  # where a division is made of them
            assert not (fused and binary["kernel"].startswith("lower_")), of_case
            assert not binary["spilled_bytes"] or "float32" in case, of_case
            assert binary["shared_bytes"] <= SHARED[card], of_case
            exact = "float32" in case and card != "CDNA3"  # whose unit multiplies float32 too
            multiplies = binary["kernel"] in MULTIPLYING and not exact
            assert binary["matrix_unit"] == ([UNITS[card]] if multiplies else []), of_case
