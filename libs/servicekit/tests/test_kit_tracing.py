"""Traces across real calls, to a real OTLP receiver; and what happens without one."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from headrace.reward.v1 import reward_pb2
from headrace_servicekit.instance_config import parse_instance_config
from headrace_servicekit.tracing import (
    CLOSE_S,
    check_endpoint,
    open_scope,
    outgoing,
    record,
    start_tracing,
    stop_tracing,
    trace,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self):
        self.spans = {}

    def Export(self, request, context):
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans |= {span.name: span for span in scope.spans}
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def receiver():
    server, receiver = grpc.server(ThreadPoolExecutor(2)), Receiver()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    start_tracing(f"http://127.0.0.1:{port}", "reward", "reward-0")
    yield receiver
    stop_tracing()
    server.stop(0)


async def test_a_call_inside_a_trace_has_a_span_at_its_server_and_another_one_has_none(
    receiver, servers, scripted_reward, reward_stub
):
    _, address = await servers(scripted_reward)
    reward = reward_stub(address)
    open_scope()
    with trace("step 1", run="r"):
        await reward.OpenRun(reward_pb2.OpenRunRequest())
        record("learn", 10.0, 12.5, [("settled", 11.0)], devices=["cpu:0"])
        with pytest.raises(grpc.aio.AioRpcError):
            await reward.OpenRun(reward_pb2.OpenRunRequest(config_json="refuse:NOT_NOW"))
    await reward.ListScorers(reward_pb2.ListScorersRequest())
    record("outside", 1.0, 2.0)
    stop_tracing()
    spans = receiver.spans
    assert spans.keys() == {"step 1", "learn", "headrace.reward.v1.RewardService/OpenRun"}
    step = spans.pop("step 1")
    assert not step.parent_span_id
    assert {span.parent_span_id for span in spans.values()} == {step.span_id}
    assert {span.trace_id for span in spans.values()} == {step.trace_id}
    assert spans["learn"].end_time_unix_nano - spans["learn"].start_time_unix_nano == 2_500_000_000
    assert [event.time_unix_nano for event in spans["learn"].events] == [11_000_000_000]
    assert spans["headrace.reward.v1.RewardService/OpenRun"].status.code == 2, "the last one failed"


async def test_without_a_collector_no_call_says_anything_of_a_trace():
    open_scope()
    with trace("step 1"):
        assert outgoing() == ()
        record("learn", 1.0, 2.0)


def test_a_collector_that_is_away_delays_the_end_by_seconds_at_most_and_is_told_of_once(caplog):
    start_tracing("http://127.0.0.1:9", "reward", "reward-0")
    open_scope()
    with trace("step 1"):
        pass
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "headrace_servicekit.tracing"):
        for _ in range(3):
            logging.getLogger("opentelemetry.exporter").warning("it is away")
        stop_tracing()
    assert time.monotonic() - began < 10 * CLOSE_S
    assert [line.message for line in caplog.records] == ["traces are not delivered, and work goes on"]


@pytest.mark.parametrize(
    "endpoint", ["localhost:4317", "http://localhost", "http://localhost:4317/v1/traces"]
)
def test_what_is_no_endpoint_is_refused_by_its_flag(endpoint, capsys):
    with pytest.raises(ValueError, match=r"write http://HOST:4317"):
        check_endpoint(endpoint)
    with pytest.raises(SystemExit):
        parse_instance_config("reward", ["--otlp-endpoint", endpoint])
    assert "HEADRACE_OTLP_ENDPOINT" in capsys.readouterr().err
