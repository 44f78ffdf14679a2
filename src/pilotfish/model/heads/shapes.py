"""Which tensors a head has, by canonical names, and their shapes, as `spec.py` describes them."""

from __future__ import annotations

from pilotfish.model.heads.spec import BlockHead, Decoder, HeadSpec, MaskedHead, ParallelHead, Projection, RecurrentHead

Shapes = dict[str, tuple[int, ...]]

#: Tensors that a head may share with its target.
SHARED = ("embed_tokens.weight", "lm_head.weight")


def tensor_shapes(spec: HeadSpec, vocab: int) -> Shapes:
    """Of every tensor that such a head can have. `vocab` is the target's."""
    head = spec.head
    shapes = projection_shapes(head.projection, spec.target_hidden)
    if isinstance(head, ParallelHead):
        return shapes | _parallel_shapes(head, spec.draft_vocab)
    hidden = head.decoder.hidden
    shapes |= _decoder_shapes(head.decoder, wide=isinstance(head, RecurrentHead) and head.entry == "wide")
    shapes |= {"embed_tokens.weight": (vocab, hidden), "lm_head.weight": (spec.draft_vocab, hidden)}
    if isinstance(head, BlockHead):
        return shapes | _block_shapes(head, vocab, spec.draft_vocab)
    shapes["hidden_norm.weight"] = (hidden,)
    if isinstance(head, MaskedHead):
        shapes["mask_hidden"] = (1, 1, len(head.projection.layers) * spec.target_hidden)
    if head.entry == "joined":
        shapes |= {"input_proj.weight": (hidden, 2 * hidden), "input_proj.bias": (hidden,)}
        shapes["embed_norm.weight"] = (hidden,)
    return shapes


def optional_tensors(spec: HeadSpec) -> frozenset[str]:
    """Those of them that a head may lack, whatever its layout."""
    biases = [f"layers.{i}.self_attn.o_proj.bias" for i in range(getattr(spec.head, "decoder", _NONE).layers)]
    return frozenset((*SHARED, "input_proj.bias", *biases))


_NONE = Decoder(0, 0, 0, 0, 0, 0)


def projection_shapes(projection: Projection, target_hidden: int) -> Shapes:
    parts, width = len(projection.layers), projection.width
    shapes: Shapes = {}
    if projection.joined_norm:
        shapes["input_norm.weight"] = (parts * target_hidden,)
    if projection.part_norms:
        shapes |= {f"fc_norm.{i}.weight": (target_hidden,) for i in range(parts)}
    if projection.fc:
        shapes["fc.weight"] = (width, parts * target_hidden)
    if projection.fc and projection.bias:
        shapes["fc.bias"] = (width,)
    if projection.feature_norm:
        shapes["feature_norm.weight"] = (width,)
    return shapes


def _decoder_shapes(decoder: Decoder, *, wide: bool) -> Shapes:
    shapes: Shapes = {"norm.weight": (decoder.hidden,)}
    for i in range(decoder.layers):
        inner = _layer_shapes(decoder, decoder.hidden * (2 if wide and i == 0 else 1))
        shapes |= {f"layers.{i}.{name}": shape for name, shape in inner.items()}
    return shapes


def _layer_shapes(decoder: Decoder, columns: int) -> Shapes:
    """`columns` are those of what attention gets."""
    hidden, size = decoder.hidden, decoder.head_dim
    queries, keys = decoder.heads * size, decoder.kv_heads * size
    rows = {"q": queries * (2 if decoder.gated_attention else 1), "k": keys, "v": keys}
    shapes: Shapes = {f"self_attn.{x}_proj.weight": (count, columns) for x, count in rows.items()}
    shapes["self_attn.o_proj.weight"] = (hidden, queries)
    if decoder.attention_bias:
        shapes |= {f"self_attn.{x}_proj.bias": (count,) for x, count in {**rows, "o": hidden}.items()}
    if decoder.qk_norm:
        shapes |= {f"self_attn.{x}_norm.weight": (size,) for x in "qk"}
    shapes |= {f"mlp.{x}_proj.weight": (decoder.ffn, hidden) for x in ("gate", "up")}
    shapes["mlp.down_proj.weight"] = (hidden, decoder.ffn)
    return shapes | {f"{x}_layernorm.weight": (hidden,) for x in ("input", "post_attention")}


def _block_shapes(head: BlockHead, vocab: int, draft_vocab: int) -> Shapes:
    hidden, rank = head.decoder.hidden, head.markov_rank
    shapes: Shapes = {}
    if rank:
        shapes |= {"markov.w1.weight": (vocab, rank), "markov.w2.weight": (draft_vocab, rank)}
    if rank and head.markov == "gated":
        shapes |= {"markov.gate.weight": (rank, hidden + rank), "markov.gate.bias": (rank,)}
    if head.confidence:
        seen = hidden + (rank if head.confidence == "markov" else 0)
        shapes |= {"confidence.weight": (1, seen), "confidence.bias": (1,)}
    return shapes


def _parallel_shapes(head: ParallelHead, draft_vocab: int) -> Shapes:
    shapes: Shapes = {}
    for i in range(head.heads):
        for j in range(head.blocks):
            shapes[f"heads.{i}.blocks.{j}.weight"] = (head.hidden, head.hidden)
            if head.bias:
                shapes[f"heads.{i}.blocks.{j}.bias"] = (head.hidden,)
        shapes[f"heads.{i}.lm_head.weight"] = (draft_vocab, head.hidden)
    return shapes
