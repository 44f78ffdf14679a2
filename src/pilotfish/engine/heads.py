import logging
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from pilotfish.config.engine import EngineConfig
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import NO_NODES, Sampling, SequenceRows
from pilotfish.errors import ParameterError
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.heads.executor import HeadSetup
from pilotfish.model.heads.files import read_head, read_spec
from pilotfish.model.heads.parts import feature_tap
from pilotfish.model.heads.spec import HeadFiles, HeadSpec
from pilotfish.model.heads.target import TargetFacts
from pilotfish.model.loading.footprint import Footprint
from pilotfish.model.loading.loader import LoadedModel

logger = logging.getLogger(__name__)

_TOKEN = 8  # bytes of a slot beside KV and states: whose token it has
#: Text for the trial of both conventions of layers: prose, code and a list.
PROBE = """The river rose in the night, and by morning the lower road was gone. People came down from the farms with
ropes and lamps, and for two days they carried what they could to the church on the hill. Nobody was lost.

def largest(numbers):
    best = numbers[0]
    for number in numbers[1:]:
        if number > best:
            best = number
    return best

1. Read the file line by line.
2. Count how often each word appears.
3. Print the ten words that appear most often, and how often they do.
"""
PROBE_TOKENS = 256


@dataclass(frozen=True)
class ConfiguredHead:
    directory: Path
    target: TargetFacts
    layers: tuple[int, ...] | None = None  # in place of what its files say

    @classmethod
    def of(cls, config: EngineConfig, head: Path, target: Path) -> "ConfiguredHead":
        return cls(head, TargetFacts.read(target), config.draft_layers or None)

    def spec(self) -> HeadSpec:
        return read_spec(self.directory, self.target, self.layers)

    def either(self) -> list[HeadFiles]:
        files = read_head(self.directory, self.target, self.layers)
        if self.layers is not None or not files.spec.other_layers:
            return [files]
        return [files, read_head(self.directory, self.target, files.spec.other_layers)]

    def footprint(self, dtype: torch.dtype) -> Footprint:
        """Of its executor; the projection of hidden states stays with the target."""
        spec, size = self.spec(), dtype.itemsize
        memory, vocab = spec.head.memory(), spec.draft_vocab
        parameters = sum(map(prod, spec.head.shapes(spec, self.target.vocab).values()))
        weights = size * (parameters + memory.roots)
        return Footprint(parameters, weights, size * memory.slot + _TOKEN, size * (memory.row + vocab) + 8 * vocab, 0)

    def tapped(self, target: Footprint, dtype: torch.dtype) -> Footprint:
        projection = self.spec().projection
        shapes = projection.shapes(self.target.hidden)
        states = len(projection.layers) * self.target.hidden + projection.width
        return replace(
            target,
            weights=target.weights + dtype.itemsize * sum(map(prod, shapes.values())),
            slot=target.slot + dtype.itemsize * projection.width,
            row=target.row + dtype.itemsize * states,
        )


def read_head_of_features(config: EngineConfig) -> list[HeadFiles]:
    """As `either`; empty without a head. ParameterError for ambiguous layers with several ranks, which cannot try
    them."""
    if config.features is None:
        return []
    either = ConfiguredHead.of(config, config.features, config.target).either()
    if len(either) > 1 and config.tensor_parallel > 1:
        allowed = f"those that {config.features} takes, with tensor_parallel: {' or '.join(map(_ids, either))}"
        raise ParameterError("draft_layers", "", allowed)
    return either


def sharing(files: HeadFiles, target: LoadedModel) -> HeadFiles:
    """Replaces an equal copy of the target's embeddings by the target's own. A rank has only a part of its own."""
    name, module = "embed_tokens.weight", cast(Any, target.module)
    own, theirs = files.tensors.get(name), getattr(getattr(module, "model", module).embed_tokens, "weight", None)
    if own is None or theirs is None or own.shape != theirs.shape:
        return files
    equal = torch.equal(own.to(theirs.device, theirs.dtype), theirs)
    return replace(files, tensors={**files.tensors, name: theirs.detach()}) if equal else files


# -- notes of drafts that are of less use than their operators may think


def note_head(head: ConfiguredHead, files: HeadFiles, context: int) -> None:
    """Warns if it names another target, no error: heads of base models guess for models tuned from them, too."""
    if (doubt := files.trained_on.doubt(head.target)) is not None:
        logger.warning("head: %s was trained on %s: its guesses may seldom be right", head.directory, doubt)
    note_reach("head", head.directory, files.spec.head.context, context)


def note_reach(kind: str, draft: Path, reach: int, context: int) -> None:
    if reach < context:
        text = "%s: %s guesses up to position %d of the target's %d; what comes after is decoded without it"
        logger.info(text, kind, draft, reach, context)


# -- the probe


def choose_layers(either: list[HeadFiles], model: LoadedModel, tokenizer: Any) -> HeadFiles:
    if len(either) == 1:
        return either[0]
    tokens = tokenizer.encode(PROBE, add_special_tokens=False)[: min(PROBE_TOKENS, model.config.context)]
    shares = [agreement(files, model, tokens) for files in either]
    chosen = either[int(np.argmax(shares))]
    said = ", ".join(f"{share:.0%} from {_ids(files)}" for files, share in zip(either, shares, strict=True))
    text = "head: %s says its layers in a way that is read in two: it agrees with the target on %s; it takes %s"
    logger.info(text, chosen.spec.kind, said, _ids(chosen))
    return chosen


def _ids(files: HeadFiles) -> str:
    return ",".join(map(str, files.spec.projection.layers))


def agreement(files: HeadFiles, model: LoadedModel, tokens: list[int]) -> float:
    count = len(tokens)
    tap = feature_tap(files, model.device, model.dtype, eager=not model.native)
    target = TorchExecutor(model, count, tap=tap)
    slots = np.arange(count, dtype=np.int32)
    first = target.execute([SequenceRows(0, tokens, slots, NO_NODES, range(1, count))], _greedy(count - 1)).tokens
    head = files.executor(HeadSetup(model.device, model.dtype, count, eager=not model.native))
    features = np.concatenate((np.full((1, tap.width), np.nan, np.float32), target.features(slots[:-1])))
    rows = SequenceRows(0, tokens, slots, NO_NODES, range(1, count), features)
    guessed = head.execute([rows], _greedy(count - 1, children=1)).tokens
    return float(np.mean(first == guessed[:, 0]))


def _greedy(count: int, children: int = 0) -> Sampling:
    """Of a sequence's tokens from the third on, so many."""
    params, positions = SamplingParams(temperature=0.0), np.arange(2, count + 2)
    return Sampling(None, [params], [0], np.zeros(count, np.int64), positions, children=children)
