// Answers to steps, encoded with one copy of their plan, which may be some megabytes long.
#include "bindings/bindings.h"
#include "bindings/columns.h"
#include "sessions/proto_writer.h"

namespace py = pybind11;

namespace kvplane::blocks {
namespace {

// What a StepResponse holds; payload, signature and news are empty where it has none.
struct StepAnswer {
  int64_t number;            // of the request
  std::string_view results;  // the field `results` of a StepResponse, encoded
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
        const BlockStore& blocks = groups[g]->stores[tier];
        const auto num_in = [&](State state) { return int64_t{blocks.num_in(state)}; };
        usage.varint(1, g);
        usage.varint(2, tier);
        usage.varint(3, blocks.num_blocks);
        usage.varint(4, num_in(State::kFree));
        usage.varint(5, num_in(State::kCached));
        usage.varint(6, num_in(State::kHeld) + num_in(State::kPinned));
        usage.varint(7, num_in(State::kRetired));
      });
}

// A StepResponse.
template <typename Fields>
void write_step(Fields& fields, const StepAnswer& answer, Groups groups) {
  fields.encoded(answer.results);
  if (!answer.payload.empty())
    write_message(fields, 2, [&](auto& plan) {
      plan.bytes(1, "kvplane.plane.v1.Plan");
      plan.bytes(2, answer.payload);
      plan.bytes(3, answer.signature);
    });
  write_usage(fields, groups);
  fields.varint(4, answer.revision);
  fields.bytes(5, answer.news);
}

// A StreamStepsResponse with a StepResponse at its end, and the bytes before that one.
py::tuple encode(const StepAnswer& answer, Groups groups) {
  ProtoSize step, whole;
  write_step(step, answer, groups);
  const auto write = [&](auto& fields) {
    fields.varint(1, answer.number);
    fields.message(2, step.num_bytes());
    write_step(fields, answer, groups);
  };
  write(whole);
  py::bytes encoded = make_bytes(whole.num_bytes());
  ProtoWriter writer(PyBytes_AS_STRING(encoded.ptr()));
  write(writer);
  return py::make_tuple(encoded, whole.num_bytes() - step.num_bytes());
}

}  // namespace

void bind_answers(PoolClass& pool) {
  pool.def(
      "answer",
      [](const Pool& self, int64_t number, const py::bytes& results, const py::bytes& payload,
         const py::bytes& signature, int64_t revision, const py::bytes& news) {
        return encode({number, results, payload, signature, revision, news}, self.groups());
      },
      "number"_a, "results"_a, "payload"_a, "signature"_a, "revision"_a, "news"_a);
}

}  // namespace kvplane::blocks
