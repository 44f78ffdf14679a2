"""All device code: rows of sequences and their KV slots come in, sampled tokens go out; open `executor.py` first.

A device is one class, a subclass of `kernels.Kernels` that `devices.kernels_of` chooses: what it does not override runs
as the reference. It replaces modules of a loaded model in `replace`, and gives heads the modules that they are made of.
"""

import sys

from transformers.utils import is_torchao_available

# transformers checks once whether torchao is installed, and imports it if so, which takes 2 s and prints. While
# sys.modules holds None for it the check says no, and transformers remembers that. Nothing here needs it.
if "torchao" not in sys.modules:
    sys.modules["torchao"] = None  # type: ignore[assignment]
    is_torchao_available()
    del sys.modules["torchao"]
