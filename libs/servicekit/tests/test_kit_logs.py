"""Logs: one line a record, with the ids of the context."""

import asyncio
import json
import logging
import time

from headrace_servicekit import logs
from headrace_servicekit.logs import HumanFormatter, JsonFormatter, configure_logging, get_logger, log_context


def record(**fields):
    made = logging.LogRecord("kit", logging.WARNING, __file__, 1, "lost %s", ("it",), None)
    vars(made).update(fields)
    return made


def test_a_json_line_holds_message_fields_and_ids():
    with log_context(instance="rollout-0", run="runs/r"):
        line = json.loads(JsonFormatter().format(record(lease_epoch=7)))
    assert (line["message"], line["level"], line["instance"]) == ("lost it", "warning", "rollout-0")
    assert (line["run"], line["lease_epoch"]) == ("runs/r", 7)
    assert "run" not in json.loads(JsonFormatter().format(record()))


def test_a_human_line_holds_them_too():
    with log_context(run="runs/r"):
        assert HumanFormatter().format(record(step=3)).endswith("WARNING lost it run=runs/r step=3")


async def test_tasks_keep_the_ids_of_where_they_were_started():
    async def log():
        await asyncio.sleep(0)
        return json.loads(JsonFormatter().format(record()))["instance"]

    with log_context(instance="a"):
        first = asyncio.create_task(log())
    with log_context(instance="b"):
        second = asyncio.create_task(log())
    assert [await first, await second] == ["a", "b"]


def test_an_exception_stays_in_its_line():
    try:
        raise ValueError("broken")
    except ValueError as error:
        line = JsonFormatter().format(record(exc_info=(ValueError, error, error.__traceback__)))
    assert "\n" not in line and "ValueError: broken" in json.loads(line)["exception"]


def test_loggers_are_the_standard_librarys():
    assert get_logger("headrace.x") is logging.getLogger("headrace.x")


def repeated(run, log, monkeypatch, capsys):
    """What `run(log)` writes to standard error, as records, once the time of its lines is over."""
    monkeypatch.setattr(logs, "WINDOW_S", 0.3)
    configure_logging(json_lines=True)
    run(log)
    time.sleep(0.4)
    log.info("the next one")
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_lines_that_repeat_are_counted(monkeypatch, capsys):
    def run(log):
        for number in range(logs.LINES + 50):
            log.warning("it happened %s", number)
        log.info("something else")

    *lines, told, last = repeated(run, logging.getLogger("test.repeats"), monkeypatch, capsys)
    assert [line["message"] for line in lines].count("something else") == 1
    assert len(lines) == logs.LINES + 1 and last["message"] == "the next one"
    assert (told["message"], told["not_written"]) == (f"it happened {logs.LINES + 49}", 50)


def test_tracebacks_that_repeat_are_counted_as_asyncio_writes_them(monkeypatch, capsys):
    """Its server writes one for each connection that it cannot accept, 2,048 a second."""

    def run(log):
        loop = asyncio.new_event_loop()
        for _ in range(1000):
            error = OSError(24, "Too many open files")
            loop.call_exception_handler(
                {"message": "socket.accept() out of system resource", "exception": error}
            )
        loop.close()

    lines = repeated(run, logging.getLogger("test.repeats"), monkeypatch, capsys)
    assert sum("exception" in line for line in lines) == logs.TRACEBACKS
    assert [line["not_written"] for line in lines if "not_written" in line] == [1000 - logs.TRACEBACKS]


def test_what_was_counted_is_told_at_the_end(capsys):
    configure_logging(json_lines=True)
    log = logging.getLogger("test.repeats")
    for _ in range(logs.LINES + 7):
        log.warning("again")
    logging.getLogger().handlers[0].close()
    assert json.loads(capsys.readouterr().err.splitlines()[-1])["not_written"] == 7
