"""How much of what a tenant has cached in a pool others' allocations leave it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from kvplane_blocks import Pool as NativePool

from kvplane.v1 import types_pb2 as tpb


class Floors:
    """The floors of a pool's tenants; the cores of its layer groups keep them."""

    def __init__(self, owners: dict[str, int], roots: Mapping[str, Collection[bytes]]) -> None:
        """``owners``: the cores' number of each tenant; a tenant with a floor gets one.
        ``roots``: by tenant.
        """
        self._owners = owners
        self._roots = roots
        self._shares: Mapping[str, float] = {}

    def set_shares(self, cores: Sequence[NativePool], shares: Mapping[str, float]) -> None:
        """Of each of these tenants, the share of the device blocks that others leave cached. Where
        that has changed, takes time in proportion to the tenant's prefixes at most.
        """
        if shares is self._shares:
            return
        gone = dict.fromkeys(self._shares.keys() - shares.keys(), 0.0)
        changed = {t: share for t, share in shares.items() if self._shares.get(t) != share}
        self._shares = shares
        self.apply(cores, {**gone, **changed})

    def apply(self, cores: Sequence[NativePool], shares: Mapping[str, float] | None = None) -> None:
        """Tell the cores; by default all that was set, as they may be new."""
        for tenant, share in (self._shares if shares is None else shares).items():
            owner = self._owners.setdefault(tenant, len(self._owners))
            for core in cores:
                for root in self._roots.get(tenant, ()):
                    core.own_root(root, owner)
                core.set_floor(owner, int(share * core.usage(tpb.TIER_DEVICE)[0]))

    def blocks(self, cores: Sequence[NativePool]) -> dict[str, tuple[int, int]]:
        """Of each tenant with a floor, the blocks that hold its prefixes, of both tiers and in use
        or not, and those that others' allocations cannot evict.
        """
        return {
            tenant: (
                sum(core.num_published(r) for core in cores for r in self._roots.get(tenant, ())),
                sum(core.num_reserved(self._owners[tenant]) for core in cores),
            )
            for tenant in self._shares
            if tenant in self._owners
        }
