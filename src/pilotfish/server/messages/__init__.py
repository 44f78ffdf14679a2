"""Anthropic's /v1/messages: a body (`message_body.py`) becomes the chat that it means (`message_chat.py`), and the
pieces of its output become blocks and their events (`message_format.py`)."""
