"""admin.proto explains itself: a comment at every service, rpc and field; every rpc says whether it is idempotent."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

PROTO = Path(__file__).parents[2] / "proto"
NAME = "twinflow/rpc/v1/admin.proto"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> descriptor_pb2.FileDescriptorProto:
    out = tmp_path_factory.mktemp("proto") / "set"
    flags = [f"-I{PROTO}", "--include_source_info", f"--descriptor_set_out={out}", NAME]
    # A process of its own: the compiler and NIXL in one process corrupt its memory (both bring an abseil).
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *flags], check=True)
    found = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    return next(f for f in found.file if f.name == NAME)


def comments(file: descriptor_pb2.FileDescriptorProto) -> dict[tuple[int, ...], str]:
    return {
        tuple(at.path): (at.leading_comments + at.trailing_comments).strip() for at in file.source_code_info.location
    }


def test_every_field_has_a_comment(file: descriptor_pb2.FileDescriptorProto) -> None:
    told = comments(file)
    missing = [
        f"{message.name}.{field.name}"
        for i, message in enumerate(file.message_type)
        for j, field in enumerate(message.field)
        if not told.get((4, i, 2, j))
    ]
    assert missing == []
    assert len(file.message_type) > 20


def test_every_rpc_has_a_comment_that_says_whether_it_is_idempotent(file: descriptor_pb2.FileDescriptorProto) -> None:
    told = comments(file)
    (service,) = file.service
    methods = {method.name: told.get((6, 0, 2, i), "") for i, method in enumerate(service.method)}
    assert len(methods) == 8
    assert [name for name, text in methods.items() if "dempotent" not in text] == []


def test_every_call_names_a_worker_and_every_entry_has_an_error(file: descriptor_pb2.FileDescriptorProto) -> None:
    messages = {m.name: {f.name: f for f in m.field} for m in file.message_type}
    for method in file.service[0].method:
        asked, answer = (t.rsplit(".", 1)[1] for t in (method.input_type, method.output_type))
        assert "worker_id" in messages[asked]
        entry = messages[messages[answer]["workers"].type_name.rsplit(".", 1)[1]]
        assert method.name == "ListWorkers" or {"worker_id", "error"} <= set(entry)
