"""Training: a target and its draft from source files, end to end (`train_pair`)."""
