"""Frames and channels between targets, drafts and servers. Token ids only; no pickle."""
