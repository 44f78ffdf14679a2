"""An MTP module held to transformers' own, of a GLM with dense layers."""

from typing import Any

import torch
from recurrent_formulas import FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, Drafted, executor_of, free_slots, logits
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMLP

from pilotfish.model.heads.families.recurrent import RecurrentHead
from pilotfish.model.heads.spec import FINAL, Decoder, HeadFiles, HeadSpec, Projection

PROMPT = 11
STEPS = 4


def glm_with_mtp() -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = Glm4MoeConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=1,
        first_k_dense_replace=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        use_qk_norm=True,
        attention_bias=True,
        initializer_range=0.2,
        max_position_embeddings=256,
        num_nextn_predict_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    )
    target = Glm4MoeForCausalLM(config).eval()
    mtp = MtpModel(target, num_mtp_layers=1).eval()
    mtp.layers[0].mtp_block.mlp = Glm4MoeMLP(config)  # its own are experts
    for name, weight in (*target.named_parameters(), *mtp.named_parameters()):
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(weight, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return target, mtp


def files_of(target: Any, mtp: Any) -> HeadFiles:
    """Under the names that the tensors have here."""
    decoder = Decoder(
        1,
        HIDDEN,
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        FFN,
        eps=target.config.rms_norm_eps,
        attention_bias=True,
        qk_norm=True,
        rope=dict(target.config.rope_parameters),
        context=256,
    )
    head = RecurrentHead(Projection((FINAL,), HIDDEN, fc=False), decoder, "joined", recycles_normed=True)
    own = {
        "mtp_block.": "layers.0.",
        "enorm.": "embed_norm.",
        "hnorm.": "hidden_norm.",
        "eh_proj.": "input_proj.",
        "post_norm.": "norm.",
    }
    tensors = {"embed_tokens.weight": mtp.embed_tokens.weight, "lm_head.weight": mtp.shared_head.weight}
    for name, weight in mtp.layers[0].named_parameters():
        old = next(prefix for prefix in own if name.startswith(prefix))
        tensors[name.replace(old, own[old], 1)] = weight
    spec = HeadSpec(head, "mtp", "transformers", HIDDEN, 1, VOCAB)
    return HeadFiles(spec, {name: weight.detach() for name, weight in tensors.items()}, None, "")


@torch.inference_mode()
def test_logits_are_those_of_transformers_own_module() -> None:
    target, mtp = glm_with_mtp()
    files = files_of(target, mtp)
    for eager in (False, True):
        executor, sequence = executor_of(files, eager=eager), Drafted.random(PROMPT, free_slots())
        tokens = torch.tensor([sequence.tokens])
        states = target.model(tokens).last_hidden_state[:, :-1]
        sequence.features[: PROMPT - 1] = states[0].numpy()
        found, cache, path = [logits(executor, sequence.chunk())], MtpCache(), list[int]()
        rows, positions, expected = tokens[:, 1:], torch.arange(1, PROMPT)[None], []
        for _ in range(STEPS):
            states = mtp.forward_layer(0, states, positions, cache, input_ids=rows)
            expected.append(mtp._project_to_logits(states[:, -1]))
            path.append(int(expected[-1].argmax()))
            found.append(logits(executor, sequence.level([tuple(path)])))
            states, rows, positions = states[:, -1:], torch.tensor([path[-1:]]), positions[:, -1:] + 1
        torch.testing.assert_close(torch.cat(found[:STEPS]), torch.cat(expected), rtol=0, atol=1e-4)
