"""A Hub with the data set `owner/name` of a folder's files. Prints its address as JSON and serves until it is killed.

It fails as networks do: of each file the first answer ends after half of its bytes, and every third request for a file is
refused for a second. With `--lies NAME` that file has other bytes of the same length than the list says.
"""

import hashlib
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FOLDER = sys.argv[1]
LIES = sys.argv[3] if len(sys.argv) > 3 else None
COMMIT = "0123456789abcdef0123456789abcdef01234567"
API = "/api/datasets/owner/name"
FILES = f"/datasets/owner/name/resolve/{COMMIT}/"

lock = threading.Lock()
counts = {"lists": 0, "files": 0}
cut = set()


def content(name):
    with open(os.path.join(FOLDER, name), "rb") as file:
        return file.read()


def entry(name):
    data = content(name)
    lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return {"type": "file", "path": name, "size": len(data), "oid": "0" * 40, "lfs": lfs}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body, headers=()):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/counts":
            return self.answer(200, json.dumps(counts).encode())
        if self.path.startswith(f"{API}/revision/"):
            return self.answer(200, json.dumps({"sha": COMMIT}).encode())
        if self.path.startswith(f"{API}/tree/"):
            with lock:
                counts["lists"] += 1
            names = sorted(os.listdir(FOLDER))
            return self.answer(200, json.dumps([entry(name) for name in names]).encode())
        if not self.path.startswith(FILES):
            return self.answer(404, b"{}")
        return self.file(self.path[len(FILES) :])

    def file(self, name):
        with lock:
            counts["files"] += 1
            throttled, first = counts["files"] % 3 == 0, name not in cut
            cut.add(name)
        if throttled:
            return self.answer(429, b"{}", [("retry-after", "1")])
        data = content(name)
        if name == LIES:
            data = bytes(reversed(data))
        start = 0
        if "range" in self.headers:
            start = int(self.headers["range"].split("=")[1].split("-")[0])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("content-range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("content-length", str(len(data) - start))
        self.end_headers()
        self.wfile.write(data[start : start + len(data) // 2] if first else data[start:])
        if first:
            self.close_connection = True


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
address = f"127.0.0.1:{server.server_address[1]}"
print(json.dumps({"event": "listening", "address": address}), flush=True)
server.serve_forever()
