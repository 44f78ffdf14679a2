"""transformers as its user has it: its own cache and attention, its defaults of assisted generation."""

import time
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from pilotfish.cli.bench.compare.peer import LOOKUP, PLAIN, Generated, LoadedPeer, PeerSetup, Question
from pilotfish.config.text import config_of
from pilotfish.model.loading.loader import DTYPES

ASSISTED = "assisted"
#: Tokens, as in transformers' documentation.
LOOKUP_TOKENS = 10


def load(text: str) -> LoadedPeer:
    """`text` is a PeerSetup of Hugging Face directories."""
    setup = config_of(text, PeerSetup)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(setup.threads)
    target = partial(_generate, _model(setup.target, setup))
    ways = {PLAIN: target, LOOKUP: partial(target, prompt_lookup_num_tokens=LOOKUP_TOKENS)}
    if setup.draft is not None:
        ways[ASSISTED] = partial(target, assistant_model=_model(setup.draft, setup))
    return LoadedPeer(ways, setup.dtype, sampling=ways.keys() - {LOOKUP})


def _model(directory: str, setup: PeerSetup) -> Any:
    """Without an end of sequence: all generate as much."""
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[setup.dtype]).eval()
    module.generation_config.eos_token_id = None
    return module


def _generate(model: Any, question: Question, **options: Any) -> Generated:
    """At a temperature the plain distribution, without the filters that `generate` has by default."""
    torch.manual_seed(question.seed)
    sampling = {"do_sample": True, "temperature": question.temperature, "top_k": 0, "top_p": 1.0}
    chosen = {**(sampling if question.temperature else {"do_sample": False}), **options}
    began = time.perf_counter()
    ids = torch.tensor([question.prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=question.max_tokens, **chosen)
    return Generated(seconds=time.perf_counter() - began, tokens=output[0, ids.shape[1] :].tolist())
