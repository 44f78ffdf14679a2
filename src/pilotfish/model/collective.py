"""Every rank adds all ranks' partial sums in float32, rank 0's first. No library reduces: it would choose an order by
the number of rows, and a row's bits must not depend on that."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from pilotfish.model.loading.shards import Shard, has_wide_norms

_c10d: Any = torch.distributed  # its stubs lack what is used of it here
#: Seconds that a rank waits for the others in the midst of a forward, and for all to connect.
PATIENCE = 60.0


class Group(Protocol):
    shard: Shard

    def all_gather(self, x: Tensor) -> Sequence[Tensor]:
        """Every rank's x, all of one shape, in the order of the ranks."""

    def gather(self, x: Tensor) -> Sequence[Tensor]:
        """The same at rank 0; nothing elsewhere."""


class ProcessGroup:
    _backend: Any  # once `connect` has made it

    def __init__(self, shard: Shard, device: torch.device) -> None:
        self.shard = shard
        self._device = device

    def connect(self, meeting: Path) -> None:
        """Meets the other ranks in a new file. RuntimeError if one does not come."""
        store = _c10d.FileStore(str(meeting), self.shard.ranks)
        make = _nccl if self._device.type == "cuda" else _gloo
        self._backend = make(store, self.shard, timedelta(seconds=PATIENCE))
        self.all_gather(torch.zeros(1, device=self._device))  # all are there

    def all_gather(self, x: Tensor) -> Sequence[Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.shard.ranks)]
        self._backend.allgather([parts], [x]).wait()
        return parts

    def gather(self, x: Tensor) -> Sequence[Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.shard.ranks)] if self.shard.rank == 0 else []
        self._backend.gather([parts] if parts else [], [x], _c10d.GatherOptions()).wait()
        return parts


def _gloo(store: Any, shard: Shard, timeout: timedelta) -> Any:
    options = _c10d.ProcessGroupGloo._Options()
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
    options._timeout = timeout
    return _c10d.ProcessGroupGloo(store, shard.rank, shard.ranks, options)


def _nccl(store: Any, shard: Shard, timeout: timedelta) -> Any:
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return _c10d.ProcessGroupNCCL(store, shard.rank, shard.ranks, options)


def total(group: Group, x: Tensor) -> Tensor:
    """The sum of every rank's x, rounded once to its type, with the same bits on all ranks."""
    first, *others = group.all_gather(x)
    result = first.float()
    for part in others:
        result = result + part.float()
    return result.to(x.dtype)


def join_ranks(model: Any, config: Any, group: Group) -> None:
    decoder = model.model
    decoder.embed_tokens = SharedEmbedding(decoder.embed_tokens, config.vocab_size, group)
    for layer in decoder.layers:
        if has_wide_norms(config):
            attention = layer.self_attn
            attention.q_norm = WideNorm(attention.q_norm, config.num_attention_heads, config.head_dim, group)
            attention.k_norm = WideNorm(attention.k_norm, config.num_key_value_heads, config.head_dim, group)
        layer.self_attn, layer.mlp = Summed(layer.self_attn, group), Summed(layer.mlp, group)
    model.lm_head = SharedHead(model.lm_head, config.vocab_size, group)


class Summed(torch.nn.Module):
    def __init__(self, part: torch.nn.Module, group: Group) -> None:
        super().__init__()
        self.part, self._group = part, group

    def forward(self, *inputs: Any, **options: Any) -> Any:
        output = self.part(*inputs, **options)
        if isinstance(output, tuple):
            return total(self._group, output[0]), *output[1:]
        return total(self._group, output)


class SharedEmbedding(torch.nn.Module):
    def __init__(self, part: torch.nn.Module, vocab_size: int, group: Group) -> None:
        super().__init__()
        self.part, self._group = part, group
        self._tokens = group.shard.tokens(vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        own = input_ids - self._tokens.start
        elsewhere = (own < 0) | (own >= len(self._tokens))
        return total(self._group, self.part(own.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0.0))


class SharedHead(torch.nn.Module):
    def __init__(self, part: torch.nn.Module, vocab_size: int, group: Group) -> None:
        super().__init__()
        self.part, self._group, self._vocab_size = part, group, vocab_size

    def forward(self, x: Tensor) -> Tensor:
        own: Tensor = self.part(x)
        parts = self._group.gather(own)
        return torch.cat([*parts], -1)[..., : self._vocab_size] if parts else own


class WideNorm(torch.nn.Module):
    def __init__(self, norm: Any, heads: int, head_dim: int, group: Group) -> None:
        super().__init__()
        self.norm, self._group = norm, group
        own = group.shard.kv_heads(heads)
        self._own = slice(own.start * head_dim, own.stop * head_dim)
        self._copies = max(1, group.shard.ranks // heads)  # ranks that have the same heads

    def forward(self, x: Tensor) -> Tensor:
        """x [..., this rank's heads * head_dim] -> like x."""
        whole = torch.cat([*self._group.all_gather(x)][:: self._copies], -1)
        normed: Tensor = self.norm(whole)[..., self._own]
        return normed

    def of_heads(self, x: Tensor) -> Tensor:
        return self.forward(x.reshape(len(x), -1)).view(x.shape)
