"""Layers that a forward has counted have their KV in the slots, for all of its rows, whatever comes later."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sizes import sized
from support import KINDS, VOCAB, native_model, tiny_model

from pilotfish.core.scheduling.executor import NO_NODES, LayerProgress, SequenceRows
from pilotfish.model.batch import Buckets
from pilotfish.model.cpu.native_modules import PlainDecoder
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.kv_copy import copier_of, layout_of
from pilotfish.model.loading.loader import load_model

ROWS = 200
PLAIN = ("llama", "mistral", "qwen2", "qwen3")
Bytes = NDArray[np.uint8]


def rows(first: int = 0) -> SequenceRows:
    tokens = np.random.default_rng(0).integers(0, VOCAB, ROWS).tolist()
    return SequenceRows(0, tokens, np.arange(first, first + ROWS, dtype=np.int32), NO_NODES, kept=())


class Watch(LayerProgress):
    """Takes a copy of all layers counted so far, as soon as one more is."""

    def __init__(self, executor: TorchExecutor) -> None:
        super().__init__(layout_of(executor.kv).layers)
        self.executor = executor
        self.seen: list[list[Bytes]] = []

    def wrote(self, layer: int) -> None:
        super().wrote(layer)
        self.seen.append(kv_of(self.executor, self.at(0.0)))


def kv_of(executor: TorchExecutor, layers: int, first: int = 0) -> list[Bytes]:
    slots, size = rows(first).prefix_slots, ROWS * layout_of(executor.kv).token_bytes
    copies = [np.zeros(size, np.uint8) for _ in range(layers)]
    for layer, copy in enumerate(copies):
        copier_of(executor.kv).read_layers(slots, range(layer, layer + 1), copy)
    return copies


def assert_final(seen: list[Bytes], final: list[Bytes]) -> None:
    assert all(map(np.array_equal, seen, final))


@pytest.mark.parametrize(
    ("kind", "eager"),
    sized([("llama", True)], [(kind, True) for kind in KINDS])
    + [(kind, False) for kind in sized(("gemma2", "gpt_oss"), KINDS) if kind not in PLAIN],
)
def test_each_layer_is_counted_when_its_kv_is_there(kind: str, eager: bool, tmp_path: Path) -> None:
    tiny_model(kind).save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32, torch.device("cpu"), eager=eager)
    assert not isinstance(model.module, PlainDecoder)  # it counts from within the kernels
    executor = TorchExecutor(model, ROWS)
    watch = executor.progress = Watch(executor)
    executor.forward([rows()])
    final = kv_of(executor, watch.layers)
    assert [len(seen) for seen in watch.seen] == list(range(1, watch.layers + 1))
    for seen in watch.seen:
        assert_final(seen, final)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_plain_decoder_counts_while_it_runs(threads: int, tmp_path: Path) -> None:
    """Another thread copies what is counted; in the midst of a forward at least once."""
    tiny_model("llama", num_hidden_layers=12).save_pretrained(tmp_path)
    torch.set_num_threads(threads)
    executor = TorchExecutor(native_model(tmp_path), 100 * ROWS)
    assert isinstance(executor.model.module, PlainDecoder)
    executor.forward([rows(99 * ROWS)])
    final, midst = kv_of(executor, 12, 99 * ROWS), 0
    for turn in range(99):
        executor.progress.reset()
        seen = list[list[Bytes]]()
        watcher = threading.Thread(target=watch_forward, args=(executor, turn * ROWS, seen))
        watcher.start()
        executor.forward([rows(turn * ROWS)])
        watcher.join()
        assert len(seen[-1]) == 12
        for copies in seen:
            assert_final(copies, final)
        midst += len(seen) > 1
        if midst:
            return
    raise AssertionError("no layer was counted before a forward ended")


def watch_forward(executor: TorchExecutor, first: int, seen: list[list[Bytes]]) -> None:
    counted = 0
    while counted < executor.progress.layers:
        if (now := executor.progress.at(0.0)) > counted:
            counted = now
            seen.append(kv_of(executor, counted, first))
        time.sleep(0.0001)


def test_only_the_last_of_several_batches_counts(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    executor = TorchExecutor(load_model(tmp_path, torch.float32, torch.device("cpu"), eager=True), ROWS)
    executor.buckets = Buckets(rows=(64,))
    watch = executor.progress = Watch(executor)
    assert len(executor.prepare([rows()])) > 1
    executor.forward([rows()])
    final = kv_of(executor, watch.layers)
    assert len(watch.seen) == watch.layers
    for seen in watch.seen:
        assert_final(seen, final)


def test_a_pace_holds_layers_back() -> None:
    progress = LayerProgress(10)
    progress.hold(5.0, 2.0)
    assert progress.at(6.0) == 0  # nothing is written
    progress.wrote(7)
    assert [progress.at(now) for now in (5.0, 5.3, 6.0, 6.39, 6.7, 9.0)] == [0, 1, 5, 6, 8, 8]
    progress.reset()
    progress.wrote(2)
    assert progress.at(0.0) == 3
