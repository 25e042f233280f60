#include "steps/families.h"

#include <algorithm>
#include <utility>

#include "core/require.h"

namespace kvplane::blocks {

namespace {

void note_changed(Session& session, int64_t id, Family& family) {
  if (!std::exchange(family.has_changed, true)) session.changed_families.push_back(id);
}

}  // namespace

void Families::join(Session& session, uint32_t index, int64_t id) {
  if (!counts_) return;
  Sequence& sequence = sequences_[index];
  Family& family = session.families[id];
  sequence.family = id;
  sequence.family_place = static_cast<uint32_t>(family.members.size());
  sequence.claims_device = sequence.tier == kDevice;
  family.members.push_back(index);
  family.num_on_device += sequence.claims_device;
  note_changed(session, id, family);
}

void Families::leave(Session& session, uint32_t index) {
  if (!counts_) return;
  const Sequence& sequence = sequences_[index];
  Family& family = session.families.at(sequence.family);
  const uint32_t last = family.members.back();
  family.members[sequence.family_place] = last;
  sequences_[last].family_place = sequence.family_place;
  family.members.pop_back();
  family.num_on_device -= sequence.claims_device;
  note_changed(session, sequence.family, family);
}

void Families::claim_device(Session& session, uint32_t index, bool claims) {
  Sequence& sequence = sequences_[index];
  if (!counts_ || sequence.claims_device == claims) return;
  sequence.claims_device = claims;
  Family& family = session.families.at(sequence.family);
  family.num_on_device += claims ? 1 : -1;
  note_changed(session, sequence.family, family);
}

std::vector<FamilyEvent> Families::take_events(Session& session) const {
  std::vector<FamilyEvent> events;
  for (const int64_t id : session.changed_families) {
    const auto found = session.families.find(id);
    Family& family = found->second;
    family.has_changed = false;
    const Family::Reported reported = family.reported;
    if (family.members.empty()) {
      if (reported == Family::Reported::kOnDevice) events.push_back({FamilyChange::kEnded, id});
      if (reported == Family::Reported::kOnHost) events.push_back({FamilyChange::kEndedOnHost, id});
      session.families.erase(found);
    } else if (family.num_on_device && reported != Family::Reported::kOnDevice) {
      family.reported = Family::Reported::kOnDevice;
      events.push_back({FamilyChange::kStarted, id});
    } else if (!family.num_on_device && reported == Family::Reported::kOnDevice) {
      family.reported = Family::Reported::kOnHost;
      events.push_back({FamilyChange::kLeftDevice, id});
    }
  }
  session.changed_families.clear();
  return events;
}

std::vector<int64_t> Families::on_device(const Session& session, int64_t family) const {
  std::vector<int64_t> ids;
  const auto& families = session.families;
  const auto found = families.find(family);
  if (found == families.end()) return ids;
  for (const uint32_t index : found->second.members)
    if (sequences_[index].claims_device) ids.push_back(sequences_[index].id);
  std::sort(ids.begin(), ids.end());
  return ids;
}

void Families::check(const Session& session) const {
  const Require require("families");
  size_t num = 0;
  for (const auto& [id, family] : session.families) {
    int64_t num_on_device = 0;
    for (size_t i = 0; i < family.members.size(); ++i) {
      const Sequence& sequence = sequences_[family.members[i]];
      require(sequence.live && sequence.handle == session.handle && sequence.family == id &&
                  sequence.family_place == i,
              "a member is not");
      require(!session.swapping.indices.empty() || session.aborting.begun ||
                  sequence.claims_device == (sequence.tier == kDevice),
              "a member's tier differs");
      num_on_device += sequence.claims_device;
    }
    require(num_on_device == family.num_on_device, "members on the device are miscounted");
    require(!family.members.empty() || family.has_changed, "one is empty");
    num += family.members.size();
  }
  const size_t num_counted = counts_ && session.open ? session.sequences.size() : 0;
  require(num == num_counted, "sequences have none");
}

}  // namespace kvplane::blocks
