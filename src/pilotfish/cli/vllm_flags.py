"""Flags of `vllm serve` that are not ours: those that ask for what is the case anyway are accepted, the others are
refused with what there is instead."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Values of a switch: --x and --no-x.
ON, OFF = "on", "off"


@dataclass(frozen=True)
class Flag:
    """Values of a flag that change nothing, and what to say of any other."""

    why: str
    accepted: tuple[str, ...] = ()
    switch: bool = False  # whether it is --x or --no-x, without a value


#: Flags by what is said of them: `name=accepted,values` of one that takes a value, `name:accepted,values` of a switch.
_BY_REASON = {
    # the model
    "the tokenizer is the one in the model's directory": "tokenizer tokenizer-mode=auto,hf skip-tokenizer-init:off",
    "no code of a model is run; docs/models.md lists the architectures": "trust-remote-code:off",
    "nothing is downloaded: MODEL is a directory": (
        "revision code-revision tokenizer-revision hf-token download-dir ignore-patterns"
    ),
    "weights are read from safetensors files": "load-format=auto,safetensors",
    "weights are read as --load-format says": "safetensors-load-strategy=lazy model-loader-extra-config={}",
    "loading shows no progress": "use-tqdm-on-load:on,off",
    "change config.json in a copy of the model's directory": (
        "config-format=auto,hf hf-config-path hf-overrides rope-scaling rope-theta"
    ),
    "attention is our own kernel": "disable-cascade-attn:on,off attention-backend",
    "windows are served as the model has them": "disable-sliding-window:off",
    "there is one implementation of each architecture": "model-impl=auto",
    "generation is the one task": "task=auto,generate runner=auto,generate convert=auto,none pooler-config",
    "change generation_config.json, or give --generation-config vllm": "override-generation-config",
    "requests have seeds of their own; one that gives none has one drawn, which the answer tells": "seed",
    # devices and memory
    "a model runs on one device": (
        "tensor-parallel-size=1 pipeline-parallel-size=1 decode-context-parallel-size=1 data-parallel-size-local=1 "
        "data-parallel-rank=0 data-parallel-start-rank=0 data-parallel-address data-parallel-rpc-port "
        "data-parallel-backend=mp data-parallel-hybrid-lb:off max-parallel-loading-workers=1 worker-cls=auto "
        "worker-extension-cls all2all-backend enable-eplb:off eplb-config enable-dbo:off enable-expert-parallel:off "
        "distributed-executor-backend=uni,mp disable-custom-all-reduce:on,off nnodes=1 headless:"
    ),
    "a model runs on one device; start a server for each, behind a proxy": "data-parallel-size=1",
    "give --memory GIB; without it 0.9 of what is free is used": "gpu-memory-utilization=0.9",
    "give --kv-slots TOKENS, or --memory GIB for all": "kv-cache-memory-bytes",
    "give --kv-slots TOKENS": "num-gpu-blocks-override",
    "KV is kept as --dtype says": "kv-cache-dtype=auto calculate-kv-scales:off",
    "KV is kept in slots of one token; --kv-slots and --memory bound them": (
        "block-size=1 disable-hybrid-kv-cache-manager:on,off use-v2-block-manager:on,off"
    ),
    "KV stays in the target's process": "kv-offloading-size kv-offloading-backend kv-transfer-config kv-events-config",
    "nothing is swapped: a request that gives way computes its KV again": "swap-space=0",
    "weights are kept on the device": "cpu-offload-gb=0",
    "a model stays loaded until the server ends": "enable-sleep-mode:off",
    "there is no prefix cache yet": "enable-prefix-caching:off prefix-caching-hash-algo",
    "--eager switches kernels and graphs off; nothing else of them can be set": (
        "optimization-level compilation-config cudagraph-capture-sizes max-cudagraph-capture-size "
        "max-seq-len-to-capture"
    ),
    "text alone is served": (
        "mm-encoder-attn-backend limit-mm-per-prompt mm-processor-kwargs mm-processor-cache-gb media-io-kwargs "
        "disable-chunked-mm-input:on,off disable-mm-preprocessor-cache:on,off skip-mm-profiling:on,off "
        "allowed-local-media-path allowed-media-domains language-model-only:on,off"
    ),
    # scheduling
    "prompts are always computed in chunks, beside other requests' tokens": "enable-chunked-prefill:on",
    "steps are planned with --max-num-seqs, --max-num-batched-tokens and --budget": (
        "max-num-partial-prefills max-long-partial-prefills scheduler-cls long-prefill-token-threshold=0 "
        "num-scheduler-steps=1 scheduler-delay-factor=0.0"
    ),
    "requests are served in the order of their arrival": "scheduling-policy=fcfs",
    "a request that gives way computes its KV again": "preemption-mode=recompute",
    "tokens are sent as soon as they are there": "stream-interval=1 multi-step-stream-outputs:on",
    "the target never waits for the server, in any mode": "disable-async-output-proc:on,off async-scheduling:on,off",
    "give --speculative-config, or --draft and --nodes": (
        "num-lookahead-slots=0 speculative-model num-speculative-tokens ngram-prompt-lookup-max ngram-prompt-lookup-min"
    ),
    # what answers hold
    "up to 20 are reported": "max-logprobs=20",
    "log-probabilities are of raw logits": "logprobs-mode=raw_logprobs",
    "requests ask for it": "return-tokens-as-token-ids:off",
    "answers are of the assistant": "response-role=assistant",
    "contents reach the template as text": "chat-template-content-format=auto,string",
    "a request brings no template of its own": "trust-request-chat-template:off",
    "set them in the template of --chat-template": "default-chat-template-kwargs",
    "usage always has them": "enable-prompt-tokens-details:on,off",
    "a stream has usage where stream_options ask for it": "enable-force-include-usage:off",
    "give --per-request-spec-decode-metrics, or read /metrics": "enable-per-request-metrics:off",
    "every answer has X-Request-Id": "enable-request-id-headers:on",
    "there are no tool calls yet": (
        "enable-auto-tool-choice:off exclude-tools-when-tool-choice-none:on,off tool-call-parser tool-parser-plugin "
        "tool-server"
    ),
    "reasoning is not told apart from the rest of an answer": "reasoning-parser enable-reasoning:off",
    "there are no grammars yet": (
        "guided-decoding-backend structured-outputs-config guided-decoding-disable-fallback:off "
        "guided-decoding-disable-any-whitespace:off guided-decoding-disable-additional-properties:off"
    ),
    "adapters are not served; merge them into the weights": (
        "enable-lora:off lora-modules max-loras max-lora-rank max-cpu-loras lora-dtype=auto fully-sharded-loras:off"
    ),
    "prompts are text or tokens": "enable-prompt-embeds:off",
    "a request has logit_bias, allowed_token_ids and bad_words": "logits-processors",
    # HTTP
    "a server listens at --host and --port": "uds",
    "one process serves HTTP": "api-server-count=1",
    "have the proxy strip its prefix": "root-path",
    "no code of others runs in the server; a proxy in front can": "middleware",
    "pages of other sites cannot call this server; a proxy in front can let them": (
        "allowed-origins allowed-methods allowed-headers allow-credentials:off"
    ),
    "TLS is left to a proxy in front": (
        "ssl-keyfile ssl-certfile ssl-ca-certs ssl-cert-reqs=0 ssl-ciphers enable-ssl-refresh:off"
    ),
    "/metrics has the requests in flight": "enable-server-load-tracking:off",
    "HTTP has a process of its own": "disable-frontend-multiprocessing:off",
    "/openapi.json is served, pages over it are not": "disable-fastapi-docs:off enable-offline-docs:off",
    "there is no such route": "enable-tokenizer-info-endpoint:off",
    "heads of requests have 64 KiB, bodies --max-body-bytes": "h11-max-incomplete-event-size",
    "heads of requests have 64 KiB, however many headers these are": "h11-max-header-count",
    "give --drain-timeout SECONDS": "shutdown-timeout",
    # logs
    "give --log-prompts": "disable-log-requests:on enable-log-requests:off",
    "outputs are never logged": "enable-log-outputs:off enable-log-deltas:on,off",
    "a traceback is logged where an error is the server's own": "log-error-stack:off",
    "up to 10000 characters of a prompt are logged": "max-log-len",
    "nothing is logged now and then; /metrics has it all": "aggregate-engine-logging:on,off disable-log-stats:on,off",
    "/metrics has what docs/metrics.md lists": "show-hidden-metrics-for-version",
    "lines go to stderr as --log-format says, all of level info and above": "uvicorn-log-level=info",
    "lines go to stderr as --log-format says; drop those of the logger pilotfish.access": (
        "disable-uvicorn-access-log:off"
    ),
    "lines go to stderr as --log-format says; of /health, /ready and /metrics only those of failures": (
        "disable-access-log-for-endpoints"
    ),
    "lines go to stderr as --log-format says": "log-config-file",
    "--otlp-traces-endpoint sends a request's span with every verify step": "collect-detailed-traces",
    "give the flags themselves": "config",
}


def _flag(why: str, word: str) -> tuple[str, Flag]:
    name, sign, accepted = re.findall("([^=:]+)([=:]?)(.*)", word)[0]
    return name, Flag(why, tuple(accepted.split(",")) if accepted else (), switch=sign == ":")


FLAGS = dict(_flag(why, word) for why, words in _BY_REASON.items() for word in words.split())
#: Short names, of ours too.
SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-O": "--optimization-level",
    "-q": "--quantization",
    "-sc": "--speculative-config",
}
