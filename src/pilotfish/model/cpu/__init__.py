"""The C++ kernels (`kernels/`): a loaded model comes in, the same with modules over them in place of transformers'
own (`native_modules.py`) goes out. `native.py` builds and loads them, and comes first."""
