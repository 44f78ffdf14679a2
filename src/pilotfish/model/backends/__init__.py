"""Drafts on other engines, each an extra: executors over OpenVINO and llama.cpp. Rows of slots come in, as for our own
executor, and logits go out; open `logits_executor.py` first."""
