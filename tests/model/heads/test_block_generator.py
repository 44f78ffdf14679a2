"""A DFlash head gives what transformers' own generator of candidates gives, after prompts and commits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from block_heads import HIDDEN, VOCAB, block_head, executor_of, log_chances, sequenced
from recurrent_formulas import Drafted
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from pilotfish.model.heads.families.block import BlockHead
from pilotfish.model.heads.spec import HeadFiles

assistants = pytest.importorskip("transformers.models.muse_glimmer_assistant")
generation = pytest.importorskip("transformers.generation.candidate_generator")
LAYERS = [0, 2]  # whose outputs are the features' parts


def assistant_of(files: HeadFiles, window: int) -> Any:
    """transformers' module with a head's tensors, and a random projection. It sees one position further back than we
    count: `window` - 1."""
    head = files.spec.head
    assert isinstance(head, BlockHead)
    d = head.decoder
    config = assistants.MuseGlimmerAssistantConfig(
        hidden_size=d.hidden,
        intermediate_size=d.ffn,
        num_hidden_layers=d.layers,
        num_attention_heads=d.heads,
        num_key_value_heads=d.kv_heads,
        head_dim=d.head_dim,
        rms_norm_eps=d.eps,
        rope_parameters=dict(d.rope),
        max_position_embeddings=d.context,
        sliding_window=window - 1,
        layer_types=["sliding_attention" if window else "full_attention"] * d.layers,
        block_size=head.block,
        mask_token_id=head.mask_token,
        target_layer_ids=LAYERS,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = assistants.MuseGlimmerAssistantModel(config).eval()
    taken = {name: x for name, x in files.tensors.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    own = {name for name in model.state_dict() if name.startswith("encoder.")}
    left = model.load_state_dict(taken, strict=False)
    assert not left.unexpected_keys and set(left.missing_keys) == own
    return model


def target() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        initializer_range=0.3,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("window", [0, 9])
@torch.inference_mode()
def test_generator(window: int) -> None:
    files, model = block_head("dflash", window=window), target()
    block = 6
    assistant = assistant_of(files, window)
    embedding, head = torch.nn.Embedding(VOCAB, HIDDEN), torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    embedding.weight, head.weight = (
        torch.nn.Parameter(files.tensors[name]) for name in ("embed_tokens.weight", "lm_head.weight")
    )
    limits = SimpleNamespace(max_length=1000, do_sample=False)
    generator = generation.DFlashTokenCandidateGenerator(assistant, embedding, head, limits)
    executor, sequence = executor_of(files), sequenced(13, range(100, 200), seed=1)
    for committed in ([], [7, 3, 11], [2], [5, 5, 1, 8, 0]):
        sequence.commit(committed)
        states = model(torch.tensor([sequence.tokens]), output_hidden_states=True).hidden_states
        sequence.features = assistant.encoder(torch.cat([states[i + 1] for i in LAYERS], dim=-1))[0].numpy()
        theirs = candidates(generator, sequence, states, len(committed) - 1)
        ours = [log_chances(executor, [sequence.chunk()])]
        ours.append(log_chances(executor, [sequence.level([(1,) * depth for depth in range(1, block - 1)])]))
        torch.testing.assert_close(torch.cat(ours), theirs.double().log_softmax(dim=-1), atol=1e-4, rtol=0.0)


def candidates(generator: Any, sequence: Drafted, states: tuple[Tensor, ...], accepted: int) -> Tensor:
    """Logits [block - 1, VOCAB]. It is told the states of what the target ran last: the prompt, then the root before
    and the accepted tokens."""
    length = len(sequence.tokens)
    ran = slice(max(len(sequence.slots) - 1, 0), length - 1)
    told = SimpleNamespace(hidden_states=[x[:, ran] for x in states])
    rows = {"position_ids": torch.arange(length)[None], "attention_mask": torch.ones(1, length, dtype=torch.long)}
    _, logits = generator.get_candidates(
        torch.tensor([sequence.tokens]), rows, told, is_first_iteration=False, n_last_matches=accepted
    )
    assert logits is not None
    logits_of_block: Tensor = logits[0]
    return logits_of_block
