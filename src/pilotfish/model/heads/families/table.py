from pilotfish.model.heads.families import block_layouts, eagle, masked, medusa, mtp
from pilotfish.model.heads.families.layout import HeadSource, ReadLayout


def find_layout(source: HeadSource) -> ReadLayout:
    names, told = source.headers, source.fields.has("speculators_model_type")
    if masked.is_peagle(source):
        return masked.speculators if told else masked.vllm
    for beginning, layout in _BEGINNINGS.items():
        if any(name.startswith(beginning) for name in names):
            return layout
    if any(name.endswith(".eh_proj.weight") for name in names):
        return mtp.deepseek
    if "layers.0.hidden_norm.weight" in names:
        plain = eagle.deepspec if source.fields.has("target_layer_ids") else eagle.modelopt
        return eagle.speculators if told else plain
    if "hidden_norm.weight" in names:
        plain = block_layouts.zlab if source.fields.has("dflash_config") else block_layouts.deepspec
        return block_layouts.speculators if told else plain
    if "fc.weight" in names and "layers.0.self_attn.q_proj.weight" in names:
        return eagle.eagle1
    raise source.refused("has tensors of no head that is known")


#: How a name begins that only one layout has.
_BEGINNINGS: dict[str, ReadLayout] = {
    "midlayer.": eagle.safeailab,
    "mtp_layers.": mtp.speculators,
    "mtp.": mtp.qwen,
    "model.mtp_layers.": mtp.mimo,
    "0.0.linear.": medusa.original,
    "blocks.0.layers.": medusa.vllm,
}
