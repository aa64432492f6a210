"""An imitation of the Hugging Face hub for the `datasets` library: what it asks of it while it streams."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Files = Mapping[str, bytes]  # of one data set, by path


class Hub(ThreadingHTTPServer):
    """Serves data sets, by name, until it is shut down; those that are `gated` exist and are not shown."""

    daemon_threads = True

    def __init__(self, sets: Mapping[str, Files], gated: tuple[str, ...] = ()) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.sets, self.gated = sets, gated
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        """For HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on the terminal."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path)
        self.server.asked.append(path)
        found = re.match(r"/(api/)?datasets/([^/]+/[^/]+)(.*)", path)
        if not found:
            self._refuse(404, "EntryNotFound")
            return
        api, name, rest = found.groups()
        if name not in self.server.sets:
            self._refuse(401, "GatedRepo" if name in self.server.gated else "RepoNotFound")
        elif api:
            self._describe(name, self.server.sets[name], rest)
        else:
            self._give(self.server.sets[name], rest)

    def _describe(self, name: str, files: Files, rest: str) -> None:
        tree = re.fullmatch(rf"/tree/{COMMIT}/?(.*)", rest)
        if rest in ("", f"/revision/{COMMIT}"):
            about = {
                "id": name,
                "sha": COMMIT,
                "private": False,
                "gated": False,
                "disabled": False,
                "tags": [],
            }
            about |= {"downloads": 0, "likes": 0, "siblings": [{"rfilename": path} for path in files]}
            self._json(about)
        elif tree:
            self._json(_listed(files, tree[1]))
        else:
            self._refuse(404, "EntryNotFound")

    def _give(self, files: Files, rest: str) -> None:
        place = re.fullmatch(r"/resolve/[^/]+/(.*)", rest)
        if not place or place[1] not in files:
            self._refuse(404, "EntryNotFound")
            return
        data = files[place[1]]
        headers = {"ETag": f'"{_hash(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        part = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if part is None:
            self._send(200, data, headers)
            return
        first, last = int(part[1]), min(int(part[2] or len(data)), len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self._send(206, data[first : last + 1], headers)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _listed(files: Files, folder: str) -> list[dict[str, Any]]:
    """What a folder holds, folders in it as one entry each."""
    start = f"{folder}/" if folder else ""
    inside = [path for path in files if path.startswith(start)]
    folders = {start + path.removeprefix(start).split("/")[0] for path in inside}.difference(inside)
    return [
        *({"type": "directory", "path": path, "size": 0, "oid": COMMIT} for path in sorted(folders)),
        *(
            {"type": "file", "path": path, "size": len(files[path]), "oid": _hash(files[path])}
            for path in inside
            if "/" not in path.removeprefix(start)
        ),
    ]


def _hash(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
