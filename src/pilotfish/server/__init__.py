"""OpenAI's HTTP API over an engine: knows requests and text, never tensors.

routes: body ─► schemas ─► params ─► limits.RequestGuard ─► stream ─► formats ─► JSON or server-sent events
"""
