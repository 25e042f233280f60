// Steps of the most common shapes: from the request's bytes to the plan, and from its signature to
// the answer's bytes, with one call each.
#include <chrono>
#include <tuple>

#include "bindings/bindings.h"
#include "bindings/columns.h"
#include "core/pool.h"
#include "index/hash.h"
#include "steps/plain_step.h"
#include "steps/proto_writer.h"

namespace py = pybind11;

namespace kvplane::blocks {
namespace {

// A request that was read; `data` keeps the bytes that the views of `step` show.
struct PlainRequest {
  py::bytes data;
  PlainStep step;
};

py::object read_request(const py::bytes& data) {
  auto step = read_plain_step(std::string_view(data));
  if (!step) return py::none();
  return py::cast(PlainRequest{data, std::move(*step)});
}

// The same digest as Python's `content_of` of the message.
py::bytes content_of(const PlainRequest& request) {
  std::string prefix = "step " + std::to_string(request.step.number);
  const std::string_view operation = request.step.operation;
  if (!operation.empty()) prefix += std::to_string(operation.size()) + " ";
  const Hash hash = digest_of(prefix, operation);
  return py::bytes(reinterpret_cast<const char*>(hash.data()), hash.size());
}

py::list receipts_of(const PlainRequest& request) {
  py::list list;
  for (const SignedReceipt& receipt : request.step.receipts)
    list.append(py::make_tuple(receipt.plan_number, receipt.shard_index,
                               py::bytes(receipt.payload.data(), receipt.payload.size()),
                               py::bytes(receipt.signature.data(), receipt.signature.size())));
  return list;
}

// The result of an operation, and the items that were refused.
struct Ran {
  py::object done = py::none();
  py::object failures = py::none();
  bool is_refused = false;  // an admission, which has changed nothing
};

template <typename P>
Ran run_operation(P& pool, SessionHandle handle, const PlainStep& step, int64_t headroom) {
  Ran ran;
  in_groups(pool, [&](Groups groups) {
    if (step.kind == PlainKind::kAppend) {
      const ItemResults results = Pool::append(groups, handle, step.columns());
      ran.done = pack(results.values);
      ran.failures = as_list(results.failures);
    } else if (step.kind == PlainKind::kAdmit) {
      const auto result = Pool::admit(groups, handle, step.admission(headroom));
      ran.is_refused = std::holds_alternative<Failure>(result);
      ran.done = as_tuple(result);
    }
    return 0;
  });
  return ran;
}

// Applies receipts, then the operation, and makes the plan. Returns None, with nothing changed, if
// that may take long or an append is not sure to find room. Returns the failure of an admission
// that is refused: the step has begun, and there is no plan yet.
template <typename P>
py::object run(P& pool, SessionHandle handle, const PlainRequest& request, int64_t done,
               int64_t headroom, int64_t most_tokens, const py::bytes& prefix) {
  const PlainStep& step = request.step;
  if (first_of(pool).session(checked(pool, handle)).resync_due) return py::none();
  if (pool.num_tokens_in_flight(handle) > most_tokens) return py::none();
  const int64_t growth = step.most_growth(first_of(pool).index().block_size());
  if (growth > pool.num_obtainable(handle, kDevice)) return py::none();
  if (headroom < 0) throw py::value_error("headroom must not be negative");
  pool.receipted(handle, done);
  pool.begin(handle, step.number);
  const auto began = std::chrono::steady_clock::now();
  const Ran ran = run_operation(pool, handle, step, headroom);
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - began;
  if (ran.is_refused) return py::make_tuple(ran.done, spent.count());
  return py::make_tuple(ran.done, ran.failures, finish_plan(pool, handle, prefix), spent.count());
}

// Writes a nested message, whose fields `write` writes.
template <typename Fields, typename Write>
void write_message(Fields& fields, uint32_t field, const Write& write) {
  ProtoSize size;
  write(size);
  fields.message(field, size.num_bytes());
  write(fields);
}

template <typename Fields>
void write_usage(Fields& fields, Groups groups) {
  for (int64_t g = 0; g < groups.size; ++g)
    for (const Tier tier : {kDevice, kHost})
      write_message(fields, 1, [&](auto& usage) {
        const auto num_in = [&](State state) { return groups[g]->num_in(tier, state); };
        usage.varint(1, tier);
        usage.varint(2, groups[g]->num_blocks(tier));
        usage.varint(3, num_in(State::kFree));
        usage.varint(4, num_in(State::kCached));
        usage.varint(5, num_in(State::kHeld) + num_in(State::kPinned));
        usage.varint(6, num_in(State::kRetired));
        usage.varint(8, g);
      });
}

// The result of an operation: blocks of tables, or three numbers of an admission.
template <typename Fields>
void write_done(Fields& fields, const py::object& done) {
  if (py::isinstance<py::bytes>(done)) {
    const std::string_view num_blocks = py::reinterpret_borrow<py::bytes>(done);
    write_message(fields, 3, [&](auto& append) { append.bytes(1, num_blocks); });
    return;
  }
  const auto [num_cached, num_blocks, num_scheduled] =
      done.cast<std::tuple<int64_t, int64_t, int64_t>>();
  write_message(fields, 2, [&, a = num_cached, b = num_blocks, c = num_scheduled](auto& admit) {
    admit.varint(1, a);
    admit.varint(2, b);
    admit.varint(3, c);
  });
}

// A StepResponse.
template <typename P>
py::bytes encode_answer(P& pool, int64_t number, const py::object& done, const py::object& payload,
                        const py::bytes& signature, int64_t revision) {
  const auto write_result = [&](auto& result) {
    if (!done.is_none())
      write_message(result, 1, [&](auto& operation) { write_done(operation, done); });
    if (!payload.is_none())
      write_message(result, 2, [&](auto& plan) {
        plan.bytes(1, "kvplane.v1.Plan");
        plan.bytes(2, std::string_view(py::reinterpret_borrow<py::bytes>(payload)));
        plan.bytes(3, std::string_view(signature));
      });
    write_message(result, 3, [&](auto& usage) {
      in_groups(pool, [&](Groups groups) {
        write_usage(usage, groups);
        return 0;
      });
    });
    result.varint(4, revision);
  };
  const auto write_response = [&](auto& response) {
    response.varint(1, number);
    write_message(response, 2, write_result);
  };
  ProtoSize size;
  write_response(size);
  py::bytes answer = make_bytes(size.num_bytes());
  ProtoWriter writer(PyBytes_AS_STRING(answer.ptr()));
  write_response(writer);
  return answer;
}

template <typename P>
void bind_runs(py::class_<P>& pool) {
  pool.def("plain_step", &run<P>, py::arg("handle"), py::arg("request"), py::arg("done"),
           py::arg("headroom"), py::arg("most_tokens"), py::arg("prefix"));
  pool.def("plain_answer", &encode_answer<P>, py::arg("number"), py::arg("done"),
           py::arg("payload"), py::arg("signature"), py::arg("revision"));
}

}  // namespace

void bind_plain_steps(py::module_& module) {
  py::class_<PlainRequest> request(module, "PlainStep");
  request.def_static("read", &read_request, py::arg("data"));
  request.def_readonly("data", &PlainRequest::data);
  request.def_property_readonly("incarnation",
                                [](const PlainRequest& r) { return r.step.incarnation; });
  request.def_property_readonly("session_id",
                                [](const PlainRequest& r) { return r.step.session_id; });
  request.def_property_readonly("number", [](const PlainRequest& r) { return r.step.number; });
  request.def_property_readonly("num_items",
                                [](const PlainRequest& r) { return r.step.sequence_ids.size; });
  request.def_property_readonly("kind", [](const PlainRequest& r) {
    return r.step.kind == PlainKind::kNone    ? ""
           : r.step.kind == PlainKind::kAdmit ? "admit"
                                              : "append";
  });
  request.def_property_readonly("sequence_id",
                                [](const PlainRequest& r) { return r.step.sequence_id; });
  request.def_property_readonly("num_tokens",
                                [](const PlainRequest& r) { return r.step.token_ids.size; });
  request.def_property_readonly("content", &content_of);
  request.def_property_readonly("receipts", &receipts_of);
  module.attr("MAX_PLAIN_RECEIPTS") = kMaxPlainReceipts;
  auto pool = py::reinterpret_borrow<py::class_<Pool>>(module.attr("Pool"));
  bind_runs(pool);
  auto grouped = py::reinterpret_borrow<py::class_<GroupedPool>>(module.attr("GroupedPool"));
  bind_runs(grouped);
}

}  // namespace kvplane::blocks
