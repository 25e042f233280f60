// A pool's calls besides its steps: metrics, retention, forgetting, watching, rebuilding, memory.
#include <pybind11/typing.h>

#include <memory>

#include "bindings/bindings.h"
#include "bindings/columns.h"
#include "recovery/rebuild.h"

namespace kvplane::blocks {
namespace {

using PoolClass = py::class_<Pool>;

std::pair<int64_t, int64_t> as_pair(const Forgotten& forgotten) {
  return {forgotten.num_blocks, forgotten.num_in_use};
}

template <typename P>
void bind_prefixes(py::class_<P>& pool) {
  pool.def(
      "retain",
      [](P& self, const py::bytes& root, uint32_t owner, const py::bytes& token_ids, int priority,
         double expires_at_s, int64_t most_blocks) -> py::tuple {
        if (priority < 1 || priority > 100) throw py::value_error("priority must be from 1 to 100");
        const auto tokens = read<int32_t>(token_ids, "token_ids");
        const auto result = in_groups(self, [&](Groups groups) {
          return Pool::retain(groups, std::string_view(root), owner, tokens,
                              static_cast<uint8_t>(priority), expires_at_s, most_blocks);
        });
        if (const auto* failure = std::get_if<Failure>(&result))
          return py::make_tuple(failure->item, static_cast<int>(failure->code), failure->a,
                                failure->b, failure->c);
        const auto& retained = std::get<Retained>(result);
        return py::make_tuple(retained.num_blocks, retained.num_new);
      },
      py::arg("root"), py::arg("owner"), py::arg("token_ids"), py::arg("priority"),
      py::arg("expires_at_s"), py::arg("most_blocks"));
  pool.def(
      "release_retained",
      [](P& self, const py::bytes& root, uint32_t owner, const py::bytes& token_ids) {
        return self.release_retained(std::string_view(root), owner,
                                     read<int32_t>(token_ids, "token_ids"));
      },
      py::arg("root"), py::arg("owner"), py::arg("token_ids"));
  pool.def(
      "forget",
      [](P& self, const py::bytes& root, const py::bytes& token_ids, bool force,
         int64_t most_counted) {
        const auto tokens = read<int32_t>(token_ids, "token_ids");
        return in_groups(self, [&](Groups groups) {
          return as_pair(Pool::forget(groups, std::string_view(root), tokens, force, most_counted));
        });
      },
      py::arg("root"), py::arg("token_ids"), py::arg("force"), py::arg("most_counted"));
  pool.def(
      "forget_roots",
      [](P& self, const py::list& roots, bool force) {
        std::vector<std::string_view> names;
        for (const auto& root : roots) names.push_back(py::cast<std::string_view>(root));
        return in_groups(
            self, [&](Groups groups) { return as_pair(Pool::forget_roots(groups, names, force)); });
      },
      py::arg("roots"), py::arg("force"));
}

void bind_retention(PoolClass& pool) {
  pool.def("num_retained", &Pool::num_retained, py::arg("owner"));
}

void bind_forgetting(PoolClass& pool) {
  pool.def("roots", [](const Pool& self) {
    py::list names;
    for (const EntryId root : self.index().roots())
      names.append(py::bytes(self.index().root_name(root)));
    return names;
  });
  pool.def("forget_some", &Pool::forget_some, py::arg("max_entries"));
  pool.def(
      "take_forgotten",
      [](Pool& self, size_t max_blocks) {
        std::vector<int32_t> indices;
        std::vector<int64_t> generations;
        auto& forgotten = self.forgotten();
        for (; indices.size() < max_blocks && !forgotten.empty(); forgotten.pop_front()) {
          indices.push_back(static_cast<int32_t>(forgotten.front().first));
          generations.push_back(forgotten.front().second);
        }
        return py::make_tuple(pack(indices), pack(generations));
      },
      py::arg("max_blocks"));
}

// For each tier: evictions by reason, then three histograms, each its counts and its sum.
py::typing::List<double> block_times(const Pool& pool) {
  py::typing::List<double> values;
  for (const Tier tier : {kDevice, kHost}) {
    const BlockTimes& times = pool.block_times(tier);
    for (const int64_t num : times.num_evictions) values.append(static_cast<double>(num));
    for (const Durations* durations : {&times.lifetime, &times.idle, &times.reuse_gap}) {
      for (const int64_t num : durations->counts) values.append(static_cast<double>(num));
      values.append(durations->sum_s);
    }
  }
  return values;
}

void bind_metrics(PoolClass& pool) {
  pool.def("block_times", &block_times);
  pool.def(
      "num_sequences_in",
      [](const Pool& self, int tier) { return self.num_sequences_in(tier_of(tier)); },
      py::arg("tier"));
  pool.def("oldest_release_s", &Pool::oldest_release_s);
}

void bind_watching(PoolClass& pool) {
  pool.def(
      "watch_enable", [](Pool& self, size_t max_events) { self.feed().keep(max_events); },
      py::arg("max_events"));
  pool.def(
      "changes_since",
      [](const Pool& self, int64_t revision, const py::bytes& root,
         size_t max_events) -> py::typing::Optional<py::tuple> {
        ChangeColumns changes;
        if (!self.feed().log().since(revision, std::string_view(root), max_events, changes))
          return py::none();
        return py::make_tuple(changes.revision, pack(changes.kinds), pack(changes.tiers),
                              py::bytes(changes.hashes), py::bytes(changes.parent_hashes),
                              pack(changes.token_ids));
      },
      py::arg("revision"), py::arg("root"), py::arg("max_events"));
  pool.def(
      "snapshot",
      [](const Pool& self, const py::bytes& root, int64_t cursor, size_t max_blocks) {
        if (cursor < 0 || cursor > kNoEntry) throw py::value_error("cursor is not one of a part");
        ChangeColumns blocks;
        const EntryId next = snapshot(self.index(), std::string_view(root),
                                      static_cast<EntryId>(cursor), max_blocks, blocks);
        return py::make_tuple(next == kNoEntry ? -1 : static_cast<int64_t>(next),
                              self.feed().revision(), pack(blocks.tiers), py::bytes(blocks.hashes),
                              py::bytes(blocks.parent_hashes), pack(blocks.token_ids));
      },
      py::arg("root"), py::arg("cursor"), py::arg("max_blocks"));
  pool.def_property_readonly("num_token_chunks", &Pool::num_token_chunks);
  pool.def("memory", [](const Pool& self) {
    const PrefixIndex& index = self.index();
    return py::make_tuple(self.store(kDevice).num_bytes() + self.store(kHost).num_bytes() +
                              index.num_bytes_of_blocks(),
                          index.num_bytes_of_entries(), index.num_entries());
  });
}

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
      py::arg("shard"), py::arg("num_device_blocks"), py::arg("num_host_blocks"));
  rebuild.def(
      "add_blocks",
      [](Rebuild& self, uint32_t shard, int tier, const py::bytes& indices,
         const py::bytes& generations) {
        const auto blocks = read<int32_t>(indices, "indices");
        self.add_blocks(checked_shard(self, shard), tier_of(tier), blocks,
                        read<int64_t>(generations, "generations", blocks.size));
      },
      py::arg("shard"), py::arg("tier"), py::arg("indices"), py::arg("generations"));
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
      py::arg("shard"), py::arg("root"), py::arg("indices"), py::arg("generations"),
      py::arg("parent_indices"), py::arg("parent_generations"), py::arg("hashes"),
      py::arg("token_ids"));
}

void bind_rebuild(py::module_& module) {
  py::class_<Rebuild> rebuild(module, "Rebuild");
  rebuild.def(py::init([](uint32_t block_size_tokens, uint32_t num_shards) {
                if (num_shards < 1) throw py::value_error("num_shards must be at least 1");
                return std::make_unique<Rebuild>(block_size_tokens, num_shards);
              }),
              py::arg("block_size_tokens"), py::arg("num_shards"));
  bind_reports(rebuild);
  rebuild.def(
      "begin",
      [](Rebuild& self, const py::bytes& device_generations, const py::bytes& host_generations,
         const std::string& eviction_policy, int64_t window_tokens, int64_t max_sequences,
         int64_t max_table_entries, int64_t max_owner_blocks, uint64_t seed, double now_s) {
        if (self.has_begun() || !self.has_all_shards())
          throw py::value_error("each shard must be started, and the pool not begun");
        self.begin(
            make_config(self.block_size(), device_generations, host_generations, eviction_policy,
                        window_tokens, max_sequences, max_table_entries, max_owner_blocks, seed),
            now_s);
      },
      py::arg("device_generations"), py::arg("host_generations"), py::arg("eviction_policy"),
      py::arg("window_tokens") = 0, py::arg("max_sequences") = 65536,
      py::arg("max_table_entries") = 4194304, py::arg("max_owner_blocks") = 0, py::arg("seed") = 0,
      py::arg("now_s") = 0.0);
  rebuild.def("step", &Rebuild::step, py::arg("max_blocks"));
  rebuild.def("take", [](Rebuild& self) {
    if (!self.is_done()) throw py::value_error("the pool is not complete");
    return self.take();
  });
  rebuild.def_property_readonly("num_restored", &Rebuild::num_restored);
  rebuild.def_property_readonly("num_roots", &Rebuild::num_roots);
}

}  // namespace

void bind_extras(py::module_& module) {
  auto pool = py::reinterpret_borrow<PoolClass>(module.attr("Pool"));
  bind_prefixes(pool);
  bind_retention(pool);
  bind_forgetting(pool);
  bind_metrics(pool);
  bind_watching(pool);
  bind_rebuild(module);
  module.def("duration_bounds_s", [] {
    py::typing::List<double> bounds;
    for (const double bound : Durations::kBounds) bounds.append(bound);
    return bounds;
  });
  auto grouped = py::reinterpret_borrow<py::class_<GroupedPool>>(module.attr("GroupedPool"));
  bind_prefixes(grouped);
}

}  // namespace kvplane::blocks
