"""Trained heads, which guess from the target's hidden states: a directory comes in (`files.read_head`), an executor
goes out (`HeadFiles.executor`). A family is added as one file in `families/`: a record (a `spec.Head`: its fields,
tensors and memory), a module of `parts.py`, a `HeadExecutor`, and a function for each layout of its files, named in
`families/table.py`; `weights.is_head` must know such files, and `export.py` only what is trained here.
"""
