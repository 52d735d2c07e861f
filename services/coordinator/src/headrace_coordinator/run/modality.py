"""What differs between runs of texts, of episodes and of conversations: prompts, streams, and the peers of a rollout.

The one place of `run` that asks which kind a run is. Runs of texts have no simulators; the others do.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.common.v1 import common_pb2 as common
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace_schema.evaluating import AnswerSection
from headrace_schema.images import Kind
from headrace_schema.sections.agent import ONLINE
from headrace_schema.sections.generating import SamplingSection
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_servicekit.rpc.requests import MAX_NUMBER
from headrace_servicekit.rpc.trajectories import chat_message
from typing_extensions import override

from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.data.items import DataItem
from headrace_coordinator.run.devices.leasing import WorkerLeases
from headrace_coordinator.run.simulators.pools import Pools
from headrace_coordinator.run.workers.group import WorkerGroup
from headrace_coordinator.run.workers.rollout_client import Opening, Produced, RolloutClient


@dataclass(frozen=True)
class Sampling:
    """How the trajectories of a stream are sampled."""

    policy_number: int
    seed: int
    distribution: common.SamplingDistribution
    max_new_tokens: int
    stop: Sequence[str]
    chunk_tokens: int = 0
    greedy: bool = False
    """Whether an episode is greedy; a greedy text has temperature 0."""
    evaluation: bool = False
    until_success: bool = False
    """Whether an episode ends with its first success."""


def distribution_of(
    section: SamplingSection | AnswerSection, temperature: float
) -> common.SamplingDistribution:
    """A spec's sampling distribution at `temperature` (0: greedy)."""
    return common.SamplingDistribution(
        temperature=temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        min_p=section.min_p,
        repetition_penalty=section.repetition_penalty,
        log_prob_kind=common.LOG_PROB_KIND_PROCESSED,
    )


@dataclass(frozen=True)
class Asked:
    """How an item is asked, where that differs from training."""

    prefill: str | None = None
    """In place of data.prompt.prefill."""
    record: bool = False
    """Whether a video of the episode is wanted."""
    dataset: Dataset | None = None
    """Renders the prompt of other data than the run's."""


AS_TRAINED = Asked()


class Modality(ABC):
    """A run of texts, of episodes, or of conversations; what is done here is done for a run without simulators."""

    resumable: bool
    """Whether an unfinished trajectory goes on elsewhere from its prefix."""

    warmup_examples: list[dict[str, object]]
    """Prompts and right answers that the trainer imitates before the first step."""

    images: tuple[Kind, ...] = ()
    """What images, videos or sounds prompts have."""

    sees = True
    """Whether what is trained on may have any."""

    @abstractmethod
    def prompt(self, item: DataItem, asked: Asked = AS_TRAINED) -> rollout.Prompt:
        """The prompt of an item, or where its episode begins."""

    def instruction(self, item: DataItem) -> str:
        """What an episode's task asks for, in words; "" where nothing says it."""
        return ""

    @abstractmethod
    def opening(self, worker: RolloutClient, sampling: Sampling) -> Opening:
        """The first message of a rollout's stream; its header is left to the client."""

    async def open_environments(self) -> None:
        """Before rollouts open the run: those that are granted have environments. Raises `Unstaffed`."""
        return

    @property
    def versions(self) -> dict[str, str]:
        """Of what environments are made of, by name."""
        return {}

    def rollouts_opened(self) -> None:
        """Rollouts have opened the run, and said how many trajectories they can make at once."""
        return

    async def prepare(self, worker: RolloutClient) -> None:
        """Before a stream: the rollout's simulators are there, on their devices. Raises `Unstaffed`."""
        return

    def ended(self, worker: RolloutClient, *, well: bool) -> None:
        """After a stream; `well`: it made what it was asked for."""
        return

    def takes_losses(self, worker: RolloutClient, response: Produced) -> bool:
        """Whether a rollout says that a simulator answers it no more; `recover` is to be called then."""
        return False

    async def recover(self, worker: RolloutClient) -> bool:
        """After a stream: whether it lost a simulator; waits a little for its exit to be noticed."""
        return False


class Texts(Modality):
    """Answers to prompts."""

    resumable = True

    def __init__(self, workers: WorkerGroup, dataset: Dataset) -> None:
        self._dataset = dataset
        self.warmup_examples = dataset.warmup.examples if workers.spec.trainer.warmup.steps else []
        self.images, self.sees = dataset.images, bool(dataset.images)

    @override
    def prompt(self, item: DataItem, asked: Asked = AS_TRAINED) -> rollout.Prompt:
        content = (asked.dataset or self._dataset).prompt(item, prefill=asked.prefill)
        if content.chat is None:
            return rollout.Prompt(text=content.text or "")
        messages = [chat_message(turn) for turn in content.chat]
        arguments = json.dumps(content.arguments) if content.arguments else ""
        return rollout.Prompt(
            chat=rollout.ChatPrompt(
                messages=messages, prefill=content.prefill, template_arguments_json=arguments
            ),
            images=[common.Image(digest=digest_bytes(image), data=image) for image in content.images],
        )

    @override
    def opening(self, worker: RolloutClient, sampling: Sampling) -> Opening:
        return _generate(sampling)


class Online(Texts):
    """Sessions of clients from outside, which rollouts wait for."""

    resumable = False

    def __init__(self, workers: WorkerGroup, dataset: Dataset) -> None:
        super().__init__(workers, dataset)
        self._workers, self.sees = workers, True

    @override
    def prompt(self, item: DataItem, asked: Asked = AS_TRAINED) -> rollout.Prompt:
        return rollout.Prompt(episode=rollout.EpisodeStart(task=ONLINE, seed=_seed(item)))

    @override
    def rollouts_opened(self) -> None:
        workers = self._workers
        found = {each.incarnation: each.endpoint_url for each in workers.rollouts if each.endpoint_url}
        workers.fleet.online[workers.run].urls = found


class Episodes(Modality):
    """Episodes of a robot policy, in environments that simulators step."""

    resumable = False

    def __init__(self, pools: Pools, dataset: Dataset, tasks: Sequence[str]) -> None:
        self.warmup_examples = []
        self._pools, self._tasks = pools, tasks
        self._dataset = dataset

    @override
    def prompt(self, item: DataItem, asked: Asked = AS_TRAINED) -> rollout.Prompt:
        start = rollout.EpisodeStart(**item.metadata, record=asked.record)
        if said := self.instruction(item):
            start.instruction = self._dataset.prompt(replace(item, question=said)).text or ""
        return rollout.Prompt(episode=start)

    @override
    def instruction(self, item: DataItem) -> str:
        return self._pools.instruction(item.metadata["task"])

    @override
    def opening(self, worker: RolloutClient, sampling: Sampling) -> Opening:
        return rollout.RunEpisodesOpen(
            policy_number=sampling.policy_number,
            seed=sampling.seed,
            greedy=sampling.greedy,
            evaluation=sampling.evaluation,
            until_success=sampling.until_success,
            pools=self._pools.of(worker.incarnation),
        )

    @override
    async def open_environments(self) -> None:
        await self._pools.staff()

    @property
    @override
    def versions(self) -> dict[str, str]:
        return self._pools.versions

    @override
    def rollouts_opened(self) -> None:
        self._pools.count_environments()

    @override
    async def prepare(self, worker: RolloutClient) -> None:
        await self._pools.prepare(worker)

    @override
    def ended(self, worker: RolloutClient, *, well: bool) -> None:
        self._pools.acted(worker, well=well and not worker.lost_pools)

    @override
    def takes_losses(self, worker: RolloutClient, response: Produced) -> bool:
        worker.lost_pools += response.lost_pools
        return bool(response.lost_pools)

    @override
    async def recover(self, worker: RolloutClient) -> bool:
        lost, worker.lost_pools = worker.lost_pools, []
        if lost:
            await self._pools.lost(worker.incarnation, lost)
        return bool(lost)


class Conversations(Episodes):
    """Conversations of a language model with environments that simulators hold."""

    @override
    def prompt(self, item: DataItem, asked: Asked = AS_TRAINED) -> rollout.Prompt:
        start = rollout.EpisodeStart(
            task=str(item.metadata.get("task") or self._tasks[0]),
            seed=_seed(item),
            options_json=json.dumps(
                {
                    **item.fields,
                    "question": item.question,
                    "answer": item.answer,
                    "messages": [dict(turn) for turn in item.messages],
                    "metadata": dict(item.metadata),
                }
            ),
        )
        return rollout.Prompt(episode=start)

    @override
    def opening(self, worker: RolloutClient, sampling: Sampling) -> Opening:
        return _generate(sampling, pools=self._pools.of(worker.incarnation))


def _generate(sampling: Sampling, **more: Any) -> rollout.GenerateOpen:
    return rollout.GenerateOpen(
        policy_number=sampling.policy_number,
        distribution=sampling.distribution,
        max_new_tokens=sampling.max_new_tokens,
        stop=sampling.stop,
        seed=sampling.seed,
        chunk_tokens=sampling.chunk_tokens,
        evaluation=sampling.evaluation,
        **more,
    )


def _seed(item: DataItem) -> int:
    """The seed of an item's conversations, the same in every run: its own, or one that is made of its key."""
    given = item.metadata.get("seed")
    if isinstance(given, int) and 0 <= given < MAX_NUMBER:
        return given
    return int(digest_bytes(item.key.encode())[:16], 16) % MAX_NUMBER


def modality_of(workers: WorkerGroup, leases: WorkerLeases, dataset: Dataset) -> Modality:
    """That of a run."""
    spec = workers.spec
    if spec.is_online:
        return Online(workers, dataset)
    if spec.environment is None:
        return Texts(workers, dataset)
    made = Conversations if spec.speaks_with_environments else Episodes
    return made(Pools(workers, leases), dataset, spec.environment.tasks)
