"""`pilotfish generate`: prompts in, one output a row."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from pilotfish.cli.options import (
    DeviceOption,
    DTypeOption,
    EagerOption,
    JsonOption,
    MaxTokensOption,
    QuantizationOption,
    TemperatureOption,
    ThreadsOption,
    resolve_models,
)
from pilotfish.cli.show import JsonPrinter, TextPrinter, report
from pilotfish.config import DrafterKind, DType, EngineConfig, Mode, Quantization
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.errors import InputError, ParameterError
from pilotfish.prompts import BadRow, Row, read_rows

MAX_CONCURRENCY = 4096


def generate(
    pair: Annotated[str | None, typer.Option(help="The bundled pair: pycode, or pycode@<N>m. The default.")] = None,
    target: Annotated[Path | None, typer.Option(help="A model directory in Hugging Face format.")] = None,
    draft: Annotated[Path | None, typer.Option(help="A draft's directory, with --target.")] = None,
    prompt: Annotated[str | None, typer.Option(help="One prompt, taken as it is.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON Lines of {id, prompt} or {id, turns}.")] = None,
    mode: Annotated[str | None, typer.Option(help="off or sync; sync where there is a draft.")] = None,
    drafter: Annotated[str | None, typer.Option(help="lm, ngram or lm+ngram.")] = None,
    nodes: Annotated[int, typer.Option(help="Nodes of a token tree, at most.")] = EngineConfig.nodes,
    levels: Annotated[int, typer.Option(help="Draft forwards that grow a tree, at most.")] = EngineConfig.levels,
    width: Annotated[int, typer.Option(help="Leaves that a draft forward expands.")] = EngineConfig.width,
    max_tokens: MaxTokensOption = SamplingParams.max_tokens,
    temperature: TemperatureOption = SamplingParams.temperature,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0: all.")] = SamplingParams.top_k,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass.")] = SamplingParams.top_p,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the best.")] = SamplingParams.min_p,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text. Repeatable.")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="End at this token. Repeatable.")] = None,
    n: Annotated[int, typer.Option("--n", help="Outputs of each prompt.")] = SamplingParams.n,
    seed: Annotated[int | None, typer.Option(help="0 to 2^64 - 1; drawn and reported if absent.")] = None,
    dtype: DTypeOption = EngineConfig.dtype,
    quantization: QuantizationOption = EngineConfig.quantization,
    device: DeviceOption = EngineConfig.device,
    threads: ThreadsOption = EngineConfig.threads,
    kv_slots: Annotated[int, typer.Option(help="Tokens that fit into the KV pool.")] = EngineConfig.kv_slots,
    eager: EagerOption = False,
    concurrency: Annotated[int, typer.Option(help="Rows that run at a time.")] = 1,
    raw: Annotated[bool, typer.Option("--raw", help="Apply no chat template to turns.")] = False,
    json: JsonOption = False,
) -> None:
    """Continue prompts. With --json one object a line: id, token_ids, text, finish_reason, seed, stats."""
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        n=n,
    )
    if not 1 <= concurrency <= MAX_CONCURRENCY:
        raise ParameterError("concurrency", concurrency, f"an integer 1 to {MAX_CONCURRENCY}")
    rows = _rows(prompt, prompts)
    models = resolve_models(pair, target, draft)
    config = EngineConfig(
        target=models.target,
        draft=models.draft,
        mode=cast(Mode, mode or ("off" if models.draft is None and drafter is None else "sync")),
        drafter=cast(DrafterKind, drafter or EngineConfig.drafter),
        nodes=nodes,
        levels=levels,
        width=width,
        dtype=cast(DType, dtype),
        quantization=cast(Quantization, quantization),
        device=device,
        threads=threads,
        kv_slots=kv_slots,
        max_requests=max(concurrency, EngineConfig.max_requests),
        eager=eager,
    )
    if not _run(config, params, rows, concurrency=concurrency, raw=raw, json=json):
        raise typer.Exit(2)


def _rows(prompt: str | None, prompts: Path | None) -> list[Row | BadRow]:
    if (prompt is None) == (prompts is None):
        raise InputError("prompt: exactly one of --prompt and --prompts is needed")
    if prompts is not None:
        return read_rows(prompts)
    return [Row("prompt", (prompt or "",), chat=False, place="pilotfish")]


def _run(
    config: EngineConfig, params: SamplingParams, rows: list[Row | BadRow], *, concurrency: int, raw: bool, json: bool
) -> bool:
    """Run the rows that can be run; whether that was all of them."""
    good = [row for row in rows if isinstance(row, Row)]
    for row in rows:
        if isinstance(row, BadRow):
            report(row)
    if not good:
        return False
    from pilotfish.cli.batch import generate_rows

    printer = JsonPrinter() if json else TextPrinter()
    all_served = generate_rows(config, params, good, printer, concurrency=concurrency, raw=raw)
    return all_served and len(good) == len(rows)
