"""A nightly run in Airflow 3: answers, then a decision by their scores.

Retries run the same command again, which continues where the last try stopped. Airflow ends a task by SIGTERM, at which
a run stops in order.
"""

from datetime import datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

RAGSPEC = "cd /srv/ragspec && .venv/bin/ragspec"

with DAG("ragspec_nightly", schedule="0 2 * * *", start_date=datetime(2026, 1, 1), catchup=False, max_active_runs=1):
    answers = BashOperator(
        task_id="answers",
        bash_command=f"{RAGSPEC} generate --config nightly.yaml -o out/{{{{ ds }}}}/answers.jsonl --log-format json",
        retries=3,
        retry_delay=timedelta(minutes=5),
    )
    decide = BashOperator(
        task_id="decide",  # exit code 1: worse; 4: too few records to tell
        bash_command=f'{RAGSPEC} evaluate out/{{{{ ds }}}}/answers.jsonl --against out/base.jsonl --gate "f1 >= -2"',
    )
    answers >> decide
