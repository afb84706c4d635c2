"""An object store on this machine (moto's S3 over HTTP), and a proxy before it whose connections break."""

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextmanager
def environment(**values):
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})


@contextmanager
def s3_server():
    """Yield the address of an S3 server with a bucket "box", which the environment names to every client.

    It is a process of its own: Flask's global objects would not let others look through this one's modules.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(port)
        with environment(**KEYS, AWS_ENDPOINT_URL=address):
            make_bucket("box", address)
            yield address
    finally:
        server.kill()
        server.wait()


def wait_for(port, seconds=120):
    """Return once something listens there."""
    latest = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < latest, "the server did not start"
            time.sleep(0.1)


def make_bucket(name, address):
    import boto3

    boto3.client("s3", endpoint_url=address).create_bucket(Bucket=name)


class Breaking:
    """A proxy for `address` that passes bytes on, and breaks a connection when `breaks(direction, data)` says so.

    direction: "up" (to the server) or "down". after: what is broken off was passed on before.
    """

    def __init__(self, address, breaks, *, after=False):
        host, _, port = address.removeprefix("http://").partition(":")
        self._target = host, int(port)
        self._breaks = breaks
        self._after = after
        self.broken = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._listener.close()

    def _accept(self):
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                for direction, source, sink in (("up", client, server), ("down", server, client)):
                    threading.Thread(target=self._pass_on, args=(direction, source, sink), daemon=True).start()

    def _pass_on(self, direction, source, sink):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                breaks = self._breaks(direction, data)
                if not breaks or self._after:
                    sink.sendall(data)
                if breaks:
                    self.broken += 1
                    break
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
