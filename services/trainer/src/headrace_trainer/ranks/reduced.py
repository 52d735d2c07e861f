"""What a run does with less memory after a device had none left: half the micro-batch once, then recomputation.

Lives as long as the run is open in this process: a trainer group that is formed anew goes on with what was tried.
"""

from __future__ import annotations

from headrace_schema.openings import TrainerConfig

from headrace_trainer.errors import OutOfMemory

KEY = "trainer.micro_batch_tokens"


class Reduced:
    """How large micro-batches are now, and whether layers are computed again in the backward pass."""

    def __init__(self, config: TrainerConfig) -> None:
        self._wanted = self.micro_batch_tokens = config.trainer.micro_batch_tokens
        self.recomputes = False

    @property
    def told(self) -> tuple[int, bool] | None:
        """What the ranks of the next group are told; None while nothing was reduced."""
        less = self.recomputes or self.micro_batch_tokens < self._wanted
        return (self.micro_batch_tokens, self.recomputes) if less else None

    def reduce(self, short: OutOfMemory, *, divisible: bool, may_recompute: bool) -> None:
        """Takes the next measure, if there is one, and says so in the error.

        `divisible`: the micro-batch had more than one sequence, so that a smaller budget makes it smaller.
        """
        before = self.micro_batch_tokens
        if divisible and before == self._wanted and before > 1:
            self.micro_batch_tokens = before // 2
            short.retries = True
            what = f"tries once more with micro-batches of {before // 2} tokens, half as many"
            keep = f"{KEY}: {before // 2}"
        elif may_recompute and not self.recomputes:
            self.recomputes = short.retries = True
            what = "tries once more with activations computed again in the backward pass"
            keep = "trainer.gradient_checkpointing: true"
        else:
            return
        short.message += f"; {what} (write {keep} to begin with it)"

    def fixes(self) -> str:
        """What only the user can lower."""
        tried = [f"{KEY}: {self.micro_batch_tokens}"] if self.micro_batch_tokens < self._wanted else []
        tried += ["recomputation"] if self.recomputes else []
        return (
            f"it is not tried again{' after ' + ' and '.join(tried) if tried else ''}: lower {KEY} (now "
            f"{self.micro_batch_tokens}) or sampling.max_new_tokens, or set trainer.gradient_checkpointing: true, "
            "trainer.backend_options.offload: optimizer, or more trainer.ranks, which share the model's state"
        )
