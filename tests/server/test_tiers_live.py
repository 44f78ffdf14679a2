"""A real server with tiers of KV: its metrics say what its answers said, before and after a restart."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from live import LiveServer
from prometheus_client.parser import text_string_to_metric_families
from sizes import in_soak

#: Prompts of which the pool holds one at a time.
PROMPTS = [[3 + (place + 7 * i) % 97 for i in range(300)] for place in range(3)]
BODY = {"max_tokens": 4, "temperature": 0, "speculation": {"metrics": "summary"}}


def ask(server: LiveServer) -> tuple[list[str], Counter[str]]:
    """Texts for all prompts, and where the KV of the prompts' tokens came from."""
    texts, sources = [], Counter[str]()
    for prompt in PROMPTS:
        status, answer = server.post("/v1/completions", {"prompt": prompt, **BODY})
        assert status == 200
        cached, found = answer["metrics"]["cached_by_tier"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert found == sum(cached.values())
        texts.append(answer["choices"][0]["text"])
        sources.update({**cached, "computed": len(prompt) - found})
    return texts, sources


def told(server: LiveServer, name: str, label: str) -> dict[str, float]:
    """Samples of a metric by one of its labels."""
    families = text_string_to_metric_families(server.get("/metrics")[1])
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return {sample.labels[label]: sample.value for sample in samples}


@in_soak
def test_metrics_say_what_answers_say(llama: Path, tmp_path: Path) -> None:
    options = {"kv_slots": 512, "kv_host_memory": 0.005, "kv_disk": tmp_path / "kv", "kv_disk_size": 0.1}
    first: list[str] | None = None
    for restarted in (False, True):
        with LiveServer(llama, **options) as server:
            on_disk = told(server, "pilotfish_kv_used_bytes", "tier")["disk"]
            assert (on_disk > 0) == restarted
            texts, sources = ask(server)
            again, more = ask(server)
            first = first or texts
            assert texts == again == first
            by_source = told(server, "pilotfish_kv_prompt_tokens_total", "source")
            assert {source: count for source, count in by_source.items() if count} == sources + more
            assert sum(by_source.values()) == server.metric("vllm:prefix_cache_queries_total") == 1800
            assert server.metric("vllm:external_prefix_cache_hits_total") == by_source["host"] + by_source["disk"]
            assert set(told(server, "pilotfish_kv_capacity_bytes", "tier")) == {"device", "host", "disk"}
