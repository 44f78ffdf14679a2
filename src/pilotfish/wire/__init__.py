"""Frames and channels between targets, drafts and servers: token ids only, no pickle. Messages come in from `core` and
serving.py, bytes go out through ZeroMQ; pool_users.py has a target's machines behind a lock. Open channel.py first."""
