"""The frames of docs/draft-frames.md."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotfish.wire.channel import decode_to_draft, decode_to_target

PAGE = Path(__file__).parents[1] / "docs" / "draft-frames.md"


@dataclass(frozen=True)
class Frame:
    title: str
    to_target: bool
    values: Any
    data: bytes

    def decoded(self, data: bytes) -> Any:
        return decode_to_target(data) if self.to_target else decode_to_draft(data)


def frames() -> list[Frame]:
    found = []
    for direction in PAGE.read_text().split("\n## ")[1:]:
        for section in direction.split("\n### ")[1:]:
            values, data = re.findall(r"```(?:json|hex)\n(.*?)```", section, re.DOTALL)
            title = section.splitlines()[0]
            to_target = direction.startswith("To the target")
            found.append(Frame(title, to_target, json.loads(values), bytes.fromhex("".join(data.split()))))
    return found


FRAMES = frames()
