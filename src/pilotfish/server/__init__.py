"""The HTTP server: requests and text, never tensors."""
