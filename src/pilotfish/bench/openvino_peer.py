"""OpenVINO GenAI as a contestant, in an interpreter of its own, which knows nothing of ours: JSON lines in and out.

Arguments: directories of the exported target and draft, and a number of threads. A line asks for a prompt's text to be
gone on with for `max_tokens` tokens, greedily, by the target alone (`assistant_tokens` null) or with the draft guessing
so many tokens at a time (0: as many as GenAI chooses).
"""

import json
import os
import sys
import time
from typing import Any

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever libraries print, from their import on, goes to stderr

import openvino_genai  # noqa: E402


def load(target: str, draft: str, threads: int) -> tuple[Any, Any]:
    """The target alone, and with its draft. Default hints, and without the cache of earlier prompts: it would spare
    GenAI the prompt that all others compute each time."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = 1 << 30  # a prompt is one forward, as by default
    properties = {"INFERENCE_NUM_THREADS": threads}
    guesses = openvino_genai.draft_model(draft, "CPU", **properties)
    plain = openvino_genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, **properties)
    assisted = openvino_genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, draft_model=guesses, **properties)
    return plain, assisted


def generate(plain: Any, assisted: Any, text: str, max_tokens: int, assistant_tokens: int | None) -> dict[str, Any]:
    """Seconds from the text to the last token, the tokens, and those of the prompt."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
    if assistant_tokens:
        config.num_assistant_tokens = assistant_tokens
    pipeline = plain if assistant_tokens is None else assisted
    began = time.perf_counter()
    prompt = pipeline.get_tokenizer().encode(text)
    tokens = pipeline.generate(prompt, config).tokens[0]
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "tokens": list(tokens), "prompt": prompt.input_ids.data[0].tolist()}


def say(answer: dict[str, Any]) -> None:
    ANSWERS.write(json.dumps(answer) + "\n")
    ANSWERS.flush()


def main() -> None:
    target, draft, threads = sys.argv[1:]
    pipelines = load(target, draft, int(threads))
    say({})
    for line in sys.stdin:
        say(generate(*pipelines, **json.loads(line)))


if __name__ == "__main__":
    main()
