"""The tests of memory that is shared on a GPU fail when a check is taken out of a copy of the tree,
on the emulated GPU.
"""

from __future__ import annotations

from tests.mutants.fault import Fault, planted

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

FAULTS = (
    Fault(
        "what_was_there_before_can_be_read",
        MEMORY,
        'check(cudaMemset(data, 0, whole), "cudaMemset");',
        "",
        NATIVE,
        "nothing_of_anybody",
    ),
    Fault(
        "outputs_are_answered_before_they_are_there",
        STREAM,
        "executor.finish(raises=True)",
        "pass",
        RPC,
        "has_done_the_layer",
    ),
    Fault(
        "regions_are_freed_while_engines_have_them",
        REGIONS,
        "region for region in self._regions if region.is_let_go",
        "region for region in self._regions",
        RPC,
        "takes_the_region",
    ),
    Fault("nobody_waits_before_packets", LAYERS, "region.settle()", "pass", RPC, "gpus_memory"),
    Fault(
        "engines_keep_what_ended", LAYERS, "local.at_end(self._forget)", "pass", RPC, "gpus_memory"
    ),
    Fault(
        "packets_go_before_their_tensors",
        ENGINE,
        "self._stream.synchronize()",
        "pass",
        UNIT,
        "is_there_before",
    ),
    *planted(
        MEMORY,
        NATIVE,
        {
            "handles_open_a_block_of_others": (
                "div_ceil(num_bytes, kBlockBytes) * kBlockBytes",
                "num_bytes",
            ),
            "sizes_are_believed": ("|| has < static_cast<size_t>(num_bytes)", ""),
            "memory_stays_open": ("    cudaIpcCloseMemHandle(data_);\n", ""),
        },
        only="nothing_but_its_own",
    ),
    Fault(
        "handles_have_any_length",
        MEMORY,
        "if (handle.size() != sizeof given) throw",
        "if (handle.size() > 10000) throw",
        NATIVE,
        "another_length",
    ),
    Fault("memory_is_never_freed", MEMORY, "    cudaFree(data_);\n", "", NATIVE, "as_its_tensors"),
    Fault(
        "the_file_stays_open",
        MEMORY,
        "if (file_ >= 0) close(file_);",
        "",
        NATIVE,
        "after_the_memory",
    ),
    Fault(
        "any_gpu_is_this_one",
        REGIONS,
        "or request.cuda_device_uuid != self.cuda_device_uuid",
        "",
        RPC,
        "on_another_gpu_is_refused",
    ),
    Fault(
        "there_is_any_number_of_regions",
        REGIONS,
        "len(self._regions) >= self._num_regions",
        "False",
        RPC,
        "bounded",
    ),
    Fault(
        "what_is_let_go_is_not_counted", REGIONS, "self._end_use(region)", "pass", RPC, "bounded"
    ),
    Fault(
        "a_connection_has_any_number",
        CONNECTION,
        "if self._has_shared:",
        "if False:",
        RPC,
        "bounded",
    ),
    Fault("outputs_are_copied", STREAM, "                out = output\n", "", RPC, "gpus_memory"),
    Fault(
        "outputs_are_written_over_what_is_read",
        STREAM,
        "if any(overlap(output, tensor) for tensor in tensors if tensor is not None):",
        "if False:",
        RPC,
        "over_what_is_read",
    ),
    Fault(
        "regions_outlive_what_engines_let_go",
        CONNECTION,
        "if region is self._device_region:",
        "if False:",
        RPC,
        "gives_it_back",
    ),
    Fault(
        "bindings_keep_what_engines_let_go",
        CONNECTION,
        "self._layers.forget_in_place()",
        "pass",
        RPC,
        "is_bound_for",
    ),
    Fault(
        "regions_of_the_gone_are_not_looked_for",
        ENDPOINT,
        "or self.num_device_regions:",
        ":",
        RPC,
        "that_dies",
    ),
    Fault("stopping_frees_all", REGIONS, "_KEPT.extend(self._regions)", "pass", RPC, "that_stops"),
    Fault(
        "gpus_are_not_compared",
        ENGINE,
        "if uuid != local.cuda_device_uuid:",
        "if False:",
        RPC,
        "goes_through_main_memory",
    ),
    Fault(
        "another_gpus_region_is_opened",
        ENGINE,
        "message.cuda_device_uuid != uuid or",
        "",
        RPC,
        "gives_it_back",
    ),
    Fault(
        "a_region_has_any_size",
        ENGINE,
        "or message.size_bytes > _MOST_BYTES",
        "",
        RPC,
        "gives_it_back",
    ),
    Fault(
        "refusals_hold_what_they_refuse",
        CONNECTION,
        "            return self._refusal(error)\n",
        "            held = error\n            return self._refusal(held)\n",
        RPC,
        "keeps_no_memory",
    ),
    Fault(
        "only_outputs_are_waited_for",
        STREAM,
        "if layer.is_in_place:",
        "if layer.out is not None:",
        RPC,
        "only_written",
    ),
    Fault(
        "finished_plans_know_of_no_failure",
        STREAM,
        "executor.finish(raises=True)",
        "executor.finish()",
        RPC,
        "finished_plan",
    ),
    Fault(
        "outputs_are_overwritten_on_another_stream",
        LAYERS,
        "            region.follow()\n",
        "            pass\n",
        UNIT,
        "between_the_two",
    ),
    Fault(
        "programs_that_start_get_the_file",
        PACKETS,
        ", socket.MSG_CMSG_CLOEXEC)",
        ")",
        UNIT,
        "started_programs",
    ),
    Fault(
        "other_streams_are_not_waited_for",
        ENGINE,
        "stream.wait_stream(before)",
        "pass",
        UNIT,
        "of_another_stream",
    ),
)
