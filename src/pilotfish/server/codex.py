import tomllib
from pathlib import Path
from typing import Any

_DECLARED: dict[str, Any] = tomllib.loads(Path(__file__).with_name("codex.toml").read_text("utf-8"))


def codex_model(name: str, context: int, *, efforts: bool) -> dict[str, Any]:
    own = {"slug": name, "display_name": name, "context_window": context}
    return {**own, "supported_reasoning_levels": _DECLARED["efforts"] if efforts else [], **_DECLARED["model"]}
