"""The C++ kernels (`kernels/`): `native.py` builds and loads them, `native_modules.py` puts modules over them in place
of transformers' own."""
