"""What a benchmark says after each pass."""

from types import SimpleNamespace

from ragspec.benchmark.measure import describe_pass


def figures(**given):
    return SimpleNamespace(**{"tokens_per_s": 41.26, "acceptance_rate": None, "generate_s": 9.04, **given})


def test_a_pass_is_told_with_its_speed_and_the_time_left():
    assert describe_pass(figures(), 0) == "41.3 tokens/s in 9.0 s"
    assert describe_pass(figures(acceptance_rate=0.517), 45.2) == (
        "41.3 tokens/s, 52% of drafts accepted in 9.0 s; about 45 s left"
    )
    assert describe_pass(figures(tokens_per_s=None), 600).endswith("about 10 min left")
