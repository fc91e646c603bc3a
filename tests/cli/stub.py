"""A stand-in for a service: answers /ready with 503 until a moment has passed, and leaves its name in a file when stopped.

python stub.py NAME PORT READY_AFTER_S ENDINGS_FILE [exit=CODE after=SECONDS] [stubborn]
"""

import http.server
import json
import os
import signal
import sys
import threading
import time


def main() -> None:
    name, port, ready_after_s, endings = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    options = dict(a.split("=") for a in sys.argv[5:] if "=" in a)
    started = time.monotonic()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ready = time.monotonic() - started > ready_after_s
            workers = [{"id": "decode-0", "connected": True}, {"id": "prefill-0", "connected": False}]
            body = json.dumps({"ready": ready, "reason": "warming up", "workers": workers}).encode()
            self.send_response(200 if ready else 503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    def stopped(*_: object) -> None:
        with open(endings, "a") as f:
            f.write(f"{name}\n")
        if "stubborn" not in sys.argv:
            os._exit(0)

    signal.signal(signal.SIGTERM, stopped)
    if port:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"hello from {name}", flush=True)
    if "exit" in options:
        time.sleep(float(options.get("after", "0")))
        print("something broke", flush=True)
        os._exit(int(options["exit"]))
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
