"""What decides the bits of keys and values: the weights, the machine, and the code that computes with them.

    >>> weights = weights_digest(inner)  # before they are packed
    >>> fingerprint(model, weights)

Bits differ already with another number of threads or another form of a layer, so all of that counts. Limit: a weight is
known by a sample of its numbers; what files it came from is up to the caller.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from importlib.metadata import version
from itertools import chain

import torch

from ragspec.engine.kv.paged_cache import PagedCache
from ragspec.engine.model.forward import Model
from ragspec.engine.model.weight_layouts import PackedLinear
from ragspec.host.machine import cpu_features

SAMPLED = 1024  # numbers of a weight
PACKAGES = ("ragspec", "torch", "transformers")
UNRELATED = ("_name_or_path", "transformers_version")  # of a model's config


@torch.inference_mode()
def weights_digest(inner: torch.nn.Module) -> str:
    """Return a digest of a model's weights: names, types, shapes, and some numbers of each."""
    found = sha256()
    for name, weight in chain(inner.named_parameters(), inner.named_buffers()):
        found.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        for part in _parts(weight):
            flat = part.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // SAMPLED)].contiguous().cpu()
            found.update(some.view(torch.uint8).numpy().data)
    return found.hexdigest()


def _parts(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that a weight is made of: itself, unless torchao quantised it."""
    flatten = getattr(weight, "__tensor_flatten__", None)
    if flatten is None:
        yield weight
    else:
        for name in flatten()[0]:
            yield from _parts(getattr(weight, name))


def fingerprint(model: Model, *known: object) -> bytes:
    """Return a digest of all that keys and values depend on but tokens. known: what the caller knows of the model."""
    inner, cache = model.inner, model.cache
    config = {key: value for key, value in inner.config.to_dict().items() if key not in UNRELATED}
    forms = Counter(
        (module.in_features, module.out_features, module.choice)
        for module in inner.modules()
        if isinstance(module, PackedLinear)
    )
    cuda = model.device.type == "cuda"
    depends = [
        [(name, version(name)) for name in PACKAGES],
        json.dumps(config, sort_keys=True, default=str),
        str(inner.dtype),
        ", ".join(map(torch.cuda.get_device_name, model.devices)) if cuda else (model.device.type, cpu_features()),
        torch.get_num_threads(),
        sorted(forms.items()),
        model.kernels is not None,
        model.compiled is not None,
        (cache.size, model.steps is not None and model.steps.exact) if isinstance(cache, PagedCache) else None,
        known,
    ]
    return sha256(repr(depends).encode()).digest()
