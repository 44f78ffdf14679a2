"""Text that the target itself writes: continuations of corpus prefixes, sampled in batches."""

import numpy as np
import torch
from rich.progress import Progress
from transformers import LlamaForCausalLM

from pilotfish.train.corpus import Tokens

PROMPT = 64  # corpus tokens before each continuation
BATCH = 64


@torch.no_grad()
def sample_text(
    target: LlamaForCausalLM, tokens: Tokens, length: int, total: int, seed: int, progress: Progress
) -> Tokens:
    """About `total` tokens [tokens]: rows of `length` tokens, prompts included, end to end."""
    target.set_attn_implementation("sdpa")
    target.eval()
    torch.manual_seed(seed)
    generator = np.random.default_rng((seed, 2))
    rows: list[Tokens] = []
    batches = -(-total // (length * BATCH))
    for _ in progress.track(range(batches), description="sampling from the target"):
        starts = generator.integers(len(tokens) - PROMPT, size=BATCH)
        prompts = np.stack([tokens[start : start + PROMPT] for start in starts]).astype(np.int64)
        rows.append(continue_prompts(target, torch.from_numpy(prompts), length - PROMPT, 1.0))
    return np.concatenate(rows).reshape(-1)


def continue_prompts(target: LlamaForCausalLM, prompts: torch.Tensor, count: int, temperature: float) -> Tokens:
    """Prompts [rows, length] with `count` tokens sampled behind each: [rows, length + count].

    Documents that end are followed by another, as in the corpus, so every row comes out full.
    """
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    prompts = prompts.to(target.device)
    written = target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=count,
        min_new_tokens=0,
        eos_token_id=[],
        **(sampling if temperature else {"do_sample": False}),
    )
    result: Tokens = written.cpu().numpy().astype(np.uint16)
    return result
