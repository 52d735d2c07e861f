"""A loop of one's own over a session run: gradients, optimizer steps, samples and checkpoints as calls.

Calls are sent in the order in which they are made, without waiting for each other; each returns a future at once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar
from urllib.parse import quote

from headrace.client.errors import HeadraceError
from headrace_schema.sessions import (
    CheckpointView,
    Datum,
    Failure,
    Forward,
    ForwardBackward,
    ForwardResult,
    Load,
    LoadResult,
    Loss,
    OptimStep,
    OptimStepResult,
    Pending,
    Publish,
    PublishResult,
    Result,
    Sample,
    SampleResult,
    Save,
    SaveResult,
    SessionView,
)
from pydantic import TypeAdapter

if TYPE_CHECKING:
    from headrace.client.client import Client

Found = TypeVar("Found")
_RESULT: TypeAdapter[Result] = TypeAdapter(Result)
WAIT_S = 20.0
"""Longest wait of one request for a result."""
TOGETHER_S, MOST_TOGETHER = 0.002, 100
"""Requests for samples that are made within this time are sent as one, of so many at most."""
Sequences = Sequence[Datum | Mapping[str, Any]]
Custom = Callable[[list[list[float]]], tuple[float, Sequence[Sequence[float]]]]


class Call(Generic[Found]):
    """What was asked for: `result()` waits for it, and so does `await`."""

    def __init__(self, training: Training, sent: Future[str], again: Callable[[], str] | None = None) -> None:
        self._training, self._sent, self._again = training, sent, again
        self._found: Found | None = None

    def result(self, timeout: float | None = None) -> Found:
        """What became of it. Raises HeadraceError where it failed, and TimeoutError after `timeout` seconds."""
        if self._found is None:
            self._found = self._training._wait(self._sent, self._again, timeout)
        return self._found

    def __await__(self) -> Generator[Any, None, Found]:
        return asyncio.to_thread(self.result).__await__()


class Training:
    """One session: a run that makes a step when it is asked to. Use it in a `with`, or `close` it.

    A worked example, with a fleet that `headrace up` started:

        from headrace.client import Client, Datum, Training

        with Client("http://127.0.0.1:8470") as client, Training(client, {"model": {"path": "MODEL"}}) as training:
            gradient = training.forward_backward([Datum(tokens=[1, 2, 3], targets=[2, 3, 4])])
            step = training.optim_step(learning_rate=1e-4)  # sent at once: both cost one round
            print(gradient.result().metrics["loss:sum"], step.result().version)
            training.publish()
            print(training.sample([1, 2], samples=4, max_tokens=16).result().sequences)

    In a coroutine, `await` what a call returns. Losses are sums over tokens (`headrace_schema.sessions`).
    """

    def __init__(
        self, client: Client, spec: Mapping[str, Any] | None = None, *, session: str = "", key: str = ""
    ) -> None:
        """Opens a session by a run spec (`model` is all that it needs), or goes on with one, by its id.

        A loop that goes on must be the only one: calls of two would have the same numbers. `key` is an idempotency key:
        the same one with the same spec opens the same session.
        """
        if (spec is None) == (not session):
            raise ValueError("give a spec, or the id of a session to go on with")
        self._http = client._transport
        if spec is not None:
            body = {"workflow": "session", **spec}
            made = self._http.post("/v1/sessions", body, idempotency_key=key or None, answer_s=120.0)
            session = str(made["id"])
        self.session = session
        """The run's id."""
        self._path = f"/v1/sessions/{quote(session, safe='')}"
        self._seq = self.info().next_seq
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="calls")
        self._numbering = threading.Lock()
        self._unasked: list[tuple[dict[str, Any], Future[str]]] = []
        """Requests for samples that are not sent yet."""
        self._open: dict[str, None] = {}
        """Futures of samples that nobody waits for yet, oldest first."""
        self._answers: dict[str, Any] = {}
        """What was answered of these before anybody asked."""
        self._unsent: HeadraceError | None = None
        """Why a call was not accepted: no later one is sent. Go on by `Training(client, session=…)`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the session; after an error it stays, to be gone on with."""
        self._sender.shutdown()
        if kind is None:
            self._end()

    def close(self) -> SessionView:
        """Ends the session once all calls are executed: its last weights are saved and exported."""
        self._sender.shutdown()
        return self._end()

    def _end(self) -> SessionView:
        return SessionView.model_validate(self._http.post(f"{self._path}:close"))

    def info(self) -> SessionView:
        """The session as it stands."""
        return SessionView.model_validate(self._http.get(self._path))

    def forward(
        self, data: Sequences, loss: Loss = "cross_entropy", options: Mapping[str, float] | None = None
    ) -> Call[ForwardResult]:
        """Log-probs and loss under the weights of the moment."""
        return self._call(Forward(data=_data(data), loss=loss, options=dict(options or {})))

    def forward_backward(
        self, data: Sequences, loss: Loss = "cross_entropy", options: Mapping[str, float] | None = None
    ) -> Call[ForwardResult]:
        """As `forward`, and adds the loss's gradient to what the next `optim_step` applies."""
        return self._call(ForwardBackward(data=_data(data), loss=loss, options=dict(options or {})))

    def forward_backward_custom(self, data: Sequences, function: Custom) -> ForwardResult:
        """The gradient of a loss of one's own: `function` gets the log-probs of each datum's targets and returns the
        loss, and its derivative by each of them. Waits for the log-probs.
        """
        given = _data(data)
        loss, gradients = function(self.forward(given).result().log_probs)
        weighed = [
            each.model_copy(update={"weights": [-value for value in own], "advantages": [], "log_probs": []})
            for each, own in zip(given, gradients, strict=True)
        ]
        found = self.forward_backward(weighed).result()
        return found.model_copy(update={"metrics": {**found.metrics, "loss:sum": loss}})

    def optim_step(
        self,
        learning_rate: float,
        *,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        grad_clip_norm: float = 0.0,
    ) -> Call[OptimStepResult]:
        """One step of AdamW with the accumulated gradient; makes a policy version. `grad_clip_norm` 0: no limit."""
        return self._call(
            OptimStep(
                learning_rate=learning_rate,
                beta1=beta1,
                beta2=beta2,
                eps=eps,
                weight_decay=weight_decay,
                grad_clip_norm=grad_clip_norm,
            )
        )

    def save(self, name: str) -> Call[SaveResult]:
        """Keeps weights and optimizer state under a name, until `delete`."""
        return self._call(Save(name=name))

    def load(self, checkpoint: str, *, optimizer: bool = True) -> Call[LoadResult]:
        """Goes on from a checkpoint, NAME or SESSION/NAME; gradients that wait for a step are dropped."""
        return self._call(Load(checkpoint=checkpoint, optimizer=optimizer))

    def publish(self) -> Call[PublishResult]:
        """The weights of the moment are those that `sample` takes from then on."""
        return self._call(Publish())

    def sample(
        self,
        prompt: Sequence[int],
        *,
        samples: int = 1,
        max_tokens: int = 128,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] | None = None,
        weights: str = "latest",
        prompt_log_probs: bool = False,
        top_prompt_log_probs: int = 0,
    ) -> Call[SampleResult]:
        """Samples of one prompt, by `weights`: latest, base, a published version's number, or a checkpoint."""
        request = Sample(
            prompt=list(prompt),
            weights=weights,
            samples=samples,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=list(stop),
            stop_ids=None if stop_ids is None else list(stop_ids),
            prompt_log_probs=prompt_log_probs,
            top_prompt_log_probs=top_prompt_log_probs,
        )
        body, sent = request.model_dump(mode="json"), Future[str]()
        with self._numbering:
            self._unasked.append((body, sent))
            first = len(self._unasked) == 1
        if first:
            self._sender.submit(self._ask)
        return Call(self, sent, lambda: self._posted([body])[0])

    def checkpoints(self) -> list[CheckpointView]:
        """What was saved by name."""
        found = self._http.get(f"{self._path}/checkpoints")["checkpoints"]
        return [CheckpointView.model_validate(each) for each in found]

    def delete(self, name: str) -> None:
        """Deletes a checkpoint, for ever."""
        self._http.delete(f"{self._path}/checkpoints/{quote(name, safe='')}")

    # --- parts

    def _call(self, operation: Any) -> Call[Any]:
        with self._numbering:
            body = {"seq": self._seq, "call": operation.model_dump(mode="json")}
            self._seq += 1

            def send() -> str:
                if self._unsent is not None:
                    raise self._unsent
                try:
                    return str(self._http.post(f"{self._path}/calls", body)["future"])
                except HeadraceError as error:
                    self._unsent = error  # Later calls would wait for this one for ever.
                    raise

            return Call(self, self._sender.submit(send))

    def _ask(self) -> None:
        """Sends the requests for samples that wait, together: what differs in its prompt alone is made together."""
        time.sleep(TOGETHER_S)
        with self._numbering:
            asked, self._unasked = self._unasked, []
        while asked:
            some, asked = asked[:MOST_TOGETHER], asked[MOST_TOGETHER:]
            try:
                futures = self._posted([body for body, _ in some])
            except HeadraceError:
                for body, sent in some:  # which of them is refused each tells by itself
                    try:
                        sent.set_result(self._posted([body])[0])
                    except HeadraceError as error:
                        sent.set_exception(error)
                continue
            self._open |= dict.fromkeys(futures)
            for (_, sent), future in zip(some, futures, strict=True):
                sent.set_result(future)

    def _posted(self, samples: list[dict[str, Any]]) -> list[str]:
        made = self._http.post(f"{self._path}/samples", {"samples": samples})
        return [str(each) for each in made["futures"]]

    def _answer(self, future: str, wait_s: float, *, samples: bool) -> Any:
        """What became of a call, or that it waits; with `samples`, others for which nobody waits are asked for, too."""
        if future in self._answers:
            return self._answers.pop(future)
        self._open.pop(future, None)
        names = [future, *(islice(list(self._open), MOST_TOGETHER - 1) if samples else ())]
        found = self._http.get(f"{self._path}/results", future=names, wait_s=wait_s)["results"]
        for name in names[1:]:
            if name in found and name in self._open:
                self._answers[name] = found[name]
                del self._open[name]
        return found[future]

    def _wait(self, sent: Future[str], again: Callable[[], str] | None, timeout: float | None) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        future = sent.result(timeout)
        while True:
            left = WAIT_S if deadline is None else min(WAIT_S, max(0.0, deadline - time.monotonic()))
            try:
                answer = self._answer(future, left, samples=again is not None)
            except HeadraceError as error:
                if error.reason != "NOT_FOUND" or again is None:
                    raise
                future = again()  # The coordinator has restarted, and knows samples no more.
                continue
            found = _RESULT.validate_python(answer)
            if isinstance(found, Failure):
                reason: Literal["INVALID", "FAILED"] = "INVALID" if found.category == "user" else "FAILED"
                raise HeadraceError(reason, f"{found.key}: {found.message}" if found.key else found.message)
            if not isinstance(found, Pending):
                return found
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{self.session}: no result within {timeout:g} s; it waits for {found.waits_for}"
                )


def _data(data: Sequences) -> list[Datum]:
    return [each if isinstance(each, Datum) else Datum.model_validate(each) for each in data]
