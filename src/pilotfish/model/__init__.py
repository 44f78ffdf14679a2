"""All device code: loading, the forward, attention over slots, sampling."""

import sys

from transformers.utils import is_torchao_available

# transformers checks once whether torchao is installed, and imports it if so, which takes 2 s and prints. While
# sys.modules holds None for it the check says no, and transformers remembers that, so torchao waits for `quantize`.
if "torchao" not in sys.modules:
    sys.modules["torchao"] = None  # type: ignore[assignment]
    is_torchao_available()
    del sys.modules["torchao"]
