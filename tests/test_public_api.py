"""What `import pilotfish` promises. A change here is a change for users."""

import dataclasses
import inspect

import pilotfish


def test_the_public_names() -> None:
    assert pilotfish.__all__ == [
        "LLM",
        "Completion",
        "Constraint",
        "RequestOutput",
        "SamplingParams",
        "TokenLogprobs",
        "resolve_pair",
    ]
    assert all(hasattr(pilotfish, name) for name in pilotfish.__all__)


def test_sampling_parameters_and_their_defaults() -> None:
    defaults = dataclasses.asdict(pilotfish.SamplingParams())
    assert defaults == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "allowed_token_ids": None,
        "bad_token_ids": (),
        "bad_words": (),
        "seed": None,
        "max_tokens": 128,
        "min_tokens": 0,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "logprobs": None,
        "prompt_logprobs": None,
        "n": 1,
        "structured_outputs": None,
    }


def test_fields_of_results() -> None:
    names = {c: [f.name for f in dataclasses.fields(c)] for c in (pilotfish.Completion, pilotfish.RequestOutput)}
    assert names[pilotfish.Completion] == ["index", "token_ids", "text", "finish_reason", "seed", "stats", "logprobs"]
    assert names[pilotfish.RequestOutput] == ["prompt_token_ids", "outputs", "prompt_logprobs"]


def test_signatures_of_the_offline_interface() -> None:
    assert list(inspect.signature(pilotfish.LLM).parameters) == ["target", "draft", "config"]
    assert list(inspect.signature(pilotfish.LLM.generate).parameters) == ["self", "prompts", "params", "cache_salt"]
    chat = list(inspect.signature(pilotfish.LLM.chat).parameters)
    assert chat == [
        *("self", "messages", "sampling_params", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tools", "chat_template_kwargs", "cache_salt"),
    ]
