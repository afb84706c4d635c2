"""The devices that a model's weights are on: one, or several over which accelerate has spread its layers (device_map).

    >>> devices_of(inner), spread(inner)
    ([device(type='cuda', index=0), device(type='cuda', index=1)], 'spread over 2 GPUs')

accelerate's hooks move what a layer is given to the layer's device, and the model's output to that of its input.
"""

from __future__ import annotations

from typing import Any

import torch


def devices_of(inner: Any) -> list[torch.device]:
    """Return the devices of a model's weights, each once: first the one that tokens go to and logits come from."""
    return list(dict.fromkeys([inner.device, *(each.device for each in inner.parameters())]))


def spread(inner: Any) -> str:
    """Return how a model's weights are spread, "" if they are on one device."""
    count = len(devices_of(inner))
    return f"spread over {count} GPUs" if count > 1 else ""


def is_offloaded(inner: Any) -> bool:
    """Return whether weights are elsewhere than on a device, which accelerate brings there for each forward."""
    return any(each.type == "meta" for each in devices_of(inner))
