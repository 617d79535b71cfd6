// Names for the items of rows, of those of the kernels and those that Python has. Host and device, no torch. Written by
// csrc/make_headers.py from python/nanwatch/; `make lint` checks that it is not stale.
// clang-format off
#pragma once

#include <cstdint>

namespace nanwatch {

// A row of the health operator. A range is its first kRangeColumns; a row from a device has all of them.
namespace column {
enum Item : int { abs_min, abs_max, isfinite, finite_abs_min, finite_abs_max, num_nan, num_posinf, num_neginf, num_zero, num_subnormal, first_nonfinite, is_mask };
}  // namespace column

constexpr int kRangeColumns = column::isfinite + 1;
constexpr int kHealthColumns = column::first_nonfinite + 1;
constexpr int kDeviceColumns = column::is_mask + 1;

// A record as a Python tuple.
namespace record_item {
enum Item : int { label, role, shape, dtype, abs_min, abs_max, isfinite, health, note, fingerprint };
}  // namespace record_item

constexpr int kRecordItems = record_item::fingerprint + 1;

enum class Role : uint8_t { weight, buffer, input, output, gradient };
inline constexpr const char* kRoles[] = {"weight", "buffer", "input", "output", "gradient"};

enum class Phase : uint8_t { forward, backward, step, save };
inline constexpr const char* kPhases[] = {"forward", "backward", "step", "save"};

// A note as a Python tuple.
namespace note_item {
enum Item : int { kind, text, placement };
}  // namespace note_item

constexpr int kNoteItems = note_item::placement + 1;

enum class NoteKind : uint8_t { none, absent, not_a_tensor, not_checked, local_shard, mask, allowed, absorbed, skipped_step, not_taken, spike, forecast };
inline constexpr const char* kNoteKinds[] = {"", "absent", "not_a_tensor", "not_checked", "local_shard", "mask", "allowed", "absorbed", "skipped_step", "not_taken", "spike", "forecast"};
// These say that a non-finite value is meant.
inline constexpr NoteKind kExcuses[] = {NoteKind::mask, NoteKind::allowed, NoteKind::absorbed, NoteKind::skipped_step, NoteKind::not_taken};

}  // namespace nanwatch
