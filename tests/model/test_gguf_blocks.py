"""Blocks of GGUF's types against ggml's own reading of them."""

import gguf
import numpy as np
import pytest
import torch

from pilotfish.model.loading.gguf_blocks import BLOCKS, grouped_weight

#: Where a block's factors of float16 lie.
FACTORS = {"Q6_K": [208], "Q4_0": [0], "Q5_0": [0], "Q8_0": [0]}


def random_rows(kind: str, outputs: int, blocks: int, scale: float = 1.0) -> np.ndarray:
    """Any codes; factors that are finite."""
    rng, size = np.random.default_rng(0), BLOCKS[kind].size
    rows = rng.integers(0, 256, (outputs * blocks, size), dtype=np.uint8)
    for at in FACTORS.get(kind, [0, 2]):
        rows[:, at : at + 2] = (scale * rng.normal(size=(len(rows), 1))).astype(np.float16).view(np.uint8)
    return rows.reshape(outputs, -1)


@pytest.mark.parametrize("kind", BLOCKS)
def test_values_are_ggmls_to_the_last_bit(kind: str) -> None:
    rows = random_rows(kind, 12, 3)
    weight = grouped_weight(kind, rows, torch.float32)
    expected = gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(weight.dequantized().numpy(), expected) and weight.shape == (12, 3 * BLOCKS[kind].inputs)


def test_sizes_are_ggmls() -> None:
    for kind, block in BLOCKS.items():
        assert (block.inputs, block.size) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


def test_four_bits_stay_four_bits() -> None:
    """And factors as the file has them, where float16 holds them."""
    for kind, bits in {"Q4_0": 4.5, "Q4_1": 5, "Q4_K": 6, "Q8_0": 8.5, "Q6_K": 10}.items():
        weight = grouped_weight(kind, random_rows(kind, 8, 2), torch.float32)
        assert 8 * weight.nbytes / weight.shape.numel() == bits
