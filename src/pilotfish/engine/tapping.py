"""Imports no torch: workers start afterwards."""

from dataclasses import replace

from pilotfish.config.engine import EngineConfig
from pilotfish.errors import ParameterError
from pilotfish.model.heads.weights import is_head


def with_features(config: EngineConfig) -> EngineConfig:
    """Adds a draft that is a trained head if this engine or its workers grow its trees. ParameterError for `features`
    that are no head or another one, and for `draft_layers` of a draft that is no head."""
    if config.features is not None and not is_head(config.features):
        raise ParameterError("features", str(config.features), "the directory of a trained head")
    grown_here = config.mode == "sync" or config.starts_drafts
    if config.draft is None or "lm" not in config.drafters or not grown_here:
        return config
    if not is_head(config.draft):
        if config.draft_layers and config.features is None:
            given = ",".join(map(str, config.draft_layers))
            raise ParameterError("draft_layers", given, f"nothing: {config.draft} is no trained head")
        return config
    if config.features not in (None, config.draft):
        allowed = f"nothing but the draft, which is a head: {config.draft}"
        raise ParameterError("features", str(config.features), allowed)
    return replace(config, features=config.draft)
