"""All entries: one for each class of causal model that transformers knows, then what families may be asked for."""

from __future__ import annotations

from tests.zoo.dense import PLAIN, WINDOWED
from tests.zoo.entry import Entry
from tests.zoo.others import BYTES, ENCODERS, HALVES, SENSES
from tests.zoo.recurrent import RECURRENT
from tests.zoo.sparse import EXPERTS, LATENT
from tests.zoo.variants import ASKED, VARIANTS

SETTINGS = PLAIN | WINDOWED | EXPERTS | LATENT | RECURRENT | ENCODERS | HALVES | SENSES | BYTES
CLASSES = [Entry(name, name, settings) for name, settings in sorted(SETTINGS.items())]
FAMILIES = [Entry(name, model_type, settings) for name, (model_type, settings) in VARIANTS.items()]
ASKING = [Entry(name, "llama", generation=generation) for name, generation in ASKED.items()]
ENTRIES = CLASSES + FAMILIES
