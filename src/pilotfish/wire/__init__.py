"""Frames and channels between targets, drafts and servers: token ids only, no pickle. Messages come in from `core` and
serving.py, bytes go out through ZeroMQ. Open channel.py first."""
