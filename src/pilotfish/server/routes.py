import asyncio
import hashlib
import math
import time
import tomllib
from collections.abc import Iterable
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pilotfish.config.server import ServerConfig
from pilotfish.engine.targets.async_engine import AsyncEngine
from pilotfish.engine.targets.stream import Submits
from pilotfish.errors import TargetUnavailable
from pilotfish.logs import log_prompt, prompts_are_logged
from pilotfish.operate.outcome import script_of
from pilotfish.printable import short
from pilotfish.prompts import marks_turns
from pilotfish.server.answers.formats import AnswerFormat, TokenNames, token_text
from pilotfish.server.answers.openai_formats import ChatFormat, TextFormat
from pilotfish.server.answers.stream import GenerationResponse
from pilotfish.server.auth import Caller
from pilotfish.server.bodies import params, requests
from pilotfish.server.bodies.client_texts import ClientTexts, plain_texts
from pilotfish.server.bodies.params import Generation, TokenizedPrompt
from pilotfish.server.bodies.reading import OutputFormats, OutputReading, plain_reading
from pilotfish.server.bodies.requests import GenerationRequest
from pilotfish.server.bodies.schemas import Body, read_body
from pilotfish.server.bodies.tools import tool_use
from pilotfish.server.http_errors import HttpError, bad, bad_request, encode
from pilotfish.server.limits import RequestGuard, request_tag
from pilotfish.server.messages.message_body import CountTokensRequest, MessagesRequest
from pilotfish.server.messages.message_chat import chat_of
from pilotfish.server.messages.message_format import MessageFormat
from pilotfish.server.middleware import ignored_of, state_of
from pilotfish.server.observe.fleet_metrics import draft_revisions, pools_of
from pilotfish.server.responses import response_chat
from pilotfish.server.responses.response_body import ResponsesRequest
from pilotfish.server.responses.response_format import ResponseFormat
from pilotfish.server.traffic.cascade import Cascade
from pilotfish.wire.serving import Identity

VERSION = version("pilotfish")
OPENAPI = msgspec.json.format(Path(__file__).with_name("openapi.json").read_bytes(), indent=-1)
#: Header that groups requests into a session, for clients whose bodies do not.
SESSION_HEADER = "x-session-id"
SCRIPT_TOKENS = 64  # last tokens of a prompt by which its script is determined
#: What Codex is told of any model, and of the efforts of one that knows them.
CODEX: dict[str, Any] = tomllib.loads(Path(__file__).with_name("codex.toml").read_text("utf-8"))


class Api:
    def __init__(self, engine: AsyncEngine, config: ServerConfig, guard: RequestGuard, cascade: Cascade | None) -> None:
        self._engine, self._config, self._guard, self._cascade = engine, config, guard, cascade
        self._started = int(time.time())

    async def completions(self, request: Request) -> Response:
        """Continue each prompt."""
        caller, body = await self._read(request, requests.CompletionRequest)
        self._refuse_long("prompt", (prompt for prompt in body.prompts if isinstance(prompt, str)))
        reading = plain_reading(body)
        prompts = await params.completion_prompts(body, self._texts, self._config.max_prompts)
        return self._respond(request, caller, self._generation(request, caller, body, prompts, reading), TextFormat)

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        caller, body = await self._read(request, requests.ChatRequest)
        return self._respond(request, caller, await self._chat(request, caller, body), ChatFormat)

    async def messages(self, request: Request) -> Response:
        """Answer a conversation, in Anthropic's API."""
        caller, body = await self._read(request, MessagesRequest)
        chat = chat_of(body, ignored_of(request), reasons=self._formats.reasoning is not None)
        return self._respond(request, caller, await self._chat(request, caller, chat), MessageFormat)

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens of a prompt such a conversation is."""
        _, body = await self._read(request, CountTokensRequest)
        chat = chat_of(body, ignored_of(request), reasons=self._formats.reasoning is not None)
        return json({"input_tokens": await self._count(request, chat)})

    async def responses(self, request: Request) -> Response:
        """Answer a conversation of items with items."""
        caller, body = await self._read(request, ResponsesRequest)
        chat = response_chat.chat_of(body, ignored_of(request))
        return self._respond(request, caller, await self._chat(request, caller, chat), ResponseFormat)

    async def response_tokens(self, request: Request) -> Response:
        """How many tokens of a prompt such a conversation is."""
        _, body = await self._read(request, ResponsesRequest)
        count = await self._count(request, response_chat.chat_of(body, ignored_of(request)))
        return json({"object": "response.input_tokens", "input_tokens": count})

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a prompt, or of the chat template around messages."""
        _, body = await self._read(request, requests.TokenizeRequest)
        tokenizer = self._engine.tokenizer
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("prompt", "exactly one of prompt and messages is needed")
        if body.prompt is not None:
            self._refuse_long("prompt", [body.prompt])
            tokens = await params.text_tokens(body.prompt, self._texts, special=body.add_special_tokens is not False)
        else:
            tokens = await self._chat_tokens(request, body)
        strings = tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        most = self._identity.context
        return json({"tokens": tokens, "count": len(tokens), "max_model_len": most, "token_strs": strings})

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        _, body = await self._read(request, requests.DetokenizeRequest)
        params.check_token_ids("tokens", body.tokens, self._engine.tokenizer)
        return json({"prompt": await params.tokens_text(body.tokens, self._engine.tokenizer)})

    async def feedback(self, request: Request) -> Response:
        """Tell whether an answer served its purpose, once."""
        if request.method == "GET":
            return await self.feedback_table(request)
        caller, body = await self._read(request, requests.FeedbackRequest)
        return json(self._guard.feedback.add(caller.name, body))

    async def feedback_table(self, request: Request) -> Response:
        """What callers told so far, by category, with and without speculation."""
        self._guard.identify(request)
        return json({"data": self._guard.feedback.table(), "object": "list"})

    async def rollout(self, request: Request) -> Response:
        """Variants of speculation: shares, the guard's state and events, and what came of their requests."""
        self._guard.identify_admin(request)
        return json(self._guard.rollout.told())

    async def rollout_statistics(self, request: Request) -> Response:
        """What came of requests by cohort and minute, to explain a change later."""
        self._guard.identify_admin(request)
        return json(self._guard.rollout.statistics())

    async def drafts(self, request: Request) -> Response:
        """The draft pools that each target knows."""
        self._guard.identify_admin(request)
        return json(pools_of(self._engine.health.replicas))

    async def rollout_reload(self, request: Request) -> Response:
        """Read the file of variants again. 400 for one that cannot be used: then the last one stays."""
        self._guard.identify_admin(request)
        if self._guard.rollout.file is None:
            raise bad_request("rollout", "this server was started without a file of variants (--rollout)")
        self._guard.rollout.reload(draft_revisions(self._engine.health.replicas).values())
        return json(self._guard.rollout.told())

    async def models(self, request: Request) -> Response:
        """The model that is served, by each of its names, and the alias of a cascade."""
        self._guard.identify(request)
        models = {"data": [self._model(name) for name in self._asked_for], "object": "list"}
        if "client_version" in request.query_params:
            levels = CODEX["efforts"] if "reasoning_effort" in self._formats.template else []
            own = {"context_window": self._identity.context, "supported_reasoning_levels": levels, **CODEX["model"]}
            models["models"] = [{"slug": name, "display_name": name, **own} for name in self._asked_for]
        return json(models)

    async def model(self, request: Request) -> Response:
        """404 for a model that is not served."""
        self._guard.identify(request)
        return json(self._model(self._name(request.path_params["name"])))

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        """200 as long as the server answers at all."""
        return json({"status": "ok"})

    async def ready(self, request: Request) -> Response:  # noqa: ARG002
        """503, with the reason, while requests would not be served."""
        health = self._engine.health
        draining = "draining: the server ends once its requests have"
        reason = draining if self._guard.admission.closed else health.reason
        answer = {"ready": not reason, "reason": reason, "restarts": health.restarts}  # of the targets
        if len(health.replicas) > 1:
            answer["replicas"] = [replica.told() for replica in health.replicas]
        return json(answer, 503 if reason else 200)

    async def version(self, request: Request) -> Response:  # noqa: ARG002
        """Pilotfish's version."""
        return json({"version": VERSION})

    async def openapi(self, request: Request) -> Response:  # noqa: ARG002
        return Response(OPENAPI, media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        """Metrics for Prometheus."""
        body, kind = await asyncio.to_thread(self._guard.metrics.render, request.headers.get("accept", ""))
        return Response(body, media_type=kind)

    # -- the model

    @property
    def _identity(self) -> Identity:
        """TargetUnavailable until the target was ready once."""
        health = self._engine.health
        if health.identity is None:
            raise TargetUnavailable(health.reason, health.retry_after)
        return health.identity

    @property
    def _names(self) -> tuple[str, ...]:
        return self._config.served_model_name or (self._identity.model,)

    @property
    def _asked_for(self) -> tuple[str, ...]:
        return self._names if self._cascade is None else (*self._names, self._cascade.name)

    def _name(self, asked: str | None) -> str:
        """The name to answer with; None asks for the served model. HttpError 404 for a model that is not served."""
        if asked is not None and asked not in self._asked_for:
            message = f"model: {short(asked)} is not served; expected {' or '.join(self._asked_for)}"
            raise HttpError(404, message, param="model", code="model_not_found")
        return asked or self._names[0]

    def _model(self, name: str) -> dict[str, Any]:
        facts = {"max_model_len": self._identity.context, "chat": self._chats, "exact": self._identity.exact}
        return {"id": name, "created": self._started, "object": "model", "owned_by": "pilotfish", **facts}

    def _fingerprint(self, cascade: Cascade | None) -> str:
        target, beside = self._identity, "" if cascade is None else f"\n{cascade.facts}"
        kinds = target.model, target.dtype, target.quantization, target.kv_dtype, target.exact, VERSION
        text = "\n".join(map(str, kinds)) + beside
        return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def _texts(self) -> ClientTexts:
        tokenizer = self._engine.tokenizer
        return ClientTexts(tokenizer) if self._config.special_in_user_text else plain_texts(tokenizer)

    @cached_property
    def _token_text(self) -> TokenNames:
        return token_text(self._engine.tokenizer)

    @cached_property
    def _formats(self) -> OutputFormats:
        return OutputFormats(self._config, self._engine.tokenizer)

    @cached_property
    def _chats(self) -> bool:
        return marks_turns(self._engine.tokenizer)

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._engine.tokenizer.get_vocab()))

    # -- requests

    async def _read(self, request: Request, kind: type[Body]) -> tuple[Caller, Body]:
        caller = self._guard.identify(request)
        body = await read_body(request, kind, self._config, ignored_of(request))
        state_of(request.scope).field_names = body.chat_names
        self._name(body.model)
        return caller, body

    def _refuse_long(self, field: str, texts: Iterable[str]) -> None:
        """HttpError for more characters than the context can hold: tokenizing such a text would hold up others."""
        context = self._identity.context
        for text in texts:
            if len(text) > context * self._longest_token:
                problem = f"{len(text)} characters are more than the context's {context} tokens can be"
                raise bad_request(field, problem, "context_length_exceeded")

    async def _chat(self, request: Request, caller: Caller, body: requests.ChatRequest) -> Generation:
        body = params.with_effort(body, self._engine.tokenizer, ignored_of(request))
        use, tokens = tool_use(body), await self._chat_tokens(request, body)
        if not tokens:
            raise bad_request("messages", "the chat template makes nothing of them; at least one token is needed")
        reading = self._formats.chat(body, use, tokens)
        return self._generation(request, caller, body, [TokenizedPrompt(tokens)], reading)

    async def _count(self, request: Request, chat: requests.ChatRequest) -> int:
        tool_use(chat)  # refuses tools that cannot be
        chat = params.with_effort(chat, self._engine.tokenizer, ignored_of(request))
        return len(await self._chat_tokens(request, chat))

    async def _chat_tokens(self, request: Request, body: requests.ChatRequest | requests.TokenizeRequest) -> list[int]:
        self._refuse_long("messages", params.chat_texts(body))
        self._formats.tell_lost(body, ignored_of(request))
        return await params.chat_tokens(body, self._texts, tools_as_text=self._formats.as_text(body))

    def _respond(self, request: Request, caller: Caller, generation: Generation, form: type[AnswerFormat]) -> Response:
        tokenizer = self._engine.tokenizer
        record = self._guard.admit(request, caller, generation)
        if prompts_are_logged():
            for prompt in generation.prompts:
                log_prompt(tokenizer.decode(prompt.tokens))
        submit: Submits = self._engine.submit
        if self._cascade is not None and generation.cascade is not None:
            exact = generation.body.limit[1] is not None
            submit = self._cascade.of(generation.cascade, self._names[0], exact=exact)
        return GenerationResponse(form(generation, tokenizer, self._token_text), submit, record)

    def _generation(
        self,
        request: Request,
        caller: Caller,
        body: GenerationRequest,
        prompts: list[TokenizedPrompt],
        reading: OutputReading,
    ) -> Generation:
        target, speculation = self._identity, body.speculation or requests.SpeculationOptions()
        nodes = params.max_nodes(speculation, target, ignored_of(request))
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options", "it is not allowed without stream")
        if caller.cache_salt is not None and body.cache_salt is not None:
            raise bad("cache_salt", body.cache_salt, "none, as the key has its own")
        parts = params.kept(prompts, body, target.longest)
        longest = max(len(prompt.tokens) for prompt in parts)
        cascade = None if self._cascade is None or body.model != self._cascade.name else self._cascade
        return Generation(
            body=body,
            head={
                "id": f"{body.id_prefix}{body.request_id or state_of(request.scope).id}",
                "object": body.event_object if body.stream else body.answer_object,
                "created": int(time.time()),
                "model": self._name(body.model),
                "system_fingerprint": self._fingerprint(cascade),
            },
            target=target,
            prompts=parts,
            params=params.sampling_params(body, reading, self._engine.defaults, longest, target, self._config),
            reading=reading,
            choice=self._guard.choose(request, caller, body, nodes),
            script=script_of(self._engine.tokenizer.decode(parts[0].tokens[-SCRIPT_TOKENS:])),
            cache_salt=body.cache_salt if caller.cache_salt is None else caller.cache_salt,
            session=request.headers.get(SESSION_HEADER) or body.session,
            timeout=min(body.timeout or math.inf, self._config.request_timeout),
            metrics=speculation.metrics or self._config.metrics,
            cascade=None if cascade is None else cascade.begin(request_tag(request, body), longest),
        )


def json(answer: Any, status: int = 200) -> Response:
    return Response(encode(answer), status, media_type="application/json")
