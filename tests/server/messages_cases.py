"""Requests of Anthropic's official client, with a fixed seed, to real servers."""

from typing import Any

from json_schemas import object_of

HI = {"role": "user", "content": "Say hello."}
CITY = {"enum": ["Ås", "Oslo"]}
OF_WEATHER = object_of("city", "days", city=CITY, days={"type": "integer", "minimum": 1, "maximum": 9})
WEATHER = {"name": "weather", "description": "Of a city.", "input_schema": OF_WEATHER}
LAMP = {"type": "object", "properties": {"room": {"const": "hall"}}}
SWITCH = {"name": "switch", "input_schema": object_of("on", on={"type": "boolean"}, lamp=LAMP)}
TOOLS: dict[str, Any] = {"tools": [WEATHER, SWITCH]}
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Ås", "days": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]}
PLACE = object_of("name", "size", name=CITY, size={"anyOf": [{"type": "null"}, {"enum": [1, 2.5]}]})
FORMAT: dict[str, Any] = {"output_config": {"format": {"type": "json_schema", "schema": PLACE}}}

SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 7}
GREEDY: dict[str, Any] = {"temperature": 0}


def called(choice: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**SAMPLED, **TOOLS, "tool_choice": choice, "max_tokens": 200, **more}


#: Fields by the name of their case, over max_tokens 24 and one message.
CASES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "sampled-long": {**SAMPLED, "max_tokens": 96},
    "top-k": {**SAMPLED, "top_k": 5},
    "system": {**SAMPLED, "system": "Answer in code."},
    "system-blocks": {
        **SAMPLED,
        "system": [{"type": "text", "text": part, "cache_control": {"type": "ephemeral"}} for part in ("Answer", "so")],
    },
    "turns": {**SAMPLED, "messages": [HI, {"role": "assistant", "content": "print('hello')"}, HI]},
    "thoughts-given-back": {
        **SAMPLED,
        "messages": [
            HI,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, USE]},
            {"role": "user", "content": [RESULT]},
        ],
    },
    "goes-on": {**SAMPLED, "messages": [HI, {"role": "assistant", "content": "The answer is"}]},
    "one-token": {**SAMPLED, "max_tokens": 1, "seed": 5},  # of a whole character
    "only-the-prompt": {"max_tokens": 0},
    "metadata": {**SAMPLED, "metadata": {"user_id": "me"}, "service_tier": "auto", "thinking": {"type": "disabled"}},
    "no-speculation": {**SAMPLED, "speculation": {"mode": "off"}},
    "tools-auto": {**SAMPLED, **TOOLS},
    "tools-any": called({"type": "any"}, max_tokens=400),
    "tools-any-greedy": called({"type": "any"}, temperature=0),
    "tools-any-one": called({"type": "any", "disable_parallel_tool_use": True}),
    "tool-named": called({"type": "tool", "name": "weather"}),
    "tool-named-greedy": called({"type": "tool", "name": "switch"}, temperature=0),
    "tool-cut": called({"type": "tool", "name": "weather"}, max_tokens=51),
    "json": {**SAMPLED, **FORMAT, "max_tokens": 200},
    "json-cut": {**SAMPLED, **FORMAT, "max_tokens": 4},
}
