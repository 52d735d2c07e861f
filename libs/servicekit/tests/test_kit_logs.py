"""Logs: one line a record, with the ids of the context."""

import asyncio
import json
import logging

from headrace_servicekit.logs import HumanFormatter, JsonFormatter, get_logger, log_context


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
