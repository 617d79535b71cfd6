// Templates of CallObserver that decide whether a tensor has to be read, or is unchanged since it was last read. They
// serve reads on the host and on a device. The two differ in what a row is (RangeRow, PendingRowPtr), and each is a
// reader:
//
//   Row read()                             reads the tensor
//   int64_t bytes()                        how many that takes
//   bool is_urgent                         whether it is read whatever the budget says
//   bool is_refused                        set where the budget has no room for it and nothing is known of it
//   bool knows(const CacheEntry& entry)     whether the entry has a row for it
//   Row hit(const CacheEntry& entry)        that row
//   bool keeps(const Row& row)             whether to remember it
#pragma once

#include "recorder/call_observer.h"

namespace nanwatch {

// A weight that nothing has changed since is read again after so many batches.
constexpr uint32_t kAge = 64;

template <typename Row, typename Reader>
Row CallObserver::weight_range(const at::Tensor& x, int64_t batch, bool moves, Node::Slot* slot, Reader& reader) {
  const Content content(x, epoch_);
  find_entry(content.key, slot);
  const CacheEntry& known = slot->cached->entry;
  const bool unchanged = known.content.has_same_version(content);
  const bool is_known = unchanged && known.content.epoch == epoch_ && reader.knows(known) && !moves;
  if (is_known && uint32_t(batch) - known.batch < kAge) [[likely]]
    return reader.hit(known);
  if (!budget_.spend(reader.bytes(), !is_known, &slot->cached->turn) && !reader.is_urgent) {
    if (is_known) return reader.hit(known);
    reader.is_refused = true;
    return Row();
  }
  // While the lock is released for the read, another thread may drop the slot's entry, or the slot.
  const std::shared_ptr<WeightEntry> cached = slot->cached;
  const Row row = reader.read();
  if (reader.keeps(row)) {
    // Each weight starts at another age, so that no batch comes in which all are read again.
    const int64_t age = unchanged ? 0 : first_entries_++ % kAge;
    cached->take(x, content, row, batch - age);
  } else {
    cached->entry.forget();  // a non-finite tensor is examined each time
  }
  return row;
}

template <typename Row, typename Reader>
Row CallObserver::range_of(PyObject* object, int64_t batch, Memory memory, Node::Slot* slot, Reader& reader) {
  const at::Tensor& x = THPVariable_Unpack(object);
  ++counters.tensors;
  const bool has_version = can_be_remembered(x);
  if (!has_version && (memory == Memory::weight || memory == Memory::moving)) {
    find_entry(key_of(x), slot);
    if (budget_.spend(reader.bytes(), true, &slot->cached->turn)) return reader.read();
    reader.is_refused = true;
    return Row();
  }
  if (memory == Memory::none || !has_version) {
    budget_.earn(reader.bytes());
    return reader.read();
  }
  if (memory != Memory::activation) return weight_range<Row>(x, batch, memory == Memory::moving, slot, reader);
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) == ParameterClass) {
    // A weight handed around: torch.utils.swap_tensors refuses a parameter that has weak references.
    Node::Slot passing;
    return weight_range<Row>(x, batch, false, &passing, reader);
  }
  const Content content(x, epoch_);
  const CacheEntry* entry = activations_.find(content);
  if (entry != nullptr && entry->content.epoch == epoch_ && entry->batch == uint32_t(batch) && reader.knows(*entry))
    return reader.hit(*entry);
  budget_.earn(reader.bytes());
  const Row row = reader.read();
  if (reader.keeps(row)) activations_.remember(object, content, row, batch);
  return row;
}

// Fills the frame by make(). Where no device takes what the frame asks for, it is made anew without them.
template <typename Make>
bool CallObserver::fill_once(const Node& node, OpenFrame* frame, const Make& make) {
  if (!make()) return false;
  if (frame->pending.empty()) return true;
  if (const int error = table_->send(&frame->pending)) {
    const bool for_good = RowTable::backend()->cannot_run(error) != 0;
    frame->start_over();
    devices_off_ = true;
    const bool done = make();
    devices_off_ = for_good;
    return done;
  }
  return complete(node, frame);
}

template <typename Make>
bool CallObserver::fill_frame(const Node& node, OpenFrame* frame, const Make& make) {
  bool done = fill_once(node, frame, make);
  if (done && frame->has_nonfinite) {
    // Read every tensor of a non-finite call again: memory behind a cached range may have changed unseen.
    frame->start_over();
    frame->reads_all = true;
    done = fill_once(node, frame, make);
    frame->reads_all = false;
  }
  return done;
}

}  // namespace nanwatch
