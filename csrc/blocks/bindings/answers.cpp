// Answers to steps, encoded with one copy of their plan, which may be some megabytes long.
#include "bindings/bindings.h"
#include "bindings/columns.h"
#include "core/pool.h"
#include "steps/proto_writer.h"

namespace py = pybind11;

namespace kvplane::blocks {
namespace {

// What a StepResponse holds; payload, signature and news are empty where it has none.
struct StepAnswer {
  int64_t number;
  std::string_view results;  // the field `results` of a StepResult, encoded
  std::string_view payload;
  std::string_view signature;
  int64_t revision;
  std::string_view news;
};

// Writes a nested message, whose fields `write` writes.
template <typename Fields, typename Write>
void write_message(Fields& fields, uint32_t field, const Write& write) {
  ProtoSize size;
  write(size);
  fields.message(field, size.num_bytes());
  write(fields);
}

// The field `usage` of a StepResult: a TierUsage for each tier of each group.
template <typename Fields>
void write_usage(Fields& fields, Groups groups) {
  for (int64_t g = 0; g < groups.size; ++g)
    for (const Tier tier : {kDevice, kHost})
      write_message(fields, 3, [&](auto& usage) {
        const auto num_in = [&](State state) { return groups[g]->num_in(tier, state); };
        usage.varint(1, g);
        usage.varint(2, tier);
        usage.varint(3, groups[g]->num_blocks(tier));
        usage.varint(4, num_in(State::kFree));
        usage.varint(5, num_in(State::kCached));
        usage.varint(6, num_in(State::kHeld) + num_in(State::kPinned));
        usage.varint(7, num_in(State::kRetired));
      });
}

// A StepResponse.
template <typename Fields>
void write_answer(Fields& fields, const StepAnswer& answer, Groups groups) {
  fields.varint(1, answer.number);
  write_message(fields, 2, [&](auto& result) {
    result.encoded(answer.results);
    if (!answer.payload.empty())
      write_message(result, 2, [&](auto& plan) {
        plan.bytes(1, "kvplane.v1.Plan");
        plan.bytes(2, answer.payload);
        plan.bytes(3, answer.signature);
      });
    write_usage(result, groups);
    result.varint(4, answer.revision);
    result.bytes(5, answer.news);
  });
}

template <typename P>
py::bytes encode(P& pool, const StepAnswer& answer) {
  return in_groups(pool, [&](Groups groups) {
    ProtoSize size;
    write_answer(size, answer, groups);
    py::bytes encoded = make_bytes(size.num_bytes());
    ProtoWriter writer(PyBytes_AS_STRING(encoded.ptr()));
    write_answer(writer, answer, groups);
    return encoded;
  });
}

template <typename P>
void bind_answers_of(py::class_<P>& pool) {
  pool.def(
      "answer",
      [](P& self, int64_t number, const py::bytes& results, const py::bytes& payload,
         const py::bytes& signature, int64_t revision, const py::bytes& news) {
        return encode(self, {number, results, payload, signature, revision, news});
      },
      py::arg("number"), py::arg("results"), py::arg("payload"), py::arg("signature"),
      py::arg("revision"), py::arg("news"));
}

}  // namespace

void bind_answers(py::module_& module) {
  auto pool = py::reinterpret_borrow<py::class_<Pool>>(module.attr("Pool"));
  bind_answers_of(pool);
  auto grouped = py::reinterpret_borrow<py::class_<GroupedPool>>(module.attr("GroupedPool"));
  bind_answers_of(grouped);
}

}  // namespace kvplane::blocks
