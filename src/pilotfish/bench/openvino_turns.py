"""OpenVINO GenAI with and without its prefix cache, in an interpreter of its own, which knows nothing of ours: JSON
lines in and out.

Arguments: the directory of the exported target, and a number of threads. A line asks for a prompt's text to be gone on
with for `max_tokens` tokens, greedily, by the pipeline that reuses KV or by the one that does not.
"""

import json
import os
import sys
import time
from typing import Any

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever libraries print, from their import on, goes to stderr

import openvino_genai  # noqa: E402


class FirstToken(openvino_genai.StreamerBase):  # type: ignore[misc]
    """Knows when the first token came."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0.0

    def write(self, _: object) -> Any:
        self.at = self.at or time.perf_counter()
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


def load(target: str, threads: int, reuse: bool) -> Any:
    """Default hints."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = reuse
    scheduler.max_num_batched_tokens = 1 << 30  # a prompt is one forward, as by default
    return openvino_genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads)


def generate(pipeline: Any, text: str, max_tokens: int) -> dict[str, Any]:
    """Seconds from the text to the first token; the tokens, their text, and those of the prompt."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
    first, tokenizer = FirstToken(), pipeline.get_tokenizer()
    began = time.perf_counter()
    prompt = tokenizer.encode(text)
    tokens = list(pipeline.generate(prompt, config, first).tokens[0])
    answer = {"seconds": first.at - began, "tokens": tokens, "text": tokenizer.decode(tokens)}
    return answer | {"prompt": prompt.input_ids.data[0].tolist()}


def say(answer: dict[str, Any]) -> None:
    ANSWERS.write(json.dumps(answer) + "\n")
    ANSWERS.flush()


def main() -> None:
    target, threads = sys.argv[1:]
    pipelines = {reuse: load(target, int(threads), reuse) for reuse in (False, True)}
    say({})
    for line in sys.stdin:
        asked = json.loads(line)
        say(generate(pipelines[asked.pop("reuse")], **asked))


if __name__ == "__main__":
    main()
