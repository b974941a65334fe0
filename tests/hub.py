"""hub.py DIR: answers on this machine as the Hugging Face hub does for the repositories DIR/ORG/NAME; prints
its port, then each request. NAME gated needs the token `secret`; busy cannot answer; weights come by a
redirect, in ranges, and of the first request for them only half."""
import hashlib
import http.server
import json
import pathlib
import re
import sys

root, cut = pathlib.Path(sys.argv[1]), set()


class Hub(http.server.BaseHTTPRequestHandler):
    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        return body

    def do_GET(self):
        print(self.path, self.headers.get("Range", ""), flush=True)
        kind, name, file = re.match(r"/(api/models/|cdn/|)([^/]+/[^/]+)(/?.*)", self.path).groups()
        file = root / name / file.rpartition("/")[2]
        token = self.headers.get("Authorization")
        if not (root / name).is_dir() or (name.endswith("/gated") and kind != "cdn/" and token != "Bearer secret"):
            self.answer(401)
        elif name.endswith("/busy"):
            self.answer(503)
        elif kind == "api/models/":
            files = []
            for f in sorted((root / name).iterdir()):
                size, sha = f.stat().st_size, hashlib.sha256(f.read_bytes()).hexdigest()
                lfs = {"lfs": {"oid": sha, "size": size, "pointerSize": 134}} if f.suffix == ".safetensors" else {}
                files.append({"type": "file", "oid": "0" * 40, "size": size, **lfs, "path": f.name})
            self.wfile.write(self.answer(200, json.dumps(files, separators=(",", ":")).encode()))
        elif kind == "" and file.suffix == ".safetensors":
            self.answer(302, Location=f"/cdn/{name}/{file.name}")
        else:
            data = file.read_bytes()
            first = int((self.headers.get("Range") or "bytes=0-")[6:-1])
            body = self.answer(206 if first else 200, data[first:], Content_Range=f"bytes {first}-/{len(data)}")
            half = kind == "cdn/" and not name.endswith("/gated") and file not in cut
            cut.add(file)
            self.wfile.write(body[:len(body) // 2] if half else body)

    def log_message(self, *_):
        pass


server = http.server.HTTPServer(("127.0.0.1", 0), Hub)
print("port", server.server_port, flush=True)
server.serve_forever()
