"""JSON (read by `schemas.py`, typed in `requests.py`) becomes a `params.Generation`, which `answers/stream.py` submits.

A field is added where the engine needs it: one of `SamplingParams` is in completions, chats and responses by itself
(`requests.SAMPLING`), and `message_chat.py` names it for messages. Any other is a field of `GenerationRequest` (and of
`response_chat.SHARED`), and one of `Generation`, which `routes.Api._generation` fills in and `stream.py` hands over."""
