"""CUDA: open `kernels.py` first. A part of models is a class here over a Triton kernel in
`triton_kernels/`; `CUDAKernels` gives it to transformers' models (by `fused.py`) and to heads (`linear`, `rms_norm`,
`feed_forward`, `rotate`). Its reference is `Kernels`' own, and a forward stays recordable (`graphs.py`)."""
