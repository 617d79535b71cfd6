// Names for the columns of rows, for those of the kernels and those that Python has. Host and device, no torch.
#pragma once

namespace nanwatch {

// A row of the health operator. A range is its first kRangeColumns; a row from a device has all of them.
namespace column {
enum Column : int {
  abs_min,
  abs_max,
  isfinite,
  finite_abs_min,
  finite_abs_max,
  num_nan,
  num_posinf,
  num_neginf,
  num_zero,
  num_subnormal,
  first_nonfinite,
  is_mask,  // only in rows from a device
};
}  // namespace column

constexpr int kRangeColumns = column::isfinite + 1;
constexpr int kHealthColumns = column::first_nonfinite + 1;
constexpr int kDeviceColumns = column::is_mask + 1;

// A row of a frame as a Python tuple; python/nanwatch/records/record.py has the same order.
namespace row_item {
enum RowItem : int { label, role, shape, dtype, abs_min, abs_max, isfinite, health, note, fingerprint, statistics };
}  // namespace row_item

constexpr int kRowItems = row_item::statistics + 1;

}  // namespace nanwatch
