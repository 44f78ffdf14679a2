"""Kernels in Triton's language: pointers and sizes come in, memory is written. Open `products.py` first. Arguments have
no types, since Triton reads annotations as its own; `common.py` has what the interpreter needs."""
