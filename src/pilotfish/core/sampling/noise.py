"""The shared noise: Gumbel(0, 1) variates that are a pure function of (seed, position, token).

Target and draft evaluate the same function, so a draft can guess what the target will *sample* (Daliri, Musco and
Suresh, ISIT 2025, arXiv 2408.07978). The definition is part of the draft protocol:

    words = Philox4x32-10(key = (seed low, seed high), counter = (t low, t high, v >> 2, 0))
    k     = words[v & 3]
    u     = (k + 1/2) / 2**32                      in float64, so 0 < u < 1
    g     = -log(-log(u))                          so -3.2 < g < 22.9

Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. `model/sampling.py` and
`model/cpu/kernels/sampling.h` are pinned to this reference by tests.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

SEED_LIMIT = 1 << 64
#: Bits of the seeds that are drawn or derived here: a JSON parser that reads numbers as doubles keeps them.
DRAWN_SEED_BITS = 53

_LOW = 0xFFFFFFFF
_WEYL = (0x9E3779B9, 0xBB67AE85)


def split(word: Any) -> tuple[Any, Any]:
    return word & _LOW, (word >> 32) & _LOW


def philox(key: tuple[Any, Any], counter: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-10 of 32-bit words: integers, uint64 arrays or int64 tensors, whose products wrap at 64 bits."""
    (key0, key1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):  # without calls: one token's noise is asked for often
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((product1 >> 32) & _LOW) ^ c1 ^ key0, product1 & _LOW
        c2, c3 = ((product0 >> 32) & _LOW) ^ c3 ^ key1, product0 & _LOW
        key0, key1 = (key0 + _WEYL[0]) & _LOW, (key1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def gumbel(seed: int, position: int, vocab_size: int) -> NDArray[np.float64]:
    """g(seed, position, v) for v in 0 .. vocab_size - 1. float64 [vocab_size]."""
    block = np.arange((vocab_size + 3) // 4, dtype=np.uint64)
    words = philox(split(seed), (*split(position), block, 0))
    k = np.stack(words, axis=1).reshape(-1)[:vocab_size]
    return np.asarray(-np.log(-np.log((k + 0.5) / 2.0**32)), dtype=np.float64)


def gumbel_of(seed: int, position: int, token: int) -> float:
    """One token's g without arrays: 5 us where `gumbel` takes 70."""
    words = philox(split(seed), (*split(position), token >> 2, 0))
    return -math.log(-math.log((words[token & 3] + 0.5) / 2.0**32))


def sample_seed(seed: int, index: int) -> int:
    """The seed of a request's index-th sample. H(seed, 0) = seed; others are below 2**53. Counters of derived seeds
    carry 1 in their last word and those of noise 0, so they never meet."""
    if index == 0:
        return seed
    low, high, _, _ = philox(split(seed), (*split(index), 0, 1))
    return int(low | high << 32) & ((1 << DRAWN_SEED_BITS) - 1)
