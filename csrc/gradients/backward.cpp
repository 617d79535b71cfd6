#include "gradients/backward.h"

#include <cmath>
#include <utility>

namespace nanwatch {

Backward::~Backward() {
  for (PyObject* const row : python_rows) Py_DECREF(row);
}

bool Backward::came(const GradientState& state, const Place& place) const {
  return !events.empty() && latest_place_ == place && latest_ == state;
}

const GradientEvent* Backward::find(const at::Tensor& gradient, const GradientState& state, const Place& place) const {
  if (!state.has_version) return nullptr;
  if (came(state, place)) return &events.back();
  if (!state.is_plain || !is_alone) return nullptr;
  const int64_t number = recent.find(gradient, state, shapes);
  return number < 0 ? nullptr : &events[size_t(number)];
}

void Backward::add(const std::vector<GradientUser>& users, const GradientState& state, const Place& place,
                   const GradientEvent& known) {
  if (!came(state, place)) ++arrivals;
  latest_place_ = place;
  latest_ = state;
  is_bad |= known.is_bad;
  for (const GradientUser& user : users) {
    if (user.part == Part::output) user.call->task = task;
    events.push_back({user, arrivals, known.is_bad, known.row, known.late});
  }
}

void Backward::add_read(const std::vector<GradientUser>& users, const at::Tensor& gradient, const GradientState& state,
                        const Place& place, RowData row, Finite finite, LatePtr late) {
  ++tensors_read;
  if (row.python != nullptr) python_rows.push_back(row.python);
  // What is not finite is read anew at each place. What came to a leaf came to no other place in five models, and
  // would take the room of what does.
  const bool is_kept =
      (finite == Finite::yes || late != nullptr) && state.is_plain && state.has_version && !place.is_leaf;
  row.shape_at = uint32_t(shapes.size());
  if (is_kept || row.python == nullptr) {
    const at::IntArrayRef sizes = gradient.sizes();
    shapes.insert(shapes.end(), sizes.begin(), sizes.end());
  }
  if (is_kept) recent.keep(gradient, state, row.shape_at, int64_t(events.size()));
  add(users, state, place, {{}, 0, finite == Finite::no, row, std::move(late)});
}

std::vector<LatePtr> Backward::awaited() const {
  std::vector<LatePtr> rows;
  for (const GradientEvent& event : events)
    if (event.late != nullptr && !event.late->arrive()) rows.push_back(event.late);
  for (const auto& [again, known] : late_checks)
    if (!again->arrive()) rows.push_back(again);
  return rows;
}

void Backward::take_late() {
  for (GradientEvent& event : events) {
    if (event.late == nullptr || event.late->state != LateRow::State::arrived) continue;
    event.row.range = event.late->range;
    event.is_bad = !event.row.range.isfinite;
    is_bad |= event.is_bad;
  }
  for (LateTerm& one : late_terms) {
    const bool is_known = one.late->state == LateRow::State::arrived && std::isfinite(one.late->range.abs_max);
    one.term.largest = is_known ? one.late->range.abs_max : 0;
  }
}

}  // namespace nanwatch
