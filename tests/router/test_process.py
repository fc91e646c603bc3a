"""The process: imports without torch, prints its ready line, stops on SIGTERM, explains bad settings."""

import signal
import subprocess
import sys

import pytest

from services.router.config import read_config
from tests.router.conftest import write_model
from twinflow.contracts.errors import BadRequest

FORBIDDEN = ("torch", "transformers", "nixl", "triton", "twinflow.engine", "twinflow.cache", "twinflow.transfer")


def test_imports_nothing_heavy():
    code = f"import services.router.main, sys; print([m for m in {FORBIDDEN} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_starts_and_stops(tmp_path):
    folder = write_model(tmp_path / "toy")
    command = [
        sys.executable,
        "-m",
        "services.router.main",
        "--model",
        str(folder),
        "--http-port",
        "0",
        "--grpc-port",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        assert line.startswith("twinflow router ready: model toy, http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert "Traceback" not in process.stderr.read()


def test_errors_are_one_line(tmp_path):
    command = [sys.executable, "-m", "services.router.main", "--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (
        done.returncode == 1 and done.stderr.startswith("router: no tokenizer.json in") and done.stderr.count("\n") == 1
    )


def test_settings_from_file_and_command_line(tmp_path):
    path = tmp_path / "router.toml"
    path.write_text('model = "a/b"\nhttp_port = 81\nkeep_alive_s = 2\n')
    config = read_config(["--config", str(path), "--http-port", "82"])
    assert (config.model, config.model_name, config.http_port, config.keep_alive_s) == ("a/b", "b", 82, 2.0)
    path.write_text("htp_port = 81")
    with pytest.raises(BadRequest, match="htp_port"):
        read_config(["--config", str(path)])
    with pytest.raises(BadRequest, match="--model"):
        read_config([])
