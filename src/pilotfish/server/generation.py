"""/v1/completions and /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from pilotfish.server.body import read
from pilotfish.server.envelope import MAX_ID, is_request_id, request_id
from pilotfish.server.failures import HttpError, bad
from pilotfish.server.formats import ChatFormat, TextFormat
from pilotfish.server.gate import Caller, Demand
from pilotfish.server.job import Job, Plan
from pilotfish.server.logs import log_prompt, prompts_are_logged
from pilotfish.server.outputs import Outputs
from pilotfish.server.params import (
    Room,
    deadline,
    max_nodes,
    num_logprobs,
    only_echo,
    reserved_tokens,
    sampling_params,
)
from pilotfish.server.prompts import Prompt, chat_prompt_of, completion_prompts, truncated
from pilotfish.server.requests import ChatRequest, CompletionRequest, GenerationRequest, Speculation, StreamOptions
from pilotfish.server.service import Service
from pilotfish.server.sse import JobResponse


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["generation"])

    @routes.post("/v1/completions", operation_id="completions")
    async def completions(request: Request) -> Response:
        """Continue each prompt."""
        caller = service.gate.identify(request)
        asked = await read(request, CompletionRequest, service.config)
        model = service.name(asked.model)
        service.refuse_long("prompt", asked.texts)
        prompts = await completion_prompts(asked, service.engine.tokenizer, service.config.max_prompts)
        return respond(service, request, asked, plan_of(service, request, caller, asked, model, prompts), caller)

    @routes.post("/v1/chat/completions", operation_id="chat_completions")
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        caller = service.gate.identify(request)
        asked = await read(request, ChatRequest, service.config)
        model = service.name(asked.model)
        service.refuse_long("messages", (message.text for message in asked.messages))
        prompts = [await chat_prompt_of(asked, service.engine.tokenizer)]
        return respond(service, request, asked, plan_of(service, request, caller, asked, model, prompts), caller)

    return routes


def plan_of(
    service: Service, request: Request, caller: Caller, asked: GenerationRequest, model: str, prompts: Sequence[Prompt]
) -> Plan:
    """HttpError or ParameterError names the first field that cannot be."""
    chat = isinstance(asked, ChatRequest)
    identity = service.identity
    speculation = asked.speculation or Speculation()
    options = _stream_options(asked)
    room = Room(identity.context, identity.kv_slots)
    kept = tuple(truncated(prompt, asked, room.most - reserved_tokens(asked)) for prompt in prompts)
    room = replace(room, prompt=max(len(prompt.tokens) for prompt in kept))
    return Plan(
        id=("chatcmpl-" if chat else "cmpl-") + _own_id(request, asked),
        created=int(time.time()),
        model=model,
        fingerprint=service.fingerprint,
        prompts=kept,
        params=sampling_params(asked, service.engine.defaults, room, service.config),
        max_nodes=max_nodes(speculation, identity),
        cache_salt=_cache_salt(caller, asked),
        seconds=deadline(asked.timeout, service.config.request_timeout),
        metrics=speculation.metrics or service.config.metrics,
        spec_tokens=identity.max_nodes,
        logprobs=num_logprobs(asked),
        prompt_logprobs=asked.prompt_logprobs is not None,
        echo=not chat and bool(asked.echo),
        echoed=_echoed(asked),
        only_echo=only_echo(asked),
        token_ids=bool(asked.return_token_ids),
        tokens_as_ids=bool(asked.return_tokens_as_token_ids),
        seed_as_text=isinstance(asked.seed, str),
        detail=bool(speculation.detail),
        usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
    )


def respond(service: Service, request: Request, asked: GenerationRequest, plan: Plan, caller: Caller) -> Response:
    """HttpError where the gate turns the request away."""
    chat, stream = isinstance(asked, ChatRequest), bool(asked.stream)
    lengths = tuple(len(prompt.tokens) for prompt in plan.prompts)
    demand = Demand(request_id(request.scope), lengths, plan.params, plan.max_nodes, chat, stream, _tag(asked))
    ticket = service.gate.admit(caller, demand)
    if prompts_are_logged():
        for prompt in plan.prompts:
            log_prompt(service.engine.tokenizer.decode(prompt.tokens))
    job, outputs = Job(plan, service.engine, ticket), Outputs(plan)
    shape = (ChatFormat if chat else TextFormat)(plan, outputs, service.engine.tokenizer, service.pieces)
    return JobResponse(job, outputs, shape, stream=stream)


def _own_id(request: Request, asked: GenerationRequest) -> str:
    """That of the log's lines, unless the body gives one."""
    given = asked.request_id
    if given is not None and not is_request_id(given):
        raise bad("request_id", given, f"1 to {MAX_ID} printable ASCII characters")
    return request_id(request.scope) if given is None else given


def _echoed(asked: GenerationRequest) -> str:
    """What a chat's answer begins with: the last message, where the assistant speaks on."""
    if not isinstance(asked, ChatRequest) or not asked.echo or asked.messages[-1].role != "assistant":
        return ""
    return asked.messages[-1].text


def _tag(asked: GenerationRequest) -> Any:
    return asked.metadata.get("tag") if isinstance(asked.metadata, dict) else None


def _stream_options(asked: GenerationRequest) -> StreamOptions:
    if asked.stream_options is not None and not asked.stream:
        raise HttpError(400, "stream_options: it is not allowed without stream", param="stream_options")
    return asked.stream_options or StreamOptions()


def _cache_salt(caller: Caller, asked: GenerationRequest) -> str | None:
    if caller.cache_salt is not None and asked.cache_salt is not None:
        raise bad("cache_salt", asked.cache_salt, "none, as the key has its own")
    return asked.cache_salt if caller.cache_salt is None else caller.cache_salt
