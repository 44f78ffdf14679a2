from pathlib import Path
from typing import Annotated, Any

import typer

from pilotfish.command import Given
from pilotfish.config.engine import EngineConfig
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine import pairs
from pilotfish.engine.pairs.directories import model_directory
from pilotfish.errors import InputError
from pilotfish.options import Option, pick, unset

DEFAULT_PAIR = "pycode"

JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else.")]

_OF_SERVE = ("max_requests", "max_rows")
#: Engine options of commands that serve.
ROWS = pick(EngineConfig, *_OF_SERVE)
#: Engine options of commands that generate. Without mode and drafter the models decide.
ENGINE = [
    Option("pair", str, None, "The bundled pair: pycode, or pycode@<N>m. The default."),
    *pick(EngineConfig, without=_OF_SERVE, target=None, mode=None, drafter=None),
]
_OF_GENERATE = ("n", "logprobs", "prompt_logprobs")
_OF_HTTP = ("include_stop_str_in_output", "skip_special_tokens")
#: Options of a request. By default the model's generation_config.json decides, then our defaults.
SAMPLING = unset(pick(SamplingParams, without=_OF_HTTP))
CHAT_SAMPLING = [one for one in SAMPLING if one.name not in _OF_GENERATE]


#: vLLM's names for ours.
VLLM_DTYPES = {"float": "float32", "half": "float16"}


def engine_config(given: Given, **others: Any) -> EngineConfig:
    models = model_directories(given.get("pair"), given.get("target"), given.get("draft"))
    plain = "off" if models["draft"] is None and "drafter" not in given else "sync"
    fields = {
        "mode": "async" if "draft_pool" in given or "members" in given else plain,
        **{name: value for name, value in given.items() if name != "pair"},
        **models,
        "dtype": VLLM_DTYPES.get(given["dtype"], given["dtype"]),
    }
    return EngineConfig(**fields, **others)


def with_model(engine: Given, model: Path | None) -> Given:
    """MODEL stands for --target."""
    if model is not None and "target" in engine:
        raise InputError(f"target: {str(engine['target'])!r} cannot be combined with MODEL; give one of them")
    return engine if model is None else {**engine, "target": model}


def model_directories(pair: str | None, target: Path | None, draft: Path | None) -> Given:
    """From --target and --draft, or --pair, where --draft names one of its drafts. By default the bundled pair. A
    target that is a pair's brings its draft, unless another is given."""
    named = "" if target is None or target.is_dir() else str(target)
    if pair is None and draft is None and pairs.NAMES.fullmatch(named):
        pair, target = named, None
    if target is not None:
        if pair is not None:
            raise InputError("pair: it cannot be combined with --target; give one of them")
        return {"target": model_directory("target", target), "draft": draft and model_directory("draft", draft)}
    return vars(pairs.resolve_pair(pair or DEFAULT_PAIR, *([] if draft is None else [str(draft)])))
