"""Many records, some broken, through real vLLM: is every good one answered, and does memory stay flat?

    python benchmarks/vllm_stream.py [RECORDS]

Answers RECORDS (2,000) short questions with the demo model, 4 new tokens each, every hundredth line broken, and prints
one JSON line: counts, records/s, and the process's resident memory at a quarter, half and the end of the run.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BROKEN = ("not json", '{"id": "no-prompt-%d"}', '{"id": "contexts-%d", "query": "Why?", "contexts": 3}')
CONFIG = """
model: demo
runner: vllm
sampling: {max_new_tokens: 4}
speculation: {method: prompt_lookup}
runner_args: {enforce_eager: true, max_model_len: 1024}
"""


def write_input(path: Path, records: int) -> None:
    """Write `records` lines, every hundredth one broken."""
    with path.open("w") as file:
        for number in range(records):
            if number % 100 == 7:
                line = BROKEN[number // 100 % len(BROKEN)]
                file.write((line % number if "%d" in line else line) + "\n")
            else:
                passage = f"Room {number} of the museum shows {number % 13} paintings of boats."
                record = {"id": f"q{number}", "query": "How many paintings?", "contexts": [passage]}
                file.write(json.dumps(record) + "\n")


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / (1 << 20)


def main() -> None:
    """Run and measure."""
    records = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    with tempfile.TemporaryDirectory() as folder:
        source, output, config = (Path(folder, name) for name in ("in.jsonl", "out.jsonl", "c.yaml"))
        write_input(source, records)
        config.write_text(CONFIG)
        command = [sys.executable, "-m", "ragspec", "generate", "-c", config, "-i", source, "-o", output]
        process = subprocess.Popen(command)
        samples = []
        while process.poll() is None:
            time.sleep(0.5)
            lines = output.read_bytes().count(b"\n") if output.exists() else 0
            if lines:
                try:
                    samples.append((lines, resident_mib(process.pid)))
                except (OSError, IndexError):
                    break
        code = process.wait()
        answers = [json.loads(line) for line in output.read_text().splitlines()]
        stats = json.loads((Path(folder) / "out.stats.json").read_text())
    at = {share: next(mib for lines, mib in samples if lines >= records * share) for share in (0.1, 0.25, 0.5, 0.9)}
    figures = {
        "exit_code": code,
        "lines": len(answers),
        "answered": sum("output" in line for line in answers),
        "errors": sum("error" in line for line in answers),
        "in_input_order": [line["id"] for line in answers if line["id"].startswith("q")]
        == [f"q{number}" for number in range(records) if number % 100 != 7],
        "generate_s": stats["generate_s"],
        "records_per_s": stats["requests_per_s"],
        "resident_mib": {f"{share:.0%}": round(mib) for share, mib in at.items()},
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
