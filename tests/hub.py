"""A Hugging Face Hub on this machine: of its HTTP interface, what a push to a dataset uses."""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_writeWRITEwrite0123456789"
READ_TOKEN = "hf_readREADread0123456789"
LARGE = 4096  # bytes from which a file is stored by its SHA-256 (LFS), as Parquet files are there


class Hub:
    """Datasets with their commits.

    Attributes:
        datasets: by id: {"private", "branches": {name: [commit, ...]}}; a commit is {"oid", "message", "files"}.
        stored: large files by their SHA-256, whether or not a commit shows them.
        before: called with the method and path of each request before it is answered.
        after_commit: called when a commit is made, before its reply is sent.
    """

    def __init__(self):
        self.datasets, self.stored, self.requests = {}, {}, []
        self.before = self.after_commit = lambda *_: None
        self.lock = threading.Lock()
        hub = self

        class Handler(Answering):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def add(self, name, files=(), *, private=False):
        """Make a dataset, as somebody else would."""
        self.datasets[name] = {"private": private, "branches": {"main": []}}
        self.commit(name, "main", "initial commit", dict(files))

    def commit(self, name, branch, message, files):
        commits = self.datasets[name]["branches"][branch]
        oid = hashlib.sha1(f"{name} {branch} {len(commits)}".encode(), usedforsecurity=False).hexdigest()
        commits.append({"oid": oid, "message": message, "files": files})
        return oid

    def head(self, name, branch="main"):
        return self.datasets[name]["branches"][branch][-1]

    def commits(self, name, branch="main"):
        return [each["message"] for each in self.datasets[name]["branches"][branch]]


class Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer("HEAD")

    def do_GET(self):
        self._answer("GET")

    def do_POST(self):
        self._answer("POST")

    def do_PUT(self):
        self._answer("PUT")

    def _answer(self, method):
        address = urlsplit(self.path)
        path, self.query = unquote(address.path), parse_qs(address.query)
        self.body = self._read()
        self.hub.requests.append((method, path))
        self.hub.before(method, path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        parts = path.strip("/").split("/")
        if path == "/":
            self._send(200)
        elif path.startswith("/stored/"):  # an address that is signed itself, as the hub's storage has them
            self.hub.stored[parts[1]] = self.body
            self._send(200)
        elif token not in (TOKEN, READ_TOKEN):
            self._send(401, {"error": "Invalid credentials in Authorization header"})
        elif path == "/api/validate-yaml":
            self._send(200, {"errors": [], "warnings": []})
        elif token == READ_TOKEN and method in ("POST", "PUT"):
            self._send(403, {"error": "Forbidden: you must use a write token to upload to a repository."})
        elif path == "/api/repos/create":
            given = json.loads(self.body)
            private = given.get("private", given.get("visibility") == "private")
            name = f"{given['organization']}/{given['name']}"
            self.hub.add(name, {".gitattributes": b"*.parquet filter=lfs\n"}, private=bool(private))
            self._send(200, {"url": f"{self.hub.address}/datasets/{name}"})
        else:
            self._dataset(method, [each for each in parts if each != "api"][1:])

    def _dataset(self, method, parts):
        name = "/".join(parts[:2]).removesuffix(".git")
        if (dataset := self.hub.datasets.get(name)) is None:
            return self._send(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        kind, rest = parts[2] if len(parts) > 2 else "revision", parts[3:]
        if kind == "info":
            return self._batch()
        branches, revision = dataset["branches"], rest[0] if rest else "main"
        if kind == "branch":
            branches[revision] = list(branches["main"])
            return self._send(201, {})
        known = {each["oid"]: each for commits in branches.values() for each in commits}
        commit = branches[revision][-1] if revision in branches else known.get(revision)
        if commit is None:
            return self._send(404, {"error": f"Invalid rev id: {revision}"}, {"X-Error-Code": "RevisionNotFound"})
        if kind == "revision":
            return self._send(200, self._info(name, dataset, commit))
        if kind == "resolve":
            return self._file(commit, "/".join(rest[1:]))
        if kind == "preupload":
            return self._send(200, {"files": [self._mode(each, commit) for each in json.loads(self.body)["files"]]})
        assert (method, kind) == ("POST", "commit"), (method, parts)
        with self.hub.lock:
            self._commit(name, revision, branches[revision][-1])

    def _info(self, name, dataset, commit):
        files = [
            {"rfilename": path, "size": len(data), "blobId": git_hash(data)}
            | ({"lfs": {"sha256": sha256(data), "size": len(data), "pointerSize": 130}} if is_large(path, data) else {})
            for path, data in commit["files"].items()
        ]
        return {"id": name, "sha": commit["oid"], "private": dataset["private"], "siblings": files, "tags": []}

    def _file(self, commit, path):
        if path not in commit["files"]:
            return self._send(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        data = commit["files"][path]
        headers = {"X-Repo-Commit": commit["oid"], "ETag": f'"{git_hash(data)}"', "Accept-Ranges": "bytes"}
        self._send(200, data, headers)

    def _mode(self, file, commit):
        there = commit["files"].get(file["path"])
        large = file["path"].endswith(".parquet") and file["size"] >= LARGE
        oid = there and (sha256(there) if large else git_hash(there))
        return {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}

    def _batch(self):
        objects = []
        for each in json.loads(self.body)["objects"]:
            upload = {"upload": {"href": f"{self.hub.address}/stored/{each['oid']}"}}
            objects.append(each | ({} if each["oid"] in self.hub.stored else {"actions": upload}))
        self._send(200, {"transfer": "basic", "objects": objects})

    def _commit(self, name, branch, parent):
        header, *operations = map(json.loads, self.body.splitlines())
        if header["value"].get("parentCommit", parent["oid"]) != parent["oid"]:
            return self._send(412, {"error": "A commit has happened since. Please refresh and try again."})
        files = dict(parent["files"])
        for operation in operations:
            kind, value = operation["key"], operation["value"]
            if kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[value["path"]] = self.hub.stored[value["oid"]]
            else:
                del files[value["path"]]
        oid = self.hub.commit(name, branch, header["value"]["summary"], files)
        self.hub.after_commit()
        url = f"{self.hub.address}/datasets/{name}/commit/{oid}"
        self._send(200, {"commitUrl": url, "commitOid": oid, "success": True})

    def _read(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            chunks = []
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _send(self, status, content=b"", headers=()):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", "Content-Length": len(data), **dict(headers)}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def git_hash(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def is_large(path, data):
    return path.endswith(".parquet") and len(data) >= LARGE


@contextmanager
def hub_server():
    """Yield a hub that listens."""
    with Hub() as hub:
        yield hub
