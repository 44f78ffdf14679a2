"""Shared-noise sampling on tensors: y = argmax(l + g), core/sampling/noise.py for g.

Order: bias, penalties and exclusions (`core.sampling.logit_rules` says which), softmax(logits / T), min-p, top-k,
top-p, as vLLM has it. All in float64 and row by row, so that a row's token does not depend on the rows beside it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pilotfish.core.sampling.noise import philox, split
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import Sampling, SharedTokens, TokenMasks
from pilotfish.core.trees.tree import NO_TOKEN
from pilotfish.model.rules import Rules, unpacked

#: Below it logits / T would swallow the noise, then overflow; the arg max has all the mass long before.
MIN_TEMPERATURE = 1e-12
#: b: spread of the target's log-probabilities about the draft's. With the bundled pair 0.35 and 0.5 had most
#: tokens accepted, 0.25, 0.7 and 1 fewer.
NOISE_SCALE = 0.5


class Drawn(NamedTuple):
    tokens: NDArray[np.int64]  # as `Outcome` has them, like what follows
    log_chances: NDArray[np.float64] | None
    broken: list[int]

    @classmethod
    def read(cls, packed: Tensor, sampling: Sampling) -> "Drawn":
        """What `Kernels.draw` gives, of the samples alone."""
        told, k = packed[: len(sampling)].numpy(), packed.shape[1] // 2
        broken = np.flatnonzero(told[:, -1] == 0).tolist()
        if not sampling.children:
            return cls(told[:, 0], None, broken)
        return cls(told[:, :k], told[:, k:-1].view(np.float64), broken)


def drawn(logits: Tensor, sampling: Sampling, given: int | None = None, ids: Tensor | None = None) -> Drawn:
    """logits [kept rows, vocab], raw. Tokens from `given` on are never drawn; `ids` as in `draw`."""
    broken = non_finite_rows(logits)
    return Drawn(*draw(logits[:, :given], broken, sampling, ids), broken)


def draw(
    logits: Tensor, broken: Sequence[int], sampling: Sampling, ids: Tensor | None = None
) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
    """Tokens and the logs of their chances. logits [kept rows, vocab], not finite in `broken` rows. `ids` int64
    [vocab], ascending, are the tokens of a reduced vocabulary."""
    if not len(sampling):
        return np.zeros(0, np.int64), None
    if sampling.vocabularies:
        return _drawn_by_vocabulary(logits, broken, sampling)
    return _drawn(logits, broken, sampling, ids)


def _drawn_by_vocabulary(
    logits: Tensor, broken: Sequence[int], sampling: Sampling
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    shape = len(sampling), sampling.children
    tokens, chances = np.zeros(shape, np.int64), np.full(shape, -np.inf)
    kinds = {id(one): one for one in sampling.vocabularies}
    which = np.array([id(one) for one in sampling.vocabularies])[sampling.sequences]
    for kind, shared in kinds.items():
        samples = np.flatnonzero(which == kind)
        if len(samples):
            given, own = _drawn(logits, broken, sampling.of(samples), shared=shared)
            assert own is not None
            tokens[samples, : own.shape[1]], chances[samples, : own.shape[1]] = given, own
    return tokens, chances


def _drawn(
    logits: Tensor,
    broken: Sequence[int],
    sampling: Sampling,
    ids: Tensor | None = None,
    shared: SharedTokens | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
    usable = logits.index_fill(0, torch.tensor(broken, device=logits.device), 0.0) if broken else logits
    if sampling.rows is not None:
        usable = usable[torch.from_numpy(sampling.rows).to(logits.device)]
    if shared is not None:
        ids, columns = (torch.from_numpy(numbers).to(logits.device) for numbers in (shared.ids, shared.columns))
        usable = usable.index_select(1, columns)
    if ids is not None and (
        not sampling.children or sampling.masks is not None or any(edit is not None for edit in sampling.edits)
    ):
        over_all = usable.new_full((len(usable), int(ids[-1]) + 1), -torch.inf)
        usable, ids = over_all.index_copy_(1, ids, usable), None
    drawn = likely_tokens(usable, sampling, ids) if sampling.children else (np.array(sample(usable, sampling)), None)
    if broken:
        rows = np.arange(len(sampling)) if sampling.rows is None else sampling.rows
        told, none = (drawn[0], NO_TOKEN) if drawn[1] is None else (drawn[1], -np.inf)
        told[np.isin(rows, broken)] = none
    return drawn


def sample(logits: Tensor, sampling: Sampling) -> list[int]:
    """NO_TOKEN if masks and rules leave none. logits float32 or float64 [samples, vocab]."""
    logits = edited(masked(logits, sampling.masks), sampling)
    greedy = sampling.greedy
    if greedy.all():
        chosen = logits.argmax(dim=-1)  # the lowest id on ties, as torch documents
    else:
        columns = SampleColumns.of(sampling, logits.device)
        chosen = perturbed(logits, columns, 1)[1][:, 0]
        if greedy.any():
            chosen = torch.where(columns.greedy != 0, logits.argmax(dim=-1), chosen)
    if sampling.masks is not None or len(sampling.edits):
        chosen = torch.where(logits.gather(1, chosen[:, None])[:, 0] > -torch.inf, chosen, NO_TOKEN)
    return chosen.tolist()


def likely_tokens(
    logits: Tensor, sampling: Sampling, ids: Tensor | None = None
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The k = `sampling.children` tokens (or as many as there are) that the target most likely *samples* after each
    row, and the log of their chances: [samples, k] each. logits float32 [samples, vocab], a draft's.

    They are the top of logits / T + g with the target's own noise g. A token's chance is softmax((log q / T + g) / b)
    over the k, at T = 0 its draft probability; -inf if fewer than k survive the filters. `ids` int64 [vocab],
    ascending, are the tokens of a reduced vocabulary, which neither masks nor rules name.
    """
    logits = edited(masked(logits, sampling.masks), sampling)
    k, greedy = min(sampling.children, logits.shape[1]), sampling.greedy
    if greedy.all():
        chances, best = logits.log_softmax(dim=-1).topk(k, dim=-1)
    else:
        columns = SampleColumns.of(sampling, logits.device)
        scores, best = perturbed(logits, columns, k, ids)
        chances = (scores / NOISE_SCALE).log_softmax(dim=-1)
        if greedy.any():
            plain, plain_best = logits.double().log_softmax(dim=-1).topk(k, dim=-1)
            chosen = columns.greedy[:, None] != 0
            chances, best = torch.where(chosen, plain, chances), torch.where(chosen, plain_best, best)
    if ids is not None:
        best = ids[best]
    return best.cpu().numpy(), chances.double().cpu().numpy()


def non_finite_rows(logits: Tensor) -> list[int]:
    """logits float32 [rows, vocab], raw"""
    if logits.device.type == "cpu" and hasattr(torch.ops.pilotfish, "finite_rows"):
        return np.flatnonzero(~torch.ops.pilotfish.finite_rows(logits).numpy()).tolist()
    if math.isfinite(logits.sum().item()):  # one sum, where there are none
        return []
    found: list[int] = (~logits.isfinite().all(dim=-1)).nonzero()[:, 0].tolist()
    return found


# -- masks, bias, penalties and exclusions


def masked(logits: Tensor, masks: TokenMasks | None) -> Tensor:
    """Logits [samples, vocab], or `logits` itself without masks. Masks may cover a part of the vocabulary."""
    if masks is None:
        return logits
    if logits.device.type == "cpu" and hasattr(torch.ops.pilotfish, "mask_logits") and logits.dtype == torch.float32:
        own = logits.clone()  # the raw ones may be asked for log-probabilities
        torch.ops.pilotfish.mask_logits(own, torch.from_numpy(masks.samples), torch.from_numpy(masks.bits()))
        return own
    return masked_reference(logits, masks)


def masked_reference(logits: Tensor, masks: TokenMasks) -> Tensor:
    allowed = unpacked(torch.from_numpy(masks.bits()), logits.shape[1]).to(logits.device)
    if len(masks.samples) == len(logits):
        return logits.masked_fill(~allowed, -torch.inf)
    rows = torch.from_numpy(masks.samples).to(logits.device)
    return logits.index_copy(0, rows, logits[rows].masked_fill(~allowed, -torch.inf))


def edited(logits: Tensor, sampling: Sampling) -> Tensor:
    """float64 [samples, vocab] after each row's rules; `logits` itself if no row has any."""
    rules = Rules.of(sampling, *logits.shape) if sampling.edits else None
    if rules is None:
        return logits
    rules, table = rules.map(lambda x: x.to(logits.device)), SampleColumns.table(sampling).to(logits.device)
    return rules.applied(logits, table)


# -- filters and noise


@dataclass(frozen=True)
class Filters:
    """Which of them any sample has."""

    min_p: bool
    top_k: int  # the largest; 0: none
    top_p: bool

    @classmethod
    def of(cls, every: Sequence[SamplingParams]) -> "Filters":
        drawn = [p for p in every if not p.greedy]
        top_k = max((p.top_k for p in drawn), default=0)
        return cls(any(p.min_p for p in drawn), top_k, any(p.top_p < 1 for p in drawn))


@dataclass(frozen=True)
class SampleColumns:
    """What filters and noise need of each sample, on the logits' device. What the host can tell is not asked of it."""

    temperatures: Tensor  # float64 [samples, 1], as both below
    floors: Tensor
    top_p: Tensor
    top_k: Tensor  # int64 [samples, 1]
    seeds: Tensor  # int64 [samples], of the bits of unsigned ones
    positions: Tensor  # int64 [samples]
    greedy: Tensor  # int64 [samples], 0 or 1
    filters: Filters

    @classmethod
    def of(cls, sampling: Sampling, device: torch.device) -> "SampleColumns":
        return cls.over(cls.table(sampling).to(device), Filters.of(sampling.params))

    @staticmethod
    def table(sampling: Sampling) -> Tensor:
        """int64 [COLUMNS, samples]"""
        owners, seeds = sampling.sequences, np.array(sampling.seeds, np.uint64).view(np.int64)
        real = np.array([_filters(params) for params in sampling.params])
        table = np.empty((COLUMNS, len(owners)), np.int64)
        table[:6] = real[:, :6].T.copy().view(np.int64)[:, owners]
        table[6], table[9] = real[:, 6:].T[:, owners]
        table[7], table[8] = seeds[owners], sampling.positions
        return torch.from_numpy(table)

    @classmethod
    def over(cls, table: Tensor, filters: Filters) -> "SampleColumns":
        temperatures, floors, top_p = table[:3].view(torch.float64)[:, :, None].unbind()
        top_k, seeds, positions, greedy = table[6:].unbind()
        return cls(temperatures, floors, top_p, top_k[:, None], seeds, positions, greedy, filters)


#: Of `SampleColumns.table`, of which three, from `PENALTIES` on, are of repetition, presence and frequency.
COLUMNS = 10
_FIRST = np.zeros(1, np.int64)
#: Of rows that pad a forward: nothing is cheaper to draw.
GREEDY_SAMPLE = Sampling(None, [SamplingParams(temperature=0.0)], [0], _FIRST, _FIRST)


def _filters(params: SamplingParams) -> tuple[float, ...]:
    """Temperature, floor, top_p, three penalties and top_k, and whether it is greedy: then no filter and no noise
    changes anything."""
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    if not params.temperature:
        return 1.0, -math.inf, 1.0, *penalties, 0, True
    floor = math.log(params.min_p) if params.min_p else -math.inf
    return max(params.temperature, MIN_TEMPERATURE), floor, params.top_p, *penalties, params.top_k, False


#: `perturbed` by type of device, where its kernels are loaded.
PERTURBED: dict[str, Callable[[Tensor, "SampleColumns", int, Tensor | None], tuple[Tensor, Tensor]]] = {}


def perturbed(logits: Tensor, columns: SampleColumns, k: int, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k best columns by filtered score + noise: float64 [samples, k] descending, int64. `ids` int64 [columns],
    ascending: their tokens."""
    at_once = PERTURBED.get(logits.device.type)
    if at_once is not None:
        return at_once(logits, columns, k, ids)
    return perturbed_topk(filtered(logits, columns), columns, k, ids)


def filtered(logits: Tensor, columns: SampleColumns) -> Tensor:
    """float64: l of the module's docstring up to a constant per row; -inf where a filter excludes."""
    given = columns.temperatures, columns.floors, columns.top_k, columns.top_p
    if logits.device.type == "cpu" and hasattr(torch.ops.pilotfish, "filter_logits"):
        scores: Tensor = torch.ops.pilotfish.filter_logits(logits, *given)
        return scores
    return filtered_reference(logits, *given, columns.filters)


def filtered_reference(
    logits: Tensor,  # [rows, vocab]
    temperatures: Tensor,  # float64 [rows, 1], as all below but top_k
    floors: Tensor,
    top_k: Tensor,  # int64 [rows, 1]
    top_p: Tensor,
    filters: Filters,
) -> Tensor:
    scores = logits.double() / temperatures
    scores = scores.masked_fill(scores.isnan(), -torch.inf)
    if filters.min_p:
        scores = scores.masked_fill(scores < scores.amax(dim=-1, keepdim=True) + floors, -torch.inf)
    if filters.top_k:
        scores = _keep_top_k(scores, top_k, filters.top_k)
    return _keep_top_p(scores, top_p) if filters.top_p else scores


def _keep_top_k(scores: Tensor, top_k: Tensor, most: int) -> Tensor:
    ranked = scores.topk(min(most, scores.shape[-1]), dim=-1).values
    smallest = ranked.gather(1, top_k.clamp(1, ranked.shape[1]) - 1)
    return scores.masked_fill((scores < smallest) & (top_k > 0), -torch.inf)  # equals of the k-th stay


def _keep_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    probs = ranked.softmax(dim=-1)
    before = torch.nn.functional.pad(probs.cumsum(dim=-1)[:, :-1], (1, 0))  # mass above: the first always stays
    drop = (before >= top_p) & (top_p < 1)
    return scores.masked_fill(drop.scatter(1, order, drop), -torch.inf)


def perturbed_topk(scores: Tensor, columns: SampleColumns, k: int, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `perturbed`, of filtered scores."""
    seeds, positions = columns.seeds, columns.positions
    if scores.device.type == "cpu" and hasattr(torch.ops.pilotfish, "perturbed_topk"):
        values, best = torch.ops.pilotfish.perturbed_topk(scores, seeds, positions, k, ids)
        return values, best
    return perturbed_topk_reference(scores, seeds, positions, k, ids)


def perturbed_topk_reference(
    scores: Tensor, seeds: Tensor, positions: Tensor, k: int, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same in torch operations, for any device. Ties go to the lower id (a stable sort)."""
    noise = gumbel(seeds, positions, scores.shape[-1] if ids is None else int(ids[-1]) + 1)
    values, columns = (scores + (noise if ids is None else noise[:, ids])).sort(dim=-1, descending=True, stable=True)
    return values[:, :k], columns[:, :k]


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """core.noise.gumbel for many (seed, position) at once. int64 [rows] each -> float64 [rows, vocab]."""
    block = torch.arange((vocab_size + 3) // 4, device=seeds.device)
    words = philox(split(seeds[:, None]), (*split(positions[:, None]), block, 0))
    k = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]
    return -torch.log(-torch.log((k.double() + 0.5) / 2.0**32))
