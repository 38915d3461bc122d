"""The names of a run's topics; it decides nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from dora_pipe.schemas.names import check_run_name


@dataclass(frozen=True, slots=True)
class Topics:
    """The topics of one run. Example: ``Topics("demo").control == "demo.control"``."""

    run: str

    def __post_init__(self) -> None:
        check_run_name(self.run)

    @property
    def control(self) -> str:
        """Facts: who joined, what was logged, what was committed, what a user commands."""
        return f"{self.run}.control"

    @property
    def metrics(self) -> str:
        """Periodic status; lossy: old ones are deleted while a run goes on."""
        return f"{self.run}.metrics"

    @property
    def decisions(self) -> str:
        """The orchestrator's rounds."""
        return f"{self.run}.decisions"

    @property
    def trajectories(self) -> str:
        """One trajectory per record."""
        return f"{self.run}.trajectories"

    @property
    def progress(self) -> str:
        """Token chunks of long requests."""
        return f"{self.run}.progress"

    @property
    def dead_letters(self) -> str:
        """Records that could not be read, as they came, with the reason."""
        return f"{self.run}.dead-letters"

    def all(self) -> tuple[str, ...]:
        """Every topic of the run."""
        return (
            self.control,
            self.metrics,
            self.decisions,
            self.trajectories,
            self.progress,
            self.dead_letters,
        )
