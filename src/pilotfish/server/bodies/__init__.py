"""JSON (read by `schemas.py`, typed in `requests.py`) becomes a `params.Generation`; `server/answers/` submits it.

A field of `SamplingParams` is in completions, chats and responses by itself; `server/messages/message_chat.py` names it
for messages. Any other is a field of `SharedFields`, or of `GenerationRequest` or `ResponsesRequest` alone, of
`Generation`, which `server/routes.py` fills in, and of `EngineRequest` in `wire/serving.py`, which the engine gets."""
