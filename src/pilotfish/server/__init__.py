"""OpenAI's HTTP API over an engine: knows requests and text, never tensors.

body ─► requests ─► prompts, params ─► Gate ─► Generation ─► choices ─► answers (JSON) or events (SSE)
"""
