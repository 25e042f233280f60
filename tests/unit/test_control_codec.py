"""The core's values cross the wire unchanged, and what is no such value is refused by the name of
its field.
"""

from __future__ import annotations

import re

import pytest

from control_plane.planning import model
from control_plane.server import codec
from kvplane import ops, signing
from kvplane.errors import (
    BadSignatureError,
    InvalidRequestError,
    KvplaneError,
    PoolFullError,
    SequenceNotFoundError,
)
from kvplane.layout import LayerGroup, Layout
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb

KEY = bytes(range(32))
LAYOUT = Layout("m", 16, "float32", "float32", (LayerGroup("full", (0, 1), 2, 8),))
USAGE = (model.TierUsage(model.Tier.DEVICE, 21, 1, 2, 3, 4, 11),)


def device(index: int, generation: int = 1) -> model.BlockRef:
    return model.BlockRef(model.Tier.DEVICE, index, generation)


def host(index: int, generation: int = 1) -> model.BlockRef:
    return model.BlockRef(model.Tier.HOST, index, generation)


def make_plan(**changes: object) -> model.Plan:
    fields = {
        "pool_id": "p",
        "shard_epochs": (2**64 - 1, 5),
        "incarnation": 2**63,
        "session_id": 7,
        "number": 9,
        "previous": 6,
        "resync": True,
        "changes": (
            model.SetBlocks(
                1, 2, model.Blocks(model.Tier.DEVICE, (3, 5), (4, 6)), (True, False), replace=True
            ),
            model.ForkTable(8, 1, 3),
            model.DropTable(9),
        ),
        "transfers": (model.Transfer(device(3, 4), host(0, 2)),),
        "rows": (model.Row(1, 30, 5), model.Row(8, 0, 1)),
    }
    return model.Plan(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "value"),
    [
        (
            ops.admit(1, [5, 6], num_compute_tokens=0, max_total_tokens=9, skip_prefix_lookup=True),
            model.Admit(1, ops.pack_tokens([5, 6]), 0, 9, True),
        ),
        (ops.admit(1, [5]), model.Admit(1, ops.pack_tokens([5]), None, 0, False)),
        (ops.append(2, [7], 3), model.Append(2, ops.pack_tokens([7]), 3)),
        (ops.fork(3, 4), model.Fork(3, 4)),
        (ops.free(5), model.Free(5)),
        (ops.swap_out([6, 7]), model.SwapOut((6, 7))),
        (ops.swap_in([8]), model.SwapIn((8,))),
        (ops.free(-(2**63)), model.Free(-(2**63))),
    ],
)
def test_an_operation_is_read_as_what_it_says(
    message: cpb.Operation, value: model.Operation
) -> None:
    assert codec.operations_from_proto([message]) == [value]


def test_an_operation_that_names_nothing_is_refused_by_its_place() -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        codec.operations_from_proto([ops.free(1), cpb.Operation()])
    assert refusal.value.field == "operations[1]"


def test_a_plan_keeps_everything_on_its_way() -> None:
    sealed = codec.seal(KEY, make_plan())
    plan = tpb.Plan.FromString(sealed.payload)
    assert plan.pool_id == "p"
    assert list(plan.shard_epochs) == [2**64 - 1, 5]
    assert plan.incarnation == 2**63
    assert (plan.session_id, plan.number, plan.previous, plan.resync) == (7, 9, 6, True)
    kinds = [(c.sequence_id, c.WhichOneof("change")) for c in plan.changes]
    assert kinds == [(1, "set"), (8, "fork"), (9, "drop")]
    blocks = tpb.Blocks(tier=tpb.TIER_DEVICE, indices=[3, 5], generations=[4, 6])
    wanted = tpb.SetBlocks(first_block=2, blocks=blocks, fresh=[True, False], replace=True)
    assert plan.changes[0].set == wanted
    assert plan.changes[1].fork == tpb.ForkTable(parent_sequence_id=1, num_blocks=3)
    assert plan.transfers[0].source == tpb.BlockRef(tier=tpb.TIER_DEVICE, index=3, generation=4)
    assert plan.transfers[0].destination == tpb.BlockRef(tier=tpb.TIER_HOST, generation=2)
    rows = [(r.sequence_id, r.first_position, r.num_tokens) for r in plan.rows]
    assert rows == [(1, 30, 5), (8, 0, 1)]


def test_equal_plans_have_equal_bytes_and_a_signature_that_holds() -> None:
    first, second = codec.seal(KEY, make_plan()), codec.seal(KEY, make_plan())
    assert first == second
    assert first.digest == signing.digest(first.payload)
    message = codec.sealed_to_proto(first)
    signing.verify(
        KEY, signing.PLAN, message.type, message.payload, message.signature, field="plan"
    )
    assert codec.seal(KEY, make_plan(number=10)).digest != first.digest
    assert codec.seal(bytes(32), make_plan()).signature != first.signature


DONE: list[tuple[model.Done, str]] = [
    (model.AdmitResult(16, 3, 20), "admit"),
    (model.AdmitResult(0, 0, 0), "admit"),
    (model.AppendResult(17, 2), "append"),
    (model.AppendResult(0, 0), "append"),
    (model.ForkResult(0), "fork"),
    (model.FreeResult(0), "free"),
    (model.SwapOutResult(0), "swap_out"),
    (model.SwapInResult(4), "swap_in"),
]


@pytest.mark.parametrize(("done", "kind"), DONE)
def test_a_result_says_what_was_done_even_when_all_its_counts_are_zero(
    done: model.Done, kind: str
) -> None:
    outcome = model.StepOutcome(3, (model.OperationResult(model.Status.OK, done),), None, USAGE)
    message = cpb.StepResult.FromString(codec.step_result_to_proto(outcome).SerializeToString())
    result = message.results[0]
    assert result.status == cpb.OPERATION_STATUS_OK
    assert result.WhichOneof("done") == kind
    counts = getattr(result, kind)
    assert all(getattr(counts, name) == getattr(done, name) for name in done.__slots__)
    assert not message.HasField("plan")


def test_a_result_that_is_not_ok_says_why() -> None:
    error = SequenceNotFoundError("no sequence 4", field="operations[1].free.sequence_id")
    outcome = model.StepOutcome(
        3,
        (
            model.OperationResult(
                model.Status.LATER, shortage=model.Shortage(model.Tier.HOST, 1, 2, 3)
            ),
            model.OperationResult(model.Status.FAILED, error=error),
        ),
        codec.seal(KEY, make_plan()),
        USAGE,
    )
    message = codec.step_result_to_proto(outcome)
    later, failed = message.results
    assert later.status == cpb.OPERATION_STATUS_LATER
    assert later.shortage == cpb.Shortage(
        tier=tpb.TIER_HOST, num_blocks_needed=1, num_blocks_available=2, num_blocks_pending=3
    )
    assert later.WhichOneof("done") is None
    assert failed.status == cpb.OPERATION_STATUS_FAILED
    assert (failed.error.reason, failed.error.field) == ("SEQUENCE_NOT_FOUND", error.field)
    assert message.plan.type == signing.PLAN
    tier = message.usage.tiers[0]
    assert tier.num_blocks == 21
    assert (tier.num_free_blocks, tier.num_cached_blocks, tier.num_held_blocks) == (1, 2, 3)
    assert (tier.num_limbo_blocks, tier.num_reserved_blocks) == (4, 11)


def make_receipt(**changes: object) -> tpb.SignedPayload:
    receipt = tpb.Receipt(
        pool_id="p",
        shard_index=1,
        epoch=2**64 - 1,
        incarnation=4,
        session_id=7,
        plan_number=9,
        plan_digest=b"d" * 32,
    ).SerializeToString()
    signature = signing.sign(KEY, signing.RECEIPT, receipt)
    fields = {"type": signing.RECEIPT, "payload": receipt, "signature": signature}
    return tpb.SignedPayload(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_receipt_that_verifies_is_read() -> None:
    wanted = model.Receipt(7, 9, b"d" * 32, 1, 2**64 - 1, 4)
    assert codec.receipts_from_proto(KEY, [make_receipt()]) == [wanted]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"signature": bytes(32)}, "receipts[1].signature"),
        ({"signature": b""}, "receipts[1].signature"),
        ({"payload": b"\x08\x01"}, "receipts[1].signature"),
        ({"type": signing.PLAN}, "receipts[1].type"),
        ({"type": ""}, "receipts[1].type"),
    ],
)
def test_a_receipt_that_is_not_what_was_signed_is_refused_by_its_place(
    changes: dict[str, object], field: str
) -> None:
    with pytest.raises(BadSignatureError) as refusal:
        codec.receipts_from_proto(KEY, [make_receipt(), make_receipt(**changes)])
    assert refusal.value.field == field


def test_a_signed_payload_that_is_no_receipt_is_refused() -> None:
    garbage = b"\xff\xff\xff"
    signature = signing.sign(KEY, signing.RECEIPT, garbage)
    with pytest.raises(InvalidRequestError) as refusal:
        codec.receipts_from_proto(KEY, [make_receipt(payload=garbage, signature=signature)])
    assert refusal.value.field == "receipts[0].payload"


def make_step(**changes: object) -> cpb.StepRequest:
    fields = {"session_id": 1, "number": 2, "operations": [ops.free(3)]}
    return cpb.StepRequest(**{**fields, **changes})  # type: ignore[arg-type]


def test_the_content_of_a_step_is_all_but_its_receipts() -> None:
    content = codec.content_digest(make_step())
    assert codec.content_digest(make_step(receipts=[make_receipt()])) == content
    late = cpb.LateTokens(sequence_id=3, first_position=1, token_ids=ops.pack_tokens([1]))
    assert codec.content_digest(make_step(operations=[ops.free(4)])) != content
    assert codec.content_digest(make_step(late_tokens=[late])) != content
    assert codec.content_digest(make_step(number=3)) != content
    resync = cpb.ResyncRequest(session_id=1, number=2)
    assert codec.resync_digest(resync) != codec.content_digest(make_step(operations=[]))


@pytest.mark.parametrize(
    ("field", "wanted"),
    [
        ("operations[0].admit.token_ids", "operation.token_ids"),
        ("operations[0].admit", "operation"),
        ("operations[0]", "operation"),
        ("receipts[0].signature", "receipts[0].signature"),
        ("", ""),
    ],
)
def test_a_unary_call_is_told_its_own_field(field: str, wanted: str) -> None:
    error: KvplaneError = PoolFullError("full", field=field, retry_delay_s=0.5)
    told = codec.of_one_operation(error)
    assert type(told) is PoolFullError
    assert (told.field, told.message, told.retry_delay_s) == (wanted, "full", 0.5)


def test_a_layout_is_known_whole_or_by_its_fingerprint() -> None:
    whole = LAYOUT.to_proto()
    assert codec.layout_fingerprint(whole) == LAYOUT.fingerprint
    alone = tpb.Layout(fingerprint=LAYOUT.fingerprint)
    assert codec.layout_fingerprint(alone) == LAYOUT.fingerprint


def two_groups() -> tpb.Layout:
    message = LAYOUT.to_proto()
    message.groups.add(name="window", layers=[2], num_kv_heads=2, head_size=8)
    message.fingerprint = b""
    return message


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (tpb.Layout(), "layout.fingerprint"),
        (tpb.Layout(fingerprint=b"short"), "layout.fingerprint"),
        (tpb.Layout(model_id="m"), "layout.dtype"),
        (tpb.Layout(model_id="m", dtype=1, kv_dtype=1), "layout.block_size_tokens"),
        (two_groups(), "layout.groups"),
    ],
)
def test_a_layout_that_means_nothing_is_refused(message: tpb.Layout, field: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        codec.layout_fingerprint(message)
    assert refusal.value.field == field
    with pytest.raises(InvalidRequestError, match=r"^hello\.layout\."):
        codec.hello_from_proto(cpb.Hello(pool_id="p", address="h:1", layout=message))


def test_a_hello_is_read_as_it_was_said() -> None:
    message = cpb.Hello(
        pool_id="p",
        shard=tpb.Shard(index=1, num_shards=2, num_layers=2, first_kv_head=1, num_kv_heads=1),
        epoch=2**64 - 1,
        layout=LAYOUT.to_proto(),
        num_device_blocks=10,
        num_host_blocks=3,
        address="h:1",
        incarnation=5,
    )
    shard = model.Shard(1, 2, 0, 2, 1, 1)
    wanted = model.Hello("p", shard, 2**64 - 1, LAYOUT, 10, 3, "h:1", 5)
    assert codec.hello_from_proto(message) == wanted


@pytest.mark.parametrize("pool_id", ["", "x" * 129])
def test_a_pool_without_a_proper_name_is_refused(pool_id: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        codec.hello_from_proto(cpb.Hello(pool_id=pool_id, layout=LAYOUT.to_proto()))
    assert refusal.value.field == "hello.pool_id"


def published(**changes: object) -> cpb.ReportedBlock:
    block = tpb.BlockRef(tier=tpb.TIER_DEVICE, index=4, generation=2)
    fields = {
        "block": block,
        "tenant": "t",
        "parent_hash": b"p" * 16,
        "hash": b"h" * 16,
        "token_ids": b"t" * 64,
    }
    publication = tpb.Publication(**{**fields, **changes})  # type: ignore[arg-type]
    return cpb.ReportedBlock(block=block, publication=publication)


def test_a_report_comes_back_as_the_publications_that_went_out() -> None:
    report = cpb.BlockReport(
        blocks=[published(), cpb.ReportedBlock(block=tpb.BlockRef(tier=tpb.TIER_HOST, index=1))]
    )
    first, second = codec.reported_blocks_from_proto(report)
    assert second == model.ReportedBlock(host(1, 0), None)
    assert first.block == device(4, 2)
    assert first.publication is not None
    told = model.Publications(
        "t", model.Blocks(model.Tier.DEVICE, (4,), (2,)), (b"p" * 16,), (b"h" * 16,), (b"t" * 64,)
    )
    assert list(told) == [first.publication]
    message = codec.outgoing_to_proto(model.PublishBlocks(told))
    assert message.publish.publications[0] == report.blocks[0].publication


@pytest.mark.parametrize(
    ("block", "field"),
    [
        (cpb.ReportedBlock(), "block.tier"),
        (cpb.ReportedBlock(block=tpb.BlockRef(tier=7)), "block.tier"),
        (published(hash=b"h" * 15), "publication.hash"),
        (published(parent_hash=b"h" * 17), "publication.parent_hash"),
        (published(group=1), "publication.group"),
        (published(block=tpb.BlockRef(tier=1, index=5)), "publication.block"),
    ],
)
def test_a_report_that_can_not_be_is_refused_by_its_place(
    block: cpb.ReportedBlock, field: str
) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(f"report.blocks[1].{field}: ")):
        codec.reported_blocks_from_proto(cpb.BlockReport(blocks=[published(), block]))


def test_a_fence_goes_out_by_its_session() -> None:
    assert codec.outgoing_to_proto(model.Fence(7)).fence.session_id == 7


def test_a_grant_names_the_session_and_is_signed() -> None:
    session = model.OpenedSession(
        session_id=7,
        pool_id="p",
        tenant="t",
        key=KEY,
        shard_epochs=(1, 2),
        incarnation=3,
        time_to_live_s=1.25,
        max_plans_in_flight=4,
        layout=LAYOUT,
        shards=(model.ShardInfo(model.Shard(), 1, "h:1", True),),
        num_device_blocks=10,
        num_host_blocks=5,
    )
    message = codec.opened_to_proto(session, 1)
    grant = message.grant
    signing.verify(KEY, signing.GRANT, grant.type, grant.payload, grant.signature, field="grant")
    wanted = tpb.SessionGrant(
        pool_id="p",
        shard_epochs=[1, 2],
        incarnation=3,
        session_id=7,
        tenant="t",
        layout_fingerprint=LAYOUT.fingerprint,
        max_plans_in_flight=4,
    )
    assert tpb.SessionGrant.FromString(grant.payload) == wanted
    assert (message.time_to_live.seconds, message.time_to_live.nanos) == (1, 250_000_000)
    assert KEY not in message.SerializeToString()
