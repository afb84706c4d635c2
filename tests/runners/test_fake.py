"""The runner without a model: what it writes is certain."""

from ragspec.config.load import build_config
from ragspec.records import Request, Sampling, TokenLogprob
from ragspec.runners.fake import Runner


def test_every_token_is_certain_and_the_likeliest():
    runner = Runner(build_config({"runner": "fake"}))
    asked = [None, 0, 3]
    requests = [Request(i, str(i), [7, 8, 9], Sampling(max_new_tokens=2, logprobs=n)) for i, n in enumerate(asked)]
    told = [outcome.logprobs for outcome in runner.generate(requests)]
    assert told == [
        (),
        (TokenLogprob(0.0), TokenLogprob(0.0)),
        (TokenLogprob(0.0, ((8, 0.0),)), TokenLogprob(0.0, ((9, 0.0),))),
    ]
