"""Tools that run beside the environment: code in the sandbox, and the tools of real MCP server processes."""

from __future__ import annotations

import json
import os
import sys
import time

import grpc
import psutil
import pytest
from headrace.simulator.v1 import simulator_pb2
from headrace_simulator.backends.base import BackendError
from headrace_simulator.backends.conversation.backend import Conversations
from headrace_simulator.backends.conversation.calls import ServiceLost

OK, LOST = simulator_pb2.OUTCOME_STATUS_OK, simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST
PYTHON = {"name": "python", "options": {"sandbox": "best_effort"}}
"""Behind whatever walls this machine has."""
SERVER = '''
import base64
import io
import os
import sys
import time

import anyio
import PIL.Image
from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

server = MCPServer("test")


@server.tool()
async def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
async def slow(seconds: float) -> str:
    """Waits."""
    await anyio.sleep(seconds)
    return "waited"


@server.tool()
async def fails() -> str:
    raise ValueError("no such town")


@server.tool()
async def dies() -> str:
    os._exit(3)


@server.tool()
async def dies_once(mark: str) -> str:
    if not os.path.exists(mark):
        open(mark, "w").close()
        os._exit(3)
    return "alive"


@server.tool()
async def floods() -> str:
    return "x" * (9 << 20)


@server.tool()
async def long() -> str:
    return "x" * 10_000


@server.tool()
async def photo() -> list:
    written = io.BytesIO()
    PIL.Image.new("RGB", (4, 4)).save(written, "PNG")
    return ["taken", Image(data=written.getvalue(), format="png")]


@server.tool()
async def whoami() -> str:
    return f"{os.environ['A']} with {os.environ['B']}, {os.environ['C']}"


@server.tool()
async def pid() -> int:
    return os.getpid()


@server.tool(structured_output=False)
async def contents(kind: str) -> CallToolResult:
    written = io.BytesIO()
    PIL.Image.new("RGB", (4, 4)).save(written, "PNG")
    png = base64.b64encode(written.getvalue()).decode()
    text = base64.b64encode("a,é".encode()).decode()
    blocks = {
        "text": EmbeddedResource(resource=TextResourceContents(uri="file:///a.txt", text="the text of a")),
        "csv": EmbeddedResource(resource=BlobResourceContents(uri="file:///a.csv", mime_type="text/csv", blob=text)),
        "png": EmbeddedResource(resource=BlobResourceContents(uri="file:///a.png", mime_type="image/png", blob=png)),
        "zip": EmbeddedResource(
            resource=BlobResourceContents(uri="file:///a.zip", mime_type="application/zip", blob=text)
        ),
        "link": ResourceLink(uri="file:///b.txt", name="b", description="about b"),
        "audio": AudioContent(data=text, mime_type="audio/wav"),
    }
    if kind == "structured":
        return CallToolResult(content=[], structured_content={"a": [1, "é"]})
    if kind == "other structured":
        return CallToolResult(content=[TextContent(text="see there")], structured_content={"a": 5})
    if kind == "same structured":
        return CallToolResult(content=[TextContent(text='{"a": 5}')], structured_content={"a": 5})
    if kind == "wrong":
        return CallToolResult(content=[blocks["text"]], is_error=True)
    return CallToolResult(content=[blocks[kind]])


print("a server that prints what is no message")
server.run()
'''


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answers(environment, content):
    messages, _, _ = environment.step({"role": "assistant", "content": content})
    return [message["content"] for message in messages]


def talk(**options):
    return Conversations().converse("tools", options)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return {"command": [sys.executable, str(path)]}


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("text", "the text of a"),
        ("csv", "a,é"),
        ("png", "[image]"),
        (
            "zip",
            "error: contents: ValueError: its answer has the resource file:///a.zip of type application/zip",
        ),
        ("link", '{"name": "b", "uri": "file:///b.txt", "description": "about b"}'),
        ("audio", "error: contents: ValueError: its answer has audio (audio/wav)"),
        ("structured", '{"a": [1, "é"]}'),
        ("other structured", 'see there\n{"a": 5}'),
        ("same structured", '{"a": 5}'),
        ("wrong", "error: contents: ValueError: the text of a"),
    ],
)
def test_each_content_of_the_protocol_is_told_or_refused_by_name(server, kind, told):
    (found,) = answers(talk(tools=[], mcp=[server], deadline_s=20.0), call("contents", kind=kind))
    if kind == "link":
        assert json.loads(found) == json.loads(told)
    else:
        assert found.startswith(told) if told.startswith("error") else found == told


def test_an_embedded_picture_is_seen(server):
    (found,) = answers(
        talk(tools=[], mcp=[server], deadline_s=20.0, images=True), call("contents", kind="png")
    )
    assert [part["type"] for part in found] == ["image"]


def test_code_runs_in_the_sandbox(monkeypatch):
    monkeypatch.setenv("A_SECRET", "of-the-service")
    environment = talk(tools=[PYTHON], deadline_s=20.0)
    found = answers(environment, call("python", code="a = 6\na * 7") + call("python", code="print(1/0)"))
    assert found[0] == "42" and found[1].endswith("ZeroDivisionError: division by zero")
    reads = answers(environment, call("python", code="import os; print(os.environ, open('/etc/passwd'))"))
    # What is not there behind the walls cannot be found, what is there cannot be read.
    assert "of-the-service" not in reads[0]
    assert "PermissionError" in reads[0] or "FileNotFoundError" in reads[0]
    schema = environment.reset(0, {"question": "?"})[1][0]["function"]
    assert schema["parameters"]["required"] == ["code"] and list(schema["parameters"]["properties"]) == [
        "code"
    ]


def test_code_that_hangs_or_floods_is_stopped_beside_other_calls():
    environment = talk(tools=[PYTHON, "calculator"], deadline_s=1.0)
    begun = time.monotonic()
    hang, flood = (
        call("python", code="while True: pass"),
        call("python", code="while True: print('x' * 9999)"),
    )
    found = answers(environment, hang + flood + call("calculator", expression="2 * 3"))
    assert time.monotonic() - begun < 4
    assert found[0] == "error: python was stopped: the calls of a turn may take 1 s"
    assert len(found[1]) < 4100 and len(found) == 3


def test_tools_of_a_server_are_listed_and_called_side_by_side(server):
    environment = talk(
        tools=["calculator"], mcp=[server | {"tools": ["add", "slow", "fails", "long"]}], deadline_s=20.0
    )
    _, tools = environment.reset(0, {"question": "?"})
    assert [tool["function"]["name"] for tool in tools] == ["calculator", "add", "slow", "fails", "long"]
    assert tools[1]["function"]["description"] == "Adds two numbers."
    assert set(tools[1]["function"]["parameters"]["properties"]) == {"a", "b"}
    begun = time.monotonic()
    slow = call("slow", seconds=1.0)
    found = answers(environment, slow * 4 + call("add", a=1, b=2) + call("calculator", expression="1 + 1"))
    assert found == ["waited"] * 4 + ["3", "2"] and time.monotonic() - begun < 3.9


@pytest.mark.parametrize("images", [True, False])
def test_images_of_a_server_are_seen_where_that_is_asked(server, images):
    environment = talk(tools=[], mcp=[server], images=images)
    (seen,) = answers(environment, call("photo"))
    if not images:
        assert seen == "taken\n[image]"
        return
    text, image = seen
    assert text == {"type": "text", "text": "taken"} and image["image"].startswith(b"\x89PNG")


def test_a_broken_call_is_a_message(server):
    environment = talk(tools=[], mcp=[server], deadline_s=0.5)
    (late,) = answers(environment, call("slow", seconds=60))
    assert late == "error: slow was stopped: the calls of a turn may take 0.5 s"
    environment = talk(tools=[], mcp=[server], deadline_s=20.0)
    found = answers(environment, call("add", a="one") + call("fails") + call("long") + call("none", a=1))
    assert found[0].startswith("error: add: ValueError: ") and found[1].startswith("error: fails: ")
    assert "[6000 characters are left out]" in found[2] and "there is no tool 'none'" in found[3]
    assert answers(environment, call("add", a=2, b=2)) == ["4"]


def test_a_call_whose_service_was_lost_is_asked_again_and_counted(server, tmp_path):
    environment = talk(tools=["calculator"], mcp=[server], deadline_s=30.0)
    both = call("dies_once", mark=str(tmp_path / "one")) + call("calculator", expression="1 + 1")
    messages, _, _ = environment.step({"role": "assistant", "content": both})
    assert [(each["content"], each.get("retries")) for each in messages] == [("alive", 1), ("2", None)]
    environment = talk(tools=["calculator"], mcp=[server], retries=0)
    with pytest.raises(ServiceLost, match="exit code 3"):
        environment.step({"role": "assistant", "content": call("dies_once", mark=str(tmp_path / "two"))})


def test_a_service_that_floods_is_broken(server):
    environment = talk(tools=[], mcp=[server])
    with pytest.raises(ServiceLost, match="a message of more than 8388608 bytes"):
        environment.step({"role": "assistant", "content": call("floods")})
    assert answers(environment, call("add", a=2, b=2)) == ["4"]  # it was started again


@pytest.mark.nightly  # its quick twin is the test before it; two children and two servers are started here
async def test_a_broken_service_is_a_lost_conversation_and_the_next_one_works(simulator, server):
    options = {"tools": ["calculator"], "mcp": [server], "deadline_s": 10.0}
    pool = await simulator.open("tools", backend="conversation", options=options, step_timeout_s=30.0)
    await pool.reset(options={"question": "?"})
    lost = await pool.say(call("dies"))
    assert lost.status == LOST and "exit code 3" in lost.detail
    assert (await pool.reset(options={"question": "?"})).status == OK
    assert (await pool.say(call("add", a=2, b=3))).messages[0].content == "5"
    (pid,) = [int((await pool.say(call("pid"))).messages[0].content)]
    assert psutil.Process(pid).is_running() and pid != os.getpid()


async def test_a_server_gets_what_references_stand_for_and_no_message_shows_it(
    simulator, server, tmp_path, monkeypatch
):
    (tmp_path / "key").write_text("secret-of-the-file\n")
    (tmp_path / "key").chmod(0o600)
    monkeypatch.setenv("A_KEY", "secret-of-the-service")
    env = {"A": "env:A_KEY", "B": f"Bearer file:{tmp_path}/key", "C": "plain"}
    options = {"tools": [], "mcp": [{**server, "env": env}], "deadline_s": 20.0}
    pool = await simulator.open("tools", backend="conversation", options=options, step_timeout_s=30.0)
    await pool.reset(options={"question": "?"})
    told = (await pool.say(call("whoami"))).messages[0].content
    assert told == f"env:A_KEY with Bearer file:{tmp_path}/key, plain"
    assert "secret-of" not in (await pool.say(call("none", a="secret-of-the-service"))).messages[0].content
    for reference, words in (("env:NO_SUCH", "no variable NO_SUCH"), ("file:/no/key", "cannot be read")):
        env["A"] = reference
        with pytest.raises(grpc.aio.AioRpcError, match=r"options_json.mcp\[0\].env.A: .*" + words):
            await simulator.open("tools", backend="conversation", options=options)


@pytest.mark.parametrize(
    ("mcp", "words"),
    [
        ({"command": ["/no/such/server"]}, "does not start: its process ended with exit code 127"),
        ({"command": [sys.executable, "-c", "pass"]}, "does not start"),
        ({"command": ["sleep", "60"], "start_timeout_s": 0.3}, "told no tools within 0.3 s"),
    ],
)
def test_servers_that_do_not_start_are_refused(mcp, words):
    with pytest.raises(BackendError, match=words) as caught:
        talk(mcp=[mcp])
    assert caught.value.field == "options_json.mcp"


def test_a_tool_that_the_server_lacks_is_named(server):
    with pytest.raises(BackendError, match="has no tool 'mul'; tools: add"):
        talk(mcp=[server | {"tools": ["mul"]}])
