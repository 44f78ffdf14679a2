"""What tests share: tiny models on disk, engines over them, drafters that guess at random."""

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedTokenizerFast

from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import KVDType
from pilotfish.core.drafting.draft_sessions import DraftSession, SessionTable
from pilotfish.core.drafting.drafter import Drafter, DraftLimits
from pilotfish.core.sampling.logit_rules import LogitEdits
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import Sampling
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.lookahead import LivingTree, RerootResult
from pilotfish.core.trees.tree import OTHER, ROOT, Guesses, TokenTree
from pilotfish.engine.engine import Engine
from pilotfish.engine.processes.launch import Supervisor
from pilotfish.engine.processes.process import WorkerSpec
from pilotfish.engine.sample import Sample
from pilotfish.kv.tiers import KVTiers
from pilotfish.model.cpu.native_modules import PackedWeight
from pilotfish.model.grouped import GroupedWeight
from pilotfish.model.loading.loader import LoadedModel, load_model
from pilotfish.model.sampling import SampleColumns
from pilotfish.wire.serving import EngineRequest

VOCAB = 512
CONTEXT = 2048

#: Eight prompts of our own, for parity.
SNIPPETS = (
    "def add(a, b):\n    return",
    "import os\n\nfor name in os.listdir('.'):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self",
    "x = [1, 2, 3]\ny = [1, 2, 3]\nx = [1, 2, 3]\n",
    "while True:\n    try:\n",
    "def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) +",
    '"""Größe – naïve ☃."""\n',
    "#",
)
#: The sampling settings of the parity promise: plain ones, then every rule on logits.
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.05, "top_k": 50},
    {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "bad_words": ("return", "self.")},
    {"temperature": 0.8, "repetition_penalty": 1.1, "frequency_penalty": 0.4, "top_p": 0.95},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(20, 120)), "logit_bias": {33: 2.0, 77: -9.0, 101: 1.5}},
    {"temperature": 0.9, "stop_token_ids": tuple(range(40, 56)), "min_tokens": 16, "bad_token_ids": (99, 300)},
)

#: A text that does not change, code, and what is not ASCII.
CORPUS = [(Path(__file__).parents[1] / "LICENSE").read_text(), "".join(SNIPPETS) * 3, "naïve – Größe ☃ 😀 日本語 " * 20]


# -- models on disk


def write_tokenizer(directory: Path, vocab_size: int = VOCAB) -> None:
    """A byte-level BPE tokenizer trained on `CORPUS`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory)


#: A window that short prompts and even trees cross.
WINDOW = 16
_WINDOWED: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_GROUPED: dict[str, Any] = {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": CONTEXT // 4}
_LATENTS = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}
_SHARED = {**_EXPERTS, "n_shared_experts": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
_SCALED = {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8}
_GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
#: What is special about the tiny model of each kind, named as transformers names its configuration.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "ministral3": {"rope_parameters": {**_YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.4}},
    "qwen2": {},
    "qwen3": {"use_sliding_window": True, **_WINDOWED},
    "qwen3_moe": {"num_experts": 6, **_EXPERTS},
    "mixtral": {"num_local_experts": 4, "sliding_window": WINDOW},
    "qwen2_moe": {
        "num_experts": 6,
        **_EXPERTS,
        "shared_expert_intermediate_size": 64,
        "use_sliding_window": True,
        **_WINDOWED,
    },
    "glm4_moe": {"n_routed_experts": 6, "use_qk_norm": True, **_GROUPED, **_EXPERTS},
    "minimax_m2": {"num_local_experts": 4, "rotary_dim": 16, "num_experts_per_tok": 2},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.0,
    },
    "phi3": {"sliding_window": WINDOW, "partial_rotary_factor": 0.5},
    "olmo2": {"attention_bias": True},
    "gemma2": {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, **_WINDOWED},
    "gemma3_text": {"query_pre_attn_scalar": 24, **_WINDOWED},
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "rope_parameters": _YARN, **_WINDOWED},
    "deepseek_v2": {"q_lora_rank": None, "n_routed_experts": 6, **_SHARED, **_LATENTS},
    "deepseek_v3": {"q_lora_rank": 32, "rope_parameters": _SCALED, **_SHARED, **_GROUPS, **_LATENTS},
}

#: Those with experts, which no quantization takes, and the others.
MIXTURES = ("qwen3_moe", "mixtral", "qwen2_moe", "glm4_moe", "minimax_m2", "gpt_oss", "deepseek_v2", "deepseek_v3")
DENSE = tuple(kind for kind in KINDS if kind not in MIXTURES)
#: Those that keep latents, which neither ranks nor Triton kernels take, and the others.
LATENT = ("deepseek_v2", "deepseek_v3")
PER_HEAD = tuple(kind for kind in KINDS if kind not in LATENT)


def kept_elements(kind: str) -> int:
    """Of a token in a layer of a tiny model: keys and values of 2 heads of 32, or a latent and its rotated part."""
    return 32 + 32 if kind in LATENT else 2 * 2 * 32


def tiny_model(kind: str, seed: int = 0, **options: Any) -> torch.nn.Module:
    """A random model of two small layers, 4 query and 2 key heads of 32. No end-of-sequence token. `options`
    are further fields of its configuration."""
    shape: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    shape |= {"max_position_embeddings": CONTEXT, "initializer_range": 0.2}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = CONFIG_MAPPING[kind](**{**shape, **special, **KINDS[kind], **options})
    torch.manual_seed(seed)
    model: torch.nn.Module = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    for name, weight in chain(model.named_parameters(), model.named_buffers()):
        if name.endswith(("bias", "norm.weight")):  # zeros or ones
            torch.nn.init.normal_(weight, float(weight.detach().mean()), std=0.2)
    return model


def write_model(
    directory: Path, kind: str, *, seed: int = 0, perturbed: float = 0.0, tokens: int = VOCAB, **options: Any
) -> Path:
    """A tiny model and its tokenizer, of so many `tokens`. `perturbed` adds noise to all weights, which makes a draft
    that is often, not always, right about the model without it. `options` as for `tiny_model`."""
    model = tiny_model(kind, seed, **options)
    if perturbed:
        with torch.no_grad():
            for weight in model.parameters():
                weight += perturbed * 0.2 * torch.randn_like(weight)
    model.save_pretrained(directory)
    write_tokenizer(directory, tokens)
    return directory


def edit_config(directory: Path, **changes: Any) -> None:
    """Change fields of a model's config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def weights(directory: Path) -> Path:
    """A model's only weight file."""
    (path,) = directory.glob("*.safetensors")
    return path


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Change a model's weight file; the model's directory."""
    path = weights(directory)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


def native_model(directory: Path, dtype: torch.dtype = torch.float32, kv_dtype: KVDType = "auto") -> LoadedModel:
    """Loaded for the C++ kernels on the CPU."""
    return load_model(directory, dtype, torch.device("cpu"), eager=False, kv_dtype=kv_dtype)


def kept_bytes(module: torch.nn.Module) -> int:
    """Every tensor that a loaded module holds, once."""
    found: dict[int, int] = {}

    def note(value: Any) -> None:
        if isinstance(value, PackedWeight | GroupedWeight):
            for name, tensor in vars(value).items():
                if name != "table":
                    note(tensor)
        elif isinstance(value, torch.Tensor):
            found[value.data_ptr()] = value.nbytes

    for part in module.modules():
        for tensors in (vars(part), part._parameters):
            for value in tensors.values():
                note(value)
    return sum(found.values())


# -- threads and time


@contextmanager
def running(work: Callable[[], object], stop: Callable[[], object]) -> Iterator[None]:
    """`work` runs in a thread, until the end, when `stop` has it return; what it raises is raised there."""
    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(work)
        try:
            yield
        finally:
            stop()
    result.result()


def eventually(
    holds: Callable[[], object],
    seconds: float = 30.0,
    pause: float = 0.002,
    told: Callable[[], object] = lambda: "what the test waits for",
) -> None:
    """`told`: what is said where it does not come."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, told()
        time.sleep(pause)


async def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.005)


# -- engines


def settle(tiers: KVTiers) -> None:
    """Until all that is saved is where it is kept."""
    eventually(lambda: not tiers._saving and not tiers._unwritten)


def descriptors() -> int:
    """How many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def params(max_tokens: int = 12, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "seed": 7, "temperature": 0.8, **fields})


#: cuda runs the tests of engines there (docs/gpu.md).
ENGINE_DEVICE = os.environ.get("PILOTFISH_TEST_DEVICE", "cpu")


#: Ways to draft, by what they are called here.
MODES: dict[str, dict[str, Any]] = {
    "off": {},
    "ngram": {"mode": "sync", "drafter": "ngram"},
    "sync": {"mode": "sync", "drafter": "lm+ngram"},
    "async": {"mode": "async", "drafter": "lm"},
}


def make_engine(target: Path, drafter: Drafter | None = None, /, **config: Any) -> Engine:
    """A float32 engine on one thread of `ENGINE_DEVICE` that verifies whole trees, unless `config` says otherwise."""
    defaults: dict[str, Any] = {"dtype": "float32", "threads": 1, "kv_slots": 4096, "budget": "fixed"}
    defaults["device"] = ENGINE_DEVICE
    return Engine(EngineConfig(target=target, **{**defaults, **config}), drafter)


def run(engine: Engine, prompts: Sequence[str | Sequence[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    """Token ids of all prompts' samples, submitted together, in order."""
    samples = [s for prompt, p in zip(prompts, params, strict=True) for s in engine.submit(prompt, p)]
    drain(engine)
    return [sample.token_ids for sample in samples]


def drain(engine: Engine) -> None:
    """Until all requests have ended."""
    while engine.busy:
        engine.step()


def finish(engine: Engine, prompt: Any, params: SamplingParams, salt: str | None = None) -> list[Sample]:
    """A request's samples, at their ends; nothing is left."""
    samples = engine.submit(prompt, params, salt)
    drain(engine)
    assert_idle(engine)
    return samples


def asked(engine: Engine, prompt: str, params: SamplingParams, **options: Any) -> EngineRequest:
    return EngineRequest(engine.check_prompt(prompt), params, **options)


def sure_tokens(reference: Any, prompt: list[int], count: int, close: float) -> list[int]:
    """Up to `count` that transformers' `generate` adds to a prompt, while its two best logits differ by `close`."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    gaps = [float(x[0] - x[1]) for x in (step[0].topk(2).values for step in out.logits)]
    sure = next((i for i, gap in enumerate(gaps) if gap < close), len(gaps))
    tokens: list[int] = out.sequences[0, len(prompt) : len(prompt) + sure].tolist()
    return tokens


def step_until(engine: Engine, samples: Sequence[Sample], origin: str) -> None:
    """Until a guess of this origin was accepted."""
    while not any(sample.request.stats.accepted_by_origin.get(origin) for sample in samples):
        assert engine.busy
        engine.step()


class NoProcesses(Supervisor):
    """Starts nothing: a test has the workers on threads."""

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        """They are there already."""


def assert_idle(engine: Engine) -> None:
    """Every slot of the target's pool, and of an LM draft's, is free."""
    scheduler = engine.worker.scheduler
    scheduler.check()
    assert not engine.busy and not engine._samples
    assert scheduler.pool.num_available == scheduler.pool.capacity
    for drafter in getattr(engine.drafter, "drafters", [engine.drafter]):
        if hasattr(drafter, "table"):
            drafter.table.check()
            assert drafter.table.pool.num_available == drafter.table.pool.capacity


# -- guesses


def hits_of(table: SessionTable) -> list[bool]:
    """Of each commit from now on, whether all its tokens were in the tree."""
    hits, commit = list[bool](), table.commit

    def watched(session: DraftSession, tokens: Sequence[int]) -> RerootResult:
        rerooted = commit(session, tokens)
        hits.append(rerooted.hit)
        return rerooted

    table.commit = watched  # type: ignore[method-assign]
    return hits


def limits(nodes: int = 8, levels: int = 3) -> DraftLimits:
    """So many nodes and levels, whatever they cost."""
    return DraftLimits(nodes, 1000 * nodes, levels, price=0.0)


def random_guesses(rng: np.random.Generator, vocab_size: int, nodes: int) -> Guesses:
    """Up to `nodes` nodes hung anywhere, with random tokens and scores."""
    tree = Guesses()
    for _ in range(nodes):
        tree.add(int(rng.integers(len(tree) + 1)) - 1, int(rng.integers(vocab_size)), float(-rng.exponential()))
    return tree


def random_tree(rng: np.random.Generator, vocab_size: int, nodes: int) -> TokenTree:
    return random_guesses(rng, vocab_size, nodes).tree()


def guesses_of(tree: TokenTree) -> Guesses:
    guesses = Guesses()
    for parent, token, score in zip(tree.parents.tolist(), tree.tokens.tolist(), tree.scores.tolist(), strict=True):
        guesses.add(parent, token, score)
    return guesses


def proposed(drafter: Drafter, requests: Sequence[Request], limits: DraftLimits) -> list[TokenTree]:
    return [guesses.tree() for guesses in drafter.propose(requests, limits)]


def tree_of(tree: LivingTree) -> TokenTree:
    """All of it, likeliest nodes first."""
    return tree.best(1 << 20, OTHER).tree()


def paths_of(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """Score of every path, by its tokens."""
    return {tuple(tree.path_tokens(node)): float(tree.scores[node]) for node in range(len(tree))}


def follow(tree: TokenTree, tokens: Sequence[int]) -> list[int]:
    """Nodes along `tokens` from the root, as far as the tree goes."""
    known = {(parent, token): node for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    path: list[int] = []
    for token in tokens:
        if (path[-1] if path else ROOT, token) not in known:
            break
        path.append(known[path[-1] if path else ROOT, token])
    return path


def children_of(tree: TokenTree, node: int) -> list[int]:
    """Indices, in order of arrival."""
    children: list[int] = np.flatnonzero(tree.parents == node).tolist()
    return children


class RandomDrafter(Drafter):
    """Guesses at random, knows nothing: the worst draft that is still polite."""

    def __init__(self, vocab_size: int, nodes: int = 12, seed: int = 0) -> None:
        self.vocab_size, self.nodes = vocab_size, nodes
        self._rng = np.random.default_rng(seed)

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[Guesses]:  # noqa: ARG002
        return [random_guesses(self._rng, self.vocab_size, self.nodes) for _ in requests]


# -- sampling, said again in another way


@dataclass(frozen=True)
class RowSampling:
    """How the token after one row is drawn."""

    params: SamplingParams
    seed: int
    position: int
    edits: LogitEdits | None = None


def sampling_of(rows: Sequence[RowSampling], children: int = 0) -> Sampling:
    """Of rows that have nothing in common."""
    places, positions = np.arange(len(rows)), np.array([row.position for row in rows], np.int64)
    params, seeds, edits = [row.params for row in rows], [row.seed for row in rows], [row.edits for row in rows]
    return Sampling(places, params, seeds, places, positions, edits, children=children)


def columns_of(rows: Sequence[RowSampling]) -> SampleColumns:
    return SampleColumns.of(sampling_of(rows), torch.device("cpu"))


def reference_probs(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution that `params` ask for, one plain step after the other. float64 [vocab]."""
    logits = np.asarray(logits, np.float64)
    if params.greedy:
        return (np.arange(len(logits)) == logits.argmax()).astype(np.float64)
    probs = np.exp((logits - logits.max()) / params.temperature)
    probs = np.where(probs < params.min_p * probs.max(), 0.0, probs)
    if 0 < params.top_k < len(probs):
        probs = np.where(probs < np.sort(probs)[-params.top_k], 0.0, probs)
    probs /= probs.sum()
    mass = 0.0
    for token in np.argsort(-probs, kind="stable"):
        above, mass = mass, mass + probs[token]
        if params.top_p < 1 and above >= params.top_p:
            probs[token] = 0.0
    return probs / probs.sum()
