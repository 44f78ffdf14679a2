"""What a model wrote, taken apart: reasoning, content, tool calls."""
