"""How fast, and in how much memory, records stream through the pipeline without a model.

    python benchmarks/stream.py [RECORDS]

Writes a JSONL of RECORDS (1,000,000) questions with one passage each into a temporary folder, answers it with the fake
runner, and prints one JSON line: records/s, microseconds a record, and the process's peak memory.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    """Stream and measure."""
    records = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        with source.open("w") as file:
            for number in range(records):
                passage = f"Passage number {number} of a corpus that nobody has read."
                file.write(json.dumps({"id": f"q{number}", "query": "What is this?", "contexts": [passage]}) + "\n")
        config = Path(folder, "fake.yaml")
        config.write_text("runner: fake\nsampling: {max_new_tokens: 32}\n")
        command = [sys.executable, "-m", "ragspec", "generate", "-c", config, "-i", source, "-o", output]
        started = time.perf_counter()
        subprocess.run(command, check=True)
        seconds = time.perf_counter() - started
        with output.open("rb") as file:
            lines = sum(1 for _ in file)
        assert lines == records, f"{lines} lines for {records} records"
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    figures = {"records": records, "seconds": round(seconds, 1), "records_per_s": round(records / seconds)}
    print(json.dumps(figures | {"us_per_record": round(seconds / records * 1e6, 1), "peak_mib": round(peak)}))


if __name__ == "__main__":
    main()
