"""CUDA: open `kernels.py` first. A fused module is a class over a Triton kernel in a file of its own here;
`CUDAKernels` puts it in place of transformers' modules (`replace`, with `kernels.replace_modules`) and gives it to
heads (`linear`, `rms_norm`, `feed_forward`, `rotate`). Its reference is `Kernels`' own, and a forward stays recordable
(`graphs.py`)."""
