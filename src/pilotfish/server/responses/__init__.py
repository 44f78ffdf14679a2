"""OpenAI's /v1/responses: a body (`response_body.py`) becomes the chat that it means (`response_chat.py`), and the
pieces of its output become items and their events (`response_format.py`)."""
