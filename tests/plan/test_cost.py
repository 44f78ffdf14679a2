"""The cost model against published parameter counts and rates. Fitted rates test the sums, the others the model."""

from __future__ import annotations

from statistics import mean

import pytest

from pilotfish.plan.cost import DEVICES, LAYER, MODELS, DenseModel, devices_needed, step_seconds

FP8 = 1.0
#: A layer's seconds in a research engine in Python (arXiv 2603.03251), fitted to 70B on four H100 in bfloat16, batch 1:
#: 54 tokens/s.
SSD_ENGINE = 67e-6
#: As published, billions.
PARAMETERS = {
    "llama-3.2-1b": 1.24,
    "llama-3.2-3b": 3.21,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6,
    "llama-3.1-405b": 405.9,
    "qwen2.5-0.5b": 0.49,
    "qwen2.5-7b": 7.62,
    "qwen2.5-72b": 72.7,
    "qwen3-0.6b": 0.6,
    "qwen3-8b": 8.2,
    "qwen3-32b": 32.8,
}
KV_BYTES = {"llama-3.2-1b": 32768, "llama-3.1-70b": 327680, "llama-3.1-405b": 516096, "qwen2.5-0.5b": 12288}
#: EAGLE-3 (arXiv 2503.01840), Llama-3.1-8B on one H100, chains of 3: speed-up by batch.
SPEEDUPS = {2: 1.81, 4: 1.82, 8: 1.62, 16: 1.48, 24: 1.39, 32: 1.32, 48: 1.38, 56: 1.34, 64: 1.38}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_published(name: str) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(PARAMETERS[name], rel=0.012)


@pytest.mark.parametrize("name", KV_BYTES)
def test_kv_is_that_of_the_configuration(name: str) -> None:
    assert MODELS[name].kv_values * 2 == KV_BYTES[name]


@pytest.mark.parametrize(
    ("model", "device", "count", "weight_bytes", "layer", "published", "tolerance"),
    [
        ("llama-3.1-70b", "h200", 1, FP8, LAYER, 51.14, 0.01),  # fitted
        ("llama-3.1-405b", "h200", 4, FP8, LAYER, 33.46, 0.01),  # fitted
        ("llama-3.1-70b", "h100", 4, 2.0, SSD_ENGINE, 54.0, 0.01),  # fitted
        ("qwen3-32b", "h100", 4, 2.0, SSD_ENGINE, 89.0, 0.06),
        ("llama-3.1-8b", "h100", 1, 2.0, LAYER, 158.34, 0.03),  # measured in SGLang
    ],
)
def test_decoding_is_as_fast_as_published(
    model: str, device: str, count: int, weight_bytes: float, layer: float, published: float, tolerance: float
) -> None:
    seconds = step_seconds(MODELS[model], DEVICES[device], count, 1, weight_bytes=weight_bytes, layer=layer)
    assert 1 / seconds == pytest.approx(published, rel=tolerance)


def test_speedups_fall_with_the_batch_as_published() -> None:
    """Tokens a round are fitted at batch 2; the head's 60 us and the round's 0.5 ms are assumed."""
    target, head = MODELS["llama-3.1-8b"], DenseModel(1, 4096, 32, 8, 128, 14336, 32000)

    def seconds(model: DenseModel, batch: int, rows: int) -> float:
        return step_seconds(model, DEVICES["h100"], 1, batch * rows, 700 * batch)

    def speedup(batch: int) -> float:
        round_seconds = seconds(target, batch, 4) + 3 * (seconds(head, batch, 1) + 60e-6) + 0.5e-3
        return seconds(target, batch, 1) / round_seconds

    tokens = SPEEDUPS[2] / speedup(2)
    errors = [abs(tokens * speedup(batch) / SPEEDUPS[batch] - 1) for batch in SPEEDUPS if batch > 2]
    assert mean(errors) < 0.08 and max(errors) < 0.17


def test_one_step_by_hand() -> None:
    """Weights 2 x 69.50e9 bytes, products 2 x 69.50e9 x 16, KV 2 x 1000 x 327680 bytes; 80 layers."""
    seconds = step_seconds(MODELS["llama-3.1-70b"], DEVICES["h200"], 4, 16, 2 * 1000)
    expected = 139.004e9 / (4 * 4.08e12) + 139.004e9 * 16 / (4 * 593.4e12) + 655.36e6 / (4 * 2.88e12) + 80 * 40e-6
    assert seconds == pytest.approx(expected, rel=1e-5)


def test_eight_bit_weights_count_for_what_the_device_can_do() -> None:
    model, many = MODELS["llama-3.1-8b"], 1 << 16
    h100, a100 = ([step_seconds(model, DEVICES[d], 1, many, weight_bytes=w) for w in (1, 2)] for d in ("h100", "a100"))
    assert h100[0] < 0.51 * h100[1]
    assert 0.99 * a100[1] < a100[0] < a100[1]


def test_weights_need_devices() -> None:
    assert devices_needed(MODELS["llama-3.1-70b"], DEVICES["h100"]) == 2
    assert devices_needed(MODELS["llama-3.2-1b"], DEVICES["tpu-v5e"]) == 1


def test_names_are_written_in_lower_case() -> None:
    """Look-ups are in lower case."""
    assert all(name == name.lower() for name in (*MODELS, *DEVICES))
