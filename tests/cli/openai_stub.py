"""A stand-in for a ready router: streams two words per answer, with usage, and the statistics when asked for.

python openai_stub.py PORT [no-text] [no-stats] [error]
"""

import http.server
import json
import sys
import time
from typing import Any

STATS = {"prompt_tokens": 612, "route": "remote", "reason": "nothing cached", "blocks_moved": 9, "bytes_moved": 1 << 20}


def chunk(**fields: Any) -> bytes:
    base = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": []}
    return b"data: " + json.dumps(base | fields).encode() + b"\n\n"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"workers": []}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if "error" in sys.argv:
            body = json.dumps({"error": {"message": "no capacity", "type": "server_error"}}).encode()
            self.send_response(503)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for word in ("Hello", " world") if "no-text" not in sys.argv else ():
            self.wfile.write(chunk(choices=[{"index": 0, "delta": {"content": word}, "finish_reason": None}]))
            self.wfile.flush()
            time.sleep(0.01)
        usage = {"prompt_tokens": 612, "completion_tokens": 2, "total_tokens": 614}
        asked = self.headers.get("x-twinflow-stats") == "1" and "no-stats" not in sys.argv
        self.wfile.write(chunk(usage=usage, **({"twinflow": STATS} if asked else {})))
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *args: object) -> None:
        print("request", flush=True)


if __name__ == "__main__":
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
