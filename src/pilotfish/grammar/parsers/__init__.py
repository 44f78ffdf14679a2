"""The text of an output, in parts as it comes, becomes pieces: reasoning, content, tool calls. `formats.py` lists how
models write calls, with a parser and a grammar for each."""
