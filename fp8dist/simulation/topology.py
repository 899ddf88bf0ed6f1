"""Where ranks are: how many to a node."""

from __future__ import annotations

from dataclasses import dataclass

from fp8dist.errors import ConfigurationError

__all__ = ["Topology"]


@dataclass(frozen=True)
class Topology:
    """``ranks`` in nodes of ``per_node`` each; the one node of a smaller job is not full.

    ``shared_cores``: all ranks share so many CPU cores, as hosts do that one machine plays. None: each has its own.

    Raises:
        ConfigurationError: nodes would not be equally full.
    """

    ranks: int
    per_node: int = 8
    shared_cores: int | None = None

    def __post_init__(self) -> None:
        if min(self.ranks, self.per_node, 1 if self.shared_cores is None else self.shared_cores) < 1:
            raise ConfigurationError("ranks, GPUs per node and shared cores are 1 or more each")
        if self.ranks > self.per_node and self.ranks % self.per_node:
            raise ConfigurationError(
                f"{self.ranks} ranks do not fill nodes of {self.per_node} GPUs: give a multiple, or other GPUs per node"
            )

    @property
    def nodes(self) -> int:
        """How many nodes."""
        return max(1, self.ranks // self.per_node)

    @property
    def on_a_node(self) -> int:
        """Ranks on each node."""
        return self.ranks // self.nodes

    @property
    def contention(self) -> float:
        """How many ranks there are to a core, at least 1."""
        return 1.0 if self.shared_cores is None else max(1.0, self.ranks / self.shared_cores)
