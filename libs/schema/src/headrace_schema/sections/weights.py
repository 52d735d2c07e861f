"""The section of how new weights reach the rollouts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from headrace_schema.sections.base import FEW, Count, Section

TransportName = Literal["cuda_ipc", "shm", "collective", "delta", "grpc"]


class WeightsSection(Section):
    """How a version of the weights reaches the rollouts. Whatever the way, each tensor's digest is checked."""

    transports: list[TransportName] = Field(
        max_length=FEW,
        default=["shm", "delta", "grpc"],
        description="ways that are used, best first. shm: on the trainer's host, its memory is mapped. cuda_ipc: as "
        "shm, and a copy on the trainer's GPU is mapped beside it for the swap. collective: a broadcast to all hosts "
        "at once by a process group, NCCL or Gloo; of changes, where delta stands behind it. delta: what has changed "
        "against the version that the rollout holds. grpc: the whole. One that fails, or cannot be had, leads to the "
        "next for the same version, and the run's events say so; ways within a host come before the others in any "
        "order",
    )
    delta: Literal["auto", "always"] = Field(
        default="auto",
        description="when delta is used. auto: where it was quicker than the whole when both came last; always: for "
        "each version whose predecessor the rollout holds",
    )
    whole_every: Count = Field(
        default=16,
        description="versions of which one comes whole; with delta: auto also those of which one comes by its changes "
        "where the whole is quicker, so that both stay measured",
    )
    publish: Literal["leader", "ranks"] = Field(
        default="leader",
        description="who casts, hashes and sends a version of a trainer with several ranks. leader: rank 0 gathers the "
        "whole. ranks: each gathers an equal part of the tensors and sends it, by collective, delta or grpc: no host's "
        "link and memory has all of it. For ranks of several hosts, as shm and cuda_ipc map nothing then",
    )
    lora: Literal["auto", "adapter", "merged"] = Field(
        default="auto",
        description="what is published of a run with trainer.lora. adapter: A and B alone; the frozen weights reach "
        "each host once, and rollouts merge. merged: whole weights. auto: adapter where nothing else learns (not of "
        "experts, robot policies and policies with another model)",
    )

    @field_validator("transports")
    @classmethod
    def _complete(cls, transports: list[TransportName]) -> list[TransportName]:
        if len(set(transports)) != len(transports):
            raise ValueError("name each way once")
        if "grpc" not in transports:
            raise ValueError("add grpc; the others cannot bring a first version to every host")
        return transports
