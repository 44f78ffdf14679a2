"""The HTTP APIs of OpenAI and Anthropic over an engine: requests and text come in, JSON or server-sent events go out,
never tensors. `routes.py`, to be read first, has a handler for each path; `main.py` is the process around it.

routes: bodies ─► params ─► limits.RequestGuard ─► answers/stream ─► answers/formats
"""
