"""Training: a target and its draft from source files, end to end (`train_pair`)."""

import pilotfish.model  # noqa: F401  # keeps transformers from importing torchao
