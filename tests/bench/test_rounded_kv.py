"""The bench of KV in int8, on tiny models; no test says how fast."""

from itertools import product

import pytest
import torch
from conftest import Measure

from pilotfish.bench.rounded_kv import KV_DTYPES, logit_figures, run_kv


def test_kv(measure: Measure) -> None:
    given = {"max_tokens": 8, "contexts": "20,90", "repeats": 2, "threads": 1}
    results = measure(run_kv, "kv", **given).results
    assert [(row["model"], row["kv"]) for row in results["models"]] == list(product(("target", "draft"), KV_DTYPES))
    for plain, int8 in (results["models"][:2], results["models"][2:]):
        assert (plain["largest_difference"], plain["agreement"]) == (0, 1)
        assert 0 < int8["mean_difference"] < int8["largest_difference"] and int8["agreement"] > 0.5
        assert plain["loss"] != int8["loss"] == pytest.approx(plain["loss"], abs=0.1)
        assert int8["slots_per_gib"] / plain["slots_per_gib"] == pytest.approx(32 * 4 / (32 + 4), rel=1e-5)
    assert [row["equal_outputs"] for row in results["acceptance"] if row["kv"] == "auto"] == [1.0, 1.0]
    assert all(1 <= row["tokens_per_verify_step"] <= 8 for row in results["acceptance"])
    assert [(row["context"], row["kv"]) for row in results["decoding"]] == list(product((20, 90), KV_DTYPES))
    assert all(row["tokens_per_second"].minimum > 0 for row in results["decoding"])
    assert results["decoding"][0]["over_plain"].median == 1


def test_figures_of_logits_are_what_they_are_called() -> None:
    expected, following = torch.tensor([[0.0, 1.0, 3.0], [2.0, 1.0, 0.0]]), torch.tensor([2, 0])
    own = expected + torch.tensor([[0.5, 0.0, -0.25], [-1.5, 0.0, 0.0]])
    most, mean, same, loss = logit_figures(own, expected, following).unbind(dim=1)
    assert most.tolist() == [0.5, 1.5] and mean.tolist() == [0.25, 0.5] and same.tolist() == [1, 0]
    assert torch.allclose(loss, -own.double().log_softmax(dim=-1)[[0, 1], following])
