"""Answers that are not streamed: choices, log-probabilities, usage, seeds, and the parameters for the engine."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from http_double import CHAT, COMPLETIONS, IDENTITY, Client, Engine, Health, Submitted, Update, logprob, saying, unready
from msgspec.structs import replace
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from pilotfish.core.prefilling.handover import HandOverReport
from pilotfish.engine.targets.replica import ReplicaHealth
from pilotfish.server import routes
from pilotfish.server.answers.formats import token_text
from pilotfish.wire.serving import Delta, Finish

USER = [{"role": "user", "content": "hi"}]


def test_a_completion(client: Client, engine: Engine) -> None:
    answer = client.post(COMPLETIONS, {"model": "tiny", "prompt": "def"})
    body = answer.json
    assert answer.status == 200 and answer.headers["content-type"] == "application/json"
    assert body.pop("id").startswith("cmpl-") and isinstance(body.pop("created"), int)
    assert body.pop("system_fingerprint").startswith("fp_")
    choice = {"index": 0, "text": "import os", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    details = {"prompt_tokens_details": {"cached_tokens": 0}}
    usage = {"prompt_tokens": 1, "completion_tokens": 6, "total_tokens": 7, **details}
    assert body == {"object": "text_completion", "model": "tiny", "choices": [choice], "seed": 100, "usage": usage}
    assert engine.submitted[0].params.max_tokens == 16 and engine.submitted[0].aborted  # nothing is left running


def test_cached_tokens_of_a_prompt_count_once(client: Client, engine: Engine, tokenizer: Any) -> None:
    plain = saying(tokenizer, "import os")

    def cached(submitted: Submitted) -> list[Update]:
        """With each output's first delta."""
        updates = plain(submitted)
        found = {"device": len(submitted.tokens) - 1, "disk": 1}
        return [
            Update(replace(u.delta, cached=found if u.delta.seed is not None else {}), index=u.index) for u in updates
        ]

    engine.script = cached
    asked = {"prompt": [[5, 6, 7], [8, 9]], "n": 2, "speculation": {"metrics": "summary"}}
    body = client.post(COMPLETIONS, asked).json
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}
    assert body["metrics"] == {"speculative_decoding": None, "cached_by_tier": {"device": 3, "disk": 2}}


def test_an_answer_has_the_id_of_its_request(client: Client) -> None:
    for path, fields, kind in ((COMPLETIONS, {"prompt": "x"}, "cmpl"), (CHAT, {"messages": USER}, "chatcmpl")):
        for given in ({}, {"x_request_id": "r-1"}):
            answer = client.post(path, fields, **given)
            assert answer.json["id"] == f"{kind}-{answer.headers['x-request-id']}"


def test_a_session_is_what_a_client_names_first(client: Client, engine: Engine) -> None:
    named: list[tuple[str, dict[str, Any], dict[str, str]]] = [
        (COMPLETIONS, {"prompt": "x", "user": 5}, {}),
        (COMPLETIONS, {"prompt": "x", "user": "u", "prompt_cache_key": "", "session_id": None}, {}),
        (CHAT, {"messages": USER, "user": "u", "prompt_cache_key": "k"}, {}),
        (CHAT, {"messages": USER, "prompt_cache_key": "k", "session_id": "s"}, {}),
        ("/v1/responses", {"input": "x", "user": "u", "prompt_cache_key": "k"}, {}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 4, "messages": USER, "metadata": {"user_id": "u"}}, {}),
        (CHAT, {"messages": USER, "session_id": "s"}, {"x_session_id": "header"}),
    ]
    for path, body, headers in named:
        assert client.post(path, body, **headers).status == 200
    assert [one.session for one in engine.submitted] == [None, "u", "k", "s", "k", "u", "header"]


def test_a_chat(client: Client, engine: Engine) -> None:
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    body = client.post(CHAT, {"messages": turns}).json
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    message, end = {"role": "assistant", "content": "import os"}, {"finish_reason": "stop", "stop_reason": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, **end}]
    submitted = engine.submitted[0]
    assert engine.prompt == "<system>Be brief.\n<user>a\nb\n<assistant>"
    assert submitted.params.max_tokens == 256 - len(submitted.tokens)


def test_other_weights_have_another_fingerprint(client: Client, engine: Engine) -> None:
    prints = set()
    others = ({"dtype": "bfloat16"}, {"quantization": "int8"}, {"kv_dtype": "int8"}, {"model": "other"})
    for change in ({}, *others, {"mode": "off"}):
        identity = msgspec.structs.replace(IDENTITY, **change)
        engine.health = Health(identity=identity)
        prints.add(client.post(COMPLETIONS, {"prompt": "def"}).json["system_fingerprint"])
    assert len(prints) == 1 + len(others)  # the mode changes no output


def test_parameters_reach_the_engine(client: Client, engine: Engine) -> None:
    engine.defaults = {"temperature": 0.3, "top_k": 7, "max_tokens": 40}
    fields = {"prompt": "def", "top_k": 5, "logit_bias": {"3": -1.5}, "stop": "x", "stop_token_ids": [4]}
    fields |= {"bad_words": ["y"], "allowed_token_ids": [3, 4], "min_tokens": 2, "ignore_eos": True, "seed": 9}
    fields |= {"max_tokens": 12, "cache_salt": "s", "speculation": {"max_nodes": 3}}
    assert client.post(COMPLETIONS, fields).status == 200
    submitted = engine.submitted[0]
    params = submitted.params
    assert (params.temperature, params.top_k, params.logit_bias, params.stop) == (0.3, 5, {3: -1.5}, ("x",))
    assert (params.stop_token_ids, params.bad_words, params.allowed_token_ids) == ((4,), ("y",), (3, 4))
    assert (params.min_tokens, params.ignore_eos, params.seed, params.max_tokens) == (2, True, 9, 12)
    assert (submitted.cache_salt, submitted.max_nodes) == ("s", 3)


def test_the_limit_of_a_chat(serve: Callable[..., Client], engine: Engine) -> None:
    client = serve(default_max_tokens=50)
    client.post(CHAT, {"messages": USER})
    engine.defaults = {"max_tokens": 20}
    client.post(CHAT, {"messages": USER})
    assert [each.params.max_tokens for each in engine.submitted] == [50, 20]


def test_each_prompt_has_its_own_choices(client: Client) -> None:
    body = client.post(COMPLETIONS, {"prompt": ["def", "x = [1"], "n": 2, "seed": 5}).json
    said = [(0, "import os", 5), (1, "return x", 6), (2, "import os", 5), (3, "return x", 6)]
    assert [(c["index"], c["text"], c["seed"]) for c in body["choices"]] == said
    assert body["seed"] == 5 and body["usage"]["completion_tokens"] == 22


def test_special_tokens_are_the_tokenizers(client: Client, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    encode = engine.tokenizer.encode

    def spying(text: str, add_special_tokens: bool) -> list[int]:
        asked.append(add_special_tokens)
        return list(encode(text, add_special_tokens=add_special_tokens))

    monkeypatch.setattr(engine.tokenizer, "encode", spying)
    client.post("/tokenize", {"prompt": "x"})
    client.post("/tokenize", {"prompt": "x", "add_special_tokens": False})
    client.post(COMPLETIONS, {"prompt": ["x", "y"], "add_special_tokens": False})
    assert asked[:4] == [True, False, False, False]


def test_logprobs_of_a_completion(client: Client) -> None:
    choice = client.post(COMPLETIONS, {"prompt": "def", "logprobs": 2}).json["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["im", "p", "or", "t", " o", "s"],
        "token_logprobs": [-1.5] * 6,
        "top_logprobs": [{"H": -41.0, "I": -42.0, token: -1.5} for token in ("im", "p", "or", "t", " o", "s")],
        "text_offset": [0, 2, 3, 5, 6, 8],
    }


def test_offsets_of_an_echo_count_the_special_tokens_that_show(client: Client) -> None:
    choice = client.post(COMPLETIONS, {"prompt": [0, 40, 41], "echo": True, "logprobs": 0}).json["choices"][0]
    assert choice["text"] == "<eos>HIimport os"
    assert choice["logprobs"]["text_offset"][:5] == [0, 5, 6, 7, 9]


def test_logprobs_of_a_chat(client: Client) -> None:
    fields = {"messages": USER, "logprobs": True, "top_logprobs": 1, "prompt_logprobs": 0}
    body = client.post(CHAT, fields).json
    first = body["choices"][0]["logprobs"]["content"][0]
    top = [{"token": "H", "logprob": -41.0, "bytes": [72]}]
    assert first == {"token": "im", "logprob": -1.5, "bytes": [105, 109], "top_logprobs": top}
    assert body["prompt_logprobs"][0] is None
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in body["prompt_logprobs"][1:])


def test_acceptance_of_a_request(client: Client) -> None:
    def metrics(**fields: Any) -> Any:
        return client.post(COMPLETIONS, {"prompt": "x", **fields}).json.get("metrics")

    histograms = {"acceptance_histogram": {"1": 3}, "acceptance_histogram_by_draft_length": {"3": {"1": 3}}}
    counts = {"num_spec_steps": 3, "num_accepted_draft_tokens": 3, "num_draft_tokens": 9, "num_spec_tokens": 8}
    summary = {"mean_acceptance_length": 2.0, "draft_acceptance_rate": 1 / 3, **histograms, **counts}
    assert metrics() is None
    ours = {"accepted_by_origin": {"lm": 3}, "cached_by_tier": {}}
    assert metrics(speculation={"metrics": "summary"}) == {"speculative_decoding": summary, **ours}
    steps = {"per_step_accepted": [1, 1, 1], "per_step_drafted": [3, 3, 3]}
    assert metrics(speculation={"metrics": "detailed"}) == {"speculative_decoding": summary | steps, **ours}
    assert metrics(n=2, speculation={"metrics": "summary"}) == {"speculative_decoding": None, "cached_by_tier": {}}


def test_hand_overs_of_a_request(client: Client, engine: Engine) -> None:
    lost = HandOverReport("east", "tcp", "gone", began=1.0, seconds=0.5, tokens=2)
    whole = HandOverReport("east", "shm", "whole", 2.0, 2.0, 0.5, 1.25, 0.75, 0.75, 0.5, size=4096, tokens=6)

    def handed(submitted: Submitted) -> list[Update]:
        first, *rest = scripted(submitted)
        return [Update(replace(first.delta, handovers=[lost, whole]), index=first.index), *rest]

    scripted, engine.script = engine.script, handed
    told = {**dataclasses.asdict(whole), "exposed": 0.25}
    none = {**dataclasses.asdict(lost), "exposed": 0.0}
    body = {"prompt": "x", "speculation": {"metrics": "summary"}}
    metrics = client.post(COMPLETIONS, body).json["metrics"]
    assert metrics["handed_over"] == 8 and "handovers" not in metrics
    metrics = client.post(COMPLETIONS, {**body, "speculation": {"metrics": "detailed"}}).json["metrics"]
    assert metrics["handed_over"] == 8 and metrics["handovers"] == [none, told]
    events = client.post(COMPLETIONS, {**body, "speculation": {"detail": True}, "stream": True}).events
    details = [event["pilotfish"]["handovers"] for event in events if event["choices"]]
    assert details == [[none, told]] + [[]] * (len(details) - 1)


def test_the_servers_level_of_metrics(serve: Callable[..., Client]) -> None:
    client = serve(metrics="summary")
    assert client.post(COMPLETIONS, {"prompt": "x"}).json["metrics"]["speculative_decoding"]["num_spec_steps"] == 3
    assert "metrics" not in client.post(COMPLETIONS, {"prompt": "x", "speculation": {"metrics": "none"}}).json


def test_models(serve: Callable[..., Client]) -> None:
    client = serve(served_model_name=("a", "org/b"))
    assert [model["id"] for model in client.get("/v1/models").json["data"]] == ["a", "org/b"]
    assert client.get("/v1/models/org/b").json["max_model_len"] == 256
    assert client.get("/v1/models/org/b").json["chat"] is True
    assert client.get("/v1/models/tiny").status == 404
    assert client.post(COMPLETIONS, {"model": "org/b", "prompt": "x"}).json["model"] == "org/b"


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
def test_a_model_whose_template_has_no_turns_has_no_chat(client: Client, engine: Engine, template: str | None) -> None:
    engine.tokenizer.chat_template = template
    assert client.get("/v1/models/tiny").json["chat"] is False


def test_tokenize_and_back(client: Client, tokenizer: Any) -> None:
    body = client.post("/tokenize", {"prompt": "def f", "return_token_strs": True}).json
    assert body["tokens"] == tokenizer.encode("def f") and body["count"] == len(body["token_strs"])
    assert client.post("/detokenize", {"tokens": body["tokens"]}).json == {"prompt": "def f"}
    chat = client.post("/tokenize", {"messages": USER}).json["tokens"]
    assert tokenizer.decode(chat) == "<user>hi\n<assistant>"
    assert client.post("/tokenize", {}).status == client.post("/detokenize", {"tokens": [-1]}).status == 400


def test_a_long_text_is_tokenized_elsewhere(client: Client, tokenizer: Any) -> None:
    text = "def add(a, b)\n" * 160
    assert client.post("/tokenize", {"prompt": text}).json["tokens"] == tokenizer.encode(text)


def test_a_target_that_is_not_ready(client: Client, engine: Engine) -> None:
    assert client.get("/ready").json == {"ready": True, "reason": "", "restarts": 0}
    told = [ReplicaHealth("target 0", requests=3), ReplicaHealth("target 1", False, "target 1: loading")]
    engine.health = Health(replicas=tuple(told))
    assert client.get("/ready").json["replicas"] == [
        {"name": "target 0", "ready": True, "reason": "", "requests": 3},
        {"name": "target 1", "ready": False, "reason": "target 1: loading", "requests": 0},
    ]
    engine.health = unready("target: it starts")
    ready = client.get("/ready")
    assert (ready.status, ready.json["reason"]) == (503, "target: it starts")
    assert client.get("/health").status == client.get("/version").status == 200
    answer = client.post(COMPLETIONS, {"prompt": "x"})
    assert (answer.status, answer.error["type"]) == (503, "service_unavailable")
    assert answer.error["message"] == "target: it starts" and int(answer.headers["retry-after"]) > 0
    engine.health = Health(restarts=1)
    assert client.get("/ready").json["restarts"] == 1


@pytest.mark.parametrize(("given", "kept"), [("abc-1", True), ("x" * 128, True), ("x" * 129, False), ("é", False)])
def test_request_ids(client: Client, given: str, kept: bool) -> None:
    for answer in (client.get("/health", x_request_id=given), client.post(CHAT, {}, x_request_id=given)):
        assert (answer.headers["x-request-id"] == given) is kept and answer.headers["x-request-id"]
    assert client.get("/health").headers["x-request-id"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": [40, 41, 42, 43, 44], "prompt_logprobs": 1}),
        (COMPLETIONS, {"prompt": [40, 41, 42, 43, 44], "echo": True, "logprobs": 1}),
        (CHAT, {"messages": USER, "prompt_logprobs": 1}),
        (COMPLETIONS, {"prompt": [40], "logprobs": 1}),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 1}),
    ],
)
def test_log_probabilities_are_written_as_they_come(
    client: Client, engine: Engine, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    """Once the last update has come no token is named any more: streams beside do not wait for a whole prompt's."""
    names, named, after_each = token_text(engine.tokenizer), list[int](), list[int]()

    def noting(token: int) -> tuple[str, list[int]]:
        named.append(token)
        return names(token)

    def script(submitted: Submitted) -> Iterator[Update]:
        empty, of_prompt = Delta(1, 0, [], "", [], []), submitted.params.prompt_logprobs is not None
        for token in range(50, 54):
            scores, end = [logprob(token, 1)], [0]
            given = {"prompt_logprobs": scores} if of_prompt else {"logprobs": scores, "tokens": [token], "ends": end}
            yield Update(replace(empty, **given))
            after_each.append(named.count(token))
        yield Update(replace(empty, finish=Finish("length", None)))

    engine.script = script
    monkeypatch.setattr(routes, "token_text", lambda _: noting)
    body = client.post(path, fields).json
    assert min(after_each) >= 1 and sum(named.count(token) for token in range(50, 54)) == sum(after_each)
    assert json.dumps(body).count("-1.5") >= 4


# -- tokens as text and bytes


@pytest.fixture(scope="module")
def sentencepiece() -> Any:
    """Words that begin with a lower one eighth block, and single bytes."""
    vocab = {"<unk>": 0, "▁the": 1, "x": 2, "<0xE2>": 3, "<0x41>": 4}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_words_keep_their_space(sentencepiece: Any) -> None:
    names = token_text(sentencepiece)
    assert [names(token)[0] for token in (1, 2, 3, 4)] == [" the", "x", "bytes:\\xe2", "A"]
    assert names(3)[1] == [0xE2]


def test_bytes_add_up_to_the_text(tokenizer: Any) -> None:
    text = "def f(a):\n\treturn 'naïve ☃ 😀'"
    names = token_text(tokenizer)
    assert bytes(byte for token in tokenizer.encode(text) for byte in names(token)[1]).decode() == text


def test_special_tokens_are_themselves_and_ids_beyond_the_vocabulary_empty(tokenizer: Any) -> None:
    """Some models have more logits than their tokenizer has tokens."""
    assert token_text(tokenizer)(tokenizer.eos_token_id) == ("<eos>", list(b"<eos>"))
    assert token_text(tokenizer)(100_000) == ("", [])
