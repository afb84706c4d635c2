"""Every patch of vLLM says what it changes, and the installed vLLM has all of it."""

import importlib
import pkgutil
from functools import reduce

import pytest

from ragspec.runners.vllm import patches
from ragspec.runners.vllm.config import TRIED

NAMES = [module.name for module in pkgutil.iter_modules(patches.__path__)]


def patch_of(name):
    return importlib.import_module(f"{patches.__name__}.{name}").PATCH


@pytest.mark.parametrize("name", NAMES)
def test_a_patch_says_why_and_for_which_versions(name):
    patch = patch_of(name)
    assert all((patch.changes, patch.why, patch.until))
    assert set(patch.versions) == set(TRIED)
    assert not patch.upstream or patch.upstream.startswith("https://github.com/vllm-project/vllm/")


@pytest.mark.vllm
@pytest.mark.parametrize("change", sorted({change for name in NAMES for change in patch_of(name).changes}))
def test_the_installed_vllm_has_what_is_patched(change):
    pytest.importorskip("vllm")
    module, _, path = change.partition(":")
    assert callable(reduce(getattr, path.split("."), importlib.import_module(module)))
