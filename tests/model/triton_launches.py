from types import ModuleType

from pilotfish.model.cuda import decoder, drawing, elementwise, experts, products, triton_attention

#: Where kernels are launched, and which.
LAUNCHED: dict[ModuleType, tuple[str, ...]] = {
    triton_attention: ("attend_parts", "join_parts_in_order", "write_kv"),
    products: ("few_rows", "join_parts", "many_rows", "quantize_rows"),
    elementwise: ("rms_norm", "rotate_heads"),
    drawing: (
        "tops_of_blocks",
        "narrow_border",
        "best_of_block",
        "best_of_all",
        "mask_rows",
        "add_to_tokens",
        "lower_seen",
        "lower_fresh",
    ),
    experts: ("expert_rows", "plan_tiles"),
    decoder: ("write_heads", "gate_silu"),
}
