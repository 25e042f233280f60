"""One execution stream's session, plan and shared memory, over gRPC or the local socket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import torch
from google.protobuf.message import Message

from data_plane.execution.executor import Executor
from data_plane.execution.layers import layer_index
from data_plane.execution.plan_runner import PlanLayer
from data_plane.kernels.backends.bound_layers import BoundLayer
from data_plane.kernels.device.cuda_streams import device_errors
from data_plane.memory.upload import upload
from data_plane.server.block_requests import BlockRequests, encoded
from data_plane.server.calls import refuse_fields
from data_plane.server.local.region import Region, no_region, overlap
from data_plane.server.tensor_codec import tensor_from_message, tensor_to_message
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError
from kvplane.layout import LATENT
from kvplane.slices import Slices
from kvplane.transport.local import packets
from kvplane.wire.twin import whole
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import local_pb2
from kvplane.wire.v1 import types_pb2 as tpb


class Begun(NamedTuple):
    """The plan and the pass that a stream has begun; the pass is None for all tokens at once."""

    plan_number: int
    pass_index: int | None


@dataclass(slots=True, eq=False)
class Layer:
    """A parsed RunLayerRequest and its prepared response, without the receipt and without an output
    that does not live in a region. It may be of any plan and pass.
    """

    index: int
    query: torch.Tensor | None
    key: torch.Tensor | None
    value: torch.Tensor | None
    options: AttentionOptions
    output: torch.Tensor | None
    """Range of the region that receives the output; None where the response carries the output."""
    out: torch.Tensor | None
    """View of ``output`` if it is on the kernels' device, where they write it; otherwise None."""
    is_in_place: bool
    """Says whether kernels access a region, which the client reuses once it has the answer."""
    answer: pb.RunLayerResponse


_READ: Final = pb.ExecuteResponse.READ_FIELD_NUMBER
_encoded: Final = partial(encoded, around=[(b"", _READ)])

Share = Callable[[local_pb2.ShareDeviceMemory], pb.ExecuteResponse]


def _share_nothing(request: local_pb2.ShareDeviceMemory) -> pb.ExecuteResponse:
    raise InvalidRequestError("there is no region on a GPU here", field="share")


class ExecuteStream:
    """State of one Execute stream or unary call: session, plan, regions. For the worker thread."""

    def __init__(self, executor: Executor, tenant: str | None) -> None:
        """``tenant``: the caller's; None where callers have no identity."""
        self.session_id = 0
        """The session that the stream was opened for; 0 before."""
        self._executor = executor
        self._tenant = tenant
        self.begun: Begun | None = None
        """Names what was begun here last."""
        self.named = b""
        """How packets of bound layers name that: see ``packets.named``."""
        self._blocks = BlockRequests(executor)
        self._regions: dict[int, Region] = {}
        self._share: Share = _share_nothing

    def use_regions(self, regions: Sequence[Region], share: Share = _share_nothing) -> None:
        """Let messages refer to tensors in ``regions``, and in no others. ``share`` answers packets
        that ask for a region on the GPU.
        """
        self._regions, self._share = {region.id: region for region in regions}, share

    def answer(
        self, request: pb.ExecuteRequest, *, is_local: bool = False
    ) -> Slices[pb.ExecuteResponse | bytes]:
        """Run a request of the stream and return the response; one with blocks is encoded.
        ``is_local``: it came by the local socket. Raises KvplaneError.
        """
        kind = request.WhichOneof("message")
        if kind == "open":
            return self._open(request.open)
        if kind == "plan":
            return pb.ExecuteResponse(started=self._start_on_stream(request.plan))
        if kind == "layer":
            layer = self._read(request.layer, is_local=is_local)
            output, receipt = yield from self.run(layer, *_named_by(request.layer))
            response = pb.ExecuteResponse(output=layer.answer)
            _complete(response.output, output, receipt)
            return response
        if kind == "read":
            self._check_open(request.read)
            return self._blocks.read(self.session_id, request.read, self._shared, _encoded)
        if kind == "write":
            self._check_open(request.write)
            written = self._blocks.write(self.session_id, request.write, self._shared)
            return pb.ExecuteResponse(written=written)
        raise InvalidRequestError(
            "must be open, plan, layer, read or write: other messages are unknown to this data "
            "plane, or not served here",
            field="message",
        )

    def answer_packet(self, packet: bytes) -> Slices[bytes]:
        """Return the answer to a message that came by the local socket. Raises KvplaneError."""
        request = whole(packets.parse(pb.ExecuteRequest, packet), packet)
        if request.HasField("share"):
            return self._share(request.share).SerializeToString()
        answer = yield from self.answer(request, is_local=True)
        return answer if isinstance(answer, bytes) else answer.SerializeToString()

    def bind(self, request: pb.RunLayerRequest) -> tuple[Layer, BoundLayer | None]:
        """Parse a layer whose tensors are in regions, and bind it for plans and passes of as many
        tokens as the one that was begun here. Layers are not bound on a GPU. Raises KvplaneError.
        """
        layer, begun, bound = self._read(request, is_local=True), self.begun, None
        if begun is not None and self._executor.device.type == "cpu":
            named = PlanLayer(self.session_id, layer.index, *begun, "layer.")
            tensors = layer.query, layer.key, layer.value
            bound = self._executor.layer_runner.bind(named, tensors, layer.options)
        return layer, bound

    def run(
        self, layer: Layer, plan_number: int, pass_index: int | None, prefix: str = "layer."
    ) -> Slices[tuple[torch.Tensor | None, tpb.SignedPayload | None]]:
        """Run a layer of a plan and pass. Returns the output, None where it is in a region, and the
        receipt, None while there is none. Raises KvplaneError.
        """
        self._check_begun()
        executor, session_id = self._executor, self.session_id
        query, key, value = layer.query, layer.key, layer.value
        if executor.device.type != "cpu":
            with device_errors():
                query = None if query is None else _on(query, executor.device)
                key = None if key is None else _on(key, executor.device)
                value = None if value is None else _on(value, executor.device)
        named = PlanLayer(session_id, layer.index, plan_number, pass_index, prefix)
        output = yield from executor.layer_runner.run_slices(
            named, (query, key, value), layer.options, layer.out
        )
        if layer.is_in_place:
            executor.finish(raises=True)
        if layer.out is not None:
            output = None
        elif layer.output is not None and output is not None:
            with device_errors():
                layer.output.copy_(output)
            output = None
        return output, executor.receipt(session_id)

    def start_alone(self, request: pb.StartPlanRequest, *, swaps: bool) -> pb.StartPlanResponse:
        """Answer a unary StartPlan, which brings its grant. ``swaps``: as for ``Executor.start``.
        Raises KvplaneError.
        """
        self._open_session(request.grant)
        return self._start(request.plan, _pass_of(request), swaps=swaps)

    def layer_alone(self, request: pb.RunLayerRequest) -> Slices[pb.RunLayerResponse]:
        """Answer a unary call for a layer, which brings grant and plan. Raises KvplaneError."""
        layer = self._parse(request, "", is_local=False)
        self._open_session(request.grant)
        started = self._start(request.plan, None)
        number, pass_index = _named_by(request)
        run = self.run(layer, number or started.plan_number, pass_index, "")
        output, receipt = yield from run
        _complete(layer.answer, output, receipt)
        return layer.answer

    def _open(self, request: pb.OpenExecution) -> pb.ExecuteResponse:
        self._open_session(request.grant)
        layers = self._executor.layers
        opened = pb.ExecutionOpened(layers=[] if self._executor.layout.is_opaque else layers)
        return pb.ExecuteResponse(opened=opened)

    def _open_session(self, grant: tpb.SignedPayload) -> None:
        session_id = self._executor.open(grant, tenant=self._tenant)
        self.session_id, self.begun = session_id, None

    def _start_on_stream(self, request: pb.StartPlanRequest) -> pb.StartPlanResponse:
        self.begun = None
        self._check_open(request, "plan.")
        return self._start(request.plan, _pass_of(request))

    def _check_open(self, request: Message, prefix: str = "") -> None:
        if not self.session_id:
            raise InvalidRequestError(
                "the stream is not open: send an open message first", field="open"
            )
        refuse_fields(request, ["grant"], "the stream was opened with a grant", prefix)

    def _start(
        self, plan: tpb.SignedPayload, of_pass: int | None, *, swaps: bool | None = None
    ) -> pb.StartPlanResponse:
        """Start a plan and begin a pass of it, unless the pass is None."""
        started = self._executor.start(self.session_id, plan, swaps=swaps)
        num_tokens, pass_index = started.num_tokens, started.pass_index
        if of_pass is not None:
            pass_index, number = of_pass, started.number
            num_tokens = self._executor.begin_pass(self.session_id, pass_index, plan_number=number)
        self.begun = Begun(started.number, pass_index)
        self.named = packets.named(*self.begun)
        return pb.StartPlanResponse(
            plan_number=started.number,
            num_tokens=num_tokens,
            finished=started.had_run,
            receipt=started.receipt,
            num_copied_blocks=started.num_copied_blocks,
            num_swapped_blocks=started.num_swapped_blocks,
        )

    def _read(self, request: pb.RunLayerRequest, *, is_local: bool = False) -> Layer:
        """Parse a layer's message. ``is_local``: its tensors and output have to be in regions."""
        self._check_begun()
        why = "a layer of the stream names its plan by plan_number"
        refuse_fields(request, ["grant", "plan"], why, "layer.")
        return self._parse(request, "layer.", is_local=is_local)

    def _parse(self, request: pb.RunLayerRequest, prefix: str, *, is_local: bool) -> Layer:
        """Parse a layer. ``prefix``: prefixes the fields that errors name."""
        query, key, value = (
            self._tensor(getattr(request, name), f"{prefix}{name}", is_local)
            if request.HasField(name)
            else None
            for name in ("query", "key", "value")
        )
        options = AttentionOptions.from_proto(request.options, field=f"{prefix}options")
        layer = pb.RunLayerResponse(layer=request.layer)
        output = out = None
        if query is not None and (is_local or request.HasField("output")):
            shape = self._output_shape(request.layer, query, key, value, prefix)
            region = self._shared(request.output, f"{prefix}output")
            output = region.view(request.output, query.dtype, shape, f"{prefix}output")
            if region.is_on_device:
                _refuse_overlap(output, (query, key, value), f"{prefix}output")
                out = output
            there = tpb.Tensor(dtype=request.query.dtype, shape=shape, memory=request.output)
            layer.output.CopyFrom(there)
        places = request.query.memory, request.key.memory, request.value.memory, request.output
        regions = [self._regions.get(place.region_id) for place in places]
        is_in_place = any(region is not None and region.is_on_device for region in regions)
        return Layer(request.layer, query, key, value, options, output, out, is_in_place, layer)

    def _output_shape(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        prefix: str,
    ) -> tuple[int, ...]:
        """Return the shape of a layer's output that goes to a range in a region."""
        if query.dim() != 3 or (value is not None and value.dim() != 3):
            raise InvalidRequestError("must have three dimensions", field=f"{prefix}query")
        if value is not None:
            return (*query.shape[:2], value.shape[2])
        executor = self._executor
        index = layer_index(executor.layers, layer, prefix)
        group = executor.layout.groups[executor.pools.group_of_layer(index)]
        if key is not None or group.cache_kind == LATENT:
            raise InvalidRequestError(
                "must be given: latents are answered with data, not in a range",
                field=f"{prefix}value",
            )
        return (*query.shape[:2], group.value_size)

    def _check_begun(self) -> None:
        if self.begun is None:
            raise InvalidRequestError(
                "no plan was started on this stream: send a plan before its layers", field="layer"
            )

    def _tensor(self, message: tpb.Tensor, field: str, is_local: bool) -> torch.Tensor:
        """Return a view of the region that has the tensor, or a copy on the executor's device."""
        if len(message.shape) == 4:  # which the executor takes in another order
            heads = "num_heads" if field.endswith("query") else "num_kv_heads"
            raise InvalidRequestError(
                f"must be [num_tokens, {heads}, head_size], is {[*message.shape]}", field=field
            )
        if is_local or message.HasField("memory"):
            return self._shared(message.memory, f"{field}.memory").tensor(message, field)
        return tensor_from_message(message, self._executor.device, field=field)

    def _shared(self, place: tpb.MemoryRange, field: str) -> Region:
        if not self._regions:
            return no_region(place, field)
        region = self._regions.get(place.region_id)
        if region is None:
            raise InvalidRequestError(
                "names a region that was not agreed with this client", field=f"{field}.region_id"
            )
        return region


def _named_by(layer: pb.RunLayerRequest) -> Begun:
    return Begun(layer.plan_number, _pass_of(layer))


def _pass_of(request: pb.StartPlanRequest | pb.RunLayerRequest) -> int | None:
    return request.pass_index if request.HasField("pass_index") else None


def _refuse_overlap(
    output: torch.Tensor, tensors: Sequence[torch.Tensor | None], field: str
) -> None:
    if any(overlap(output, tensor) for tensor in tensors if tensor is not None):
        raise InvalidRequestError("on a GPU must be apart from query, key and value", field=field)


def _complete(
    answer: pb.RunLayerResponse,
    output: torch.Tensor | None,
    receipt: tpb.SignedPayload | None,
) -> None:
    """Add the output and the receipt to a layer's prepared answer, where they are missing."""
    if output is not None:
        answer.output.CopyFrom(tensor_to_message(output))
    if receipt is not None:
        answer.receipt.CopyFrom(receipt)


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on ``device``, uploaded if it is elsewhere; an empty one as it is."""
    return tensor if tensor.device == device or not tensor.numel() else upload([tensor], device)[0]
