"""Whether a row has the same bits whatever shares its forward: seen at start, on devices that nobody may have tried."""

import logging
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from pilotfish.core.scheduling.executor import NO_NODES, SequenceRows
from pilotfish.model.executor import TorchExecutor

logger = logging.getLogger(__name__)

#: Rows among which a row is compared with itself alone, itself included: they choose other tiles and other kernels.
COMPANY = (2, 16, 64, 256, 512)
PROMPT = 32  # tokens before it


def note_company(executor: TorchExecutor) -> bool:
    """Whether all are equal, and one line in the log."""
    if unequal := unequal_companies(executor):
        found = "a row has other bits among %s rows than alone on this device: outputs may differ by speculation"
        logger.warning(found, ", ".join(map(str, unequal)))
    else:
        logger.info("equal bits: a row alone and among up to %d rows", max(COMPANY))
    return not unequal


def unequal_companies(executor: TorchExecutor) -> list[int]:
    """Numbers of rows, of `COMPANY` and `PROMPT` + 1, that a row's logits are not the same among as alone. Overwrites
    the first slots: only while idle."""
    slots, vocab = np.arange(executor.num_slots, dtype=np.int32), executor.vocab_size
    tokens = [1 + 7 * place % (vocab - 1) for place in range(PROMPT + 1)]
    prompt, row = slots[: PROMPT + 1], SequenceRows(PROMPT, tokens[PROMPT:], slots[: PROMPT + 1], NO_NODES, kept=[0])

    def together() -> Iterator[tuple[int, Tensor]]:
        yield PROMPT + 1, executor.forward([SequenceRows(0, tokens, prompt, NO_NODES, kept=[PROMPT])])
        if (reach := min(executor.context, executor.num_slots)) > PROMPT + 1:
            far = SequenceRows(reach - 1, tokens[:1], slots[:reach], NO_NODES, kept=())
            yield 2, executor.forward([far, row])[-1:]
        for count in COMPANY:
            beside = slots[PROMPT + 1 :][: min(count - 1, executor.context)]
            every = range(len(beside))
            others = SequenceRows(0, [place % vocab for place in every], beside, NO_NODES, every)
            yield count, executor.forward([others, row] if len(beside) else [row])[-1:]

    executor.forward([SequenceRows(0, tokens[:PROMPT], prompt[:PROMPT], NO_NODES, kept=())])
    alone = executor.forward([row])
    return [count for count, logits in together() if not torch.equal(logits, alone)]
