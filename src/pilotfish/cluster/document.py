"""Cluster files: YAML that refuses aliases, which make small files large, deep nesting and repeated keys."""

from typing import Any

import yaml

from pilotfish.errors import InputError

#: Levels of nesting. A cluster file has fewer.
MAX_DEPTH = 16


class _Loader(yaml.SafeLoader):
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise _refused(self.peek_event(), "an alias is not allowed; write the value out")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _refused(self.peek_event(), f"more than {MAX_DEPTH} levels are not allowed")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refused(key, "a key must be a name")
            if key.value in names:
                raise _refused(key, f"{key.value!r} is given twice")
            names.add(key.value)
        return super().construct_mapping(node, deep)


def _refused(where: Any, reason: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=reason, problem_mark=where.start_mark)


def document(content: bytes) -> Any:
    """InputError, naming the line, for what is no such document."""
    try:
        return yaml.load(content, _Loader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise InputError(f"{line}{error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        raise InputError(f"it is no YAML: {str(error).splitlines()[0]}") from error
