"""A forward's rows: the same bits alone, in a tree, in a batch, at any thread count; and the logits of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sizes import paired, sized
from support import CONTEXT, KINDS, LATENT, PER_HEAD, VOCAB, WINDOW, native_model, random_tree, tiny_model
from transformers import AutoModelForCausalLM

from pilotfish.core.scheduling.executor import NO_NODES, NodeRows, SequenceRows
from pilotfish.core.trees.tree import EMPTY_TREE, ROOT, TokenTree
from pilotfish.model.batch import LIBRARY
from pilotfish.model.cpu.native import load_kernels
from pilotfish.model.cpu.native_modules import NativeKernels
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.experts import Mixture
from pilotfish.model.kernels import Kernels
from pilotfish.model.loading.loader import load_model

SLOTS = 3000
_SHAPES: list[dict[str, Any]] = [
    {"attention_bias": True},
    {"num_key_value_heads": 1},
    {"num_key_value_heads": 4},
    {"tie_word_embeddings": True},
]
OTHER_SHAPES = [(kind, shape) for kind in sized(("qwen3", "gemma2", "gpt_oss"), PER_HEAD) for shape in _SHAPES]
OTHER_SHAPES += [(kind, shape) for kind in LATENT for shape in (_SHAPES[0], _SHAPES[3], {"hidden_size": 96})]
ROPE = {"rope_theta": 1e4, "factor": 4.0}
#: Fields of single architectures, with other values than the tiny models have.
OTHER_FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"mlp_bias": True}),
    ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    ("llama", {"rope_parameters": {"rope_type": "linear", **ROPE}}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", **ROPE}}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": CONTEXT // 4, **ROPE}}),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "original_max_position_embeddings": 64,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                **ROPE,
            }
        },
    ),
    ("qwen3", {"use_sliding_window": False, "layer_types": ["full_attention"] * 2}),
    ("qwen3_moe", {"norm_topk_prob": True}),
    ("qwen3_moe", {"mlp_only_layers": [0], "num_experts_per_tok": 6}),
    ("mixtral", {"sliding_window": None, "num_experts_per_tok": 1}),
    ("phi3", {"sliding_window": None, "partial_rotary_factor": 1.0}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma2", {"layer_types": ["full_attention"] * 2}),
    ("gemma3_text", {"final_logit_softcapping": 2.0}),
    (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            }
        },
    ),
    ("gpt_oss", {"swiglu_limit": 0.5, "swiglu_alpha": 1.0, "num_experts_per_tok": 4}),
    ("gpt_oss", {"attention_bias": False, "layer_types": ["full_attention"] * 2}),
    ("deepseek_v2", {"q_lora_rank": 24, "kv_lora_rank": 64, "attention_bias": True, "mlp_bias": True}),
    ("deepseek_v2", {"n_routed_experts": 8, "n_group": 4, "topk_group": 1, "topk_method": "group_limited_greedy"}),
    ("deepseek_v2", {"qk_nope_head_dim": 24, "v_head_dim": 40, "routed_scaling_factor": 2.5}),
    ("deepseek_v2", {"first_k_dense_replace": 2}),
    ("deepseek_v2", {"rope_parameters": {"rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 0.5, **ROPE}}),
    ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False}),
    ("deepseek_v3", {"n_group": 1, "topk_group": 1, "n_routed_experts": 12, "num_experts_per_tok": 3}),  # as Kimi K2
]


class Bench:
    def __init__(self, directory: Path, dtype: torch.dtype, *, eager: bool = False, seed: int = 0) -> None:
        model = (
            load_model(directory, dtype, torch.device("cpu"), eager=True) if eager else native_model(directory, dtype)
        )
        assert model.native is not eager
        self.executor = TorchExecutor(model, SLOTS)
        self._slots = iter(np.random.default_rng(seed).permutation(SLOTS).tolist())

    def take(self, count: int) -> list[int]:
        return [next(self._slots) for _ in range(count)]

    def rows(self, tokens: list[int], tree: TokenTree, start: int = 0, prefix: list[int] | None = None) -> SequenceRows:
        """Tokens from `start` on, and all nodes of the tree."""
        slots = (prefix or []) + self.take(len(tokens) - len(prefix or []))
        nodes = NodeRows.of(tree, np.array(self.take(len(tree)), np.int32))
        return SequenceRows(start, tokens[start:], np.array(slots, np.int32), nodes, [len(tokens) - start - 1])

    def logits(self, *sequences: SequenceRows) -> torch.Tensor:
        return self.executor.forward(sequences)


@pytest.fixture(params=KINDS)
def directory(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> Path:
    return tiny_models[request.param]


#: Of architectures whose kernels differ, each in one of the types.
SOME = sized(("llama", "phi3", "gemma2", "gpt_oss"), tuple(KINDS))
IN_TYPES = pytest.mark.parametrize(
    ("directory", "dtype"), paired(SOME, [torch.bfloat16, torch.float32]), indirect=["directory"], ids=str
)


def test_heads_that_no_kernel_takes_run_without_kernels(tmp_path: Path) -> None:
    reference = tiny_model("phi3", head_dim=24)
    reference.save_pretrained(tmp_path)
    model = native_model(tmp_path)
    assert not model.native
    rows = SequenceRows(0, tokens_of(40), np.arange(40, dtype=np.int32), NO_NODES, kept=[39])
    with torch.inference_mode():
        expected = reference.eval()(torch.tensor([tokens_of(40)])).logits[0, -1]
    torch.testing.assert_close(TorchExecutor(model, SLOTS).forward([rows])[0], expected, rtol=0, atol=1e-4)


def test_no_product_is_left_to_a_library(directory: Path) -> None:
    left = [name for name, _ in native_model(directory).module.named_parameters()]
    assert [name.removeprefix("model.") for name in left] == ["embed_tokens.weight"]


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


@pytest.mark.parametrize("eager", sized([False], [False, True]))
@pytest.mark.parametrize(("kind", "options"), [*OTHER_FIELDS, *OTHER_SHAPES], ids=str)
def test_other_fields_are_honoured(tmp_path: Path, kind: str, options: dict[str, Any], eager: bool) -> None:
    reference, usual = tiny_model(kind, **options), tiny_model(kind)
    reference.save_pretrained(tmp_path)
    bench, tokens = Bench(tmp_path, torch.float32, eager=eager), tokens_of(3 * WINDOW)
    with torch.inference_mode():
        expected, other = (model.eval()(torch.tensor([tokens])).logits[0, -1] for model in (reference, usual))
    torch.testing.assert_close(bench.logits(bench.rows(tokens, EMPTY_TREE))[0], expected, rtol=0, atol=1e-4)
    usual_too = (kind, options) in OTHER_SHAPES or "dynamic" in str(options)  # of some kinds; within the context
    assert usual_too or (expected - other).abs().max() > 1e-2


@pytest.mark.parametrize("eager", sized([False], [False, True]))
def test_logits_are_those_of_transformers(directory: Path, eager: bool) -> None:
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    bench = Bench(directory, torch.float32, eager=eager)
    for length in sized((1, 65, 150), (1, 2, 63, 64, 65, 200)):
        tokens = tokens_of(length, length)
        tree = random_tree(np.random.default_rng(length), VOCAB, sized(2, 6))
        got = bench.logits(bench.rows(tokens, tree))
        for row, node in enumerate((ROOT, *range(len(tree)))):
            ids = torch.tensor([tokens + tree.path_tokens(node)])
            with torch.inference_mode():
                expected = reference(ids).logits[0, -1]
            torch.testing.assert_close(got[row], expected, rtol=0, atol=1e-4)


@IN_TYPES
def test_a_node_has_the_bits_that_it_has_alone(directory: Path, dtype: torch.dtype) -> None:
    bench = Bench(directory, dtype)
    tokens, tree = tokens_of(70), random_tree(np.random.default_rng(1), VOCAB, sized(4, 15))
    together = bench.logits(bench.rows(tokens, tree))
    for node in range(len(tree)):
        whole = tokens + tree.path_tokens(node)
        prefix = bench.take(len(tokens))
        alone = bench.logits(SequenceRows(0, tokens, np.array(prefix, np.int32), NO_NODES, [len(tokens) - 1]))
        for length in range(len(tokens) + 1, len(whole) + 1):
            prefix += bench.take(1)
            rows = SequenceRows(length - 1, whole[length - 1 : length], np.array(prefix, np.int32), NO_NODES, [0])
            alone = bench.logits(rows)
        assert torch.equal(alone[0], together[1 + node]), f"node {node}"


@IN_TYPES
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_in_any_company(directory: Path, dtype: torch.dtype, threads: int) -> None:
    bench, empty = Bench(directory, dtype), EMPTY_TREE
    tokens = tokens_of(66)
    alone = bench.logits(bench.rows(tokens, empty))[0]
    torch.set_num_threads(threads)
    for count in sized((0, 5, 33), range(0, 41, 3)):
        other = bench.rows(tokens_of(1 + count % 5, count), random_tree(np.random.default_rng(count), VOCAB, count))
        mine = bench.rows(tokens, empty)
        assert torch.equal(bench.logits(other, mine)[-1], alone), f"after {other.num_rows} rows"
        mine = bench.rows(tokens, empty)
        assert torch.equal(bench.logits(mine, other)[0], alone), f"before {other.num_rows} rows"


@IN_TYPES
def test_chunks_of_a_prompt_give_the_bits_of_the_whole(directory: Path, dtype: torch.dtype) -> None:
    bench, tokens = Bench(directory, dtype), tokens_of(sized(80, 150))
    whole = bench.logits(bench.rows(tokens, EMPTY_TREE))
    for size in sized((7, 64), (1, 7, 64, 100)):
        slots = np.array(bench.take(len(tokens)), np.int32)
        for start in range(0, len(tokens), size):
            end = min(start + size, len(tokens))
            rows = SequenceRows(
                start, tokens[start:end], slots[:end], NO_NODES, kept=[end - start - 1] if end == len(tokens) else []
            )
            logits = bench.logits(rows)
            assert len(logits) == (end == len(tokens))
        assert torch.equal(logits, whole), f"chunks of {size}"


@pytest.mark.parametrize("directory", SOME, indirect=True)
def test_eager_rows_have_the_same_bits_in_a_tree_and_alone(directory: Path) -> None:
    bench = Bench(directory, torch.float32, eager=True)
    tokens, tree = tokens_of(30), random_tree(np.random.default_rng(1), VOCAB, sized(4, 20))
    together = bench.logits(bench.rows(tokens, tree))
    for node in range(len(tree)):
        alone = bench.logits(bench.rows(tokens + tree.path_tokens(node), EMPTY_TREE))
        assert torch.equal(alone[0], together[1 + node]), f"node {node}"


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)], ids=str)
@pytest.mark.parametrize("kind", LATENT)
def test_latents_need_no_kernels(kind: str, dtype: torch.dtype, close: float, tiny_models: dict[str, Path]) -> None:
    reference = AutoModelForCausalLM.from_pretrained(tiny_models[kind], dtype=torch.float32)
    bench, tokens = Bench(tiny_models[kind], dtype, eager=True), tokens_of(70)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0, -1]
    assert (bench.logits(bench.rows(tokens, EMPTY_TREE))[0] - expected).abs().mean() < close * expected.std()


# -- mixtures of experts

#: Rows that share experts.
ROWS = 300
MIXTURES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"num_experts": 32, "num_experts_per_tok": 8}),
    ("qwen3_moe", {"num_experts": 32, "num_experts_per_tok": 8, "norm_topk_prob": True}),
    ("mixtral", {}),
    ("qwen2_moe", {"num_experts": 5}),
    ("glm4_moe", {"n_routed_experts": 15, "n_group": 3, "num_experts_per_tok": 4}),
    ("minimax_m2", {"num_local_experts": 7}),
    ("gpt_oss", {}),
    ("deepseek_v2", {}),
    ("deepseek_v3", {"n_routed_experts": 32, "num_experts_per_tok": 6}),
]


def experts_of(kind: str, options: dict[str, Any], native: bool) -> Any:
    model = tiny_model(kind, experts_implementation="pilotfish", **options).eval()
    assert load_kernels()
    model.config.architectures = [type(model).__name__]  # as in a saved model
    model = (NativeKernels if native else Kernels)(torch.device("cpu")).replace(model, 64, alone=True)
    block = model.model.layers[1].mlp
    assert isinstance(block.experts, Mixture) is native
    return block


def outputs(block: Any, x: torch.Tensor) -> torch.Tensor:
    y = block(x[None])
    rows: torch.Tensor = (y[0] if isinstance(y, tuple) else y)[0]
    return rows


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("native", [True, False], ids=["native", "eager"])
@pytest.mark.parametrize(("kind", "options"), MIXTURES, ids=str)
@torch.inference_mode()
def test_experts_are_those_of_transformers_and_a_row_has_the_same_bits_whoever_shares_them(
    kind: str, options: dict[str, Any], native: bool, threads: int
) -> None:
    ours = experts_of(kind, options, native)
    reference: Any = tiny_model(kind, experts_implementation="eager", **options).eval()
    x = torch.randn(ROWS, 64)
    together = outputs(ours, x)
    torch.testing.assert_close(together, outputs(reference.model.layers[1].mlp, x), rtol=1e-5, atol=1e-5)
    torch.set_num_threads(threads)
    for rows in (1, 2, 33, 64, 250) if native else LIBRARY.rows[:5]:
        assert torch.equal(outputs(ours, x[:rows]), together[:rows]), f"{rows} rows"
        chosen = torch.randperm(ROWS)[:rows]
        assert torch.equal(outputs(ours, x[chosen]), together[chosen]), f"{rows} rows anywhere"
