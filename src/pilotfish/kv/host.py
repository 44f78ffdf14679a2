"""The tier in host memory: a bounded number of bytes of objects, used longest ago evicted first."""

from __future__ import annotations

from collections import OrderedDict

from pilotfish.core.cache.prefix_keys import Key
from pilotfish.kv.objects import KVObject


class HostStore:
    """Not safe for threads: `KVTiers` has a lock around it."""

    def __init__(self, capacity_bytes: int, object_bytes: int) -> None:
        self.most = capacity_bytes // object_bytes
        self.evicted = 0
        self._objects: OrderedDict[Key, KVObject] = OrderedDict()  # used longest ago first

    def __contains__(self, key: Key) -> bool:
        return key in self._objects

    def __len__(self) -> int:
        return len(self._objects)

    def get(self, key: Key) -> KVObject | None:
        if key in self._objects:
            self._objects.move_to_end(key)
        return self._objects.get(key)

    def put(self, kv: KVObject) -> list[KVObject]:
        self._objects[kv.key] = kv
        self._objects.move_to_end(kv.key)
        evicted = [self._objects.popitem(last=False)[1] for _ in range(len(self._objects) - self.most)]
        self.evicted += len(evicted)
        return evicted

    def remove(self, key: Key) -> None:
        self._objects.pop(key, None)

    def take_all(self) -> list[KVObject]:
        objects = list(reversed(self._objects.values()))
        self._objects.clear()
        return objects
