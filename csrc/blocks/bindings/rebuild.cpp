// Rebuilding a layer group from its shards' reports.
#include "recovery/rebuild.h"

#include <memory>

#include "bindings/bindings.h"
#include "bindings/columns.h"

namespace kvplane::blocks {
namespace {

uint32_t checked_shard(const Rebuild& rebuild, uint32_t shard) {
  if (shard >= rebuild.num_shards()) throw py::index_error("there is no such shard");
  if (rebuild.has_begun()) throw py::value_error("the pool is being built");
  return shard;
}

void bind_reports(py::class_<Rebuild>& rebuild) {
  rebuild.def(
      "start_shard",
      [](Rebuild& self, uint32_t shard, uint32_t num_device_blocks, uint32_t num_host_blocks) {
        check_num_blocks(num_device_blocks, num_host_blocks);
        self.start_shard(checked_shard(self, shard), num_device_blocks, num_host_blocks);
      },
      "shard"_a, "num_device_blocks"_a, "num_host_blocks"_a);
  rebuild.def(
      "add_blocks",
      [](Rebuild& self, uint32_t shard, Tier tier, const py::bytes& indices,
         const py::bytes& generations) {
        const auto blocks = read<int32_t>(indices, "indices");
        self.add_blocks(checked_shard(self, shard), tier, blocks,
                        read<int64_t>(generations, "generations", blocks.size));
      },
      "shard"_a, "tier"_a, "indices"_a, "generations"_a);
  rebuild.def(
      "add_publications",
      [](Rebuild& self, uint32_t shard, const py::bytes& root, const py::bytes& indices,
         const py::bytes& generations, const py::bytes& parent_indices,
         const py::bytes& parent_generations, const py::bytes& hashes, const py::bytes& token_ids) {
        PublicationColumns columns;
        columns.indices = read<int32_t>(indices, "indices");
        const int64_t num = columns.indices.size;
        columns.generations = read<int64_t>(generations, "generations", num);
        columns.parent_indices = read<int32_t>(parent_indices, "parent_indices", num);
        columns.parent_generations = read<int64_t>(parent_generations, "parent_generations", num);
        columns.hashes = read<uint8_t>(hashes, "hashes");
        columns.token_ids = read<int32_t>(token_ids, "token_ids");
        if (columns.hashes.size != num * static_cast<int64_t>(sizeof(Hash)))
          throw ColumnError("hashes", -1, "must hold 16 bytes for each block");
        if (columns.token_ids.size != num * self.block_size())
          throw ColumnError("token_ids", -1, "must hold each block's tokens");
        self.add_publications(checked_shard(self, shard), std::string_view(root), columns);
      },
      "shard"_a, "root"_a, "indices"_a, "generations"_a, "parent_indices"_a, "parent_generations"_a,
      "hashes"_a, "token_ids"_a);
}

}  // namespace

void bind_rebuild(py::module_& module) {
  py::class_<Rebuild> rebuild(module, "Rebuild");
  rebuild.def(py::init([](uint32_t block_size_tokens, uint32_t num_shards, const Rebuild* whole) {
                if (num_shards < 1) throw py::value_error("num_shards must be at least 1");
                if (whole && (whole->block_size() != block_size_tokens ||
                              whole->num_shards() != num_shards || whole->is_of_states()))
                  throw py::value_error("whole must be of the same blocks and shards");
                return std::make_unique<Rebuild>(block_size_tokens, num_shards, whole);
              }),
              "block_size_tokens"_a, "num_shards"_a, "whole"_a = nullptr, py::keep_alive<1, 4>());
  bind_reports(rebuild);
  rebuild.def(
      "begin",
      [](Rebuild& self, double now_s, const py::kwargs& settings) {
        if (self.has_begun() || !self.has_all_shards())
          throw py::value_error("each shard must be started, and the pool not begun");
        self.begin(make_config(self.block_size(), settings), now_s);
      },
      "now_s"_a = 0.0);
  rebuild.def("step", &Rebuild::step, "max_blocks"_a);
  rebuild.def("take", [](Rebuild& self) {
    if (!self.is_done()) throw py::value_error("the pool is not complete");
    return self.take();
  });
  rebuild.def_property_readonly("num_restored", &Rebuild::num_restored);
  rebuild.def_property_readonly("num_roots", &Rebuild::num_roots);
}

}  // namespace kvplane::blocks
