"""A nightly run in Airflow 3: answer, then decide by the scores.

A retry runs the same command again, which continues where the last attempt stopped. Airflow ends a task with SIGTERM,
and ragspec then shuts down cleanly.
"""

from datetime import datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

RAGSPEC = "cd /srv/ragspec && .venv/bin/ragspec"

with DAG("ragspec_nightly", schedule="0 2 * * *", start_date=datetime(2026, 1, 1), catchup=False, max_active_runs=1):
    answers = BashOperator(
        task_id="answers",
        bash_command=f"{RAGSPEC} generate --config nightly.yaml -o out/{{{{ ds }}}}/answers.jsonl --max-failures 2% "
        "--log-format json",
        retries=3,
        retry_delay=timedelta(minutes=5),
    )
    decide = BashOperator(
        task_id="decide",  # exit code 1: worse; 4: too few records to tell
        bash_command=f"{RAGSPEC} evaluate out/{{{{ ds }}}}/answers.jsonl --against out/base.jsonl "
        '--gate "f1 >= -2" --gate "failed <= 2"',
    )
    answers >> decide
