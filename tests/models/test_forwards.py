"""What versions of transformers call the arguments of a forward."""

from ragspec.models.compat import cache_argument


def test_the_cache_is_handed_over_by_the_name_that_the_code_has_for_it():
    def before(self, input_ids, past_key_values=None, **kwargs): ...

    def since(self, input_ids, cache=None, **kwargs): ...

    def anything(self, *args, **kwargs): ...

    assert [cache_argument(code) for code in (before, since, anything)] == [
        "past_key_values",
        "cache",
        "past_key_values",
    ]
