"""Log-probabilities in float64, row by row, so that a row's do not depend on the rows beside it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pilotfish.core.scheduling.executor import TokenLogprobs

#: Rows at a time without kernels: log-probabilities in float64 take several times the memory of their logits.
ROWS = 16


def token_logprobs(logits: Tensor, rows: Sequence[int], tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Of tokens[i] under rows[i], and of that row's `top` likeliest. logits [rows, vocab], raw. A rank counts tokens
    that are strictly likelier; equal ones in `top` stand in order of their ids. NaN counts as the least likely."""
    which, chosen = (torch.tensor(numbers, dtype=torch.int64, device=logits.device) for numbers in (rows, tokens))
    native = logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.float64)
    if native and hasattr(torch.ops.pilotfish, "token_logprobs"):
        scored = torch.ops.pilotfish.token_logprobs(logits, which, chosen, min(top, logits.shape[1]))
    else:
        scored = token_logprobs_reference(logits, which, chosen, min(top, logits.shape[1]))
    logprobs, ranks, likely, likely_logprobs = (column.tolist() for column in scored)
    entries = zip(tokens, logprobs, ranks, likely, likely_logprobs, strict=True)
    return [TokenLogprobs(token, p, rank, tuple(zip(best, ps, strict=True))) for token, p, rank, best, ps in entries]


def token_logprobs_reference(
    logits: Tensor,  # [all rows, vocab]
    rows: Tensor,  # int64 [rows], as the next
    tokens: Tensor,
    top: int,  # of at most vocab
) -> tuple[Tensor, ...]:
    """For any device: log-probabilities and ranks of the tokens [rows], the likeliest and theirs [rows, top]."""
    parts = zip(torch.split(rows, ROWS), torch.split(tokens, ROWS), strict=True)
    scored = [_scored_rows(logits[part], chosen[:, None], top) for part, chosen in parts]
    return tuple(torch.cat(column) for column in zip(*scored, strict=True))


def _scored_rows(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, ...]:
    log_probs = logits.double().log_softmax(dim=-1)
    ranks = (logits > logits.gather(1, tokens)).sum(dim=-1) + 1
    likely = _likeliest(logits.masked_fill(logits.isnan(), -torch.inf), top) if top else tokens[:, :0]
    return log_probs.gather(1, tokens)[:, 0], ranks, likely, log_probs.gather(1, likely)


def _likeliest(logits: Tensor, k: int) -> Tensor:
    """Columns of the k highest of each row, of equal ones the lower first, which `topk` alone does not promise."""
    least, vocab = logits.topk(k, dim=-1).values[:, -1:], logits.shape[1]
    above, back = vocab * (logits > least), torch.arange(vocab, 0, -1, device=logits.device)
    columns = torch.where(logits >= least, above + back, 0).topk(k, dim=-1).indices.sort(dim=-1).values
    order = logits.gather(1, columns).sort(dim=-1, descending=True, stable=True).indices
    return columns.gather(1, order)
