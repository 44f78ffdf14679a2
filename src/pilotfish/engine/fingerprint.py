"""Which targets may go on with each other's outputs: those whose tokens follow from the same.

A token is a function of what the fingerprint stands for, and of prompt, parameters and seed. Weights count with every
byte. To read them takes a second a GiB or so: that is done beside the start, and beside the first steps if it lasts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from importlib import metadata
from pathlib import Path

from pilotfish.core.drafting.vocabulary import text_digest
from pilotfish.engine.engine import Engine
from pilotfish.engine.kv_identity import FEATURES, file_digest, kv_facts
from pilotfish.model.loading.tensors import weight_files

logger = logging.getLogger(__name__)

#: The lowest priority: what other threads leave.
NICE = 19


def all_but_weights(engine: Engine) -> dict[str, str]:
    """What the fingerprint stands for beside the weights, as facts."""
    config, model = engine.config, engine.model
    facts = {
        **{name: fact for name, fact in kv_facts(config, engine.executor).items() if name != FEATURES},
        "tokenizer": text_digest(engine.tokenizer),
        "ends": " ".join(map(str, sorted(model.generation.eos_ids))),
        "context": str(model.config.context),
        **{name: metadata.version(name) for name in ("tokenizers", "llguidance")},  # stop strings and grammars
    }
    if model.device.type == "cpu" and not model.native:
        facts["threads"] = str(config.num_threads)  # by which torch divides its sums
    return facts


def fingerprint(facts: dict[str, str], weights: Sequence[str]) -> str:
    """`weights` are digests of their files."""
    return hashlib.sha256(json.dumps([facts, list(weights)], sort_keys=True).encode()).hexdigest()


def read_weights(directory: Path) -> Future[list[str]]:
    """The digests of a model's weight files, read by a thread for which a process that ends does not wait."""
    digests = Future[list[str]]()

    def read() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        try:
            digests.set_result([file_digest(path) for path in weight_files(directory)])
        except Exception as error:
            digests.set_exception(error)

    threading.Thread(target=read, name="weights' digests", daemon=True).start()
    return digests
