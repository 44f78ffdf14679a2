"""KV in int8 beside KV as it is computed: logits, accepted tokens, slots, and decoding after long contexts."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle, islice

import torch
from acceptance import ACCEPTANCE_CONCURRENCY
from harness import PAIR, TEMPERATURES, Options, run
from quantization import logits_along

from pilotfish.cli.bench.contestants import PLAIN, Run, drafting, periods_of, take_turns
from pilotfish.cli.bench.report import ProgressBar, Report, Row, Spread, equal_share, ratios
from pilotfish.cli.bench.workload import Job, Prompt, jobs_at
from pilotfish.config.fields import KVDType
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.engine.processes.host_memory import GIB
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.loading.footprint import slot_bytes

KV_DTYPES: tuple[KVDType, ...] = ("auto", "int8")
PLAIN_KV = KV_DTYPES[0]
LEAST = 4  # tokens: a period is between two steps, neither of them the prompt's


def run_kv(options: Options, progress: ProgressBar) -> Report:
    """Decodes `max_tokens` after each of the contexts, `repeats` rounds after one to warm up."""
    prompts, contexts = options.rows(), options.contexts
    engines = {str(name): Engine(options.engine_config(kv_dtype=name)) for name in KV_DTYPES}
    texts = [engines[PLAIN_KV].check_prompt(prompt.text) for prompt in prompts]
    progress.total = len(KV_DTYPES) * (len(prompts) * len(TEMPERATURES) + (1 + options.repeats) * len(contexts))
    models = [
        {"model": model, **row}
        for model, executors in (
            ("target", {name: engine.executor for name, engine in engines.items()}),
            ("draft", {name: engine.drafters.draft_executor for name, engine in engines.items()}),
        )
        for row in compare_logits(executors, texts)
    ]
    acceptance, decoding = list[Row](), list[Row]()
    for temperature in TEMPERATURES:
        jobs = jobs_at(prompts, temperature, options.max_tokens)
        acceptance += [{"temperature": temperature, **row} for row in compare_acceptance(engines, jobs, progress)]
    tokens = [token for text in texts for token in text]
    for context in contexts:
        params = SamplingParams(temperature=0.0, max_tokens=max(options.max_tokens, LEAST), ignore_eos=True)
        job = Job(Prompt(f"{context}", list(islice(cycle(tokens), context))), "T=0", params)
        rounds = [[job]] * (1 + options.repeats)
        decoding += [{"context": context, **row} for row in compare_decoding(engines, rounds, progress)]
    scored = sum(len(text) - 1 for text in texts)
    return Report({"models": models, "acceptance": acceptance, "decoding": decoding, "scored_tokens": scored})


def compare_logits(executors: Mapping[str, TorchExecutor], texts: Sequence[Sequence[int]]) -> list[Row]:
    """A model's logits along the texts against those of plain KV: the largest and the mean difference, the share of
    positions with the same likeliest token, nats a token; and what a token takes."""
    plain = [list(logits_along(executors[PLAIN_KV], text)) for text in texts]
    results = list[Row]()
    for name, executor in executors.items():
        figures = [
            logit_figures(own, expected, following)
            for text, known in zip(texts, plain, strict=True)
            for (own, _), (expected, following) in zip(logits_along(executor, text), known, strict=True)
        ]
        most, mean, same, loss = torch.cat(figures).unbind(dim=1)
        size = slot_bytes(executor.model.config, executor.model.kv_dtype.itemsize)
        logits = {"largest_difference": most.max().item(), "mean_difference": mean.mean().item()}
        scores = {"agreement": same.mean().item(), "loss": loss.mean().item()}
        results.append({"kv": name, **logits, **scores, "slot_bytes": size, "slots_per_gib": GIB // size})
    return results


def logit_figures(own: torch.Tensor, expected: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Logits [chunk, vocab], the tokens that follow [chunk] -> the columns of `compare_logits`, float64 [chunk, 4]."""
    difference = (own - expected).abs()
    same = own.argmax(dim=-1) == expected.argmax(dim=-1)
    loss = torch.nn.functional.cross_entropy(own, following, reduction="none")
    return torch.stack([difference.amax(dim=-1), difference.mean(dim=-1), same, loss], dim=1).double()


def compare_acceptance(engines: Mapping[str, Engine], jobs: Sequence[Job], progress: ProgressBar) -> list[Row]:
    """Target and draft have the same kind of KV."""
    results, plain = list[Row](), list[list[int]]()
    for name, engine in engines.items():
        done = partial(progress, f"accepted, KV {name}")
        run = drafting(engine, "lm").run(engine, jobs, ACCEPTANCE_CONCURRENCY, done)
        plain = plain or run.outputs
        figures = {"tokens_per_verify_step": run.tokens / run.total("verify_steps")}
        results.append({"kv": name, **figures, "equal_outputs": equal_share(run.outputs, plain)})
    return results


def compare_decoding(
    engines: Mapping[str, Engine], rounds: Sequence[Sequence[Job]], progress: ProgressBar
) -> list[Row]:
    """Plain decoding of one sequence, without the steps of its prompt: tokens a second, taken in turns."""

    def decode(name: str, jobs: Sequence[Job]) -> float:
        run = PLAIN.run(engines[name], jobs, 1, partial(progress, f"decoding, KV {name}"))
        return decoded_per_second(run)

    speeds = take_turns({name: partial(decode, name) for name in engines}, rounds)
    return [
        {"kv": name, "tokens_per_second": Spread.of(own), "over_plain": ratios(own, speeds[PLAIN_KV])}
        for name, own in speeds.items()
    ]


def decoded_per_second(run: Run) -> float:
    return 1000 / float(periods_of([run.steps])["period_ms"])


if __name__ == "__main__":
    run(run_kv, *PAIR, "levels", "width", "nodes", threads=2, contexts=[500, 4000], repeats=3)
