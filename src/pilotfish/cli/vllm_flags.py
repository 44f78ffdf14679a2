"""Flags of `vllm serve` that are not ours: those that ask for what is the case anyway are accepted, the others are
refused with what there is instead."""

from __future__ import annotations

from dataclasses import dataclass

#: Values of a switch: --x and --no-x.
ON, OFF = "on", "off"


@dataclass(frozen=True)
class Flag:
    """Values of a flag that change nothing, and what to say of any other."""

    why: str
    accepted: tuple[str, ...] = ()
    switch: bool = False  # whether it is --x or --no-x, without a value


def _value(why: str, *accepted: str) -> Flag:
    return Flag(why, accepted)


def _switch(why: str, *accepted: str) -> Flag:
    return Flag(why, accepted, switch=True)


_ONE_DEVICE = "a model runs on one device"
_DIRECTORY = "nothing is downloaded: MODEL is a directory"
_TOKENIZER = "the tokenizer is the one in the model's directory"
_CONFIG_JSON = "change config.json in a copy of the model's directory"
_TLS = "TLS is left to a proxy in front"
_CORS = "pages of other sites cannot call this server; a proxy in front can let them"
_LORA = "adapters are not served; merge them into the weights"
_TOOLS = "there are no tool calls yet"
_REASONING = "reasoning is not told apart from the rest of an answer"
_GRAMMARS = "there are no grammars yet"
_MEDIA = "text alone is served"
_GRAPHS = "--eager switches kernels and graphs off; nothing else of them can be set"
_KV = "KV is kept in slots of one token; --kv-slots and --memory bound them"
_SCHEDULER = "steps are planned with --max-num-seqs, --max-num-batched-tokens and --budget"
_OLD_DRAFT = "give --speculative-config, or --draft and --nodes"
_LOGS = "lines go to stderr as --log-format says"

FLAGS: dict[str, Flag] = {
    # the model
    "tokenizer": _value(_TOKENIZER),
    "tokenizer-mode": _value(_TOKENIZER, "auto", "hf"),
    "skip-tokenizer-init": _switch(_TOKENIZER, OFF),
    "trust-remote-code": _switch("no code of a model is run; docs/models.md lists the architectures", OFF),
    "revision": _value(_DIRECTORY),
    "code-revision": _value(_DIRECTORY),
    "tokenizer-revision": _value(_DIRECTORY),
    "hf-token": _value(_DIRECTORY),
    "download-dir": _value(_DIRECTORY),
    "load-format": _value("weights are read from safetensors files", "auto", "safetensors"),
    "safetensors-load-strategy": _value("weights are read as --load-format says", "lazy"),
    "model-loader-extra-config": _value("weights are read as --load-format says", "{}"),
    "ignore-patterns": _value(_DIRECTORY),
    "use-tqdm-on-load": _switch("loading shows no progress", ON, OFF),
    "config-format": _value(_CONFIG_JSON, "auto", "hf"),
    "hf-config-path": _value(_CONFIG_JSON),
    "hf-overrides": _value(_CONFIG_JSON),
    "rope-scaling": _value(_CONFIG_JSON),
    "rope-theta": _value(_CONFIG_JSON),
    "disable-cascade-attn": _switch("attention is our own kernel", ON, OFF),
    "disable-sliding-window": _switch("windows are served as the model has them", OFF),
    "model-impl": _value("there is one implementation of each architecture", "auto"),
    "task": _value("generation is the one task", "auto", "generate"),
    "runner": _value("generation is the one task", "auto", "generate"),
    "convert": _value("generation is the one task", "auto", "none"),
    "override-generation-config": _value("change generation_config.json, or give --generation-config vllm"),
    "seed": _value("requests have seeds of their own; one that gives none has one drawn, which the answer tells"),
    # devices and memory
    "tensor-parallel-size": _value(_ONE_DEVICE, "1"),
    "pipeline-parallel-size": _value(_ONE_DEVICE, "1"),
    "data-parallel-size": _value(f"{_ONE_DEVICE}; start a server for each, behind a proxy", "1"),
    "decode-context-parallel-size": _value(_ONE_DEVICE, "1"),
    "data-parallel-size-local": _value(_ONE_DEVICE, "1"),
    "data-parallel-rank": _value(_ONE_DEVICE, "0"),
    "data-parallel-start-rank": _value(_ONE_DEVICE, "0"),
    "data-parallel-address": _value(_ONE_DEVICE),
    "data-parallel-rpc-port": _value(_ONE_DEVICE),
    "data-parallel-backend": _value(_ONE_DEVICE, "mp"),
    "data-parallel-hybrid-lb": _switch(_ONE_DEVICE, OFF),
    "max-parallel-loading-workers": _value(_ONE_DEVICE, "1"),
    "worker-cls": _value(_ONE_DEVICE, "auto"),
    "worker-extension-cls": _value(_ONE_DEVICE),
    "all2all-backend": _value(_ONE_DEVICE),
    "enable-eplb": _switch(_ONE_DEVICE, OFF),
    "eplb-config": _value(_ONE_DEVICE),
    "enable-dbo": _switch(_ONE_DEVICE, OFF),
    "enable-expert-parallel": _switch(_ONE_DEVICE, OFF),
    "distributed-executor-backend": _value(_ONE_DEVICE, "uni", "mp"),
    "disable-custom-all-reduce": _switch(_ONE_DEVICE, ON, OFF),
    "nnodes": _value(_ONE_DEVICE, "1"),
    "headless": _switch(_ONE_DEVICE),
    "gpu-memory-utilization": _value("give --memory GIB; without it 0.9 of what is free is used", "0.9"),
    "kv-cache-memory-bytes": _value("give --kv-slots TOKENS, or --memory GIB for all"),
    "num-gpu-blocks-override": _value("give --kv-slots TOKENS"),
    "kv-cache-dtype": _value("KV is kept as --dtype says", "auto"),
    "calculate-kv-scales": _switch("KV is kept as --dtype says", OFF),
    "block-size": _value(_KV, "1"),
    "kv-offloading-size": _value("KV stays in the target's process"),
    "kv-offloading-backend": _value("KV stays in the target's process"),
    "disable-hybrid-kv-cache-manager": _switch(_KV, ON, OFF),
    "use-v2-block-manager": _switch(_KV, ON, OFF),
    "swap-space": _value("nothing is swapped: a request that gives way computes its KV again", "0"),
    "cpu-offload-gb": _value("weights are kept on the device", "0"),
    "enable-sleep-mode": _switch("a model stays loaded until the server ends", OFF),
    "enable-prefix-caching": _switch("there is no prefix cache yet", OFF),
    "prefix-caching-hash-algo": _value("there is no prefix cache yet"),
    "optimization-level": _value(_GRAPHS),
    "compilation-config": _value(_GRAPHS),
    "cudagraph-capture-sizes": _value(_GRAPHS),
    "max-cudagraph-capture-size": _value(_GRAPHS),
    "max-seq-len-to-capture": _value(_GRAPHS),
    "attention-backend": _value("attention is our own kernel"),
    "mm-encoder-attn-backend": _value(_MEDIA),
    # scheduling
    "enable-chunked-prefill": _switch("prompts are always computed in chunks, beside other requests' tokens", ON),
    "max-num-partial-prefills": _value(_SCHEDULER),
    "max-long-partial-prefills": _value(_SCHEDULER),
    "scheduler-cls": _value(_SCHEDULER),
    "long-prefill-token-threshold": _value(_SCHEDULER, "0"),
    "num-scheduler-steps": _value(_SCHEDULER, "1"),
    "scheduling-policy": _value("requests are served in the order of their arrival", "fcfs"),
    "preemption-mode": _value("a request that gives way computes its KV again", "recompute"),
    "scheduler-delay-factor": _value(_SCHEDULER, "0.0"),
    "stream-interval": _value("tokens are sent as soon as they are there", "1"),
    "multi-step-stream-outputs": _switch("tokens are sent as soon as they are there", ON),
    "disable-async-output-proc": _switch("the target never waits for the server, in any mode", ON, OFF),
    "async-scheduling": _switch("the target never waits for the server, in any mode", ON, OFF),
    "num-lookahead-slots": _value(_OLD_DRAFT, "0"),
    "speculative-model": _value(_OLD_DRAFT),
    "num-speculative-tokens": _value(_OLD_DRAFT),
    "ngram-prompt-lookup-max": _value(_OLD_DRAFT),
    "ngram-prompt-lookup-min": _value(_OLD_DRAFT),
    "kv-transfer-config": _value("KV stays in the target's process"),
    "kv-events-config": _value("KV stays in the target's process"),
    # what answers hold
    "max-logprobs": _value("up to 20 are reported", "20"),
    "logprobs-mode": _value("log-probabilities are of raw logits", "raw_logprobs"),
    "return-tokens-as-token-ids": _switch("requests ask for it", OFF),
    "response-role": _value("answers are of the assistant", "assistant"),
    "chat-template-content-format": _value("contents reach the template as text", "auto", "string"),
    "trust-request-chat-template": _switch("a request brings no template of its own", OFF),
    "default-chat-template-kwargs": _value("set them in the template of --chat-template"),
    "enable-prompt-tokens-details": _switch("usage always has them", ON, OFF),
    "enable-force-include-usage": _switch("a stream has usage where stream_options ask for it", OFF),
    "enable-per-request-metrics": _switch("give --per-request-spec-decode-metrics, or read /metrics", OFF),
    "enable-request-id-headers": _switch("every answer has X-Request-Id", ON),
    "enable-auto-tool-choice": _switch(_TOOLS, OFF),
    "exclude-tools-when-tool-choice-none": _switch(_TOOLS, ON, OFF),
    "tool-call-parser": _value(_TOOLS),
    "tool-parser-plugin": _value(_TOOLS),
    "tool-server": _value(_TOOLS),
    "reasoning-parser": _value(_REASONING),
    "enable-reasoning": _switch(_REASONING, OFF),
    "guided-decoding-backend": _value(_GRAMMARS),
    "structured-outputs-config": _value(_GRAMMARS),
    "guided-decoding-disable-fallback": _switch(_GRAMMARS, OFF),
    "guided-decoding-disable-any-whitespace": _switch(_GRAMMARS, OFF),
    "guided-decoding-disable-additional-properties": _switch(_GRAMMARS, OFF),
    "enable-lora": _switch(_LORA, OFF),
    "lora-modules": _value(_LORA),
    "max-loras": _value(_LORA),
    "max-lora-rank": _value(_LORA),
    "max-cpu-loras": _value(_LORA),
    "lora-dtype": _value(_LORA, "auto"),
    "fully-sharded-loras": _switch(_LORA, OFF),
    "limit-mm-per-prompt": _value(_MEDIA),
    "mm-processor-kwargs": _value(_MEDIA),
    "mm-processor-cache-gb": _value(_MEDIA),
    "media-io-kwargs": _value(_MEDIA),
    "disable-chunked-mm-input": _switch(_MEDIA, ON, OFF),
    "disable-mm-preprocessor-cache": _switch(_MEDIA, ON, OFF),
    "skip-mm-profiling": _switch(_MEDIA, ON, OFF),
    "allowed-local-media-path": _value(_MEDIA),
    "allowed-media-domains": _value(_MEDIA),
    "enable-prompt-embeds": _switch("prompts are text or tokens", OFF),
    "pooler-config": _value("generation is the one task"),
    "language-model-only": _switch(_MEDIA, ON, OFF),
    "logits-processors": _value("a request has logit_bias, allowed_token_ids and bad_words"),
    # HTTP
    "uds": _value("a server listens at --host and --port"),
    "api-server-count": _value("one process serves HTTP", "1"),
    "root-path": _value("have the proxy strip its prefix"),
    "middleware": _value("no code of others runs in the server; a proxy in front can"),
    "allowed-origins": _value(_CORS),
    "allowed-methods": _value(_CORS),
    "allowed-headers": _value(_CORS),
    "allow-credentials": _switch(_CORS, OFF),
    "ssl-keyfile": _value(_TLS),
    "ssl-certfile": _value(_TLS),
    "ssl-ca-certs": _value(_TLS),
    "ssl-cert-reqs": _value(_TLS, "0"),
    "ssl-ciphers": _value(_TLS),
    "enable-ssl-refresh": _switch(_TLS, OFF),
    "enable-server-load-tracking": _switch("/metrics has the requests in flight", OFF),
    "disable-frontend-multiprocessing": _switch("HTTP has a process of its own", OFF),
    "disable-fastapi-docs": _switch("/openapi.json is served, pages over it are not", OFF),
    "enable-offline-docs": _switch("/openapi.json is served, pages over it are not", OFF),
    "enable-tokenizer-info-endpoint": _switch("there is no such route", OFF),
    "h11-max-incomplete-event-size": _value("heads of requests have 64 KiB, bodies --max-body-bytes"),
    "h11-max-header-count": _value("heads of requests have 64 KiB, however many headers these are"),
    "shutdown-timeout": _value("give --drain-timeout SECONDS"),
    # logs
    "disable-log-requests": _switch("give --log-prompts", ON),
    "enable-log-requests": _switch("give --log-prompts", OFF),
    "enable-log-outputs": _switch("outputs are never logged", OFF),
    "enable-log-deltas": _switch("outputs are never logged", ON, OFF),
    "log-error-stack": _switch("a traceback is logged where an error is the server's own", OFF),
    "max-log-len": _value("up to 10000 characters of a prompt are logged"),
    "aggregate-engine-logging": _switch("nothing is logged now and then; /metrics has it all", ON, OFF),
    "show-hidden-metrics-for-version": _value("/metrics has what docs/metrics.md lists"),
    "disable-log-stats": _switch("nothing is logged now and then; /metrics has it all", ON, OFF),
    "uvicorn-log-level": _value(f"{_LOGS}, all of level info and above", "info"),
    "disable-uvicorn-access-log": _switch(f"{_LOGS}; drop those of the logger pilotfish.access", OFF),
    "disable-access-log-for-endpoints": _value(f"{_LOGS}; of /health, /ready and /metrics only those of failures"),
    "log-config-file": _value(_LOGS),
    "collect-detailed-traces": _value("--otlp-traces-endpoint sends a request's span with every verify step"),
    "config": _value("give the flags themselves"),
}
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
