"""HTTP: requests and text in OpenAI's format; never tensors."""
