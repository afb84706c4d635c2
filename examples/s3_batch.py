"""Questions from S3, answers to S3. Needs `pip install "ragspec[s3]"`.

    python examples/s3_batch.py s3://my-bucket/q.jsonl s3://my-bucket/answers/ --upload sample_data/questions.jsonl

Credentials come from the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE, ...); AWS_ENDPOINT_URL selects another store.
An interrupted run continues where it stopped: run the same command again.
"""

import argparse

import fsspec

import ragspec


def main(argv: list[str] | None = None) -> None:
    """Answer the questions and list the parts that were written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", help="URL of a file of records")
    parser.add_argument("answers", help="URL of the folder for the answers")
    parser.add_argument("--upload", metavar="FILE", help="copy this file to QUESTIONS first")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=48, help="longest answer, in tokens")
    parser.add_argument("--limit", type=int, help="answer only the first N records")
    args = parser.parse_args(argv)

    store, _ = fsspec.core.url_to_fs(args.answers)
    if args.upload:
        store.put_file(args.upload, args.questions)
    config = ragspec.load_config(
        {
            "model": args.model,
            "input": args.questions,
            "output": {"path": args.answers, "part_records": 1000},  # a part is sealed after 1,000 answers
            "sampling": {"max_new_tokens": args.tokens},
            "speculation": {"method": "context"},
        }
    )
    summary = ragspec.generate(config, limit=args.limit)
    print(f"{summary.records} answered, {summary.failed} failed, {summary.skipped} finished before")
    for path in store.ls(args.answers, detail=False):
        print(path)


if __name__ == "__main__":
    main()
