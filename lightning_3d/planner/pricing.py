"""WHAT does one way of running cost?  Memory, time, and the numbers people compare (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_3d.planner.memory import Memory, memory
from lightning_3d.planner.step_time import Run, StepTime, block_times, step_time


@dataclass(frozen=True)
class Priced:
    """A candidate with its price.

    Attributes:
        run: The model, the cluster, the job and the candidate.
        memory: Bytes of every stage.
        time: Seconds of a step by part.
    """

    run: Run
    memory: Memory
    time: StepTime

    @property
    def seconds(self) -> float:
        """Seconds of an optimizer step."""
        return self.time.total

    @property
    def seconds_per_sample(self) -> float:
        """What layouts are compared by: their global batches may differ."""
        return self.seconds / self.run.job.global_batch

    @property
    def samples_per_second(self) -> float:
        """Of all GPUs together."""
        return 1 / self.seconds_per_sample

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all GPUs together."""
        return self.run.job.tokens / self.seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_second / self.run.cluster.gpus

    def flops_per_second(self, convention: str) -> float:
        """Operations per second and GPU.

        Args:
            convention: "model_causal" (`6 P + 6 L h s` per token: what Megatron-Bridge prints), "model_full"
                (`6 P + 12 L h s`: PaLM, NeMo 24, torchtitan) or "hardware" (with what is computed again).
        """
        run = self.run
        count = run.chain.flops_per_token(run.job.seq, causal=convention == "model_causal")
        if convention == "hardware":
            count *= 1 + self._again()
        return count * self.tokens_per_second_per_gpu

    def _again(self) -> float:
        """What is computed again, as a share of the operations of forward and backward."""
        run, kinds = self.run, self.run.chain.kinds
        works, _ = block_times(run)
        ends = (kinds[0], kinds[-1])  # compute nothing again
        again = sum(
            works[kind].operations_again(run.candidate.recompute, run.software.keeps_products)
            for kind in kinds
            if kind not in ends
        )
        return again / (3 * sum(works[kind].operations for kind in kinds))

    def mfu(self, convention: str = "model_full") -> float:
        """The same as a share of the peak in the job's precision."""
        return self.flops_per_second(convention) / self.run.cluster.gpu.peak(self.run.job.precision)

    @property
    def bubble(self) -> float:
        """Idle share of the busiest stage's pipeline time."""
        return self.time.bubble / self.seconds

    def __str__(self) -> str:
        return str(self.run.candidate)


def price(run: Run) -> Priced:
    """The price of a run.

    Raises:
        ConfigurationError: Its layout does not fit the model.
    """
    return Priced(run, memory(run), step_time(run))
