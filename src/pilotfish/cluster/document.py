from __future__ import annotations

from typing import Any

import yaml

from pilotfish.errors import InputError


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in names:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice", problem_mark=key.start_mark)
            names.add(key.value)
        return super().construct_mapping(node, deep)


def document(content: bytes) -> Any:
    """InputError names the line."""
    try:
        return yaml.load(content, _Loader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise InputError(f"{line}{error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        raise InputError(f"it is no YAML: {str(error).splitlines()[0]}") from error
