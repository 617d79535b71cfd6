#include "gradients/backward.h"

#include <utility>

namespace nanwatch {

void Backward::add(const std::vector<GradientUser>& users, const GradientPlace& place, const GradientEvent& known) {
  arrivals += !(place == latest_);
  latest_ = place;
  has_nonfinite |= known.has_nonfinite;
  for (const GradientUser& user : users) {
    if (user.part == Part::output) user.call->task = task;
    events.push_back({user, arrivals, known.has_nonfinite, known.row, known.pending});
  }
}

void Backward::add_read(const std::vector<GradientUser>& users, const at::Tensor& gradient, const GradientPlace& place,
                        GradientEvent read) {
  ++tensors_read;
  read.row.shape_at = uint32_t(shapes.size());
  if (read.row.python != nullptr) {
    python_rows.push_back(pybind11::reinterpret_steal<pybind11::object>(read.row.python));
  } else {
    shapes.insert(shapes.end(), gradient.sizes().begin(), gradient.sizes().end());
  }
  add(users, place, read);
}

std::vector<PendingRowPtr> Backward::pending_rows() const {
  std::vector<PendingRowPtr> rows;
  for (const GradientEvent& event : events)
    if (event.pending != nullptr && !event.pending->poll()) rows.push_back(event.pending);
  return rows;
}

void Backward::take_completed() {
  for (GradientEvent& event : events) {
    if (event.pending == nullptr || event.pending->state != PendingRow::State::completed) continue;
    event.row.range = event.pending->range;
    event.has_nonfinite = !event.row.range.isfinite;
    has_nonfinite |= event.has_nonfinite;
  }
}

}  // namespace nanwatch
