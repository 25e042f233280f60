"""Faults in how a data plane runs plans and commands. ``data_tables`` has those of its tables."""

from __future__ import annotations

from tests.mutants.fault import Fault, first

EXECUTOR = "data_plane/execution/executor.py"
RUNNER = "data_plane/execution/plan_runner.py"
SHARD_KERNELS = "data_plane/execution/shards/shard_kernels.py"
BOUND = "data_plane/kernels/backends/bound_layers.py"
CUDA_STREAMS = "data_plane/kernels/device/cuda_streams.py"
PROGRESS, SESSIONS = "data_plane/plans/progress.py", "data_plane/plans/sessions.py"
VERIFIER, CHECKS = "data_plane/plans/verifier.py", "data_plane/plans/write_checks.py"
BLOCK_TABLES = "data_plane/plans/tables/block_tables.py"
LAYOUT = "kvplane/layout.py"

OF_EXECUTOR, REJECTIONS, INVARIANTS, STREAMS, FAILURES, LATENTS, OF_LAYERS = (
    f"tests/unit/executor/test_{name}.py"
    for name in (
        *("executor", "executor_rejections", "invariants_data"),
        *("streams", "device_failures", "stored_shapes", "layers"),
    )
)
OF_PROGRESS, TRANSFERS, PUBLICATIONS, OF_VERIFIER, ORDER = (
    f"tests/unit/plans/test_{name}.py"
    for name in (
        *("progress", "transfers", "publications"),
        *("verifier", "plan_order"),
    )
)
LAYOUTS = "tests/unit/client/test_layout.py"
SCALES = "tests/unit/data_kernels/test_kv_scales.py"

STARTS = "        if plan.number not in session.receipts:\n            self._settle("
SIGNS = "    return (\n        options,\n"
END_ALL = "    def end_all(self, key_id: bytes) -> None:"
# A message counts as one of the present generations, whatever it says.
NAMED = """\
        generations = generations.copy()
        generations[ints(columns.INT32, message.indices, field)] = ints(
            columns.INT64, message.generations, field
        )
"""
KEEPS = "        indices, parents, parent_generations, present = self._check("
MAKES_KERNELS = "kernels_of(self.device, num_threads)"
IMPORTS_KERNELS = "from data_plane.kernels.backend import Kernels, check_cache_kinds, kernels_of\n"

FAULTS = (
    Fault(
        "verification_skipped",
        VERIFIER,
        "digest = signing.verify(\n"
        "                self._key, want_type, signed.type, signed.payload, signed.signature,"
        " field=field\n            )",
        "digest = signing.digest(signed.payload)",
        INVARIANTS,
    ),
    Fault(
        "epoch_unchecked",
        VERIFIER,
        *first(
            "    def _check_run(self, message: plan_pb2.Plan | plan_pb2.SessionGrant, field: str)"
            " -> None:",
            "return",
        ),
        INVARIANTS,
    ),
    Fault(
        "version_unchecked",
        VERIFIER,
        "if not oldest <= message.version <= newest:",
        "if False:",
        OF_VERIFIER,
    ),
    Fault(
        "unknown_fields_ignored",
        VERIFIER,
        "message = whole(message, signed.payload, field=f",
        "whole(cls(), b'', field=f",
        OF_VERIFIER,
    ),
    Fault(
        "published_write_allowed",
        RUNNER,
        'check_writable(tables, session.id, batch, np.frombuffer(changed_ids, "<i8"))',
        "pass",
        INVARIANTS,
        also=(
            (
                CHECKS,
                *first(
                    "def check_unpublished(tables: BlockTables, batch: AttentionBatch) -> None:",
                    "return",
                ),
            ),
        ),
    ),
    Fault(  # What is writable when a plan starts counts as writable for ever.
        "publication_forgotten_at_the_kernel",
        CHECKS,
        "if run.checked_version != self._tables.num_messages_published:",
        "if False:",
        REJECTIONS,
    ),
    Fault("signatures_ignored", BOUND, SIGNS, f"    return None\n{SIGNS}", OF_LAYERS),
    Fault(
        "options_of_bound_layers_ignored",
        BOUND,
        SIGNS,
        "    return (\n        None,\n",
        OF_LAYERS,
    ),
    Fault(
        "rows_of_bound_layers_ignored",
        BOUND,
        "return rows if are_views else None",
        "return rows",
        OF_LAYERS,
    ),
    Fault(
        "tokens_of_bound_keys_uncounted",
        BOUND,
        SIGNS,
        "    num = len(query)\n"
        f"    key, value = key[:num], None if value is None else value[:num]\n{SIGNS}",
        OF_LAYERS,
    ),
    Fault(  # A layer group goes on with the batch that was bound first.
        "batches_kept",
        BOUND,
        "write_and_attend(\n                self.batch(batch),",
        "write_and_attend(\n"
        "                self.__dict__.setdefault('first', (self.batch(batch), batch))[0],",
        OF_LAYERS,
    ),
    Fault("stale_publications_kept", BLOCK_TABLES, KEEPS, f"{NAMED}{KEEPS}", PUBLICATIONS),
    Fault(
        "withdrawals_ignored",
        BLOCK_TABLES,
        "blocks = indices[(own == generations[indices]) & self.published[indices]]",
        "blocks = indices[:0]",
        PUBLICATIONS,
    ),
    Fault(
        "withdrawals_of_any_generation",
        BLOCK_TABLES,
        "blocks = indices[(own == generations[indices]) & self.published[indices]]",
        "blocks = indices[self.published[indices]]",
        PUBLICATIONS,
    ),
    Fault(
        "receipt_given_early",
        PROGRESS,
        "return all(self._written)",
        "return self._written[0]",
        OF_PROGRESS,
    ),
    Fault(
        "spans_written_shrink",
        PROGRESS,
        "of_layer[span] = max(of_layer[span], end)",
        "of_layer[span] = end",
        OF_PROGRESS,
    ),
    Fault("gaps_in_blocks_allowed", PROGRESS, "if num_written < begin:", "if False:", OF_EXECUTOR),
    Fault(  # A layer that comes then overwrites what the receipt was given for.
        "layers_written_again_after_the_end",
        RUNNER,
        "if writes and not run.is_complete:",
        "if writes:",
        OF_EXECUTOR,
    ),
    Fault(
        "transfers_run_twice",
        RUNNER,
        STARTS,
        "        if session.running is not None:\n"
        "            session.running.num_batches_queued = 0\n"
        f"            session.running.transferred = False\n{STARTS}",
        FAILURES,
    ),
    Fault(  # A receipt is forgotten at once, and its plan runs again.
        "receipted_plan_writes_again",
        RUNNER,
        STARTS,
        "        run = session.latest\n"
        "        if run is not None and plan.number == run.number:\n"
        "            run.receipt = None\n"
        "            run.progress._written[:] = [False] * len(run.progress._written)\n"
        "            run.num_batches_queued, run.transferred = 0, False\n"
        f"            session.receipts.clear()\n{STARTS}",
        INVARIANTS,
    ),
    Fault(
        "order_unchecked",
        SESSIONS,
        "        running = self.running\n        if known is not None:\n",
        "        running = self.running\n"
        "        if known is None:\n"
        "            is_running = running is not None and running.number == plan.number\n"
        "            return running if is_running else None\n"
        "        if known is not None:\n",
        INVARIANTS,
    ),
    Fault(
        "fenced_ordinals_forgotten",
        SESSIONS,
        "return i >= 0 and ordinal <= self._last[i]",
        "return False",
        ORDER,
    ),
    Fault(
        "ended_ranges_grow_together",
        SESSIONS,
        "return i >= 0 and ordinal <= self._last[i]",
        "return bool(self._first) and self._first[0] <= ordinal <= self._last[-1]",
        ORDER,
    ),
    Fault(
        "ended_sessions_forgotten_under_the_same_key",
        SESSIONS,
        *first(END_ALL, "self._ended_by_key.pop(key_id, None)"),
        ORDER,
    ),
    Fault(
        "ended_sessions_forgotten_under_another_key",
        SESSIONS,
        *first(
            END_ALL,
            "if self._ended_by_key.get(key_id) is not self._ended:",
            "    self._ended_by_key.pop(key_id, None)",
        ),
        ORDER,
    ),
    Fault(  # All copies first, then all swaps, as if none read what another wrote.
        "transfers_by_direction",
        "data_plane/plans/batches/transfers.py",
        "in itertools.pairwise(bounds)\n        ]",
        "in sorted(\n                itertools.pairwise(bounds),\n                key=lambda b:"
        " (sources.tier_keys[b[0]], destinations.tier_keys[b[0]]),\n            )\n        ]",
        TRANSFERS,
    ),
    Fault(
        "transfers_skipped",
        SHARD_KERNELS,
        *first("    def transfer(self, batch: Batch) -> None:", "return"),
        OF_EXECUTOR,
    ),
    Fault(
        "compute_ahead_of_swaps",
        CUDA_STREAMS,
        "self._swaps_are_ahead = True",
        "self._swaps_are_ahead = False",
        STREAMS,
    ),
    Fault(
        "swaps_ahead_of_compute",
        CUDA_STREAMS,
        "self._runtime.order(self._compute, self._swaps)",
        "pass",
        STREAMS,
    ),
    Fault(
        "threads_in_no_order",
        CUDA_STREAMS,
        "self._runtime.order(self._compute, stream)",
        "pass",
        STREAMS,
    ),
    Fault("host_reads_early", CUDA_STREAMS, "self._runtime.wait(self._swaps)", "pass", STREAMS),
    Fault(
        "receipts_before_the_end",
        SHARD_KERNELS,
        *first("    def finish(self) -> None:", "return"),
        STREAMS,
    ),
    Fault(
        "fences_before_the_end",
        EXECUTOR,
        "            self._plans.quiesce()\n            self._sessions.fence(",
        "            self._sessions.fence(",
        STREAMS,
    ),
    Fault(
        "voided_plans_not_waited_for",
        RUNNER,
        "        if voided:\n            self.quiesce()\n",
        "",
        STREAMS,
    ),
    Fault(  # A plan on a device that failed counts as one that ran.
        "failures_forgotten",
        RUNNER,
        "            self._compute.finish()\n        except InternalError as error:",
        "            self._compute.finish()\n        except InternalError as error:\n"
        "            return\n        except KeyError as error:",
        FAILURES,
    ),
    Fault("layers_before_transfers", SESSIONS, "if not self.transferred:", "if False:", FAILURES),
    Fault(
        "pools_go_early", "data_plane/memory/pool.py", "        drain()", "        pass", FAILURES
    ),
    Fault(  # The receipt of a plan that has run waits for a later plan.
        "receipts_before_kept_ones",
        RUNNER,
        STARTS,
        STARTS.replace("plan.number not in session.receipts", "True"),
        FAILURES,
    ),
    Fault(
        "late_attention_not_waited_for",
        RUNNER,
        "run.used_after_receipt |= run.receipt is not None",
        "pass",
        FAILURES,
    ),
    Fault(
        "scales_of_the_wrong_heads",
        SHARD_KERNELS,
        "    of_layer: dict[int, _LayerScales] = {}\n",
        "    import dataclasses\n\n"
        "    shard = dataclasses.replace(shard, first_kv_head=0)\n"
        "    of_layer: dict[int, _LayerScales] = {}\n",
        SCALES,
    ),
    Fault(
        "fingerprint_without_scales",
        LAYOUT,
        "            if scales:\n",
        "            if False:\n",
        LAYOUTS,
    ),
    Fault(  # A pool of latents and one of keys and values are taken for one another.
        "latents_read_as_keys_and_values",
        LAYOUT,
        '        if self.cache_kind == KEYS_AND_VALUES:\n            del fields["cache_kind"]',
        '        if True:\n            del fields["cache_kind"]',
        LAYOUTS,
    ),
    Fault(
        "latents_without_their_values_scale",
        SHARD_KERNELS,
        "return [of_layer[layer] for layer in shard.layers(layout)]",
        "return [(of_layer[layer][0], None) for layer in shard.layers(layout)]",
        LATENTS,
    ),
    Fault(
        "latents_counted_twice",
        "data_plane/kernels/arguments.py",
        "value_bytes = 0 if are_latents(keys, values) else values[0].nbytes",
        "value_bytes = values[0].nbytes",
        LATENTS,
    ),
    *(  # Of the kernels that an executor takes if it is given none.
        Fault(
            name,
            EXECUTOR,
            MAKES_KERNELS,
            f'with_fault({MAKES_KERNELS}, "{name}")',
            OF_EXECUTOR,
            also=(
                (
                    EXECUTOR,
                    IMPORTS_KERNELS,
                    f"{IMPORTS_KERNELS}from tests.helpers.data.kernel_faults import with_fault\n",
                ),
            ),
        )
        for name in ("zero-attention", "swap-two-blocks", "skip-newest-slot", "shift-table")
    ),
)
