"""Drafts on other people's engines: executors over OpenVINO and llama.cpp, each an extra of its own."""
