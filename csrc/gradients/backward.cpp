#include "gradients/backward.h"

#include <algorithm>
#include <utility>

namespace nanwatch {

// ---- RecentGradients ------------------------------------------------------------------------------------------------

size_t RecentGradients::place_of(const at::TensorImpl* tensor) const {
  return size_t(std::find(tensors_.begin(), tensors_.end(), tensor) - tensors_.begin());
}

int64_t RecentGradients::find(const at::Tensor& x, const GradientState& state) const {
  const size_t at = place_of(state.tensor);
  return at < kKept && kept_[at].state == state && x.sizes() == kept_[at].sizes ? kept_[at].number : -1;
}

void RecentGradients::keep(const at::Tensor& x, const GradientState& state, int64_t number) {
  size_t at = place_of(state.tensor);  // of its own, where it was written into since
  if (at == kKept) at = next_++ % kKept;
  tensors_[at] = state.tensor;
  Kept& kept = kept_[at];
  kept.tensor = x.getIntrusivePtr();
  kept.storage = state.tensor->unsafe_storage().getWeakStorageImpl();
  kept.state = state;
  kept.sizes.assign(x.sizes().begin(), x.sizes().end());
  kept.number = number;
}

void RecentGradients::clear() {
  tensors_.fill(nullptr);
  kept_.fill({});
}

// ---- Backward -------------------------------------------------------------------------------------------------------

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
  const int64_t number = recent.find(gradient, state);
  return number < 0 ? nullptr : &events[size_t(number)];
}

void Backward::add(const std::vector<GradientUser>& users, const GradientState& state, const Place& place,
                   const GradientEvent& known) {
  if (!came(state, place)) ++arrivals;
  latest_place_ = place;
  latest_ = state;
  has_nonfinite |= known.has_nonfinite;
  for (const GradientUser& user : users) {
    if (user.part == Part::output) user.call->task = task;
    events.push_back({user, arrivals, known.has_nonfinite, known.row, known.pending});
  }
}

void Backward::add_read(const std::vector<GradientUser>& users, const at::Tensor& gradient, const GradientState& state,
                        const Place& place, RecordData row, Finite finite, PendingRowPtr pending) {
  ++tensors_read;
  if (row.python != nullptr) python_rows.push_back(row.python);
  // Non-finite gradients are read anew at each place. A gradient of a leaf came to no other place in five models, and
  // would take the room of one that does.
  const bool is_kept =
      (finite == Finite::yes || pending != nullptr) && state.is_plain && state.has_version && !place.is_leaf;
  row.shape_at = uint32_t(shapes.size());
  if (row.python == nullptr) shapes.insert(shapes.end(), gradient.sizes().begin(), gradient.sizes().end());
  if (is_kept) recent.keep(gradient, state, int64_t(events.size()));
  add(users, state, place, {{}, 0, finite == Finite::no, row, std::move(pending)});
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
