// IdMap does what std::unordered_map does, however full it is and in whichever order keys go.

#include <cstdint>
#include <limits>
#include <random>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "containers/id_map.h"

namespace kvplane::blocks {
namespace {

using Model = std::unordered_map<int64_t, uint32_t>;

void check_equal(const IdMap& map, const Model& model) {
  CHECK(map.size() == model.size());
  size_t num_visited = 0;
  map.for_each([&](int64_t key, uint32_t value) {
    const auto found = model.find(key);
    CHECK(found != model.end() && found->second == value);
    ++num_visited;
  });
  CHECK(num_visited == model.size());
  for (const auto& [key, value] : model) {
    const uint32_t* found = map.find(key);
    CHECK(found != nullptr && *found == value);
  }
}

// Few keys make the map's runs wrap around its end, many make it grow.
void random_operations(uint64_t seed, int64_t num_keys, int num_operations) {
  std::mt19937_64 random(seed);
  IdMap map(random());
  Model model;
  for (int i = 0; i < num_operations; ++i) {
    const int64_t key = 1 + static_cast<int64_t>(random() % num_keys);
    const uint32_t value = static_cast<uint32_t>(random());
    if (random() % 64 == 0) map.reserve(random() % 64);
    switch (random() % 4) {
      case 0:
      case 1:
        CHECK(map.insert(key, value) == model.emplace(key, value).second);
        break;
      case 2:
        CHECK(map.erase(key) == (model.erase(key) == 1));
        CHECK(map.find(key) == nullptr);
        break;
      default:
        if (uint32_t* found = map.find(key)) {
          *found = value;
          model.at(key) = value;
        } else {
          CHECK(model.count(key) == 0);
        }
    }
    if (i % 64 == 0 || num_keys <= 16) check_equal(map, model);
  }
  check_equal(map, model);
  map.clear();
  check_equal(map, Model());
  CHECK(map.insert(1, 2) && *map.find(1) == 2);
}

void largest_and_neighbouring_keys() {
  IdMap map;
  const int64_t last = std::numeric_limits<int64_t>::max();
  CHECK(map.find(last) == nullptr && !map.erase(last));
  CHECK(map.insert(last, std::numeric_limits<uint32_t>::max()));
  CHECK(!map.insert(last, 0));
  CHECK(*map.find(last) == std::numeric_limits<uint32_t>::max());
  for (int64_t key = 1; key <= 100000; ++key) CHECK(map.insert(key, static_cast<uint32_t>(key)));
  for (int64_t key = 1; key <= 100000; key += 2) CHECK(map.erase(key));
  CHECK(map.size() == 50001);
  for (int64_t key = 1; key <= 100000; ++key) CHECK((map.find(key) != nullptr) == (key % 2 == 0));
}

void keys_that_are_none() {
  IdMap map;
  CHECK(map.insert(3, 4));
  for (const int64_t key : {int64_t{0}, int64_t{-1}, std::numeric_limits<int64_t>::min()})
    CHECK(map.find(key) == nullptr && !map.erase(key));
  CHECK(map.size() == 1);
}

}  // namespace
}  // namespace kvplane::blocks

int main() {
  using namespace kvplane::blocks;
  for (uint64_t seed = 0; seed < 200; ++seed) random_operations(seed, 6 + seed % 8, 500);
  for (uint64_t seed = 0; seed < 10; ++seed) random_operations(seed, 2000, 20000);
  largest_and_neighbouring_keys();
  keys_that_are_none();
}
