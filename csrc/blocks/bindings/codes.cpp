// Why items are refused, as constants of the module.
#include "bindings/bindings.h"
#include "core/operations.h"

namespace kvplane::blocks {

void bind_codes(pybind11::module_& module) {
  const struct {
    const char* name;
    Code code;
  } codes[] = {
      {"LATER", Code::kLater},
      {"NEVER", Code::kNever},
      {"LATER_HEADROOM", Code::kLaterHeadroom},
      {"LATER_QUOTA", Code::kLaterQuota},
      {"NEVER_QUOTA", Code::kNeverQuota},
      {"NOT_FOUND", Code::kNotFound},
      {"EXISTS", Code::kExists},
      {"BAD_ID", Code::kBadId},
      {"BUSY", Code::kBusy},
      {"SWAPPED", Code::kSwapped},
      {"POSITION", Code::kPosition},
      {"NEGATIVE", Code::kNegative},
      {"TOO_MANY_SEQUENCES", Code::kTooManySequences},
      {"NOT_KNOWN", Code::kNotKnown},
      {"OTHER_ADMISSION", Code::kOtherAdmission},
      {"TOO_LONG", Code::kTooLong},
      {"TRIMMED", Code::kTrimmed},
      {"OTHER_TOKENS", Code::kOtherTokens},
      {"BEYOND_SLOTS", Code::kBeyondSlots},
      {"TOO_MANY_ENTRIES", Code::kTooManyEntries},
      {"TOO_MANY_PINNED", Code::kTooManyPinned},
      {"CHECKPOINT", Code::kCheckpoint},
  };
  const struct {
    const char* name;
    FamilyChange change;
  } changes[] = {
      {"FAMILY_STARTED", FamilyChange::kStarted},
      {"FAMILY_LEFT_DEVICE", FamilyChange::kLeftDevice},
      {"FAMILY_ENDED", FamilyChange::kEnded},
      {"FAMILY_ENDED_ON_HOST", FamilyChange::kEndedOnHost},
  };
  for (const auto& [name, change] : changes) module.attr(name) = static_cast<int>(change);
  for (const auto& [name, code] : codes) module.attr(name) = static_cast<int>(code);
}

}  // namespace kvplane::blocks
