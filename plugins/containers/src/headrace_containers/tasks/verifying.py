"""The life of a task in containers: made for an agent, left by it, judged where the agent has never been."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from headrace_containers.provider import BadPath, Container, ContainerLost, EngineLost, File, Spec
from headrace_containers.tasks.carrying import Left, NotCarried, put, take
from headrace_containers.tasks.task import Judged, Start, Task

_MOST_NAMES = 20


def settled(start: Start, task: Task) -> Task:
    """The task with its working directory, which is the agent's: asks the image where the task does not say."""
    if task.spec.workdir:
        return task
    workdir = _asked(start, replace(task.spec, owned=()))
    judge = replace(task.judge, workdir=task.judge.workdir or workdir) if task.judge else None
    return replace(task, spec=replace(task.spec, workdir=workdir, owned=(workdir,)), judge=judge)


def _asked(start: Start, spec: Spec) -> str:
    key = (spec.image, str(spec.build or ""))
    if key not in _workdirs:
        with started(start, spec) as container:
            _workdirs[key] = container.exec(("pwd",)).stdout.decode().strip() or "/"
    return _workdirs[key]


_workdirs: dict[tuple[str, str], str] = {}
"""Working directories of images that this process has asked."""


@contextmanager
def started(start: Start, spec: Spec) -> Iterator[Container]:
    """A container that ends with the block."""
    container = start(spec)
    try:
        yield container
    finally:
        container.close()


def begin(start: Start, task: Task, spec: Spec | None = None) -> Container:
    """A container of a settled task, ready for its agent. Raises ContainerError."""
    container = start(spec or task.spec)
    try:
        if task.archive:
            ran = container.exec(("tar", "-C", task.spec.workdir, "-xof", "-"), stdin=task.archive, cwd="/")
            if ran.exit_code:
                raise ContainerLost(f"{task.name}: its files cannot be unpacked: {_last(ran.stderr)}")
        _wait_until_healthy(container, task)
    except BaseException:
        container.close()
        raise
    return container


def _wait_until_healthy(container: Container, task: Task) -> None:
    if (health := task.health) is None:
        return
    until = time.monotonic() + health.within_s
    while container.exec(("sh", "-c", health.command), timeout_s=health.timeout_s).exit_code:
        if time.monotonic() > until:
            raise ContainerLost(
                f"{task.name}: its health check does not succeed within {health.within_s:g} s"
            )
        time.sleep(health.every_s)


def judge(start: Start, task: Task, container: Container) -> Judged:
    """What the tests say of what an agent left in its container, which ends here.

    They run in a container of their own, in which nothing is the agent's but the files of the working directory and
    what the task carries beside it; a task that is `shared` is judged where the agent was. Raises ContainerError where
    the fault is not the agent's.
    """
    try:
        if task.shared:
            return task.tests.judge(container, task.spec.workdir)
        folders, files = _left(container, task)
    except EngineLost:
        raise
    except ContainerLost as error:
        return Judged(said=f"the container was lost: {error}")
    except NotCarried as error:
        return Judged(said=str(error))
    finally:
        container.close()
    fresh = begin(start, task, task.judged_in)
    try:
        for each in folders:
            put(fresh, each, task.user, task.restored)
        fresh.write(files, user=task.user)
        judged = task.tests.judge(fresh, task.spec.workdir)
    except (NotCarried, BadPath) as error:
        return Judged(said=str(error))
    finally:
        fresh.close()
    names = [name for each in folders for name in each.kept_out][:_MOST_NAMES]
    return (
        replace(judged, said=f"{judged.said}\n(kept as the image has it: {', '.join(names)})")
        if names
        else judged
    )


def _left(container: Container, task: Task) -> tuple[list[Left], list[File]]:
    """What is carried: the working directory, and where they are there, folders and files that the task names."""
    folders, files = [take(container, task.spec.workdir, task.restored)], []
    for path in task.carried:
        if container.exec(("test", "-d", path), cwd="/").exit_code == 0:
            folders.append(take(container, path, task.restored))
        elif container.exec(("test", "-f", path), cwd="/").exit_code == 0:
            files.append(File(path, container.read(path)))
    return folders, files


def _last(output: bytes) -> str:
    return output.decode(errors="replace").strip()[-2000:]
