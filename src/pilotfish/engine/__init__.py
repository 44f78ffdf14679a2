"""Requests in, tokens and text out."""
