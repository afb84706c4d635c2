"""Words for kinds of layers, so that an entry says `layers("SSF")`."""

from __future__ import annotations

from typing import Any

KINDS = {
    "F": "full_attention",
    "S": "sliding_attention",
    "C": "chunked_attention",
    "L": "linear_attention",
    "I": "indexed_attention",
    "H": "hybrid",
    "W": "hybrid_sliding",
    "V": "conv",
}
MLPS = {"d": "dense", "s": "sparse"}


def layers(kinds: str, mlps: str = "") -> dict[str, Any]:
    """Return what a config of these kinds of layers says."""
    types = {"num_hidden_layers": len(kinds), "layer_types": [KINDS[kind] for kind in kinds]}
    return types | ({"mlp_layer_types": [MLPS[mlp] for mlp in mlps]} if mlps else {})
