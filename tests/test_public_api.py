"""What `import pilotfish` promises. A change here is a change for users."""

import dataclasses
import inspect

import pilotfish


def test_the_public_names() -> None:
    names = "LLM Completion Constraint RequestOutput SamplingParams TokenLogprobs resolve_pair"
    assert pilotfish.__all__ == names.split()
    assert all(hasattr(pilotfish, name) for name in pilotfish.__all__)


def test_sampling_parameters_and_their_defaults() -> None:
    defaults = dataclasses.asdict(pilotfish.SamplingParams())
    assert defaults == {
        **dict.fromkeys(("temperature", "top_p", "repetition_penalty"), 1.0),
        **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty"), 0.0),
        **dict.fromkeys(("allowed_token_ids", "seed", "logprobs", "prompt_logprobs", "structured_outputs")),
        **dict.fromkeys(("bad_token_ids", "bad_words", "stop", "stop_token_ids"), ()),
        **dict.fromkeys(("ignore_eos", "include_stop_str_in_output"), False),
        **dict.fromkeys(("top_k", "min_tokens"), 0),
        "logit_bias": {},
        "max_tokens": 128,
        "skip_special_tokens": True,
        "n": 1,
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
