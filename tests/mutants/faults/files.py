"""Faults of the file tier."""

from __future__ import annotations

from tests.mutants.fault import Fault, first

FILES, RECORD, NAMES = (f"data_plane/files/{n}.py" for n in ("block_files", "record", "names"))
TIER, SHARDS = "data_plane/server/file_tier.py", "control_plane/pools/shards.py"
REUSED = "data_plane/plans/contents/reused_blocks.py"

OF_FILES, OF_TIER = "tests/unit/files/test_block_files.py", "tests/rpc/test_file_tier.py"
WHILE = "test_what_is_forgotten_while_it_is_written_has_no_file_and_all_else_has"
OF_REUSED = "tests/unit/plans/test_reused_blocks.py"
FORGETS = "tests/unit/registration/test_file_forgets.py"
POWER = f"{OF_FILES}::test_what_is_written_while_the_power_fails_is_whole_or_not_there"
WRONG = f"{OF_FILES}::test_a_file_that_is_wrong_is_a_miss_and_goes_with_all_below_it"
AGAIN = f"{OF_TIER}::test_a_file_that_is_wrong_is_computed_again"
COUNTS = 'self._num_forgotten[b"" if everything else tenant] += 1'

FAULTS = (
    Fault(  # A name may stand for what is not on the disk yet.
        "files_are_not_synced", FILES, "self._disk.sync(fd)", "pass", f"{POWER}[renamed]"
    ),
    Fault(  # Half a file has the name of a whole one.
        "files_are_written_under_their_names",
        FILES,
        "            self._write_whole(new, encode_header(key, data), data)\n",
        "            self._write_whole(path, encode_header(key, data), data)\n"
        "            path.rename(new)\n",
        f"{POWER}[sync]",
    ),
    Fault(
        "temporary_files_stay",
        FILES,
        *first(
            "    def _remove(self, path: Path) -> None:", 'if path.suffix == ".tmp":', "    return"
        ),
        f"{POWER}[sync]",
    ),
    Fault(
        "data_is_not_checked",
        RECORD,
        "if xxhash.xxh3_128_digest(data) != checksum:",
        "if False:",
        WRONG,
        "DAMAGED",
    ),
    Fault(  # A file is right if its checksums are.
        "any_whole_file_will_do",
        RECORD,
        "    if (has.part, has.tenant,",
        "    wanted = has\n    if (has.part, has.tenant,",
        WRONG,
        "MISMATCH",
    ),
    Fault(
        "parents_are_evicted_first",
        FILES,
        "if not self._nodes[name].children and name != keep:",
        "if True:",
        f"{OF_FILES}::test_the_least_recently_used_makes_room_children_before_parents",
    ),
    Fault(
        "writes_outlive_a_forget",
        FILES,
        COUNTS,
        "pass",
        f"{OF_FILES}::{WHILE}[the tenant]",
    ),
    Fault(
        "only_writes_notice_a_forget",
        FILES,
        "if num_forgotten is None:",
        "if True:",
        f"{OF_TIER}::test_what_is_forgotten_once_it_is_read_has_no_file",
    ),
    Fault(
        "any_forget_stops_all_writes",
        FILES,
        COUNTS,
        'self._num_forgotten[b""] += 1',
        f"{OF_FILES}::{WHILE}[another tenant's namespace]",
    ),
    Fault(
        "a_forget_drops_what_others_reuse",
        REUSED,
        "if tenant not in (None, each.tenant):",
        "if False:",
        f"{OF_REUSED}::test_what_a_tenant_forgets_drops_what_it_reused_alone",
    ),
    Fault(
        "an_error_of_torch_ends_the_writer",
        TIER,
        "    def _write(self, prefix: ReusedPrefix) -> None:\n",
        "    def _write(self, prefix: ReusedPrefix) -> None:\n"
        "        try:\n            self._write_all(prefix)\n"
        "        except RuntimeError:\n            self._is_stopping = True\n\n"
        "    def _write_all(self, prefix: ReusedPrefix) -> None:\n",
        f"{OF_TIER}::test_memory_that_is_short_stops_nothing",
    ),
    Fault(  # Equal tokens after different ones have one name.
        "names_are_of_their_block_alone",
        NAMES,
        '_digest(b"block", name, ',
        '_digest(b"block", root, ',
        f"{OF_FILES}::test_names_differ_where_contents_may",
    ),
    Fault(
        "namespaces_share_files",
        NAMES,
        '_digest(b"root", owner, namespace.encode())',
        '_digest(b"root", owner, b"")',
        f"{OF_TIER}::test_a_namespace_finds_its_own_files_alone",
    ),
    Fault(  # Everything is written once it is published.
        "computed_blocks_count_as_found",
        REUSED,
        "return len(mask) if mask.all() else int(mask.argmin())",
        "return len(mask)",
        f"{OF_REUSED}::test_what_is_computed_or_moved_is_not_told",
    ),
    Fault(  # What came from the host tier is never written.
        "unpublished_blocks_are_not_waited_for",
        REUSED,
        "_MOST_LOOKS = 256",
        "_MOST_LOOKS = 1",
        f"{OF_REUSED}::test_what_comes_from_the_host_tier_is_told_when_it_is_published_again",
    ),
    Fault(  # A load goes on past a file that is wrong.
        "missing_blocks_are_read_as_zeros",
        TIER,
        "            self.counts.missed(miss.reason)\n",
        "            self.counts.missed(miss.reason)\n"
        "            found += [bytes(self._block_bytes)] * (len(keys) - len(found))\n",
        AGAIN,
    ),
    Fault("misses_are_not_counted", TIER, "self.num_misses[reason] += 1", "pass", AGAIN),
    Fault(
        "an_error_ends_the_writer",
        TIER,
        '_LOGGER.warning("a block was not written to a file: %s", error)',
        "self._is_stopping = True",
        f"{OF_TIER}::test_a_full_disk_stops_nothing",
    ),
    Fault(  # What a shard did not hear is not forgotten there.
        "shards_are_told_once",
        SHARDS,
        "            if shard_index in waiting\n",
        "            if False\n",
        f"{FORGETS}::test_what_is_told_again_is_repeated_until_each_shard_has_done_it",
    ),
    Fault(  # One prefix may take any room for as long as a shard is away.
        "long_forgets_are_kept_whole",
        SHARDS,
        "if _size(message) <= MAX_WAITING:",
        "if True:",
        f"{FORGETS}::test_a_prefix_too_long_to_be_kept_is_told_as_it_is_to_shards_that_are_there",
    ),
    Fault(
        "long_forgets_count_as_short_ones",
        SHARDS,
        "return 1 + len(message.token_ids) // 1024",
        "return 1",
        f"{FORGETS}::test_long_prefixes_count_by_their_length",
    ),
    Fault(
        "a_tenant_forgets_the_files_of_all",
        SHARDS,
        "        return [_response(message)]\n",
        "        if message.all_namespaces:\n"
        "            self._early = {tenant: [rpb.ForgetFiles(all_tenants=True)]}\n"
        "        return [_response(message)]\n",
        f"{FORGETS}::test_one_step_of_many_forgets_leaves_other_tenants_alone",
    ),
    Fault(
        "prefixes_that_wait_are_not_bounded",
        REUSED,
        "if len(self._noted) >= MAX_NOTED:",
        "if False:",
        f"{OF_REUSED}::test_what_waits_is_bounded",
    ),
)
