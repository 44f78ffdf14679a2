"""`--chat-template`: a file, or the text of a template."""

from __future__ import annotations

from pathlib import Path

from pilotfish.errors import ParameterError

FIELD = "chat_template"


def read_chat_template(given: str) -> str:
    """The template in the file `given`, or `given` itself where it cannot be a file's name: there \\n is a newline.
    ParameterError for a file that cannot be read, or what is no template."""
    template = given.replace("\\n", "\n") if any(sign in given for sign in "{}\n") else _text(given)
    _check_syntax(template)
    return template


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ParameterError(FIELD, path, f"a file that can be read ({why}), or the text of a template") from error


def _check_syntax(template: str) -> None:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Node
    from jinja2.parser import Parser

    class Generation(Extension):
        """The blocks with which some templates mark the assistant's words."""

        tags = {"generation"}  # noqa: RUF012  # as its base has them

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        jinja2.Environment(extensions=[Generation, loopcontrols]).parse(template)
    except jinja2.TemplateSyntaxError as error:
        message = f"chat_template: it is no Jinja template: line {error.lineno}: {error.message}"
        raise ParameterError.described(FIELD, message) from error
