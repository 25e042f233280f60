// The operations of a step, and the calls that follow its plan.
#include <string>

#include "bindings/bindings.h"
#include "bindings/columns.h"

namespace py = pybind11;

namespace kvplane::blocks {
namespace {

// Checks that num_tokens, each at_least or more, add up to the tokens given.
void check_tokens(Span<int32_t> num_tokens, Span<int32_t> token_ids, int32_t at_least) {
  int64_t sum = 0;
  for (int64_t i = 0; i < num_tokens.size; ++i) {
    if (num_tokens[i] < at_least)
      throw ColumnError("num_tokens", i, "must be at least " + std::to_string(at_least));
    sum += num_tokens[i];
  }
  if (sum != token_ids.size)
    throw ColumnError("token_ids", -1,
                      "must hold " + std::to_string(sum) +
                          " tokens of 4 bytes, the sum of "
                          "num_tokens, but holds " +
                          std::to_string(token_ids.size * 4) + " bytes");
}

py::tuple as_tuple(const ItemResults& results) {
  return py::make_tuple(pack(results.values), as_list(results.failures));
}

// None while some of the swap is left.
py::object as_object(const Pool::Swapped& swapped) {
  if (!swapped) return py::none();
  if (const auto* failure = std::get_if<Failure>(&*swapped)) return as_tuple(*failure);
  return py::int_(std::get<int64_t>(*swapped));
}

Admission read_admission(int64_t sequence_id, const py::bytes& token_ids, const py::bytes& fork_ids,
                         int64_t num_compute, int64_t max_total_tokens, bool skip_lookup,
                         int64_t headroom, int64_t checkpoint = 0) {
  Admission admission;
  admission.sequence_id = sequence_id;
  admission.tokens = read<int32_t>(token_ids, "token_ids");
  if (!admission.tokens.size) throw ColumnError("token_ids", -1, "must hold at least 1 token");
  admission.fork_ids = read<int64_t>(fork_ids, "fork_sequence_ids");
  admission.num_compute = num_compute;
  admission.max_total_tokens = max_total_tokens;
  admission.skip_lookup = skip_lookup;
  if (headroom < 0) throw py::value_error("headroom must not be negative");
  admission.headroom = headroom;
  admission.checkpoint = checkpoint;
  return admission;
}

AppendColumns read_growth(const py::bytes& sequence_ids, const py::bytes& first_positions,
                          const py::bytes& num_slots, const py::bytes& num_lookahead) {
  AppendColumns columns;
  columns.sequence_ids = read<int64_t>(sequence_ids, "sequence_ids");
  const int64_t num = columns.sequence_ids.size;
  columns.first_positions = read<int32_t>(first_positions, "first_positions", num);
  columns.num_slots = read<int32_t>(num_slots, "num_slots", num);
  const int64_t num_ahead = std::string_view(num_lookahead).empty() ? 0 : num;
  columns.num_lookahead = read<int32_t>(num_lookahead, "num_lookahead_slots", num_ahead);
  return columns;
}

// Returns `call(only_check)`; for a check, with the session in the step `check_as`.
template <typename Call>
auto in_step(const Pool& pool, SessionHandle handle, int64_t check_as, const Call& call) {
  const int64_t number = session_of(pool, handle).number;
  const InStep step(pool.groups(), handle, check_as ? check_as : number);
  return call(check_as != 0);
}

// The plan of the step that was begun; None when there is nothing to carry out.
py::object finish_plan(Pool& pool, SessionHandle handle, const py::bytes& prefix) {
  py::object plan = py::none();
  const auto make = [&](size_t num_bytes) {
    plan = make_bytes(num_bytes);
    return PyBytes_AS_STRING(plan.ptr());
  };
  pool.finish(handle, std::string_view(prefix), make);
  return plan;
}

// A bound on the blocks that an append takes, from its columns alone.
int64_t most_growth(const AppendColumns& columns, int64_t block_size) {
  int64_t num_slots = 0;
  for (const Span<int32_t>& slots : {columns.num_slots, columns.num_lookahead})
    for (int64_t i = 0; i < slots.size; ++i) num_slots += std::max(slots[i], 0);
  return 2 * columns.sequence_ids.size + num_slots / block_size;
}

}  // namespace

void bind_steps(PoolClass& pool) {
  pool.def(
      "admit",
      [](Pool& self, SessionHandle handle, int64_t sequence_id, const py::bytes& token_ids,
         const py::bytes& fork_ids, int64_t num_compute, int64_t max_total_tokens, bool skip_lookup,
         int64_t headroom, int64_t check_as, int64_t checkpoint) {
        const Admission admission =
            read_admission(sequence_id, token_ids, fork_ids, num_compute, max_total_tokens,
                           skip_lookup, headroom, checkpoint);
        return in_step(self, handle, check_as, [&](bool only_check) {
          return as_tuple(self.admit(handle, admission, only_check));
        });
      },
      "handle"_a, "sequence_id"_a, "token_ids"_a, "fork_ids"_a, "num_compute"_a,
      "max_total_tokens"_a, "skip_lookup"_a, "headroom"_a, "check_as"_a = 0, "checkpoint"_a = 0);
  pool.def(
      "grant",
      [](Pool& self, SessionHandle handle, int64_t admitted_by, int64_t sequence_id,
         const py::bytes& token_ids, const py::bytes& fork_ids, int64_t num_compute,
         int64_t max_total_tokens, bool skip_lookup, int64_t headroom) {
        const Admission admission = read_admission(sequence_id, token_ids, fork_ids, num_compute,
                                                   max_total_tokens, skip_lookup, headroom);
        checked(self, handle);
        return as_tuple(self.grant(handle, admitted_by, admission));
      },
      "handle"_a, "admitted_by"_a, "sequence_id"_a, "token_ids"_a, "fork_ids"_a, "num_compute"_a,
      "max_total_tokens"_a, "skip_lookup"_a, "headroom"_a);
  pool.def(
      "append",
      [](Pool& self, SessionHandle handle, const py::bytes& sequence_ids,
         const py::bytes& first_positions, const py::bytes& num_slots, const py::bytes& num_tokens,
         const py::bytes& token_ids, const py::bytes& num_lookahead, int64_t check_as,
         bool only_if_sure, const py::bytes& checkpoints) -> py::object {
        AppendColumns columns =
            read_growth(sequence_ids, first_positions, num_slots, num_lookahead);
        columns.num_tokens = read<int32_t>(num_tokens, "num_tokens", columns.sequence_ids.size);
        columns.token_ids = read<int32_t>(token_ids, "token_ids");
        check_tokens(columns.num_tokens, columns.token_ids, 0);
        const int64_t num = std::string_view(checkpoints).empty() ? 0 : columns.sequence_ids.size;
        columns.checkpoints = read<int32_t>(checkpoints, "checkpoint_positions", num);
        return in_step(self, handle, check_as, [&](bool only_check) -> py::object {
          if (only_if_sure && most_growth(columns, self.first().index.block_size()) >
                                  self.num_obtainable(handle, kDevice))
            return py::none();
          return as_tuple(self.append(handle, columns, only_check));
        });
      },
      "handle"_a, "sequence_ids"_a, "first_positions"_a, "num_slots"_a, "num_tokens"_a,
      "token_ids"_a, "num_lookahead"_a, "check_as"_a = 0, "only_if_sure"_a = false,
      "checkpoints"_a = py::bytes());
  pool.def(
      "growth",
      [](Pool& self, SessionHandle handle, const py::bytes& sequence_ids,
         const py::bytes& first_positions, const py::bytes& num_slots,
         const py::bytes& num_lookahead, int64_t check_as) {
        const AppendColumns columns =
            read_growth(sequence_ids, first_positions, num_slots, num_lookahead);
        return in_step(self, handle, check_as,
                       [&](bool) { return pack(self.growth(handle, columns)); });
      },
      "handle"_a, "sequence_ids"_a, "first_positions"_a, "num_slots"_a, "num_lookahead"_a,
      "check_as"_a = 0);
  pool.def(
      "truncate",
      [](Pool& self, SessionHandle handle, const py::bytes& sequence_ids,
         const py::bytes& num_tokens, int64_t check_as) {
        const auto ids = read<int64_t>(sequence_ids, "sequence_ids");
        const auto kept = read<int32_t>(num_tokens, "num_tokens", ids.size);
        return in_step(self, handle, check_as, [&](bool only_check) {
          return as_tuple(self.truncate(handle, ids, kept, only_check));
        });
      },
      "handle"_a, "sequence_ids"_a, "num_tokens"_a, "check_as"_a = 0);
  pool.def(
      "fork",
      [](Pool& self, SessionHandle handle, const py::bytes& parent_ids,
         const py::bytes& sequence_ids, int64_t check_as) {
        const auto ids = read<int64_t>(sequence_ids, "sequence_ids");
        const auto parents = read<int64_t>(parent_ids, "parent_sequence_ids", ids.size);
        return in_step(self, handle, check_as, [&](bool only_check) {
          return as_tuple(self.fork(handle, parents, ids, only_check));
        });
      },
      "handle"_a, "parent_ids"_a, "sequence_ids"_a, "check_as"_a = 0);
  pool.def(
      "free",
      [](Pool& self, SessionHandle handle, const py::bytes& sequence_ids, int64_t check_as) {
        const auto ids = read<int64_t>(sequence_ids, "sequence_ids");
        return in_step(self, handle, check_as, [&](bool only_check) {
          return as_tuple(self.free(handle, ids, only_check));
        });
      },
      "handle"_a, "sequence_ids"_a, "check_as"_a = 0);
  pool.def(
      "pin",
      [](Pool& self, SessionHandle handle, const py::bytes& pin_ids, const py::bytes& num_tokens,
         const py::bytes& token_ids, int64_t headroom, double expires_at_s,
         int64_t check_as) -> py::tuple {
        PinColumns columns;
        columns.pin_ids = read<int64_t>(pin_ids, "pin_ids");
        columns.num_tokens = read<int32_t>(num_tokens, "num_tokens", columns.pin_ids.size);
        columns.token_ids = read<int32_t>(token_ids, "token_ids");
        check_tokens(columns.num_tokens, columns.token_ids, 1);
        if (headroom < 0) throw py::value_error("headroom must not be negative");
        columns.headroom = headroom;
        columns.expires_at_s = expires_at_s;
        const Pinned pinned = in_step(self, handle, check_as, [&](bool only_check) {
          return self.pin(handle, columns, only_check);
        });
        return py::make_tuple(pack(pinned.items.values), as_list(pinned.items.failures),
                              py::make_tuple(pack(pinned.groups), pack(pinned.tiers),
                                             pack(pinned.indices), pack(pinned.generations)));
      },
      "handle"_a, "pin_ids"_a, "num_tokens"_a, "token_ids"_a, "headroom"_a, "expires_at_s"_a,
      "check_as"_a = 0);
  pool.def(
      "unpin",
      [](Pool& self, SessionHandle handle, const py::bytes& pin_ids) {
        self.unpin(checked(self, handle), read<int64_t>(pin_ids, "pin_ids"));
      },
      "handle"_a, "pin_ids"_a);
  pool.def(
      "num_pinned",
      [](const Pool& self, SessionHandle handle) { return session_of(self, handle).num_pinned; },
      "handle"_a);
  pool.def(
      "swap",
      [](Pool& self, SessionHandle handle, const py::bytes& sequence_ids, Tier destination,
         int64_t headroom, int64_t max_blocks, int64_t check_as) -> py::object {
        if (headroom < 0) throw py::value_error("headroom must not be negative");
        const auto ids = read<int64_t>(sequence_ids, "sequence_ids");
        return in_step(self, handle, check_as, [&](bool only_check) {
          return as_object(self.swap(handle, ids, destination, headroom, max_blocks, only_check));
        });
      },
      "handle"_a, "sequence_ids"_a, "destination_tier"_a, "headroom"_a = 0,
      "max_blocks"_a = std::numeric_limits<int64_t>::max(), "check_as"_a = 0);
  pool.def(
      "swap_some",
      [](Pool& self, SessionHandle handle, int64_t max_blocks) {
        return as_object(self.swap_some(checked(self, handle), max_blocks));
      },
      "handle"_a, "max_blocks"_a);
  pool.def(
      "cut",
      [](Pool& self, SessionHandle handle, int64_t sequence_id) {
        sequence_of(self.first(), handle, sequence_id);
        return self.cut(handle, sequence_id);
      },
      "handle"_a, "sequence_id"_a);
  pool.def(
      "finish_sequence",
      [](Pool& self, SessionHandle handle, int64_t sequence_id) {
        sequence_of(self.first(), handle, sequence_id);
        self.finish_sequence(handle, sequence_id);
      },
      "handle"_a, "sequence_id"_a);
  pool.def(
      "reserve",
      [](Pool& self, SessionHandle handle, int64_t sequence_id, int64_t num_blocks) {
        sequence_of(self.first(), handle, sequence_id);
        if (num_blocks < 0) throw py::value_error("num_blocks must not be negative");
        return self.reserve(handle, sequence_id, num_blocks);
      },
      "handle"_a, "sequence_id"_a, "num_blocks"_a);
  pool.def("prepare", of_session(&Pool::prepare), "handle"_a, "max_blocks"_a);
  pool.def(
      "finish",
      [](Pool& self, SessionHandle handle, const py::bytes& prefix) {
        return finish_plan(self, checked(self, handle), prefix);
      },
      "handle"_a, "prefix"_a);
  pool.def(
      "deferred_tokens",
      [](Pool& self, SessionHandle handle, const py::bytes& sequence_ids,
         const py::bytes& admitted_by, const py::bytes& first_positions,
         const py::bytes& num_tokens, const py::bytes& token_ids) -> py::object {
        DeferredColumns columns;
        columns.sequence_ids = read<int64_t>(sequence_ids, "sequence_ids");
        const int64_t num = columns.sequence_ids.size;
        columns.admitted_by = read<int64_t>(admitted_by, "admitted_by", num);
        columns.first_positions = read<int32_t>(first_positions, "first_positions", num);
        columns.num_tokens = read<int32_t>(num_tokens, "num_tokens", num);
        columns.token_ids = read<int32_t>(token_ids, "token_ids");
        check_tokens(columns.num_tokens, columns.token_ids, 1);
        for (int64_t i = 0; i < columns.token_ids.size; ++i)
          if (columns.token_ids[i] < 0) throw ColumnError("token_ids", i, "must not be negative");
        const auto failures = self.deferred_tokens(checked(self, handle), columns);
        if (failures.empty()) return py::none();
        return as_tuple(failures[0]);
      },
      "handle"_a, "sequence_ids"_a, "admitted_by"_a, "first_positions"_a, "num_tokens"_a,
      "token_ids"_a);
}

}  // namespace kvplane::blocks
