"""What a head's configuration says of the target that it was trained on: sizes alone do not tell two targets apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pilotfish.model.heads.fields import HeadFields
from pilotfish.model.heads.target_facts import TargetFacts

#: The field of config.json that heads trained here carry. Loaders of others ignore it.
DIGEST = "target_embedding_digest"


@dataclass(frozen=True)
class TrainedOn:
    """All that is said; "" and () where nothing is."""

    name: str = ""  # as its publishers call it
    architectures: tuple[str, ...] = ()
    digest: str = ""  # `TargetFacts.digest`

    @classmethod
    def read(cls, fields: HeadFields) -> TrainedOn:
        """Of the whole configuration; ModelError for what is no text. Others than speculators' name an architecture of
        their own alone."""
        verifier = fields.within("speculators_config").within("verifier")
        verifier.values()
        names = verifier.take("architectures", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise verifier.refused("architectures", "a list of names")
        return cls(verifier.text("name_or_path"), tuple(names), fields.text(DIGEST))

    def doubt(self, target: TargetFacts) -> str | None:
        """What of the target that it was trained on is not so of `target`; None where nothing is known to be. Digests
        say more than names: a copy may have been renamed."""
        if self.digest and (digest := target.digest()):
            other = f"other embeddings ({self.digest[:12]}) than {target.directory} ({digest[:12]})"
            return None if self.digest == digest else other
        if self.architectures and target.architecture and target.architecture not in self.architectures:
            said = ", ".join(filter(None, (self.name, *self.architectures)))
            return f"{said}, not on {target.directory} ({target.architecture})"
        return None

    def told(self, target: TargetFacts) -> str:
        """For people."""
        if (doubt := self.doubt(target)) is not None:
            return f"another target: {doubt}"
        if self.digest and target.digest():
            return "a target with these embeddings"
        return f"{self.name}, as it says" if self.name else "a target that it does not name"

    def fields(self) -> dict[str, Any]:
        """Of the digest alone, for config.json."""
        return {DIGEST: self.digest} if self.digest else {}


NOTHING_SAID = TrainedOn()
