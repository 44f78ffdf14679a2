"""Evidence: what it promises while nothing is wrong, how many readings must agree, what it takes noise to be."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from pilotfish.operate.guarding import change_detection

ONES = [1.0] * len(change_detection.ChangeDetector.SIZES)
EXCESSES = st.floats(-1e9, 1e9)


def detector_after(*excesses: float) -> change_detection.ChangeDetector:
    detector = change_detection.ChangeDetector()
    for excess in excesses:
        detector.observe(excess, ONES)
    return detector


@pytest.mark.parametrize("noise", ["gaussian", "uniform", "two values"])
def test_without_a_change_evidence_grows_by_one_a_reading_at_most_on_average(noise: str) -> None:
    """By which the mean time to a false alarm is LIMIT readings at least, whatever evidence there is already."""
    part = (np.arange(4_000) + 0.5) / 4_000  # of all readings are below these, whose variance is 1:
    readings = {"gaussian": norm.ppf(part), "uniform": np.sqrt(12) * (part - 0.5), "two values": np.sign(part - 0.5)}
    for before in ([], [2.0, 2.0, 1.0]):
        evidence = [detector_after(*before, float(reading)).evidence for reading in readings[noise]]
        assert np.mean(evidence) <= detector_after(*before).evidence + 1 + 1e-6


@given(EXCESSES, EXCESSES)
def test_two_readings_never_decide(first: float, second: float) -> None:
    assert not detector_after(first, second).is_detected


def test_as_many_as_must_agree_decide() -> None:
    assert detector_after(*[1e9] * change_detection.AGREEING).is_detected


def test_evidence_falls_again_however_long_it_stood() -> None:
    detector = detector_after(*[9.0] * 10_000)
    assert detector.is_detected
    for _ in range(20):
        detector.observe(-1.0, ONES)
    assert not detector.is_detected


@pytest.mark.parametrize("variance", [0.01, 0.3, 4.0])
def test_noise_that_does_not_persist_has_one_variance(variance: float) -> None:
    noise, random = change_detection.NoiseEstimate(), np.random.default_rng(2)
    for scale in random.uniform(0.01, 0.1, 3000):
        noise.observe(float(random.normal(5.0, math.sqrt(variance * scale))), float(scale))
    assert noise.variances[0] == pytest.approx(variance, rel=0.25, abs=0.02)
    assert noise.variances == sorted(noise.variances)
    assert noise.variances[-1] < 2.5 * noise.variances[0]


def test_noise_that_persists_is_more_in_longer_means() -> None:
    noise, random, value = change_detection.NoiseEstimate(), np.random.default_rng(3), 0.0
    for _ in range(3000):
        value = 0.8 * value + 0.6 * float(random.normal())
        noise.observe(value, 1.0)
    assert noise.variances[0] > 1.5  # of means of three, times three, where a reading's own is 1
    assert noise.variances[-1] > 2 * noise.variances[0]


@pytest.mark.parametrize(("mean", "is_above"), [(0.1, True), (0.0, False)])
def test_one_in_twenty_tests_errs_at_most(mean: float, is_above: bool) -> None:
    random, wrong = np.random.default_rng(6), 0
    for _ in range(400):
        test = change_detection.SequentialTest(0.05, 0.05)
        while test.is_above is None:
            test.observe(float(random.normal(mean, 0.15)), 0.15**2)
        wrong += test.is_above != is_above
    assert wrong <= 20


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_two_readings_never_decide_a_test(first: float, second: float) -> None:
    test = change_detection.SequentialTest(0.0, 1.0)
    for value in (first, second):
        test.observe(value, 1e-3)
    assert test.is_above is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_a_running_mean_is_the_mean_until_its_memory_is_full(values: list[float]) -> None:
    mean = change_detection.RunningMean(50)
    for value in values:
        mean.observe(value)
    assert mean.weight == len(values)
    assert mean.value == pytest.approx(sum(values) / len(values), rel=1e-9, abs=1e-6)
