from typing import Any

#: Codex puts it before a conversation in place of its own text of 4,000 tokens.
INSTRUCTIONS = """\
You are a coding agent in a terminal, on the user's computer. Work on the task until it is done: look at the files \
that matter, change them, and run what shows that the change is right. Do not guess what a command can tell.

- Say in a sentence what you do next, then call a tool.
- Read files and search them with the shell: rg, sed, cat. Change them with the shell too.
- Follow AGENTS.md of the folder that you work in, and of those above it. Keep to the style of the code that is there.
- Change no more than the task asks for. Do not commit, unless you are told to.
- At the end say briefly what you changed and what you saw."""
EFFORTS = {"low": "Thinks little.", "medium": "Thinks as it is used to.", "high": "Thinks much."}
#: Bytes of a command's output that Codex gives the model.
OUTPUT = 10_000


def codex_model(name: str, context: int, *, efforts: bool) -> dict[str, Any]:
    levels = [{"effort": effort, "description": text} for effort, text in EFFORTS.items()] if efforts else []
    return {
        "slug": name,
        "display_name": name,
        "base_instructions": INSTRUCTIONS,
        "context_window": context,
        "supported_reasoning_levels": levels,
        "supports_parallel_tool_calls": True,
        "shell_type": "shell_command",
        "truncation_policy": {"mode": "bytes", "limit": OUTPUT},
        "support_verbosity": False,
        "experimental_supported_tools": [],
        "supported_in_api": True,
        "visibility": "list",
        "priority": 0,
    }
