"""Requests made up from the API's own description, some valid and some not: no answer that it does not have."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.router.conftest import running, until
from tests.router.fake_worker import FakeWorker

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,negative_data_rejection,unsupported_method,allow_header_conformance"
)
RUNS = {"short": ("examples,fuzzing", 20, 120), "long": ("examples,coverage,fuzzing", 150, 2000)}


@pytest.mark.parametrize(
    "length", ["short", pytest.param("long", marks=[pytest.mark.clients, pytest.mark.timeout(900)])]
)
async def test_no_answer_that_is_not_described(model_folder: Path, tmp_path: Path, length: str) -> None:
    """`RUNS`: phases, requests of each kind and endpoint at most, requests of the whole run at least."""
    phases, examples, least = RUNS[length]
    async with running(model_folder, tool_parser="hermes", admin_token="s3cret") as c:
        worker = await c.add(FakeWorker("toy", max_model_tokens=2**32 - 1, max_request_tokens=2**32 - 1))
        c.says(worker, "hello there")
        report = tmp_path / "report.json"
        command = [str(Path(sys.executable).with_name("st")), "run", f"{c.url}/openapi.json", "--seed=1", "--no-color"]
        command += [f"--phases={phases}", f"--max-examples={examples}", f"--checks={CHECKS}", "--continue-on-failure"]
        command += ["--report=json", f"--report-json-path={report}", "--header=authorization: Bearer s3cret"]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        out, _ = await process.communicate()
        assert process.returncode == 0, out.decode()
        told = json.loads(report.read_text())
        served = {path: sum(p["accepted"] for p in rates.values()) for path, rates in told["valid_rates"].items()}
        print(f"\n{told['test_cases']['generated']} requests, served: {served}")
        assert told["test_cases"]["generated"] >= least and told["operations"]["tested"] == len(served)
        assert all(served.values()), "some endpoint answered nothing but errors"
        assert len(served) == len((await c.http.get("/openapi.json")).json()["paths"])
        await until(lambda: not c.router.generator.running)
