"""Kill a run that writes parts to an S3 server, again and again: in the end every record is in one part, once."""

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from contextlib import suppress

from tests.conftest import ROOT, write_jsonl
from tests.stores import environment, s3_server

RECORDS = 400
LATEST = 1.5  # seconds for which a run may write before it is killed
PATIENCE = 60  # seconds until it writes anything


def campaign(count, seed, folder):
    """Kill runs `count` times at random moments; return what there was to see. Raises AssertionError."""
    chance = random.Random(seed)
    records = [{"id": f"q{i}", "query": f"question {i}"} for i in range(RECORDS)]
    source = write_jsonl(folder / "in.jsonl", records)
    args = {"delay_s": 0.01, "batch_size": 1}
    kills = outputs = 0
    with s3_server(), environment(RAGSPEC_CACHE=str(folder / "cache")):
        while kills < count:
            outputs += 1
            order = chance.choice(["input", "finish"])
            output = {"path": f"s3://box/{outputs}/", "part_records": chance.randint(3, 60)}
            raw = {"runner": "fake", "runner_args": args, "input": source, "output": output, "order": order}
            config = folder / f"{outputs}.yaml"
            config.write_text(json.dumps(raw))
            while run(config, folder / "cache", chance.uniform(0, LATEST)):
                kills += 1
                if chance.random() < 0.1:  # another machine goes on: what was not sealed is answered again
                    spools = list((folder / "cache").rglob("lines.jsonl"))
                    for spool in spools:
                        spool.unlink()
            check(outputs, [record["id"] for record in records], ordered=order == "input")
    return {"kills": kills, "outputs": outputs}


def run(config, cache, seconds):
    """Run the command, and kill it some seconds after its first line; return whether it had not ended before."""
    before = written(cache)
    command = [sys.executable, "-m", "ragspec", "generate", "--config", str(config)]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait(lambda: process.poll() is not None or written(cache) != before, PATIENCE)
    wait(lambda: process.poll() is not None, seconds)
    killed = process.poll() is None
    process.kill()
    _, said = process.communicate()
    assert killed or process.returncode == 0, said.decode()
    return killed


def wait(over, seconds):
    started = time.monotonic()
    while not over() and time.monotonic() - started < seconds:
        time.sleep(0.005)


def written(cache):
    """Return what changes whenever a line is written to a spool."""
    found = []
    for path in cache.rglob("lines.jsonl"):
        with suppress(FileNotFoundError):
            found.append((path.stat().st_mtime_ns, path.stat().st_size))
    return found


def check(number, ids, *, ordered):
    """Every record is there once, in the order asked for, and the manifest says what is there."""
    import boto3
    import zstandard

    client = boto3.client("s3")
    keys = [item["Key"] for item in client.list_objects_v2(Bucket="box", Prefix=f"{number}/")["Contents"]]
    files = {key.rpartition("/")[2]: client.get_object(Bucket="box", Key=key)["Body"].read() for key in keys}
    parts = {name: data for name, data in files.items() if name.startswith("part-")}
    manifest = json.loads(files["_manifest.json"])
    assert [part["name"] for part in manifest["parts"]] == sorted(parts)
    found = []
    for part in manifest["parts"]:
        data = parts[part["name"]]
        assert part["sha256"] == hashlib.sha256(data).hexdigest()
        lines = zstandard.ZstdDecompressor().decompress(data).splitlines()
        assert part["records"] == len(lines)
        found += [json.loads(line)["id"] for line in lines]
    assert manifest["records"] == len(found)
    assert (found if ordered else sorted(found)) == (ids if ordered else sorted(ids))
