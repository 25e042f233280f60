"""For the kernels, until they import it from where it is."""

from kvplane.shard import Shard, only_group

__all__ = ["Shard", "only_group"]
