"""Layer ids have two conventions: speculators and vLLM count what a layer gets, as we do; Model-Optimizer,
TensorRT-LLM, SGLang and DeepSpec count what it puts out. Without speculators' wrapper both occur under the same names:
the other reading is kept as `other_layers`."""

from collections.abc import Callable, Mapping
from functools import partial

from pilotfish.model.heads.families.layout import HeadLayout, HeadSource, read_decoder
from pilotfish.model.heads.families.recurrent import RecurrentHead
from pilotfish.model.heads.fields import HeadFields
from pilotfish.model.heads.spec import FINAL, Decoder, Projection

_IDS = "eagle_aux_hidden_state_layer_ids"
LAYERS = {"layers.0.hidden_norm.": "hidden_norm."}
MIDLAYER = {"midlayer.hidden_norm.": "hidden_norm.", "midlayer.": "layers.0."}
#: Makes the record of a head whose projection and layers are read.
MakeHead = Callable[[Projection, Decoder], RecurrentHead]
_WIDE = partial(RecurrentHead, entry="wide")


def speculators(source: HeadSource) -> HeadLayout:
    fields, inner = source.fields, source.open_wrapper("eagle3")
    head = partial(
        _WIDE,
        residual_normed=fields.flag("norm_before_residual", True),  # as vLLM takes it; the trainer writes it
        recycles_normed=fields.flag("norm_output", False),
    )
    return wide_layout(source, inner, LAYERS, "speculators", input_ids(source), head)


def safeailab(source: HeadSource) -> HeadLayout:
    """SpecForge's too. `norm_output` only says that there is a norm before lm_head: the state below is raw."""
    fields = source.fields
    if not fields.flag("norm_output", True):
        raise fields.refused("norm_output", "true: in this layout it is the norm before lm_head")
    layers, others = _ids_by_guess(source, fields.within("eagle_config"))
    head = partial(_WIDE, residual_normed=fields.flag("norm_before_residual", False))
    return wide_layout(source, fields, MIDLAYER, "safeailab", layers, head, others)


def deepspec(source: HeadSource) -> HeadLayout:
    layers = source.hidden_ids(source.fields, "target_layer_ids", outputs=True, normed=True)
    source.check_target(source.target.hidden, source.fields)
    return wide_layout(source, source.fields, LAYERS, "deepspec", layers, _WIDE)


def modelopt(source: HeadSource) -> HeadLayout:
    fields = source.fields
    inner = fields.within("eagle_config")
    inner.only("use_input_layernorm_in_first_layer", True, "the embedding is normed in every head that is known")
    inner.only("use_last_layernorm", True, "the state is normed before lm_head in every head that is known")
    inner.only("use_mtp_layernorm", False, "EAGLE-3 has its own norms")
    inner.only("next_layer_regular", True, "layers after the first are plain")
    inner.only("parallel_draft_step", 1, "heads of Medusa on top of EAGLE's are not supported")
    inner.only("parallel_draft_heads_num_layers", None, "heads of Medusa on top of EAGLE's are not supported")
    several = inner.flag("use_aux_hidden_state", True)
    layers, others = _ids_by_guess(source, inner) if several else ((FINAL,), ())
    residual = fields.flag("norm_before_residual", False)
    head = partial(_WIDE, residual_normed=residual, recycles_normed=fields.flag("norm_output", False))
    return wide_layout(source, fields, LAYERS, "modelopt", layers, head, others)


def input_ids(source: HeadSource) -> tuple[int, ...]:
    fields = source.fields
    return source.hidden_ids(fields, _IDS, outputs=False) if fields.has(_IDS) else source.default_ids()


def _ids_by_guess(source: HeadSource, inner: HeadFields) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids, and those by the other convention if that is possible too."""
    fields, target = source.fields, source.target
    count = target.layers
    if inner.has(_IDS) and fields.has(_IDS):
        raise inner.refused(_IDS, f"only one of this and {_IDS} outside of it")
    if not (inner.has(_IDS) or fields.has(_IDS)):
        return source.default_ids(), ()
    holder = inner if inner.has(_IDS) else fields
    ids = holder.ids(_IDS) or ()
    inputs = source.hidden_ids(holder, _IDS, outputs=False)
    if max(ids) == count or min(ids) == 0:  # no layer puts out what is after the last; nobody takes the first's output
        return inputs, ()
    outputs = source.hidden_ids(holder, _IDS, outputs=True)
    if ids == (1, count // 2 - 1, count - 4):  # the default of those who count outputs
        return outputs, ()
    return (outputs, inputs) if holder is inner else (inputs, outputs)


def wide_layout(
    source: HeadSource,
    decoder_fields: HeadFields,
    beginnings: Mapping[str, str],
    dialect: str,
    layers: tuple[int, ...],
    make_head: MakeHead,
    other_layers: tuple[int, ...] = (),
    kind: str = "eagle3",
) -> HeadLayout:
    names = source.names(beginnings)
    decoder = read_decoder(decoder_fields, names)
    source.check_target(source.fields.count("target_hidden_size", decoder.hidden))
    head = make_head(_projection(source, layers, decoder.hidden, decoder.eps), decoder)
    return source.laid_out(head, kind, dialect, names, source.vocabulary(decoder_fields), other_layers)


def _projection(source: HeadSource, layers: tuple[int, ...], width: int, eps: float) -> Projection:
    fields, inner = source.fields, source.fields.within("eagle_config")
    joined = fields.flag("norm_before_fc", False) or inner.flag("norm_before_fc", False)
    parts = fields.flag("fc_norm", False)
    if joined and parts:
        raise fields.refused("fc_norm", "false beside norm_before_fc, which norms the same states another way")
    return Projection(layers, width, joined_norm=joined, part_norms=parts, fc=layers != (FINAL,), eps=eps)


# -- EAGLE-1; HASS adds norms before the product

_JOINED = {"fc.": "input_proj.", "embedding_layernorm.": "embed_norm.", "hidden_states_layernorm.": "hidden_norm."}
#: Most have none of these.
_NORMS = ("layers.0.input_layernorm.weight", "norm.weight", "embed_norm.weight", "hidden_norm.weight")


def eagle1(source: HeadSource) -> HeadLayout:
    fields, names = source.fields, source.names(_JOINED)
    biased = "input_proj.bias" in names
    if fields.flag("bias", biased) != biased:
        raise fields.refused("bias", f"{biased}, as there {'is' if biased else 'is no'} tensor fc.bias")
    decoder = read_decoder(fields, names)
    source.check_target(decoder.hidden)
    if ("embed_norm.weight" in names) != ("hidden_norm.weight" in names):
        raise source.refused("has one of the tensors embedding_layernorm and hidden_states_layernorm; both are needed")
    projection = Projection((FINAL,), decoder.hidden, fc=False, eps=decoder.eps)
    head, absent = RecurrentHead(projection, decoder, "joined"), frozenset(name for name in _NORMS if name not in names)
    return source.laid_out(head, "eagle1", "safeailab", names, source.vocabulary(fields), absent=absent)
