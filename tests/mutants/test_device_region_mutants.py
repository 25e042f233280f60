"""The tests of memory that is shared on a GPU fail when a check is taken out of a copy of the tree,
on the emulated GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.source_faults import Fault, assert_noticed

MEMORY = "csrc/cuda/device/shared_memory.cu"
REGIONS = "data_plane/server/local/device_regions.py"
CONNECTION = "data_plane/server/local/connection.py"
ENDPOINT = "data_plane/server/local/endpoint.py"
PACKETS = "kvplane/transport/local/packets.py"
STREAM = "data_plane/server/execute_stream.py"
ENGINE = "kvplane/runtime/device_region.py"
LAYERS = "kvplane/runtime/region_layers.py"
NATIVE = "tests/kernels/test_cuda_shared_memory.py"
RPC = "tests/rpc/test_device_regions.py"
UNIT = "tests/unit/client/test_device_region.py"

FAULTS = {
    "what_was_there_before_can_be_read": Fault(
        MEMORY,
        'check(cudaMemset(data, 0, whole), "cudaMemset");',
        "",
        NATIVE,
        "nothing_of_anybody",
    ),
    "outputs_are_answered_before_they_are_there": Fault(
        STREAM, "executor.finish(raises=True)", "pass", RPC, "has_done_the_layer"
    ),
    "regions_are_freed_while_engines_have_them": Fault(
        REGIONS,
        "region for region in self._regions if region.is_let_go",
        "region for region in self._regions",
        RPC,
        "takes_the_region",
    ),
    "nobody_waits_before_packets": Fault(LAYERS, "region.settle()", "pass", RPC, "gpus_memory"),
    "packets_go_before_their_tensors": Fault(
        ENGINE, "self._stream.synchronize()", "pass", UNIT, "is_there_before"
    ),
    "handles_open_a_block_of_others": Fault(
        MEMORY,
        "div_ceil(num_bytes, kBlockBytes) * kBlockBytes",
        "num_bytes",
        NATIVE,
        "nothing_but_its_own",
    ),
    "sizes_are_believed": Fault(
        MEMORY, "|| has < static_cast<size_t>(num_bytes)", "", NATIVE, "nothing_but_its_own"
    ),
    "handles_have_any_length": Fault(
        MEMORY,
        "if (handle.size() != sizeof given) throw",
        "if (handle.size() > 10000) throw",
        NATIVE,
        "another_length",
    ),
    "memory_stays_open": Fault(
        MEMORY, "    cudaIpcCloseMemHandle(data_);\n", "", NATIVE, "nothing_but_its_own"
    ),
    "memory_is_never_freed": Fault(MEMORY, "    cudaFree(data_);\n", "", NATIVE, "as_its_tensors"),
    "the_file_stays_open": Fault(
        MEMORY, "if (file_ >= 0) close(file_);", "", NATIVE, "after_the_memory"
    ),
    "any_gpu_is_this_one": Fault(
        REGIONS,
        "or request.cuda_device_uuid != self.cuda_device_uuid",
        "",
        RPC,
        "on_another_gpu_is_refused",
    ),
    "there_is_any_number_of_regions": Fault(
        REGIONS, "len(self._regions) >= self._num_regions", "False", RPC, "bounded"
    ),
    "a_connection_has_any_number": Fault(
        CONNECTION,
        "if self._has_shared:",
        "if False:",
        RPC,
        "bounded",
    ),
    "outputs_are_copied": Fault(STREAM, "                out = output\n", "", RPC, "gpus_memory"),
    "outputs_are_written_over_what_is_read": Fault(
        STREAM,
        "if any(overlap(output, tensor) for tensor in tensors if tensor is not None):",
        "if False:",
        RPC,
        "over_what_is_read",
    ),
    "regions_outlive_what_engines_let_go": Fault(
        CONNECTION, "if region is self._device_region:", "if False:", RPC, "gives_it_back"
    ),
    "bindings_keep_what_engines_let_go": Fault(
        CONNECTION, "self._layers.forget_in_place()", "pass", RPC, "is_bound_for"
    ),
    "what_is_let_go_is_not_counted": Fault(
        REGIONS, "self._end_use(region)", "pass", RPC, "bounded"
    ),
    "regions_of_the_gone_are_not_looked_for": Fault(
        ENDPOINT, "or self.num_device_regions:", ":", RPC, "that_dies"
    ),
    "stopping_frees_all": Fault(REGIONS, "_KEPT.extend(self._regions)", "pass", RPC, "that_stops"),
    "gpus_are_not_compared": Fault(
        ENGINE, "if uuid != local.cuda_device_uuid:", "if False:", RPC, "goes_through_main_memory"
    ),
    "another_gpus_region_is_opened": Fault(
        ENGINE, "message.cuda_device_uuid != uuid or", "", RPC, "gives_it_back"
    ),
    "a_region_has_any_size": Fault(
        ENGINE, "or message.size_bytes > _MOST_BYTES", "", RPC, "gives_it_back"
    ),
    "engines_keep_what_ended": Fault(
        LAYERS, "local.at_end(self._forget)", "pass", RPC, "gpus_memory"
    ),
    "refusals_hold_what_they_refuse": Fault(
        CONNECTION,
        "            return self._refusal(error)\n",
        "            held = error\n            return self._refusal(held)\n",
        RPC,
        "keeps_no_memory",
    ),
    "only_outputs_are_waited_for": Fault(
        STREAM, "if layer.is_in_place:", "if layer.out is not None:", RPC, "only_written"
    ),
    "finished_plans_know_of_no_failure": Fault(
        STREAM, "executor.finish(raises=True)", "executor.finish()", RPC, "finished_plan"
    ),
    "outputs_are_overwritten_on_another_stream": Fault(
        LAYERS, "            region.follow()\n", "            pass\n", UNIT, "between_the_two"
    ),
    "programs_that_start_get_the_file": Fault(
        PACKETS, ", socket.MSG_CMSG_CLOEXEC)", ")", UNIT, "started_programs"
    ),
    "other_streams_are_not_waited_for": Fault(
        ENGINE, "stream.wait_stream(before)", "pass", UNIT, "of_another_stream"
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_tests_notice(name: str, tmp_path: Path) -> None:
    assert_noticed(FAULTS[name], tmp_path, csrc=True)
